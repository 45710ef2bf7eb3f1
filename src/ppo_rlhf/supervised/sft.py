"""Supervised fine-tuning of a language model on demonstrations, or training of a small model from scratch."""

import logging
from dataclasses import asdict, dataclass, fields
from typing import Annotated

import pandas as pd
import torch
import transformers
from pydantic import Field
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf.checkpoints.model_card import render_sft_card
from ppo_rlhf.config.parameter_groups import parameter_group
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.data.plain_texts import name_plain_texts
from ppo_rlhf.data.tables import origins_of_frame
from ppo_rlhf.models.context_length import context_length
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.origins import START
from ppo_rlhf.models.tokenizers import templates_of, train_word_tokenizer
from ppo_rlhf.models.trained_model import TrainedModel
from ppo_rlhf.runtime import processes
from ppo_rlhf.runtime.progress_display import Lines
from ppo_rlhf.supervised.demonstrations import (
    IGNORED,
    PARTS,
    TokenisedDemonstrations,
    corpus_texts,
    describe_learnt,
    tokenise_demonstrations,
    training_template,
)
from ppo_rlhf.supervised.optimisation import History, OptimisationConfig, Watch, advice

logger = logging.getLogger(__name__)

Size = Annotated[int, Field(ge=1)]


@parameter_group("supervised_finetuning.from_scratch")
class FromScratchConfig:
    """Sizes of a small Llama that is trained on the demonstrations alone, with a tokenizer of their words."""

    hidden_size: Size
    """Width of the hidden states. It is an even multiple of num_attention_heads."""
    intermediate_size: Size
    """Width of each feed-forward network's hidden layer."""
    num_hidden_layers: Size
    """Transformer layers."""
    num_attention_heads: Size
    """Attention heads per layer."""
    max_position_embeddings: Size
    """Context length in tokens. Prompt and response count together."""

    def __post_init__(self) -> None:
        # Rotary position embeddings (RoPE) rotate pairs of a head's dimensions, so each head needs an even width
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ConfigError(
                f"supervised_finetuning.from_scratch.hidden_size={self.hidden_size} is not an even multiple of "
                f"num_attention_heads={self.num_attention_heads}"
            )


NO_BASE_MODEL = "base_model_path (or, for a small model of your own sizes, supervised_finetuning.from_scratch)"
TWO_STARTS = (
    "supervised_finetuning.from_scratch: there is a base model, so nothing is trained from scratch; set "
    "supervised_finetuning.from_scratch to null, or leave base_model_path null"
)


@parameter_group(
    "supervised_finetuning",
    lives_elsewhere={
        each.name: f"it is supervised_finetuning.from_scratch.{each.name}" for each in fields(FromScratchConfig)
    },
)
@dataclass(frozen=True, kw_only=True)
class SupervisedFinetuningConfig(OptimisationConfig):
    """Settings for training the SFT policy."""

    from_scratch: FromScratchConfig | None = None
    """Train a small Llama of these sizes from random weights instead of a base model. The demo and test environments
    do."""
    assistant_only_loss: bool | None = None
    """Learn only the assistant's turns of chats; None: if the chat template, or TRL's training template for it, marks
    them. Such a template has `{% generation %}`; with another, None learns whole chats."""


