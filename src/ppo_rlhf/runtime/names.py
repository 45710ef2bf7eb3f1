"""Names that more than one module knows: datasets of the loop, and what a run is called in other processes."""

STATE, NEXT_STATE = "training_state", "next_training_state"
"""Datasets with the training state before and after an iteration: the second becomes the first."""
ITERATION_METRICS, EVALUATION_METRICS = "ppo_metrics", "evaluation_metrics"
CHECKPOINT, RESUME_CHECKPOINT = "checkpoint", "resume_checkpoint"
"""Datasets: the checkpoints that a run writes, and the one that it resumes from."""
POLICY, CRITIC = "ppo_policy", "ppo_critic"
HUMAN_EVALUATION = "human_evaluation"
TEMPLATE = "chat_template_kwargs"
"""The setting that gives values to what a chat template reads."""
TRAININGS = "sweep_trainings"
"""The dataset of a sweep's trainings."""
LATEST = "latest"
"""`resume=latest` resumes the newest unfinished run."""
RUN_ID = "PPO_RLHF_RUN_ID"
"""The environment variable by which all processes of a run know its MLflow run id."""
TRAINING_KL = "training_kl"
"""Key of a logged evaluation: the iteration's `objective/kl`, if the evaluation was greedy."""

SET = "set"
"""Tag of an MLflow run: what was set on the command line, or for a training of a sweep in its grid."""


def env_option(environment: str | None) -> str:
    """Return what a command is typed with to be of an environment; nothing for conf/local, which is the default."""
    return f" --env {environment}" if environment not in (None, "local") else ""


MOVED = {
    "ppo_rlhf.rewards.exact_answer": "ppo_rlhf.recipes.exact_answer",
    "ppo_rlhf.rewards.sentiment": "ppo_rlhf.recipes.sentiment",
    "ppo_rlhf.data.recipe_prompts": "ppo_rlhf.recipes.recipe_prompts",
    "ppo_rlhf.demo.calculator": "ppo_rlhf.recipes.calculator",
    "ppo_rlhf.demo.random_walks": "ppo_rlhf.recipes.random_walks",
}
"""Modules that settings name as module:function, by the name that they had before they moved."""


def with_new_names(text: str) -> str:
    """Return a setting's value, or a tag's name, with the new name of each module in it that has moved."""
    for before, now in MOVED.items():
        text = text.replace(before, now)
    return text
