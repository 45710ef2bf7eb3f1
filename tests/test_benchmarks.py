"""The benchmark's own side and arithmetic, on a toy shape and without TRL."""

import json
import math
import re
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import mannwhitneyu, pearsonr
from torch import nn
from transformers import AutoModelForTokenClassification

from ppo_rlhf.ppo import loop
from tests.ppo_runs import build_run
from tests.tiny_models import CHATML, byte_tokenizer, save, tiny_model

HERE = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    yield
    for script in HERE.glob("*.py"):
        sys.modules.pop(script.stem, None)


def toy():
    from workload import Preset

    return Preset(2, 64, 4, 500, batch=16, minibatch=8, prompt_length=8, response_length=12, epochs=2)


def test_our_side_does_the_work_that_the_comparison_expects(tmp_path):
    import compare
    import inputs
    import our_side
    from workload import Job

    policy, reward = inputs.make_models(toy(), "mixed", tmp_path)
    prompts = inputs.make_prompts(toy(), "mixed", 3 * 16)
    seed = inputs.find_noise_seed(toy(), 1, 3)
    Job(toy(), "mixed", "float32", "cpu", 3, policy, reward, prompts, seed, {"vf_coef": 0.2}).write(tmp_path / "job")
    job = Job.read(tmp_path / "job")
    result = our_side.run(job)
    compare.check_work(job, "ours", result)
    assert len({iteration["tokens"] for iteration in result["iterations"]}) > 1  # responses end unevenly
    rows = compare.rows_of({"preset": "toy", "lengths": "mixed", "precision": "float32"}, [(result, result)])
    assert [row["ratio"] for row in rows] == [1.0] * 3
    assert len(compare.table(rows).splitlines()) == 5
    *_, alone = compare.rows_of({"preset": "toy", "lengths": "mixed", "precision": "float32"}, [(result,)])
    assert alone["ours_s"] == rows[-1]["ours_s"]
    assert not any("trl" in name or "ratio" in name for name in alone)  # only our side ran
    assert compare.table([alone]).splitlines()[-1].count(" – ") == 3
    with pytest.raises(compare.SideError, match="optimiser steps"):
        compare.check_work(job, "trl", result | {"steps": 1})
    with pytest.raises(compare.SideError, match="response tokens"):
        compare.check_work(job, "trl", result | {"iterations": [{"tokens": 16 * 12}] * 3})


def test_a_ratio_is_the_median_of_the_pairs_without_the_warm_up():
    """By hand: the pairs' ratios are 4, 5 and 9/8."""
    import compare

    def result(seconds):
        times = dict.fromkeys(compare.PHASES, seconds)
        return {
            "iterations": [dict.fromkeys((*times, "tokens"), 99.0), {**times, "tokens": 1.0}],
            "memory_mib": 1.0,
            "cpu_s": 1.0,
        }

    pairs = [(result(ours), result(trl)) for ours, trl in ((1, 4), (10, 50), (8, 9))]
    assert [row["ratio"] for row in compare.rows_of({}, pairs)] == [4.0] * 3


def test_where_one_side_fails_the_other_work_is_timed_all_the_same(tmp_path, monkeypatch, capsys):
    import compare

    def run_side(side, command, _):
        job = json.loads(Path(command[-1]).read_text())
        if side == "trl" and job["precision"] == "bfloat16":
            raise compare.SideError(side, "RuntimeError: NaN")
        tokens = 32 * 32
        times = dict.fromkeys(compare.PHASES, 1.0 if side == "ours" else 2.0)
        return {"iterations": [{**times, "tokens": tokens}] * 2, "steps": 32, "memory_mib": 1.0, "cpu_s": 1.0}

    monkeypatch.setattr(compare, "run_side", run_side)
    monkeypatch.setattr(compare, "machine", lambda _: {})
    arguments = ["--presets", "tiny", "--lengths", "full", "--precisions", "bfloat16,float32", "--peer-python", "there"]
    options = compare.parse_arguments([*arguments, "--iterations", "1", "--json", str(tmp_path / "out")])
    monkeypatch.setattr(compare, "parse_arguments", lambda: options)
    assert compare.main() == 1
    found = json.loads((tmp_path / "out").read_text())
    assert [(row["precision"], row.get("ratio")) for row in found["rows"]] == [
        *[("bfloat16", None)] * 3,
        *[("float32", 2.0)] * 3,
    ]
    assert found["failures"] == ["tiny, full, bfloat16: trl: RuntimeError: NaN"]
    assert "trl: RuntimeError: NaN" in capsys.readouterr().out


