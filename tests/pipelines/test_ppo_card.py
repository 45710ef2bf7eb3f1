"""The card of an exported policy says what writes its result."""

from __future__ import annotations

from typing import Any

import pytest

from ppo_rlhf.checkpoints.model_card import NOT_EVALUATED
from ppo_rlhf.evaluation.policy import EvaluationConfig
from ppo_rlhf.models.trained_model import TrainedModel
from ppo_rlhf.pipelines.ppo import nodes
from ppo_rlhf.rewards.config import RewardComponentConfig, RewardConfig
from ppo_rlhf.runtime.paths import running
from tests.bare_state import bare_state
from tests.tiny_models import tiny_model, word_tokenizer


@pytest.mark.parametrize(("environment", "option"), [("demo", " --env demo"), ("local", "")])
def test_the_command_that_writes_the_result_is_of_the_runs_environment(
    environment: str, option: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(running, "environment", environment)
    monkeypatch.setattr(nodes, "render_card", lambda *_: f"# A policy\n\n{NOT_EVALUATED}\n")
    monkeypatch.setattr(nodes, "exported_policy", lambda *_: TrainedModel(tiny_model(), word_tokenizer()))
    state: Any = bare_state(1)
    card = nodes.export_policy(
        state, None, RewardConfig([RewardComponentConfig(type="model")]), EvaluationConfig()
    ).card
    expected = f"{NOT_EVALUATED} `kedro run{option} --pipelines evaluation` writes the result here."
    assert card == f"# A policy\n\n{expected}\n"
