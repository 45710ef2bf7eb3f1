"""Reads adapters that any program saved with peft, and merges each adapter into the weights of its base model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from safetensors import safe_open
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ppo_rlhf.core.errors import ModelError, in_one_line
from ppo_rlhf.models.adapter_settings import check_keeps_base, check_patterns
from ppo_rlhf.models.directories import ADAPTER_CONFIG, is_local
from ppo_rlhf.models.reward_model import why_no_reward_model
from ppo_rlhf.runtime.log_lines import quiet_transformers

_PREFIX = "base_model.model."  # prefix of the weights' names in adapter files: the attribute path inside PeftModel
_TOKENS = ("trainable_token_indices", "token_indices")
"""peft's settings that list the rows of embeddings that an adapter replaces."""


@dataclass(frozen=True)
class SavedAdapter:
    """The files of a saved adapter."""

    source: str  # the adapter's directory or hub id, for error messages
    settings: Mapping[str, Any]  # the content of adapter_config.json
    weights: Path | None  # path of adapter_model.safetensors; None: there is no such file

    @classmethod
    def read(cls, source: str, config: Path, weights: Path | None) -> SavedAdapter:
        """Read an adapter's settings.

        Raises:
            ModelError: The adapter is of a kind that cannot be merged into weights, such as prompt tuning, or belongs
                to other weights than its base's.
        """
        from peft import PEFT_TYPE_TO_TUNER_MAPPING

        try:
            settings = json.loads(config.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"{source}: {ADAPTER_CONFIG} is not valid JSON ({in_one_line(error)}).") from error
        if not isinstance(settings, dict):
            raise ModelError(
                f"{source}: {ADAPTER_CONFIG} holds a {type(settings).__name__}, not an adapter's settings."
            )
        texts = ("peft_type", "base_model_name_or_path", "revision")
        if odd := [name for name in texts if not isinstance(settings.get(name), str | None)]:
            raise ModelError(f"{source}: {ADAPTER_CONFIG} has {odd[0]}={settings[odd[0]]!r:.60}, which must be a text.")
        adapter, kind = cls(source, settings, weights), settings.get("peft_type")
        if not hasattr(PEFT_TYPE_TO_TUNER_MAPPING.get(cast(Any, kind)), "merge_and_unload"):
            raise ModelError(
                f"{source}: an adapter of the kind {kind} cannot be merged into the weights of a model, as LoRA can. "
                "Give a whole model or a LoRA adapter."
            )
        check_keeps_base(settings, source)
        return adapter

    @property
    def base(self) -> str:
        """The path or hub id (with the revision) of the base model, on which the adapter was trained.

        Raises:
            ModelError: The adapter does not name its base model.
        """
        named, revision = self.settings.get("base_model_name_or_path"), self.settings.get("revision")
        if not named:
            raise ModelError(f"{self.source}: this adapter does not name its base (base_model_name_or_path).")
        return f"{named}@{revision}" if revision and not is_local(named) else str(named)

    @property
    def is_classifier(self) -> bool:
        """Whether the adapter belongs to a sequence classifier, such as a reward model."""
        return self.settings.get("task_type") == "SEQ_CLS"

    def brings_head(self, base: PretrainedConfig) -> bool:
        """Return whether the adapter holds the score head of a reward model while its base is a language model."""
        if not self.is_classifier or self.weights is None:
            return False
        if why_no_reward_model(next(iter(base.architectures or ()), None), base) is None:
            return False
        return any(".score." in name for name in self._shapes)

    def vocabulary(self, base: PreTrainedModel) -> int:
        """Return the number of embedding rows that the adapter was trained with, including rows of new tokens."""
        saved = (self._rows_of(base, layer) for layer in (base.get_input_embeddings(), base.get_output_embeddings()))
        return next(filter(None, saved), max(_rows(base), *(row + 1 for row in self._replaced), 0))

    def fit(self, base: PreTrainedModel) -> None:
        """Resize a base model's embeddings and head to the number of tokens with which the adapter was trained.

        Raises:
            ModelError: The adapter does not hold the embedding rows or the head rows of new tokens.
        """
        rows, base_rows = self.vocabulary(base), _rows(base)
        if rows == base_rows:
            return
        base.resize_token_embeddings(rows, mean_resizing=False)
        embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
        is_whole = self._rows_of(base, embedding) is not None or self._replaced.issuperset(range(base_rows, rows))
        is_tied = head is None or head.weight is embedding.weight
        if rows > base_rows and not (is_whole and (is_tied or self._rows_of(base, head) is not None)):
            raise ModelError(
                f"{self.source}: this adapter was trained with {rows} tokens, its base has {base_rows}, and the "
                "adapter lacks new rows of the embedding or the head. Merge it where it was trained "
                "(merge_and_unload), and give the merged model."
            )

    def merged_into(self, base: PreTrainedModel, folder: Path) -> PreTrainedModel:
        """Merge the adapter in a folder into the weights of a base model, in place, and return the base model.

        Raises:
            ModelError: The adapter does not fit the base model.
        """
        from ppo_rlhf.models.adapters import merge_saved

        try:
            with quiet_transformers():
                check_patterns(self.settings, (name for name, _ in base.named_modules()), self.source)
                self.fit(base)
                return merge_saved(base, folder)
        except ModelError:
            raise
        except Exception as error:  # peft raises many types of errors if the adapter was trained for another model
            raise ModelError(f"{self.source}: this adapter cannot be merged: {in_one_line(error)}") from error

    @property
    def may_bring_tokens(self) -> bool:
        """Whether the adapter holds more than LoRA factors, and therefore may hold embeddings of new tokens."""
        return bool(self._replaced) or any(map(_is_whole, self._shapes))

    @cached_property
    def _shapes(self) -> dict[str, list[int]]:
        if self.weights is None:
            return {}
        with safe_open(self.weights, framework="pt") as tensors:
            return {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118  # no mapping

    @cached_property
    def _replaced(self) -> set[int]:
        """Indices of the embedding rows that the adapter replaces one by one."""
        # peft stores the replaced tokens as a list, or as a dict of lists by layer
        indices = [self.settings.get(setting) or [] for setting in _TOKENS]
        by_layer = [each.values() if isinstance(each, dict) else [each] for each in indices]
        try:
            return {int(row) for layers in by_layer for rows in layers for row in rows}
        except (TypeError, ValueError) as error:
            raise ModelError(
                f"{self.source}: {ADAPTER_CONFIG} lists no token ids in {' or '.join(_TOKENS)}."
            ) from error

    def _rows_of(self, base: PreTrainedModel, layer: nn.Module | None) -> int | None:
        """Return the rows of the adapter's own copy of an embedding or head; None if the adapter has no copy."""
        path = next((name for name, module in base.named_modules() if module is layer), None)
        saved = (name for name in self._shapes if name.startswith(f"{_PREFIX}{path}.") and _is_whole(name))
        return next((self._shapes[name][0] for name in saved), None)


def _rows(model: PreTrainedModel) -> int:
    """Return the number of rows of a model's embedding."""
    return len(cast(nn.Embedding, model.get_input_embeddings()).weight)


def _is_whole(name: str) -> bool:
    """Return whether a tensor of an adapter is a whole weight rather than a LoRA factor."""
    return name.endswith(".weight") and ".lora_" not in name
