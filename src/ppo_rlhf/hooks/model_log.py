"""Logs a policy on disk as an MLflow model for `mlflow models serve` and `load_model`.

The model of a policy with a chat template takes messages in OpenAI's format (`llm/v1/chat`); any other model takes
text. By default the served model samples with PPO's sampling settings.
"""

from __future__ import annotations

import importlib.metadata
import logging
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlflow
from mlflow.entities import LoggedModelOutput, LoggedModelStatus, Metric, Run
from mlflow.models import Model, ModelSignature
from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf.checkpoints.evaluations import best_saved
from ppo_rlhf.checkpoints.files import Checkpoint, checkpoint_name
from ppo_rlhf.checkpoints.model_files import POLICY
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.datasets.checkpoints import CheckpointDataset, run_directory
from ppo_rlhf.datasets.search_filters import equals
from ppo_rlhf.evaluation.verdict import Verdict, read_verdict
from ppo_rlhf.hooks import served_chat
from ppo_rlhf.hooks.run_description import verdict_of
from ppo_rlhf.hooks.tracking_store import SQLITE
from ppo_rlhf.models.context_length import context_length
from ppo_rlhf.models.directories import is_adapter
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.origins import MADE_FROM
from ppo_rlhf.models.tokenizers import templates_of, with_first_space
from ppo_rlhf.reporting.wording import say_verdict
from ppo_rlhf.runtime.locks import one_at_a_time
from ppo_rlhf.runtime.log_lines import errors_only, quiet_transformers

logger = logging.getLogger(__name__)

CHAMPION = "champion"
REQUIRED = ("torch", "transformers", "accelerate")
TEXT = Schema([ColSpec(DataType.string)])
EXAMPLE = "Your prompt"


def log_policy(
    directory: Path,
    name: str,
    step: int,
    keys: Collection[str],
    config: PPOConfig,
    generation_config: GenerationConfig,
    *,
    trust_remote_code: bool = False,
) -> str:
    """Log a model directory to the active run, unless the run already has that model; return the logged model's id.

    `step` is the PPO iteration of the model. `keys` are the metrics of the iteration to link with the model:
    `mlflow.transformers.log_model` would link all metrics of the iteration, including metrics of other stages.
    `generation_config` holds the tokens that end a response. The policy of a checkpoint is also logged with the
    exported policy's generation config.
    """
    client, run = mlflow.MlflowClient(), mlflow.get_run(mlflow.active_run().info.run_id)  # type: ignore[union-attr]
    logged_before = _logged_model(run, name, step)
    if logged_before is not None:
        logger.info("The MLflow model %s of iteration %d has been logged before.", name, step)
        return logged_before
    # Hide MLflow's warnings about missing input examples and model cards.
    with errors_only("mlflow"), quiet_transformers(), TemporaryDirectory() as folder:
        # Load the model, because MLflow 3.17 cannot log a path under transformers 5 (MLflow fails to find the task).
        options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
        if is_adapter(directory):  # merge the LoRA adapter, so that the logged model does not need its base model
            model = PretrainedHandle(str(directory), trust_remote_code).causal_lm()
        else:
            model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", **options)
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory, **options)
        # Without a chat template, MLflow's server completes texts: it appends the decoded new tokens to the prompt
        if not templates_of(tokenizer):
            tokenizer = with_first_space(tokenizer)
        logged = mlflow.initialize_logged_model(name, params=run.data.params)
        model.generation_config = generation_config
        # A path, because MLflow would ask the hub for the model card of a name
        model.name_or_path = str(directory.absolute())
        about = Model(artifact_path=logged.artifact_location, model_uuid=logged.model_id, run_id=run.info.run_id)
        mlflow.transformers.save_model(
            {"model": model, "tokenizer": tokenizer},
            f"{folder}/model",
            **_interface(model, tokenizer, config),
            # Without a list of packages, MLflow would load the model to find its requirements.
            pip_requirements=[f"{package}=={importlib.metadata.version(package)}" for package in REQUIRED],
            mlflow_model=about,
            code_paths=[served_chat.__file__],
        )
        about.flavors["transformers"][served_chat.NAME] = name
        if templates_of(tokenizer):
            about.flavors["python_function"]["loader_module"] = Path(served_chat.__file__).stem
        about.save(f"{folder}/model/MLmodel")
        if (directory / MADE_FROM).is_file():
            shutil.copy(directory / MADE_FROM, f"{folder}/model")
        client.log_model_artifacts(logged.model_id, f"{folder}/model")
    return _finish(run, str(logged.model_id), step, keys)


