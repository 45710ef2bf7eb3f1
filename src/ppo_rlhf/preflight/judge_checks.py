"""Checks each language model that judges in a run by one request."""

from __future__ import annotations

from collections.abc import Iterator

from ppo_rlhf.core.errors import PPORLHFError
from ppo_rlhf.data.chats import answered
from ppo_rlhf.evaluation.policy import JUDGE, EvaluationConfig
from ppo_rlhf.judge.llm_judge import load_judge
from ppo_rlhf.judge.settings import LLMJudgeConfig
from ppo_rlhf.preflight.request import RunRequest
from ppo_rlhf.rewards.functions import call_reward_function
from ppo_rlhf.rewards.scoring import AGAINST, MESSAGES


def check_judges(run: RunRequest) -> Iterator[str]:
    """Find a language model that cannot judge: a key or server is missing, or the template does not fit.

    Each language model judges the first prompt of a table, whose text serves as the response. The judge's answer is
    cached as in a run.
    """
    for place, judge in judges_of(run):
        if judge.is_pairwise and judge.against is None and run.writes("best_of_n_samples"):
            yield (
                f"{place}: this pipeline scores single responses, but llm.answer=pairwise compares a response with the "
                "SFT policy's. Set llm.against to a column of the prompts, or set llm.answer to score."
            )
            continue
        try:
            _try(run, place, judge)
        except PPORLHFError as error:
            yield str(error)


def judges_of(run: RunRequest) -> Iterator[tuple[str, LLMJudgeConfig]]:
    """Yield the language models that judge in this run, each as (name of its setting, its configuration)."""
    evaluation = run.group("evaluation", EvaluationConfig)
    for reward in run.rewards:
        yield from ((f"reward.{term.title}", term.llm) for term in reward.components if term.llm is not None)
    if evaluation is not None:
        judges = {JUDGE: evaluation.judge, **{f"{JUDGE}s.{name}": each for name, each in evaluation.judges.items()}}
        yield from ((setting, judge) for setting, judge in judges.items() if isinstance(judge, LLMJudgeConfig))


def _try(run: RunRequest, place: str, judge: LLMJudgeConfig) -> None:
    function = load_judge(judge, place, run.project_path)
    prompts = [*run.prompts.values()]
    for given in prompts if place.startswith("reward.") else prompts[-1:]:
        few = given.select([0])
        columns = {**few.columns, MESSAGES: [chat and answered(chat, "") for chat in few.messages], AGAINST: [""]}
        call_reward_function(function, place, few.texts, few.texts, columns)
