"""TRL's full configurations, copied from its code: every field with its default; and a script of the legacy API."""

import yaml

# trl 0.11.4, trl.trainer.PPOConfig; exp_name is the name of the script there
TRL_LEGACY = yaml.safe_load(
    """
{exp_name: "ppo", seed: 0, log_with: null, task_name: null, model_name: "gpt2", query_dataset: "stanfordnlp/imdb",
 reward_model: "sentiment-analysis:lvwerra/distilbert-imdb", remove_unused_columns: true, tracker_kwargs: {},
 accelerator_kwargs: {}, project_kwargs: {}, tracker_project_name: "trl", push_to_hub_if_best_kwargs: {},
 steps: 20000, learning_rate: 1.41e-5, adap_kl_ctrl: true, init_kl_coef: 0.2, kl_penalty: "kl", target: 6.0,
 horizon: 10000.0, gamma: 1.0, lam: 0.95, cliprange: 0.2, cliprange_value: 0.2, vf_coef: 0.1, batch_size: 128,
 forward_batch_size: null, mini_batch_size: 128, gradient_accumulation_steps: 1, world_size: null, ppo_epochs: 4,
 max_grad_norm: null, optimize_cuda_cache: null, optimize_device_cache: false, early_stopping: false, target_kl: 1.0,
 compare_steps: 1, ratio_threshold: 10.0, use_score_scaling: false, use_score_norm: false, score_clip: null,
 whiten_rewards: false, gradient_checkpointing: false, is_encoder_decoder: null, is_peft_model: null,
 backward_batch_size: null, global_backward_batch_size: null, global_batch_size: null, dataset_num_proc: null}
"""
)

# trl 1.12.0, trl.experimental.ppo.PPOConfig with transformers 5.17.0's TrainingArguments
TRL_LAST = yaml.safe_load(
    """
{output_dir: null, per_device_train_batch_size: 8, num_train_epochs: 3.0, max_steps: -1, learning_rate: 3.0e-6,
 lr_scheduler_type: "linear", lr_scheduler_kwargs: null, warmup_steps: 0, optim: "adamw_torch_fused",
 optim_args: null, weight_decay: 0.0, adam_beta1: 0.9, adam_beta2: 0.999, adam_epsilon: 1.0e-8,
 optim_target_modules: null, gradient_accumulation_steps: 1, average_tokens_across_devices: true, max_grad_norm: 1.0,
 label_smoothing_factor: 0.0, bf16: null, fp16: false, bf16_full_eval: false, fp16_full_eval: false, tf32: null,
 gradient_checkpointing: true, gradient_checkpointing_kwargs: null, torch_compile: false, torch_compile_backend: null,
 torch_compile_mode: null, use_liger_kernel: false, liger_kernel_config: null, use_cache: false,
 neftune_noise_alpha: null, torch_empty_cache_steps: null, auto_find_batch_size: false, logging_strategy: "steps",
 logging_steps: 10, logging_first_step: false, log_on_each_node: true, logging_nan_inf_filter: true,
 include_num_input_tokens_seen: "no", log_level: "passive", log_level_replica: "warning", disable_tqdm: null,
 report_to: "none", run_name: null, project: "huggingface", trackio_space_id: null, trackio_bucket_id: null,
 trackio_static_space_id: null, eval_strategy: "no", eval_steps: null, eval_delay: 0, per_device_eval_batch_size: 8,
 prediction_loss_only: false, eval_on_start: false, eval_do_concat_batches: true, eval_use_gather_object: false,
 eval_accumulation_steps: null, include_for_metrics: [], batch_eval_metrics: false, save_only_model: false,
 save_strategy: "steps", save_steps: 500, save_on_each_node: false, save_total_limit: null,
 enable_jit_checkpoint: false, push_to_hub: false, hub_token: null, hub_private_repo: null, hub_model_id: null,
 hub_strategy: "every_save", hub_always_push: false, hub_revision: null, load_best_model_at_end: false,
 metric_for_best_model: null, greater_is_better: null, ignore_data_skip: false,
 restore_callback_states_from_checkpoint: false, full_determinism: false, seed: 42, data_seed: null, use_cpu: false,
 accelerator_config: null, parallelism_config: null, dataloader_drop_last: false, dataloader_num_workers: 0,
 dataloader_pin_memory: true, dataloader_persistent_workers: false, dataloader_prefetch_factor: null,
 dataloader_multiprocessing_context: null, dataloader_in_order: true, remove_unused_columns: true, label_names: null,
 train_sampling_strategy: "random", length_column_name: "length", ddp_find_unused_parameters: null,
 ddp_bucket_cap_mb: null, ddp_broadcast_buffers: null, ddp_static_graph: null, ddp_backend: null, ddp_timeout: 1800,
 fsdp: null, fsdp_config: null, deepspeed: null, debug: "", skip_memory_metrics: true, do_train: false,
 do_eval: false, do_predict: false, resume_from_checkpoint: null, local_rank: -1, dataset_num_proc: null,
 num_mini_batches: 1, total_episodes: null, local_rollout_forward_batch_size: 64, num_sample_generations: 10,
 response_length: 53, stop_token: null, stop_token_id: null, temperature: 0.7, missing_eos_penalty: null,
 sft_model_path: "EleutherAI/pythia-160m", world_size: null, num_total_batches: null, micro_batch_size: null,
 local_batch_size: null, batch_size: null, local_mini_batch_size: null, mini_batch_size: null,
 reward_model_path: "EleutherAI/pythia-160m", model_adapter_name: null, ref_adapter_name: null, num_ppo_epochs: 4,
 whiten_rewards: false, kl_coef: 0.05, kl_estimator: "k1", cliprange: 0.2, vf_coef: 0.1, cliprange_value: 0.2,
 gamma: 1.0, lam: 0.95, ds3_gather_for_generation: true}
"""
)

# trl 1.12.0, trl.ModelConfig and trl.ScriptArguments, which scripts parse from the same file
TRL_MODEL = yaml.safe_load(
    """
{model_name_or_path: null, model_revision: "main", dtype: "float32", attn_implementation: null, use_peft: false,
 lora_r: 16, lora_alpha: 32, lora_dropout: 0.05, lora_target_modules: null, lora_target_parameters: null,
 lora_modules_to_save: null, lora_task_type: "CAUSAL_LM", use_rslora: false, use_dora: false, load_in_8bit: false,
 load_in_4bit: false, bnb_4bit_quant_type: "nf4", use_bnb_nested_quant: false, bnb_4bit_quant_storage: null,
 dataset_name: null, dataset_config: null, dataset_train_split: "train", dataset_test_split: "test",
 dataset_streaming: false, ignore_bias_buffers: false}
"""
)

# the script of TRL's legacy API in an introduction to RLHF libraries
LEGACY_SCRIPT = yaml.safe_load(
    """
{model_name: "gpt2", learning_rate: 1.41e-5, log_with: "wandb", batch_size: 256, mini_batch_size: 32,
 gradient_accumulation_steps: 1, optimize_cuda_cache: true, early_stopping: false, target_kl: 0.1, ppo_epochs: 4,
 seed: 0, init_kl_coef: 0.2, adap_kl_ctrl: true}
"""
)
