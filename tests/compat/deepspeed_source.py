"""DeepSpeed-Chat's step 3, copied from its code: the options of main.py with their defaults, and a command."""

import shlex

import yaml

# step3_rlhf_finetuning/main.py and deepspeed.add_config_arguments; null: no default, or it must be given
DEEPSPEED_CHAT = yaml.safe_load(
    """
{data_path: ["Dahoas/rm-static"], data_split: "2,4,4", data_output_path: "/tmp/data_files",
 unsupervised_dataset_name: null, unsupervised_dataset_config_name: null, unsup_coef: 27.8,
 actor_model_name_or_path: null, critic_model_name_or_path: null, num_padding_at_beginning: 1,
 per_device_generation_batch_size: 16, per_device_training_batch_size: 16, generation_batches: 1, ppo_epochs: 1,
 max_prompt_seq_len: 256, max_answer_seq_len: 256, actor_learning_rate: 9.65e-6, critic_learning_rate: 5.0e-6,
 actor_weight_decay: 0.0, critic_weight_decay: 0.0, num_train_epochs: 1, lr_scheduler_type: "cosine",
 gradient_accumulation_steps: 1, num_warmup_steps: 100, output_dir: null, seed: null, preprocessing_num_workers: null,
 local_rank: -1, inference_tp_size: 1, tp_gather_partition_size: 8, dtype: "fp16", actor_zero_stage: 0,
 critic_zero_stage: 0, actor_dropout: null, critic_dropout: null, actor_lora_dim: 0,
 actor_lora_module_name: "decoder.layers.", critic_lora_dim: 0, critic_lora_module_name: "decoder.layers.",
 actor_lora_learning_rate: 0.0005, critic_lora_learning_rate: 0.0005, tensorboard_path: "step3_tensorboard",
 print_answers_interval: 1, test_stop_step: 0, deepspeed_config: null, deepscale_config: null}
"""
)

DEEPSPEED_CHAT_SWITCHES = (
    "enable_hybrid_engine unpin_actor_parameters release_inference_cache offload offload_reference_model "
    "offload_reward_model actor_gradient_checkpointing critic_gradient_checkpointing only_optimize_lora "
    "enable_ema enable_mixed_precision_lora compute_fp32_loss enable_tensorboard add_eot_token align_overflow "
    "print_answers enable_test_mode deepspeed deepscale "
)

# training_scripts/opt/single_node/run_1.3b.sh of DeepSpeed-Chat, shortened and with its variables filled in
DEEPSPEED_COMMAND = shlex.split("""
deepspeed --master_port 12346 main.py
   --data_path Dahoas/rm-static
   --data_split 2,4,4
   --actor_model_name_or_path models/actor
   --critic_model_name_or_path AdamG012/chat-opt-350m-reward-deepspeed
   --num_padding_at_beginning 1
   --per_device_generation_batch_size 4
   --per_device_training_batch_size 4
   --generation_batches 1
   --ppo_epochs 1
   --max_answer_seq_len 256
   --max_prompt_seq_len 256
   --actor_learning_rate 9.65e-6
   --critic_learning_rate 5e-6
   --num_train_epochs 1
   --lr_scheduler_type cosine
   --gradient_accumulation_steps 1
   --actor_dropout 0.0
   --num_warmup_steps 100
   --deepspeed --seed 1234
   --enable_hybrid_engine
   --actor_zero_stage 3
   --enable_ema
   --output_dir ./output
""")
