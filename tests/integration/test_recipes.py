"""Each recipe as a user starts it, on stand-ins: local files with the hub's columns, a tiny model, a few responses.

Only paths and sizes are overridden, so a misspelt setting, a column or a function that is not there fails here.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from click.testing import Result
from transformers import GPT2ForSequenceClassification

from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.recipes import sentiment
from tests.tiny_models import CHAT_TEMPLATE, save, tiny_model, word_tokenizer, write_gguf

REPOSITORY = Path(__file__).parents[2]
RECIPES = ("chat_lora", "gsm8k", "imdb", "tldr")
SIZES = (
    "ppo.total_episodes=8,ppo.per_device_train_batch_size=4,ppo.gradient_accumulation_steps=1,ppo.num_mini_batches=1,"
    "ppo.response_length=6,ppo.dtype=float32,prompts.max_held_out=3,prompts.train_on_evaluation_prompts=true"
)
ROWS = {
    "gsm8k": lambda i: {"question": f"a b {i}", "answer": f"c <<d>>\n#### {i}"},
    "tldr": lambda i: {"prompt": f"SUBREDDIT: r/a b {i}\n\nTL;DR:", "completion": " c d"},
    "imdb": lambda i: {"text": "a b c d " * 60, "label": i % 2},
    "chat_lora": lambda i: {"prompt": [{"role": "user", "content": f"a b {i}"}]},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A policy with a chat template, two reward models, one of another vocabulary, and a classifier of two classes."""
    folder, tokenizer = tmp_path_factory.mktemp("models"), word_tokenizer(chat_template=CHAT_TEMPLATE)
    classifier = tiny_model("gpt2", reward=True, num_labels=2, pad_token_id=0)
    assert isinstance(classifier, GPT2ForSequenceClassification)
    made = {
        "policy": tiny_model(max_position_embeddings=64),
        "reward": tiny_model("gpt2", reward=True, num_labels=1, pad_token_id=0, n_positions=64),
        "classifier": classifier,
        "other reward": tiny_model("gpt2", reward=True, num_labels=1, pad_token_id=0, n_positions=64, vocab_size=64),
    }
    other = word_tokenizer(chat_template=CHAT_TEMPLATE.replace("<s>", "<|eot|>"))
    other.add_tokens("<|eot|>", special_tokens=True)
    return {
        name: save(folder / name, model, other if name == "other reward" else tokenizer) for name, model in made.items()
    }


def test_every_environment_that_is_a_recipe_is_tried_and_described() -> None:
    page = (REPOSITORY / "docs/recipes.md").read_text()
    environments = {path.name for path in (REPOSITORY / "conf").iterdir() if path.is_dir()}
    others = {"accelerate", "base", "calculator", "demo", "local", "randomwalks", "sao", "test", "vapo"}
    others |= {"obedience", "obedience_naive"}
    assert environments - others == set(RECIPES) == set(ROWS)
    assert all(f"kedro run --env {name} --pipelines align" in page for name in RECIPES)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs_on_stand_ins(
    recipe: str,
    models: dict[str, str],
    project: Path,
    kedro: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sentiment, "MODEL", models["classifier"])
    (project / "conf/local").rmdir()  # it is not needed
    table = project / "table.parquet"
    pd.DataFrame([ROWS[recipe](i) for i in range(6)]).to_parquet(table)
    paths = f"sft_model_path={models['policy']},prompts_path={table},evaluation_prompts_path={table}"
    if recipe in ("chat_lora", "tldr"):
        paths += f",reward_model_path={models['other reward' if recipe == 'chat_lora' else 'reward']}"
    finished = kedro(project, "run", "--env", recipe, "--pipelines", "align", "--params", f"{paths},{SIZES}")
    assert finished.exit_code == 0, finished.output
    root = project / "data" / recipe
    summary = json.loads((root / "08_reporting/evaluation_summary.json").read_text())
    assert summary["prompts"] == 3
    assert ("Beside the expected curve" in (root / "08_reporting/report.html").read_text()) == (recipe == "gsm8k")
    assert list((root / "06_models/ppo_policy").glob("*/config.json"))
    if recipe == "gsm8k":  # as docs/your_model.md evaluates a policy
        again = "evaluation.temperature=1.0,evaluation.samples_per_prompt=2,evaluation.pass_at=[2]"
        mine = project / "mine.jsonl"  # evaluated in place of the prompts that training held out
        mine.write_text(f"{json.dumps(ROWS[recipe](7))}\n{json.dumps(ROWS[recipe](8))}\n")
        given = f"sft_model_path={models['policy']},evaluation_prompts_path={mine},{SIZES},{again}"
        finished = kedro(project, "run", "--env", recipe, "--pipelines", "evaluation", "--params", given)
        assert finished.exit_code == 0, finished.output
        summary = json.loads((root / "08_reporting/evaluation_summary.json").read_text())
        assert {"eval/pass_at_2", "eval/pass_at_2_sft_se", "eval/judge_score_last_number"} <= set(summary)
        assert summary["prompts"] == 2
        answers = pd.read_parquet(root / "07_model_output" / "ppo_evaluation.parquet")
        assert ["a b 7" in text for text in answers["prompt"]] == [True, True, False, False]
        mine.unlink()
        refused = kedro(project, "run", "--env", recipe, "--pipelines", "evaluation", "--params", given)
        assert refused.exit_code == 1
        assert str(mine) in refused.stderr
    with sqlite3.connect(project / "mlflow.db") as database:  # beside the demo's, not a version of it
        ((name,),) = database.execute("select name from registered_models").fetchall()
    start = PretrainedHandle(str(models["policy"]))
    assert name == f"ppo_rlhf_{recipe}-{Path(start.source).name}-{start.fingerprint()[:8]}"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["obedience", "obedience_naive"])
def test_the_recipe_obedience_runs_by_the_pages_command_on_a_gguf_file(
    recipe: str, project: Path, kedro: Callable[..., Result]
) -> None:
    """The page's command, with a tiny model in place of the downloaded file, and fewer episodes."""
    page = (REPOSITORY / "docs/recipes.md").read_text()
    (command,) = re.findall(rf"^kedro run --env {recipe} --pipelines align --params sft_model_path=\S+$", page, re.M)
    *words, given = command.removeprefix("kedro ").split()
    file = project / given.removeprefix("sft_model_path=")
    file.parent.mkdir()
    write_gguf(file)
    sizes = "ppo.total_episodes=64,ppo.response_length=8,prompts.max_held_out=12,evaluation.iteration_prompts=4"
    finished = kedro(project, *words, f"{given},{sizes}")
    assert finished.exit_code == 0, finished.output
    root = project / "data" / recipe / "08_reporting"
    summary = json.loads((root / "evaluation_summary.json").read_text())
    assert summary["prompts"] == 12
    assert summary["by_trained_reward"] == (recipe == "obedience")  # the strict reward is also the judge
    assert {"eval/obedient", "eval/on_topic_sft", "eval/copied"} <= set(summary)
    assert summary["reference_texts"] == 24
    logged = "select key, value from metrics where key like 'eval/reference_%'"
    with sqlite3.connect(project / "mlflow.db") as database:
        metrics = dict(database.execute(logged).fetchall())
    assert metrics == {key: value for key, value in summary.items() if key.startswith("eval/reference_")}
    assert len(metrics) == 5
    report = (root / "report.html").read_text()
    assert ("SmolLM2 obeys" in report) == (recipe == "obedience")