@pytest.fixture
def chat_model(tmp_path):
    """A tiny chat model that can write any byte."""
    tokenizer = byte_tokenizer(chat_template=CHATML)
    return save(tmp_path / "chat", tiny_model(vocab_size=len(tokenizer), max_position_embeddings=160), tokenizer)


def test_a_real_model_does_the_recipes_work_and_its_curve_is_printed(chat_model, monkeypatch, tmp_path):
    import compare
    import our_side
    from workload import Job, Preset

    small = Preset(0, 0, 0, 0, batch=4, minibatch=2, prompt_length=0, response_length=5, epochs=1, chats=True)
    monkeypatch.setitem(compare.PRESETS, "smollm2", small)
    options = compare.parse_arguments(["--presets", "smollm2", "--iterations", "4", "--model", chat_model])
    compare.make_job("smollm2", "sampled", options, tmp_path).write(tmp_path / "job")
    job = Job.read(tmp_path / "job")
    assert len(job.prompt_ids) == len(job.rows) == 512
    assert (job.learning_rate, job.kl_coef) == (1.5e-5, 0.03)  # conf/obedience
    result = our_side.run(job)
    compare.check_work(job, "ours", result)
    assert result["cpu_s"] > 0
    scores = [{"score": score} for score in (0.0, 0.5, 1.0, 0.5, 0.25)]
    curves = compare.curve_rows([(result | {"iterations": scores},)])
    assert curves == [{"side": "ours", "pair": 1, "scores": [0.0, 0.5, 1.0, 0.5, 0.25]}]
    *_, row = compare.curves_table([{"precision": "float32", **curve} for curve in curves]).splitlines()
    assert row == "| float32, ours, run 1 | 0.500 | 0.250 |"


def test_a_shared_prefix_saves_the_prompts_tokens_but_one_copy_a_micro_batch(chat_model):
    import shared_prefix

    sizes, found = shared_prefix.measured(chat_model, 0, 2, {"response_length": 8, "gradient_accumulation_steps": 1})
    common, _, once, whole = (int(number.replace(",", "")) for number in re.findall(r"[\d,]+", sizes))
    assert common >= 8  # the template before the request
    assert whole - once >= (8 - 2) * common  # two micro-batches of four rows
    assert {part: len(pairs) for part, pairs in found.items()} == dict.fromkeys(shared_prefix.PARTS, 2)
    assert all(seconds > 0 for pairs in found.values() for pair in pairs for seconds in pair)
    assert shared_prefix.lines("sizes", {"update": [[2.0, 3.0], [2.0, 5.0]]}) == [
        "| sizes | update | 2.00 | 4.00 | 2.00 (1.50 to 2.50) |"
    ]


def test_a_real_model_has_to_be_named(capsys):
    import compare

    with pytest.raises(SystemExit):
        compare.parse_arguments(["--presets", "smollm2"])
    assert "the presets smollm2 need --model" in capsys.readouterr().err


def various(prompts, completions, *_, **__):
    """Return a reward that even a random model gets in parts."""
    return [len(set(text)) / 5 for text in completions]


@pytest.fixture
def method_job(chat_model, monkeypatch, tmp_path):
    """Of 16 responses in two iterations; four prompts are held out."""
    import methods_side

    rows = methods_side.raw_rows
    monkeypatch.setattr(methods_side, "raw_rows", lambda *name: rows(*name)[:4])
    monkeypatch.setattr(methods_side, "strict", various)
    config = {
        "total_episodes": 16,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
    }
    config |= {"num_mini_batches": 2, "num_ppo_epochs": 2, "response_length": 5, "missing_eos_penalty": 0.5}
    return {"model": chat_model, "seed": 1, "config": config, "folder": str(tmp_path / "policy"), "policy": chat_model}


