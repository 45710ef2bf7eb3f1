"""A scalar reward head on the backbone of any causal language model.

transformers has sequence classifiers for some architectures only (none for BitNet), and they pool at the last id that
is not pad, which is one position early where pad and end of text are the same token. This model pools by length, from
the attention mask, on left- and right-padded batches. Its head has a bias, so that a normalisation of the scores can be
folded into the weights. It is saved as transformers' classifier where that computes the same (`to_classifier`).
"""

from __future__ import annotations

import copy
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
from ppo_rlhf.models.capabilities import PROBE_ERRORS, are_close, argument_of, probe_ids, probing
from ppo_rlhf.models.forward import width_of_states

MODEL_TYPE = "causal_lm_reward"
SCORE_MEAN = "score_mean"
"""In the configuration of transformers' classifier: what its scores lie above those of `CausalLMRewardModel`."""


class CausalLMRewardConfig(PretrainedConfig):
    """Configuration of `CausalLMRewardModel`: the language model's own configuration under `text_config`."""

    model_type = MODEL_TYPE
    sub_configs: ClassVar[dict[str, Any]] = {"text_config": AutoConfig}

    def __init__(self, text_config: PretrainedConfig | dict[str, Any] | None = None, **kwargs: Any) -> None:
        if isinstance(text_config, dict):
            text_config = AutoConfig.for_model(**text_config)
        self.text_config = text_config if text_config is not None else AutoConfig.for_model("gpt2")
        self.text_config.name_or_path = ""  # else the saved configuration names a folder of this machine
        kwargs = {"num_labels": 1, "problem_type": "regression", **kwargs}  # so that pipelines give the score itself
        super().__init__(**kwargs)

    def get_text_config(self, *args: Any, **kwargs: Any) -> PretrainedConfig:
        """Return the configuration of the text model; a model that also reads images nests it one level deeper."""
        return self.text_config.get_text_config(*args, **kwargs)


class CausalLMRewardModel(PreTrainedModel):
    """Score of a whole sequence: a linear head on the backbone's hidden state at the last real token.

    `model.base_model` is the backbone, `model.score` the head (weight `[1, hidden]`, bias `[1]`).
    """

    config_class = CausalLMRewardConfig
    base_model_prefix = "backbone"
    supports_gradient_checkpointing = True
    # the backbone is built with its own configuration and checks itself what it supports
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: CausalLMRewardConfig) -> None:
        super().__init__(config)
        # through the language model, not AutoModel: this works for every architecture that has a causal LM
        self.backbone = AutoModelForCausalLM.from_config(config.text_config).base_model
        self.score = nn.Linear(width_of_states(config), 1)
        self._takes_positions = argument_of(self.backbone, "position_ids") is not None
        self.post_init()

    @classmethod
    def from_causal_lm(cls, model: PreTrainedModel) -> CausalLMRewardModel:
        """Return a reward model with a copy of the language model's backbone and a fresh head.

        The head is drawn from torch's global generator: seed that before.
        """
        reward_model = cls(CausalLMRewardConfig(text_config=copy.deepcopy(model.config)))
        reward_model.backbone.load_state_dict(model.base_model.state_dict())
        return reward_model.to(dtype=model.dtype, device=model.device).eval()  # type: ignore[call-arg]

    @classmethod
    def from_parts(cls, backbone: PreTrainedModel, score: nn.Linear) -> CausalLMRewardModel:
        """Return a model over these very weights: a critic as it is stored, its value head as the score head."""
        with torch.device("meta"):
            model = cls(CausalLMRewardConfig(text_config=copy.deepcopy(backbone.config)))
        model.backbone, model.score = backbone, score
        return model.eval()

    def to_classifier(self, pad_id: int, eos_id: int | None) -> PreTrainedModel:
        """Return transformers' own classifier over these very weights, which any program can load.

        Its head has no bias: `score_mean` in its configuration is what its scores lie above those of this model.

        Raises:
            ModelError: No classifier has the same scores with the pad token and the end of text of these ids, and why.
        """
        config = copy.deepcopy(self.config.text_config)
        config.get_text_config().pad_token_id = pad_id
        config.num_labels, config.problem_type = 1, "regression"  # so that pipelines give the score, not its sigmoid
        setattr(config, SCORE_MEAN, -self.score.bias.item())
        if pad_id == eos_id:
            raise ModelError("its pad token is its end of text, and transformers' classifiers score before that")
        if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
            raise ModelError(f"transformers has no sequence classifier of the kind {config.model_type}")
        kind: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
        few = [token for token in probe_ids(self, 6).tolist() if token not in (pad_id, eos_id)]
        ids = torch.tensor([[*few[:3], pad_id], [*few[:3], few[-1] if eos_id is None else eos_id]], device=self.device)
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

        Without `attention_mask` [B, S] all tokens are real; without `position_ids` [B, S] each row counts its real ones
        from 0. The backbone gets the rest.
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
        # select before the head: padded positions, NaN included, never enter the score
        last_hidden_BH = hidden_BSH[torch.arange(len(input_ids), device=input_ids.device), last_B]
        return SequenceClassifierOutput(logits=self.score(last_hidden_BH.to(self.score.weight.dtype)))

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return False: of other people's classes transformers leaves some buffers of loaded models unset."""
        return False

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise the head: standard deviation 1/sqrt(d+1) as in Stiennon et al. 2020 (arXiv:2009.01325)."""
        if module is self.score:
            init.normal_(module.weight, mean=0.0, std=(module.in_features + 1) ** -0.5)
            init.zeros_(module.bias)


def with_mean(model: PreTrainedModel) -> PreTrainedModel:
    """Return a classifier that `to_classifier` made in our form, which takes its mean off; another one as it is."""
    mean, score = getattr(model.config, SCORE_MEAN, None), cast(nn.Linear, getattr(model, "score", None))
    if mean is None:
        return model
    head = nn.Linear(score.in_features, 1).to(score.weight)
    head.weight = score.weight
    nn.init.constant_(head.bias, -mean)
    return CausalLMRewardModel.from_parts(cast("PreTrainedModel", model.base_model), head)


def why_no_reward_model(architecture: str | None, config: PretrainedConfig) -> str | None:
    """Return what a model, by its class and configuration, is instead of a classifier with one label; else None."""
    classifiers = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values()
    if architecture is not None and hasattr(transformers, architecture) and architecture not in classifiers:
        return f"this is a {architecture}"
    return None if config.num_labels == 1 else f"this model has {config.num_labels}"


AutoConfig.register(MODEL_TYPE, CausalLMRewardConfig, exist_ok=True)
AutoModelForSequenceClassification.register(CausalLMRewardConfig, CausalLMRewardModel, exist_ok=True)
