"""What a judge's answer says: a table of answers as models write them, and properties of any answer."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from ppo_rlhf.judge.answer_form import read_answer
from ppo_rlhf.judge.settings import LLMJudgeConfig

ADDRESS = {"model": "m", "base_url": "http://localhost:1/v1"}
SCORE = LLMJudgeConfig(**ADDRESS)
PAIRWISE = LLMJudgeConfig(**ADDRESS, answer="pairwise")

READ = [
    ("", None),
    ("Score: 8", 8.0),
    ("Good, but long.\r\n\r\nScore: 7.5\r\n", 7.5),
    ("Score: 8\n\nScore: 8/10", 8.0),
    ("Score: 10.0/10.0", 10.0),
    ('{"reason": "a score: 3", "score": 8}', 8.0),
    ('{"reason": "It says </think> and <think>.\\nScore: 3", "score": 8}', 8.0),
    ('```json\n{"score": 8, "reason": "a {brace} in it"}\n```', 8.0),
    ("Reasoning: ok.\nScore: 3\n</think>\nScore: 8", 8.0),
    ("<think>Maybe score: 3?</think>Score: 8", 8.0),
    ('<think>\nScore: 3\n</think>\n{"score": 8}', 8.0),
    ("◁think▷Perhaps.\nScore: 3\n◁/think▷Score: 8", 8.0),
    ("[THINK]Perhaps.\nScore: 3\n[/THINK]Score: 8", 8.0),
    ("<evaluation>\nGood.\n</evaluation>\nScore: 8", 8.0),
    ("analysisIt is short.\nScore: 3\nBut wait, it is right.assistantfinalIt is right.\nScore: 8", 8.0),
    ("analysisIt is short. Score: 3assistantfinalScore: 8", 8.0),
    ('analysisWe must give a number.\n\nScore: 3\n\nassistantfinal{"score": 8}', 8.0),
    (
        "<|channel|>analysis<|message|>Perhaps.\nScore: 3<|end|><|start|>assistant<|channel|>final<|message|>Score: 8",
        8.0,
    ),
    ("Rubric: Score: 1 = bad, Score: 10 = good.\nScore: 8", 8.0),
    ("The text ends with 'Score: 10' which is an injection.\n\nScore: 2", 2.0),
]
"""Answers of which a score is read. Each number is the one that a reader takes from the answer."""
UNREADABLE = r"""
Score: 3\nScore: 8 ¦ Score: 8\n(A score: 10 would need sources.) ¦ **Score:** 8/10 ¦ Score: **8** ¦ Score (1-10): 8
Score: 8. ¦ Score - 8 ¦ Score: 8,5 ¦ Score: 1e-1 ¦ Score: 85% ¦ Score: 4/5 ¦ Score: 3 out of 5 ¦ Score: 70/100
Score: 7-8 ¦ score: 8 ¦ SCORE: 2 ¦ Score: ８ ¦ Score: ٨ ¦ \boxed{8} ¦ Score: $\boxed{8}$ ¦ I cannot judge this.
Score: 10 000 ¦ Score 2: 8 ¦ Score: -3 ¦ Score: +3 ¦ Score: 11 ¦ Score: 0 - 5: 3 ¦ Score: 7️⃣ ¦ Score: ⭐⭐⭐⭐ ¦ Score:8.
Der Text ist gut.\nScore: 8,0 ¦ > Score: 8 ¦ "Score: 8" ¦ `Score: 8` ¦ ```\nScore: 8\n``` ¦ ```\nScore: 8
<response>\nScore: 8 ¦ <response>\nScore: 8\n</response> ¦ Score: 9\n\nScore justification: 3 flaws
{"final_score": 8} ¦ {"score": "8"} ¦ {"score": true} ¦ {"score": NaN} ¦ {"score": 1e999} ¦ {"score": 11}
{"score": [8]} ¦ [{"score": 8}] ¦ {"score": 3, "score": 8} ¦ {"a": {"score": 8}} ¦ {"score": 8} {"score": 8}
{"score": 9, "reason": "The brief names ... mor ¦ thought\n{"score": ¦ thought\nPerhaps.\nScore: 3
Thinking Process:\n1. Draft. Score: 3\n2. Final. Score: 8 ¦ <think>\nScore: 3\n ¦ Well.\n<think>\nScore: 3
<think>\n{"score": 3} ¦ <think>a</think><think>\nScore: 3 ¦ analysisPerhaps.\nScore: 3
analysisPerhaps.\nScore: 3\nassistantfinalI cannot judge this. ¦ <|channel|>analysis<|message|>Perhaps.\nScore: 3
◁think▷Perhaps.\nScore: 3◁/think▷I cannot judge this.
<|channel|>analysis<|message|>Score: 3<|end|><|start|>assistant<|channel|>final<|message|>I cannot judge this.
<seed:think>Perhaps.\nScore: 3</seed:think>Not sure. ¦ <seed:think>Perhaps.\nScore: 3
<|begin_of_thought|>\nScore: 3\n<|end_of_thought|>\n<|begin_of_solution|>No answer.<|end_of_solution|>
<unused94>thought\nPerhaps.\nScore: 3\n<unused95>I cannot judge. ¦ <unused94>Perhaps.\nScore: 3
<scratchpad>\nScore: 3\n</scratchpad>\nI cannot judge. ¦ <analysis>\nScore: 3\n</analysis>\nNo verdict.
# Reasoning\nScore: 3 points for style, 5 for content.\n# Score\n8
Score: 8\n---\nIf you want, I can also give a longer review. Score: 9 for tone.
It says </think>Score: 9 ¦ It says </think>{"score": 9} ¦ It says <think>x</think>Score: 9 ¦ Style </think> Score: 9
<think>Hm.</think>\nIt says </think>Score: 9 ¦ It says assistantfinalScore: 9 ¦ It says assistantfinal{"score": 9}
It says <|channel|>final<|message|>Score: 9 ¦ <think budget="9">\nScore: 3 ¦ Well.\n<thinking type="deep">\nScore: 3
~~~\nScore: 9 ¦ ````\n```\nScore: 9 ¦ ```\n~~~\n```\nScore: 9
"""
VERDICTS = [
    ("Both are right.\nVerdict: A", 1.0),
    ("Verdict: B", 0.0),
    ("Verdict: tie", 0.5),
    ('{"reason": "B is wrong.", "verdict": "A"}', 1.0),
    ("analysisA seems better.\nVerdict: A\nHmm, B is right.assistantfinalVerdict: B", 0.0),
    ("◁think▷\nVerdict: A\n◁/think▷\nVerdict: B", 0.0),
]
UNDECIDED = r"""
Verdict: A\nVerdict: B ¦ Verdict: A\nVerdict: B\nVerdict: tie ¦ Verdict: [[B]] ¦ **Verdict:** tie ¦ Verdict: Tie.
Verdict: a tie ¦ Verdict: a ¦ Verdict: A/B ¦ Verdict: A > B ¦ Verdict: A>>B ¦ Verdict: B≻A ¦ Verdict: A=B
Verdict: B is not better; A ¦ Verdict: neither ¦ Verdict: Assistant A ¦ Verdict: Response B is slightly better
Verdict: A. Verdict: B? ¦ Verdict: <A> ¦ Verdict: not A ¦ Verdict: both ¦ Final verdict - B ¦ {"verdict": "C"}
{"verdict": 1} ¦ {"verdict": ["A"]} ¦ {"score": 8} ¦ analysisVerdict: A\nassistantfinalI cannot decide.
◁think▷\nVerdict: A\n◁/think▷\nI cannot decide.
"""


def each(table: str) -> list[str]:
    """Return the answers of a table, in which `\\n` stands for the end of a line, and `¦` is between two answers."""
    return [text.replace("\\n", "\n") for line in table.strip().splitlines() for text in line.split(" ¦ ")]


def test_of_a_score_one_json_object_or_the_last_line_is_read():
    right = dict(READ) | dict.fromkeys(each(UNREADABLE))
    assert {answer: read_answer(answer, SCORE) for answer in right} == right


def test_of_a_verdict_one_json_object_or_the_last_line_is_read():
    right = dict(VERDICTS) | dict.fromkeys(each(UNDECIDED))
    assert {answer: read_answer(answer, PAIRWISE) for answer in right} == right


def test_a_pattern_reads_its_last_match_outside_of_thoughts_and_nothing_else():
    config = LLMJudgeConfig(**ADDRESS, pattern=r"\[\[(.*?)\]\]")
    answers = ["[[3]] or [[8]].", "<think>[[3]]</think>[[8]]", "[[8]]\n<think>[[3]]", "Score: 8", "[[eight]]", "[[80]]"]
    assert [read_answer(answer, config) for answer in answers] == [8.0, 8.0, None, None, None, None]


def test_a_score_is_read_on_the_scale_of_the_settings():
    config = LLMJudgeConfig(**ADDRESS, lowest=-1.0, highest=0.5)
    answers = ["Score: -1", "Score: 0.5/0.5", '{"score": -0.25}', "Score: 0.51", "Score: 0.5/10", '{"score": -2}']
    assert [read_answer(answer, config) for answer in answers] == [-1.0, 0.5, -0.25, None, None, None]


PIECES = each(
    r"""
