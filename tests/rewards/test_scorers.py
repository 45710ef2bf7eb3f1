"""Rewards: the sequences that a reward model reads, weighted sums, settings, and users' functions."""

import asyncio
import logging
import math
import os
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ppo_rlhf.core.errors import ConfigError, ModelError, RewardError
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.reward_model import CausalLMRewardModel
from ppo_rlhf.models.tokenizers import train_word_tokenizer
from ppo_rlhf.passes.halvings import Halving
from ppo_rlhf.rewards import functions
from ppo_rlhf.rewards.config import RewardComponentConfig, RewardConfig
from ppo_rlhf.rewards.functions import call_reward_function
from ppo_rlhf.rewards.rendering import close_response
from ppo_rlhf.rewards.scorers import (
    ModelScorer,
    build_reward_scorer,
    check_scorable,
    score_by_function,
    score_sequences,
)
from ppo_rlhf.rewards.scoring import DecodedWhenRead, ResponseBatch, RewardScorer
from ppo_rlhf.runtime import log_lines, processes
from ppo_rlhf.runtime.user_functions import load_function
from tests.ppo.short_memory import ShortMemory
from tests.tiny_models import BEGIN, END, PAD, VOCABULARY, save, tiny_model, word_tokenizer

PERIOD = VOCABULARY.index(".")


class Recorder(nn.Module):
    """A reward model that records its input; the score is the sum of the ids."""

    def __init__(self, context: int = 32, dtype: torch.dtype = torch.float32, rows: int = len(VOCABULARY)) -> None:
        super().__init__()
        self.sequences: list[list[int]] = []
        self.config = SimpleNamespace(max_position_embeddings=context, pad_token_id=None, vocab_size=rows)
        self.config.get_text_config = lambda: self.config
        self.dtype, self.device = dtype, torch.device("cpu")

    def forward(self, input_ids, attention_mask=None):
        real = torch.ones_like(input_ids).bool() if attention_mask is None else attention_mask.bool()
        self.sequences += [row[mask].tolist() for row, mask in zip(input_ids, real, strict=True)]
        sums = torch.where(real, input_ids, 0).sum(dim=1, keepdim=True)
        return SimpleNamespace(logits=sums.to(self.dtype))


def batch(responses, terminated, prompts=None) -> ResponseBatch:
    tokenizer = word_tokenizer()
    prompts = prompts or [[4, 5]] * len(responses)
    return ResponseBatch(
        prompts=tokenizer.batch_decode(prompts),
        completions=tokenizer.batch_decode(responses, skip_special_tokens=True),
        columns={"wanted": ["a"] * len(responses)},
        prompt_ids=prompts,
        response_ids=responses,
        terminated=terminated,
    )


def read_by(model: Recorder, tokenizer, responses, terminated) -> list[list[int]]:
    """Return the model's sequences in the order of the batch; a stable sort by length comes before the model."""
    ModelScorer(model, tokenizer, word_tokenizer(), batch_size=1)(batch(responses, terminated))
    return model.sequences


@pytest.mark.parametrize(
    ("response", "stopped", "end", "read"),
    [
        ([6, END], True, "</s>", [6, END]),
        ([6, END], True, "<s>", [6, BEGIN]),  # the reward model's end-of-text token
        ([6, 7], False, "</s>", [6, 7]),
        ([6, PERIOD], True, "</s>", [6, PERIOD, END]),
        ([END], True, "</s>", [END]),
    ],
    ids=["stopped", "another end", "cut off", "a full stop, which is text", "empty"],
)
def test_a_response_is_closed_by_the_reward_models_end_if_it_stopped(response, stopped, end, read):
    assert read_by(Recorder(), word_tokenizer(eos_token=end), [response], [stopped]) == [[4, 5, *read]]


