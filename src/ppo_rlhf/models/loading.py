"""Reading models and tokenizers, from a local directory or the hub: safetensors only, checked, without dropout.

A `PretrainedHandle` is lazy: weights are read only when something asks for them, so a run whose rewards are Python
functions needs no reward model on disk. A person's model directory is only ever read.
"""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.utils import cached_file

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.models.annotations import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from ppo_rlhf.models.quiet import errors_only, quiet_transformers
from ppo_rlhf.models.tokenizers import ensure_pad_id, ensure_pad_token
from ppo_rlhf.models.value_heads import VALUE_HEAD, WEIGHTS, WEIGHTS_INDEX, read_value_head, value_head_tensors

log = logging.getLogger(__name__)

T = TypeVar("T")

AVERAGE = "ema"
HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
MEBIBYTE = 2**20
PICKLED_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
TOKENIZER_FILES = ("tokeniz*", "vocab*", "merges*", "*.model", "*.tiktoken")
LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class PretrainedHandle:
    """A model directory or hub id, read only when asked.

    Attributes:
        source: A directory with config.json, weights and tokenizer, or a hub id.
        trust_remote_code: Whether Python code that lies with the model may run; off unless a person asks for it.
    """

    source: str
    trust_remote_code: bool = False

    def config(self) -> PretrainedConfig:
        """Return the model's configuration."""
        return self._read("configuration", transformers.AutoConfig.from_pretrained)

    def generation_config(self) -> GenerationConfig:
        """Return the model's generation configuration, or one made from its configuration where it has none."""
        if is_local(self.source) and not (Path(self._place) / "generation_config.json").is_file():
            return transformers.GenerationConfig.from_model_config(self.config())
        try:
            return transformers.GenerationConfig.from_pretrained(self._place)
        except OSError:  # a hub model may have none either
            return transformers.GenerationConfig.from_model_config(self.config())

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer: padding on the left, a pad token guaranteed, its vocabulary unchanged."""
        config = self.config()
        if is_local(self.source) and not any(any(Path(self._place).glob(names)) for names in TOKENIZER_FILES):
            raise ModelError(
                f"{self.source}: no tokenizer in this model directory (tokenizer.json is missing). Save it there."
            )
        tokenizer = self._read("tokenizer", transformers.AutoTokenizer.from_pretrained, padding_side="left")
        ensure_pad_token(tokenizer, config)
        check_vocabulary(tokenizer, config, self.source)
        return tokenizer

    def causal_lm(self, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """Return the language model in eval mode, every dropout probability 0.

        Raises:
            ModelError: The directory or its weights cannot be used, or some weights of the model are not in it.
        """
        self.check_causal_lm()
        model = self._model("language model", transformers.AutoModelForCausalLM.from_pretrained, dtype)
        return model

    def value_head(self) -> nn.Linear | None:
        """Return the value head among the model's weights (TRL's `v_head.*`), None if there is none.

        Of a hub id that is what the cache has: load the model first.

        Raises:
            ModelError: The directory cannot be used, or its value head is not a linear one.
        """
        if is_local(self.source):
            check_model_directory(self.source)
            return read_value_head(Path(self._place))
        files = (
            cached_file(self.source, name, local_files_only=True, _raise_exceptions_for_missing_entries=False)
            for name in (WEIGHTS_INDEX, WEIGHTS)
        )
        found = next((Path(file) for file in files if file is not None), None)
        return None if found is None else read_value_head(found.parent)

    def empty_causal_lm(self) -> PreTrainedModel:
        """Return the language model without weights, on the device `meta`: its modules, for checks."""
        config = self.config()
        with torch.device("meta"), quiet_transformers():
            return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=self.trust_remote_code)

    def reward_model(self, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """Return the reward model in eval mode: `.logits [B, 1]`, ours or a transformers sequence classifier.

        Raises:
            ModelError: As `causal_lm`, and if the model does not have exactly one label.
        """
        self.check_reward_model()
        model = self._model("reward model", transformers.AutoModelForSequenceClassification.from_pretrained, dtype)
        ensure_pad_id(model, self.tokenizer())
        return model

    def check_reward_model(self) -> None:
        """Raise `ModelError` if the configuration says that the model does not have exactly one label."""
        labels = self.config().num_labels
        if labels != 1:
            raise ModelError(
                f"{self.source}: a reward model has one output (num_labels 1), this one has {labels}. "
                "Give a sequence-classification model trained with num_labels=1, or train one (reward_modelling)."
            )

    def check_causal_lm(self) -> None:
        """Raise `ModelError` if the configuration says that the model is a reward model of ours."""
        from ppo_rlhf.models.reward_config import MODEL_TYPE

        if self.config().model_type == MODEL_TYPE:
            raise ModelError(
                f"{self.source}: this is a reward model, it cannot generate. Give a causal language model."
            )

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that tell models apart, for tags; cheap, whatever the model's size.

        Of a directory: its config.json, and each weights file's name, size, first and last mebibyte. Of a hub id: the
        id and the configuration.
        """
        digest = hashlib.sha256()
        if is_local(self.source):
            check_model_directory(self.source)
            folder = Path(self._place)
            digest.update((folder / "config.json").read_bytes())
            for path in sorted(folder.glob("*.safetensors")):
                size = path.stat().st_size
                digest.update(f"{path.name}:{size}".encode())
                with path.open("rb") as file:
                    digest.update(file.read(MEBIBYTE))
                    file.seek(max(0, size - MEBIBYTE))
                    digest.update(file.read(MEBIBYTE))
        else:
            digest.update(f"{self.source}:{self.config().to_json_string()}".encode())
        return digest.hexdigest()[:16]

    @property
    def _place(self) -> str:
        return str(Path(self.source).expanduser()) if is_local(self.source) else self.source

    def _model(self, what: str, load: Callable[..., Any], dtype: torch.dtype) -> PreTrainedModel:
        from ppo_rlhf.models import reward_model  # noqa: F401  likewise; heavy: all of transformers' models

        with errors_only("transformers"):  # not its table of weights that the model has no place for
            model, report = self._read(what, load, dtype=dtype, use_safetensors=True, output_loading_info=True)
        if report["missing_keys"]:
            missing = sorted(report["missing_keys"])
            raise ModelError(
                f"{self.source}: as a {what} it lacks {len(missing)} of its weights ({_some(missing)}). They would be "
                f"random: give a directory saved as a {what}."
            )
        unknown = sorted(name for name in report["unexpected_keys"] if name not in VALUE_HEAD)
        if unknown:
            log.warning("%s: not part of a %s, left out: %s.", self.source, what, _some(unknown))
        align_parameters(model)
        return prepare(model)

    def _read(self, what: str, load: Callable[..., T], **options: Any) -> T:
        from ppo_rlhf.models import reward_config  # noqa: F401  it tells transformers of its class

        local = is_local(self.source)
        if local:
            check_model_directory(self.source)
        try:
            with quiet_transformers():
                return load(self._place, trust_remote_code=self.trust_remote_code, local_files_only=local, **options)
        except Exception as error:  # the libraries below raise OSError, ValueError, KeyError, SafetensorError, …
            where = "its" if local else "there is no such directory, and as a hub id its"
            raise ModelError(f"{self.source}: {where} {what} cannot be loaded: {why_unreadable(error)}") from error


