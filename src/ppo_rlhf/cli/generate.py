"""`kedro generate`: answers of the SFT policy and of the PPO policy to the same prompts, side by side."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from kedro.framework.session import KedroSession
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ppo_rlhf.cli.advise import show
from ppo_rlhf.cli.errors import project_here
from ppo_rlhf.cli.params import split_params
from ppo_rlhf.core.errors import DataError, ModelError
from ppo_rlhf.core.visible import visible
from ppo_rlhf.hooks.checks import refuse_unread

if TYPE_CHECKING:  # imported where they are used: they import torch, which other commands do without
    import pandas as pd
    from kedro.framework.context import KedroContext
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ppo_rlhf.config import PPOConfig
    from ppo_rlhf.data.prompt_dataset import PromptDataset
    from ppo_rlhf.evaluation.answers import Answer
    from ppo_rlhf.models.loading import PretrainedHandle
    from ppo_rlhf.ppo.sampling import SamplingSettings
    from ppo_rlhf.rewards.scoring import RewardScorer

READ, OF_REWARD = {"sft_policy", "ppo_policy", "params:ppo", "params:prompts"}, {"reward_model", "params:reward"}
SIDE_BY_SIDE = 100
"""A terminal with fewer columns shows one answer above the other."""


@click.command()
@click.argument("prompt", required=False)
@click.option("--prompts", "file", metavar="FILE", help="A file of prompts, read as prompts_path is.")
@click.option("--policy", metavar="PATH", help="Another policy than the project's newest; also a hub id.")
@click.option("--samples", type=click.IntRange(min=1), default=1, help="Answers to each prompt.")
@click.option("--temperature", type=click.FloatRange(min=0.0), help="0 is greedy; else ppo.temperature.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="Of the noise, the same for both policies.")
@click.option("--reward", "with_reward", is_flag=True, help="Score each answer by the project's reward.")
@click.option("--plain", is_flag=True, help="Take a typed prompt as text even if the tokenizer has a chat template.")
@click.option("--params", callback=split_params, default="", help="Settings, as `kedro run` takes them.")
@click.option("--env", "-e", help="Kedro's environment.")
def generate(**options: Any) -> None:
    """Let the SFT policy and the PPO policy answer PROMPT with the same noise, and show both answers.

    Without PROMPT and --prompts, prompts are read line by line until an empty line or Ctrl-D. If the tokenizer has a
    chat template, a typed prompt is a chat's first message.
    """
    show(lambda: _lines(project_here(), options))


@dataclass(frozen=True)
class _Policies:
    """Both policies by name, and what their answers are drawn with."""

    models: dict[str, PreTrainedModel]
    tokenizer: PreTrainedTokenizerBase
    config: PPOConfig
    sampling: SamplingSettings
    context: int | None
    scorer: RewardScorer | None
    seed: int

    def read(self, table: pd.DataFrame, column: str, name: str) -> PromptDataset:
        """Return the tokenised prompts of a table."""
        from ppo_rlhf.data.prompts import read_prompts

        return read_prompts((self.tokenizer, self.context, ""), table, self.config, column, name)

    def answers(self, prompts: PromptDataset, samples: int, turn: int) -> Iterator[tuple[str, dict[str, list[Answer]]]]:
        """Yield each prompt with its answers by policy."""
        from ppo_rlhf.evaluation.answers import answer_prompts

        repeated = prompts.select([row for row in range(len(prompts)) for _ in range(samples)])
        drawn = {
            name: answer_prompts(
                model, self.tokenizer, repeated, self.scorer, self.sampling, self.config, seed=self.seed, turn=turn
            )
            for name, model in self.models.items()
        }
        for row, text in enumerate(prompts.texts):
            yield text, {name: each[row * samples : (row + 1) * samples] for name, each in drawn.items()}


def _lines(project_path: Path, options: dict[str, Any]) -> Iterator[str]:
    import pandas as pd

    from ppo_rlhf.data.prompts import PromptsConfig
    from ppo_rlhf.datasets.records import read_records

    if options["prompt"] is not None and options["file"]:
        raise DataError("PROMPT and --prompts are two sources of prompts: give one of them.")
    session: Any = KedroSession.create(project_path, env=options["env"], runtime_params=options["params"])
    with session:
        context = session.load_context()
        refuse_unread(context.config_loader, READ | (OF_REWARD if options["with_reward"] else set()))
        column = PromptsConfig(**context.config_loader["parameters"].get("prompts", {})).column
        table = read_records(Path(options["file"]).expanduser(), column) if options["file"] else None
        policies = _load(context, options)
    settings = policies.sampling
    how = "greedy" if settings.top_k == 1 else f"temperature {settings.temperature:g}"
    yield f"At most {settings.response_length} tokens, {how}, seed {policies.seed}"
    console, samples = Console(highlight=False), options["samples"]
    if table is not None:
        for text, answers in policies.answers(policies.read(table, column, options["file"]), samples, 0):
            yield _shown(console, text, answers)
        return
    as_chat = bool(getattr(policies.tokenizer, "chat_template", None)) and not options["plain"]
    for turn, line in enumerate(_typed() if options["prompt"] is None else [options["prompt"]]):
        try:
            typed = pd.DataFrame({"prompt": [[{"role": "user", "content": line}] if as_chat else line]})
            for _, answers in policies.answers(policies.read(typed, "prompt", "prompt"), samples, turn):
                yield _shown(console, line, answers)
        except DataError as error:
            if options["prompt"] is not None:
                raise
            yield visible(f"Error: {error}")  # one prompt too long must not end the conversation


def _typed() -> Iterator[str]:
    """Yield the lines of the standard input until an empty one, asking for them on a terminal."""
    while True:
        try:
            line = input("\n> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if not line.strip():
            return
        yield line


def _load(context: KedroContext, options: dict[str, Any]) -> _Policies:
    from ppo_rlhf.config import PPOConfig
    from ppo_rlhf.evaluation.policy import EvaluationConfig
    from ppo_rlhf.models.loading import steady_context
    from ppo_rlhf.models.tokenizers import same_vocabulary
    from ppo_rlhf.ppo.models import sampling_settings
    from ppo_rlhf.ppo.precision import frozen_dtype, resolve_device
    from ppo_rlhf.rewards.config import RewardConfig
    from ppo_rlhf.rewards.scorers import build_reward_scorer

    parameters = context.config_loader["parameters"]
    config = PPOConfig(**parameters.get("ppo", {}))
    device, dtype = resolve_device(config.device), frozen_dtype(config)
    sft, ppo = _handle(context, "sft_policy"), _handle(context, "ppo_policy", options["policy"])
    tokenizer = sft.tokenizer()
    if not same_vocabulary(ppo.tokenizer(), tokenizer):
        raise ModelError(
            f"{ppo.source} and the SFT policy {sft.source} have different vocabularies, so they cannot answer the same "
            "prompts: set sft_model_path to the model that the policy was trained from."
        )
    handles = {"SFT": sft, "PPO": ppo}
    models = {name: handle.causal_lm(dtype).to(device) for name, handle in handles.items()}  # type: ignore[arg-type]
    scorer = None
    if options["with_reward"]:
        reward = RewardConfig(**parameters.get("reward", {}))
        reward_model = _handle(context, "reward_model") if reward.needs_model else None
        scorer = build_reward_scorer(reward, reward_model, tokenizer, device=device, dtype=dtype)
    evaluation = EvaluationConfig(temperature=options["temperature"])
    sampling = evaluation.sampling(sampling_settings(config, tokenizer, models["SFT"]))
    seed = config.seed if options["seed"] is None else options["seed"]
    return _Policies(models, tokenizer, config, sampling, steady_context(sft.config())[0], scorer, seed)


def _handle(context: KedroContext, name: str, given: str | None = None) -> PretrainedHandle:
    """Return a model that is given, or the project's newest.

    Raises:
        ModelError: The project has none yet.
    """
    from ppo_rlhf.datasets.pretrained_model import newest_version
    from ppo_rlhf.models.directories import is_local
    from ppo_rlhf.models.loading import PretrainedHandle
    from ppo_rlhf.preflight.request import MADE_BY

    dataset: Any = context.catalog[name]
    described = dataset._describe()
    if given:
        return PretrainedHandle(newest_version(given), described["trust_remote_code"])
    source = described["filepath"]
    if source is None or (is_local(source) and not dataset.exists()):
        stage, setting, _ = MADE_BY[name]
        place = "" if source is None else f" in {source.removeprefix(f'{context.project_path}/')}"
        raise ModelError(
            f"There is no {name}{place} yet: `kedro run` makes it, `kedro run --pipelines {stage}` it alone, and "
            f"{setting} names another one (conf/local/globals.yml, or --params)."
        )
    handle: PretrainedHandle = dataset.load()
    return handle


def _shown(console: Console, prompt: str, answers: Mapping[str, Sequence[Answer]]) -> str:
    """Return a prompt and its answers as lines for a terminal, the policies side by side if it is wide enough."""
    wide = console.width >= SIDE_BY_SIDE
    table = Table.grid(padding=(0, 3, 0, 0), expand=wide)
    for _ in answers if wide else ("policy", "answer"):
        table.add_column(ratio=1 if wide else None, overflow="fold")
    if wide:
        table.add_row(*(Text(name, style="bold") for name in answers))
    for drawn in zip(*answers.values(), strict=True):
        if wide:
            table.add_row(*map(_written, drawn))
        else:
            for name, answer in zip(answers, drawn, strict=True):
                table.add_row(Text(name, style="bold"), _written(answer))
    with console.capture() as captured:
        console.print("", Text(visible(prompt), style="cyan"), Padding(table, (0, 0, 0, 2)), sep="\n")
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _written(answer: Answer) -> Text:
    facts = [f"{answer.tokens} tokens"] + (["cut off"] if answer.is_cut_off else [])
    if answer.reward is not None:
        facts.insert(0, f"reward {answer.reward:.2f}")
    return Text.assemble(visible(answer.text.strip()) or "(nothing)", "\n", (", ".join(facts), "dim"))
