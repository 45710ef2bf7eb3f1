"""Checks a user's input before a run writes anything, and reports all problems at once, one line each.

The preparing nodes of the run check settings and tables (`preparation`). The checks here are those that no preparing
node makes, because they need files, several groups of settings or the whole pipeline. A check yields the problems that
it finds, or raises a PPORLHFError, which ends only the check that raised it. Inputs that the run makes itself are not
checked; for example, a run of the whole chain needs no SFT policy on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from kedro.framework.project import pipelines
from kedro.io import DatasetError, MemoryDataset

from ppo_rlhf.config import MODEL_PATHS, PPOConfig
from ppo_rlhf.core.errors import ModelError, PPORLHFError, project_error
from ppo_rlhf.data.prompts import PromptsConfig, split_held_out
from ppo_rlhf.datasets import (
    EvaluationLogDataset,
    PairTablesDataset,
    PretrainedModelDataset,
    RecordsDataset,
    ResumeCheckpointDataset,
)
from ppo_rlhf.evaluation.exploitation import check_evaluated_prompts
from ppo_rlhf.evaluation.policy import EvaluationConfig
from ppo_rlhf.models.context_length import usable_context
from ppo_rlhf.people.pairs import FeedbackConfig
from ppo_rlhf.ppo.precision import resolve_device
from ppo_rlhf.ppo.run_setup import check_device, check_libraries
from ppo_rlhf.preflight.audit_checks import check_audit
from ppo_rlhf.preflight.function_checks import check_callbacks, check_environment, check_function, functions_of
from ppo_rlhf.preflight.judge_checks import check_judges
from ppo_rlhf.preflight.model_checks import MODEL_CHECKS, check_model, check_reward_model, check_scorer
from ppo_rlhf.preflight.preparation import (
    PLANNING,
    READING,
    READING_DEMONSTRATIONS,
    load_table,
    plan_small_model,
    prepare,
)
from ppo_rlhf.preflight.request import MADE_BY, MODELS, MODELS_LAYER, REFERENCE_TEXTS, TABLES, RunRequest
from ppo_rlhf.runtime.names import EVALUATION_METRICS, STATE, TRAININGS, env_option
from ppo_rlhf.runtime.paths import in_project
from ppo_rlhf.runtime.processes import refuse_sharding
from ppo_rlhf.supervised import preferences
from ppo_rlhf.supervised.demonstrations import DataPreparationConfig
from ppo_rlhf.supervised.reference_texts import choose_reference_texts, tokenise_reference_texts
from ppo_rlhf.supervised.reward_training import TRAINED_FROM, RewardModellingConfig
from ppo_rlhf.supervised.sft import NO_BASE_MODEL, TWO_STARTS, SupervisedFinetuningConfig

# Stages that may run under FSDP; the stage ppo is the only one that trains
SHARDED = {"ppo", "data_preparation", "evaluation", "reporting"}
# Types of catalog entries that `check_start` need not find on disk, such as models, which have checks of their own.
# The log of evaluations and the tables of pairs need not exist either, because they are empty at first.
READY = (
    MemoryDataset,
    RecordsDataset,
    PretrainedModelDataset,
    ResumeCheckpointDataset,
    EvaluationLogDataset,
    PairTablesDataset,
)


def find_problems(run: RunRequest) -> list[str]:
    """Return the reasons why this run must not start, one line each. Only the cache of tables is written."""
    problems: list[str] = []

    def ask(check: Callable[..., Iterable[str] | None], *args: Any) -> None:
        try:
            problems.extend(check(run, *args) or ())
        except (PPORLHFError, DatasetError) as error:
            ours = project_error(error)
            if ours is None:
                raise
            problems.extend(str(ours).splitlines())

    for node in PLANNING:
        ask(prepare, node)
    for check in REQUEST_CHECKS:
        ask(check)
    for name in filter(run.reads, TABLES):
        ask(load_table, name)
    for name in filter(run.reads, MODELS):
        ask(check_model, name)
    for path in (name for name in run.reward_models if name not in MODELS):
        ask(check_reward_model, path)
    for check in MODEL_CHECKS:
        ask(check)
    run.pass_models()
    ask(prepare, READING_DEMONSTRATIONS)
    ask(plan_small_model)
    for node in READING:
        ask(prepare, node)
    for check in (check_templates, check_reference_texts, check_prompts, check_scorer):
        ask(check)
    for reference, prompts in functions_of(run).items():
        ask(check_function, reference, prompts)
    for check in (check_audit, check_judges, check_environment, check_callbacks):
        ask(check)
    return list(dict.fromkeys(problems))


def check_sharding(run: RunRequest) -> None:
    """Refuse stages that cannot train sharded models if the launch asks for FSDP."""
    stages = {(node.namespace or "").split(".")[0] for node in run.pipeline.nodes}
    for stage in sorted(stages - SHARDED):
        refuse_sharding(stage)


def check_feedback(run: RunRequest) -> Iterator[str]:
    """Find a file for the pairs that exists, before any pair is sampled."""
    feedback = run.group("feedback", FeedbackConfig)
    export = None if feedback is None or not run.writes("feedback_pairs") else feedback.export
    if export and in_project(export, run.project_path).exists():
        yield f"feedback.export={export}: this file exists, and is not overwritten. Give another name."


def check_start(run: RunRequest) -> Iterator[str]:
    """Find inputs without a file: the run starts after the nodes that make them, and no earlier run saved them."""
    entries = {name: run.catalog.get(name) for name in sorted(run.pipeline.inputs())}
    unsaved = [name for name, e in entries.items() if e is None or (isinstance(e, MemoryDataset) and not e.exists())]
    if unsaved:
        yield f"No file holds {', '.join(unsaved)}, so the run cannot start there: use --from-nodes with earlier nodes."
    for name, entry in entries.items():
        if entry is not None and run.needs(name) and not isinstance(entry, READY) and not entry.exists():
            yield f"{run.source(name)}: nothing is there yet. {how_made(name, run.env)}"


def how_made(name: str, env: str | None) -> str:
    """Return the command that makes a dataset, up to the node that writes it."""
    made = [(stage, node.name) for stage, each in pipelines.items() for node in each.nodes if name in node.outputs]
    if not made:  # an entry of the user's own
        return f"No node makes {name}."
    stage, node_name = made[0]
    return f"Make it by `kedro run{env_option(env)} --pipelines {stage} --to-nodes {node_name}`."


def check_settings(run: RunRequest) -> Iterator[str]:
    """Find paths that are null, wrong or set in a group that does not read them, and a missing device or package."""
    if str(run.data_root).startswith("~"):
        yield (
            f"data_root={run.data_root}: ~ is not expanded here, so a folder named ~ would be written. Give the "
            "absolute path."
        )
    is_missing = {
        "demonstrations_path": run.reads("raw_demonstrations") and run.source("raw_demonstrations") is None,
        "prompts_path": (run.writes("prompt_dataset") or run.writes("feedback_pairs"))
        and run.source("raw_prompts") is None,
    }
    tuning = run.group("supervised_finetuning", SupervisedFinetuningConfig)
    if tuning is not None and run.writes("sft_policy"):
        is_missing[NO_BASE_MODEL] = tuning.from_scratch is None and run.source("base_model") is None
        if tuning.from_scratch is not None and run.source("base_model") is not None:
            yield TWO_STARTS
    rewards = run.group("reward_modelling", RewardModellingConfig)
    is_missing["preferences_path (or reward_modelling.labeller)"] = (
        rewards is not None and run.samples_pairs and rewards.labeller is None
    )
    if missing := [name for name, is_so in is_missing.items() if is_so]:
        trains = run.writes("sft_policy") or run.writes("reward_model")
        align = " To align an SFT model by a reward that you have, use `--pipelines align`." if trains else ""
        yield f"{run.not_set(*missing)}{align}{run.chain_hint}"
    ppo = run.group("ppo", PPOConfig)
    if ppo is not None:
        for name in (path for path in MODEL_PATHS if getattr(ppo, path) is not None):
            yield f"ppo.{name} is not a parameter of this group. Set {name} in {run.globals_file} or with --params."
        check_device(ppo, resolve_device(ppo.device))
        if run.writes("prompt_dataset"):  # only a run that trains by PPO writes `prompt_dataset`
            check_libraries(ppo)


def check_exploitation(run: RunRequest) -> Iterator[str]:
    """Find `evaluation.on_exploitation` in a run whose reward judges itself, or whose trainings are not evaluated."""
    evaluation = run.group("evaluation", EvaluationConfig)
    if evaluation is None or evaluation.on_exploitation == "off":
        return
    if run.writes(TRAININGS):
        yield (
            f"evaluation.on_exploitation={evaluation.on_exploitation}: trainings of a sweep or a study are evaluated "
            "only at their end; set it to off."
        )
    elif run.writes(EVALUATION_METRICS) and any(reward.is_judge(evaluation.judge) for reward in run.rewards):
        yield (
            f"evaluation.on_exploitation={evaluation.on_exploitation}: the judge {evaluation.judge} is part of the "
            "reward, so it cannot show that the policy exploits the reward. Set evaluation.judge to another function."
        )


def check_protection(run: RunRequest) -> Iterator[str]:
    """Find models that the run would write outside the project's folder of models, over a user's own model."""
    layer = f"{run.data_root}/{MODELS_LAYER}"
    for name, (stage, setting, reading) in MADE_BY.items():
        if run.writes(name) and run.source(name) is not None and not run.is_ours(run.source(name)):
            yield (
                f"{setting}={run.source(name)} is outside {layer}, and {stage} would write to it; models of your own "
                f"are never written. To use that model as it is, run `{reading}`. To train a new model, leave "
                f"{setting} null"
                f"{', and set base_model_path to start from your model' if name == 'sft_policy' else ''}."
            )


def check_owner_of_reward_model(run: RunRequest) -> Iterator[str]:
    """Find a user's own policy that would be scored by the reward model that belongs to the project's SFT policy.

    A reward model that this project trained from the user's policy belongs to the user's policy.
    """
    if run.source("sft_policy") is None or not run.reads("sft_policy") or run.is_ours(run.source("sft_policy")):
        return
    if run.reads("reward_model") and run.needs("reward_model") and run.is_made_here("reward_model"):
        handles = [run.catalog[name].load() for name in ("reward_model", "sft_policy")]
        with suppress(ModelError):  # a model that cannot be read is reported by `check_model`
            if getattr(handles[0].config(), TRAINED_FROM, None) == handles[1].fingerprint():
                return
        policy, reward_model = map(run.readable_source, ("sft_policy", "reward_model"))
        yield (
            f"reward_model_path={reward_model} is where this project keeps the reward model of its own SFT policy, not "
            f"of {policy}. Set reward_model_path to your own reward model (or to a version in that folder, if you mean "
            "it), or give functions as reward."
        )


def check_reward_model_is_read(run: RunRequest) -> Iterator[str]:
    """Find a run that trains a reward model and then trains the policy without it."""
    ppo = run.group("ppo", PPOConfig)
    if ppo is None or not (run.writes("reward_model") and run.writes(STATE)):
        return
    is_critic = run.critic_start(ppo.value_model) == "reward_model"
    if not is_critic and not any(reward.needs_catalogued_model for reward in run.rewards):
        of_others = ", without a path" if any(reward.needs_model for reward in run.rewards) else ""
        yield (
            "This run trains a reward model that nothing reads: no entry of reward_components is of type model"
            f"{of_others}, and ppo.value_model={ppo.value_model}. Add reward_components=[{{type: model}}] to --params "
            f"or to {run.globals_file}, or leave the pipeline reward_modelling out."
        )


def check_templates(run: RunRequest) -> None:
    """Refuse preferences that the chat template of the policy refuses or leaves out."""
    checked, tokenizer = run.data.get("checked_preferences"), run.tokenizers.get(run.start)
    if checked is not None and len(checked) and tokenizer is not None:
        preferences.try_template(checked, tokenizer)


def check_reference_texts(run: RunRequest) -> None:
    """Refuse reference texts that cannot be read, or that have no token whose probability could be measured."""
    settings, given = run.group("data_preparation", DataPreparationConfig), run.data.get(REFERENCE_TEXTS)
    if settings is None or given is None:
        return
    table = choose_reference_texts(str(run.source(REFERENCE_TEXTS)), given, None, settings)
    if table is not None and run.start in run.models:
        context, _ = usable_context(run.models[run.start].config())
        tokenise_reference_texts(table, run.tokenizers[run.start], context)


def check_prompts(run: RunRequest) -> None:
    """Refuse too few held-out prompts for `evaluation.on_exploitation`.

    Where the policy cannot be read, so that no node has read the prompts, refuse prompts that cannot be split.
    """
    settings, ppo = run.group("prompts", PromptsConfig), run.group("ppo", PPOConfig)
    if settings is not None and "sft_policy" not in run.data and "raw_prompts" in run.data:
        split_held_out(run.data["raw_prompts"], run.data.get("raw_evaluation_prompts"), settings)
    evaluation, held_out = run.group("evaluation", EvaluationConfig), run.data.get("evaluation_prompt_dataset")
    if ppo is not None and evaluation is not None and held_out is not None and run.writes(EVALUATION_METRICS):
        check_evaluated_prompts(len(held_out), evaluation.iteration_prompts, ppo, evaluation.on_exploitation)


REQUEST_CHECKS = (
    check_sharding,
    check_feedback,
    check_start,
    check_settings,
    check_exploitation,
    check_protection,
    check_owner_of_reward_model,
    check_reward_model_is_read,
)
