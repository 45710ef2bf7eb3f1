"""Runs the preparing nodes of a run before the run: their outputs stay in memory, and no weights are read.

A preparing node checks and reads a user's settings and tables. Each runs here as the pipeline has it, so the checks
apply the rules of the run.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace

from ppo_rlhf.core.errors import DataError
from ppo_rlhf.pipelines import data_preparation, evaluation, kl_study, ppo, reward_modelling, sweep
from ppo_rlhf.preflight.request import RunRequest
from ppo_rlhf.runtime.log_lines import errors_only
from ppo_rlhf.supervised.sft import SupervisedFinetuningConfig, plan_from_scratch

STAGES = (ppo, sweep, kl_study, data_preparation, reward_modelling, evaluation)
NODES = {node.name: node for stage in STAGES for node in stage.create_pipeline().nodes}
PLANNING = ("ppo.configure_ppo", "sweep.plan_sweep", "kl_study.plan_study")
"""Preparing nodes that read only settings."""
READING_DEMONSTRATIONS = "data_preparation.split_demonstrations"
READING = ("reward_modelling.check_preferences", "evaluation.choose_prompts", "ppo.prepare_prompts")
"""Preparing nodes that read the user's tables, and the tokenizer and the configuration of the policy."""
TABLES_IN_ERRORS = {"prompts": "raw_prompts", "evaluation prompts": "raw_evaluation_prompts"}
"""Tables by their name in the nodes' errors; before a run, errors have the table's path in place of its name."""
NEEDED = ("raw_demonstrations", "raw_prompts")
"""Tables that no preparing node accepts as None."""


def prepare(run: RunRequest, name: str) -> None:
    """Run a preparing node if all its inputs are known, and keep its outputs in `run.data`.

    The node's own log lines are left to the run.

    Raises:
        PPORLHFError: The node refuses the settings or a table.
    """
    node = NODES[name]
    settings = (each for each in node.inputs if each.startswith("params:") and run.reads(each))
    known = run.data | {each: run.catalog[each].load() for each in settings}
    if not known.keys() >= {*node.inputs}:
        return
    try:
        with errors_only("kedro.pipeline.node", logging.CRITICAL), errors_only("ppo_rlhf.pipelines"):
            run.data |= node.run({each: known[each] for each in node.inputs})
    except DataError as error:
        table, _, problem = str(error).partition(": ")
        source = run.source(TABLES_IN_ERRORS.get(table, ""))
        if source is None:
            raise
        raise DataError(f"{source}: {problem}") from error


def load_table(run: RunRequest, name: str) -> None:
    """Load a table of the user; loading raises if the table is missing, empty or damaged."""
    table = run.catalog[name].load()
    if table is not None or name not in NEEDED:
        run.data[name] = table


def plan_small_model(run: RunRequest) -> None:
    """Make the tokenizer of a model that SFT trains from scratch, with which the prompts are read.

    Raises:
        DataError: The demonstrations are chats.
    """
    settings = run.group("supervised_finetuning", SupervisedFinetuningConfig)
    if settings is None or settings.from_scratch is None or run.source("base_model") is not None:
        return
    if run.writes("sft_policy") and "demonstrations" in run.data:
        architecture, tokenizer = plan_from_scratch(run.data["demonstrations"], settings.from_scratch)
        # The preparing nodes call these two methods of a PretrainedHandle
        run.data["sft_policy"] = SimpleNamespace(config=lambda: architecture, tokenizer=lambda: tokenizer)
        run.tokenizers[run.start] = tokenizer
