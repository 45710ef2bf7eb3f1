"""A log line about plain texts that a model with a chat template reads without the template."""

from collections.abc import Iterable
from contextlib import suppress
from itertools import islice

from transformers import PreTrainedTokenizerBase

from ppo_rlhf.core.errors import DataError
from ppo_rlhf.data.chats import apply_template
from ppo_rlhf.models.tokenizers import special_ids, templates_of
from ppo_rlhf.runtime.log_lines import say_once

_READ = 1_000  # so many texts are searched for special tokens


def name_plain_texts(
    what: str, texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, *, are_usual: bool = False
) -> None:
    """Log in one line that a tokenizer with a chat template reads these texts without the template.

    Texts with special tokens, as a template writes them, are not plain. The line says if only the template writes the
    beginning-of-text token. With `are_usual` plain texts are no mistake: the line is logged only for a missing
    beginning of text.
    """
    if not templates_of(tokenizer):
        return
    marks = [mark for mark in map(tokenizer.convert_ids_to_tokens, special_ids(tokenizer)) if isinstance(mark, str)]
    if all(any(mark in text for mark in marks) for text in islice(texts, _READ)):
        return
    is_unbegun = _only_template_begins(tokenizer)
    if are_usual and not is_unbegun:
        return
    begin = f" and without {tokenizer.bos_token}, which only the template writes" if is_unbegun else ""
    fix = "" if are_usual else " If the model is trained on chats, give messages in place of texts."
    say_once(f"The {what} are plain texts, which the model reads without its chat template{begin}.{fix}")


def _only_template_begins(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template begins with the beginning of text, and the tokenizer adds none to a text."""
    begin, text = tokenizer.bos_token, ""
    with suppress(DataError):
        text = apply_template([{"role": "user", "content": "?"}], tokenizer, "")
    return bool(begin) and text.startswith(str(begin)) and tokenizer("?")["input_ids"][:1] != [tokenizer.bos_token_id]
