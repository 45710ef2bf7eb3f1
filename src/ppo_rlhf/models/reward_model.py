"""A scalar reward head on the backbone of any causal language model.

transformers has sequence-classification classes for some architectures only (none for BitNet), and they pool at the
last id that is not pad, which is one position early where pad and end of text are the same token. This one pools by
length, from the attention mask, on left- and right-padded batches, and its head has a bias, so that a normalisation
of the scores can be folded into the weights.
"""

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.modeling_outputs import SequenceClassifierOutput

from ppo_rlhf.models.reward_config import CausalLMRewardConfig


class CausalLMRewardModel(PreTrainedModel):
    """Score of a whole sequence: a linear head on the backbone's state at the last real token.

    `model.base_model` is the backbone, `model.score` the head (weight `[1, hidden]`, bias `[1]`).
    """

    config_class = CausalLMRewardConfig
    base_model_prefix = "backbone"
    supports_gradient_checkpointing = True
    # what the backbone supports is for the backbone to check: it is built with its own configuration
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: CausalLMRewardConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        # through the language model, not AutoModel: works for every architecture that has a causal LM
        self.backbone = AutoModelForCausalLM.from_config(config.text_config).base_model
        self.score = nn.Linear(config.hidden_size, 1, bias=True)
        self._positions_wanted = "position_ids" in inspect.signature(self.backbone.forward).parameters
        self.post_init()

    @classmethod
    def from_causal_lm(cls, model: PreTrainedModel) -> "CausalLMRewardModel":
        """Return a reward model with a copy of the language model's backbone and a fresh head.

        The head's weights are drawn from torch's global generator: seed it before.
        """
        reward_model = cls(CausalLMRewardConfig(text_config=copy.deepcopy(model.config)))
        reward_model.backbone.load_state_dict(model.base_model.state_dict())
        return reward_model.to(dtype=model.dtype, device=model.device).eval()  # type: ignore[call-arg]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Score each sequence.

        Args:
            input_ids: [B, S], padded on either side.
            attention_mask: [B, S], 1 on real tokens; without it all are.
            position_ids: [B, S]; by default each row counts its real tokens from 0.
            **kwargs: Handed to the backbone.

        Returns:
            `.logits` [B, 1].
        """
        kwargs = {name: value for name, value in kwargs.items() if name not in ("return_dict", "labels")}
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        if self._positions_wanted:
            if position_ids is None:
                position_ids = (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)
            kwargs["position_ids"] = position_ids
        states_BSH = self.backbone(input_ids, attention_mask=attention_mask, **kwargs).last_hidden_state
        slots_S = torch.arange(input_ids.shape[1], device=input_ids.device)
        last_B = torch.where(attention_mask.bool(), slots_S, 0).amax(dim=-1)
        # select before the head: what stands at padded positions, NaN included, never enters the score
        last_states_BH = states_BSH[torch.arange(len(input_ids), device=input_ids.device), last_B]
        return SequenceClassifierOutput(logits=self.score(last_states_BH))

    @torch.no_grad()
    def rescale(self, mean: float, deviation: float) -> None:
        """Fold `(score - mean) / deviation` into the head, so that the saved model is already normalised."""
        self.score.weight.div_(deviation)
        self.score.bias.sub_(mean).div_(deviation)

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise the head alone: standard deviation 1/sqrt(d+1) as in Stiennon et al. 2020 (arXiv:2009.01325)."""
        if module is self.score:
            init.normal_(module.weight, mean=0.0, std=(module.in_features + 1) ** -0.5)
            init.zeros_(module.bias)


AutoModelForSequenceClassification.register(CausalLMRewardConfig, CausalLMRewardModel, exist_ok=True)