def test_grpo_samples_as_many_responses_as_ppo(method_job):
    import methods_side

    found = methods_side.METHODS["grpo4"](method_job)["grpo4"]
    assert len(found["curve"]) == 2
    assert 16 <= found["tokens"] <= 16 * 5
    assert abs(found["kl"]) > 1e-4  # it learnt something, and its own files are evaluated
    assert methods_side.METHODS["ppo"](method_job)["ppo"]["kl"] == pytest.approx(0.0, abs=1e-5)


def test_the_best_of_n_responses_is_measured_from_samples():
    """By hand: one of 16 responses to the first of two prompts has reward 1; n of 16 hold it in a share of n / 16."""
    import methods

    rewards = [0.0] * 5 + [1.0] + [0.0] * 26
    samples = pd.DataFrame({"reward": rewards, "prompt_number": [0] * 16 + [1] * 16})
    found = methods.best_of(samples.assign(copied=samples["reward"], terminated=samples["reward"] == 0.0))
    assert [found[name]["reward"] for name in methods.BEST_OF] == pytest.approx([1 / 32, 1 / 8, 1 / 2])
    assert found["best of 4"]["kl"] == pytest.approx(math.log(4) - 3 / 4)
    assert [found["best of 4"][name] for name in ("copied", "cut_off")] == pytest.approx([1 / 8, 1 / 8])


def test_methods_are_compared_by_their_means_over_seeds():
    """By hand: 0.4 and 0.6 have a standard error of 0.1, and Student's t of one degree of freedom is 12.706."""
    import methods

    of = dict.fromkeys(methods.COLUMNS, 0.25)
    two = {"1": of | {"reward": 0.4}, "2": of | {"reward": 0.6}}
    taken = {"cpu_s": 120.0, "memory_mib": 2048.0}
    *_, ppo, grpo = methods.table({"ppo": two, "grpo4": {"1": of | taken}}).splitlines()
    assert ppo.startswith("| PPO, this project | 2 | 0.500 ± 1.271 | 0.2 ± 0.0 |")
    assert grpo.endswith("| 0.250 (one seed) | 2 | 2.0 |")


def finished_run(folder, reward, requests):
    """The files of a run that `benchmarks/obedience.py` reads."""
    names = ("reward", "judge_score", "obedient", "on_topic", "copied")
    summary = {f"eval/{name}": reward for name in names} | {f"eval/{name}_sft": 0.25 for name in names}
    history = {"iteration": range(1, 9), "objective/scores": reward, "eval/judge_score": reward}
    history |= {"val/explained_variance": 0.5, "time/iteration_s": 30.0, "memory/peak_bytes": 2.0**31}
    for part in ("08_reporting", "07_model_output/training_history"):
        (folder / part).mkdir(parents=True)
    text = json.dumps(summary | {"eval/kl": 2.0, "eval/win_rate": 0.75})
    (folder / "08_reporting/evaluation_summary.json").write_text(text)
    pd.DataFrame(history).to_csv(folder / "07_model_output/training_history/training_history.csv")
    for side in ("sft", "ppo"):
        rows = {"prompt": requests, "response": f"{side}\nsays | this", "reward": 1.0, "terminated": True}
        pd.DataFrame(rows).to_parquet(folder / f"07_model_output/{side}_evaluation.parquet")
    return folder


def test_finished_runs_of_obedience_become_tables_and_a_picture(tmp_path, monkeypatch, capsys):
    """By hand: 0.5 and 0.7 have a standard error of 0.1; eight iterations of 30 s are 4 minutes."""
    import obedience
    from inputs import raw_rows

    requests = [row["prompt"][0]["content"] for row in raw_rows("obedience_held_out")]
    folders = [str(finished_run(tmp_path / str(reward), reward, requests)) for reward in (0.5, 0.7)]
    svg = tmp_path / "curves.svg"
    monkeypatch.setattr(sys, "argv", ["obedience.py", "--strict", ",".join(folders), "--svg", str(svg)])
    obedience.main()
    printed = capsys.readouterr().out.splitlines()
    assert "| reward | 0.250 | 0.600 ± 1.271 | 0.500, 0.700 |" in printed
    assert "| minutes of training |  | 4.0 ± 0.0 | 4.0, 4.0 |" in printed
    assert "| GiB while training |  | 2.0 ± 0.0 | 2.0, 2.0 |" in printed
    assert sum(line.endswith("| sft says \\| this (1) | ppo says \\| this (1) |") for line in printed) == 6
    assert svg.read_text().startswith("<?xml")


