import logging

import pandas as pd
import pytest

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.data.prompts import PromptsConfig
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.pipelines.ppo.nodes import prepare_prompts
from tests.tiny_models import save, tiny_model

PROMPTS = pd.DataFrame({"prompt": [f"{a} {b}" for a in "abc" for b in "de"]})


@pytest.mark.parametrize(("maximum", "said"), [(4, True), (6, False), (7, False)])
def test_an_evaluation_table_of_which_not_all_is_used_is_said_to_be_cut(tmp_path, caplog, maximum: int, said: bool):
    handle = PretrainedHandle(save(tmp_path / "policy", tiny_model()))
    settings = PromptsConfig(max_held_out=maximum)
    with caplog.at_level(logging.INFO, "ppo_rlhf"):
        prepared = prepare_prompts(PROMPTS, PROMPTS, handle, PPOConfig(response_length=4, device="cpu"), settings)
    assert prepared["evaluation_prompts"]["prompt"].tolist() == PROMPTS["prompt"].tolist()[:maximum]
    line = f"Of 6 evaluation prompts the first {maximum} are used (prompts.max_held_out)."
    assert (line in caplog.messages) is said


def test_nothing_is_said_of_prompts_that_are_held_out_here(tmp_path, caplog):
    handle = PretrainedHandle(save(tmp_path / "policy", tiny_model()))
    with caplog.at_level(logging.INFO, "ppo_rlhf"):
        prepare_prompts(PROMPTS, None, handle, PPOConfig(response_length=4, device="cpu"), PromptsConfig())
    assert [line for line in caplog.messages if "max_held_out" in line] == []
