import pandas as pd
import pytest
from kedro.io import DataCatalog, MemoryDataset
from kedro.runner import SequentialRunner

from ppo_rlhf.core.errors import DataError
from ppo_rlhf.data.sources import table_of
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.pipelines.data_preparation import create_pipeline
from ppo_rlhf.supervised.demonstrations import DataPreparationConfig
from tests.tiny_models import CHAT_TEMPLATE, save, tiny_model, word_tokenizer


def run(frame: pd.DataFrame, base_model: PretrainedHandle | None = None, **settings) -> dict[str, pd.DataFrame]:
    catalog = DataCatalog(
        {
            "raw_demonstrations": MemoryDataset(table_of(frame.to_dict("list"))),
            "base_model": MemoryDataset(base_model, copy_mode="assign"),
            "params:data_preparation": MemoryDataset(DataPreparationConfig(**settings)),
        }
    )
    return {name: data.load() for name, data in SequentialRunner().run(create_pipeline(), catalog).items()}


def test_a_users_table_becomes_two_tables_of_standard_columns():
    frame = pd.DataFrame({"review": ["good", "bad", "fine", "dull"], "stars": [5, 1, 4, 2]})
    tables = run(frame, text_column="review", held_out_share=0.25)
    assert {name: table.shape for name, table in tables.items()} == {
        "demonstrations": (3, 1),
        "evaluation_demonstrations": (1, 1),
    }
    assert sorted(pd.concat(tables.values())["text"]) == sorted(frame["review"])


def test_a_table_without_the_columns_is_refused():
    with pytest.raises(DataError, match=r"review.*`text`"):
        run(pd.DataFrame({"review": ["good", "bad"]}))


def test_a_chat_of_which_the_base_models_template_leaves_a_message_out_is_refused_before_training(tmp_path):
    template = CHAT_TEMPLATE.replace("in messages", "in messages if m['role'] != 'developer'")
    base = save(tmp_path, tiny_model(), word_tokenizer(chat_template=template))
    chats = [[{"role": role, "content": "a"}, {"role": "assistant", "content": "b"}] for role in ("user", "developer")]
    assert len(run(pd.DataFrame({"messages": chats}))) == 2
    with pytest.raises(DataError, match=r"^demonstrations: row 1: message 0 has the role `developer`"):
        run(pd.DataFrame({"messages": chats}), PretrainedHandle(base))
