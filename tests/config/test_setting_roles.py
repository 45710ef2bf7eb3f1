"""Each setting of PPOConfig declares beside its type what the rest of the code does with it."""

from dataclasses import fields, make_dataclass
from typing import Annotated

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.setting_roles import Role, names_in_group, names_of, roles_of

HOW = (
    "has no `Role` in src/ppo_rlhf/config/ppo.py: write `Annotated[<its type>, Role(<probe>)] = <default>`, with what "
    "ppo_rlhf.config.setting_roles.Role asks for: what `kedro doctor --probe` does with it, whether a resumed run may "
    "change it, whether it is recorded with the policy, its group, whether a sweep may vary it"
)


def test_each_setting_is_declared():
    missing = [field.name for field in fields(PPOConfig) if field.name not in roles_of(PPOConfig)]
    assert not missing, f"{', '.join(f'ppo.{name}' for name in missing)} {HOW}"


def test_declarations_are_found_in_every_form_of_a_type():
    taken, free = Role("taken"), Role("none", resume="free", group="a.b")
    forms = {
        "plain": Annotated[int, taken],
        "optional": Annotated[int, taken] | None,
        "whole": Annotated[int | None, free],
    }
    of = make_dataclass("Of", [*forms.items(), ("bare", int)])
    assert roles_of(of) == {"plain": taken, "optional": taken, "whole": free}
    assert names_of(of, lambda roles: roles.probe == "taken") == ("plain", "optional")
    assert names_in_group(of, "a") == names_in_group(of, "a.b") == ("whole",)
    assert names_in_group(of, "a.") == names_in_group(of, "b") == ()


def test_what_changes_training_is_the_same_after_a_resume():
    """A setting that the probes train with, or leave out though it changes training, decides the numbers of a run."""
    decides = names_of(PPOConfig, lambda roles: roles.probe in ("taken", "left out"))
    free = names_of(PPOConfig, lambda roles: roles.resume == "free")
    assert set(decides) & set(free) == {"kl_stop"}  # ends a run, and changes no number before
