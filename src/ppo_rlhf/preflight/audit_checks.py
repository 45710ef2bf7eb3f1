"""What a run checks and says about the audit of its reward before it begins."""

from __future__ import annotations

from collections.abc import Iterator

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.evaluation.attacks import attacks
from ppo_rlhf.evaluation.best_of_n import BestOfNConfig
from ppo_rlhf.evaluation.reward_holes import holes_of
from ppo_rlhf.pipelines.audit_reward.reward_audit import AuditConfig
from ppo_rlhf.preflight.judge_checks import judges_of
from ppo_rlhf.preflight.request import RunRequest
from ppo_rlhf.rewards.config import RewardConfig


def check_audit(run: RunRequest) -> Iterator[str]:
    """Find a column of reference answers that the audit's prompts do not have."""
    audit, prompts = run.group("audit", AuditConfig), [*run.prompts.values()]
    name = None if audit is None else audit.reference_column
    if name is not None and prompts and name not in prompts[-1].columns:
        known = ", ".join(prompts[-1].columns) or "none beside the prompts"
        yield f"audit.reference_column={name}: the prompts have no such column; their columns: {known}."


def describe_audit(run: RunRequest) -> str:
    """Return the holes that an earlier audit found in this reward, or the bill of an audit by language models.

    The bill names the largest number of requests. The text is empty if there is nothing to say.
    """
    reward, model = run.group("reward", RewardConfig), run.models.get("reward_model")
    if reward is not None and run.reads("audited_holes"):
        holes = holes_of(run.catalog["audited_holes"].load(), reward, model, run.project_path)
        if holes:
            return f"Audited: {len(holes)} hole{'s' if len(holes) > 1 else ''} ({', '.join(holes)})."
    audit, best_of_n, ppo = (
        run.group("audit", AuditConfig),
        run.group("best_of_n", BestOfNConfig),
        run.group("ppo", PPOConfig),
    )
    judges = [*judges_of(run)]
    if audit is None or best_of_n is None or ppo is None or not judges or not run.prompts:
        return ""
    prompts = [*run.prompts.values()][-1]
    count = min(best_of_n.prompts, len(prompts))
    samples = best_of_n.samples * count
    attacked = len(attacks(audit.suffixes, has_reference=audit.reference_column is not None)) * count
    attacked += audit.search_rewards
    tokenizer = run.tokenizers.get(run.start) or next(iter(run.tokenizers.values()))
    before = sum(prompts.lengths[:count]) / count + ppo.response_length
    bills = []
    for place, judge in judges:
        asked = (samples + attacked * place.startswith("reward.")) * (2 if judge.is_pairwise else 1)
        tokens = asked * (len(tokenizer(judge.question)["input_ids"]) + before)
        most = "any number of" if judge.max_tokens is None else f"at most {asked * judge.max_tokens:,}"
        bills.append(
            f"{place} ({judge.model}): at most {asked:,} requests, about {tokens:,.0f} tokens in by the policy's "
            f"tokenizer, {most} out"
        )
    cheaper = "best_of_n.prompts, best_of_n.samples and audit.search_rewards make it cheaper."
    return f"The audit asks {'; '.join(bills)}. {cheaper}"
