"""Calls each function of the user once before a run: rewards, judges, rates, the labeller and the environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.data.chats import Chat, answered
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.data.prompts import PromptsConfig
from ppo_rlhf.evaluation.policy import EvaluationConfig
from ppo_rlhf.ppo.callbacks import own_callbacks, reporting_callbacks
from ppo_rlhf.ppo.environments import call_environment
from ppo_rlhf.preflight.request import RunRequest
from ppo_rlhf.rewards.combination_rules import check_whole
from ppo_rlhf.rewards.functions import call_reward_function, check_column_names
from ppo_rlhf.rewards.scoring import MESSAGES, TURNS
from ppo_rlhf.rewards.shaping import check_token_rewards
from ppo_rlhf.runtime.user_functions import load_function
from ppo_rlhf.supervised.reward_training import RewardModellingConfig

TRIED_PROMPTS = 2


def functions_of(run: RunRequest) -> dict[str, dict[str, PromptDataset]]:
    """Return the user's functions as `module:name`, each with the prompts that it gets, by the path of their table."""
    evaluation = run.group("evaluation", EvaluationConfig)
    rewards = run.group("reward_modelling", RewardModellingConfig)
    prompts = run.prompts
    prompts_of: dict[str, dict[str, PromptDataset]] = {}
    if evaluation is not None:
        judging = (evaluation.judge, *evaluation.judges.values(), *evaluation.rates.values())
        prompts_of |= {name: dict([*prompts.items()][-1:]) for name in judging if isinstance(name, str)}
    if rewards is not None and rewards.labeller is not None and run.samples_pairs:
        prompts_of[rewards.labeller] = dict([*prompts.items()][:1])
    return prompts_of | dict.fromkeys(run.reward_functions, prompts)


def check_function(run: RunRequest, reference: str, prompts: Mapping[str, PromptDataset]) -> None:
    """Refuse a function that cannot be imported, raises, or does not return the required finite numbers.

    The function is called with two prompts of each table. The texts of the prompts also serve as responses.
    """
    function = load_function(reference, run.project_path)
    ppo = run.group("ppo", PPOConfig)
    tokenizer = run.tokenizers.get(run.start) or next(iter(run.tokenizers.values()), None)
    for few, source in _tried(run, prompts):
        chats = few.messages
        texts = [text if chat is None else _text(chat) for text, chat in zip(few.texts, chats, strict=True)]
        whole = [None if chat is None else answered(chat, text) for chat, text in zip(chats, texts, strict=True)]
        columns = {**few.columns, TURNS: [[text] for text in texts], MESSAGES: whole}
        ids = None
        # If the run has not trained its tokenizer yet, the bytes of the text serve as token ids
        if reference in run.reward_functions:
            ids = [[*text.encode()] for text in texts] if tokenizer is None else tokenizer(texts)["input_ids"]
        scores = call_reward_function(function, f"{reference} on {source}", few.texts, texts, columns, ids)
        if ppo is not None and isinstance(scores[0], list):
            check_token_rewards(ppo)
            for reward in run.rewards:
                if any(component.function == reference for component in reward.components):
                    check_whole(reward.combine, reference)


def check_environment(run: RunRequest) -> Iterator[str]:
    """Find an environment that cannot be imported, raises, or does not answer an empty first turn to two prompts."""
    ppo = run.group("ppo", PPOConfig)
    if ppo is None or ppo.environment is None:
        return
    if run.samples_pairs:
        yield (
            f"ppo.environment={ppo.environment}: pairs of episodes cannot be sampled for a reward model; set "
            "preferences_path, or run `--pipelines align` with a reward of your own"
        )
    function = load_function(ppo.environment, run.project_path)
    for few, source in _tried(run, run.prompts):
        empty = [""] * len(few)
        turns = [[text] for text in empty]
        call_environment(function, f"{ppo.environment} on {source}", few.texts, empty, turns, few.columns)


def check_callbacks(run: RunRequest) -> Iterator[str]:
    """Find callbacks and reporters (`ppo.report_to`) that cannot be created."""
    ppo = run.group("ppo", PPOConfig)
    if ppo is None:
        return
    if "mlflow" in ppo.report_to:
        yield "ppo.report_to: the pipeline tracks its runs in MLflow itself (mlflow.yml); leave mlflow out"
    own_callbacks(ppo, run.project_path)
    reporting_callbacks(ppo)


def _tried(run: RunRequest, prompts: Mapping[str, PromptDataset]) -> Iterator[tuple[PromptDataset, str]]:
    """Yield the first prompts of each table, in the form that functions get, with the path of the table."""
    settings = run.group("prompts", PromptsConfig)
    for source, given in prompts.items():
        check_column_names(given.columns, source, None if settings is None else settings.column)
        yield given.select(range(min(TRIED_PROMPTS, len(given)))), source


def _text(chat: Chat) -> str:
    return "\n".join(message["content"] or "" for message in chat)