def test_another_vocabulary_is_decoded_and_encoded_anew():
    other = train_word_tokenizer(["t s a b c d"], 32)  # here the same words have other ids
    a, b, c = other.convert_tokens_to_ids(["a", "b", "c"])
    responses = [[6, END], [6, 6, 6]]
    assert read_by(Recorder(), other, responses, [True, False]) == [
        [a, b, c, other.eos_token_id],
        [a, b, c, c, c],
    ]


def test_scores_come_back_in_the_batchs_order_whatever_the_batch_size():
    responses = [[6] * n for n in (5, 1, 3, 2, 4)]
    expected = [9.0 + 6 * n for n in (5, 1, 3, 2, 4)]
    for size in (1, 2, 7):
        scorer = ModelScorer(Recorder(), word_tokenizer(), word_tokenizer(), batch_size=size)
        assert scorer(batch(responses, [False] * 5)).tolist() == expected


def test_scoring_halves_when_memory_runs_out_and_names_the_setting_of_its_batches(monkeypatch, caplog):
    """The scorer keeps the smaller size; a caller's halving counts for the caller alone."""
    responses, models = [[6] * n for n in (5, 1, 3, 2, 4)], (word_tokenizer(), word_tokenizer())
    scorer = ModelScorer(Recorder(), *models, batch_size=5, setting="evaluation.batch_size")
    whole, memory = batch(responses, [False] * 5), ShortMemory(monkeypatch, "scoring", most=2)
    for halving in (None, None, Halving("a rollout", "ppo.local_rollout_forward_batch_size")):
        assert scorer(whole, halving).tolist() == [9.0 + 6 * n for n in (5, 1, 3, 2, 4)]
    assert [rows for rows in memory.tried if rows > 2] == [5, 5]
    lines = [line for line in caplog.messages if line.startswith("Ran out of memory in")]
    assert [line.partition(": ")[0] for line in lines] == [
        "Ran out of memory in scoring by the reward model with 5 responses at a time; from here on half of them "
        "(evaluation.batch_size)",
        "Ran out of memory in a rollout with 5 responses at a time; from here on half of them "
        "(ppo.local_rollout_forward_batch_size)",
    ]


def test_a_response_needs_room_for_the_end_of_text_unless_its_stop_token_is_one():
    """The longest prompt has three tokens, a response two; the end-of-text token after a full stop is the sixth."""

    def check(context: int, stop_token: int) -> None:
        model = ModelScorer(Recorder(context=context), word_tokenizer(), word_tokenizer())
        check_scorable(RewardScorer([("m", 1.0, model)]), [1, 3], response_length=2, stop_token_ids=[stop_token])

    check(5, END)
    check(6, PERIOD)
    for context, stop_token in ((4, END), (5, PERIOD)):
        with pytest.raises(ModelError, match=rf" {context + 1}, .*reward model.* {context}\."):
            check(context, stop_token)


def test_a_reward_model_without_a_row_for_an_id_that_can_be_sampled_is_refused():
    """The tokenizer has 25 tokens; a configuration may name a stop token of a row without a token."""

    def check(rows: int, stop_token: int, tokenizer=None) -> None:
        model = ModelScorer(Recorder(rows=rows), tokenizer or word_tokenizer(), word_tokenizer())
        check_scorable(RewardScorer([("m", 1.0, model)]), [1, 3], response_length=2, stop_token_ids=[stop_token])

    check(25, END)
    check(30, 29)
    check(3, 29, word_tokenizer(vocabulary=VOCABULARY[:3]))  # with another vocabulary it reads the text
    for rows, stop_token, message in (
        (24, END, "id 24 but .* 24 rows"),
        (29, 29, "id 29, a stop token, but .* 29 rows"),
    ):
        with pytest.raises(ModelError, match=rf"^the policy can sample the token {message}") as refused:
            check(rows, stop_token)
        assert "\n" not in str(refused.value)


def test_a_sequence_longer_than_the_reward_models_context_is_refused():
    scorer = ModelScorer(Recorder(context=4), word_tokenizer(), word_tokenizer())
    with pytest.raises(ModelError, match=r"5 tokens.*reward model.* 4"):
        scorer(batch([[6, 7, END]], [True]))


