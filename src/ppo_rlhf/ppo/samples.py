"""An iteration's responses as plain tables, for people to read."""

from __future__ import annotations

from ppo_rlhf.ppo.experience import Experience, Scores, ShapedRewards
from ppo_rlhf.ppo.rollout import Rollouts


def completion_rows(experience: Experience) -> list[dict[str, object]]:
    """Return one row a response of the iteration, in its order.

    Columns: iteration, prompt, completion, score (as the rewards gave it), with several rewards `score_<name>` of each,
    kl (k1 over the response, nats), advantage (mean over its tokens), tokens (the policy's, stop token included) and
    stopped (false: cut off).
    """
    rollouts, scores = experience.rollouts, experience.scores
    tokens = rollouts.mask.sum(-1)
    columns: dict[str, list[object]] = {
        "iteration": [rollouts.iteration] * len(tokens),
        "prompt": list(rollouts.prompts.texts),
        "completion": list(rollouts.texts.completions),
        "score": scores.total.tolist(),
        "kl": experience.shaped_rewards.kl.sum(-1).tolist(),
        "advantage": (experience.advantages.sum(-1) / tokens.clamp(min=1)).tolist(),
        "tokens": tokens.tolist(),
        "stopped": rollouts.responses.terminated.tolist(),
    }
    if len(scores.components) > 1:
        columns |= {f"score_{name}": values.tolist() for name, values in scores.components.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def sample_table(
    rollouts: Rollouts, scores: Scores, shaped_rewards: ShapedRewards, limit: int = 20
) -> dict[str, list[object]]:
    """Return the first `limit` rollouts as columns: prompt, response, score, KL (nats over the response), stopped."""
    return {
        "prompt": list(rollouts.prompts.texts[:limit]),
        "response": list(rollouts.texts.completions[:limit]),
        "score": scores.total[:limit].tolist(),
        "kl": shaped_rewards.kl.sum(-1)[:limit].tolist(),
        "stopped": rollouts.responses.terminated[:limit].tolist(),
    }
