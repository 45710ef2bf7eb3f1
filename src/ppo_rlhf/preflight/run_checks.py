"""Checks a user's input before a run writes anything, and reports all problems at once, one line each.

The checks call the functions that the nodes call, on the same inputs, so checks and nodes apply the same rules. A check
yields the problems that it finds, or raises a PPORLHFError, which ends only the check that raised it. Inputs that the
run makes itself are not checked; for example, a run of the whole chain needs no SFT policy on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from datasets import Dataset
from kedro.io import DatasetError, MemoryDataset

from ppo_rlhf.config import MODEL_PATHS, PPOConfig
from ppo_rlhf.core.errors import ModelError, PPORLHFError, project_error
from ppo_rlhf.data.chats import TOOLS, Chat, answered
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.data.prompts import PromptReader, PromptsConfig, split_held_out
from ppo_rlhf.data.tables import frame_of
from ppo_rlhf.datasets import EvaluationLogDataset, PretrainedModelDataset, RecordsDataset, ResumeCheckpointDataset
from ppo_rlhf.datasets.review_queues import SCHEME
from ppo_rlhf.evaluation.exploitation import check_evaluated_prompts
from ppo_rlhf.evaluation.policy import EvaluationConfig
from ppo_rlhf.models.adapters import check_critic_targets, check_targets
from ppo_rlhf.models.compilation import layers_of
from ppo_rlhf.models.context import usable_context
from ppo_rlhf.models.forward import backbone_of
from ppo_rlhf.models.gradient_checkpointing import check_gradient_checkpointing
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.tokenizers import same_vocabulary, train_word_tokenizer
from ppo_rlhf.pipelines.critic_pretraining.training import CriticPretrainingConfig, pretraining_config
from ppo_rlhf.pipelines.sweep.grid import SweepConfig, plan_sweep
from ppo_rlhf.ppo.build import check_device, check_libraries, lora_settings
from ppo_rlhf.ppo.callbacks import own_callbacks, reporting_callbacks
from ppo_rlhf.ppo.critic_column import check_critic_column
from ppo_rlhf.ppo.environments import call_environment
from ppo_rlhf.ppo.precision import resolve_device
from ppo_rlhf.preflight.judge_checks import check_judges
from ppo_rlhf.preflight.model_checks import MODEL_CHECKS, check_room
from ppo_rlhf.preflight.request import (
    MADE_BY,
    MODELS,
    MODELS_LAYER,
    PROMPTS,
    REFERENCE_TEXTS,
    TABLES,
    RunRequest,
)
from ppo_rlhf.rewards.combination import check_whole
from ppo_rlhf.rewards.config import RewardConfig
from ppo_rlhf.rewards.functions import call_reward_function, check_column_names, load_function
from ppo_rlhf.rewards.rendering import Rendering
from ppo_rlhf.rewards.scorers import below_project
from ppo_rlhf.rewards.scoring import MESSAGES, TURNS
from ppo_rlhf.rewards.shaping import check_token_rewards
from ppo_rlhf.runtime.names import EVALUATION_METRICS, HUMAN_EVALUATION, STATE, TRAININGS
from ppo_rlhf.runtime.processes import refuse_sharding
from ppo_rlhf.supervised import preferences
from ppo_rlhf.supervised.comparisons import FeedbackConfig
from ppo_rlhf.supervised.demonstrations import DataPreparationConfig, corpus_texts, split_demonstrations
from ppo_rlhf.supervised.reference_texts import choose_reference_texts, tokenise_reference_texts
from ppo_rlhf.supervised.reward_training import TRAINED_FROM, RewardModellingConfig
from ppo_rlhf.supervised.sft import NO_BASE_MODEL, TWO_STARTS, SupervisedFinetuningConfig

TRIED_PROMPTS = 2
# Stages that may run under FSDP; the stage ppo is the only one that trains
SHARDED = {"ppo", "data_preparation", "evaluation", "reporting"}
OWN_CODE = "transformers_modules."  # transformers imports Python code of a model's directory as modules of this package
FROM_FEEDBACK = {"collected_pairs"}
"""Inputs of which `check_feedback` says where the catalog gets them from."""
_WITHOUT_OWN_CODE = {
    "reward_model": "Set reward_model_path or give functions as reward, and run `--pipelines align`.",
    "pretrained_critic": "Set ppo.critic_warmup_iterations, which trains a critic at the start of each run.",
}
# Types of catalog entries that `check_start` need not find on disk, such as models, which have checks of their own.
# The log of evaluations need not exist either, because it is empty before the first evaluation.
READY = (MemoryDataset, RecordsDataset, PretrainedModelDataset, ResumeCheckpointDataset, EvaluationLogDataset)


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

    for first in (
        check_sharding,
        check_feedback,
        check_start,
        check_settings,
        check_exploitation,
        check_sweep,
        check_protection,
        check_scorer,
        check_reward_model_is_read,
    ):
        ask(first)
    for name in filter(run.reads, TABLES):
        ask(check_table, name)
    for name in filter(run.reads, MODELS):
        ask(check_model, name)
    for path in (name for name in run.reward_models if name not in MODELS):
        ask(check_reward_model, path)
    for last in (
        *MODEL_CHECKS,
        check_model_options,
        check_critic,
        check_sft_data,
        check_reference_texts,
        check_preferences,
        check_prompts,
    ):
        ask(last)
    for reference, tables in functions_of(run).items():
        ask(check_function, reference, tables)
    ask(check_judges)
    ask(check_environment)
    ask(check_callbacks)
    return list(dict.fromkeys(problems))


def check_sharding(run: RunRequest) -> None:
    """Refuse stages that cannot train sharded models if the launch asks for FSDP."""
    stages = {(node.namespace or "").split(".")[0] for node in run.pipeline.nodes}
    for stage in sorted(stages - SHARDED):
        refuse_sharding(stage)


def check_feedback(run: RunRequest) -> Iterator[str]:
    """Find missing catalog entries for people's answers; without an entry, the answers are lost at the run's end."""
    keeps = ["params:feedback", "feedback_pairs", *sorted(FROM_FEEDBACK)]
    if run.writes(HUMAN_EVALUATION):
        keeps.append(HUMAN_EVALUATION)
    if (run.source("raw_preferences") or "").startswith(SCHEME):
        keeps.append("answered_preferences")
    if lacking := [name for name in keeps if run.lacks(name)]:
        yield (
            f"conf/base has no {', '.join(lacking)}, because the project was made by an earlier version. Copy "
            "conf/base/catalog_feedback.yml and conf/base/parameters_feedback.yml from a new project (`ppo_rlhf init`)."
        )
    feedback = run.group("feedback", FeedbackConfig)
    export = None if feedback is None or not run.writes("feedback_pairs") else feedback.export
    if export and (run.project_path / export).exists():
        yield f"feedback.export={export}: this file exists, and is not overwritten. Give another name."


def check_start(run: RunRequest) -> Iterator[str]:
    """Find inputs without a file: the run starts after the nodes that make them, and no earlier run saved them."""
    if run.lacks(REFERENCE_TEXTS):
        yield (
            f"conf/base has no {REFERENCE_TEXTS}, because the project was made by an earlier version. Copy "
            "catalog_evaluation.yml, catalog_data_preparation.yml, parameters_evaluation.yml and, of globals.yml, the "
            "line reference_texts_path from conf/base of a new project (`ppo_rlhf init`)."
        )
    named_elsewhere = {"params:feedback", REFERENCE_TEXTS, *FROM_FEEDBACK}
    entries = {name: run.catalog.get(name) for name in sorted(run.pipeline.inputs() - named_elsewhere)}
    unsaved = [name for name, e in entries.items() if e is None or (isinstance(e, MemoryDataset) and not e.exists())]
    if unsaved:
        yield f"No file holds {', '.join(unsaved)}, so the run cannot start there: use --from-nodes with earlier nodes."
    for name, entry in entries.items():
        if entry is not None and run.needs(name) and not isinstance(entry, READY) and not entry.exists():
            yield f"{run.source(name)}: nothing is there yet. Run the node that makes {name} first."


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


def check_sweep(run: RunRequest) -> None:
    """Refuse a sweep whose grid is invalid, and store the trainings' reward settings in `run.swept`."""
    sweep, ppo = run.group("sweep", SweepConfig), run.group("ppo", PPOConfig)
    reward = run.group("reward", RewardConfig)
    if sweep is not None and ppo is not None and reward is not None:
        run.swept = [each.reward for each in plan_sweep(ppo, reward, sweep)]


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