@pytest.mark.parametrize("kind", ["ours", "classifier"])
def test_padding_does_not_change_a_models_scores(kind):
    """A transformers classifier pools at the last id that is not pad, so its pad must not occur in a text."""
    model = tiny_model("gpt2", reward=True, num_labels=1, pad_token_id=PAD)
    if kind == "ours":
        model = CausalLMRewardModel.from_causal_lm(tiny_model("gpt2"))
    sequences = [[4, 5, 6, 7, 8, END], [9, 10], [11, 12, 13, END]]
    alone = torch.cat([model.double()(torch.tensor([row])).logits[:, 0] for row in sequences])
    scores = score_sequences(model, sequences, PAD, batch_size=3)
    assert scores.dtype == torch.float64
    torch.testing.assert_close(scores, alone, rtol=0.0, atol=1e-10)


@pytest.mark.parametrize(
    ("kind", "pad", "warnings"), [("classifier", END, 1), ("classifier", PAD, 0), ("ours", END, 0)]
)
def test_one_line_warns_of_a_reward_model_that_never_reads_the_end_of_a_text(caplog, kind, pad, warnings):
    """A transformers classifier pools at the last id that is not pad; this package's model counts tokens."""
    model = tiny_model("gpt2", reward=True, num_labels=1, pad_token_id=pad)
    if kind == "ours":
        torch.manual_seed(0)  # a head by chance can score both alike
        model = CausalLMRewardModel.from_causal_lm(tiny_model("gpt2", pad_token_id=pad))
    tokenizer = word_tokenizer(pad_token=VOCABULARY[pad])
    log_lines.said.clear()
    with caplog.at_level(logging.WARNING, logger="ppo_rlhf"):
        for _ in range(2):
            ModelScorer(model, tokenizer, word_tokenizer())
    said = [line for line in caplog.messages if "never reads the end of a text" in line]
    assert len(said) == warnings
    scores = score_sequences(model, [[4, 5, 6], [4, 5, 6, END]], pad, batch_size=1)
    assert torch.allclose(*scores, rtol=1e-5, atol=0.0) == bool(warnings)


def test_the_total_is_the_weighted_sum_of_the_components():
    scorer = RewardScorer(
        [("a", 2.0, lambda b: torch.tensor([1.0, 2.0])), ("b", -0.5, lambda b: torch.tensor([4.0, 8.0]))]
    )
    scored = scorer.score(batch([[6], [7]], [False, False]))
    assert scorer.names == ["a", "b"]
    assert scored.total.tolist() == [0.0, 0.0]
    assert {name: score.tolist() for name, score in scored.components.items()} == {"a": [1.0, 2.0], "b": [4.0, 8.0]}
    assert scored.total.dtype == torch.float64


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_models_score_that_is_not_finite_is_refused(value):
    model = Recorder()
    model.forward = lambda input_ids, attention_mask=None: SimpleNamespace(
        logits=torch.full((len(input_ids), 1), value)
    )
    scorer = RewardScorer([("m", 1.0, ModelScorer(model, word_tokenizer(), word_tokenizer()))], model)
    with pytest.raises(RewardError, match=r"reward model.*response 0"):
        scorer.score(batch([[6]], [False]))


def test_a_reward_model_is_read_and_needed_only_for_a_component_of_its_type():
    config = RewardConfig(components=[{"type": "function", "function": "math:fsum", "name": "f"}])
    assert not config.needs_model
    scorer = build_reward_scorer(config, PretrainedHandle("no/such/model"), word_tokenizer())
    assert scorer.model is None
    with pytest.raises(ConfigError, match="reward_model_path"):
        build_reward_scorer(RewardConfig(components=[{"type": "model"}]), None, word_tokenizer())


