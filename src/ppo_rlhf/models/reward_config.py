"""The configuration of our reward model, made known to transformers. Not in the model's module, which is heavy."""

from typing import Any, ClassVar

from transformers import AutoConfig, PretrainedConfig

MODEL_TYPE = "causal_lm_reward"


class CausalLMRewardConfig(PretrainedConfig):
    """Configuration of `CausalLMRewardModel`: the language model's own configuration under `text_config`."""

    model_type = MODEL_TYPE
    sub_configs: ClassVar[dict[str, Any]] = {"text_config": AutoConfig}

    def __init__(self, text_config: PretrainedConfig | dict[str, Any] | None = None, **kwargs: Any) -> None:
        if isinstance(text_config, dict):
            text_config = AutoConfig.for_model(**text_config)
        self.text_config = text_config if text_config is not None else AutoConfig.for_model("gpt2")
        self.text_config.name_or_path = ""  # else the saved configuration names a folder of this machine
        kwargs.setdefault("num_labels", 1)
        super().__init__(**kwargs)

    def get_text_config(self, *args: Any, **kwargs: Any) -> PretrainedConfig:
        """Return the configuration of what reads text: of a model that reads images, too, it lies one further in."""
        return self.text_config.get_text_config(*args, **kwargs)

    @property
    def vocab_size(self) -> int:
        """Rows of the backbone's embedding."""
        return self.get_text_config().vocab_size

    @property
    def hidden_size(self) -> int:
        """Width of the backbone's states, which the head reads."""
        return self.get_text_config().hidden_size


AutoConfig.register(MODEL_TYPE, CausalLMRewardConfig, exist_ok=True)
