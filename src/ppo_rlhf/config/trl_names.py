"""Names from TRL, transformers and other trainers, each with the name that this project uses instead.

`PPOConfig` uses these tables for its errors on unknown settings, `compat.trl` for converting configurations, and
`PPOTrainer` for its errors on arguments and attributes of TRL's trainers. Tests compare docs/converting.md with the
tables.
"""

RENAMED = {
    "model_name": "sft_model_path",
    "steps": "ppo.total_episodes",
    "save_steps": "ppo.save_interval",
    "ppo_epochs": "ppo.num_ppo_epochs",
    "init_kl_coef": "ppo.kl_coef",
    "kl_ctl": "ppo.kl_coef",
    "target": "ppo.kl_target",
    "horizon": "ppo.kl_horizon",
    "kl_penalty": "ppo.kl_estimator",
    "score_clip": "ppo.reward_clip",
    "clip_reward_value": "ppo.reward_clip",
    "activation_checkpointing": "ppo.gradient_checkpointing",
    "torch_compile": "ppo.compile",
    "full_determinism": "ppo.deterministic",
    "vllm_importance_sampling_clip_max": "ppo.importance_cap",
    "lora_rank": "ppo.lora_r",
}
"""Settings of other libraries that have another name in this project. A name without `ppo.` is a global of the
pipeline."""

LIVES_ELSEWHERE = {
    **{name: f"it is {ours}{'' if '.' in ours else ', a global of the pipeline'}" for name, ours in RENAMED.items()},
    "model_name_or_path": "it is sft_model_path, a global of the pipeline; the tokenizer is the SFT policy's own",
    "reward_model": "it is PPOTrainer's argument reward, or reward_model_path",
    "dataset_name": "it is PPOTrainer's argument prompts, or prompts_path: a file, or a name on the hub with its split",
    "output_dir": "it is an argument of PPOTrainer.train; the pipeline's outputs are catalog entries",
    **dict.fromkeys(("save_steps", "save_strategy"), "it is ppo.save_interval, counted in iterations"),
    **dict.fromkeys(("eval_steps", "eval_strategy"), "it is ppo.eval_interval, counted in iterations"),
    "logging_steps": "every iteration is logged, and samples of each fifth",
    "run_name": "PPOTrainer's runs have no name; the pipeline's runs are named by tracking.run.name in mlflow.yml",
    **dict.fromkeys(("bf16", "fp16"), "precision is ppo.dtype"),
    **dict.fromkeys(("steps", "num_train_epochs", "max_steps"), "the length of training is ppo.total_episodes"),
    "warmup_steps": "it is ppo.warmup_ratio, the share of the iterations",
    "num_sample_generations": "samples are logged of the first, each fifth and the last iteration",
    "resume_from_checkpoint": "it is an argument of PPOTrainer.train; the pipeline has the parameter resume",
    "micro_batch_size": "it is computed: ppo.per_device_train_batch_size x processes",
    "local_batch_size": "it is computed: ppo.per_device_train_batch_size x ppo.gradient_accumulation_steps",
    "batch_size": "it is per_device_train_batch_size x gradient_accumulation_steps x processes",
    "mini_batch_size": "it is batch_size / ppo.num_mini_batches",
    "local_mini_batch_size": "it is mini_batch_size / processes; ppo.num_mini_batches sets it",
    "num_total_batches": "it is ppo.total_episodes / batch_size, rounded up",
    "forward_batch_size": "it is ppo.per_device_train_batch_size",
    "backward_batch_size": "an optimiser step takes batch_size / ppo.num_mini_batches responses",
    "per_device_eval_batch_size": "it is evaluation.batch_size in the pipeline; PPOTrainer evaluates 64 at a time",
    "early_stopping": "it is ppo.target_kl; without target_kl no update stops early",
    "adap_kl_ctrl": "it is ppo.kl_controller=adaptive",
    "use_score_norm": "it is ppo.reward_normalisation=running",
    "lr_scheduler_kwargs": "ppo.lr_scheduler_type has the schedules that need no arguments",
    "optim_target_modules": "the optimiser updates every trainable weight",
    "gradient_checkpointing_kwargs": "ppo.gradient_checkpointing has no arguments",
    **dict.fromkeys(("use_cpu", "no_cuda"), "it is ppo.device=cpu"),
    "data_seed": "all random numbers depend on ppo.seed",
    "log_with": "it is ppo.report_to (TensorBoard, W&B); the pipeline's runs are always tracked in MLflow as well",
    **dict.fromkeys(
        ("fsdp", "fsdp_config", "deepspeed"), "FSDP2 shards the models; accelerate's file turns it on (docs/scaling.md)"
    ),
    "align_overflow": "a non-finite gradient of the policy or the critic always skips the optimiser step of both",
    "use_vllm": "it is ppo.rollout_engine=vllm",
    "load_in_8bit": "only 4-bit quantisation is supported: ppo.load_in_4bit",
    "lora_dropout": "dropout is always off, because the policy in training must equal the policy that sampled",
}
"""Names of settings that are not fields of PPOConfig, each with a hint to the setting that replaces it."""

_LEAVE_OUT = (
    *("data_collator", "training_data_collator", "num_shared_layers", "generate_ref_response", "response_masks"),
    "columns_to_log",
)
ARGUMENTS = {
    "args": "config",
    "model": "policy",
    "ref_model": "reference_policy",
    "ref_policy": "reference_policy",
    "processing_class": "tokenizer",
    "reward_model": "reward",
    "train_dataset": "prompts",
    "eval_dataset": "evaluation_prompts",
    "query_tensor": "queries",
    "save_model": "save_pretrained",
    "generate_completions": "generate",
    "accelerator": "state.learner.accelerator",
    "current_device": "policy.device",
    **dict.fromkeys(_LEAVE_OUT, "leave it out"),
    **dict.fromkeys(
        ("optimizer", "optimizers", "lr_scheduler"), "optim, learning_rate, lr_scheduler_type in PPOConfig"
    ),
    "peft_config": "use_peft, lora_r, lora_alpha, lora_target_modules in PPOConfig",
    "dataset": "prompts for train(), a torch DataLoader for your own loop",
    "dataloader": "a torch DataLoader over your dataset, with batch_size=config.batch_size",
}
"""Arguments and attributes of TRL's first and last PPOTrainer, each with its replacement in this project."""
