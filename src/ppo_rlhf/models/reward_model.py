"""Reward models: a scalar head on the backbone of any causal language model, and the scores of whole sequences.

transformers has sequence classifiers for some architectures only (none for BitNet). transformers' classifiers score at
the last token that is not the pad token, which is one position too early if pad token and end of text are the same
token. `CausalLMRewardModel` scores at the last position of the attention mask, in left- and right-padded batches. The
head of a `CausalLMRewardModel` has a bias, so that a normalisation of the scores can be folded into the weights. A
`CausalLMRewardModel` is saved as transformers' classifier if that classifier computes the same scores
(`to_classifier`). `sequence_scores` gives a sequence the same score in a batch as alone, for `CausalLMRewardModel` and
transformers' classifiers.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from ppo_rlhf.core.errors import ModelError, in_one_line
from ppo_rlhf.passes.capabilities import (
    PROBE_ERRORS,
    are_close,
    argument_of,
    pad_id_of,
    probe_ids,
    probed_once,
    probing,
)
from ppo_rlhf.passes.forward import backbone_of, hidden_states_at, packs, width_of_states
from ppo_rlhf.passes.prefixes import shared_prefix
from ppo_rlhf.passes.token_rows import TokenRows, few_shapes_are_faster, right_padded

log = logging.getLogger(__name__)

MODEL_TYPE = "causal_lm_reward"
SCORE_MEAN = "score_mean"
"""A field in the configuration of transformers' classifier that `CausalLMRewardModel.to_classifier` returns: the
classifier's scores minus the scores of the `CausalLMRewardModel`."""


class CausalLMRewardConfig(PretrainedConfig):
    """Configuration of `CausalLMRewardModel`: the language model's own configuration under `text_config`."""

    model_type = MODEL_TYPE
    sub_configs: ClassVar[dict[str, Any]] = {"text_config": AutoConfig}

    def __init__(self, text_config: PretrainedConfig | dict[str, Any] | None = None, **kwargs: Any) -> None:
        if isinstance(text_config, dict):
            text_config = AutoConfig.for_model(**text_config)
        self.text_config = text_config if text_config is not None else AutoConfig.for_model("gpt2")
        # Clear the name, because the saved configuration would contain the path of a folder of this machine
        self.text_config.name_or_path = ""
        # With "regression", transformers' pipelines return the score itself instead of its sigmoid
        kwargs = {"num_labels": 1, "problem_type": "regression", **kwargs}
        super().__init__(**kwargs)

    def get_text_config(self, *args: Any, **kwargs: Any) -> PretrainedConfig:
        """Return the configuration of the text model, which a model that also reads images nests one level deeper."""
        return self.text_config.get_text_config(*args, **kwargs)


