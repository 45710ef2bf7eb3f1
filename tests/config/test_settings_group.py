"""Parameter groups: what is accepted, and that every error names the group, the value and the rule."""

import copy
import dataclasses
import pickle
from dataclasses import field
from typing import Annotated, Literal

import pytest
from pydantic import Field

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.parameter_groups import closest, parameter_group
from ppo_rlhf.core.errors import ConfigError


@parameter_group("inner")
class Inner:
    kind: Literal["one", "two"]
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.kind == "two" and self.weight == 2.0:
            raise ConfigError("kind two cannot weigh 2")


@parameter_group("outer", lives_elsewhere={"steps": "it is outer.epochs"})
class Outer:
    epochs: Annotated[int, Field(ge=1)] = 4
    rate: Annotated[float, Field(gt=0.0)] = 0.5
    limit: Annotated[float, Field(gt=0.0)] | None = None
    switch: bool = False
    parts: list[Inner] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.epochs > 100 * self.rate:
            raise ConfigError(f"outer.epochs={self.epochs} is more than 100 x outer.rate={self.rate}")


def test_whole_floats_and_digits_become_integers_as_yaml_and_the_command_line_write_them():
    assert Outer(epochs=1e1).epochs == 10
    assert Outer(epochs="7", rate="0.25").epochs == 7


def test_dictionaries_inside_a_group_become_groups():
    assert Outer(parts=[{"kind": "two", "weight": 3}]).parts == [Inner(kind="two", weight=3.0)]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"epochs": 0}, "outer.epochs=0: input should be greater than or equal to 1"),
        ({"epochs": 1.5}, "outer.epochs=1.5: "),
        ({"epochs": True}, "outer.epochs=True: input should be a number"),
        ({"limit": True}, "outer.limit=True: input should be a number"),
        ({"limit": float("inf")}, "outer.limit=inf: "),
        ({"rate": None}, "outer.rate=None: "),
        ({"switch": "maybe"}, "outer.switch='maybe': "),
        ({"epoch": 3}, "Did you mean `epochs`?"),
        ({"zzz": 3}, "outer.zzz is not a parameter"),
        ({"steps": 3}, "it is outer.epochs"),
        ({"epochs": 60}, "outer.epochs=60 is more than 100 x outer.rate=0.5"),
        ({"parts": [{"weight": 2.0}]}, "outer.parts.0.kind is missing"),
        ({"parts": [{"kind": "three"}]}, "outer.parts.0.kind='three': "),
        ({"parts": [{"kind": "one"}, {"kind": "two", "wieght": 2.0}]}, "outer.parts.1.wieght"),
        ({"parts": [{"kind": "two", "weight": 2.0}]}, "kind two cannot weigh 2"),
    ],
    ids=str,
)
def test_a_wrong_value_gives_one_line_with_group_value_and_rule(values, named):
    with pytest.raises(ConfigError) as caught:
        Outer(**values)
    (line,) = str(caught.value).splitlines()
    assert named in line


def test_all_problems_are_reported_at_once_each_on_its_line():
    with pytest.raises(ConfigError) as caught:
        Outer(epoch=1, steps=2, epochs=-1, rate=-2.0)
    assert [line[:11] for line in str(caught.value).splitlines()] == [
        "outer.epoch",
        "outer.steps",
        "outer.epoch",
        "outer.rate=",
    ]


def test_a_group_is_frozen_and_can_be_replaced_copied_pickled_and_compared():
    group = Outer(epochs=3, parts=[{"kind": "one"}])
    with pytest.raises(dataclasses.FrozenInstanceError):
        group.epochs = 5
    assert dataclasses.replace(group, rate=0.25) == Outer(epochs=3, rate=0.25, parts=[{"kind": "one"}])
    assert copy.deepcopy(group) == group
    assert pickle.loads(pickle.dumps(group)) == group


def test_the_closest_known_name_is_suggested_only_if_it_is_near():
    known = ["learning_rate", "kl_coef", "use_peft", "reward_clip"]
    assert closest("learnig_rate", known) == " Did you mean `learning_rate`?"
    assert closest("kl_coeff", known) == closest("klcoef", known) == " Did you mean `kl_coef`?"
    assert closest("sead", ["seed", *known]) == " Did you mean `seed`?"  # one letter of four
    assert [closest(name, known) for name in ("", "lam_critic", "use_cpu", "grad_clip")] == [""] * 4


def test_a_seed_is_one_that_numpy_takes():
    PPOConfig(seed=2**32 - 1)
    with pytest.raises(ConfigError, match=r"ppo\.seed=4294967296"):
        PPOConfig(seed=2**32)
