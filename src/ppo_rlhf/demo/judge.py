"""The gold judge of the demo: deterministic code that scores reviews and accepts any text.

The judge reads prompt + completion and judges the sentences of the completion. A sentence that begins in the prompt and
ends in the completion is judged as a whole; the header is never judged. With S the judged sentences and W the tokens of
the judged sentences,

    gold = sentiment(W) - ungrammatical(S) - 0.5 unfinished - 0.5 repeated_trigrams(W) - 0.5 repeated_valence(W)
           + 0.2 mentions_aspect(W)

- sentiment, in (-1, 1): the sum of the values of all words with sentiment divided by (their number + 0.5), so that one
  flattering word scores less than three. A value is +-1 or +-0.6 (lexicon). An intensifier ("very") before the word
  multiplies the value by 1.25 (to at most 1); a softener ("slightly") multiplies it by 0.5. A negation ("not", "never",
  "no") up to three tokens before the word, in the same clause, multiplies the value by -0.75, or by -1 if "at all"
  follows: "not good" is -0.45, "not bad at all" is +0.6.
- ungrammatical, in [0, 1]: the share of the sentences that are not in the grammar. A last sentence without a full stop
  counts as grammatical if a sentence of the grammar begins with it.
- unfinished, 0 or 1: the text does not end in a full stop.
- repeated_trigrams, repeated_valence, in [0, 1]: the share of the trigrams, and of the words with sentiment, that
  have occurred before.
- mentions_aspect, 0 or 1: W contains the word of the column `aspect`, or the header's aspect without this column.

A completion without tokens scores -1.5. The policy and the reward model never see these scores, only labels that
`supervised.preferences.noisy_preference` draws.
"""

from collections.abc import Sequence

from ppo_rlhf.demo.grammar import END, header_length, is_sentence, is_sentence_start, tokenize
from ppo_rlhf.demo.lexicon import VALENCE, WORDS

EMPTY_SCORE = -1.5
PRIOR_COUNT = 0.5
ASPECT_BONUS = 0.2
UNFINISHED_PENALTY = TRIGRAM_PENALTY = VALENCE_PENALTY = 0.5
NEGATED, NEGATED_STRONGLY = -0.75, -1.0
INTENSIFIED, SOFTENED = 1.25, 0.5

_NEGATORS = frozenset({"not", "never", "no"})
_NEGATION_REACH = 3  # a negation affects this many tokens after it
_BOUNDARIES = frozenset({".", ",", "but", "yet", "and", "although", "while"})


def sentiment_values(tokens: Sequence[str]) -> list[float]:
    """Return the value in [-1, 1] of each word with sentiment, in order, after negation, intensifier and softener."""
    values = []
    negated_at = -_NEGATION_REACH - 1
    for i, word in enumerate(tokens):
        if word in _BOUNDARIES:
            negated_at = -_NEGATION_REACH - 1
        elif word in _NEGATORS:
            negated_at = i
        elif word in VALENCE:
            before = tokens[i - 1] if i else ""
            scale = 1.0
            if before in WORDS["VERY"]:
                scale = INTENSIFIED
            elif before in WORDS["RATHER"]:
                scale = SOFTENED
            value = max(-1.0, min(1.0, VALENCE[word] * scale))
            if i - negated_at <= _NEGATION_REACH:
                value *= NEGATED_STRONGLY if list(tokens[i + 1 : i + 3]) == ["at", "all"] else NEGATED
            values.append(value)
    return values


def sentiment(tokens: Sequence[str]) -> float:
    """Return the sum of the values divided by (their number + 0.5), in (-1, 1); 0 without a word with sentiment."""
    values = sentiment_values(tokens)
    return sum(values) / (len(values) + PRIOR_COUNT)


def _repeated_share(items: Sequence[object]) -> float:
    return 1.0 - len(set(items)) / len(items) if items else 0.0


def _read(prompt: str, completion: str, aspect: object) -> tuple[list[list[str]], list[str], str]:
    """Return the sentences that contain tokens of the completion, the tokens of these sentences, and the aspect.

    Only the last sentence may lack a full stop. A completion without tokens gives no sentences.
    """
    before, after = tokenize(prompt), tokenize(completion)
    if not after:
        return [], [], ""
    tokens = before + after
    body = header_length(tokens)
    if aspect is None and body:
        aspect = tokens[3]
    # The judge reads whole sentences: the first judged sentence starts after the last full stop of the prompt
    start = max(body, max((i + 1 for i, token in enumerate(before) if token == END), default=0))
    tokens = tokens[start:]
    sentences: list[list[str]] = [[]]
    for token in tokens:
        sentences[-1].append(token)
        if token == END:
            sentences.append([])
    return [s for s in sentences if s], tokens, "" if aspect is None else str(aspect).strip().lower()


def _is_well_formed(sentence: Sequence[str]) -> bool:
    return is_sentence(sentence) if sentence[-1] == END else is_sentence_start(sentence)


def _score(sentences: list[list[str]], tokens: list[str], aspect: str) -> float:
    if not sentences:
        return EMPTY_SCORE
    wrong = sum(not _is_well_formed(sentence) for sentence in sentences) / len(sentences)
    trigrams = list(zip(tokens, tokens[1:], tokens[2:], strict=False))
    score = sentiment(tokens) - wrong
    if tokens[-1] != END:
        score -= UNFINISHED_PENALTY
    score -= TRIGRAM_PENALTY * _repeated_share(trigrams)
    score -= VALENCE_PENALTY * _repeated_share([token for token in tokens if token in VALENCE])
    if aspect in tokens:
        score += ASPECT_BONUS
    return score


def gold_score(prompts: Sequence[str], completions: Sequence[str], **columns: Sequence[object]) -> list[float]:
    """Return the score of each response, about -2.5 to 1.2; the module's docstring has the formula.

    Args:
        prompts: The texts that the responses continue.
        completions: The generated texts, without the end-of-text token.
        columns: `aspect` has the word that each response should mention; other columns are ignored.
    """
    aspects = columns.get("aspect", [None] * len(prompts))
    return [_score(*_read(*row)) for row in zip(prompts, completions, aspects, strict=True)]


def is_grammatical(prompts: Sequence[str], completions: Sequence[str], **columns: Sequence[object]) -> list[float]:
    """Return 1.0 for each response with a finished sentence and no ungrammatical sentence, else 0.0.

    A last sentence without a full stop is grammatical if a sentence of the grammar begins with it.
    """
    read = [_read(prompt, completion, None) for prompt, completion in zip(prompts, completions, strict=True)]
    return [float(END in tokens and all(map(_is_well_formed, sentences))) for sentences, tokens, _ in read]