def check_scorer(run: RunRequest) -> Iterator[str]:
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
        policy, reward_model = map(run.shown, ("sft_policy", "reward_model"))
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


def check_table(run: RunRequest, name: str) -> None:
    """Load a table of the user; loading raises if the table is missing, empty or damaged."""
    table = run.catalog[name].load()
    if table is not None:
        run.tables[name] = table


def check_model(run: RunRequest, name: str) -> Iterator[str]:
    """Find a model that is missing, incomplete or of the wrong kind, or whose tokenizer belongs to another model."""
    if not run.needs(name) or not isinstance(run.catalog.get(name), PretrainedModelDataset):
        return
    if name in MADE_BY and (why := run.why_missing(name)):
        yield why
        return
    if run.source(name) is None:  # the policy starts from random weights, or check_settings asks for its start
        return
    handle = run.catalog[name].load()
    if name == "reward_model":
        handle.check_reward_model()
    elif name == "pretrained_critic":
        handle.check_critic()
    else:
        handle.check_causal_lm()
    has_own_code = name == run.start and type(handle.config()).__module__.startswith(OWN_CODE)
    for output, fix in _WITHOUT_OWN_CODE.items() if has_own_code else ():
        if run.writes(output):
            yield f"{handle.source} has Python code of its own, which is not saved with a {output} trained on it. {fix}"
    run.models[name], run.tokenizers[name] = handle, handle.tokenizer()


