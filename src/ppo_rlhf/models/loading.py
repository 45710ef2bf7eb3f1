"""Loads and checks models and tokenizers from a local directory, a GGUF file or the hub.

Weights are read from safetensors only, so a GGUF file is unpacked to a directory with safetensors first.

A `PretrainedHandle` reads a model's weights only when a node asks for the model, so a run whose rewards are Python
functions needs no reward model on disk. No code in `models.loading` writes into the directory of a model that a user
gave.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ppo_rlhf.core.errors import ModelError, in_one_line
from ppo_rlhf.models.critic import VALUE_HEAD, read_value_head
from ppo_rlhf.models.directories import (
    ADAPTER_CONFIG,
    ADAPTER_QUANTISATION,
    ADAPTER_WEIGHTS,
    CARD,
    CONFIG,
    RECORD,
    VALUE_HEAD_FILE,
    WEIGHTS,
    WEIGHTS_INDEX,
    check_model_directory,
    check_of_checkpoint,
    check_on_hub,
    check_one_model,
    ends_of_weights,
    find_file,
    has_file,
    hub_answers,
    is_local,
    number_of_weights,
    weight_files,
    why_unreadable,
)
from ppo_rlhf.models.gguf import GGUFFile
from ppo_rlhf.models.model_kinds import check_generates, is_classifier, parts_left_out, rows_of_head, rows_on_hub
from ppo_rlhf.models.origins import MADE_FROM, START, Origin, from_json
from ppo_rlhf.models.preparation import prepare
from ppo_rlhf.models.quantisation import check_bitsandbytes, four_bit_config, prepare_quantised
from ppo_rlhf.models.reward_model import CausalLMRewardModel, why_no_reward_model, with_mean
from ppo_rlhf.models.saved_adapters import SavedAdapter
from ppo_rlhf.models.stored_critic import from_token_classifier, is_token_classifier
from ppo_rlhf.models.tokenizers import (
    check_vocabulary,
    ensure_pad_id,
    ensure_pad_token,
    kept,
    set_template_defaults,
    templates_of,
)
from ppo_rlhf.passes.capabilities import check_causal
from ppo_rlhf.passes.forward import width_of_states
from ppo_rlhf.runtime.log_lines import errors_only, quiet_transformers, say_once
from ppo_rlhf.runtime.paths import place

log = logging.getLogger(__name__)
T = TypeVar("T")

# transformers writes NaN as {"__float__": "NaN"}
_NAN = re.compile(r'"(\w+)": (?:NaN|{\s*"__float__": "NaN"\s*})')
TOKENIZER_FILES = ("tokeniz*", "vocab*", "merges*", "*.model", "*.tiktoken")


@dataclass(frozen=True)
class PretrainedHandle:
    """A model directory or hub id, read only when needed; a LoRA adapter is merged into its base model when loaded."""

    source: str  # directory with a model or an adapter and its tokenizer, or a hub id, optionally as id@revision
    trust_remote_code: bool = False  # whether Python code in the model's repository may be executed
    # Values for the chat template's variables
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    gguf_cache: Path | None = None  # folder that keeps what GGUF files were unpacked to; None: a temporary folder

    def card(self) -> str | None:
        """Return the text of a local model's README.md; None for a hub id, or if there is no README.md."""
        path = Path(self.place) / CARD
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None

    @cached_property
    def base(self) -> PretrainedHandle | None:
        """The base model, on which a LoRA adapter was trained; None if the source is not an adapter.

        Raises:
            ModelError: The adapter cannot be merged, does not name its base model, or its base model cannot be found.
        """
        if self._adapter is None:
            return None
        base = replace(self, source=self._adapter.base)
        handle, seen = base, {self._identity}
        while handle._adapter is not None:  # the base may be an adapter, too
            if handle._identity in seen:
                raise ModelError(
                    f"{self.source}: the base of this adapter (base_model_name_or_path) is, in the end, the adapter "
                    f"itself ({handle.source}). Name the model that it was trained on."
                )
            seen.add(handle._identity)
            handle = replace(self, source=handle._adapter.base)
        try:
            base.config()
        except ModelError as error:
            raise ModelError(f"{self.source}: the base of this adapter cannot be loaded: {error}") from error
        return base

    def config(self) -> PretrainedConfig:
        """Return the model's configuration; a classifier's `num_labels` is the number of rows of the classifier's head.

        The configuration of an adapter is the configuration of its base model, with the adapter's vocabulary size, and
        with one label if the adapter holds a score head.
        """
        if self._adapter is None or self.base is None:
            config = self._read("configuration", AutoConfig.from_pretrained)
            self._check_numbers(config)
            if is_classifier(config):
                rows = rows_of_head(partial(self._file, local_files_only=True))
                asks_hub = rows is None and config.num_labels != 1 and not is_local(self.source)
                rows = rows_on_hub(self.place, self._revision) if asks_hub else rows
                config.num_labels = rows or config.num_labels
            return config
        check_model_directory(self.source)
        config = self.base.config()
        if self._adapter.brings_head(config):
            config.num_labels, config.architectures = 1, None
        if self._vocabulary is not None:
            config.get_text_config().vocab_size = self._vocabulary
        return config

    def _check_numbers(self, config: PretrainedConfig) -> None:
        """Raise `ModelError` for a NaN in the configuration, or if a local model has fewer weights than layers.

        Building a model of a million layers would take for ever.
        """
        if odd := _NAN.search(config.to_json_string()):
            raise ModelError(f"{self.source}: {CONFIG} has {odd[1]}=NaN, which must be a number. Copy the model again.")
        layers = getattr(config.get_text_config(), "num_hidden_layers", None)
        if isinstance(layers, int) and is_local(self.source):
            weights = sum(self.gguf.counts.values()) if self.gguf else number_of_weights(Path(self.place))
            if weights is not None and not 0 < layers <= weights:
                raise ModelError(
                    f"{self.source}: {CONFIG} has num_hidden_layers={layers}, the folder has {weights} weights: they "
                    "do not belong together. Copy the model again."
                )

    @cached_property
    def _vocabulary(self) -> int | None:
        """Number of tokens in an adapter's vocabulary; None if the adapter has the vocabulary of its base model."""
        if self._adapter is None or self.base is None or not self._adapter.may_bring_tokens:
            return None
        kind = AutoModelForSequenceClassification if self._adapter.is_classifier else AutoModelForCausalLM
        return self._adapter.vocabulary(self.base._empty(kind))

    @cached_property
    def _adapter(self) -> SavedAdapter | None:
        """The LoRA adapter at the source; None if the source is a whole model.

        Raises:
            ModelError: The adapter cannot be merged, or neither the hub nor the cache has the model.
        """
        if not is_local(self.source):
            try:
                check_on_hub(self.place, self._revision)
            except OSError as error:
                raise self._unreadable("configuration", error) from None
        if (path := self._file(ADAPTER_CONFIG)) is None:
            return None
        check_one_model(self.source, partial(has_file, self.place, self._revision))
        return SavedAdapter.read(self.source, path, self._file(ADAPTER_WEIGHTS))

    def generation_config(self) -> GenerationConfig:
        """Return the model's generation configuration, made from the model's configuration if the model has none."""
        if self._file("generation_config.json"):
            return self._read("generation configuration", GenerationConfig.from_pretrained)
        if self.base:
            return self.base.generation_config()
        return GenerationConfig.from_model_config(self.config())

    def record(self) -> str | None:
        """Return the text of a policy's `ppo_rlhf.json`; None if the file does not exist."""
        path = self._file(RECORD)
        return None if path is None else path.read_text(encoding="utf-8")

    def origin(self, role: str) -> Origin:
        """Return the model as an origin of another model, with the origins that its `made_from.json` names.

        An adapter without the file was made from its base.

        Raises:
            ModelError: `made_from.json` is damaged, or the model cannot be found.
        """
        made_from: tuple[Origin, ...] = ()
        if (path := self._file(MADE_FROM)) is not None:
            try:
                made_from = from_json(path.read_text(encoding="utf-8"))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                fix = "copy it again from the model, or delete it: the model is then named without its origins"
                raise ModelError(f"{self.source}: its {MADE_FROM} is damaged ({in_one_line(error)}); {fix}") from error
        elif self.base:
            made_from = (self.base.origin(START),)
        on_hub, license_name = not is_local(self.source), self.gguf.license if self.gguf else None
        return Origin("model", role, place(self.source), self.fingerprint(), on_hub, license_name, made_from)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer, which pads on the left and has a pad token; the vocabulary is unchanged."""
        config = self.config()
        # An adapter's directory may have its own tokenizer, which is preferred to the base model's
        if self.base and not self._file("tokenizer_config.json"):
            return self.base.tokenizer()
        if is_local(self.source) and not any(any(Path(self.place).glob(names)) for names in TOKENIZER_FILES):
            raise ModelError(f"{self.source}: this model directory has no tokenizer.json. Save the tokenizer there.")
        read = partial(self._read, "tokenizer", AutoTokenizer.from_pretrained, padding_side="left")
        tokenizer = kept((self.place, self._revision, self.trust_remote_code, self._state_of_files()), read)
        if self.gguf:
            tokenizer.name_or_path = self.source  # messages name the user's file, not the unpacked directory
        ensure_pad_token(tokenizer, config)
        check_vocabulary(tokenizer, config, self.source)
        templates_of(tokenizer, self.source)
        set_template_defaults(tokenizer, self.chat_template_kwargs, self.source)
        return tokenizer

    def causal_lm(
        self, dtype: torch.dtype = torch.float32, *, quantised_on: torch.device | None = None
    ) -> PreTrainedModel:
        """Return the language model in eval mode, without dropout, on the CPU.

        If `quantised_on` is given, the model is loaded to the device `quantised_on`, with linear layers in 4 bits that
        compute in `dtype`.

        Raises:
            ConfigError: `quantised_on` is given and bitsandbytes is missing.
            ModelError: The weights cannot be read, or some weights are missing, NaN or infinite; or the model is not
                causal, so that a hidden state depends on later tokens; or `quantised_on` is given although the source
                is an adapter.
        """
        self.check_causal_lm()
        self.check_quantisable(quantised_on is not None)
        # The adapter was trained on a base model with 4-bit weights, so merge it into the rounded weights
        if self.base and (quantisation := self._file(ADAPTER_QUANTISATION)):
            rounded_from = getattr(torch, json.loads(quantisation.read_bytes())["bnb_4bit_compute_dtype"])
            base = self.base.causal_lm(rounded_from, quantised_on=torch.device("cpu"))
            return nn.Module.to(self._merged(base), dtype)
        load: Callable[..., Any] = AutoModelForCausalLM.from_pretrained
        if quantised_on is not None:
            check_bitsandbytes("ppo.load_in_4bit=true")
            load = partial(load, quantization_config=four_bit_config(dtype), device_map={"": quantised_on})
        model = self._model("language model", load, dtype)
        if quantised_on is not None:
            prepare_quantised(model)
        check_causal(model, self.source)
        if parts := self.left_out(model):
            say_once(
                f"{self.source}: only the text part is loaded, trained and exported, as {type(model).__name__}; the "
                f"checkpoint's {parts} is left out."
            )
        return model

    def frozen_lm(self, dtype: torch.dtype, device: torch.device | str) -> PreTrainedModel:
        """Return the language model (`causal_lm`) on a device, for passes only: none of its weights gets a gradient."""
        return nn.Module.to(self.causal_lm(dtype).requires_grad_(False), device)

    def left_out(self, model: PreTrainedModel) -> str:
        """Return the names of the checkpoint's parts, such as vision, that `model`, loaded from it, does not have."""
        return parts_left_out(self.config(), model)

    def empty_causal_lm(self) -> PreTrainedModel:
        """Return the language model's modules on the device `meta`, without weights, for checks before a run."""
        return self._empty(AutoModelForCausalLM)

    def _empty(self, kind: Any) -> PreTrainedModel:
        config = self.config()
        try:
            with torch.device("meta"), quiet_transformers():
                return cast(PreTrainedModel, kind.from_config(config, trust_remote_code=self.trust_remote_code))
        except Exception as error:  # a model's constructor may raise any exception for a value that it does not expect
            raise ModelError(f"{self.source}: no model fits its {CONFIG}: {why_unreadable(error)}") from error

    def reward_model(self, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """Return the reward model in eval mode, whose output has `.logits` [B, 1].

        The model is a `CausalLMRewardModel` or a sequence classifier of transformers. If the configuration has
        `score_mean`, the scores have that mean subtracted (`reward_model.with_mean`). A language model with
        LLaMA-Factory's value head in its directory becomes a `CausalLMRewardModel`: the value head scores the last
        token.

        Raises:
            ModelError: The weights cannot be read, are missing, NaN or infinite, or the model does not have exactly one
                label.
        """
        self.check_reward_model()
        if (file := self._head_beside()) is not None:
            head, model = cast(nn.Linear, read_value_head([file])), self.causal_lm(dtype)
            if head.in_features != (width := width_of_states(model.config)):
                raise ModelError(f"{file}: this head reads {head.in_features} values, the model's states have {width}.")
            return self._named(CausalLMRewardModel.from_parts(cast(PreTrainedModel, model.base_model), head.to(dtype)))
        # Set num_labels=1, the size of the head in the weights file: config.json may give another number.
        load = partial(AutoModelForSequenceClassification.from_pretrained, num_labels=1)
        model = with_mean(self._model("reward model", load, dtype))
        ensure_pad_id(model, self.tokenizer())
        return model

    def critic(self, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """Return a stored critic in eval mode: a classifier whose head `score` is the value head.

        Raises:
            ModelError: The weights cannot be read, are missing, NaN or infinite, or the model is not a classifier with
                one label.
        """
        self.check_critic()
        if not is_token_classifier(self.config()):
            return self.reward_model(dtype)
        load = partial(AutoModelForTokenClassification.from_pretrained, num_labels=1)
        return from_token_classifier(self._model("critic", load, dtype))

    def empty_critic(self) -> PreTrainedModel:
        """Return the stored critic or reward model from which a critic starts, without weights on the device `meta`."""
        if is_token_classifier(self.config()):
            return from_token_classifier(self._empty(AutoModelForTokenClassification))
        return self.empty_reward_model()

    def empty_reward_model(self) -> PreTrainedModel:
        """Return the reward model without weights on the device `meta`, for checks before a run."""
        self.check_reward_model()
        if self._head_beside() is None:
            return self._empty(AutoModelForSequenceClassification)
        model = self.empty_causal_lm()
        head = nn.Linear(width_of_states(model.config), 1, device="meta")
        return CausalLMRewardModel.from_parts(cast(PreTrainedModel, model.base_model), head)

    def value_head(self) -> nn.Linear | None:
        """Return the value head among the model's weights (TRL's `v_head.*`) or in its own file; None if there is none.

        For a hub id, only the local cache is searched, so the model must be loaded before its value head.

        Raises:
            ModelError: The directory cannot be read, or the value head is not a linear layer with one output.
        """
        check_model_directory(self.source)
        is_adapter = self._file(ADAPTER_CONFIG, local_files_only=True) is not None
        names = (ADAPTER_WEIGHTS,) if is_adapter else (WEIGHTS, WEIGHTS_INDEX)
        file = next(filter(None, (self._file(name, local_files_only=True) for name in names)), None)
        return None if file is None else read_value_head(weight_files(file.parent))

    def check_reward_model(self) -> None:
        """Raise `ModelError` unless the model is a sequence classifier with one label or has a value head's file."""
        self._refuse_gguf("reward model")
        if (why := self._why_no_classifier()) and self._head_beside() is None:
            raise ModelError(
                f"{self.source}: a reward model is a sequence classifier with num_labels=1, {why}. Give such a model, "
                "or train one (reward_modelling)."
            )

    def check_critic(self, what: str = "critic") -> None:
        """Raise `ModelError` unless the model is a classifier with one label; `what` names its use in the error."""
        self._refuse_gguf(what)
        config = self.config()
        if is_token_classifier(config):
            why = None if config.num_labels == 1 else f"this model has {config.num_labels}"
        else:
            why = None if self._head_beside() else self._why_no_classifier()
        if why:
            raise ModelError(
                f"{self.source}: a {what} is a token or sequence classifier with num_labels=1, {why}. Give such a "
                "model, or train one (critic_pretraining, or PPO with ppo.export_critic=true)."
            )

    def _refuse_gguf(self, what: str) -> None:
        if self.gguf:
            raise ModelError(
                f"{self.source}: a GGUF file has no score head, so it is no {what}. Give a sequence classifier's "
                "directory or hub id."
            )

    def _why_no_classifier(self) -> str | None:
        config = self.config()
        return why_no_reward_model(next(iter(config.architectures or ()), None), config)

    def _head_beside(self) -> Path | None:
        """Return the file of LLaMA-Factory's value head, which makes a language model a reward model; None without."""
        return self._file(VALUE_HEAD_FILE) if self._why_no_classifier() else None

    def check_causal_lm(self) -> None:
        """Raise `ModelError` unless the model is a causal language model whose weights are not in 4 or 8 bits."""
        check_generates(self.config(), self.source)

    def check_quantisable(self, load_in_4bit: bool) -> None:
        """Raise `ModelError` if an adapter is to be loaded in 4 bits."""
        if self.base and load_in_4bit:
            raise ModelError(
                f"{self.source}: this is an adapter, which is merged into unquantised weights. Set "
                "ppo.load_in_4bit=false."
            )

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that tell models apart in tags, without reading all weights.

        The fingerprint of a directory covers config.json and each weights file's name, size, first and last mebibyte.
        The fingerprint of a GGUF file covers the whole file, of a hub id the id and the configuration. The fingerprint
        of an adapter, local or on the hub, covers the adapter's files and the fingerprint of the base.
        """
        check_model_directory(self.source)
        folder = self._folder
        if self.base:
            digest = hashlib.sha256(self.base.fingerprint().encode() + (folder / ADAPTER_CONFIG).read_bytes())
        elif self.gguf:
            return folder.name
        elif not is_local(self.source):
            return hashlib.sha256(f"{self.source}:{self.config().to_json_string()}".encode()).hexdigest()[:16]
        else:
            digest = hashlib.sha256((folder / CONFIG).read_bytes())
        for part in ends_of_weights(folder):
            digest.update(part)
        return digest.hexdigest()[:16]

    @cached_property
    def gguf(self) -> GGUFFile | None:
        """The GGUF file at the source; None if the source is another model."""
        return GGUFFile.at(self.source, self.gguf_cache)

    @property
    def place(self) -> str:
        """The directory of a local model, which for a GGUF file is the unpacked directory, or the name on the hub.

        Raises:
            ModelError: The GGUF file cannot be read.
        """
        if self.gguf:
            return str(self.gguf.directory)
        return str(Path(self.source).expanduser()) if is_local(self.source) else self.source.partition("@")[0]

    @property
    def _folder(self) -> Path:
        """The model's local folder; for an adapter on the hub, the folder of its files in the cache."""
        if not self.base or is_local(self.source):
            return Path(self.place)
        if (weights := self._file(ADAPTER_WEIGHTS)) is None:
            raise ModelError(f"{self.source}: this adapter has no {ADAPTER_WEIGHTS}. Save it as safetensors.")
        return weights.parent

    @property
    def _identity(self) -> str:
        return str(Path(self.place).resolve()) if is_local(self.source) else self.source

    @property
    def _revision(self) -> str:
        """The model's branch, tag or commit on the hub."""
        return "main" if is_local(self.source) else self.source.partition("@")[2] or "main"

    def _file(self, name: str, *, local_files_only: bool = False) -> Path | None:
        return find_file(self.place, self._revision, name, local_files_only=local_files_only)

    def _state_of_files(self) -> tuple[Any, ...]:
        """Return name, time and size of each file of a local model; for a model on the hub a path with its commit."""
        if not is_local(self.source):
            return (self._file("tokenizer_config.json"),)
        files = sorted(path for path in Path(self.place).iterdir() if path.is_file())
        return tuple((path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in files)

    def _unreadable(self, what: str, error: Exception) -> ModelError:
        where = "its" if is_local(self.source) else "there is no such directory, and as a hub id its"
        return ModelError(f"{self.source}: {where} {what} cannot be loaded: {why_unreadable(error)}")

    def _model(self, what: str, load: Callable[..., Any], dtype: torch.dtype) -> PreTrainedModel:
        if self._adapter and self.base:
            # transformers draws a random head, which the adapter's own head replaces: hide the warning
            if self._adapter.brings_head(self.base.config()):
                with errors_only("transformers"):
                    return self._merged(self.base._weights(what, load, dtype=dtype))
            return self._merged(self.base._model(what, load, dtype))
        # Keep transformers from asking an unreachable hub whether the model has an adapter
        if not is_local(self.source) and not hub_answers():
            load = partial(load, adapter_kwargs={"local_files_only": True})
        # Keep transformers from printing a table of the weights that the model ignores
        with errors_only("transformers"):
            model, report = self._weights(what, load, dtype=dtype, output_loading_info=True)
        if missing := sorted(report["missing_keys"]):
            raise ModelError(
                f"{self.source}: as a {what} it lacks {len(missing)} weights ({_some(missing)}), which would be "
                f"random. Give a directory saved as a {what}."
            )
        if unused := sorted(name for name in report["unexpected_keys"] if name not in VALUE_HEAD):
            log.warning("%s: weights that a %s does not have are ignored: %s.", self.source, what, _some(unused))
        return self._named(prepare(model, self.source))

    def _merged(self, base: PreTrainedModel) -> PreTrainedModel:
        """Return the base model with the adapter merged into the base model's weights."""
        check_of_checkpoint(self._folder)
        merged = cast(SavedAdapter, self._adapter).merged_into(base, self._folder)
        return self._named(prepare(merged, self.source))

    def _named(self, model: PreTrainedModel) -> PreTrainedModel:
        """Set a model's name to its source: transformers records no revision, merged adapter or GGUF file."""
        if self.base or self.gguf or "@" in self.source:
            name = str(Path(self.source).expanduser()) if is_local(self.source) else self.source
            model.name_or_path = model.config.name_or_path = name
        return model

    def _weights(self, what: str, load: Callable[..., T], **options: Any) -> T:
        if self.gguf:
            self.gguf.dequantise()
        elif is_local(self.source):
            check_of_checkpoint(Path(self.place))
        return self._read(what, load, use_safetensors=True, **options)

    def _read(self, what: str, load: Callable[..., T], **options: Any) -> T:
        check_model_directory(self.source)
        try:
            with quiet_transformers():
                return load(
                    self.place,
                    revision=self._revision,
                    trust_remote_code=self.trust_remote_code,
                    local_files_only=is_local(self.source) or not hub_answers(),
                    **options,
                )
        # transformers and safetensors raise OSError, ValueError, KeyError and other types for unreadable weights
        except Exception as error:
            raise self._unreadable(what, error) from error


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
