"""What TRL's scripts parse beside a PPOConfig: ModelConfig (the model, LoRA) and ScriptArguments (the data)."""

from __future__ import annotations

from ppo_rlhf.compat.ledger import Ledger, by_setting, carry_prompts

# Of TRL 1.12; they apply only with use_peft
_LORA_DEFAULTS = {"lora_r": 16, "lora_alpha": 32}
_LORA = (*_LORA_DEFAULTS, "lora_dropout", "lora_target_modules")

_REASONS = by_setting(
    {
        "the tokenizer is the SFT policy's own, and the policy is sft_model_path": "model_name_or_path",
        "trainable weights are float32 or wider; ppo.dtype is the precision of the computation": "dtype torch_dtype",
        "download the revision that you want, and name its folder in sft_model_path": "model_revision",
        "a model's own code is run only if trust_remote_code is set in conf/local/globals.yml": "trust_remote_code",
        "transformers chooses the attention": "attn_implementation",
        "LoRA is put on the linear layers that ppo.lora_target_modules names, without variants": (
            "lora_target_parameters lora_modules_to_save lora_task_type use_rslora use_dora"
        ),
        "models are not quantised": (
            "load_in_8bit load_in_4bit bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage"
        ),
        "prompts come from a file: write the split that you want to one, and set prompts_path": (
            "dataset_config dataset_train_split dataset_streaming"
        ),
        "held-out prompts are a share of prompts_path, or evaluation_prompts_path": "dataset_test_split",
        "how processes share the work is not part of these parameters": "ignore_bias_buffers",
        "set it in the shell": "env",
        "it is no setting of training": "config gradient_checkpointing_use_reentrant",
    }
)
MODEL_SETTINGS = frozenset({"use_peft", "dataset_name", *_LORA, *_REASONS})


def carry_model_settings(ledger: Ledger) -> None:
    """Carry LoRA and a file of prompts; leave the rest."""
    if ledger.given("use_peft"):
        ledger.derive("ppo.use_peft", ledger.flag("use_peft"), "use_peft")
    if ledger.flag("use_peft"):
        _adapters(ledger)
    else:
        ledger.leave_all(dict.fromkeys(_LORA, "use_peft is not set: TRL does not read it"))
    carry_prompts(ledger, "dataset_name")
    ledger.leave_all(_REASONS)


def _adapters(ledger: Ledger) -> None:
    for setting, default in _LORA_DEFAULTS.items():
        if ledger.given(setting):
            ledger.carry(f"ppo.{setting}", setting)
        else:
            ledger.fix(f"ppo.{setting}", default, f"default of {setting}")
    modules = ledger.value("lora_target_modules")
    if modules is not None:
        text = modules if isinstance(modules, str) else ",".join(map(str, modules))
        ledger.derive("ppo.lora_target_modules", text, "lora_target_modules")
    else:
        reason = "peft chooses by the model's type (in Llama q_proj,v_proj); here ppo.lora_target_modules=all-linear"
        ledger.leave("lora_target_modules", reason)
        if not ledger.given("lora_target_modules"):
            ledger.remark(f"Without lora_target_modules {reason} applies.")
    ledger.leave("lora_dropout", "dropout is always off")
    if not ledger.given("lora_dropout"):
        ledger.remark("TRL's adapters have a dropout of 0.05; here dropout is always off.")


def warn_of_processes(ledger: Ledger) -> None:
    """Remark on the batch if the configuration is that of a run on several processes."""
    if ledger.value("world_size") not in (None, 1):
        ledger.remark(
            f"Sizes are those of one process, and TRL ran {ledger.value('world_size')}: with fewer here, raise "
            "ppo.gradient_accumulation_steps by the same factor."
        )