def check_reward_model(run: RunRequest, path: str) -> None:
    """Refuse a reward model of a component's `path` that is missing, incomplete or of the wrong kind."""
    handle = PretrainedHandle(below_project(path, run.project_path))
    handle.check_reward_model()
    run.models[path], run.tokenizers[path] = handle, handle.tokenizer()


def check_model_options(run: RunRequest) -> None:
    """Refuse settings of PPO that the architecture does not support. No weights are read."""
    ppo = run.group("ppo", PPOConfig)
    is_set = ppo is not None and (ppo.use_peft or ppo.gradient_checkpointing or ppo.compile)
    # A run that reads `ppo_policy` evaluates a trained policy and does not train
    if ppo is None or not is_set or run.start not in run.models or run.reads("ppo_policy"):
        return
    empty = run.models[run.start].empty_causal_lm()
    if ppo.gradient_checkpointing:
        check_gradient_checkpointing(empty)
    if ppo.compile:
        layers_of(empty)
    if ppo.use_peft:
        check_targets(empty, lora_settings(ppo))
        if ppo.value_model == "separate":
            check_critic_targets(backbone_of(empty), lora_settings(ppo))


def check_critic(run: RunRequest) -> Iterator[str]:
    """Find a `value_model` from which the critic cannot start."""
    ppo, pretraining = run.group("ppo", PPOConfig), run.group("critic_pretraining", CriticPretrainingConfig)
    reward = run.group("reward", RewardConfig)
    for name, group in {"ppo": ppo, "critic_pretraining": pretraining}.items():
        if group is None or run.reads("ppo_policy"):  # a run that evaluates a trained policy has no critic
            continue
        setting, fix = f"{name}.value_model={group.value_model}", f"Set {name}.value_model=separate."
        start = run.critic_start(group.value_model)
        both = [run.tokenizers[name] for name in ("sft_policy", start) if name in run.tokenizers]
        if start == "reward_model" and reward is not None and not reward.needs_model:
            yield f"{setting}: no entry of reward.components is of type model. {fix}"
        elif len(both) == 2 and not same_vocabulary(*both):
            policy, model = run.source("sft_policy"), run.source(start) or start
            yield f"{setting}: {policy} and {model} have different vocabularies. {fix}"
    if ppo is not None and pretraining is not None:
        pretraining_config(pretraining, ppo)