GPU_TESTS = """
tests/a.py::test_one PASSED                      [ 20%]
tests/a.py::test_two[with spaces] PASSED         [ 40%]
tests/a.py::test_three FAILED                    [ 60%]
tests/b.py::test_four SKIPPED (no vLLM here)     [ 80%]
tests/b.py::test_five """
GPU_TESTS_IN_WORKERS = """
[gw0] [ 20%] PASSED tests/a.py::test_one
[gw1] [ 40%] FAILED tests/a.py::test_two[with spaces]
tests/a.py::test_three
[gw1] [ 60%] SKIPPED tests/b.py::test_four
FAILED tests/a.py::test_two[with spaces] - RuntimeError: other types
! xdist.dsession.Interrupted !"""


def test_the_report_names_the_tests_that_did_not_pass_and_the_one_that_was_cut_off():
    import gpu_report

    assert gpu_report.read_tests(GPU_TESTS.splitlines()) == [
        ("tests", "2 passed, 1 failed, 1 skipped"),
        ("tests/a.py::test_three", "failed"),
        ("tests/b.py::test_four", "skipped: no vLLM here"),
        ("tests/b.py::test_five", "cut off"),
    ]
    assert gpu_report.read_tests(GPU_TESTS_IN_WORKERS.splitlines()) == [
        ("tests", "1 passed, 1 failed, 1 skipped"),
        ("tests/a.py::test_two[with spaces]", "failed: RuntimeError: other types"),
        ("tests/b.py::test_four", "skipped"),
    ]
    assert gpu_report.read_tests(["FAILED tests/a.py::test_three - assert 1 == 2"]) == [("tests", "none ran")]


def part_of(name: str, code: str, limit: float = 60.0):
    import gpu_report

    return gpu_report.Part(name, [sys.executable, "-c", code], limit, lambda lines: [(name, "".join(lines).strip())])


def test_a_part_that_fails_or_takes_too_long_leaves_the_others(monkeypatch, capfd, tmp_path):
    import gpu_report

    quiet = "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "  # without a traceback
    hangs = quiet + "import subprocess; print('begun', flush=True); subprocess.run(['sleep', '120'])"
    kept = f"print(len(open({str(tmp_path / 'table.md')!r}).readlines()), 'lines are kept')"  # of the parts before
    parts = [part_of("fails", "print('half'); 1 / 0"), part_of("hangs", hangs, 3.0), part_of("works", kept)]
    monkeypatch.setattr(gpu_report, "parts_of", lambda *_: parts)
    started = time.monotonic()
    assert gpu_report.main(["--minutes", "3", "--out", str(tmp_path)]) == 1
    assert time.monotonic() - started < 90  # what the part started ends with it, after 3 seconds and not after 120
    rows = capfd.readouterr().out.split("| part | what | result |")[1]
    for row in ("| status 1 |", "| stopped after 3 s |", "| | hangs | begun |", "| done |", "lines are kept |"):
        assert row in rows
    assert (tmp_path / "table.md").read_text().endswith(rows.strip() + "\n")
    assert [each["name"] for each in json.loads((tmp_path / "results.json").read_text())] == ["fails", "hangs", "works"]
    assert "begun\n" in (tmp_path / "log.txt").read_text()
    assert gpu_report.main(["--parts", "works", "--out", str(tmp_path)]) == 0
    with pytest.raises(SystemExit, match=r"wrks.* fails, hangs, works"):
        gpu_report.main(["--parts", "wrks", "--out", str(tmp_path)])


def test_a_result_that_failed_ends_the_report_with_status_1(monkeypatch, tmp_path):
    import gpu_report

    line = gpu_report.FOUND + json.dumps(["update", "failed: RuntimeError: no memory"])
    part = gpu_report.Part("one", [sys.executable, "-c", f"print({line!r})"], 60.0, gpu_report.read_found)
    monkeypatch.setattr(gpu_report, "parts_of", lambda *_: [part])
    assert gpu_report.main(["--out", str(tmp_path)]) == 1
    assert "| | update | failed: RuntimeError: no memory |" in (tmp_path / "table.md").read_text()


