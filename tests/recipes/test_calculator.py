"""The calculator example: the committed files equal the script's output, and the functions do what the page says."""

from pathlib import Path

from scripts.write_calculator import main, write_files

from ppo_rlhf.recipes.calculator import calls_calculator, is_right, reply

RAW = Path(__file__).parents[2] / "data" / "01_raw"


def test_the_committed_files_are_what_the_script_writes_byte_for_byte(tmp_path: Path) -> None:
    main(["--output", str(tmp_path), "--seed", "0"])
    for name in ("calculator_demonstrations.jsonl", "calculator_prompts.jsonl"):
        assert (tmp_path / name).read_bytes() == (RAW / name).read_bytes(), f"{name} is out of date"


def test_no_question_is_in_both_files(tmp_path: Path) -> None:
    texts = [path.read_text() for path in write_files(tmp_path, largest=5, demonstrations=200, prompts=16)]
    questions = [{line.split(" ?")[0] for line in text.splitlines()} for text in texts]
    assert (len(questions[0]), len(questions[1])) == (20, 16)
    assert not questions[0] & questions[1]


def test_calls_get_their_result_and_whatever_else_ends_the_episode() -> None:
    turns = [["call 7 plus 8"], ["answer 3"], ["call 7 plus"], ["call 1 plus 2", "result 3", "call 3 plus 4"], [""]]
    assert reply([], [], turns) == ["result 15", None, None, "result 7", None]


def test_only_the_last_turn_is_right_or_wrong_and_a_made_up_result_is_nothing() -> None:
    turns = [["answer 15"], ["call 7 plus 8", "result 15", "answer 15"], ["call 7 plus 8 result 15"], ["answer 14"]]
    assert is_right([], [], turns, [15] * 4) == [1.0, 1.0, 0.0, 0.0]
    assert calls_calculator([], [], turns) == [0.0, 1.0, 0.0, 0.0]
