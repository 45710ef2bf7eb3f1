"""Evaluation of a tiny policy, against forward passes done one response at a time, and who judges when."""

import copy
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError, DataError, RewardError
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.evaluation import policy as policy_evaluation
from ppo_rlhf.evaluation.policy import (
    EvaluationConfig,
    Evaluator,
    PolicyEvaluation,
    ResolvedJudge,
    resolve_judge,
)
from ppo_rlhf.passes.engines import generate_responses
from ppo_rlhf.ppo.run_setup import sampling_settings
from ppo_rlhf.rewards.config import RewardComponentConfig, RewardConfig
from ppo_rlhf.rewards.scorers import build_reward_scorer

WORDS = ["<eos>", *"abcdefghijklmno"]
EOS = 0
TEMPERATURE = 0.8


def count_words(prompts, completions, **columns):
    return [float(len(completion.split())) for completion in completions]


def target_share(prompts, completions, target):
    """A reward that needs a column of the prompt table."""
    return [completion.split().count(wanted) / 6 for completion, wanted in zip(completions, target, strict=True)]


def nan_judge(prompts, completions):
    return [float("nan")] * len(completions)


@pytest.fixture(scope="module")
def tokenizer():
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="o"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    # pad is EOS: whoever takes padding from ids instead of lengths fails here
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<eos>", eos_token="<eos>", padding_side="left")


def tiny_policy(seed):
    torch.manual_seed(seed)
    shape = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": len(WORDS)}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(**shape, **off, bos_token_id=EOS, eos_token_id=EOS, pad_token_id=EOS, initializer_range=0.5)
    return GPT2LMHeadModel(config).double().eval()


@pytest.fixture(scope="module")
def policies():
    return tiny_policy(0), tiny_policy(1)


@pytest.fixture(scope="module")
def prompts(tokenizer):
    texts = ["a", "b c d", "e f", "g h i j k", "a b", "c", "d e f g", "m l"]
    return PromptDataset([tokenizer(text)["input_ids"] for text in texts], texts, {"target": list("abcdabcd")})


@pytest.fixture(scope="module")
def evaluate(tokenizer, prompts):
    ppo = PPOConfig(response_length=6, temperature=TEMPERATURE, dtype="float64")
    component = RewardComponentConfig(type="function", weight=2.0, function=f"{__name__}:target_share")
    scorer = build_reward_scorer(RewardConfig(components=[component]), None, tokenizer)
    judge = ResolvedJudge(count_words, {"wordy_rate": lambda prompts, completions: [1.0] * len(completions)}, "words")

    def run(
        policy,
        reference,
        *,
        judge=judge,
        prompts=prompts,
        seed=0,
        batch_size=64,
        samples=1,
        temperature=None,
        ppo=ppo,
        engine=None,
        **how,
    ):
        trained = replace(sampling_settings(ppo, tokenizer, policy), engine=engine)
        sampling = EvaluationConfig(temperature=temperature).sampling(trained)
        evaluator = Evaluator(tokenizer, prompts, scorer, judge, ppo, sampling, seed, batch_size, samples)
        return evaluator.evaluate(policy, reference, **how)

    return run


def test_every_response_is_measured_by_reward_judge_and_rates(evaluate, policies, prompts):
    result = evaluate(*policies)
    assert result.prompts == prompts.texts
    words = [completion.split() for completion in result.completions]
    expected = [2.0 * row.count(target) / 6 for row, target in zip(words, prompts.columns["target"], strict=True)]
    assert result.rewards == pytest.approx(expected, abs=1e-6)
    assert result.judges["judge_score"].tolist() == [len(row) for row in words]
    assert result.rates["wordy_rate"].tolist() == [1.0] * len(prompts)
    # the stop token is a token but no word
    assert result.lengths.tolist() == [
        len(row) + int(stopped) for row, stopped in zip(words, result.terminated, strict=True)
    ]
    assert 0 < result.terminated.sum() < len(prompts), "both kinds of response must occur for this test to mean much"