def check_sft_data(run: RunRequest) -> None:
    """Refuse demonstrations that lack a column, are too few, or that the chat template refuses or leaves out."""
    settings = run.group("data_preparation", DataPreparationConfig)
    if settings is not None and "raw_demonstrations" in run.tables:
        table = frame_of(run.tables["raw_demonstrations"])
        run.demonstrations, _ = split_demonstrations(table, settings, run.tokenizers.get(run.start))
        if run.writes("sft_policy") and run.source("base_model") is None:
            # the run trains a tokenizer on the demonstrations: raise an error if the demonstrations are chats
            next(corpus_texts(run.demonstrations))


def check_reference_texts(run: RunRequest) -> None:
    """Refuse reference texts that cannot be read, or that have no token whose probability could be measured."""
    settings = run.group("data_preparation", DataPreparationConfig)
    if settings is None or REFERENCE_TEXTS not in run.tables:
        return
    given = run.tables[REFERENCE_TEXTS]
    table = choose_reference_texts(str(run.source(REFERENCE_TEXTS)), given, None, settings)
    if table is not None and run.start in run.models:
        context, _ = usable_context(run.models[run.start].config())
        tokenise_reference_texts(table, run.tokenizers[run.start], context)


def check_preferences(run: RunRequest) -> None:
    """Refuse preferences that cannot be read, or that the chat template leaves out."""
    settings = run.group("reward_modelling", RewardModellingConfig)
    if settings is None or not run.reads("raw_preferences"):
        return
    if "raw_preferences" in run.tables:
        table = frame_of(run.tables["raw_preferences"])
        preferences.check_preferences(table, *settings.columns, run.tokenizers.get(run.start))


def check_prompts(run: RunRequest) -> None:
    """Refuse prompts that are neither text nor chat, are too long, cannot be split, or that a reward model refuses.

    A prompt and a full response must also fit into the context of each reward model, and `ppo.critic_column` before
    them into the policy's.
    """
    settings, ppo = run.group("prompts", PromptsConfig), run.group("ppo", PPOConfig)
    if settings is None:
        return
    tables = {name: run.tables[name] for name in PROMPTS if name in run.tables}
    reader, tokenised = None if ppo is None else _policy_reader(run, ppo), run.prompts
    if reader is not None:
        # Read whole files, so that the row numbers in error messages are those of the file
        for name, table in tables.items():
            source = str(run.source(name))
            tokenised[name] = reader.tokenise(table, settings.column, source)
            reader.fit(tokenised[name], source)
            for model in (model for model in run.reward_models if model in run.tokenizers):
                rendering = Rendering(run.tokenizers[model], reader.tokenizer)
                tools = _column(tokenised[name], TOOLS) if TOOLS in tokenised[name].column_names else None
                rendering.check(_column(tokenised[name], "prompt_chat"), source, tools)
    if "raw_prompts" not in tables:
        return
    trained, held_out = split_held_out(tables["raw_prompts"], tables.get("raw_evaluation_prompts"), settings)
    evaluation = run.group("evaluation", EvaluationConfig)
    if ppo is not None and evaluation is not None and run.writes(EVALUATION_METRICS):
        prompts = min(len(held_out), evaluation.iteration_prompts)
        check_evaluated_prompts(prompts, ppo, evaluation.on_exploitation)
    if reader is not None:
        training = tokenised["raw_prompts"].select(trained)
        check_room(run, reader, training)
        if ppo is not None and ppo.critic_column is not None and run.writes("prompt_dataset"):
            fitting = PromptDataset.of_table(reader.fit(training, str(run.source("raw_prompts"))))
            check_critic_column(fitting, ppo, reader.tokenizer, reader.context, reader.why)


