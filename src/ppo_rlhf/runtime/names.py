"""Names that several modules use: datasets of the PPO loop, settings, tags and environment variables."""

import secrets
import shlex

STATE, NEXT_STATE = "training_state", "next_training_state"
"""Datasets with the training state before and after an iteration. `next_training_state` is the next iteration's
`training_state`."""
ITERATION_METRICS, EVALUATION_METRICS = "ppo_metrics", "evaluation_metrics"
CHECKPOINT, RESUME_CHECKPOINT = "checkpoint", "resume_checkpoint"
"""Datasets: the checkpoints that a run writes, and the checkpoint that a run resumes from."""
POLICY, CRITIC = "ppo_policy", "ppo_critic"
HELD_OUT_DEMONSTRATIONS = "held_out_demonstrations"
"""Value of `reference_texts_path` that names the demonstrations that SFT held out."""
TEMPLATE = "chat_template_kwargs"
"""Name of the setting with values for the variables of a chat template."""
TRAININGS = "sweep_trainings"
"""Name of the dataset with the trainings of a sweep."""
LATEST = "latest"
"""`resume=latest` resumes the newest unfinished run."""
RUN_ID = "PPO_RLHF_RUN_ID"
"""The environment variable that passes the MLflow run id to all processes of a run."""
TRAINING_KL = "training_kl"
"""Key of a logged evaluation: the iteration's `objective/kl`, if the evaluation was greedy."""
EXPORTED = "eval/since_best_exported"
"""Key of the evaluation that stopped a run because its policy exploits its reward: the iteration whose policy is
exported."""

IS_LAST = "is_last"
"""Key of a logged evaluation after which training is over."""

SET = "set"
"""Tag of an MLflow run: the parameters set on the command line, or for a training of a sweep the parameters of its
grid."""


class UntrackedRun:
    """The name of a run without tracking in MLflow, which no other run has, on any machine."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> str:
        """Give the run that begins now a new name, and return the name."""
        self.name = f"untracked-{secrets.token_hex(8)}"
        return self.name


untracked = UntrackedRun()


def env_option(environment: str | None) -> str:
    """Return the option ` --env …` for a command; empty for conf/local, the default environment."""
    return f" --env {shlex.quote(environment)}" if environment is not None and environment != "local" else ""