@pytest.mark.parametrize(
    ("given", "of_kl"), [(None, TEMPERATURE), (1.7, 1.7), (0.0, TEMPERATURE)], ids=["training's", "its own", "greedy"]
)
def test_kl_is_the_summed_log_ratio_of_unpadded_forward_passes_at_the_sampling_temperature(
    evaluate, policies, prompts, tokenizer, given, of_kl
):
    policy, reference = policies
    result = evaluate(policy, reference, temperature=given)
    for row, prompt in enumerate(prompts.prompt_ids):
        response = tokenizer(result.completions[row])["input_ids"] + [EOS] * int(result.terminated[row])
        ids = torch.tensor([prompt + response])
        with torch.no_grad():
            ours, theirs = (
                (model(ids).logits[0, len(prompt) - 1 : -1] / of_kl).log_softmax(-1) for model in (policy, reference)
            )
        steps = torch.arange(len(response))
        expected = (ours - theirs)[steps, response].sum()
        assert result.kl[row] == pytest.approx(float(expected), rel=1e-9, abs=1e-9)


def test_equal_policies_give_equal_responses_and_no_kl(evaluate, policies):
    policy, _ = policies
    result, reference = evaluate(policy, copy.deepcopy(policy)), evaluate(policy, None)
    assert result.completions == reference.completions
    assert np.abs(result.kl).max() < 1e-12
    assert (reference.kl == 0.0).all()


@pytest.mark.parametrize(
    ("dtype", "has_engine", "own_passes"), [("float64", False, 0), ("bfloat16", False, 1), ("float64", True, 1)]
)
def test_the_policys_log_probabilities_are_those_of_its_sampler_unless_these_round_otherwise(
    evaluate, policies, monkeypatch, dtype, has_engine, own_passes
):
    policy, reference = policies
    passes, compute = [], policy_evaluation.compute_logprobs

    def counted(model, *given, **how):
        passes.append(model)
        return compute(model, *given, **how)

    monkeypatch.setattr(policy_evaluation, "compute_logprobs", counted)
    ppo = PPOConfig(response_length=6, temperature=TEMPERATURE, dtype=dtype, device="cpu")

    def engine(model, prompt_ids, settings):
        noise = torch.linspace(0.05, 0.95, 6 * len(prompt_ids), dtype=torch.float64).view(-1, 6)
        return generate_responses(model, prompt_ids, noise, replace(settings, engine=None))

    evaluate(policy, reference, ppo=ppo, engine=engine if has_engine else None)
    assert passes.count(reference) == 1
    assert passes.count(policy) == own_passes


def test_another_batch_size_changes_no_response_and_another_seed_does(evaluate, policies):
    whole, pieces = evaluate(*policies), evaluate(*policies, batch_size=3)
    assert pieces.completions == whole.completions
    assert pieces.kl == pytest.approx(whole.kl, abs=1e-9)
    assert evaluate(*policies, seed=1).completions != whole.completions


def test_evaluation_survives_its_table(evaluate, policies, tmp_path):
    result = evaluate(*policies)
    result.to_frame().to_parquet(tmp_path / "table.parquet")
    again = PolicyEvaluation.from_frame(pd.read_parquet(tmp_path / "table.parquet"))
    assert again.completions == result.completions
    assert again.response_ids == result.response_ids
    assert [len(ids) for ids in again.response_ids] == result.lengths.tolist()
    assert again.rates.keys() == result.rates.keys() == {"wordy_rate"}
    assert again.judges.keys() == result.judges.keys() == {"judge_score"}
    for name in ("rewards", "deciding_scores", "kl", "lengths", "terminated"):
        assert np.array_equal(getattr(again, name), getattr(result, name)), name
        assert getattr(again, name).dtype == getattr(result, name).dtype, name


def test_several_responses_to_a_prompt_stand_together_and_differ(evaluate, policies, prompts, tmp_path):
    judge = ResolvedJudge(count_words, {}, "words", {"again": count_words})
    result = evaluate(*policies, judge=judge, samples=3)
    assert result.prompts == [text for text in prompts.texts for _ in range(3)]
    assert result.by_prompt(np.array(result.completions)).shape == (len(prompts), 3)
    assert len(set(result.completions[:3])) > 1
    words = [completion.split() for completion in result.completions]
    targets = [target for target in prompts.columns["target"] for _ in range(3)]
    expected = [2.0 * row.count(target) / 6 for row, target in zip(words, targets, strict=True)]
    assert result.rewards == pytest.approx(expected, abs=1e-6)
    result.to_frame().to_parquet(tmp_path / "table.parquet")
    frame = pd.read_parquet(tmp_path / "table.parquet")
    assert frame["sample"].tolist() == [0, 1, 2] * len(prompts)
    again = PolicyEvaluation.from_frame(frame)
    assert again.samples_per_prompt == 3
    assert again.rates == {}
    assert again.judges.keys() == {"judge_score", "judge_score_again"}
    assert again.judges["judge_score_again"].tolist() == again.deciding_scores.tolist() == [len(row) for row in words]


