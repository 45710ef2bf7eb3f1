"""Write docs/configuration.md from the settings groups and conf/base/globals.yml."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import re
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.advice import LARGE, LORA_FACTOR, Typical
from ppo_rlhf.data.prompts import PromptsConfig
from ppo_rlhf.evaluation.best_of_n import BestOfNConfig
from ppo_rlhf.evaluation.policy import EvaluationConfig
from ppo_rlhf.pipelines.audit_reward.reward_audit import AuditConfig
from ppo_rlhf.pipelines.critic_pretraining.training import CriticPretrainingConfig
from ppo_rlhf.pipelines.kl_study.grid import KLStudyConfig
from ppo_rlhf.pipelines.reporting.nodes import ReportingConfig
from ppo_rlhf.pipelines.sweep.grid import SweepConfig
from ppo_rlhf.reporting.charts import ExpectedCurve
from ppo_rlhf.rewards.config import RewardComponentConfig, RewardConfig
from ppo_rlhf.rewards.llm_settings import LLMJudgeConfig
from ppo_rlhf.supervised.comparisons import FeedbackConfig
from ppo_rlhf.supervised.demonstrations import DataPreparationConfig
from ppo_rlhf.supervised.reward_training import RewardModellingConfig
from ppo_rlhf.supervised.sft import FromScratchConfig, SupervisedFinetuningConfig

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "configuration.md"
GLOBALS = ROOT / "conf" / "base" / "globals.yml"
GROUPS = {
    "ppo": PPOConfig,
    "prompts": PromptsConfig,
    "reward": RewardConfig,
    "reward.components": RewardComponentConfig,
    "llm": LLMJudgeConfig,
    "evaluation": EvaluationConfig,
    "data_preparation": DataPreparationConfig,
    "supervised_finetuning": SupervisedFinetuningConfig,
    "supervised_finetuning.from_scratch": FromScratchConfig,
    "reward_modelling": RewardModellingConfig,
    "critic_pretraining": CriticPretrainingConfig,
    "reporting": ReportingConfig,
    "reporting.expected_curve": ExpectedCurve,
    "best_of_n": BestOfNConfig,
    "audit": AuditConfig,
    "kl_study": KLStudyConfig,
    "sweep": SweepConfig,
    "feedback": FeedbackConfig,
}
INTRODUCTION = """# Configuration reference

This page lets you look up every setting: its type, default, meaning and typical range.
`python scripts/write_configuration.py` writes it from the code; a test fails if the page is stale. Change a docstring
or `conf/base/globals.yml`, not this page.

Set a value in `conf/local/parameters.yml` under its group, or for one run with `--params ppo.kl_coef=0.1,seed=7`. The
defaults are those of the code. `conf/base/parameters_*.yml` goes over them, and your `conf/local` over both, or in its
place the environment of `--env`, such as the demo's `conf/demo`. An unknown name is an error, which names the setting
that it misspells, or where another library's setting is here. Values outside a typical range are advised on when a run
starts, not refused.

The names of the groups are those of the parameters; where runs are tracked is in `conf/base/mlflow.yml`.
"""
BOUNDS = {Ge: ("≥", "ge"), Gt: (">", "gt"), Le: ("≤", "le"), Lt: ("<", "lt")}


def page() -> str:
    """Return the text of the page."""
    parts = [INTRODUCTION, _globals(), *(_group(name, group) for name, group in GROUPS.items())]
    return "\n".join(parts)


def _globals() -> str:
    """Return the table of globals, from the values and comments in globals.yml."""
    rows = re.findall(r"^(\w+): (.*?) # (.*)$|^(\w+): (.*)$", GLOBALS.read_text(encoding="utf-8"), re.MULTILINE)
    lines = [f"| `{name or bare}` | {_code(value or only)} | {meaning} |" for name, value, meaning, bare, only in rows]
    heading = "## Globals\n\nIn `conf/local/globals.yml`, or with `--params` without a group.\n"
    return "\n".join([heading, "| setting | value in conf/base | meaning |", "| --- | --- | --- |", *lines, ""])


def _group(name: str, group: Any) -> str:
    hints, meanings = get_type_hints(group, include_extras=True), _meanings(group)
    summary = str(inspect.getdoc(group)).split("\n\n")[0]
    lines = [f"## {name}\n\n{' '.join(summary.split())}\n"]
    lines += ["| setting | type | default | meaning | typical range |", "| --- | --- | --- | --- | --- |"]
    for each in fields(group):
        if each.name not in meanings:
            raise SystemExit(f"{name}.{each.name} has no docstring: write its meaning, unit and effect below the field")
        typical = _typical(hints[each.name])
        usual = _range(typical) if typical else ""
        meaning = re.sub(r"\bNone\b", "null", meanings[each.name])
        cells = (f"`{each.name}`", _type(hints[each.name]), _default(each), meaning, usual)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |".replace("|  |", "| |"))
    return "\n".join([*lines, ""])


def _meanings(group: Any) -> dict[str, str]:
    """Return the docstrings of all fields of a class, including inherited fields."""
    found = {}
    for base in filter(is_dataclass, reversed(group.__mro__)):
        (tree,) = ast.parse(inspect.getsource(base)).body
        for field, text in itertools.pairwise(tree.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[field.target.id] = " ".join(text.value.value.split())
    return found


def _type(hint: Any) -> str:
    """Return a type in words: `int ≥ 1 or null`."""
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_type, get_args(hint)))
    if get_origin(hint) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(hint))
    if get_origin(hint) is Annotated:
        limits = [limit for extra in hint.__metadata__ for limit in getattr(extra, "metadata", ())]
        named = [(*BOUNDS[type(limit)], limit) for limit in limits if type(limit) in BOUNDS]
        bounds = ", ".join(f"{sign} {getattr(limit, name):g}" for sign, name, limit in named)
        return f"{_type(get_args(hint)[0])} {bounds}".strip()
    if get_origin(hint) is list:
        return f"list of {_type(get_args(hint)[0])}".replace("of mapping", "of mappings")
    if is_dataclass(hint):
        return "mapping"
    if get_origin(hint) is dict:
        return "mapping of names to values"
    return {type(None): "null", str: "text", bool: "true, false"}.get(hint, hint.__name__)


def _typical(hint: Any) -> Typical | None:
    found = [extra for option in (hint, *get_args(hint)) for extra in getattr(option, "__metadata__", ())]
    return next((extra for extra in found if isinstance(extra, Typical)), None)


def _range(typical: Typical) -> str:
    """Return a typical range with its source and the models that it applies to."""
    policies = f"for policies of {LARGE / 1e6:g} million parameters or more; with LoRA {LORA_FACTOR:g} times that"
    usual = f"{typical.low:g} to {typical.high:g} ({typical.source})"
    return f"{usual} {policies}" if typical.is_rate else usual


def _default(each: Any) -> str:
    default = each.default_factory() if each.default_factory is not MISSING else each.default
    return "required" if default is MISSING else _code(default if isinstance(default, str) else json.dumps(default))


def _code(text: str) -> str:
    return f"`{text}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
