"""SFT, preferences and reward training on two processes: one training, with the numbers of one process.

The two processes run this file as a script (`main`).
"""

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from ppo_rlhf import processes
from ppo_rlhf.core.errors import ConfigError, RewardError
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.rewards.scorers import RewardConfig, build_reward_scorer
from ppo_rlhf.training.supervised.reward_training import train_reward_model
from ppo_rlhf.training.supervised.sft import train_sft_policy
from tests.rewards.test_scorers import batch
from tests.tiny_models import END, save, tiny_model, word_tokenizer
from tests.training.supervised import test_preferences, test_reward_training, test_sft

BATCH = 6  # of 25 texts: the last batch has one row, so that the other process has none
TEXTS = pd.concat([test_sft.TEXTS, pd.DataFrame({"text": ["a b c d a b c d"]})], ignore_index=True)
calls = []


def length(prompts, completions, **columns):
    calls.append(len(prompts))
    return [float(len(completion.split())) for completion in completions]


def broken(prompts, completions):
    raise ValueError("broken")


def everything(policy: str) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    """Return all that must not depend on the number of processes, and the trained weights."""
    found: dict[str, object] = {}
    weights = {}
    for grouped in (True, False):
        settings = {"per_device_train_batch_size": BATCH, "group_by_length": grouped, "num_train_epochs": 1}
        trained, found[f"sft {grouped}"] = train_sft_policy(
            PretrainedHandle(policy),
            TEXTS,
            test_sft.HELD_OUT,
            test_sft.config(**settings, gradient_accumulation_steps=2),
        )
        weights |= {f"sft {grouped} {name}": tensor for name, tensor in trained.model.state_dict().items()}
        trained, found[f"reward {grouped}"] = train_reward_model(
            PretrainedHandle(policy),
            test_reward_training.pairs(17, prompts=False),
            test_reward_training.config(**settings, minimum_accuracy=0.0),
        )
        weights |= {f"reward {grouped} {name}": tensor for name, tensor in trained.model.state_dict().items()}
    found["preferences"] = test_preferences.sample(length, pairs=7).to_dict("list")
    components = [{"type": "model", "weight": 0.5}, {"type": "function", "function": f"{__name__}:length"}]
    if processes.is_main_process():
        save(Path(policy).parent / "reward", trained.model)
    processes.wait_for_all()
    reward_model = PretrainedHandle(str(Path(policy).parent / "reward"))
    scorer = build_reward_scorer(RewardConfig(components=components), reward_model, word_tokenizer())
    found["scores"] = scorer.score(batch([[6, 7, END], [8], [9]], [True, False, False])).total.tolist()
    found["one score"] = scorer.score(batch([[6, 7, END]], [True])).total.tolist()
    return found, weights


def main(folder: str) -> None:
    """Write what this process found; run by torchrun."""
    found, weights = everything(f"{folder}/policy")
    found["calls"] = len(calls)
    component = {"type": "function", "function": f"{__name__}:broken"}
    scorer = build_reward_scorer(RewardConfig(components=[component]), None, word_tokenizer())
    with pytest.raises(RewardError, match="ValueError: broken"):
        scorer.score(batch([[6]], [False]))
    with pytest.raises(ConfigError, match=r"supervised_finetuning\.per_device_train_batch_size=3"):
        train_sft_policy(None, TEXTS, TEXTS, test_sft.config(per_device_train_batch_size=3))
    rank = processes.join_processes().process_index
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    save_file(weights, f"{folder}/{rank}.safetensors")


def close(one: object, two: object) -> bool:
    """Whether two results are equal but for float32's rounding."""
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(close(one[name], two[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(two) and all(map(close, one, two))
    return two == (pytest.approx(one, rel=1e-4, abs=1e-5) if isinstance(one, float) else one)


def test_two_processes_train_sample_and_score_as_one(tmp_path):
    base = tiny_model("llama")
    save(tmp_path / "policy", base, word_tokenizer(pad_token=None))
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", "-m", __name__]
    done = subprocess.run([*launch, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    calls.clear()
    expected, weights = everything(str(tmp_path / "policy"))
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found.pop("calls") == (len(calls) if rank == 0 else 0)
        for name, value in json.loads(json.dumps(expected)).items():
            assert close(value, found[name]), (name, value, found[name])
        for name, tensor in load_file(tmp_path / f"{rank}.safetensors").items():
            torch.testing.assert_close(tensor, weights[name], rtol=1e-3, atol=1e-4, msg=name)


if __name__ == "__main__":
    main(sys.argv[1])