def test_the_reward_model_and_functions_are_built_from_their_configuration(tmp_path):
    source = save(tmp_path / "reward", CausalLMRewardModel.from_causal_lm(tiny_model()))
    config = RewardConfig(
        components=[
            {"type": "model", "weight": 0.5},
            {"type": "function", "function": f"{__name__}:length", "weight": 2.0},
        ]
    )
    scorer = build_reward_scorer(config, PretrainedHandle(source), word_tokenizer(), dtype=torch.float64)
    scored = scorer.score(batch([[6, 7, END], [8]], [True, False]))
    model = PretrainedHandle(source).reward_model(torch.float64)
    expected = torch.cat([model(torch.tensor([ids])).logits[:, 0] for ids in ([4, 5, 6, 7, END], [4, 5, 8])])
    torch.testing.assert_close(scored.components["model"], expected, rtol=0.0, atol=1e-10)
    assert scored.components["length"].tolist() == [2.0, 1.0]
    torch.testing.assert_close(scored.total, 0.5 * expected + 2.0 * torch.tensor([2.0, 1.0]).double())


@pytest.mark.parametrize(
    ("components", "message"),
    [
        ([], "reward.components"),
        ([{"type": "function"}], "function: module:name"),
        ([{"type": "model", "function": "a:b"}], "function=a:b"),
        ([{"type": "function", "function": "a.b"}], "'a.b'"),
        ([{"type": "model"}, {"type": "model"}], "called model"),
        ([{"type": "http"}], "type"),
        ([{"type": "model", "weight": math.inf}], "weight"),
        ([{"type": "model", "weigth": 1.0}], "weigth is not a parameter"),
    ],
)
def test_an_unacceptable_reward_is_refused(components, message):
    with pytest.raises(ConfigError, match=message):
        RewardConfig(components=components)


def test_a_components_metric_is_called_by_its_name_or_its_function():
    titles = [
        RewardComponentConfig(type="model").title,
        RewardComponentConfig(type="function", function="a.b:c").title,
        RewardComponentConfig(type="function", function="a.b:c", name="Ünï 0.5-x").title,
    ]
    assert titles == ["model", "c", "Ünï 0.5-x"]


@pytest.mark.parametrize("name", ["helpful (0-1)", "50%", "a/b", "", "a\n", "..", "a" * 244])
def test_a_name_that_cannot_be_a_metric_is_refused(name):
    with pytest.raises(ConfigError, match="component of reward"):
        RewardComponentConfig(type="model", name=name)


def length(prompts, completions, **columns):
    return [len(completion.split()) for completion in completions]


def test_a_function_is_found_in_the_project_and_its_src(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "rewards_of_mine.py").write_text("def score(prompts, completions, **columns):\n    return [1.0]\n")
    (tmp_path / "src" / "rewards_of_ours.py").write_text("def score(prompts, completions):\n    return [2.0]\n")
    assert load_function("rewards_of_mine:score", tmp_path)([], []) == [1.0]
    assert load_function("rewards_of_ours:score", tmp_path)([], []) == [2.0]


def test_the_project_is_the_folder_above_that_has_a_pyproject(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "rewards_from_above.py").write_text("score = sum\n")
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    assert load_function("rewards_from_above:score")([1.0, 2.0]) == 3.0


def test_a_function_imports_its_neighbours_when_it_is_called_and_nobody_else_does(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "neighbour_of_a_reward.py").write_text("one = 1.0\n")
    (tmp_path / "src" / "neighbour_in_src.py").write_text("two = 2.0\n")
    (tmp_path / "rewards_with_neighbours.py").write_text(
        "def score(completions, label):\n"
        "    import neighbour_in_src, neighbour_of_a_reward\n"
        "    return [neighbour_of_a_reward.one + neighbour_in_src.two + label[0]]\n"
    )
    before = list(sys.path)
    function = load_function("rewards_with_neighbours:score", tmp_path)
    assert sys.path == before
    assert call(function, completions=["x"], label=[3.0], other=["a"]) == [6.0]
    assert sys.path == before