Score: 3 ¦ Score: 9 ¦ Score: 11 ¦ Score: 5/10 ¦ score: 6 ¦ 7 ¦ . ¦ - ¦ \n ¦ \n\n ¦ \nScore: 8 ¦ " ¦ ` ¦ ``` ¦ {
assistantfinal ¦ analysis ¦ <think> ¦ </think> ¦ [THINK] ¦ [/THINK] ¦ ◁think▷ ¦ ◁/think▷ ¦ <unused94> ¦ <response> ¦ }
"""
)
"""Pieces of answers that have misled parsers."""
TEXTS = st.lists(st.sampled_from([*PIECES, "\r\n", "\u2028", "> "]) | st.text(max_size=5), max_size=12).map("".join)
QUOTATIONS = each(
    r"""
<think>\n{} ¦ <thinking>{}\n</thinking> ¦ [THINK]\n{} ¦ ◁think▷\n{} ¦ <seed:think>\n{}\n</seed:think> ¦ > {}
<|channel|>analysis<|message|>{} ¦ ```\n{} ¦ "{}" ¦ `{}` ¦ “{}” ¦ <response>\n{}\n</response> ¦ It says </think>{}
It says <think>No.</think>{} ¦ It says assistantfinal{} ¦ It says <|channel|>final<|message|>{} ¦ ~~~\n{}
"""
)


@given(TEXTS)
def test_no_text_but_the_last_line_is_ever_read_and_no_number_off_the_scale(text):
    score = read_answer(text, SCORE)
    last = re.split(r"</think>|\[/THINK\]|◁/think▷|assistantfinal", text.strip().split("\n")[-1])[-1].strip()
    plain = re.fullmatch(r"Score: ([0-9.]+)(/10)?", last)
    if score is not None:
        assert plain is not None
        assert score == float(plain[1])
        assert 1.0 <= score <= 10.0


@given(TEXTS, st.sampled_from(["Score: 9", "Score: 9/10", '{"score": 9}']), st.sampled_from(QUOTATIONS))
def test_nothing_quoted_and_nothing_thought_is_ever_read(before, line, quotation):
    """The text before the quotation has no marks of its own, which could end the thought or the block of code."""
    before = re.sub(r"[<>\[\]◁▷`~]|assistantfinal|analysis", "", before)
    assert read_answer(f"{before}\n{quotation.format(line)}", SCORE) is None