def test_processes_can_end_an_evaluation_together_after_each_of_its_parts(evaluate, policies):
    for part in range(3):
        met: list[int] = []

        def meet(part: int = part, met: list[int] = met) -> None:
            met.append(part)
            if len(met) > part:
                raise InterruptedError

        with pytest.raises(InterruptedError):
            evaluate(*policies, meet=meet)
    met.clear()
    evaluate(*policies, meet=partial(met.append, 0))
    assert len(met) == 3


def test_an_evaluation_without_prompts_and_a_judge_that_returns_nan_are_refused(evaluate, policies, prompts):
    with pytest.raises(DataError, match="held_out_share"):
        evaluate(*policies, prompts=prompts.select([]))
    with pytest.raises(RewardError, match=r"evaluation\.judge"):
        evaluate(*policies, judge=ResolvedJudge(nan_judge, {}, "broken"))


@pytest.mark.parametrize("path", ["data/01_raw/prompts.jsonl", None])
def test_without_a_judge_the_reward_decides_which_is_said(path, tmp_path):
    judge = resolve_judge(EvaluationConfig(prompts_path=path), tmp_path)
    assert judge.judge is None
    assert not judge.rates
    assert "evaluation.judge is not set" in judge.description


def test_judge_and_rates_that_are_set_are_found(tmp_path):
    (tmp_path / "own_judges.py").write_text(
        "def brevity(prompts, completions, **columns):\n    return [-float(len(text)) for text in completions]\n"
        "def short(prompts, completions, **columns):\n    return [float(len(text) < 9) for text in completions]\n"
    )
    config = EvaluationConfig(judge="own_judges:brevity", rates={"short_rate": "own_judges:short"})
    judge = resolve_judge(config, tmp_path)
    assert judge.judge is not None
    assert judge.judge([""], ["four"]) == [-4.0]
    assert list(judge.rates) == ["short_rate"]


@pytest.mark.parametrize("reference", ["no_such_module:judge", f"{__name__}:no_such_judge"])
def test_judge_that_cannot_be_found_is_named(reference):
    with pytest.raises(RewardError, match=re.escape(reference)):
        resolve_judge(EvaluationConfig(judge=reference))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"jugde": "a:b"}, "evaluation.jugde"),
        ({"bootstrap_samples": 10_000}, "evaluation.bootstrap_samples is not a parameter"),  # it was one once
        ({"iteration_prompts": 0}, "evaluation.iteration_prompts=0"),
        ({"judge": "mine"}, r"evaluation\.judge='mine': .* write module:name"),
        ({"rates": {"short": "mine.py"}}, r"evaluation\.rates\.short='mine\.py': .* write module:name"),
        ({"rates": {"kl": "a:b"}}, "'kl' cannot name a rate"),
        ({"rates": {"Polite Rate": "a:b"}}, "'Polite Rate' cannot name a rate"),
        ({"rates": {"polite_sft": "a:b"}}, "'polite_sft' cannot name a rate"),
        ({"rates": {"a" * 242: "a:b"}}, "cannot name a rate"),
        ({"rates": {"judge_score_mine": "a:b"}}, "cannot name a rate"),
        ({"rates": {"polite_se": "a:b"}}, "cannot name a rate"),
        ({"judges": {"low": "a:b"}}, "'low' cannot name a judge"),
        ({"judges": {"Strict": "a:b"}}, "'Strict' cannot name a judge"),
        ({"judges": {"strict_sft": "a:b"}}, "'strict_sft' cannot name a judge"),
        ({"samples_per_prompt": 2, "temperature": 0.0}, "evaluation.samples_per_prompt=2"),
        ({"samples_per_prompt": 2, "pass_at": [1, 4]}, r"evaluation\.pass_at=\[1, 4\]"),
        ({"samples_per_prompt": 2, "pass_at": [2, 2]}, "evaluation.pass_at"),
        ({"pass_at": [0]}, r"evaluation\.pass_at\.0=0"),
    ],
)
def test_wrong_setting_is_named_with_its_value(given, message):
    with pytest.raises(ConfigError, match=message):
        EvaluationConfig(**given)
