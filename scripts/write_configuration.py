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

import yaml
from annotated_types import Ge, Gt, Le, Lt

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.ppo import MODEL_PATHS
from ppo_rlhf.data.prompts import PromptsConfig
from ppo_rlhf.evaluation.best_of_n import BestOfNConfig
from ppo_rlhf.evaluation.policy import EvaluationConfig
from ppo_rlhf.judge.settings import LLMJudgeConfig
from ppo_rlhf.people.pairs import FeedbackConfig
from ppo_rlhf.pipelines.audit_reward.reward_audit import AuditConfig
from ppo_rlhf.pipelines.critic_pretraining.training import CriticPretrainingConfig
from ppo_rlhf.pipelines.kl_study.grid import KLStudyConfig
from ppo_rlhf.pipelines.reporting.nodes import ReportingConfig
from ppo_rlhf.pipelines.sweep.grid import SweepConfig
from ppo_rlhf.rewards.config import RewardComponentConfig, RewardConfig
from ppo_rlhf.supervised.demonstrations import DataPreparationConfig
from ppo_rlhf.supervised.optimisation import OptimisationConfig
from ppo_rlhf.supervised.reward_training import RewardModellingConfig
from ppo_rlhf.supervised.sft import SupervisedFinetuningConfig

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "configuration.md"
BASE = ROOT / "conf" / "base"
GLOBALS = BASE / "globals.yml"
SHARED = "supervised_finetuning and reward_modelling"
GROUPS = {
    "ppo": PPOConfig,
    "prompts": PromptsConfig,
    "reward": RewardConfig,
    "reward.components": RewardComponentConfig,
    "llm": LLMJudgeConfig,
    "evaluation": EvaluationConfig,
    "data_preparation": DataPreparationConfig,
    SHARED: OptimisationConfig,
    "supervised_finetuning": SupervisedFinetuningConfig,
    "reward_modelling": RewardModellingConfig,
    "critic_pretraining": CriticPretrainingConfig,
    "reporting": ReportingConfig,
    "best_of_n": BestOfNConfig,
    "audit": AuditConfig,
    "kl_study": KLStudyConfig,
    "sweep": SweepConfig,
    "feedback": FeedbackConfig,
}
INTRODUCTION = """# Configuration reference

Every setting with its type, default and meaning. `python scripts/write_configuration.py` writes the page from the
docstrings, which say more ([PPOConfig](api/config.md)). When a run starts, the log advises on values outside their
typical range.

Set a value in `conf/local/parameters.yml` under its group, or for one run with `--params ppo.kl_coef=0.1,seed=7`. The
defaults are the code's. `conf/base/parameters_*.yml` goes over them, and your `conf/local` over both, or in its place
the environment of `--env`, such as `conf/demo`. An unknown name is an error, which names the setting that it misspells,
or where another library's setting is here.

What `conf/base` fills from a global stands only among the globals: set it there. So does each group's `seed`, which one
group may have to itself (`best_of_n.seed=1`). Where runs are tracked is in `conf/base/mlflow.yml`.
"""
BOUNDS = {Ge: ("≥", "ge"), Gt: (">", "gt"), Le: ("≤", "le"), Lt: ("<", "lt")}


def page() -> str:
    """Return the text of the page."""
    filled = _filled_from_globals()
    parts = [INTRODUCTION, _globals(), *(_group(name, group, filled) for name, group in GROUPS.items())]
    return "\n".join(parts)


def _globals() -> str:
    """Return the table of globals, from the values and comments in globals.yml."""
    rows = re.findall(r"^(\w+): (.*?) # (.*)$|^(\w+): (.*)$", GLOBALS.read_text(encoding="utf-8"), re.MULTILINE)
    lines = [f"| `{name or bare}` | {_code(value or only)} | {meaning} |" for name, value, meaning, bare, only in rows]
    heading = (
        "## Globals\n\nIn `conf/local/globals.yml`, or with `--params` without a group. "
        "For PPOTrainer `sft_model_path` and `reward_model_path` are settings of PPOConfig.\n"
    )
    return "\n".join([heading, "| setting | value in conf/base | meaning |", "| --- | --- | --- |", *lines, ""])


def _filled_from_globals() -> set[str]:
    """Return `group.name` of each parameter whose value in conf/base is a global's."""
    files = [yaml.safe_load(file.read_text(encoding="utf-8")) for file in BASE.glob("parameters_*.yml")]
    groups = [(group, values) for file in files for group, values in file.items()]
    return {f"{group}.{name}" for group, values in groups for name in values if "${globals:" in str(values[name])}