@dataclass
class TrainedModel:
    """A model and what belongs to it, as the model dataset saves them.

    Attributes:
        model: A plain transformers model.
        tokenizer: Its tokenizer.
        value_head: A value head on the model's last hidden states; saved among its weights as TRL does (`v_head.*`).
        average: The model with the moving average of its weights; saved in the folder `ema`.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    value_head: nn.Linear | None = None
    average: PreTrainedModel | None = None

    def save(self, folder: Path) -> None:
        """Write a model directory: configuration, safetensors and tokenizer; the average is one of its own below."""
        weights = None
        if self.value_head is not None:
            weights = self.model.state_dict() | value_head_tensors(self.value_head)
        with quiet_transformers():
            self.model.save_pretrained(folder, state_dict=weights)
            self.tokenizer.save_pretrained(folder)
        if self.average is not None:
            TrainedModel(self.average, self.tokenizer).save(folder / AVERAGE)


def is_local(source: str) -> bool:
    """Return whether `source` is, or looks like, a path rather than a hub id (`name` or `organisation/name`)."""
    if Path(source).expanduser().exists() or not HUB_ID.fullmatch(source):
        return True
    first, _, rest = source.partition("/")
    return bool(rest) and Path(first).is_dir()


def check_model_directory(source: str | Path) -> None:
    """Raise `ModelError`, one line, unless `source` holds a loadable model; of a hub id only the form is checked."""
    if not is_local(str(source)):
        return
    path = Path(source).expanduser()
    if not path.is_dir():
        raise ModelError(f"{source}: there is no such model directory. Give a directory with config.json, or a hub id.")
    if not (path / "config.json").is_file():
        hint = " It holds a LoRA adapter alone: merge it into its base." if _is_adapter(path) else ""
        raise ModelError(f"{source}: no config.json in this directory, so it is not a Hugging Face model.{hint}")
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{source}/config.json is not valid JSON: {error}") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ModelError(f"{source}/config.json names no model_type, so no architecture can be chosen.")
    _check_weights(path)


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, where: str) -> None:
    """Raise `ModelError` if the tokenizer can produce an id that has no row in the model's embedding."""
    rows = config.get_text_config().vocab_size
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= rows:
        raise ModelError(
            f"{where}: the tokenizer has ids up to {largest}, the model's embedding has {rows} rows (ids 0 to "
            f"{rows - 1}). They do not belong together: use the tokenizer that the model was trained with."
        )


