"""`human_evaluation`: answers are unblinded, no name is in the results, and the model card has what people decided."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
import pytest

from ppo_rlhf.checkpoints.model_card import BEGIN, END, with_people, with_result
from ppo_rlhf.core.errors import DataError
from ppo_rlhf.datasets.review_queues import ReviewQueues
from ppo_rlhf.evaluation.policy import EvaluationConfig
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.pipelines.human_evaluation import nodes
from ppo_rlhf.supervised.comparisons import FeedbackConfig, pair_key
from ppo_rlhf.supervised.people_answers import Comparison
from tests.chat_stand_in import between, running_chat
from tests.datasets.test_review_queues import answer, filled
from tests.pipelines.feedback_project import collect, pair_tables
from tests.pipelines.test_collect_feedback import folder, queues
from tests.tiny_models import draw_weights, save, tiny_model

__all__ = ["folder", "queues"]

QUEUE = "sft_policy against ppo_policy"
CARD = f"# Policy\n\n## Result\n\n{BEGIN}\n\nnot evaluated\n\n{END}\n\n## Use\n"


def shortest(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    assert len(columns["number"]) == len(prompts)
    return [-float(len(completion)) for completion in completions]


@pytest.fixture
def compared(folder: Path, queues: ReviewQueues) -> Any:
    """A queue in which ben always prefers PPO, and anna SFT in all but every fourth pair."""
    table, _ = collect(folder, against="ppo_policy", pairs=20, prompts="training")
    for number, (each, is_sft_a) in enumerate(zip(queues.read(QUEUE), table["policy_is_a"], strict=True)):
        of_ppo, of_sft = ("B", "A") if is_sft_a else ("A", "B")
        answer(queues, each.trace_id, of_ppo, "ben")
        answer(queues, each.trace_id, "tie" if number % 4 == 0 else of_sft, "anna")
    return table


def test_answers_are_unblinded_and_no_name_is_in_the_result(folder: Path, compared: Any) -> None:
    evaluation = EvaluationConfig(judge=f"{__name__}:shortest", prompts_path=None)
    with mlflow.start_run() as run:
        table = nodes.unblind_answers(pair_tables(folder).load(), FeedbackConfig(queue=QUEUE))
        found = nodes.compare_by_people(table, evaluation)
    assert (table["our_name"][0], table["their_name"][0]) == ("PPO", "SFT")
    assert (found["policy"], found["against"]) == (str(folder / "ppo"), str(folder / "sft"))
    count, ties = len(table), (len(table) + 3) // 4
    anna = pd.DataFrame({"prompt": table["prompt"], "worth": [0.5 * (row % 4 == 0) for row in range(count)]})
    rates = anna.groupby("prompt")["worth"].mean()  # some prompts have several pairs
    assert found["prompts"] == len(rates) < count == found["answered"]
    assert [row["win_rate"] for row in found["by_person"]] == [pytest.approx(rates.mean()), 1.0]
    assert found["metrics"]["human/win_rate"] == pytest.approx((1.0 + rates.mean()) / 2)
    # only where anna has a tie do people on the whole prefer a side: PPO's
    tied = table.iloc[::4]
    agreed = [(len(a) < len(b)) + (len(a) == len(b)) / 2 for a, b in zip(tied["ours"], tied["theirs"], strict=True)]
    assert found["judged"] == ties
    by_prompt = pd.DataFrame({"prompt": tied["prompt"], "agreed": agreed}).groupby("prompt")["agreed"].mean()
    assert found["metrics"]["human/judge_agreement"] == pytest.approx(by_prompt.mean())
    told = json.dumps(found)
    assert "anna" not in told
    assert "ben" not in told.replace("been", "")
    logged = mlflow.get_run(run.info.run_id).data
    assert logged.metrics["human/win_rate"] == pytest.approx(found["metrics"]["human/win_rate"])
    assert logged.tags["mlflow.note.content"] == found["result"]


def test_people_are_compared_with_a_language_model_that_compares_responses(tmp_path: Path, monkeypatch: Any) -> None:
    """People prefer ours of all three pairs; the model prefers the longer one, which is ours of two."""
    monkeypatch.chdir(tmp_path)

    def longer(text: str) -> str:
        return f"Verdict: {'A' if len(between(text, 'response_a')) > len(between(text, 'response_b')) else 'B'}"

    pairs = {"prompt": ["p", "q", "r"], "ours": ["aaa", "aaa", "a"], "theirs": ["a", "aa", "aaa"]}
    names = {"our_name": "PPO", "their_name": "SFT", "our_source": "ppo", "their_source": "sft"}
    names |= {"our_weights": "1", "their_weights": "2"}
    table = pd.DataFrame({**pairs, "columns": ["{}"] * 3, "worths": ['{"ben": 1.0}'] * 3, "answers": ["{}"] * 3})
    with running_chat(longer) as server:
        evaluation = EvaluationConfig(judge={"model": "m", "base_url": server.url, "answer": "pairwise"})
        found = nodes.compare_by_people(table.assign(**names), evaluation)
    assert found["judged"] == 3
    assert found["metrics"]["human/judge_agreement"] == pytest.approx(2 / 3)
    assert len(server.bodies) == 6


def test_the_texts_are_those_of_the_policies(folder: Path, compared: Any, queues: ReviewQueues) -> None:
    table = nodes.unblind_answers(pair_tables(folder).load(), FeedbackConfig(queue=QUEUE))
    ours = [b if is_a else a for a, b, is_a in compared[["response_a", "response_b", "policy_is_a"]].values]
    assert table["ours"].tolist() == ours
    assert table["columns"].tolist() == compared["columns"].tolist()


def test_a_queue_of_one_policy_or_of_deleted_runs_is_refused_and_nothing_is_lost(
    folder: Path, compared: Any, queues: ReviewQueues, caplog: Any
) -> None:
    collect(folder)
    with pytest.raises(DataError, match=r"^mlflow:sft_policy: .*feedback\.against=ppo_policy"):
        nodes.unblind_answers(pair_tables(folder).load(), FeedbackConfig())
    for file in (folder / "feedback_pairs").iterdir():
        file.unlink()
    with pytest.raises(DataError, match=r"feedback.against=ppo_policy"):
        nodes.unblind_answers(pair_tables(folder).load(), FeedbackConfig(queue=QUEUE))
    assert "pairs are left out" in caplog.text
    assert all(len(each.answers) == 2 for each in queues.read(QUEUE))


def test_pairs_of_an_earlier_version_whose_table_is_an_artifact_are_unblinded(
    folder: Path, queues: ReviewQueues
) -> None:
    pairs = [Comparison(number, f"p{number}", f"a{number}", f"b{number}") for number in range(2)]
    sides = {"policy_is_a": [True, False], "policy": "sft", "against": "ppo"}
    names = {"policy_name": "sft_policy", "against_name": "ppo_policy", "columns": "{}"}
    table = pd.DataFrame([vars(pair) for pair in pairs]).assign(
        **sides, **names, pair=[pair_key(pair.prompt, pair.response_a, pair.response_b) for pair in pairs]
    )
    with mlflow.start_run():
        table[["number", "pair", "prompt", "response_a", "response_b", *sides, *names]].to_parquet(
            folder / "feedback_pairs.parquet"
        )
        mlflow.log_artifact(str(folder / "feedback_pairs.parquet"), "feedback")
        ids = filled(queues, pairs, "earlier")
    for trace_id in ids:
        answer(queues, trace_id, "A", "ben")
    found = nodes.unblind_answers(pair_tables(folder).load(), FeedbackConfig(queue="earlier"))
    assert found["ours"].tolist() == ["b0", "a1"]
    assert [json.loads(worths)["ben"] for worths in found["worths"]] == [0.0, 1.0]


def test_of_a_queue_of_more_than_two_policies_the_newest_answered_are_compared(
    folder: Path, compared: Any, queues: ReviewQueues, caplog: Any
) -> None:
    save(folder / "ppo", draw_weights(tiny_model(seed=7), 0.5, seed=7))  # other weights in the same folder
    anew, _ = collect(folder, against="ppo_policy", queue=QUEUE, prompts="training")
    assert len(nodes.unblind_answers(pair_tables(folder).load(), FeedbackConfig(queue=QUEUE))) == len(
        compared
    )  # nobody has answered the others
    answer(queues, next(each.trace_id for each in queues.read(QUEUE) if not each.answers), "A", "ben")
    table = nodes.unblind_answers(pair_tables(folder).load(), FeedbackConfig(queue=QUEUE))
    assert table["number"].tolist() == anew["number"].tolist()
    assert {*table["our_weights"]} == {PretrainedHandle(str(folder / "ppo")).fingerprint()}
    assert f"{len(compared)} of {len(compared) + len(anew)} pairs" in caplog.text
    assert sum(bool(each.answers) for each in queues.read(QUEUE)) == len(compared) + 1


def test_a_policy_that_was_moved_keeps_its_verdict_and_its_card(
    folder: Path, compared: Any, queues: ReviewQueues
) -> None:
    (folder / "ppo").rename(folder / "moved")
    anew, _ = collect(folder, against=str(folder / "moved"), queue=QUEUE, prompts="training")
    answer(queues, next(each.trace_id for each in queues.read(QUEUE) if not each.answers), "A", "ben")
    table = nodes.unblind_answers(pair_tables(folder).load(), FeedbackConfig(queue=QUEUE))
    assert len(table) == len(compared) + len(anew)
    found = nodes.compare_by_people(table, EvaluationConfig())
    (folder / "moved" / "README.md").write_text(CARD)
    directory, _ = nodes.write_people_card(found, PretrainedHandle(str(folder / "moved")))
    assert directory == str(folder / "moved")


def test_answers_of_a_file_decide_as_those_of_a_queue_do(folder: Path, queues: ReviewQueues) -> None:
    table, _ = collect(folder, against="ppo_policy", pairs=12, prompts="training", export=str(folder / "pairs.jsonl"))
    file = folder / "answers.jsonl"
    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    sides = dict(zip(table["number"], table["policy_is_a"], strict=True))
    file.write_text(
        "".join(json.dumps({"number": n["number"], "answer": "B" if sides[n["number"]] else "A"}) + "\n" for n in rows)
    )
    found = nodes.unblind_answers(pair_tables(folder).load(), FeedbackConfig(answers=str(file)))
    assert len(found) == len(table)
    assert {*found["worths"]} == {'{"default": 1.0}'}
    assert found["ours"].tolist() == [row["response_b" if sides[row["number"]] else "response_a"] for row in rows]


def test_the_card_has_what_people_decided_last_and_keeps_the_rest() -> None:
    once = with_people(CARD, "PPO beats SFT.")
    assert once is not None
    again = with_people(once, "PPO loses to SFT.")
    assert again is not None
    assert "By people: PPO loses to SFT." in again
    assert "beats" not in again
    assert again.endswith("\n\n## Use\n")
    evaluated = with_result(again, "a new result")
    assert evaluated is not None
    assert "By people: PPO loses to SFT." in evaluated
    assert with_people("# Somebody's own card", "PPO beats SFT.") is None


def test_the_card_of_the_policy_that_people_judged_is_written(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(CARD)
    said = {"policy": str(tmp_path), "result": "PPO beats SFT."}
    directory, card = nodes.write_people_card(said, PretrainedHandle("newer"))
    assert directory == str(tmp_path)
    assert "By people: PPO beats SFT." in card
    assert nodes.write_people_card({**said, "policy": "org/theirs"}, PretrainedHandle("newer")) == (
        None,
        said["result"],
    )


def test_the_order_of_people_does_not_follow_their_names() -> None:
    from ppo_rlhf.evaluation.people_win_rate import compare_by_people

    drawn = random.Random(0)
    rates = {"a": 0.9, "z": 0.1}
    for names in (("a", "z"), ("z", "a")):
        worths = [{n: float(drawn.random() < rates[m]) for n, m in zip("az", names, strict=True)} for _ in range(40)]
        rows = compare_by_people(worths)["by_person"]
        assert rows[0]["win_rate"] < rows[1]["win_rate"]