def log_critic(directory: Path, name: str, step: int, keys: Collection[str]) -> str:
    """Log a critic's directory to the active run, if it is not logged yet, and return the logged model's id.

    The critic's files are logged unchanged, so that a user can download the critic and name its folder in
    `critic_path`. MLflow has no way to serve values. `step` and `keys` are those of `log_policy`.
    """
    client, run = mlflow.MlflowClient(), mlflow.get_run(mlflow.active_run().info.run_id)  # type: ignore[union-attr]
    logged_before = _logged_model(run, name, step)
    if logged_before is not None:
        return logged_before
    model_id = mlflow.initialize_logged_model(name, params=run.data.params).model_id
    client.log_model_artifacts(model_id, str(directory))
    return _finish(run, model_id, step, keys)


def _finish(run: Run, model_id: str, step: int, keys: Collection[str]) -> str:
    """Link a logged model with its run and the points of its iteration that MLflow has, and return its id."""
    client, ids = mlflow.MlflowClient(), {"run_id": run.info.run_id, "model_id": model_id}
    points = [each for key in keys for each in client.get_metric_history(run.info.run_id, key)]
    linked = [Metric(each.key, each.value, each.timestamp, step, **ids) for each in points if each.step == step]
    client.log_batch(run.info.run_id, metrics=linked)
    client.finalize_logged_model(model_id, LoggedModelStatus.READY)
    client.log_outputs(run.info.run_id, [LoggedModelOutput(model_id, step)])
    return model_id


def _interface(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: PPOConfig) -> dict[str, Any]:
    """Return the arguments of `save_model` that describe requests and answers.

    As a side effect the function lowers `tokenizer.model_max_length` to the model's context length.
    """
    sampled = {
        "max_new_tokens": config.turn_length or config.response_length,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
    }
    limit, context = {}, context_length(model.config)
    if context is not None:
        tokenizer.model_max_length = min(tokenizer.model_max_length, context)
        # With "hole", transformers' pipeline cuts the beginning off a prompt that leaves no room for max_new_tokens.
        limit = {"handle_long_generation": "hole"}
    if templates_of(tokenizer):
        example = {"messages": [{"role": "user", "content": EXAMPLE}]}
        # The chat template already writes the special tokens, so the tokenizer must not add them again
        written_out = {"add_special_tokens": False}
        return {"task": "llm/v1/chat", "model_config": {**limit, **sampled, **written_out}, "input_example": example}
    types = {int: DataType.long, float: DataType.double}
    params = ParamSchema([ParamSpec(name, types[type(value)], value) for name, value in sampled.items()])
    return {
        "task": "text-generation",
        "signature": ModelSignature(TEXT, TEXT, params),
        "model_config": limit,
        "input_example": (EXAMPLE, sampled),
    }


def _logged_model(run: Run, name: str, step: int) -> str | None:
    """Return the id of the run's complete logged model named `name` of iteration `step`, or None; delete models that a
    kill left half written.
    """
    steps = {output.model_id: output.step for output in (run.outputs.model_outputs if run.outputs else ())}
    query = f"{equals('source_run_id', run.info.run_id)} AND {equals('name', name)}"
    for model in mlflow.search_logged_models([run.info.experiment_id], query, output_format="list"):
        if model.model_id not in steps or model.status != LoggedModelStatus.READY:
            mlflow.MlflowClient().delete_logged_model(model.model_id)
        elif steps[model.model_id] == step:
            return str(model.model_id)
    return None