class CausalLMRewardModel(PreTrainedModel):
    """Score of a whole sequence: a linear head on the backbone's hidden state at the last real token.

    `model.base_model` is the backbone, `model.score` the head (weight `[1, hidden]`, bias `[1]`).
    """

    config_class = CausalLMRewardConfig
    base_model_prefix = "backbone"
    supports_gradient_checkpointing = True
    # Declare support for every attention, because the backbone's own configuration checks which attention it supports
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: CausalLMRewardConfig) -> None:
        super().__init__(config)
        # AutoModelForCausalLM instead of AutoModel, to support every architecture that has a causal LM.
        self.backbone = AutoModelForCausalLM.from_config(config.text_config).base_model
        self.score = nn.Linear(width_of_states(config), 1)
        self._takes_positions = argument_of(self.backbone, "position_ids") is not None
        self.post_init()

    @classmethod
    def from_causal_lm(cls, model: PreTrainedModel) -> CausalLMRewardModel:
        """Return a reward model with a copy of the language model's backbone and a fresh head.

        The weights of the head are drawn from torch's global random number generator, which the caller must seed.
        """
        reward_model = cls(CausalLMRewardConfig(text_config=copy.deepcopy(model.config)))
        reward_model.backbone.load_state_dict(model.base_model.state_dict())
        return reward_model.to(dtype=model.dtype, device=model.device).eval()  # type: ignore[call-arg]

    @classmethod
    def from_parts(cls, backbone: PreTrainedModel, score: nn.Linear) -> CausalLMRewardModel:
        """Return a model that shares the weights of a backbone and a head. Critics are stored in this form."""
        with torch.device("meta"):
            model = cls(CausalLMRewardConfig(text_config=copy.deepcopy(backbone.config)))
        model.backbone, model.score = backbone, score
        return model.eval()

    def to_classifier(self, pad_id: int, eos_id: int | None) -> PreTrainedModel:
        """Return a sequence classifier of transformers that shares this model's weights and that any program can load.

        The classifier's head has no bias. The classifier's scores minus this model's scores are recorded as
        `score_mean` in the classifier's configuration.

        Raises:
            ModelError: No classifier computes the same scores with this pad id and this end of text; the message has
                the reason.
        """
        config = copy.deepcopy(self.config.text_config)
        config.get_text_config().pad_token_id = pad_id
        # With "regression", transformers' pipelines return the score itself instead of its sigmoid
        config.num_labels, config.problem_type = 1, "regression"
        setattr(config, SCORE_MEAN, -self.score.bias.item())
        if pad_id == eos_id:
            raise ModelError("its pad token is its end of text, and transformers' classifiers score before that")
        if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
            raise ModelError(f"transformers has no sequence classifier of the kind {config.model_type}")
        kind: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
        words = [token for token in probe_ids(self, 6).tolist() if token not in (pad_id, eos_id)]
        ends = pad_id, words[-1] if eos_id is None else eos_id
        ids = torch.tensor([[*words[:3], end] for end in ends], device=self.device)
        try:
            with torch.device("meta"):
                model = kind(config).eval()
            same = type(model.base_model) is type(self.backbone) and model.score.bias is None
            setattr(model, model.base_model_prefix, self.backbone)
            model.score.weight = self.score.weight
            with probing(self):
                expected = self(ids, (ids != pad_id).long()).logits - self.score.bias
                same &= are_close(model(ids, attention_mask=(ids != pad_id).long()).logits, expected)
        except PROBE_ERRORS as error:
            raise ModelError(f"{kind.__name__} does not fit: {in_one_line(error)}") from error
        if not same:
            raise ModelError(f"{kind.__name__} computes other scores")
        return cast("PreTrainedModel", model)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None, **kwargs: Any
    ) -> SequenceClassifierOutput:
        """Return `.logits` [B, 1]: the scores of sequences [B, S] that are padded on either side.

        `attention_mask` [B, S] None: all tokens are real. `position_ids` [B, S] None: the real tokens of each row are
        numbered from 0. `return_dict` and `labels` are ignored; all further arguments are passed on to the backbone.
        """
        kwargs = {name: value for name, value in kwargs.items() if name not in ("return_dict", "labels")}
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        if self._takes_positions:
            if position_ids is None:
                position_ids = (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)
            kwargs["position_ids"] = position_ids
        hidden_BSH = self.backbone(input_ids, attention_mask=attention_mask, **kwargs).last_hidden_state
        columns_S = torch.arange(input_ids.shape[1], device=input_ids.device)
        last_B = torch.where(attention_mask.bool(), columns_S, 0).amax(dim=-1)
        # Select the last token's hidden state before the head, so that padding, NaN included, never enters the score.
        last_hidden_BH = hidden_BSH[torch.arange(len(input_ids), device=input_ids.device), last_B]
        return SequenceClassifierOutput(logits=self.score(last_hidden_BH.to(self.score.weight.dtype)))

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return False, because transformers does not initialise some buffers of models of custom code when loading."""
        return False

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise the head: standard deviation 1/sqrt(d+1) as in Stiennon et al. 2020 (arXiv:2009.01325)."""
        if module is self.score:
            init.normal_(module.weight, mean=0.0, std=(module.in_features + 1) ** -0.5)
            init.zeros_(module.bias)


def with_mean(model: PreTrainedModel) -> PreTrainedModel:
    """Convert a classifier that `to_classifier` made back into a `CausalLMRewardModel`; return other models unchanged.

    The head of the returned model has the bias −`score_mean`, so that the returned model gives the same scores as the
    `CausalLMRewardModel` from which `to_classifier` made the classifier.
    """
    mean, score = getattr(model.config, SCORE_MEAN, None), cast(nn.Linear, getattr(model, "score", None))
    if mean is None:
        return model
    if not isinstance(mean, int | float):
        raise ModelError(f"{model.name_or_path}: config.json has {SCORE_MEAN}={mean!r:.60}, which must be a number.")
    head = nn.Linear(score.in_features, 1).to(score.weight)
    head.weight = score.weight
    nn.init.constant_(head.bias, -mean)
    return CausalLMRewardModel.from_parts(cast("PreTrainedModel", model.base_model), head)


