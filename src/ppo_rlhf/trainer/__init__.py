"""PPOTrainer: PPO in a script, without Kedro and MLflow. Import it from `ppo_rlhf` or `ppo_rlhf.training`."""
