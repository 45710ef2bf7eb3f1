"""The pipeline `evaluation` on tiny models from disk, its parameters, and tables that survive their files."""

import itertools
import json
import logging
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from kedro.config import OmegaConfigLoader
from kedro.io import AbstractDataset
from scipy.stats import binom
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ppo_rlhf.checkpoints.model_card import BEGIN, END
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import DataError, ModelError
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.data.prompts import PromptsConfig
from ppo_rlhf.data.sources import table_of
from ppo_rlhf.evaluation.comparison import conclude
from ppo_rlhf.evaluation.exploitation import EXPLOITS, LEVEL
from ppo_rlhf.evaluation.policy import EvaluationConfig
from ppo_rlhf.evaluation.since_best import PROMPTS as CHOICE_PROMPTS
from ppo_rlhf.evaluation.verdict import Verdict
from ppo_rlhf.models.directories import CARD
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.pipelines.evaluation import create_pipeline
from ppo_rlhf.pipelines.evaluation.nodes import (
    _load_reference,
    choose_prompts,
    compare_policies,
    measure_reference_texts,
    pair_samples,
)
from ppo_rlhf.pipelines.ppo.nodes import prepare_prompts
from ppo_rlhf.reporting.wording import headline, say_verdict
from ppo_rlhf.rewards.config import RewardComponentConfig, RewardConfig
from ppo_rlhf.runtime.names import EXPORTED, HELD_OUT_DEMONSTRATIONS
from ppo_rlhf.settings import CONFIG_LOADER_ARGS
from ppo_rlhf.supervised.demonstrations import DataPreparationConfig
from tests.evaluation.test_comparison import evaluation
from tests.pipelines.support import outputs_of
from tests.tiny_models import DATED_TEMPLATE, save, set_today, tiny_model, word_tokenizer

PROJECT = Path(__file__).parents[2]
WORDS = ["<eos>", *"abcdefghijk"]
PROMPTS = ["a", "b c", "d e f", "g h", "i", "j k"]
COLUMNS = {
    "evaluation_summary": {
        *("eval/win_rate", "eval/win_rate_low", "eval/win_rate_high", "eval/judge_score", "eval/judge_score_sft"),
        *(
            "eval/reward",
            "eval/reward_sft",
            "eval/kl",
            "eval/response_length",
            "eval/distinct_2",
            "eval/distinct_2_sft",
        ),
        *(f"eval/{name}{side}_se" for name in ("judge_score", "reward", "wordy_rate") for side in ("", "_sft")),
        *("eval/kl_se", "eval/response_length_se"),
        *("eval/wordy_rate", "eval/wordy_rate_sft", "prompts", "decided_by", "exploits"),
        *("verdict", "eval/verdict", "by_trained_reward", "wins", "losses", "conditions"),
        "trained_prompts",
    },
    "sample_pairs": {
        *("chosen", "outcome", "prompt", "sft_response", "ppo_response", "sft_score", "ppo_score", "ppo_kl"),
    },
}


def letter_a(prompts, completions, **columns):
    return [float(completion.count("a")) for completion in completions]


def word_count(prompts, completions, **columns):
    return [float(len(completion.split())) for completion in completions]


def is_wordy(prompts, completions, **columns):
    return [float(len(completion.split()) > 2) for completion in completions]


calls = itertools.count()


def moody(prompts, completions, **columns):
    """Scores nothing twice the same, as a model does with the same text in another batch, only more."""
    return [float(next(calls)) for _ in completions]


def save_policy(folder, seed):
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<eos>", eos_token="<eos>")
    torch.manual_seed(seed)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = LlamaConfig(vocab_size=len(WORDS), max_position_embeddings=32, initializer_range=0.5, **shape, **special)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return PretrainedHandle(str(folder))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    sft_policy = save_policy(folder / "sft", 0)
    tokenizer = sft_policy.tokenizer()
    prompts = PromptDataset([tokenizer(text)["input_ids"] for text in PROMPTS], PROMPTS, {})
    reward = RewardComponentConfig(type="function", function=f"{__name__}:letter_a")
    return {
        "sft_policy": sft_policy,
        "ppo_policy": save_policy(folder / "ppo", 1),
        "reward_model": None,
        "evaluation_prompts": prompts.to_frame(),
        "raw_evaluation_prompts": None,
        "raw_reference_texts": None,
        "evaluation_demonstrations": None,
        "training_prompts": None,
        "training_history": pd.DataFrame(),
        "params:prompts": PromptsConfig(),
        "params:data_preparation": DataPreparationConfig(),
        "params:ppo": PPOConfig(response_length=5, temperature=1.0),
        "params:reward": RewardConfig(components=[reward]),
        "params:evaluation": EvaluationConfig(
            judge=f"{__name__}:word_count",
            rates={"wordy_rate": f"{__name__}:is_wordy"},
            prompts_path="own.jsonl",
        ),
    }


