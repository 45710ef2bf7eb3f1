"""Settings of the reward: the reward components with their weights and names."""

import re
from pathlib import PurePath
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from ppo_rlhf.config.parameter_groups import parameter_group
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.core.option_names import RewardCombination
from ppo_rlhf.judge.settings import LLMJudgeConfig, read_judge, same_opinion
from ppo_rlhf.rewards.combination_rules import check_combination
from ppo_rlhf.runtime.user_functions import split_reference

Reference = Annotated[str, AfterValidator(lambda reference: ":".join(split_reference(reference)))]
"""The `module:name` of a Python function."""
LONGEST_METRIC_NAME = 250
"""MLflow refuses metric keys with more characters than `LONGEST_METRIC_NAME`."""


def check_metric_name(name: str, what: str, key: str, *, taken: bool = False, snake_case: bool = False) -> None:
    """Raise `ConfigError` if a user's `name` for `what` gives a metric `key` that MLflow refuses or that is in use.

    `taken` is True if another metric has the key. With `snake_case` the name must also be a snake-case identifier. The
    check is needed because MLflow drops a whole batch of metrics if one key in the batch breaks MLflow's rules.
    """
    pattern, allowed = r"\w[\w.\- ]*", "letters, digits, underscores, dashes, periods and spaces"
    if snake_case:
        pattern, allowed = r"[a-z][a-z0-9_]*", "lower-case letters, digits and underscores without a final _sft or _se"
    if taken or not re.fullmatch(pattern, name) or len(key) > LONGEST_METRIC_NAME:
        raise ConfigError(
            f"{name!r} cannot name {what}: the metric would be {key}. Use {allowed}, keep the metric within "
            f"{LONGEST_METRIC_NAME} characters, and avoid the names, prefixes and suffixes of existing metrics"
        )


@parameter_group("reward.components")
class RewardComponentConfig:
    """One term of the reward."""

    type: Literal["model", "function", "llm"]
    """`model`: a reward model. `function`: a Python function `reward(prompts, completions, **columns)`. `llm`: a
    language model. See docs/rewards.md."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Factor of the component's score in the reward. A negative one makes it a penalty."""
    path: str | None = None
    """For type `model`: directory or hub id of the reward model; None: the catalog's `reward_model`. That is the one of
    `reward_model_path`. A relative directory is below the project's."""
    function: str | None = None
    """For type `function`: `module:name` of the reward function. Python searches the module in the project's directory,
    in the project's `src` and on the Python path."""
    llm: Annotated[LLMJudgeConfig | None, BeforeValidator(read_judge)] = None
    """For type `llm`: the settings of the judge."""
    name: str | None = None
    """Name of the component, whose metric is `reward/<name>`. The default is the function's name, the last part of
    `path`, or else the type."""

    def __post_init__(self) -> None:
        if self.type == "function" and not self.function:
            raise ConfigError("a component of type function needs the setting function: module:name.")
        if self.type != "function" and self.function:
            raise ConfigError(f"function={self.function} belongs to type function, not {self.type}.")
        if self.type != "model" and self.path is not None:
            raise ConfigError(f"path={self.path} belongs to type model, not {self.type}.")
        if (self.type == "llm") != (self.llm is not None):
            raise ConfigError(
                f"a component of type {self.type} {'needs' if self.llm is None else 'has no'} llm: {{…}}."
            )
        if self.llm is not None and self.llm.is_pairwise and self.llm.against is None:
            raise ConfigError("llm.answer=pairwise as a reward needs llm.against: a column of texts to compare with.")
        if self.function is not None:
            split_reference(self.function)
        title = self.title if self.name is None else self.name
        check_metric_name(title, "a component of reward", f"reward/{title}")

    @property
    def title(self) -> str:
        """The reward component's name in metrics and errors."""
        if self.function:
            return self.name or split_reference(self.function)[1]
        return self.name or (self.type if self.path is None else PurePath(self.path.partition("@")[0]).name)


@parameter_group("reward")
class RewardConfig:
    """The reward of a response: the weighted sum of its components, or another combination (`combine`)."""

    components: Annotated[list[RewardComponentConfig], Field(min_length=1)]
    """The terms of the reward, each with the settings of `reward.components`."""
    combine: RewardCombination = "sum"
    """How the components' scores become the reward. sum: their weighted sum. The others are for reward models that may
    disagree (Coste et al. 2023, arXiv:2310.02743), take no weights, and measure the disagreement
    (`reward/disagreement`). mean: their mean. min: the lowest normalised score. mean_minus_std: the mean of the
    normalised scores less their standard deviation. With min and mean_minus_std set `reward.normalise` to component."""
    normalise: Literal["total", "component"] = "total"
    """What `ppo.reward_normalisation` normalises. total: the weighted sum. component: each component before the sum
    (GDPO, arXiv:2601.05242). No component then counts for more because its scores have a larger spread. With component,
    the weight of a reward component is in units of the standard deviation of the component's scores. `ppo.reward_scale`
    and `ppo.reward_clip` are applied after the sum."""

    def __post_init__(self) -> None:
        titles = [component.title for component in self.components]
        repeated = sorted({title for title in titles if titles.count(title) > 1})
        if repeated:
            raise ConfigError(f"reward.components: two components are called {repeated[0]}. Give each a unique name.")
        check_combination(self.combine, self.normalise, {each.title: each.weight for each in self.components})
        if self.normalise == "total":
            return
        if len(titles) == 1:
            raise ConfigError(
                f"reward.normalise=component: {titles[0]} is the only component, so there is no sum to normalise for. "
                "Leave it out; ppo.reward_scale scales the normalised score."
            )
        for title in titles:
            check_metric_name(title, "a component of reward", f"reward_std/{title}")

    @property
    def model_paths(self) -> list[str | None]:
        """`path` of each reward model, in the order of the components; None is the catalog's `reward_model`."""
        return list(dict.fromkeys(component.path for component in self.components if component.type == "model"))

    @property
    def needs_model(self) -> bool:
        """Whether any reward component is a reward model."""
        return bool(self.model_paths)

    @property
    def needs_catalogued_model(self) -> bool:
        """Whether any reward component is the catalog's `reward_model`."""
        return None in self.model_paths

    def is_judge(self, judge: str | LLMJudgeConfig | None) -> bool:
        """Return whether the judge, `module:name` or a language model, is a reward component with a positive weight.

        Return True for a judge of None, which means that the reward itself judges.
        """
        parts = [component.function or component.llm for component in self.components if component.weight > 0.0]
        return judge is None or any(same_opinion(judge, part) for part in parts)