def test_what_a_function_of_a_project_raises_is_told_with_its_place(tmp_path):
    (tmp_path / "rewards_that_fail.py").write_text("def score(prompts, completions):\n    return 1 / 0\n")
    with pytest.raises(RewardError, match=r"raised ZeroDivisionError: division by zero \(rewards_that_fail.py, line 2"):
        call(load_function("rewards_that_fail:score", tmp_path))


@pytest.mark.parametrize(
    ("source", "reference", "message"),
    [
        ("", "no_such_module:score", "there is no module no_such_module"),
        ("", "broken_a:score", "does not exist there"),
        ("score = 1", "broken_b:score", "is not a function"),
        ("import no_such_library", "broken_c:score", "No module named 'no_such_library'"),
        ("\nraise ValueError('a\\nb')", "broken_d:score", "ValueError: a b (broken_d.py, line 2)"),
        ("def (", "broken_e:score", "SyntaxError"),
        ("import sys\nsys.exit(2)", "broken_f:score", "SystemExit: 2 (broken_f.py, line 2)"),
        ("", "broken_g", "module:name"),
        ("", "broken_h.py:score", "module:name"),
    ],
)
def test_a_function_that_cannot_be_found_is_refused_in_one_line(tmp_path, source, reference, message):
    module = reference.partition(":")[0]
    if module.isidentifier() and module != "no_such_module":
        (tmp_path / f"{module}.py").write_text(source)
    with pytest.raises(RewardError) as caught:
        load_function(reference, tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


class Unprintable:
    def __float__(self):
        raise KeyError("no number")

    __repr__ = __float__


def call(function, completions=("x", "y"), **columns):
    return call_reward_function(function, "mine", ["p"] * len(completions), list(completions), columns)


def test_a_function_gets_the_columns_that_it_takes():
    def greedy(prompts, completions, **columns):
        return [float(len(columns)), float(columns["label"][1])]

    def choosy(prompts, completions, label):
        return [float(value) for value in label]

    def plain(prompts, completions):
        return [0.0, 1.0]

    assert call(greedy, label=[3, 4], other=["a", "b"]) == [2.0, 4.0]
    assert call(choosy, label=[3, 4], other=["a", "b"]) == [3.0, 4.0]
    assert call(plain, label=[3, 4]) == [0.0, 1.0]


def test_what_a_function_changes_in_its_arguments_no_other_component_sees():
    """The first function changes its arguments in place, the second stores them. Two rows share one list."""
    given: list[dict] = []

    def changing(prompts, completions, turns, completion_ids, wanted, notes, facts):
        for row in (*turns, *completion_ids, *notes, *[fact["n"] for fact in facts]):
            row.append(0)
        lengths = [float(len(row)) for row in notes]
        for values in (prompts, completions, wanted, facts):
            values[:] = [""] * len(values)
        return lengths

    def keeping(prompts, completions, turns, completion_ids, **columns):
        given.append({"prompts": prompts, "completions": completions, "turns": turns, "ids": completion_ids, **columns})
        return [0.0, 0.0]

    note = ["yes"]
    columns = {"wanted": ["a", "b"], "notes": [note, note], "facts": [{"n": [1, 2]}, {"n": []}]}
    of_rows = ResponseBatch(["p", "q"], ["x", "y"], columns, [[4], [5]], [[6], [7]], [False] * 2, [["x"], ["y"]])
    components = [(f.__name__, 1.0, partial(score_by_function, f, f.__name__)) for f in (changing, keeping)]
    assert RewardScorer(components).score(of_rows).total.tolist() == [2.0, 2.0]
    assert given == [
        {"prompts": ["p", "q"], "completions": ["x", "y"], "turns": [["x"], ["y"]], "ids": [[6], [7]]}
        | {"wanted": ["a", "b"], "notes": [["yes"], ["yes"]], "facts": [{"n": [1, 2]}, {"n": []}]}
    ]


def test_prompts_and_completions_go_in_by_name():
    def turned(completions, prompts):
        return [float(prompts == ["p", "p"]), float(completions == ["x", "y"])]

    def of_trl(completions, **columns):
        return [float(columns["prompts"] == ["p", "p"]), float(completions == ["x", "y"] and "label" in columns)]

    def completions_alone(completions):
        return [1.0, float(completions == ["x", "y"])]

    for function in (turned, of_trl, completions_alone):
        assert call(function, completion=["a", "b"], label=[3, 4]) == [1.0, 1.0]


def test_a_function_with_arguments_of_other_names_is_refused_with_the_names_to_choose_from():
    def other_names(prompt, completion, **columns):
        return [1.0, 1.0]

    def positional(prompts, completions, /):
        return [1.0, 1.0]

    for function in (other_names, positional):
        with pytest.raises(RewardError, match=r"^reward function mine .*\(prompts, completions, "):
            call(function, label=[3, 4])
    with pytest.raises(RewardError, match=r"'answer'.*completion_ids, turns and .*: label\.$"):
        call(lambda completions, answer: [1.0, 1.0], label=[3, 4])


@pytest.mark.parametrize("result", [[1, 0], (True, False), torch.tensor([1.0, 0.0])])
def test_numbers_of_any_kind_are_taken(result):
    assert call(lambda prompts, completions: result) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0], "1 values for 2 responses"),
        ([1.0, math.nan], "nan for response 1"),
        ([math.inf, 1.0], "inf for response 0"),
        ([1.0, -1e39], r"-1e\+39 for response 1"),
        ([1.0, None], "None for response 1"),
        ([1.0, "a"], "'a' for response 1"),
        (["1", 1.0], "'1' for response 0"),
        ([10**5000, 1.0], "a value of type int for response 0"),
        ([1.0, Unprintable()], "a value of type Unprintable for response 1"),
        (3.0, "a float"),
    ],
)
def test_a_result_that_is_not_one_finite_number_a_response_is_refused(result, message):
    with pytest.raises(RewardError, match=f"reward function mine returned {message}"):
        call(lambda prompts, completions: result)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("one\n two"), "ValueError: one two"),
        (SystemExit(3), "SystemExit: 3"),
        (MemoryError(), "MemoryError"),
        (asyncio.CancelledError("late"), "CancelledError: late"),
        (GeneratorExit("odd"), "GeneratorExit: odd"),
    ],
)
def test_an_exception_inside_a_function_is_one_line_with_its_place(error, told):
    def broken(prompts, completions):
        raise error

    place = r"\(test_scorers.py, line \d+\)"
    with pytest.raises(RewardError, match=rf"^reward function mine raised {told} {place}\. Traceback: \S+$") as caught:
        call(broken)
    assert "in broken" in written(caught.value)


