from ppo_rlhf.settings import *  # noqa: F403
