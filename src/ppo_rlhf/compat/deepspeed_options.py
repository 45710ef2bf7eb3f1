"""Tables of DeepSpeed-Chat's step 3: its options, the trainer's and the engine's constants, and what is not carried."""

from __future__ import annotations

from typing import Any

from ppo_rlhf.compat.ledger import by_setting, names

# Of main.py; only what is read below.
DEFAULTS: dict[str, Any] = {
    "data_path": ["Dahoas/rm-static"],
    "unsup_coef": 27.8,
    "per_device_generation_batch_size": 16,
    "per_device_training_batch_size": 16,
    "generation_batches": 1,
    "ppo_epochs": 1,
    "max_answer_seq_len": 256,
    "actor_learning_rate": 9.65e-6,
    "critic_learning_rate": 5e-6,
    "actor_weight_decay": 0.0,
    "critic_weight_decay": 0.0,
    "num_train_epochs": 1,
    "lr_scheduler_type": "cosine",
    "gradient_accumulation_steps": 1,
    "num_warmup_steps": 100,
    "dtype": "fp16",
    "actor_lora_dim": 0,
    "critic_lora_dim": 0,
    "actor_lora_learning_rate": 5e-4,
    "critic_lora_learning_rate": 5e-4,
}
CONSTANTS = {  # of ppo_trainer.py, ds_utils.py and rlhf_engine.py
    "kl_coef": (0.1, "the trainer's kl_ctl"),
    "reward_clip": (5.0, "the trainer's clip_reward_value"),
    "cliprange": (0.2, "the trainer's cliprange"),
    "cliprange_value": (0.2, "the trainer's cliprange_value"),
    "gamma": (1.0, "the trainer's gamma"),
    "lam": (0.95, "the trainer's lam"),
    "kl_controller": ("fixed", "always so in the trainer"),
    "kl_estimator": ("k1", "always so in the trainer"),
    "kl_in": ("reward", "always so in the trainer"),
    "whiten_rewards": (False, "always so in the trainer"),
    "whiten_advantages": (False, "always so in the trainer"),
    "missing_eos_penalty": (None, "the trainer has none"),
    "vf_coef": (1.0, "the critic has a loss of its own"),
    "max_grad_norm": (1.0, "gradient_clipping of its DeepSpeed configuration"),
    "adam_beta1": (0.9, "betas of its engine"),
    "adam_beta2": (0.95, "betas of its engine"),
    "value_model": ("reward_init", "critic and reward model are loaded from one place"),
    "stop_token": ("eos", "as generate does"),
    "temperature": (1.0, "log-probabilities are not tempered"),
    "overlong_prompts": ("drop", "it leaves overlong prompts out"),
}
EMA_DECAY = 0.992
PRECISION = {"fp16": "float16", "bf16": "bfloat16"}
OLDER_NAMES = {
    "per_device_train_batch_size": "per_device_generation_batch_size",
    "per_device_mini_train_batch_size": "per_device_training_batch_size",
    "generation_batch_numbers": "generation_batches",
}
SAME = {
    "ppo_epochs": "num_ppo_epochs",
    "max_answer_seq_len": "response_length",
    "lr_scheduler_type": "lr_scheduler_type",
}

SWITCHES = names(
    "enable_hybrid_engine unpin_actor_parameters release_inference_cache offload offload_reference_model "
    "offload_reward_model actor_gradient_checkpointing critic_gradient_checkpointing only_optimize_lora enable_ema "
    "enable_mixed_precision_lora compute_fp32_loss enable_tensorboard add_eot_token align_overflow print_answers "
    "enable_test_mode deepspeed deepscale disable_actor_dropout disable_critic_dropout"
)
REASONS = by_setting(
    {
        "prompts come from one file, prompts_path": "data_split data_output_path",
        "prompts that leave no room for the response in the model's context are dropped; there is no other limit": (
            "max_prompt_seq_len"
        ),
        "no unsupervised data is mixed in": "unsupervised_dataset_name unsupervised_dataset_config_name unsup_coef",
        "positions come from lengths, and no model needs it": "num_padding_at_beginning",
        "outputs are catalog entries, conf/base/catalog_ppo.yml": "output_dir",
        "prompts are tokenised once, in one process": "preprocessing_num_workers",
        "it is for a GPU: set ppo.offload_reference_policy or ppo.offload_reward_model there": (
            "offload_reference_model offload_reward_model"
        ),
        "how devices share the work is not part of these parameters": (
            "local_rank offload actor_zero_stage critic_zero_stage "
            "deepspeed deepspeed_config deepscale deepscale_config enable_mixed_precision_lora"
        ),
        "there is no hybrid engine: ppo.rollout_engine generates": (
            "enable_hybrid_engine unpin_actor_parameters release_inference_cache inference_tp_size "
            "tp_gather_partition_size"
        ),
        "dropout is always off": "actor_dropout critic_dropout disable_actor_dropout disable_critic_dropout",
        "LoRA is put on the linear layers that ppo.lora_target_modules names": (
            "actor_lora_module_name critic_lora_module_name"
        ),
        "losses are always float32 or wider": "compute_fp32_loss",
        "tracking is configured in conf/base/mlflow.yml": "enable_tensorboard tensorboard_path",
        "the vocabulary of a person's model is never changed": "add_eot_token",
        "samples are logged every ppo.sample_interval iterations": "print_answers print_answers_interval",
        "the length of training is ppo.total_episodes": "enable_test_mode test_stop_step",
    }
)
LAUNCHER = "an option of the launcher, not of training"

OPTIONS = frozenset(
    {*DEFAULTS, *SWITCHES, *OLDER_NAMES, *REASONS, "actor_model_name_or_path", "critic_model_name_or_path", "seed"}
)
KINDS = {name: "nothing" if name in SWITCHES else "value" for name in OPTIONS} | {"data_path": "values"}