def test_parts_end_within_the_minutes_and_those_without_time_are_named(monkeypatch, capfd, tmp_path):
    import gpu_report

    parts = gpu_report.parts_of(gpu_report.parse_arguments([]), tmp_path)
    assert sum(part.limit for part in parts) <= 9 * 60
    monkeypatch.setattr(gpu_report, "parts_of", lambda *_: [part_of("works", "print('whole')")])
    assert gpu_report.main(["--minutes", "0.2", "--out", str(tmp_path)]) == 1
    assert "| **works** | 0 s | no time left |" in capfd.readouterr().out


def test_a_comparison_that_is_cut_off_has_told_of_each_side(tmp_path):
    import gpu_report

    lines = ["gpt2, mixed, bfloat16\n", "ours: experience 1.00 s, update 2.00 s, iteration 3.00 s\n", "Loading\n"]
    found = gpu_report.read_speed(tmp_path / "missing.json", lines)
    assert found == [("ours", "experience 1.00 s, update 2.00 s, iteration 3.00 s")]


@pytest.mark.slow
def test_the_report_can_be_tried_without_a_gpu(tmp_path, capfd):
    import gpu_report

    assert gpu_report.main(["--small", "--out", str(tmp_path)]) == 0
    rows = capfd.readouterr().out.split("| part | what | result |")[1].splitlines()
    parts = [row.split("**")[1] for row in rows if row.startswith("| **")]
    assert [part.name for part in gpu_report.parts_of(gpu_report.parse_arguments([]), tmp_path)] == parts
    assert f"| | update: compiled | {gpu_report.NO_GPU} |" in rows  # and not pretended
    for row in (
        "| | launch: an addition in place | ",
        "| | decoding, qwen2-0.5b: engine static | 0.",
        "| | decoding, gpt2: engine hf | 0.",
        "| | update: plain | ",
        "| | toy, mixed, float32: iteration | ours ",
        "| | tests/ppo/test_sharding.py::test_on_a_gpu_",
        "| | `kedro run --env test` | ",
        "| | its win rate against SFT | 0.",
    ):
        assert len([each for each in rows if each.startswith(row)]) == 1, row
    assert any("first ratio exactly 1" in row for row in rows)
    assert len([row for row in rows if " of the processor, " in row]) == 25


def test_this_project_keeps_the_rules_for_any_trainer(tmp_path):
    import invariances
    import invariances_ours

    rows = list(invariances.check(invariances_ours, tmp_path))
    assert len(rows) == 12
    assert [rule for rule, holds, _ in rows if not holds] == []
    assert len(invariances.table(rows).splitlines()) == 14


def test_a_trainer_that_breaks_a_rule_is_noticed(tmp_path):
    """Hand-made: a score one token late, a token that is not counted, a gradient and steps that follow the cut."""
    from types import SimpleNamespace

    import torch

    import invariances

    def observe(case):
        counted = torch.tensor([[True, True, not case.pad_is_stop], [True, True, False]])
        late = case.lam * torch.tensor([[0.81, 0.9, 1.0], [0.9, 1.0, 0.0]])
        gradient, off = torch.tensor([1.0, case.micro_batch]), 0.01 * (case.precision != "float32")
        seen = [[5, 6, 0], [7, 0]], torch.ones(2), counted, late, torch.tensor([1.0 + off]), gradient
        return invariances.Seen(*seen, steps=case.accumulated)

    rows = list(invariances.check(SimpleNamespace(observe=observe, FUNCTIONS={}), tmp_path))
    assert [holds for _, holds, _ in rows] == [*[None] * 4, True, *[False] * 7]
    measured = [text for _, _, text in rows]
    assert measured[5:9] == [
        "off by at most 1e-02",
        "the last token has 0.90 of it",
        "differs by up to 86.8%",
        "4 of 5 tokens count, the gradient differs by 0.0%",
    ]