def summary_of(outputs, inputs, **changed):
    """What the node `compare_policies` says of tables that are there."""
    given = {name.removeprefix("params:"): value for name, value in {**inputs, **changed}.items()}
    given = {"trained_prompts": 0, "chosen_prompts": given["evaluation_prompts"], **given}
    named = (
        "sft_policy",
        "chosen_prompts",
        "evaluation_prompts",
        "trained_prompts",
        "training_history",
        "ppo",
        "reward",
        "evaluation",
    )
    tables = {name: outputs[name] for name in ("sft_evaluation", "ppo_evaluation", "reference_losses")}
    return compare_policies(**tables, **{name: given[name] for name in named})["evaluation_summary"]


def run_evaluation(inputs):
    return outputs_of(create_pipeline(), inputs)


@pytest.fixture(scope="module")
def outputs(inputs):
    return run_evaluation(inputs)


def test_both_policies_answer_every_prompt_and_sft_has_no_kl_from_itself(outputs):
    for name in ("sft_evaluation", "ppo_evaluation"):
        assert outputs[name]["prompt"].tolist() == PROMPTS
        words = [float(len(text.split())) for text in outputs[name]["response"]]
        assert outputs[name]["judge_score"].tolist() == words
        assert outputs[name]["reward"].tolist() == [text.count("a") for text in outputs[name]["response"]]
    assert (outputs["sft_evaluation"]["kl"] == 0.0).all()
    assert (outputs["ppo_evaluation"]["kl"] != 0.0).any()


@pytest.mark.parametrize("stored", ["stored", None])
def test_prompts_that_are_given_are_evaluated_instead_of_stored_ones(inputs, stored):
    given = table_of({"question": ["k", "j i", "h"], "level": [1, 2, 3]})
    changed = {
        "raw_evaluation_prompts": given,
        "params:prompts": PromptsConfig(column="question", max_held_out=2),
        **({} if stored else {"evaluation_prompts": None}),  # the pipeline ppo has not run here
    }
    outputs = run_evaluation({**inputs, **changed})
    for name in ("sft_evaluation", "ppo_evaluation"):
        assert outputs[name]["prompt"].tolist() == ["k", "j i"]
    assert outputs["evaluation_summary"]["prompts"] == 2
    chosen = PromptDataset.from_frame(outputs["chosen_prompts"])
    assert (chosen.prompt_ids, chosen.columns["level"]) == ([[11], [10, 9]], [1, 2])


def test_stored_prompts_with_the_tokens_of_another_tokenizer_are_refused(inputs, tmp_path):
    """A truncated prompt and one without the other tokenizer's BOS are no other tokens."""
    stored, policy, others = inputs["evaluation_prompts"], inputs["sft_policy"], (inputs["params:ppo"], PromptsConfig())
    cut = stored.assign(prompt_ids=[list(ids)[-2:] for ids in stored["prompt_ids"]])
    assert choose_prompts(cut, None, None, policy, *others)[0] is cut
    other = PretrainedHandle(save(tmp_path / "other", tiny_model(), word_tokenizer()))
    with pytest.raises(DataError, match=r"other tokens than .*other's tokenizer.* Set evaluation_prompts_path"):
        choose_prompts(stored, None, None, other, *others)


def test_given_prompts_that_were_trained_on_are_counted_and_the_result_says_so(inputs, caplog):
    changed = {
        "raw_evaluation_prompts": table_of({"prompt": ["k", "a", "j i", "b c"]}),
        "training_prompts": pd.DataFrame({"prompt": ["a", "b c", "d"]}),
    }
    outputs = run_evaluation({**inputs, **changed})
    assert outputs["evaluation_summary"]["trained_prompts"] == 2
    assert "PPO trained on 2 of these 4 prompts: they are not held-out." in caplog.messages
    assert "PPO trained on 2 of the evaluation prompts" in outputs["model_card"][1]


