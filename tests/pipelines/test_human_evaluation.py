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
from ppo_rlhf.evaluation.policy import EvaluationConfig, ResolvedJudge
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.people.pairs import FeedbackConfig
from ppo_rlhf.pipelines.human_evaluation import nodes
from tests.chat_stand_in import between, running_chat
from tests.datasets.test_mlflow_queue import answer, store
from tests.pipelines.feedback_project import answers_file, collect, pair_tables
from tests.pipelines.test_collect_feedback import folder
from tests.tiny_models import draw_weights, save, tiny_model

__all__ = ["folder", "store"]

CARD = f"# Policy\n\n## Result\n\n{BEGIN}\n\nnot evaluated\n\n{END}\n\n## Use\n"


def shortest(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    assert len(columns["number"]) == len(prompts)
    return [-float(len(completion)) for completion in completions]


def lists(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [float(completion.count("- ")) for completion in completions]


@pytest.fixture
def compared(folder: Path) -> pd.DataFrame:
    """Pairs of two policies, SFT as `policy`."""
    return collect(folder, against="ppo_policy", pairs=20, prompts="training", export=str(folder / "pairs.jsonl"))


def unblinded(folder: Path, answers: str | None = None, **settings: Any) -> pd.DataFrame:
    return nodes.unblind_answers(pair_tables(folder).load(), FeedbackConfig(answers=answers, **settings))


def test_answers_are_unblinded_and_no_name_is_in_the_result(folder: Path, compared: pd.DataFrame) -> None:
    """Ben always prefers PPO, and anna SFT in all but every fourth pair."""
    parts = [compared[::4], compared.drop(compared.index[::4])]
    both = (
        answers_file(folder, parts[0], ben="against", anna="tie"),
        answers_file(folder, parts[1], ben="against", anna="policy"),
    )
    (folder / "answers.jsonl").write_text("".join(Path(file).read_text() for file in both))
    evaluation = EvaluationConfig(judge=f"{__name__}:shortest", prompts_path=None)
    with mlflow.start_run() as run:
        table = unblinded(folder, str(folder / "answers.jsonl"))
        found = nodes.compare_by_people(table, evaluation)
    assert table["number"].tolist() == compared["number"].tolist()
    assert (table["our_name"][0], table["their_name"][0]) == ("PPO", "SFT")
    assert (found["policy"], found["against"]) == (str(folder / "ppo"), str(folder / "sft"))
    count = len(table)
    anna = pd.DataFrame({"prompt": table["prompt"], "worth": [0.5 * (row % 4 == 0) for row in range(count)]})
    rates = anna.groupby("prompt")["worth"].mean()  # some prompts have several pairs
    assert found["prompts"] == len(rates) < count == found["answered"]
    assert [row["win_rate"] for row in found["by_person"]] == [pytest.approx(rates.mean()), 1.0]
    assert found["metrics"]["human/win_rate"] == pytest.approx((1.0 + rates.mean()) / 2)
    judged = [(len(a) < len(b)) + (len(a) == len(b)) / 2 for a, b in zip(table["ours"], table["theirs"], strict=True)]
    by_prompt = pd.DataFrame({"prompt": table["prompt"], "judged": judged}).groupby("prompt")["judged"].mean()
    assert found["metrics"]["human/judge_win_rate"] == pytest.approx(by_prompt.mean())
    told = json.dumps(found)
    assert "anna" not in told
    assert "ben" not in told.replace("been", "")
    logged = mlflow.get_run(run.info.run_id).data
    assert logged.metrics["human/win_rate"] == pytest.approx(found["metrics"]["human/win_rate"])
    assert logged.tags["mlflow.note.content"] == found["result"]
    assert logged.tags["human.policy"] == str(folder / "ppo")


def test_people_are_compared_with_a_language_model_that_compares_responses(tmp_path: Path, monkeypatch: Any) -> None:
    """People prefer ours of all three pairs; the model prefers the longer one, which is ours of two."""
    monkeypatch.chdir(tmp_path)

    def longer(text: str) -> str:
        return f"Verdict: {'A' if len(between(text, 'response_a')) > len(between(text, 'response_b')) else 'B'}"

    pairs = {"prompt": ["p", "q", "r"], "ours": ["aaa", "aaa", "a"], "theirs": ["a", "aa", "aaa"]}
    names = {"our_name": "PPO", "their_name": "SFT", "our_source": "ppo", "their_source": "sft"}
    names |= {"our_weights": "1", "their_weights": "2"}
    table = pd.DataFrame({**pairs, "columns": ["{}"] * 3, "worths": ['{"ben": 1.0}'] * 3, "answers": ["{}"] * 3})
    names |= {"prompt_chat": None}
    with running_chat(longer) as server:
        evaluation = EvaluationConfig(judge={"model": "m", "base_url": server.url, "answer": "pairwise"})
        found = nodes.compare_by_people(table.assign(**names), evaluation)
    assert found["metrics"]["human/judge_win_rate"] == pytest.approx(2 / 3)
    assert found["metrics"]["human/win_rate"] == 1.0
    assert len(server.bodies) == 6


def test_the_judge_compares_all_pairs_and_people_a_random_sample_of_them(folder: Path) -> None:
    """People prefer SFT; the judge goes by length."""
    pairs = {"against": "ppo_policy", "pairs": 14, "prompts": "training", "export": str(folder / "pairs.jsonl")}
    of_all = collect(folder, asked=4, **pairs)
    sheet = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    assert [row["random_sample"] for row in sheet] == [True] * 4
    asked = of_all[of_all["random_sample"]]
    assert [row["number"] for row in sheet] == asked["number"].tolist()
    evaluation = EvaluationConfig(judge=f"{__name__}:shortest", prompts_path=None)
    table = unblinded(folder, answers_file(folder, asked, anna="policy"))
    assert {*table["number"]} == {*of_all["number"]}
    found = nodes.compare_by_people(table, evaluation)
    assert (found["pairs"], found["answered"]) == (len(of_all), 4)
    assert found["metrics"]["human/judge_win_rate"] > 0.0
    assert f"on {len(of_all)} pairs, corrected by the answers of one person on 4 pairs " in found["result"]
    nobody = nodes.compare_by_people(table, EvaluationConfig(prompts_path=None))
    assert "human/judge_win_rate" not in nobody["metrics"]
    others = of_all[~of_all["random_sample"]]
    with pytest.raises(DataError, match=r"answered pairs, for example \d+, were not drawn for people.* Remove these"):
        unblinded(folder, answers_file(folder, pd.concat([asked, others[:1]]), anna="policy"))


def test_a_judge_that_goes_by_format_is_said_to(tmp_path: Path, monkeypatch: Any) -> None:
    plain, listed = "one and two", "- one\n- two"
    rows = [{"prompt": f"p{row}", "ours": plain, "theirs": listed} for row in range(20)]
    rows += [{"prompt": f"q{row}", "ours": listed, "theirs": plain} for row in range(20)]
    names = {"our_name": "PPO", "their_name": "SFT", "our_source": "ppo", "their_source": "sft", "columns": "{}"}
    names |= {"our_weights": "1", "their_weights": "2", "answers": "{}", "prompt_chat": None}
    table = pd.DataFrame(rows).assign(worths=['{"ben": 1.0}', '{"ben": 0.0}'] * 20, **names)
    found = nodes.compare_by_people(table, EvaluationConfig(judge=f"{__name__}:lists", prompts_path=None))
    assert found["favours"] == ["formatted answers"]
    assert "; the judge favours formatted answers." in found["result"]


def test_the_judge_reads_the_messages_and_columns_as_in_an_evaluation() -> None:
    """Of two collections one had no column `level`."""
    read: list[dict[str, Any]] = []

    def judge(messages: list[Any], turns: list[Any], completions: list[str], level: list[Any]) -> list[float]:
        read.append({"messages": messages, "turns": turns, "level": level})
        return [float(len(text)) for text in completions]

    chat = [{"role": "user", "content": "p"}]
    names = {"our_name": "PPO", "their_name": "SFT", "our_source": "ppo", "their_source": "sft"}
    names |= {"our_weights": "1", "their_weights": "2", "answers": "{}", "worths": '{"ben": 1.0}'}
    rows = {"prompt": ["<user>p", "q"], "prompt_chat": [json.dumps(chat), None], "columns": ["{}", '{"level": 3}']}
    table = pd.DataFrame({**rows, "ours": ["aa", "bb"], "theirs": ["a", "b"]}).assign(**names)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nodes, "resolve_judge", lambda _: ResolvedJudge(judge, {}, "a judge"))
        nodes.compare_by_people(table, EvaluationConfig(prompts_path=None))
    for side, turns in zip(read, ([["aa"], ["bb"]], [["a"], ["b"]]), strict=True):
        with_response = [*chat, {"role": "assistant", "content": turns[0][0]}]
        assert side == {"messages": [with_response, None], "turns": turns, "level": [None, 3]}


def test_the_texts_are_those_of_the_policies(folder: Path, compared: pd.DataFrame) -> None:
    table = unblinded(folder, answers_file(folder, compared, anna="against"))
    ours = [b if is_a else a for a, b, is_a in compared[["response_a", "response_b", "policy_is_a"]].values]
    assert table["ours"].tolist() == ours
    assert {*table["worths"]} == {'{"anna": 1.0}'}
    for name in ("columns", "prompt_chat"):
        assert table[name].tolist() == compared[name].tolist()


def test_answers_of_a_queue_decide_as_those_of_a_file_do(folder: Path) -> None:
    table = collect(folder, against="ppo_policy", prompts="training")
    for number, is_a in zip(table["number"], table["policy_is_a"], strict=True):
        answer(number, "B" if is_a else "A", "ben")
    by_file = unblinded(folder, answers_file(folder, table, ben="against"))
    for given in ({"against": "ppo_policy"}, {"answers": "mlflow:sft_policy against ppo_policy"}):
        assert unblinded(folder, **given).equals(by_file)
    [file] = (folder / "feedback_pairs").glob("*.answers.*.jsonl")
    assert unblinded(folder, str(file)).equals(by_file)


def test_answers_that_compare_no_two_policies_are_refused(folder: Path, compared: pd.DataFrame, caplog: Any) -> None:
    of_one = collect(folder, export=str(folder / "of_one.jsonl"))
    with pytest.raises(
        DataError, match=r"jsonl: no answered pair compares two policies\. .*feedback\.against=ppo_policy"
    ):
        unblinded(folder, answers_file(folder, of_one, anna="policy"))
    assert f"{len(of_one)} pairs are left out, because both responses are from one policy." in caplog.text
    answers = answers_file(folder, compared, anna="policy")
    for file in (folder / "feedback_pairs").iterdir():
        file.unlink()
    with pytest.raises(DataError, match="no pair of these numbers"):
        unblinded(folder, answers)
    with pytest.raises(DataError, match="a file of answers has the columns number and answer; this one has number, "):
        unblinded(folder, str(folder / "pairs.jsonl"))


def test_of_more_than_two_policies_the_newest_answered_are_compared(
    folder: Path, compared: pd.DataFrame, caplog: Any
) -> None:
    save(folder / "ppo", draw_weights(tiny_model(seed=7), 0.5, seed=7))  # other weights in the same folder
    anew = collect(folder, against="ppo_policy", prompts="training", export=str(folder / "newer.jsonl"))
    assert len(unblinded(folder, answers_file(folder, compared, ben="policy"))) == len(compared)
    table = unblinded(folder, answers_file(folder, pd.concat([anew[:1], compared]), ben="policy"))
    assert (table["number"][0], {*table["number"]}) == (anew["number"][0], {*anew["number"]})
    assert {*table["our_weights"]} == {PretrainedHandle(str(folder / "ppo")).fingerprint()}
    assert f"{len(compared)} of {len(compared) + 1} pairs" in caplog.text


def test_a_policy_that_was_moved_keeps_its_verdict_and_its_card(folder: Path, compared: pd.DataFrame) -> None:
    (folder / "ppo").rename(folder / "moved")
    moved = {"against": str(folder / "moved"), "prompts": "training", "export": str(folder / "moved.jsonl")}
    anew = collect(folder, queue="sft_policy against ppo_policy", **moved)
    table = unblinded(folder, answers_file(folder, pd.concat([compared, anew]), ben="policy"))
    assert len(table) == len(compared) + len(anew)
    found = nodes.compare_by_people(table, EvaluationConfig())
    (folder / "moved" / "README.md").write_text(CARD)
    directory, _ = nodes.write_people_card(found, PretrainedHandle(str(folder / "moved")))
    assert directory == str(folder / "moved")


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
    said = {"policy": str(tmp_path), "result": "PPO beats SFT.", "fingerprint": "of other weights"}
    directory, card = nodes.write_people_card(said, PretrainedHandle("newer"))
    assert directory == str(tmp_path)
    assert "By people: PPO beats SFT." in card
    assert nodes.write_people_card({**said, "policy": "org/theirs"}, PretrainedHandle("newer")) == (
        None,
        said["result"],
    )


def test_the_order_of_people_does_not_follow_their_names() -> None:
    from ppo_rlhf.people.win_rate import compare_by_people

    drawn = random.Random(0)
    rates = {"a": 0.9, "z": 0.1}
    for names in (("a", "z"), ("z", "a")):
        worths = [{n: float(drawn.random() < rates[m]) for n, m in zip("az", names, strict=True)} for _ in range(40)]
        rows = compare_by_people(worths)["by_person"]
        assert rows[0]["win_rate"] < rows[1]["win_rate"]