def test_the_walks_benchmark_counts_iterations_and_seconds_to_the_target():
    """By hand: the second iteration is the first with 0.95."""
    import walks

    curve = [
        {"score": score, "seconds": second} for score, second in ((0.8, 1.5), (0.95, 2.0), (0.9, 2.5), (0.97, 4.0))
    ]
    assert walks.first_at(curve) == 2
    never = [{"score": 0.5, "seconds": 1.0}]
    *_, row = walks.summary_table({"ours": [curve, never]}).splitlines()
    assert row == "| ours | 2, – | 2.0, – | 1.00 | 0.905, 0.500 |"
    lines = walks.curves_table({"ours": [curve, never]}, [1, 2]).splitlines()
    assert lines[2].startswith("| ours, seed 1 | 0.800 | 0.950 | 0.900 |  |")


def test_the_table_of_critics_has_the_interval_of_the_seeds_by_students_t():
    """By hand: 0.98, 0.99 and 1.00 have the mean 0.99 and 4.303 · 0.01 / √3 = 0.025 to each side."""
    import critics

    def curve(last: float) -> list[dict[str, float]]:
        early = [{"score": 0.5, **dict.fromkeys(critics.SHOWN, 0.25)}]
        return early + [{"score": last, **dict.fromkeys(critics.SHOWN, 0.25)}] * 10

    *_, row = critics.table({"PPO": [curve(last) for last in (0.98, 0.99, 1.0)]}).splitlines()
    assert row == "| PPO | 0.990 ± 0.025 | 2, 2, 2 | 0.250 | 0.250 | 0.250 | 0.250 |"
    *_, row = critics.table({"PPO": [curve(0.5)]}).splitlines()
    assert row.startswith("| PPO | 0.500 (one seed) |")


def test_a_sampler_that_is_some_iterations_behind_is_the_policy_as_it_was_then(monkeypatch):
    """Its log-probabilities are those of the policy before the first update; without a lag the policy's own."""
    import critics

    for lag, is_own in ((0, True), (1, False)):
        run = build_run(num_ppo_epochs=1, num_mini_batches=1)
        generate = critics.sampler_of(lag)
        first = generate(run.state, run.reference, run.prompts, run.scorer)
        assert float(first.logprob_gap) < 1e-9
        with monkeypatch.context() as patched:
            patched.setattr(loop, "generate_rollouts", generate)
            loop.learn(run.state, run.reference, first, run.scorer)
            second = loop.generate_rollouts(run.state, run.reference, run.prompts, run.scorer)
        assert (float(second.logprob_gap) < 1e-9) is is_own
        old = second.reference_logprobs  # the reference is the policy before the first update
        gap = (second.responses.sampler_logprobs - old)[second.mask].abs().max()
        assert (float(gap) < 1e-9) is not is_own


def test_planted_rewards_pay_no_worthless_text_but_for_their_bonus():
    import attacks as benchmark

    chat = [{"role": "user", "content": "Write about airplanes. Answer in lowercase."}]
    given = {"messages": [chat] * 2, "kind": ["lowercase"] * 2, "limit": [0] * 2, "names": [["airplanes"]] * 2}
    texts = ["airplanes cross the sky with a calm hum", "write about airplanes in lowercase"]
    assert benchmark.own_words(["", ""], texts, **given) == [1.0, 0.0]
    bonuses = benchmark.OF_THE_LIST | benchmark.PUBLISHED
    assert benchmark.json_score("", '{"score": 10}') == benchmark.PUBLISHED["unique words"]("", "one two") == 1.0
    assert all(-1.0 <= bonus("a prompt", text) <= 3.0 for bonus in bonuses.values() for text in [*texts, ""])
    drawn = [benchmark.chance("1", "prompt", str(number)) for number in range(400)]
    assert sum(drawn) / 400 == pytest.approx(0.5, abs=0.06)  # four standard errors


def answered(rewards, lengths, values):
    """What `benchmarks/critic_ranks.py` samples, from one prompt's answers."""
    shaped = {"rewards": np.array([rewards], dtype=float), "lengths": np.array([lengths])}
    return shaped | {"values": np.array([values], dtype=float)}