def test_a_template_that_prints_the_date_makes_no_other_prompts_the_next_day(inputs, outputs, tmp_path, monkeypatch):
    """Prompts that were trained on are counted, and win rates can be compared."""
    policy = PretrainedHandle(save(tmp_path / "dated", tiny_model(), word_tokenizer(chat_template=DATED_TEMPLATE)))
    chats = [[{"role": "user", "content": text}] for text in "abc"]
    ppo, prompts = inputs["params:ppo"], PromptsConfig()
    set_today(monkeypatch, 3)
    first, _ = choose_prompts(None, table_of({"prompt": chats}), None, policy, ppo, prompts)
    trained = prepare_prompts(table_of({"prompt": chats}), None, policy, ppo, prompts)["training_prompts"]
    assert len(trained) == 2
    set_today(monkeypatch, 4)
    turned = [[dict(reversed(message.items())) for message in chat] for chat in chats]  # the keys of messages
    second, count = choose_prompts(None, table_of({"prompt": turned}), trained, policy, ppo, prompts)
    assert count == 2
    assert [table["prompt"][0][:2] for table in (first, second)] == ["03", "04"]
    of_days = [first, choose_prompts(None, table_of({"prompt": chats}), None, policy, ppo, prompts)[0]]
    conditions = [
        summary_of(outputs, inputs, sft_policy=policy, chosen_prompts=table)["conditions"] for table in of_days
    ]
    assert conditions[0] == conditions[1]
    other = choose_prompts(None, table_of({"prompt": chats[::-1]}), None, policy, ppo, prompts)[0]
    assert summary_of(outputs, inputs, sft_policy=policy, chosen_prompts=other)["conditions"] != conditions[0]


def test_a_prompt_that_was_trained_on_with_other_tools_is_not_counted(inputs, tmp_path, monkeypatch):
    """Another day prints another date, so messages and tools are compared, not the rendered text."""
    template = f"{DATED_TEMPLATE}{{% for tool in tools or [] %}}{{{{ tool.function.name }}}} {{% endfor %}}"
    policy = PretrainedHandle(save(tmp_path / "dated", tiny_model(), word_tokenizer(chat_template=template)))
    ppo, settings, chat = inputs["params:ppo"], PromptsConfig(held_out_share=0.3), [{"role": "user", "content": "a"}]
    tools = [[{"name": name}] for name in "bcd"]
    set_today(monkeypatch, 3)
    prepared = prepare_prompts(table_of({"prompt": [chat] * 3, "tools": tools}), None, policy, ppo, settings)
    trained = prepared["training_prompts"]
    assert len(trained) == 2
    set_today(monkeypatch, 4)
    given = table_of({"prompt": [chat] * 4, "tools": [json.dumps(each) for each in [*tools, [{"name": "e"}]]]})
    assert choose_prompts(None, given, trained, policy, ppo, settings)[1] == 2


def test_a_fall_since_the_best_evaluation_reaches_the_summary(inputs, outputs):
    for found, least, expected in (
        (1.0, 0.001, {"exploits": True}),
        (0.0, 0.25, {"exploits": False, "untested_p": 0.25}),
    ):
        rows = {"iteration": [1, 2, 3], EXPLOITS: [0.0, found, None], "eval/since_best_p_min": [0.1, least, None]}
        history = pd.DataFrame(rows | {LEVEL: [0.01, 0.01, None], CHOICE_PROMPTS: [4.0, 4.0, None]})
        summary = summary_of(outputs, inputs, training_history=history)
        assert {name: value for name, value in summary.items() if name in ("exploits", "untested_p")} == expected
        assert "stopped_after" not in summary
    history = pd.DataFrame(rows | {EXPLOITS: [0.0, 1.0, None], EXPORTED: [None, 0.0, None], CHOICE_PROMPTS: [4.0] * 3})
    summary = summary_of(outputs, inputs, training_history=history)
    assert summary["exploits"] is False  # not the policy that is evaluated
    assert (summary["stopped_after"], summary["exported_iteration"], summary["choice_prompts"]) == (2, 0, 4)
    assert "unchosen_prompts" not in summary  # SFT's own weights: nothing was chosen


def table_of_prompts(texts):
    return PromptDataset([[1]] * len(texts), list(texts), {}).to_frame()


def tables_of(texts, scores):
    """Both policies' evaluations: PPO's scores, and SFT's 0.5, on these prompts."""
    sides = ([0.5] * len(texts), scores)
    sft, ppo = (evaluation(np.zeros(len(texts)), side, prompts=list(texts)).to_frame() for side in sides)
    return {"sft_evaluation": sft, "ppo_evaluation": ppo, "reference_losses": pd.DataFrame()}


def chosen_by(number):
    """The history of a run that an evaluation on the first of its prompts stopped, with the policy of iteration 1."""
    return pd.DataFrame({"iteration": [1, 2], EXPORTED: [None, 1.0], CHOICE_PROMPTS: [float(number)] * 2})