def _column(table: Dataset, name: str) -> Iterator[Any]:
    for batch in table.select_columns([name]).iter(batch_size=1_000):
        yield from batch[name]


def _policy_reader(run: RunRequest, ppo: PPOConfig) -> PromptReader | None:
    """Return the reader of prompts for the SFT policy; None if the policy's tokenizer is not known yet."""
    if run.start in run.models:
        return PromptReader.of(run.models[run.start], ppo)
    settings = run.group("supervised_finetuning", SupervisedFinetuningConfig)
    if settings is None or settings.from_scratch is None or run.demonstrations is None:
        return None
    context = settings.from_scratch.max_position_embeddings
    tokenizer = train_word_tokenizer(corpus_texts(run.demonstrations), context)
    return PromptReader(tokenizer, context, ppo.response_length, ppo.overlong_prompts)


def functions_of(run: RunRequest) -> dict[str, list[str]]:
    """Return the user's functions as `module:name`, each with the names of the tables whose prompts it gets."""
    evaluation = run.group("evaluation", EvaluationConfig)
    rewards = run.group("reward_modelling", RewardModellingConfig)
    tables = [name for name in PROMPTS if name in run.tables]
    tables_of: dict[str, list[str]] = {}
    if evaluation is not None:
        judging = (evaluation.judge, *evaluation.judges.values(), *evaluation.rates.values())
        tables_of |= {name: tables[-1:] for name in judging if isinstance(name, str)}
    if rewards is not None and rewards.labeller is not None and run.samples_pairs:
        tables_of[rewards.labeller] = tables[:1]
    return tables_of | dict.fromkeys(run.reward_functions, tables)


def check_function(run: RunRequest, reference: str, tables: list[str]) -> None:
    """Refuse a function that cannot be imported, raises, or does not return the required finite numbers.

    The function is called with two prompts of each table. The texts of the prompts also serve as responses.
    """
    function = load_function(reference, run.project_path)
    ppo = run.group("ppo", PPOConfig)
    tokenizer = run.tokenizers.get(run.start) or next(iter(run.tokenizers.values()), None)
    for few, source in _tried(run, tables):
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


def _tried(run: RunRequest, tables: list[str]) -> Iterator[tuple[PromptDataset, str]]:
    """Yield the first prompts of each table, in the form that functions get, with the source of the table.

    A table that `check_prompts` could not read is skipped, because `check_prompts` has reported the reason.
    """
    settings = run.group("prompts", PromptsConfig)
    if settings is None:
        return
    for name in tables:
        source = str(run.source(name))
        check_column_names(run.tables[name].column_names, source, settings.column)
        if name in run.prompts:
            table = run.prompts[name]
            yield PromptDataset.of_table(table).select(range(min(TRIED_PROMPTS, len(table)))), source


def check_environment(run: RunRequest) -> Iterator[str]:
    """Find an environment that cannot be imported, raises, or does not answer an empty first turn to two prompts."""
    ppo = run.group("ppo", PPOConfig)
    if ppo is None or ppo.environment is None:
        return
    if run.writes("reward_audit"):
        yield (
            f"ppo.environment={ppo.environment}: audit_reward does not support rewards of episodes, because the audit "
            "scores changed texts; leave audit_reward out"
        )
    if run.samples_pairs:
        yield (
            f"ppo.environment={ppo.environment}: pairs of episodes cannot be sampled for a reward model; set "
            "preferences_path, or run `--pipelines align` with a reward of your own"
        )
    function = load_function(ppo.environment, run.project_path)
    for few, source in _tried(run, [name for name in PROMPTS if name in run.tables]):
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


def _text(chat: Chat) -> str:
    return "\n".join(message["content"] or "" for message in chat)