def prepare(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model in eval mode, in place, without dropout."""
    disable_dropout(model)
    fuse_activations(model)
    return model.eval()


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability to 0, in modules and configurations, so that train() and eval() compute the same.

    Gradient checkpointing works only in train(), so eval() alone would not do.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name in _dropout_names(vars(module)):
            setattr(module, name, 0.0)
        own_config = getattr(module, "config", None)
        if isinstance(own_config, transformers.PretrainedConfig):
            for config in _nested_configs(own_config):
                for name in _dropout_names(vars(config)):
                    setattr(config, name, 0.0)


def why_unreadable(error: Exception) -> str:
    """Return in one line what kept transformers from reading a model."""
    if "trust_remote_code=True" in str(error):  # its advice, lines below the first
        return (
            "Python code that lies with the model would have to run. If you trust that code, set "
            "trust_remote_code=true (conf/local/globals.yml, or --params); PPOTrainer takes the loaded model"
        )
    return _first_line(error)


def align_parameters(model: nn.Module) -> None:
    """Copy every parameter into memory of torch's own allocator.

    Weights mapped from a safetensors file start wherever its header ends (seen: 40 bytes past a 64-byte boundary), and
    matrix kernels round differently there: a reloaded model would not repeat the bits of the one that was saved.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def fuse_activations(model: nn.Module) -> None:
    """Let torch compute GELU's tanh approximation in one kernel; transformers writes it out in eight operations.

    The formula is the same (GPT-2 has it in every layer), and the backward pass keeps one tensor instead of eight.
    """
    from transformers.activations import GELUTanh, NewGELUActivation

    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) in (NewGELUActivation, GELUTanh):
                setattr(module, name, nn.GELU(approximate="tanh"))


def context_length(config: PretrainedConfig) -> int | None:
    """Return the number of positions that the model can read, or None where its architecture sets no limit."""
    text_config = config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"):
        length = getattr(text_config, name, None)
        if isinstance(length, int) and length > 0:
            return length
    return None


def steady_context(config: PretrainedConfig) -> tuple[int | None, str]:
    """Return how many tokens PPO may give a model at a time, and why no more where RoPE forbids it (else "").

    Of the kinds `longrope` and `dynamic` transformers takes other frequencies, for a whole batch, as soon as one of its
    sequences is longer than these. A sequence's log-probabilities would depend on its neighbours, and ratios and KL
    compare those of different batches. Supervised training compares none, and may use all of the context.
    """
    context, steady = context_length(config), min(_steady_lengths(config), default=None)
    if steady is None or (context is not None and context < steady):
        return context, ""
    return steady, (
        f". Of sequences beyond {steady} tokens this model's RoPE changes the frequencies for their whole batch, so "
        "that log-probabilities in PPO would depend on the batch"
    )


def _steady_lengths(config: PretrainedConfig) -> Iterator[int]:
    """Yield up to which length each RoPE of a model keeps its frequencies; nothing for those that always do."""
    text_config = config.get_text_config()
    settings = getattr(text_config, "rope_parameters", None) or {}
    of_layer_types = [found for found in settings.values() if isinstance(found, dict)]
    for rope in of_layer_types or [settings]:
        kind = rope.get("rope_type", "default")
        if kind == "longrope":
            yield rope["original_max_position_embeddings"]  # transformers sets it where only the configuration has it
        elif "dynamic" in kind:
            yield text_config.max_position_embeddings


def _check_weights(path: Path) -> None:
    if (path / WEIGHTS_INDEX).is_file():
        index = json.loads((path / WEIGHTS_INDEX).read_text(encoding="utf-8"))
        shards = sorted(set(index["weight_map"].values()))
    elif (path / WEIGHTS).is_file():
        shards = [WEIGHTS]
    else:
        pickled = sorted(file.name for pattern in PICKLED_WEIGHTS for file in path.glob(pattern))
        if pickled:
            raise ModelError(
                f"{path}: only pickled weights ({pickled[0]}), which can run code when loaded; safetensors are "
                "required. Convert once: load it where you trust it and call save_pretrained."
            )
        hint = " It holds a LoRA adapter alone: merge it into its base." if _is_adapter(path) else ""
        raise ModelError(f"{path}: no weights in this model directory ({WEIGHTS} is missing).{hint}")
    for shard in shards:
        if not (path / shard).is_file() or (path / shard).stat().st_size == 0:
            raise ModelError(f"{path}: the weights file {shard} is missing or empty. Copy the model again.")
        _check_header(path / shard)


def _check_header(weights: Path) -> None:
    """Raise `ModelError` if a weights file's header is unreadable, or names more than the file holds (cut short)."""
    try:
        with safe_open(weights, framework="pt"):
            return
    except (SafetensorError, OSError) as error:
        with weights.open("rb") as file:
            is_pointer = file.read(len(LFS_POINTER)) == LFS_POINTER
        remedy = "It is a Git LFS pointer: run git lfs pull" if is_pointer else "Copy the model again"
        what = f"the weights file {weights.name} is damaged or incomplete ({_first_line(error)})"
        raise ModelError(f"{weights.parent}: {what}. {remedy}.") from error


def _is_adapter(path: Path) -> bool:
    return (path / "adapter_config.json").is_file()


def _dropout_names(attributes: dict[str, Any]) -> list[str]:
    return [name for name, value in attributes.items() if "drop" in name and isinstance(value, float) and value]


def _nested_configs(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    yield config
    for value in vars(config).values():
        if isinstance(value, transformers.PretrainedConfig):
            yield from _nested_configs(value)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