def half_favoured(number):
    """Scores of a policy that wins each prompt of the first half, and of the others as many as it loses."""
    return [1.0] * (number // 2) + [float(row % 2) for row in range(number - number // 2)]


@pytest.mark.parametrize(("number", "verdict"), [(80, "no_clear_difference"), (20, "no_clear_difference"), (18, None)])
def test_a_chosen_policy_is_judged_on_the_prompts_that_took_no_part_in_the_choice(inputs, number, verdict):
    """With fewer than ten others there is no verdict; the calculator has 80 prompts."""
    texts = [f"p{row}" for row in range(number)]
    changed = {"training_history": chosen_by(number // 2), "evaluation_prompts": table_of_prompts(texts)}
    summary = summary_of(tables_of(texts, half_favoured(number)), inputs, **changed)
    assert summary["verdict"] == (verdict or "too_few_prompts")
    assert summary["unchosen_prompts"] == number // 2
    assert summary["prompts"] == (number // 2 if verdict else number)
    assert (summary["eval/win_rate"] == 0.5) is (verdict is not None)
    assert summary["eval/verdict"] == 0.0


def test_prompts_that_chose_a_policy_are_told_by_their_text(inputs):
    """Prompts in another order, with one more; prompts of a run whose table is gone; and a run without a choice."""
    stored = [f"p{row}" for row in range(80)]
    given, tables = ["new", *stored[::-1]], tables_of(["new", *stored[::-1]], [1.0, *half_favoured(80)[::-1]])
    changed = {"training_history": chosen_by(40), "chosen_prompts": table_of_prompts(given)}
    summary = summary_of(tables, inputs, **changed, evaluation_prompts=table_of_prompts(stored))
    assert (summary["unchosen_prompts"], summary["prompts"], summary["wins"]) == (41, 41, 21)
    unknown = summary_of(tables, inputs, **changed, evaluation_prompts=None)
    assert (unknown["unchosen_prompts"], unknown["verdict"]) == (0, "too_few_prompts")
    not_chosen = summary_of(tables, inputs, chosen_prompts=table_of_prompts(given))
    assert (not_chosen["verdict"], not_chosen["prompts"]) == ("better", 81)


def times_called_better(number: int, choose_from: int, runs: int, *, apart: bool) -> int:
    """How many of some runs are said to beat SFT, of a policy that is as good as SFT: the one of its best evaluation.

    The choice is by half of the prompts; the verdict uses the other half, or as before all of them (`apart` False).
    Between evaluations and prompts the noise is normal; prompts differ in difficulty.
    """
    found, rng = 0, np.random.default_rng([number, choose_from])
    for _ in range(runs):
        easy = rng.normal(size=number)
        sft, *tried = easy + rng.normal(size=(1 + choose_from, number))
        chose = np.arange(number) < (number // 2 if apart else number)
        best = max(tried, key=lambda scores: scores[chose].mean())
        used = ~chose if apart else chose
        policies = (evaluation(np.zeros(number), scores).of_prompts(used) for scores in (best, sft))
        found += conclude(*policies, by_trained_reward=False)["verdict"] == Verdict.BETTER
    return found


@pytest.mark.parametrize(("number", "choose_from"), [(80, 20), (200, 5)])
def test_the_best_of_many_equal_policies_is_rarely_said_to_beat_sft(number, choose_from):
    """Judged on the prompts that chose them, 11 % of the best of 20 were said to beat SFT."""
    assert times_called_better(number, choose_from, 300, apart=True) <= binom.ppf(0.999, 300, 0.025)


@pytest.mark.slow
@pytest.mark.parametrize("number", [20, 80, 200, 512])
@pytest.mark.parametrize("choose_from", [1, 5, 20])
def test_at_most_a_fortieth_of_chosen_equal_policies_is_said_to_beat_sft(number, choose_from):
    assert times_called_better(number, choose_from, 2000, apart=True) <= binom.ppf(0.999, 2000, 0.025)


def test_memory_that_ran_out_while_training_reaches_the_summary(inputs, outputs):
    rows = {"iteration": [1, 2], "memory/update_halvings": [None, 2.0]}
    summary = summary_of(outputs, inputs, training_history=pd.DataFrame(rows))
    assert summary["update_halvings"] == 2
    assert "rollout_halvings" not in summary


def test_summary_holds_the_metrics_and_who_decided(outputs):
    summary = outputs["evaluation_summary"]
    assert set(summary) == COLUMNS["evaluation_summary"]
    assert summary["prompts"] == len(PROMPTS)
    assert summary["decided_by"] == f"the judge {__name__}:word_count"
    sft, ppo = (outputs[name]["judge_score"] for name in ("sft_evaluation", "ppo_evaluation"))
    assert summary["eval/win_rate"] == pytest.approx((ppo > sft).mean() + 0.5 * (ppo == sft).mean(), abs=1e-12)
    assert set(outputs["sample_pairs"].columns) == COLUMNS["sample_pairs"]


def perplexity_of(policy, texts):
    """By transformers' own loss, text for text; the end of text is one of a text's tokens."""
    model, tokenizer, losses, tokens = policy.causal_lm().double(), policy.tokenizer(), [], []
    for text in texts:
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            losses.append(float(model(ids, labels=ids).loss) * (ids.shape[1] - 1))
        tokens.append(ids.shape[1] - 1)
    return math.exp(sum(losses) / sum(tokens))


@pytest.mark.parametrize("source", ["own.jsonl", HELD_OUT_DEMONSTRATIONS])
def test_the_perplexity_of_reference_texts_is_in_summary_and_table(inputs, outputs, source):
    texts = ["a b c d", "e", "j i h g f", "c c c c c c c c"]
    named = {"params:evaluation": replace(inputs["params:evaluation"], reference_texts=source)}
    if source == HELD_OUT_DEMONSTRATIONS:
        named["evaluation_demonstrations"] = pd.DataFrame({"text": texts})
    else:
        named["raw_reference_texts"] = table_of({"text": texts})
    found = run_evaluation({**inputs, **named})
    summary = found["evaluation_summary"]
    expected = {name: perplexity_of(inputs[f"{name}_policy"], texts) for name in ("sft", "ppo")}
    assert summary["eval/reference_perplexity"] == pytest.approx(expected["ppo"], rel=1e-5)
    assert summary["eval/reference_perplexity_sft"] == pytest.approx(expected["sft"], rel=1e-5)
    change = math.log(expected["ppo"] / expected["sft"])
    assert summary["eval/reference_nll_change"] == pytest.approx(change, abs=1e-5)
    assert summary["eval/reference_nll_change_low"] < change < summary["eval/reference_nll_change_high"]
    assert summary["reference_texts"] == 4
    row = found["before_after"].set_index("measure").loc["reference_perplexity"]
    assert (row["sft"], row["ppo"]) == (summary["eval/reference_perplexity_sft"], summary["eval/reference_perplexity"])
    same = outputs["before_after"]
    pd.testing.assert_frame_equal(found["before_after"].iloc[:-1], same)  # nothing else changes
    assert "Perplexity of reference texts" in found["model_card"][1]


def test_without_reference_texts_no_model_is_loaded_for_them(inputs):
    losses = measure_reference_texts(
        *(None, None, None, None), inputs["params:ppo"], DataPreparationConfig(), EvaluationConfig()
    )
    assert losses.empty


def test_reference_texts_are_cut_to_the_shorter_context_of_the_two_policies(inputs, tmp_path):
    short = tmp_path / "short"
    shutil.copytree(inputs["sft_policy"].place, short)
    config = json.loads((short / "config.json").read_text()) | {"max_position_embeddings": 4}
    (short / "config.json").write_text(json.dumps(config))
    texts = table_of({"text": ["a b c d e f", "a"]})
    settings = (inputs["params:ppo"], DataPreparationConfig(), EvaluationConfig(reference_texts="own.jsonl"))
    for policies in ((inputs["sft_policy"], PretrainedHandle(str(short))), (PretrainedHandle(str(short)),) * 2):
        losses = measure_reference_texts(texts, None, *policies, *settings)
        assert losses["tokens"].tolist() == [3, 1]  # the first token has no probability


def test_in_16_bits_the_sft_policy_stores_its_linear_weights_as_a_run_does(inputs):
    model = _load_reference(inputs["sft_policy"], PPOConfig(dtype="bfloat16", device="cpu"))
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16


def test_equal_policies_have_equal_losses_to_the_bit(inputs):
    sft, texts = inputs["sft_policy"], table_of({"text": ["a b c d", "e f", "j i h g f"]})
    settings = (
        inputs["params:ppo"],
        DataPreparationConfig(),
        EvaluationConfig(reference_texts="own.jsonl", batch_size=2),
    )
    losses = measure_reference_texts(texts, None, sft, sft, *settings)
    assert losses["tokens"].tolist() == [4, 2, 5]
    assert losses["sft"].tolist() == losses["ppo"].tolist()


def test_sample_pairs_show_a_chat_as_its_turns(inputs, outputs):
    prompts = PromptDataset.from_frame(inputs["evaluation_prompts"])
    chats = [json.dumps([{"role": "user", "content": f"Say {text}"}]) for text in prompts.texts[:-1]]
    table = replace(prompts, chats=[*chats, None]).to_frame()
    evaluations = (outputs[name] for name in ("sft_evaluation", "ppo_evaluation"))
    pairs = pair_samples(*evaluations, table, EvaluationConfig())
    expected = [f"User: Say {text}\n\nAssistant: " for text in prompts.texts[:-1]] + prompts.texts[-1:]
    assert sorted(pairs["prompt"]) == sorted(expected)


def test_that_not_all_evaluation_prompts_are_used_is_said_once_in_a_run(inputs, caplog, monkeypatch):
    monkeypatch.setattr("ppo_rlhf.runtime.log_lines.said", set())
    given, settings = table_of({"prompt": list("kji")}), PromptsConfig(max_held_out=2)
    policy, ppo = inputs["sft_policy"], inputs["params:ppo"]
    with caplog.at_level(logging.INFO, "ppo_rlhf"):
        prepare_prompts(table_of({"prompt": list("abc")}), given, policy, ppo, settings)
        choose_prompts(None, given, None, policy, ppo, settings)
    assert [line for line in caplog.messages if "of 3" in line.lower()] == [
        "Of 3 evaluation prompts, only the first 2 are used (prompts.max_held_out)."
    ]


def test_policy_compared_with_itself_ties_everywhere(inputs):
    outputs = run_evaluation({**inputs, "ppo_policy": inputs["sft_policy"]})
    summary = outputs["evaluation_summary"]
    assert summary["eval/win_rate"] == 0.5
    assert summary["eval/win_rate_low"] < 0.5 < summary["eval/win_rate_high"]
    assert summary["eval/kl"] == pytest.approx(0.0, abs=1e-6)
    table = outputs["before_after"]
    assert table["sft"].tolist() == pytest.approx(table["ppo"].tolist(), abs=1e-6)
    assert set(outputs["sample_pairs"]["chosen"]) == {"drawn at random"}


def test_equal_responses_are_ties_to_a_judge_that_scores_them_differently(inputs):
    settings = replace(inputs["params:evaluation"], judge=f"{__name__}:moody", judges={"other": f"{__name__}:moody"})
    summary = run_evaluation({**inputs, "ppo_policy": inputs["sft_policy"], "params:evaluation": settings})[
        "evaluation_summary"
    ]
    assert summary["eval/judge_score"] != summary["eval/judge_score_sft"]
    assert (summary["eval/win_rate"], summary["eval/win_rate_other"]) == (0.5, 0.5)
    assert (summary["wins"], summary["losses"]) == (0, 0)


def test_reward_decides_when_there_is_no_judge(inputs):
    settings = EvaluationConfig(prompts_path="own.jsonl")
    summary = run_evaluation({**inputs, "params:evaluation": settings})["evaluation_summary"]
    assert not {"eval/judge_score", "eval/judge_score_sft"} & set(summary)
    assert summary["decided_by"].startswith("the reward")
    assert summary["by_trained_reward"] is True


@pytest.mark.parametrize(
    ("judge", "weight", "expected"), [("letter_a", 1.0, True), ("letter_a", 0.0, False), ("word_count", 1.0, False)]
)
def test_a_judge_that_is_a_part_of_the_reward_is_the_trained_reward(inputs, outputs, judge, weight, expected):
    """A part of weight 0 is only measured."""
    parts = [("letter_a", weight), ("is_wordy", 1.0)]
    reward = [RewardComponentConfig(type="function", function=f"{__name__}:{name}", weight=w) for name, w in parts]
    settings = replace(inputs["params:evaluation"], judge=f"{__name__}:{judge}")
    changed = {"params:reward": RewardConfig(components=reward), "params:evaluation": settings}
    assert summary_of(outputs, inputs, **changed)["by_trained_reward"] is expected


def test_conditions_differ_where_start_model_prompts_judge_or_sampling_differ(inputs, outputs):
    shown = outputs["evaluation_summary"]["conditions"]
    assert shown["start_model"] == inputs["sft_policy"].fingerprint()
    prompts, settings, ppo = (inputs[name] for name in ("evaluation_prompts", "params:evaluation", "params:ppo"))
    changes = {
        "start_model": {"sft_policy": inputs["ppo_policy"]},
        "prompts": {"evaluation_prompts": prompts.assign(answer='"7"')},  # a column that a judge may read
        "judge": {"params:evaluation": replace(settings, judge=f"{__name__}:is_wordy")},
        "sampling": {"params:evaluation": replace(settings, temperature=0.5)},
    }
    for name, change in changes.items():
        changed = summary_of(outputs, inputs, **change)["conditions"]
        assert {key for key in shown if shown[key] != changed[key]} == {name}
    same = {"params:evaluation": replace(settings, temperature=1.0, seed=7), "params:ppo": replace(ppo, kl_coef=0.5)}
    assert summary_of(outputs, inputs, **same)["conditions"] == shown


def test_a_judge_that_was_edited_is_another_judge(inputs, outputs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "edited_judge", raising=False)
    code, found = "def judge(prompts, completions, **columns):\n    return [{}] * len(completions)\n", []
    for score in (1.0, 2.0, 1.0):
        (tmp_path / "edited_judge.py").write_text(code.format(score))
        sys.modules.pop("edited_judge", None)
        settings = replace(inputs["params:evaluation"], judge="edited_judge:judge")
        found.append(summary_of(outputs, inputs, **{"params:evaluation": settings})["conditions"]["judge"])
    assert found[0] == found[2] != found[1]


def test_several_responses_and_judges_reach_the_summary_and_the_table(inputs):
    several = replace(
        inputs["params:evaluation"],
        judge=f"{__name__}:is_wordy",
        judges={"length": f"{__name__}:word_count"},
        samples_per_prompt=4,
        pass_at=[1, 4],
    )
    outputs = run_evaluation({**inputs, "params:evaluation": several})
    summary, table = outputs["evaluation_summary"], outputs["ppo_evaluation"]
    assert (summary["prompts"], summary["samples_per_prompt"]) == (len(PROMPTS), 4)
    right = table.groupby("prompt", sort=False)["judge_score"]
    assert summary["eval/pass_at_1"] == pytest.approx(table["judge_score"].mean(), abs=1e-12)
    assert summary["eval/pass_at_4"] == pytest.approx((right.sum() > 0).mean(), abs=1e-12)
    assert summary["eval/judge_score_se"] == pytest.approx(right.mean().sem(), abs=1e-12)
    assert summary["eval/judge_score_length"] == pytest.approx(table["judge_score_length"].mean(), abs=1e-12)
    assert 0.0 <= summary["eval/win_rate_length_low"] <= summary["eval/win_rate_length"]
    assert {"pass_at_1", "pass_at_4", "judge_score_length"} <= set(outputs["before_after"]["measure"])


def test_at_temperature_zero_each_policy_says_its_most_probable_tokens(inputs, caplog):
    greedy = replace(inputs["params:evaluation"], temperature=0.0)
    with caplog.at_level("INFO", logger="ppo_rlhf"):
        seeds = [run_evaluation({**inputs, "params:evaluation": replace(greedy, seed=seed)}) for seed in (1, 2)]
    for said in (caplog.text, seeds[0]["model_card"][1]):  # greedy responses are not drawn from the policy
        assert "of greedy responses (no estimate of the KL)" in said
        assert "KL from SFT" not in said
    for name in ("sft", "ppo"):
        responses = [outputs[f"{name}_evaluation"]["response"].tolist() for outputs in seeds]
        handle = inputs[f"{name}_policy"]
        model, tokenizer = handle.causal_lm(), handle.tokenizer()
        ids = torch.tensor([tokenizer(PROMPTS[0])["input_ids"]])
        found = model.generate(ids, do_sample=False, max_new_tokens=5, pad_token_id=0)[0, ids.shape[1] :]
        assert responses[0] == responses[1]
        assert responses[0][0] == " " + tokenizer.decode(found, skip_special_tokens=True)
    warmer = run_evaluation({**inputs, "params:evaluation": replace(greedy, temperature=5.0)})
    assert warmer["ppo_evaluation"]["response"].tolist() != seeds[0]["ppo_evaluation"]["response"].tolist()


def test_the_stop_tokens_of_the_sft_policy_end_the_responses_of_both(inputs, outputs, tmp_path):
    """The policy's own file counts for nothing: of two rules the shorter one might win only by its length."""

    def stops_at(name, token):
        folder = tmp_path / name / str(token)
        shutil.copytree(inputs[name].source, folder)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, token]}))
        return PretrainedHandle(str(folder))

    of_policy = run_evaluation({**inputs, "ppo_policy": stops_at("ppo_policy", 4)})
    pd.testing.assert_frame_equal(of_policy["ppo_evaluation"], outputs["ppo_evaluation"])
    of_sft = run_evaluation({**inputs, "sft_policy": stops_at("sft_policy", 4)})
    for name in ("sft_evaluation", "ppo_evaluation"):
        ended = [4 in ids for ids in of_sft[name]["response_ids"]]
        assert any(ended)
        assert all(list(ids).index(4) == len(ids) - 1 for ids in of_sft[name]["response_ids"] if 4 in ids)


def test_an_evaluation_says_what_is_evaluated_its_result_and_where_it_is_kept(inputs, caplog, monkeypatch):
    run = SimpleNamespace(info=SimpleNamespace(artifact_uri="runs/7/artifacts"))
    monkeypatch.setattr("mlflow.active_run", lambda: run)
    with caplog.at_level("INFO", logger="ppo_rlhf"):
        summary = run_evaluation(inputs)["evaluation_summary"]
    sources = [inputs[name].source for name in ("ppo_policy", "sft_policy")]
    assert "Evaluating the policy {} against the SFT policy {} …".format(*sources) in caplog.messages
    (result,) = [line for line in caplog.messages if line.startswith("Win rate over SFT")]
    assert f"{100 * summary['eval/win_rate']:.1f} %" in result
    assert summary["decided_by"] in result
    assert any("runs/7/artifacts" in line for line in caplog.messages)


def test_the_result_is_put_into_the_card_of_a_policy_that_a_run_exported_and_into_no_other(inputs, outputs, tmp_path):
    shutil.copytree(inputs["ppo_policy"].source, tmp_path / "exported")
    metadata, above = "---\nlibrary_name: transformers\n", f"---\n\nabove\n{BEGIN}\n"
    (tmp_path / "exported" / CARD).write_text(f"{metadata}{above}old\n{END}\nbelow", encoding="utf-8")
    exported = PretrainedHandle(str(tmp_path / "exported"))
    directory, card = run_evaluation({**inputs, "ppo_policy": exported})["model_card"]
    nobody, result = outputs["model_card"]
    assert directory == exported.source
    assert card.startswith(metadata)
    assert card.endswith(f"{above}\n{result}\n\n{END}\nbelow")
    (index,) = yaml.safe_load(card.split("---\n")[1])["model-index"][0]["results"]
    assert index["dataset"] == {"type": "prompts", "name": "6 held-out prompts"}
    assert index["metrics"][0] == {
        "type": "win_rate",
        "name": "Win rate over SFT",
        "value": outputs["evaluation_summary"]["eval/win_rate"],
    }
    assert nobody is None
    assert headline(outputs["evaluation_summary"]) in result
    assert f"**{say_verdict(outputs['evaluation_summary']['verdict'])}.**" in result
    assert "| KL from SFT (nats per response) | 0.0 |" in result


def test_policies_of_different_vocabularies_are_not_compared(inputs, tmp_path):
    other = PretrainedHandle(save(tmp_path / "other", tiny_model()))
    with pytest.raises(ModelError, match="policy_path"):
        run_evaluation({**inputs, "ppo_policy": other})


def load_config(environment, **given):
    return OmegaConfigLoader(
        conf_source=str(PROJECT / "conf"),
        base_env="base",
        default_run_env=environment,
        runtime_params=given,
        merge_strategy={"parameters": "soft"},
        custom_resolvers=CONFIG_LOADER_ARGS["custom_resolvers"],
    )


def test_the_policy_to_evaluate_is_the_projects_own_or_the_users():
    for given, path in (({}, "data/test/06_models/ppo_policy"), ({"policy_path": "models/mine"}, "models/mine")):
        assert load_config("test", **given)["catalog"]["ppo_policy"]["filepath"] == path


@pytest.mark.parametrize("environment", ["base", "test"])
def test_parameters_are_the_settings_and_follow_the_globals(environment):
    group = load_config(environment)["parameters"]["evaluation"]
    settings = EvaluationConfig(**group)
    assert settings.prompts_path == {"base": None, "test": "data/01_raw/prompts.jsonl"}[environment]
    assert settings.seed == 42
    assert set(group) == set(EvaluationConfig.__dataclass_fields__)


@pytest.mark.parametrize("name", ["sample_pairs", "reward_attacks"])
def test_tables_of_texts_survive_their_file_whatever_the_models_wrote(name, tmp_path):
    entry = load_config("base")["catalog"][name]["dataset"]
    dataset = AbstractDataset.from_config(name, {**entry, "filepath": str(tmp_path / "table.csv")})
    texts = ["", "NA", "7", "null", 'say "hi", twice', "line\nbreak", "carriage\rreturn", "tab\t<b>&", "ünï ✓"]
    columns = {column: texts[place:] + texts[:place] for place, column in enumerate(entry["load_args"]["dtype"])}
    table = pd.DataFrame({**columns, "score": 0.1 + 0.2})
    dataset.save(table)
    pd.testing.assert_frame_equal(dataset.load(), table, check_exact=True)