def register(model_id: str, start: str, summary: Mapping[str, Any]) -> None:
    """Register a logged model, and move the alias `champion` to the model if the model is better than the champion.

    All policies that started from the same model are versions of one registered model. The registered model's name
    joins the name of the experiment, the name of the start model (`start`) and the start model's fingerprint. `summary`
    is the output of the node `compare_policies`.
    """
    client, model = mlflow.MlflowClient(), mlflow.get_logged_model(model_id)
    experiment = client.get_experiment(model.experiment_id).name.strip("/")
    name = re.sub(r"[^\w.-]+", "_", f"{experiment}-{start}-{summary['conditions']['start_model'][:8]}")
    verdict = read_verdict(summary["verdict"])
    tags = {**summary["conditions"], "win_rate": str(summary["eval/win_rate"]), "verdict": verdict.value}
    uri, source = mlflow.get_tracking_uri(), f"models:/{model_id}"
    with one_at_a_time(Path(uri.removeprefix(SQLITE)).parent if uri.startswith(SQLITE) else Path.cwd()):
        if not client.search_registered_models(equals("name", name)):
            client.create_registered_model(name)
        known = {each.source: each for each in client.search_model_versions(equals("name", name))}
        # Reuse the model version that this run registered before an interruption
        version = known.get(source) or client.create_model_version(
            name, source, model.source_run_id, tags=tags, model_id=model_id, description=verdict_of(summary)
        )
        outcome = _challenge(client, name, str(version.version), tags)
    logger.info("The policy is version %s of the registered model %s, %s.", version.version, name, outcome)


def _challenge(client: mlflow.MlflowClient, name: str, version: str, tags: dict[str, str]) -> str:
    """Move the alias `champion` to `version` if the version beats SFT and the champion.

    A version beats the champion if its win rate is higher, measured with the same prompts, judge and sampling. The
    function returns the outcome as the end of a sentence for the log.
    """
    # Read the alias from the registered model, because model versions found by a search have no aliases
    champion = client.get_registered_model(name).aliases.get(CHAMPION)
    if tags["verdict"] != Verdict.BETTER:
        return f"not its {CHAMPION} ({say_verdict(tags['verdict'])})"
    # Some MLflow stores return the version as a number, some as a text
    if champion is not None and str(champion) != version:
        champion_tags = client.get_model_version(name, champion).tags
        different = [what for what in ("prompts", "judge", "sampling") if champion_tags.get(what) != tags[what]]
        stays = f"but the {CHAMPION} stays version {champion}"
        if different:
            return (
                f"{stays}, which was evaluated with other {' and '.join(different)}. To move the alias by hand: kedro "
                f"mlflow ui, #/models/{name}/versions/{version}, Aliases"
            )
        if float(tags["win_rate"]) <= float(champion_tags["win_rate"]):
            return f"{stays}, whose win rate of {100 * float(champion_tags['win_rate']):.1f} % is not lower"
    client.set_registered_model_alias(name, CHAMPION, version)
    return f"and its {CHAMPION}"


def best_checkpoint(checkpoints: object, config: PPOConfig, last: int) -> tuple[Path, int] | None:
    """Return the policy directory and the iteration of the active run's best checkpoint; None if no checkpoint was
    evaluated.

    `last` is the run's last iteration. Evaluations with a KL above `ppo.kl_alarm` (nats per response) do not count.

    Raises:
        CheckpointError: The log of evaluations or the checkpoint's policy is damaged.
    """
    if not isinstance(checkpoints, CheckpointDataset):
        return None
    directory = run_directory(checkpoints.root)
    best = best_saved(directory, config, last)
    if best is None:
        return None
    checkpoint = Checkpoint(directory / checkpoint_name(best), part=POLICY, of_its_run=True)
    return checkpoint.directory / POLICY, best