def _group(name: str, group: Any, filled: set[str]) -> str:
    summary = " ".join(str(inspect.getdoc(group)).split("\n\n")[0].split())
    rows = _rows(name, group, filled)
    if group is OptimisationConfig:
        of_ppo = _rows("ppo", PPOConfig, filled)
        same = [f"`{setting}`" for setting, cells in rows.items() if of_ppo.get(setting) == cells]
        summary += f" As in [ppo](#ppo) are {', '.join(same[:-1])} and {same[-1]}."
        rows = {setting: cells for setting, cells in rows.items() if f"`{setting}`" not in same}
    elif issubclass(group, OptimisationConfig):
        summary += f" Further ones are [above](#{SHARED.replace(' ', '-')})."
    lines = [f"## {name}\n\n{summary}\n", "| setting | type, default | meaning |", "| --- | --- | --- |"]
    for setting, cells in rows.items():
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in (f'`{setting}`', *cells))} |")
    return "\n".join([*lines, ""])


def _rows(name: str, group: Any, filled: set[str]) -> dict[str, tuple[str, str]]:
    """Return (type and default, meaning) by setting: of a group, and of a mapping in it that is no group of its own.

    Left out are what a global fills or only PPOTrainer reads, and in a group what OptimisationConfig has.
    """
    hints, meanings = get_type_hints(group, include_extras=True), _meanings(group)
    groups = [other for other, each in GROUPS.items() if issubclass(each, group)]
    shares = issubclass(group, OptimisationConfig) and group is not OptimisationConfig
    elsewhere = {each.name for each in fields(OptimisationConfig)} if shares else {*MODEL_PATHS}
    rows: dict[str, tuple[str, str]] = {}
    for each in fields(group):
        is_filled = any(f"{other}.{each.name}" in filled for other in groups) and f"{name}.{each.name}" not in GROUPS
        if each.name not in meanings or is_filled or each.name in elsewhere:
            continue
        if not meanings[each.name]:
            raise SystemExit(f"{name}.{each.name} has no docstring: write its meaning, unit and effect below the field")
        hint = hints[each.name]
        meaning = _first_sentence(meanings[each.name], _choices(hint))
        rows[each.name] = (_type_and_default(each, hint) + _other_defaults(each, groups), meaning)
        mappings = [option for option in get_args(hint) if isinstance(option, type) and is_dataclass(option)]
        for inner in (mapping for mapping in mappings if mapping not in GROUPS.values()):
            rows |= {f"{each.name}.{key}": cells for key, cells in _rows(f"{name}.{each.name}", inner, filled).items()}
    return rows


def _other_defaults(each: Any, groups: list[str]) -> str:
    """Return the defaults of the groups that inherit a setting and change its default: ` (reward_modelling: `1.0`)`."""
    theirs = {other: _default(next(one for one in fields(GROUPS[other]) if one.name == each.name)) for other in groups}
    return "".join(f" ({other}: {default})" for other, default in theirs.items() if default != _default(each))


def _first_sentence(meaning: str, choices: list[str]) -> str:
    """Return a docstring's first sentence without sources, and what each choice and null mean."""
    text = re.sub(r"\bNone\b", "null", re.sub(r" \([^()]*(?:arXiv:|et al\.|Schulman 2020)[^()]*\)", "", meaning))
    first, *others = re.split(r"(?<=\.) (?=\S)", text)
    known = "|".join(re.escape(choice) for choice in [*choices, "null", "With null"])
    explained = re.compile(rf"`?(?:{known})(?![\w+])")
    return " ".join([first, *(sentence for sentence in others if explained.match(sentence))])


def _meanings(group: Any) -> dict[str, str]:
    """Return the docstring of each field that a class declares itself; a field without one has an empty text."""
    (tree,) = ast.parse(inspect.getsource(group)).body
    declared = [pair for pair in itertools.pairwise([*tree.body, None]) if isinstance(pair[0], ast.AnnAssign)]
    texts = ((field.target.id, text.value.value if isinstance(text, ast.Expr) else "") for field, text in declared)
    return {name: " ".join(text.split()) for name, text in texts}


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


def _choices(hint: Any) -> list[str]:
    """Return the values of a type that has but a few."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    bare = [get_args(option)[0] if get_origin(option) is Annotated else option for option in options]
    return [str(choice) for option in bare if get_origin(option) is Literal for choice in get_args(option)]


def _type_and_default(each: Any, hint: Any) -> str:
    """Return type and default of a field: `int ≥ 1, 4`; of choices the default is the first, and null says its type."""
    default = _default(each)
    bare = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if bare is bool:
        return default
    if get_origin(bare) is Literal:
        return ", ".join(sorted(map(_code, get_args(bare)), key=lambda choice: choice != default))
    return f"{_type(hint).removesuffix(' or null') if default == '`null`' else _type(hint)}, {default}"


def _default(each: Any) -> str:
    default = each.default_factory() if each.default_factory is not MISSING else each.default
    return "required" if default is MISSING else _code(default if isinstance(default, str) else json.dumps(default))


def _code(text: str) -> str:
    return f"`{text}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
