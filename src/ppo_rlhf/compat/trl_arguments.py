"""Fields of TRL's last PPOConfig without a place here: most are TrainingArguments, of transformers 4 and 5."""

from ppo_rlhf.compat.ledger import by_setting

NOT_CARRIED = by_setting(
    {
        "outputs are catalog entries, conf/base/catalog_ppo.yml": "output_dir overwrite_output_dir",
        "tracking is configured in conf/base/mlflow.yml": (
            "report_to run_name exp_name project logging_dir trackio_space_id trackio_bucket_id trackio_static_space_id"
        ),
        "every iteration is logged": (
            "logging_strategy logging_steps logging_first_step logging_nan_inf_filter log_on_each_node log_level "
            "log_level_replica disable_tqdm include_num_input_tokens_seen include_tokens_per_second"
        ),
        "samples are logged every ppo.sample_interval iterations": "num_sample_generations",
        "TRL's PPO works it out itself, and overwrites what is set": (
            "world_size num_total_batches micro_batch_size local_batch_size batch_size local_mini_batch_size "
            "mini_batch_size max_steps _n_gpu"
        ),
        "deprecated for per_device_train_batch_size": "per_gpu_train_batch_size",
        "TRL's PPO does not evaluate while it trains; here ppo.eval_interval says how often": (
            "eval_strategy evaluation_strategy eval_steps eval_delay eval_on_start do_eval do_predict do_train "
            "eval_accumulation_steps eval_do_concat_batches eval_use_gather_object batch_eval_metrics "
            "prediction_loss_only include_for_metrics include_inputs_for_metrics jit_mode_eval "
            "use_legacy_prediction_loop"
        ),
        "responses of an evaluation are generated evaluation.batch_size at a time": (
            "per_device_eval_batch_size per_gpu_eval_batch_size"
        ),
        "the newest checkpoints are kept and the best: the highest judge score with KL below ppo.kl_alarm": (
            "load_best_model_at_end metric_for_best_model greater_is_better"
        ),
        "checkpoints are always whole, in safetensors": (
            "save_only_model save_on_each_node save_safetensors enable_jit_checkpoint"
        ),
        "going on from a checkpoint is not part of these parameters": (
            "resume_from_checkpoint ignore_data_skip restore_callback_states_from_checkpoint"
        ),
        "nothing is pushed to the hub; the exported policy is a plain directory": (
            "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision "
            "push_to_hub_model_id push_to_hub_organization push_to_hub_token"
        ),
        "the optimiser is AdamW": "optim_args optim_target_modules adafactor",
        "schedules have transformers' own default arguments": "lr_scheduler_kwargs",
        "adapters have no names here: with LoRA the reference is the policy with its adapter off": (
            "model_adapter_name ref_adapter_name"
        ),
        "TRL's PPO does not read it": (
            "label_smoothing_factor label_names neftune_noise_alpha average_tokens_across_devices use_cache "
            "auto_find_batch_size group_by_length train_sampling_strategy length_column_name past_index "
            "torch_empty_cache_steps use_liger_kernel liger_kernel_config skip_memory_metrics debug ray_scope "
            "data_seed bf16_full_eval fp16_full_eval"
        ),
        "all columns of the prompts are kept: reward functions are called with them": "remove_unused_columns",
        "prompts are read whole and tokenised once, so nothing is loaded in the background": (
            "dataset_num_proc dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_in_order "
            "dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context"
        ),
        "precision is ppo.dtype, by autocast": "tf32 fp16_opt_level fp16_backend half_precision_backend",
        "it is torch's and transformers' default here": (
            "gradient_checkpointing_kwargs activation_checkpointing_kwargs torch_compile_backend torch_compile_mode "
            "torchdynamo use_ipex"
        ),
        "how processes share the work is not part of these parameters": (
            "local_rank ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph "
            "ddp_backend ddp_timeout fsdp fsdp_config fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap deepspeed "
            "ds3_gather_for_generation accelerator_config parallelism_config dispatch_batches split_batches "
            "mp_parameters tpu_num_cores tpu_metrics_debug use_mps_device"
        ),
    }
)
