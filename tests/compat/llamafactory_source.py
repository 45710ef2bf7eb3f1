"""LLaMA-Factory's arguments, copied from its code: every field of its classes with its default.

LlamaFactory at commit ff6d4d12eeb035d6ce06805a5733dd7b29f2ac30 (August 2026), src/llamafactory/hparams; and
transformers 5.8.0, the newest that it allows, Seq2SeqTrainingArguments, which its TrainingArguments extends.
"""

import yaml

MODEL = yaml.safe_load(  # ModelArguments
    """
{model_name_or_path: null, adapter_name_or_path: null, adapter_folder: null, cache_dir: null,
 use_fast_tokenizer: true, resize_vocab: false, split_special_tokens: false, add_tokens: null,
 add_special_tokens: null, new_special_tokens_config: null, init_special_tokens: "noise_init",
 model_revision: "main", low_cpu_mem_usage: true, rope_scaling: null, flash_attn: "auto", shift_attn: false,
 mixture_of_depths: null, use_unsloth: false, use_unsloth_gc: false, enable_liger_kernel: false,
 moe_aux_loss_coef: null, disable_gradient_checkpointing: false, use_reentrant_gc: true, upcast_layernorm: false,
 upcast_lmhead_output: false, train_from_scratch: false, infer_backend: "huggingface", offload_folder: "offload",
 use_kv_cache: true, use_v1_kernels: false, infer_dtype: "auto", hf_hub_token: null, ms_hub_token: null,
 om_hub_token: null, print_param_status: false, trust_remote_code: false, quantization_method: "bnb",
 quantization_bit: null, quantization_type: "nf4", double_quantization: true, quantization_device_map: null,
 image_max_pixels: 589824, image_min_pixels: 1024, image_do_pan_and_scan: false, crop_to_patches: false,
 video_max_pixels: 65536, video_min_pixels: 256, video_fps: 2.0, video_maxlen: 128, use_audio_in_video: false,
 audio_sampling_rate: 16000, export_dir: null, export_size: 5, export_device: "cpu", export_quantization_bit: null,
 export_quantization_dataset: null, export_quantization_nsamples: 128, export_quantization_maxlen: 1024,
 export_legacy_format: false, export_hub_model_id: null, use_kt: false, kt_cpu_activation: null,
 kt_weight_path: null, kt_non_expert_weight_path: null, kt_expert_checkpoint_path: null, kt_use_lora_experts: null,
 kt_lora_expert_num: null, kt_lora_expert_intermediate_size: null, vllm_maxlen: 4096, vllm_gpu_util: 0.7,
 vllm_enforce_eager: false, vllm_max_lora_rank: 32, vllm_config: null, sglang_maxlen: 4096,
 sglang_mem_fraction: 0.7, sglang_tp_size: -1, sglang_config: null, sglang_lora_backend: "triton"}
"""
)
DATA = yaml.safe_load(  # DataArguments
    """
{template: null, dataset: null, eval_dataset: null, dataset_dir: "data", media_dir: null, cutoff_len: 2048,
 train_on_prompt: false, mask_history: false, streaming: false, buffer_size: 16384, mix_strategy: "concat",
 interleave_probs: null, overwrite_cache: false, preprocessing_batch_size: 1000, preprocessing_num_workers: null,
 max_samples: null, eval_num_beams: null, ignore_pad_token_for_loss: true, val_size: 0.0,
 eval_on_each_dataset: false, packing: null, neat_packing: false, tool_format: null, default_system: null,
 enable_thinking: true, preserve_thinking: false, tokenized_path: null, data_shared_file_system: false}
"""
)
TRAINING = yaml.safe_load(  # TrainingArguments
    """
{ray_num_workers: 1, ray_init_kwargs: null, master_addr: null, master_port: null, fp8: false, fp8_backend: "auto",
 fp8_enable_fsdp_float8_all_gather: false, enable_torch_profiler: false, profiler_output_dir: null,
 profiler_wait_steps: 1, profiler_warmup_steps: 1, profiler_active_steps: 1, profiler_repeat: 1,
 profiler_record_shapes: true, profiler_profile_memory: true, profiler_with_stack: true, profile_modules: null,
 overwrite_output_dir: false}
"""
)
FINETUNING = yaml.safe_load(  # FinetuningArguments
    """
{freeze_trainable_layers: 2, freeze_trainable_modules: "all", freeze_extra_modules: null, additional_target: null,
 module_dropout: 0.0, oft_rank: 0, oft_block_size: 32, oft_target: "all", create_new_adapter: false,
 lora_alpha: null, lora_dropout: 0.0, lora_rank: 8, lora_target: "all", loraplus_lr_ratio: null,
 loraplus_lr_embedding: 1.0e-06, use_rslora: false, use_dora: false, pissa_init: false, pissa_iter: 16,
 pissa_convert: false, pref_beta: 0.1, pref_ftx: 0.0, pref_bco_weight: 0.0, pref_loss: "sigmoid",
 dpo_label_smoothing: 0.0, kto_chosen_weight: 1.0, kto_rejected_weight: 1.0, simpo_gamma: 0.5, ppo_buffer_size: 1,
 ppo_epochs: 4, ppo_score_norm: false, ppo_target: 6.0, ppo_whiten_rewards: false, ref_model: null,
 ref_model_adapters: null, ref_model_quantization_bit: null, reward_model: null, reward_model_adapters: null,
 reward_model_quantization_bit: null, reward_model_type: "lora", ld_alpha: null, use_galore: false,
 galore_target: "all", galore_rank: 16, galore_update_interval: 200, galore_scale: 2.0, galore_proj_type: "std",
 galore_layerwise: false, use_apollo: false, apollo_target: "all", apollo_rank: 16, apollo_update_interval: 200,
 apollo_scale: 32.0, apollo_proj: "random", apollo_proj_type: "std", apollo_scale_type: "channel",
 apollo_layerwise: false, apollo_scale_front: false, use_badam: false, badam_mode: "layer", badam_start_block: null,
 badam_switch_mode: "ascending", badam_switch_interval: 50, badam_update_ratio: 0.05, badam_mask_mode: "adjacent",
 badam_verbose: 0, use_swanlab: false, swanlab_project: "llamafactory", swanlab_workspace: null,
 swanlab_run_name: null, swanlab_mode: "cloud", swanlab_api_key: null, swanlab_logdir: null,
 swanlab_lark_webhook_url: null, swanlab_lark_secret: null, pure_bf16: false, stage: "sft", finetuning_type: "lora",
 use_llama_pro: false, use_adam_mini: false, use_mca: false, use_megatron_bridge: false, use_hyper_parallel: false,
 hyper_parallel_args: null, hyper_parallel_cp_size: 1, use_muon: false, use_dft_loss: false, use_asft_loss: false,
 asft_alpha: 0.1, use_eaft_loss: false, eaft_alpha: 1.0, freeze_vision_tower: true,
 freeze_multi_modal_projector: true, freeze_language_model: false, compute_accuracy: false,
 disable_shuffling: false, early_stopping_steps: null, plot_loss: false, include_effective_tokens_per_second: false}
"""
)
GENERATING = yaml.safe_load(  # GeneratingArguments
    """
{do_sample: true, temperature: 0.95, top_p: 0.7, top_k: 50, num_beams: 1, max_length: 1024, max_new_tokens: 1024,
 repetition_penalty: 1.0, length_penalty: 1.0, skip_special_tokens: true}
"""
)
TRANSFORMERS = yaml.safe_load(
    """
{output_dir: null, per_device_train_batch_size: 8, num_train_epochs: 3.0, max_steps: -1, learning_rate: 5.0e-05,
 lr_scheduler_type: "linear", lr_scheduler_kwargs: null, warmup_steps: 0, optim: "adamw_torch_fused",
 optim_args: null, weight_decay: 0.0, adam_beta1: 0.9, adam_beta2: 0.999, adam_epsilon: 1.0e-08,
 optim_target_modules: null, gradient_accumulation_steps: 1, average_tokens_across_devices: true,
 max_grad_norm: 1.0, label_smoothing_factor: 0.0, bf16: false, fp16: false, bf16_full_eval: false,
 fp16_full_eval: false, tf32: null, gradient_checkpointing: false, gradient_checkpointing_kwargs: null,
 torch_compile: false, torch_compile_backend: null, torch_compile_mode: null, use_liger_kernel: false,
 liger_kernel_config: null, use_cache: false, neftune_noise_alpha: null, torch_empty_cache_steps: null,
 auto_find_batch_size: false, logging_strategy: "steps", logging_steps: 500, logging_first_step: false,
 log_on_each_node: true, logging_nan_inf_filter: true, include_num_input_tokens_seen: "no", log_level: "passive",
 log_level_replica: "warning", disable_tqdm: null, report_to: "none", run_name: null, project: "huggingface",
 trackio_space_id: null, trackio_bucket_id: null, trackio_static_space_id: null, eval_strategy: "no",
 eval_steps: null, eval_delay: 0, per_device_eval_batch_size: 8, prediction_loss_only: false, eval_on_start: false,
 eval_do_concat_batches: true, eval_use_gather_object: false, eval_accumulation_steps: null,
 include_for_metrics: [], batch_eval_metrics: false, save_only_model: false, save_strategy: "steps",
 save_steps: 500, save_on_each_node: false, save_total_limit: null, enable_jit_checkpoint: false,
 push_to_hub: false, hub_token: null, hub_private_repo: null, hub_model_id: null, hub_strategy: "every_save",
 hub_always_push: false, hub_revision: null, load_best_model_at_end: false, metric_for_best_model: null,
 greater_is_better: null, ignore_data_skip: false, restore_callback_states_from_checkpoint: false,
 full_determinism: false, seed: 42, data_seed: null, use_cpu: false, accelerator_config: null,
 parallelism_config: null, dataloader_drop_last: false, dataloader_num_workers: 0, dataloader_pin_memory: true,
 dataloader_persistent_workers: false, dataloader_prefetch_factor: null, remove_unused_columns: true,
 label_names: null, train_sampling_strategy: "random", length_column_name: "length",
 ddp_find_unused_parameters: null, ddp_bucket_cap_mb: null, ddp_broadcast_buffers: null, ddp_static_graph: null,
 ddp_backend: null, ddp_timeout: 1800, fsdp: null, fsdp_config: null, deepspeed: null, debug: "",
 skip_memory_metrics: true, do_train: false, do_eval: false, do_predict: false, resume_from_checkpoint: null,
 warmup_ratio: null, logging_dir: null, local_rank: -1, sortish_sampler: false, predict_with_generate: false,
 generation_max_length: null, generation_num_beams: null, generation_config: null}
"""
)
LLAMAFACTORY = {**MODEL, **DATA, **TRANSFORMERS, **TRAINING, **FINETUNING, **GENERATING}