def written(error: RewardError) -> str:
    """Return the text of the traceback file that the error names, and delete the file."""
    file = Path(str(error).rpartition("Traceback: ")[2])
    report = file.read_text()
    file.unlink()
    return report


def test_an_exception_names_the_row_that_the_function_was_at():
    def of_one(text):
        return 1 / len(text.split())

    def broken(prompts, completions):
        return [of_one(text) for text in completions]

    async def asynchronous(prompts, completions):
        return await asyncio.gather(*(asyncio.to_thread(of_one, text) for text in completions))

    prompts = ["p 0", "p 1", "p 2"]
    for function in (broken, asynchronous):
        with pytest.raises(RewardError, match=r"at row 1, prompt 'p 1', response ''\. Traceback") as caught:
            call_reward_function(function, "mine", prompts, ["x", "", "z"], {})
        assert written(caught.value).startswith("Row 1\nPrompt: p 1\nResponse: \n\nTraceback")


def test_a_function_that_would_end_the_process_is_refused():
    def leaves(prompts, completions):
        sys.exit(3)

    with pytest.raises(RewardError, match=r"raised SystemExit: 3") as caught:
        call(leaves)
    written(caught.value)


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        (SystemExit, 0, ""),
        (SystemExit(3), 3, ""),
        (SystemExit("done"), 1, "done\n"),
        (ValueError("no"), 1, "ValueError: no\n"),
        (None, 1, "ends here.\n"),
    ],
)
def test_a_forked_worker_that_exits_as_python_does_ends_alone(end, code, said, capfd):
    def forks(prompts, completions):
        child = os.fork()
        if child == 0:
            if end is not None:
                raise end
            return [0.0, 0.0]
        return [float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))] * 2

    parent = os.getpid()
    try:
        scores = call(forks)
    finally:
        if os.getpid() != parent:
            os._exit(99)  # otherwise the forked process would continue the tests
    assert scores == [code, code]
    assert capfd.readouterr().err.endswith(said)


