"""DeepSpeed-Chat's step 3, copied from its code: the options of main.py with their defaults, and a shipped script."""

# DeepSpeed-Chat, step3_rlhf_finetuning/main.py and deepspeed.add_config_arguments: each option with its default;
# None where it has none or must be given
DEEPSPEED_CHAT = {
    "data_path": ["Dahoas/rm-static"],
    "data_split": "2,4,4",
    "data_output_path": "/tmp/data_files",
    "unsupervised_dataset_name": None,
    "unsupervised_dataset_config_name": None,
    "unsup_coef": 27.8,
    "actor_model_name_or_path": None,
    "critic_model_name_or_path": None,
    "num_padding_at_beginning": 1,
    "per_device_generation_batch_size": 16,
    "per_device_training_batch_size": 16,
    "generation_batches": 1,
    "ppo_epochs": 1,
    "max_prompt_seq_len": 256,
    "max_answer_seq_len": 256,
    "actor_learning_rate": 9.65e-6,
    "critic_learning_rate": 5e-6,
    "actor_weight_decay": 0.0,
    "critic_weight_decay": 0.0,
    "num_train_epochs": 1,
    "lr_scheduler_type": "cosine",
    "gradient_accumulation_steps": 1,
    "num_warmup_steps": 100,
    "output_dir": None,
    "seed": None,
    "preprocessing_num_workers": None,
    "local_rank": -1,
    "inference_tp_size": 1,
    "tp_gather_partition_size": 8,
    "dtype": "fp16",
    "actor_zero_stage": 0,
    "critic_zero_stage": 0,
    "actor_dropout": None,
    "critic_dropout": None,
    "actor_lora_dim": 0,
    "actor_lora_module_name": "decoder.layers.",
    "critic_lora_dim": 0,
    "critic_lora_module_name": "decoder.layers.",
    "actor_lora_learning_rate": 5e-4,
    "critic_lora_learning_rate": 5e-4,
    "tensorboard_path": "step3_tensorboard",
    "print_answers_interval": 1,
    "test_stop_step": 0,
    "deepspeed_config": None,
    "deepscale_config": None,
}
DEEPSPEED_CHAT_SWITCHES = [
    "enable_hybrid_engine",
    "unpin_actor_parameters",
    "release_inference_cache",
    "offload",
    "offload_reference_model",
    "offload_reward_model",
    "actor_gradient_checkpointing",
    "critic_gradient_checkpointing",
    "only_optimize_lora",
    "enable_ema",
    "enable_mixed_precision_lora",
    "compute_fp32_loss",
    "enable_tensorboard",
    "add_eot_token",
    "align_overflow",
    "print_answers",
    "enable_test_mode",
    "deepspeed",
    "deepscale",
]
# of its first releases
DEEPSPEED_CHAT_OLDER_NAMES = [
    "per_device_train_batch_size",
    "per_device_mini_train_batch_size",
    "generation_batch_numbers",
    "disable_actor_dropout",
    "disable_critic_dropout",
]

# training_scripts/opt/single_node/run_1.3b.sh of DeepSpeed-Chat, shortened
DEEPSPEED_SCRIPT = """\
#!/bin/bash
ACTOR_MODEL_PATH=$1
CRITIC_MODEL_PATH=$2
ACTOR_ZERO_STAGE=$3
OUTPUT=$5
if [ "$OUTPUT" == "" ]; then
    OUTPUT=./output
fi
if [ "$CRITIC_MODEL_PATH" == "" ]; then
    CRITIC_MODEL_PATH=AdamG012/chat-opt-350m-reward-deepspeed
fi

mkdir -p $OUTPUT

Num_Padding_at_Beginning=1 # this is model related
Actor_Lr=9.65e-6
Critic_Lr=5e-6

deepspeed --master_port 12346 main.py \\
   --data_path Dahoas/rm-static \\
   --data_split 2,4,4 \\
   --actor_model_name_or_path $ACTOR_MODEL_PATH \\
   --critic_model_name_or_path $CRITIC_MODEL_PATH \\
   --num_padding_at_beginning 1 \\
   --per_device_generation_batch_size 4 \\
   --per_device_training_batch_size 4 \\
   --generation_batches 1 \\
   --ppo_epochs 1 \\
   --max_answer_seq_len 256 \\
   --max_prompt_seq_len 256 \\
   --actor_learning_rate ${Actor_Lr} \\
   --critic_learning_rate ${Critic_Lr} \\
   --num_train_epochs 1 \\
   --lr_scheduler_type cosine \\
   --gradient_accumulation_steps 1 \\
   --actor_dropout 0.0 \\
   --num_warmup_steps 100 \\
   --deepspeed --seed 1234 \\
   --enable_hybrid_engine \\
   --actor_zero_stage $ACTOR_ZERO_STAGE \\
   --enable_ema \\
   --output_dir $OUTPUT \\
    &> $OUTPUT/training.log
"""