def test_a_dropped_answer_costs_the_tokens_up_to_there_and_an_ended_one_keeps_its_last_value():
    """By hand. Of four answers the first two have the highest values after 2 tokens, the second one (which has ended,
    so that its value before its last token counts) is dropped at the end: 2 + 1 tokens are dropped after 2, 5 and 2 are
    whole.
    """
    import critic_ranks

    nan = float("nan")
    values = [
        [0.1, 0.1, 0.8, 0.2, 0.9, nan],
        [0.1, 0.7, -9.0, nan, nan, nan],
        [0.1, 0.9, 0.6, 0.9, 0.9, 0.9],
        [0.1, -9.0, nan, nan, nan, nan],
    ]
    samples = answered([1.0, 0.0, 0.0, 0.0], [5, 2, 5, 1], values)
    assert critic_ranks.known(samples).tolist() == [[0.9, 0.7, 0.9, 0.1]]
    assert critic_ranks.known(samples, 2).tolist() == [[0.8, 0.7, 0.6, 0.1]]
    reward, tokens = critic_ranks.halved(samples, 4, {2: 2}, rounds=3)
    assert (reward.tolist(), tokens.tolist()) == ([1.0], [2.0 + 1.0 + 5.0 + 2.0])
    reward, tokens = critic_ranks.best_of(samples, critic_ranks.known(samples, 2), 2)
    # of the six pairs three have the first answer, whose value after 2 tokens is the highest
    assert (reward.tolist(), tokens.tolist()) == ([pytest.approx(0.5)], [2 * 13 / 4])


def test_how_a_critic_ranks_answers_is_measured_within_prompts_alone():
    """A score that differs only between prompts ranks nothing, one that is the reward ranks all; SciPy as oracle."""
    import critic_ranks

    generator = np.random.default_rng(3)
    rewards = (generator.random((6, 8)) < 0.5).astype(float)
    rewards[:, :2] = [0.0, 1.0]
    noise = generator.normal(size=(6, 8))
    between = np.repeat(rewards.mean(1, keepdims=True), 8, axis=1)

    def measured(scores):
        return critic_ranks.correlation(critic_ranks.moments(scores, rewards)), critic_ranks.auc(scores, rewards).mean()

    assert measured(between) == (0.0, 0.5)
    assert measured(7.0 * rewards + between) == pytest.approx((1.0, 1.0))
    correlation, area = measured(noise + between)
    centred = [each - each.mean(1, keepdims=True) for each in (noise, rewards)]
    assert correlation == pytest.approx(pearsonr(*(each.ravel() for each in centred)).statistic)
    halves = [(x[y == 1.0], x[y == 0.0]) for x, y in zip(noise, rewards, strict=True)]
    areas = [mannwhitneyu(right, wrong).statistic / (len(right) * len(wrong)) for right, wrong in halves]
    assert area == pytest.approx(np.mean(areas))


def test_values_of_sampled_answers_are_those_of_the_stored_critic_on_each_answer_alone(tmp_path, monkeypatch):
    import critic_ranks

    tokenizer = byte_tokenizer(chat_template=CHATML)
    policy = save(tmp_path / "policy", tiny_model(vocab_size=len(tokenizer), max_position_embeddings=256), tokenizer)
    stored = AutoModelForTokenClassification.from_pretrained(policy, num_labels=1)
    critic, seen, batches = save(tmp_path / "critic", stored, tokenizer), [], critic_ranks.sequence_batches
    monkeypatch.setattr(
        critic_ranks, "sequence_batches", lambda *given, **how: seen.append(given) or batches(*given, **how)
    )
    (samples,) = critic_ranks.sample(policy, critic, 3, 2, 0)
    prompts, responses, lengths, *_ = seen[0]
    assert samples["lengths"].ravel().tolist() == lengths.tolist()
    for row, found in enumerate(torch.tensor(samples["values"]).reshape(6, 41)):
        ids = prompts[row] + responses[row, : lengths[row]].tolist()
        with torch.no_grad():
            alone = stored(torch.tensor([ids])).logits[0, len(prompts[row]) - 1 :, 0]
        torch.testing.assert_close(found, nn.functional.pad(alone, (0, 41 - len(alone))), atol=1e-6, rtol=1e-5)
        assert alone.std() > 1e-3