def test_a_function_that_does_not_answer_is_named_with_its_batch(monkeypatch, caplog):
    monkeypatch.setattr(functions, "warn_if_slow", partial(processes.warn_if_slow, seconds=0.01))

    def slow(prompts, completions):
        time.sleep(0.2)
        return [0.0, 0.0]

    assert call(slow) == [0.0, 0.0]
    (line,) = caplog.messages
    assert line.startswith("reward function mine (2 responses to ['p'], …) has not answered for ")


MEDDLES = """
import os, tempfile, torch

def meddle(place):
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.set_float32_matmul_precision("medium")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)

meddle("import")

def score(prompts, completions):
    meddle("call")
    if completions[0] == "fail":
        raise ValueError("late")
    return [1.0] * len(completions)
"""


def test_what_a_function_leaves_changed_in_torch_and_the_working_directory_is_put_back(tmp_path):
    def state():
        return (
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.get_num_threads(),
            torch.get_float32_matmul_precision(),
            Path.cwd(),
        )

    before = state()
    (tmp_path / "rewards_that_meddle.py").write_text(MEDDLES)
    function = load_function("rewards_that_meddle:score", tmp_path)
    assert state() == before
    assert call(function) == [1.0, 1.0]
    assert state() == before
    for plain in (function, sys.modules["rewards_that_meddle"].score):  # PPOTrainer is given the function itself
        with pytest.raises(RewardError, match="late"):
            call(plain, completions=["fail"])
        assert state() == before


def test_an_episode_that_is_cut_off_after_the_stop_token_of_a_turn_has_no_end_of_text():
    special = frozenset({2, 9})
    assert close_response([5, 9, 6, 7, 9], False, [2], special, has_turns=True) == [5, 9, 6, 7]
    assert close_response([5, 9, 6, 7, 9], True, [2], special, has_turns=True) == [5, 9, 6, 7, 2]
    assert close_response([5, 6], False, [2], special, has_turns=True) == [5, 6]
    assert close_response([5, 9], False, [2], special) == [5, 9]  # a sampled token that is not a stop token of this run


def test_texts_are_decoded_at_the_first_look_and_only_where_a_function_is_called(monkeypatch):
    looked: list[int] = []
    texts = DecodedWhenRead(lambda: looked.append(1) or ["a b", "c"])
    given = replace(batch([[4, 5], [6]], [True, True]), completions=texts)
    scorer = build_reward_scorer(
        RewardConfig(
            components=[RewardComponentConfig(type="function", function="tests.rewards.test_scorers:letters")]
        ),
        None,
        word_tokenizer(),
    )
    with monkeypatch.context() as other:  # the main process calls it; another process gets the result
        other.setattr(processes, "on_main", lambda _: [7.0, 8.0])
        assert scorer.score(given).total.tolist() == [7.0, 8.0]
    assert looked == []
    assert scorer.score(given).total.tolist() == [3.0, 1.0]
    assert looked == [1]
    assert given.all_columns["turns"] == [["a b"], ["c"]]
    assert texts == ["a b", "c"]
    assert texts[:1] == ["a b"]
    assert [*texts, "d"] == texts + ["d"]  # noqa: RUF005  # a user's function may add lists
    assert looked == [1]


def letters(completions: list[str], **_: object) -> list[float]:
    assert type(completions) is list
    return [float(len(text)) for text in completions]