def why_no_reward_model(architecture: str | None, config: PretrainedConfig) -> str | None:
    """Return why a class name and a configuration are not a classifier with one label; None if they are."""
    classifiers = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values()
    if isinstance(architecture, str) and hasattr(transformers, architecture) and architecture not in classifiers:
        return f"this is a {architecture}"
    return None if config.num_labels == 1 else f"this model has {config.num_labels}"


def sequence_scores(model: PreTrainedModel, sequences: Sequence[Sequence[int]], pad_id: int) -> Tensor:
    """Return the scores `[B]` of B sequences of token ids.

    A `CausalLMRewardModel` scores packed sequences (`scores_packed`), and computes their common beginning once. Other
    classifiers score a padded batch; if padding changes a classifier's scores or the classifier has no pad id, it
    scores one sequence at a time. A padded batch is padded with the pad id of the model's configuration, by which
    transformers' classifiers find the last token, or with `pad_id` if the configuration has no pad id.
    """
    config_pad_id = pad_id_of(model.config)
    if scores_packed(model):
        fill, prefix = few_shapes_are_faster(model.device, model.dtype), shared_prefix(sequences)
        rows = right_padded(sequences, pad_id, prefix=prefix, fill=fill).to(model.device)
        last = rows.places().gather(1, rows.attention_mask.sum(-1, keepdim=True) - 1)[:, 0]
        return cast("CausalLMRewardModel", model).score(hidden_states_at(backbone_of(model), rows, last))[:, 0]
    rows = right_padded(sequences, pad_id if config_pad_id is None else config_pad_id).to(model.device)
    has_pad = config_pad_id is not None or isinstance(model, CausalLMRewardModel)
    return _padded_scores(model, rows) if has_pad and _ignores_padding(model) else _scores_one_by_one(model, rows)


def scores_packed(model: PreTrainedModel) -> bool:
    """Return whether a reward model scores packed sequences: its class and its backbone can."""
    return isinstance(model, CausalLMRewardModel) and packs(backbone_of(model))


@torch.no_grad()
def reads_end(model: PreTrainedModel, eos: int | None) -> bool:
    """Return whether an end-of-text token after a sequence changes the sequence's score.

    An end of text that is also the pad id changes no score of transformers' classifiers, which skip their pad id.
    """
    if eos is None or pad_id_of(model.config) != eos:
        return True
    ids = [index for index in probe_ids(model, 4).tolist() if index != eos]
    return not are_close(*sequence_scores(model, [ids, [*ids, eos]], eos))


@probed_once
def _ignores_padding(model: PreTrainedModel) -> bool:
    """Return whether a model gives sequences the same scores in a padded batch as one by one."""
    try:
        with probing(model):
            pad_id = pad_id_of(model.config) or 0
            rows = right_padded([probe_ids(model, 5).tolist(), probe_ids(model, 3).tolist()], pad_id).to(model.device)
            same = are_close(_padded_scores(model, rows), _scores_one_by_one(model, rows))
    # An encoder-decoder model fails the probe, because it needs an end-of-text token that the probe's sequences lack
    except PROBE_ERRORS:
        return True
    if not same:
        log.info("%s: padding changes its scores, so it scores one sequence at a time.", type(model).__name__)
    return same


def _padded_scores(model: PreTrainedModel, rows: TokenRows) -> Tensor:
    # Pass no position_ids: with padding on the right, every model computes correct positions itself.
    return model(input_ids=rows.input_ids, attention_mask=rows.attention_mask).logits[:, 0]


def _scores_one_by_one(model: PreTrainedModel, rows: TokenRows) -> Tensor:
    sequences = rows.packed_ids[0].split(rows.attention_mask.sum(-1).tolist())
    return torch.cat([model(input_ids=ids[None]).logits[:, 0] for ids in sequences])


AutoConfig.register(MODEL_TYPE, CausalLMRewardConfig, exist_ok=True)
AutoModelForSequenceClassification.register(CausalLMRewardConfig, CausalLMRewardModel, exist_ok=True)
