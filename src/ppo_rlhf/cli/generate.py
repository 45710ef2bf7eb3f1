"""`kedro generate`: shows the answers of the SFT policy and of the PPO policy to the same prompts."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
from kedro.pipeline import Pipeline

from ppo_rlhf.cli.errors import Command
from ppo_rlhf.cli.project import context_here, split_params
from ppo_rlhf.core.errors import DataError, ModelError
from ppo_rlhf.core.escaped_text import escaped
from ppo_rlhf.hooks.before_run import missing_paths, refuse_unread
from ppo_rlhf.hooks.policy_settings import settings_to_answer

# Imported here only for type checkers: the functions import these modules themselves, because they import torch
if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel

    from ppo_rlhf.data.prompt_dataset import PromptDataset
    from ppo_rlhf.hooks.own_settings import OwnSettings
    from ppo_rlhf.models.loading import PretrainedHandle
    from ppo_rlhf.preflight import RunRequest

READ, OF_REWARD = {"sft_policy", "ppo_policy", "params:ppo", "params:prompts"}, {"reward_model", "params:reward"}


@click.command(cls=Command)
@click.argument("given", metavar="[PROMPT]...", nargs=-1)
@click.option("--prompts", "file", metavar="FILE", help="A file of prompts, in a format that prompts_path accepts.")
@click.option("--policy", metavar="PATH", help="A policy's directory or hub id; by default the project's newest.")
@click.option("--samples", type=click.IntRange(min=1), default=1, help="Answers to each prompt.")
@click.option("--temperature", type=click.FloatRange(min=0.0), help="0 is greedy; by default as in training.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="Seed of the sampling noise of both policies.")
@click.option("--reward", "with_reward", is_flag=True, help="Score each answer by the project's reward.")
@click.option("--plain", is_flag=True, help="Take a typed prompt as text even if the tokenizer has a chat template.")
@click.option("--params", callback=split_params, default="", help="Settings, as `kedro run` takes them.")
@click.option("--env", "-e", help="Kedro's environment.")
def generate(**options: Any) -> Iterator[str]:
    """Let the SFT policy and the PPO policy answer each PROMPT with the same sampling noise, and show both answers.

    Without a PROMPT and --prompts, prompts are read line by line until an empty line or Ctrl-D. If the tokenizer has a
    chat template, a typed prompt becomes the first message of a chat.
    """
    from ppo_rlhf.data.prompts import PromptsConfig
    from ppo_rlhf.data.sources import load_table, table_of

    given: tuple[str, ...] = options["given"]
    if given and options["file"]:
        raise DataError("PROMPT and --prompts are two sources of prompts: give one of them.")
    params = options["params"] | ({"policy_path": options["policy"]} if options["policy"] else {})
    context = context_here(options["env"], params)
    read = READ | (OF_REWARD if options["with_reward"] else set())
    own = refuse_unread(context.config_loader, read)
    if missing := missing_paths(context.config_loader, context.catalog, read):
        raise ModelError("\n".join(missing))
    column = PromptsConfig(**context.config_loader["parameters"].get("prompts", {})).column
    table = load_table(options["file"], text_column=column) if options["file"] else None
    policies = _Policies(context, own, options)
    for said in policies.of_training:
        click.echo(said, err=True)  # log to stderr, because a user may pipe the answers on stdout into another program
    yield policies.heading
    if table is not None:
        yield from policies.lines(table, column, options["file"])
        return
    as_chat = bool(getattr(policies.tokenizer, "chat_template", None)) and not options["plain"]
    turn = -1
    for turn, line in enumerate(given or _typed()):
        typed = table_of({"prompt": [[{"role": "user", "content": line}] if as_chat else line]})
        try:
            name = f"prompt {turn + 1}" if len(given) > 1 else "prompt"
            yield from policies.lines(typed, "prompt", name, turn, line)
        except DataError as error:
            if given:
                raise
            # A prompt that exceeds the model's context ends only this answer, not the conversation
            yield escaped(f"Error: {error}")
    if turn < 0 and not sys.stdin.isatty():
        raise DataError("No prompt was given: give PROMPT or --prompts FILE, or write prompts to the standard input.")


def _typed() -> Iterator[str]:
    """Yield the lines of the standard input until an empty line. On a terminal, a prompt sign precedes each line that
    the user types.
    """
    with suppress(EOFError):
        while (line := input("\n> " if sys.stdin.isatty() else "")).strip():
            yield line


class _Policies:
    """The SFT policy, the PPO policy, and the sampling settings that both answer with."""

    def __init__(self, context: Any, own: OwnSettings, options: dict[str, Any]) -> None:
        from ppo_rlhf.config import PPOConfig
        from ppo_rlhf.data.prompts import PromptReader
        from ppo_rlhf.evaluation.policy import EvaluationConfig, check_vocabularies
        from ppo_rlhf.ppo.precision import device_of, frozen_dtype
        from ppo_rlhf.ppo.run_setup import check_device, sampling_settings
        from ppo_rlhf.preflight import RunRequest
        from ppo_rlhf.rewards.config import RewardConfig
        from ppo_rlhf.rewards.scorers import build_reward_scorer

        parameters = context.config_loader["parameters"]
        data_root = context.config_loader["globals"].get("data_root", "data")
        # The context builds a new catalog each time, and settings_to_answer changes the one that models come from
        project = RunRequest(Pipeline([]), context.catalog, context.project_path, data_root, context.env)
        ppo, conf = _handle(project, "ppo_policy"), PPOConfig(**parameters.get("ppo", {}))
        trained = settings_to_answer(project.catalog, ppo, conf, own, project.is_ours)
        config = trained.config
        self.config = config
        self.of_training = trained.lines()
        sft = _handle(project, "sft_policy")
        device, dtype = device_of(config), frozen_dtype(config)
        check_device(config, device)
        self.tokenizer = sft.tokenizer()
        check_vocabularies(ppo, sft)
        handles = {"SFT": sft, "PPO": ppo}
        self.models = {name: handle.frozen_lm(dtype, device) for name, handle in handles.items()}
        self.scorer = None
        if options["with_reward"]:
            reward = RewardConfig(**parameters.get("reward", {}))
            reward_model = _handle(project, "reward_model") if reward.needs_catalogued_model else None
            self.scorer = build_reward_scorer(
                reward, reward_model, self.tokenizer, device=device, dtype=dtype, setting=""
            )
        evaluation = EvaluationConfig(temperature=options["temperature"])
        self.sampling = evaluation.sampling(sampling_settings(config, self.tokenizer, self.models["SFT"]))
        self.seed = config.seed if options["seed"] is None else options["seed"]
        self.samples = options["samples"]
        self.reader = replace(PromptReader.of(sft, config), are_plain=options["plain"])
        how = "greedy" if self.sampling.top_k == 1 else f"temperature {self.sampling.temperature:g}"
        self.heading = f"At most {self.sampling.response_length} tokens, {how}, seed {self.seed}"

    def lines(self, table: Dataset, column: str, name: str, turn: int = 0, typed: str | None = None) -> Iterator[str]:
        """Yield each prompt of a table, as typed or as the policies read it, followed by the answers."""
        prompts = self.reader.read(table, column, name)
        repeated = prompts.select([row for row in range(len(prompts)) for _ in range(self.samples)])
        drawn = [self._answers(policy, model, repeated, turn) for policy, model in self.models.items()]
        for row, answers in enumerate(zip(*drawn, strict=True)):
            if row % self.samples == 0:
                yield "\n" + click.style(escaped(typed or prompts.texts[row // self.samples]), fg="cyan")
            yield from answers

    def _answers(self, policy: str, model: PreTrainedModel, prompts: PromptDataset, turn: int) -> list[str]:
        """Return a policy's answer to each prompt as shown to the user.

        The seed and `turn` determine the sampling noise, which is the same for both policies.
        """
        from ppo_rlhf.core.randomness import episode_uniforms
        from ppo_rlhf.ppo.batch_sampling import response_batch, sample_responses

        noise = episode_uniforms(self.seed, "answers", turn, len(prompts), self.sampling.response_length)
        responses = sample_responses(model, prompts, noise, self.sampling, self.config, batch_size=64)
        batch = response_batch(prompts, responses, self.tokenizer)
        rewards = [None] * len(prompts) if self.scorer is None else self.scorer.score(batch).total.tolist()
        facts = zip(responses.mask.sum(dim=1).tolist(), batch.terminated, rewards, strict=True)
        return [_written(policy, text, *of_text) for text, of_text in zip(batch.completions, facts, strict=True)]


def _handle(project: RunRequest, name: str) -> PretrainedHandle:
    """Return the handle of a model of the project; raise ModelError if the model does not exist."""
    if why := project.why_missing(name):
        raise ModelError(why)
    handle: PretrainedHandle = project.catalog[name].load()
    return handle


def _written(policy: str, answer: str, tokens: int, has_ended: bool, reward: float | None) -> str:
    """Return an answer as lines to show: the text, the reward before shaping and penalties, and the number of tokens.

    The number of tokens includes the stop token.
    """
    facts = [f"{tokens} tokens"] + ([] if has_ended else ["cut off"])
    if reward is not None:
        facts.insert(0, f"reward {reward:z.2f}")
    text = textwrap.indent(escaped(answer.strip()) or "(nothing)", " " * 8)[8:]
    return f"  {policy}   {text}\n        {click.style(', '.join(facts), dim=True)}"
