import json
import signal
from pathlib import Path

import pandas as pd
import pytest
import torch
from kedro.framework.hooks.manager import _create_hook_manager
from kedro.io import DataCatalog
from kedro.runner import AbstractRunner, SequentialRunner
from kedro_datasets.pandas import ParquetDataset

from ppo_rlhf.datasets import PretrainedModelDataset
from ppo_rlhf.pipelines.supervised_finetuning import create_pipeline
from ppo_rlhf.runner import LoopRunner
from ppo_rlhf.runtime.signals import RunInterruptedError
from ppo_rlhf.supervised.sft import SupervisedFinetuningConfig
from ppo_rlhf.supervised.trl_support import HistoryCallback
from tests.tiny_models import CHAT_TEMPLATE, save, tiny_model, word_tokenizer

CHAT = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]


def run(
    tmp_path: Path, frame: pd.DataFrame, base_model: str | None = None, runner: AbstractRunner | None = None
) -> tuple[DataCatalog, list[dict]]:
    """Run the pipeline over files, as the project's catalog does."""
    catalog = DataCatalog(
        {
            "base_model": PretrainedModelDataset(base_model),
            "demonstrations": ParquetDataset(filepath=str(tmp_path / "demonstrations.parquet")),
            "evaluation_demonstrations": ParquetDataset(filepath=str(tmp_path / "evaluation.parquet")),
            "sft_policy": PretrainedModelDataset(str(tmp_path / "sft_policy")),
        }
    )
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    catalog["params:supervised_finetuning"] = SupervisedFinetuningConfig(
        max_steps=2,
        logging_steps=1,
        from_scratch=None if base_model else shape | {"max_position_embeddings": 64},
        device="cpu",
    )
    catalog["demonstrations"].save(frame)
    catalog["evaluation_demonstrations"].save(frame.head(2))
    outputs = (runner or SequentialRunner()).run(create_pipeline(), catalog, _create_hook_manager())
    return catalog, outputs["sft_metrics"].load()


@pytest.mark.parametrize(
    "frame",
    [
        pd.DataFrame({"text": ["a b c", "b c", "c a"] * 4}),
        pd.DataFrame({"prompt": ["a b", "b"] * 6, "completion": [" c", " a c"] * 6}),
    ],
)
def test_a_policy_from_scratch_lands_in_the_catalog_as_a_directory(tmp_path, frame):
    catalog, metrics = run(tmp_path, frame)
    handle = catalog["sft_policy"].load()
    assert handle.config().model_type == "llama"
    assert len(handle.tokenizer()) == handle.config().vocab_size == 6  # a, b, c and three special tokens
    assert handle.causal_lm()(torch.tensor([[3, 4]])).logits.isfinite().all()
    assert [entry["step"] for entry in metrics] == [1, 2]
    assert metrics[-1].keys() == {"step", "sft/loss", "sft/learning_rate", "sft/eval_loss"}


def test_chats_from_a_file_are_learnt_by_a_base_model_with_a_template(tmp_path):
    base = save(tmp_path / "base", tiny_model(), word_tokenizer(chat_template=CHAT_TEMPLATE))
    catalog, metrics = run(tmp_path, pd.DataFrame({"messages": [json.dumps(CHAT)] * 8}), base)
    assert len(metrics) == 2
    assert catalog["sft_policy"].load().tokenizer().chat_template == CHAT_TEMPLATE


def test_a_signal_in_the_training_stops_it_at_once_and_no_policy_is_saved(tmp_path, monkeypatch):
    steps = []

    def on_log(callback, arguments, state, control, **kwargs):
        steps.append(state.global_step)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(HistoryCallback, "on_log", on_log)
    with pytest.raises(RunInterruptedError, match="SIGTERM"):
        run(tmp_path, pd.DataFrame({"text": ["a b c", "b c", "c a"] * 4}), runner=LoopRunner())
    assert steps == [1]
    assert not (tmp_path / "sft_policy").exists()
