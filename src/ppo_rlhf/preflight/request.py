"""The run that a user asks for, and the questions that the checks ask about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline
from transformers import PreTrainedTokenizerBase

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.evaluation.policy import EvaluationConfig, resolve_judge
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.people.pairs import FeedbackConfig
from ppo_rlhf.rewards.config import RewardConfig
from ppo_rlhf.runtime.names import HELD_OUT_DEMONSTRATIONS, env_option
from ppo_rlhf.runtime.paths import path_of, readable_path

T = TypeVar("T")

MODELS_LAYER = "06_models"
# model: (stage that makes the model, setting that names another model, options of a run that only reads the model)
MADE_BY = {
    "sft_policy": ("supervised_finetuning", "sft_model_path", "--pipelines align"),
    "reward_model": ("reward_modelling", "reward_model_path", "--pipelines align"),
    "pretrained_critic": ("critic_pretraining", "critic_path", "--pipelines align"),
    "ppo_policy": ("ppo", "policy_path", "--pipelines evaluation"),
}
MODELS = ("base_model", *MADE_BY)
# The model from which the critic starts, by the setting value_model
CRITIC_STARTS = {"reward_init": "reward_model", "pretrained": "pretrained_critic"}
PROMPTS = ("raw_prompts", "raw_evaluation_prompts")
REFERENCE_TEXTS = "raw_reference_texts"
TABLES = ("raw_demonstrations", "raw_preferences", *PROMPTS, REFERENCE_TEXTS)


@dataclass
class RunRequest:
    """The run that a user asks for, and the inputs of the run that the checks have read so far."""

    pipeline: Pipeline
    catalog: CatalogProtocol
    project_path: Path
    data_root: str = "data"
    env: str | None = None
    # Tables, models and outputs of the preparing nodes, by the catalog's entry
    data: dict[str, Any] = field(default_factory=dict)
    # Models and tokenizers by the catalog's entry; reward models of a component's `path` by the path
    models: dict[str, PretrainedHandle] = field(default_factory=dict)
    tokenizers: dict[str, PreTrainedTokenizerBase] = field(default_factory=dict)

    def reads(self, name: str) -> bool:
        """Return whether the run reads the dataset `name` from the catalog and no node of the run makes it."""
        return name in self.pipeline.inputs() and name in self.catalog

    def writes(self, name: str) -> bool:
        """Return whether a node of the run makes the dataset `name`."""
        return name in self.pipeline.all_outputs()

    def pass_models(self) -> None:
        """Give preparing nodes the models that were found, and what they read of earlier runs.

        Where the run trains the SFT policy, nodes get the model that it starts from, whose tokenizer SFT keeps.
        """
        self.data["base_model"] = self.models.get("base_model")
        if self.start in self.models:
            self.data["sft_policy"] = self.models[self.start]
        if self.reads("evaluation_prompts"):
            is_used = self.needs("evaluation_prompts")
            self.data["evaluation_prompts"] = self.catalog["evaluation_prompts"].load() if is_used else None
            self.data["training_prompts"] = None  # only counted by the node, which no check needs

    def group(self, name: str, kind: type[T]) -> T | None:
        """Return a validated group of parameters; None if no node of the run reads the group."""
        value = self.catalog[f"params:{name}"].load() if self.reads(f"params:{name}") else None
        return value if isinstance(value, kind) else None

    def source(self, name: str) -> str | None:
        """Return the path or hub id of a dataset; None if the dataset has none."""
        return path_of(self.catalog[name]) if name in self.catalog else None

    def readable_source(self, name: str) -> str:
        """Return a dataset's source for messages: a path below the project is shown relative to the project."""
        return readable_path(str(self.source(name)), self.project_path)

    @property
    def rewards(self) -> list[RewardConfig]:
        """The reward of the run and the rewards of a sweep's trainings."""
        reward = self.group("reward", RewardConfig)
        return [*([] if reward is None else [reward]), *(each.reward for each in self.data.get("sweep_settings", []))]

    @property
    def prompts(self) -> dict[str, PromptDataset]:
        """The prompts that preparing nodes have read, by the path of their table; those of evaluations are last."""
        given, found = self.source("raw_evaluation_prompts"), dict[str, PromptDataset]()
        if (training := self.data.get("prompt_dataset")) is not None:
            found[str(self.source("raw_prompts"))] = training
            if given is not None:
                found[given] = self.data["evaluation_prompt_dataset"]
        elif (chosen := self.data.get("chosen_prompts")) is not None:
            found[str(given or self.source("evaluation_prompts"))] = PromptDataset.from_frame(chosen)
        return found

    @property
    def reward_models(self) -> list[str]:
        """The names in `models` of the reward models of the rewards, the one that a critic starts from first."""
        paths = dict.fromkeys(path for reward in self.rewards for path in reward.model_paths)
        return ["reward_model" if path is None else path for path in paths]

    def critic_start(self, value_model: str) -> str:
        """Return the name in `models` of the model from which the critic starts; empty if `value_model` names none."""
        start = CRITIC_STARTS.get(value_model, "")
        return next(iter(self.reward_models), start) if start == "reward_model" else start

    @property
    def reward_functions(self) -> list[str]:
        """The functions of the rewards, as `module:name`."""
        return [c.function for each in self.rewards for c in each.components if c.function is not None]

    @property
    def start(self) -> str:
        """The catalog entry of the model that the policy starts from: `base_model` if the run trains the SFT policy,
        else `sft_policy`.
        """
        return "base_model" if self.writes("sft_policy") else "sft_policy"

    @property
    def samples_pairs(self) -> bool:
        """Whether the run samples the preference pairs itself, because the user gave no preferences."""
        return self.writes("preferences") and self.source("raw_preferences") is None

    def needs(self, name: str) -> bool:
        """Return whether the run's settings use an input. For example, a reward of functions needs no reward model."""
        ppo, reward = self.group("ppo", PPOConfig), self.group("reward", RewardConfig)
        evaluation = self.group("evaluation", EvaluationConfig)
        feedback = self.group("feedback", FeedbackConfig)
        if feedback is not None and name in ("sft_policy", "ppo_policy"):
            return feedback.names(name)
        is_needed = {
            "reward_model": reward is None or reward.needs_catalogued_model,
            "pretrained_critic": ppo is not None and ppo.value_model == "pretrained",
            "training_prompts": False,
            "evaluation_demonstrations": self.writes("sft_policy")
            or (evaluation is not None and evaluation.reference_texts == HELD_OUT_DEMONSTRATIONS),
            "evaluation_prompts": self.source("raw_evaluation_prompts") is None,
        }
        return is_needed.get(name, True)

    @property
    def unused(self) -> set[str]:
        """The inputs of the run that its settings do not use."""
        return {name for name in self.pipeline.inputs() if not self.needs(name)}

    @property
    def chain_hint(self) -> str:
        """A sentence that suggests `--env demo`; empty if the run is not the whole chain or the project has no demo."""
        is_whole_chain = self.writes("sft_policy") and self.writes("ppo_policy")
        is_there = (self.project_path / "conf" / "demo").is_dir()
        return " To try the whole chain first, use `--env demo`." if is_whole_chain and is_there else ""

    def is_ours(self, source: str | None) -> bool:
        """Return whether a model is below the project's folder of models, after links are followed."""
        models = (self.project_path / self.data_root / MODELS_LAYER).resolve()
        return models in (self.project_path / str(source)).resolve().parents

    def why_missing(self, name: str) -> str:
        """Return why a model of `MADE_BY` is missing and how to mend that.

        The text is empty if the model exists, or if its path is outside the project's folder of models.
        """
        (stage, setting, _), source = MADE_BY[name], self.source(name)
        if source is None:
            return self.not_set(setting)
        if not self.is_ours(source) or self.catalog[name].exists():
            return ""
        # The SFT stage reads the output of the stage data_preparation
        stages = f"data_preparation,{stage}" if name == "sft_policy" else stage
        path, command = self.readable_source(name), f"`kedro run{env_option(self.env)} --pipelines {stages}`"
        if not self.is_made_here(name):
            return f"{path}: nothing is there. Correct {setting}, or run {command}, which would write the model there."
        return f"{path}: nothing is there yet. Run {command} first, or set {setting}."

    def is_made_here(self, name: str) -> bool:
        """Return whether the entry's path is the project's folder of all versions of the model, not one version's
        folder.
        """
        return self.is_ours(self.source(name)) and Path(str(self.source(name))).name == name

    @property
    def globals_file(self) -> str:
        """The globals.yml in which a user sets the run's paths: in conf/local, or in conf/ENV with --env ENV."""
        return f"conf/{self.env or 'local'}/globals.yml"

    def not_set(self, *settings: str) -> str:
        """Return a message about paths that are null."""
        *others, last = settings
        if others:
            return f"{', '.join(others)} and {last} are not set. Set them in {self.globals_file} or with --params."
        return f"{last} is not set. Set it in {self.globals_file} or with --params {last.split()[0]}=…"


def describe_parts(run: RunRequest) -> str:
    """Return one line that names the policy, the reward, the prompts and the judge of a run.

    The line is empty if the run neither trains by PPO nor evaluates.
    """
    reward, evaluation = run.group("reward", RewardConfig), run.group("evaluation", EvaluationConfig)
    read = next((name for name in (*PROMPTS, "evaluation_prompts") if run.reads(name) and run.source(name)), None)
    if reward is None or evaluation is None or read is None:
        return ""

    def made(name: str, start: str | None) -> str:
        return (
            f"trained by this run, from {start or 'random weights'}" if run.writes(name) else run.readable_source(name)
        )

    policy = made("sft_policy", run.source("base_model"))
    terms = [str(c.llm or c.function or c.path or made("reward_model", "the policy")) for c in reward.components]
    if reward.combine != "sum":
        terms = [f"{reward.combine} of {', '.join(terms)}"]
    elif len(terms) > 1:
        terms = [f"{c.weight:g} x ({term})" for c, term in zip(reward.components, terms, strict=True)]
    prompts, judge = run.readable_source(read), resolve_judge(evaluation, run.project_path).description
    return f"Policy: {policy}. Reward: {' + '.join(terms)}. Prompts: {prompts}. The win rate is decided by {judge}."