def train_sft_policy(
    base_model: PretrainedHandle | None,
    demonstrations: pd.DataFrame,
    evaluation_demonstrations: pd.DataFrame,
    config: SupervisedFinetuningConfig,
    watch: Watch | None = None,
) -> tuple[TrainedModel, History]:
    """Fine-tune the base model with TRL's SFTTrainer; both tables of demonstrations are from `split_demonstrations`.

    With `config.from_scratch` SFT starts from random weights, and a word-level tokenizer is trained on the
    demonstrations.

    Returns:
        The SFT policy with its tokenizer and model card, and its metrics by optimiser step: `sft/loss` (mean over the
        steps since the last logged loss), `sft/learning_rate`, and once per epoch `sft/eval_loss` (nats per learnt
        token over all held-out demonstrations).

    Raises:
        ConfigError: There is neither a base model nor `from_scratch`, or there are both.
    """
    if base_model is None:
        if config.from_scratch is None:
            raise ConfigError(f"supervised_finetuning: not set: {NO_BASE_MODEL}")
        model, tokenizer = _from_scratch(demonstrations, config.from_scratch, config.seed)
    elif config.from_scratch is not None:
        raise ConfigError(TWO_STARTS)
    else:
        model, tokenizer = base_model.causal_lm(), base_model.tokenizer()
    start = () if base_model is None else (base_model.origin(START),)
    made_from = (*start, *origins_of_frame(demonstrations))
    max_length = config.longest_sequence(context_length(model.config))
    template = None
    if "messages" in demonstrations and "prompt" not in demonstrations:
        template = training_template(tokenizer, config.assistant_only_loss)
        logger.info("%s", describe_learnt(template, config.assistant_only_loss))
    elif "messages" not in demonstrations:
        name_plain_texts("demonstrations", corpus_texts(demonstrations), tokenizer)
    trained, held_out = (
        tokenise_demonstrations(frame, tokenizer, max_length, name, template)
        for name, frame in zip(PARTS, (demonstrations, evaluation_demonstrations), strict=True)
    )

    def evaluate(model: PreTrainedModel) -> dict[str, float]:
        return {"eval_loss": mean_token_loss(model, held_out, config.per_device_train_batch_size)}

    for line in advice("supervised_finetuning", config, model.num_parameters()):
        logger.warning("%s", line)
    from ppo_rlhf.supervised import trl_support

    history = trl_support.run_sft_trainer(model, tokenizer, trained, config, evaluate=evaluate, watch=watch)
    losses = [entry["sft/eval_loss"] for entry in history if "sft/eval_loss" in entry]
    facts = {
        "Data": f"{len(trained.input_ids):,} demonstrations",
        "Training": f"cross entropy, {config.in_words('rows')}",
        "Loss": f"{losses[-1]:.3f} nats per token on {len(held_out.input_ids):,} held-out demonstrations",
    }
    base = None if base_model is None else base_model.source
    card = render_sft_card(base, facts, model, made_from, is_chat=bool(templates_of(tokenizer)))
    return TrainedModel(nn.Module.to(model, "cpu"), tokenizer, card=card, made_from=made_from), history


@torch.no_grad()
def mean_token_loss(model: PreTrainedModel, rows: TokenisedDemonstrations, batch_size: int) -> float:
    """Return the cross entropy in nats as the mean over all learnt tokens, not over batches.

    At least one token of `rows` must be learnt. Each process computes one shard of the rows. The model has TRL's fused
    head (`trl.trainer.utils.add_fused_lm_head`), which never materialises the logits of a whole batch.
    """
    order = sorted(range(len(rows.input_ids)), key=lambda row: len(rows.input_ids[row]))
    shard = [order[i] for i in processes.own_share(len(order))]
    total, count = 0.0, 0
    lines = Lines(0, len(shard), step="Held-out demonstration")
    for start in range(0, len(shard), batch_size):
        batch = shard[start : start + batch_size]
        ids, labels = ([torch.tensor(table[row]) for row in batch] for table in (rows.input_ids, rows.labels))
        mask = [torch.ones_like(row) for row in ids]
        padded = (pad_sequence(part, True, fill) for part, fill in ((ids, 0), (mask, 0), (labels, IGNORED)))
        input_ids, attention_mask, targets = (part.to(model.device) for part in padded)
        output = model(input_ids=input_ids, attention_mask=attention_mask, labels=targets, fused_lm_head=True)
        total -= float(output.log_probs.double().sum())
        count += int(output.label_mask.sum())
        lines.show(start + len(batch), {})
    sums = processes.from_all((total, count))
    return sum(loss for loss, _ in sums) / sum(tokens for _, tokens in sums)


def plan_from_scratch(
    demonstrations: pd.DataFrame, shape: FromScratchConfig
) -> tuple[transformers.LlamaConfig, PreTrainedTokenizerBase]:
    """Return the configuration and the tokenizer of the model that SFT trains from scratch on the demonstrations.

    Raises:
        DataError: The demonstrations are chats.
    """
    tokenizer = train_word_tokenizer(corpus_texts(demonstrations), shape.max_position_embeddings)
    architecture = transformers.LlamaConfig(
        **asdict(shape),
        vocab_size=len(tokenizer),
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    return architecture, tokenizer


def _from_scratch(
    demonstrations: pd.DataFrame, shape: FromScratchConfig, seed: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    architecture, tokenizer = plan_from_scratch(demonstrations, shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(architecture)
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    return model.eval(), tokenizer
