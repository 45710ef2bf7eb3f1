"""The report: numbers as text, remarks by case, charts, and a page that is safe, whole and fetches nothing."""

import io
import itertools
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from kedro.config import OmegaConfigLoader
from rich.console import Console
from safetensors.torch import save_file
from transformers import LlamaConfig

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.datasets import TrainingCurvesDataset, TrainingHistoryDataset
from ppo_rlhf.evaluation.policy import EvaluationConfig
from ppo_rlhf.evaluation.verdict import Verdict
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.pipelines.reporting import create_pipeline, nodes
from ppo_rlhf.reporting.charts import (
    MAX_POINTS,
    PANELS,
    ExpectedCurve,
    panel_figure,
    panels_of,
    score_distribution,
    training_curves,
)
from ppo_rlhf.reporting.report_page import MAX_TEXT
from ppo_rlhf.reporting.token_view.page import QUANTITIES
from ppo_rlhf.reporting.wording import headline, measure, remarks, say_holes, write_change, write_value
from ppo_rlhf.rewards.config import RewardComponentConfig, RewardConfig
from ppo_rlhf.settings import CONFIG_LOADER_ARGS
from tests.pipelines.support import outputs_of
from tests.tiny_models import save, tiny_model

PROJECT = Path(__file__).parents[2]
SCRIPT = "</script><script>alert('x')</script> & \"quoted\" {{ title }}"
GOOD = {
    **{"eval/win_rate": 0.88, "eval/win_rate_low": 0.85, "eval/win_rate_high": 0.91, "eval/kl": 4.0},
    **{"verdict": Verdict.BETTER, "wins": 1330, "losses": 182, "by_trained_reward": False},
}
SAID = {"prompts": 1512, "decided_by": "the judge mine:judge"}


def history(iterations=20):
    rng = np.random.default_rng(0)
    keys = {key for panel in PANELS for key in (*panel.curves, *(panel.band or ()))}
    table = pd.DataFrame({key: rng.uniform(0.1, 0.2, iterations) for key in sorted(keys)})
    table.insert(0, "iteration", np.arange(1, iterations + 1))
    return table.assign(**{"episode": table["iteration"] * 64.0, "time/iteration_s": 0.5})


def before_after(**changed):
    rows = {"judge_score": (0.0, 0.7), "reward": (0.0, 1.5), "grammatical_rate": (0.9, 0.92), "kl": (0.0, 4.0)}
    return pd.DataFrame([{"measure": name, "sft": sft, "ppo": ppo} for name, (sft, ppo) in (rows | changed).items()])


def sample_pairs(text="the film was warm .", rows=3):
    texts = {"prompt": [text] * rows, "sft_response": text, "ppo_response": text}
    return pd.DataFrame({**texts, "chosen": "drawn at random", "outcome": "win", "sft_score": 0.1, "ppo_score": 0.9})


def run_reporting(prompts=6, **changed):
    """Run the pipeline on made-up results and return its outputs."""
    scores = np.linspace(0.0, 1.0, prompts)
    texts = {"prompt": [f"prompt {row}" for row in range(prompts)], "response": "warm film"}
    evaluation = pd.DataFrame({**texts, "reward": scores, "kl": 1.0, "length": 3, "terminated": True})
    evaluation["response_ids"] = [[1, 2, 3]] * prompts
    inputs = {
        "training_history": history(),
        "evaluation_summary": GOOD | SAID,
        "before_after": before_after(),
        "sample_pairs": sample_pairs(),
        "token_samples": [],
        "audited_holes": {},
        "human_evaluation": {},
        "sft_evaluation": evaluation,
        "ppo_evaluation": evaluation.assign(reward=scores + 1.0),
        "reward_model": None,
        "sft_policy": PretrainedHandle("org/sft"),
        "ppo_policy": PretrainedHandle(str(Path.cwd() / "data/06_models/ppo_policy/1")),
        "params:ppo": PPOConfig(kl_coef=0.15),
        "params:reward": RewardConfig(components=[RewardComponentConfig(type="function", function="mine:score")]),
        "params:evaluation": EvaluationConfig(judge="mine:judge", seed=7),
        "params:reporting": nodes.ReportingConfig(title="My run", report_path="elsewhere/report.html"),
    }
    return outputs_of(create_pipeline(), inputs | changed)


class Page(HTMLParser):
    """A page's tags, attributes and visible text; fails on a tag that is not closed in order."""

    def __init__(self, page):
        super().__init__()
        self.open, self.texts, self.tags, self.attributes = [], [], [], []
        self.feed(page)
        assert self.open == []
        self.text = " ".join("".join(self.texts).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "input", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes another tag"

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.texts.append(data)


@pytest.mark.parametrize(
    ("name", "before", "after", "value", "change"),
    [
        ("reward", 1.0, -0.071, "−0.07", "−1.07"),
        ("reward", 1.0, 1.001, "1.00", "±0"),
        ("kl", 0.0, 4.56, "4.6", "+4.6"),
        ("pass_at_8", 0.5, 0.625, "62.5%", "+12.5 points"),
        ("judge_score_strict", 0.5, 0.25, "0.25", "−0.25"),
        ("very_polite_rate", 0.9, 0.925, "92.5%", "+2.5 points"),  # a rate of the user's own judge
        ("distinct_2", 0.1931, float("nan"), "–", "–"),
    ],
)
def test_values_and_changes_have_the_decimals_and_sign_of_their_measure(name, before, after, value, change):
    assert write_value(measure(name), after) == value
    assert write_change(measure(name), before, after) == change


@pytest.mark.parametrize(
    ("name", "before", "after", "error", "value", "change"),
    [
        ("reward", 1.0, -0.071, 0.249, "−0.07 ± 0.25", "−1.07 ± 0.25"),
        ("reward", 1.0, 1.001, 0.02, "1.00 ± 0.02", "0 ± 0.02"),
        ("very_polite_rate", 0.9, 0.925, 0.0132, "92.5 ± 1.3%", "+2.5 ± 1.3 points"),
        ("reward", 1.0, 2.0, float("nan"), "2.00", "+1.00"),
        ("kl", 0.0, -0.003, 0.004, "0.0 ± 0.0", "0 ± 0.0"),  # rounded, it has no sign
        ("kl", 0.0, 0.0, 0.0, "0.0", "±0"),  # of the policy itself: nothing varied
    ],
)
def test_a_value_and_a_change_have_their_standard_error(name, before, after, error, value, change):
    assert write_value(measure(name), after, error) == value
    assert write_change(measure(name), before, after, error) == change


@pytest.mark.parametrize(
    ("verdict", "said"),
    [
        ("better", "PPO beats SFT"),
        ("worse", "PPO loses to SFT"),
        ("reward_rose", "The reward rose"),
        ("reward_fell", "The reward fell"),
        ("no_clear_difference", "No clear difference between PPO and SFT"),
        ("too_few_prompts", "Too few held-out prompts to tell PPO and SFT apart"),
    ],
)
def test_report_and_terminal_give_the_verdict_of_the_comparison(verdict, said, capsys):
    """Nothing else in it says who won: report, terminal, model card and champion cannot differ."""
    summary = json.loads(json.dumps(GOOD | SAID | {"verdict": Verdict(verdict)}))
    assert summary["verdict"] == verdict
    page = run_reporting(evaluation_summary=summary)["report"]
    assert f"<h1>{said}</h1>" in page
    assert f"{said}. PPO's response is the better one on 88.0%" in " ".join(capsys.readouterr().out.split())
    assert len(remarks(summary, before_after())) == (verdict != "better")


def test_headline_gives_rate_interval_number_of_prompts_and_judge():
    said = headline(GOOD | SAID)
    assert all(part in said for part in ("better one on 88.0%", "1,512", "85.0% to 91.0%", "the judge mine:judge"))
    by_reward = headline(GOOD | SAID | {"by_trained_reward": True})
    assert "scores higher on 88.0%" in by_reward
    assert "better" not in by_reward


def changed_perplexity(change, low, high):
    ends = {"": change, "_low": low, "_high": high}
    metrics = {f"eval/reference_nll_change{end}": value for end, value in ends.items()}
    return metrics | {"eval/reference_perplexity": 13.4, "eval/reference_perplexity_sft": 12.1, "reference_texts": 200}


def test_headline_ends_with_the_perplexity_if_it_changed_by_more_than_chance():
    plain = headline(GOOD | SAID)
    assert headline(GOOD | SAID | changed_perplexity(0.102, 0.0812, 0.123)) == (
        f"{plain} On 200 reference texts the perplexity rose from 12.10 to 13.40 (+0.1 nats a token, 95% interval "
        "0.081 to 0.12)."
    )
    fell = headline(GOOD | SAID | changed_perplexity(-0.05, -0.08, -0.02))
    assert fell.endswith("fell from 12.10 to 13.40 (−0.05 nats a token, 95% interval −0.08 to −0.02).")
    assert headline(GOOD | SAID | changed_perplexity(0.05, -0.01, 0.11)) == plain
    of_one_text = {"eval/reference_nll_change": 0.5, "eval/reference_perplexity": 2.0, "reference_texts": 1}
    assert headline(GOOD | SAID | of_one_text) == plain


def test_headline_counts_pairs_of_several_responses_and_names_other_judges():
    strict = {"eval/win_rate_strict": 0.6, "eval/win_rate_strict_low": 0.55, "eval/win_rate_strict_high": 0.65}
    said = headline(GOOD | strict | SAID | {"samples_per_prompt": 4})
    assert "88.0% of 6,048 pairs of responses to 1,512 held-out prompts" in said
    assert said.endswith("By other judges: strict 60.0% (55.0% to 65.0%).")


LOST = {"verdict": Verdict.WORSE}


BLIND = {"eval/judge_gap": -0.25, "eval/judge_gap_p": 0.004, "eval/judge_gap_prompts": 40}


@pytest.mark.parametrize(
    ("summary", "table", "accuracy", "texts"),
    [
        ({}, {}, (0.74, 0.7, 0.78), []),
        ({}, {}, (0.62, 0.31, 0.86), []),  # eight pairs do not tell
        (
            {"verdict": Verdict.NO_CLEAR_DIFFERENCE},
            {},
            None,
            ["prompts (prompts.held_out_share, prompts.max_held_out)"],
        ),
        (
            {"verdict": Verdict.TOO_FEW_PROMPTS, "wins": 2, "losses": 0},
            {},
            None,
            ["won 2 held-out prompts and lost 0"],
        ),
        ({"verdict": Verdict.REWARD_FELL}, {}, None, ["The reward fell"]),
        (LOST | {"exploits": True}, {}, None, ["exploits its reward"]),
        (LOST, {"judge_score": (0.5, 0.1)}, None, ["PPO loses to SFT"]),  # the means do not decide
        ({"exploits": True}, {}, None, ["since its best evaluation"]),  # beside a win, too
        ({"untested_p": 0.25}, {}, None, ["by chance with probability 0.25"]),
        ({"stopped_after": 30, "exported_iteration": 20}, {}, None, ["iteration 30, because the policy exploited"]),
        ({"stopped_after": 30, "exported_iteration": 20}, {}, None, ["the one of iteration 20, its best evaluation"]),
        (
            {"stopped_after": 30, "exported_iteration": 0, "verdict": Verdict.NO_CLEAR_DIFFERENCE},
            {},
            None,
            ["the one from before training, so PPO and SFT are the same policy here"],
        ),
        (
            BLIND,
            {},
            None,
            ["0.25 lower than SFT's (40 prompts; by chance with probability 0.004)"],
        ),  # beside a win, too
        (BLIND | {"eval/judge_gap_p": 0.02}, {}, None, []),
        ({"trained_prompts": 12, "prompts": 1512}, {}, None, ["trained on 12 of the evaluation prompts"]),
        ({"update_halvings": 3}, {}, None, ["training: updates computed 1/8 of their responses at a time."]),
        ({"rollout_halvings": 1, "update_halvings": 2}, {}, None, ["rollouts computed 1/2 and updates computed 1/4"]),
        ({}, {"grammatical_rate": (0.9, 0.8)}, None, ["95% of SFT's rate"]),
        ({}, {}, (0.55, 0.5, 0.6), ["right on only 55.0% of its held-out pairs (95% interval 50.0% to 60.0%)"]),
        ({}, {"distinct_2": (0.5, 0.46)}, None, []),
        ({}, {"distinct_2": (0.5, 0.32)}, None, ["distinct word pairs is 36% lower, which is bad"]),
        (changed_perplexity(math.log(1.5), 0.39, 0.42), {}, None, ["texts is 50% higher, which is bad"]),
        (changed_perplexity(math.log(1.5), -0.1, 0.9), {}, None, []),  # chance explains it
        (changed_perplexity(0.05, 0.04, 0.06), {}, None, []),
        (changed_perplexity(0.5, 0.4, 0.6), {"distinct_2": (0.5, 0.3)}, None, ["65% higher.*40% lower"]),
    ],
)
def test_each_problem_of_the_result_draws_one_remark(summary, table, accuracy, texts):
    found = remarks(GOOD | summary, before_after(**table), accuracy)
    assert len(found) == len(texts)
    assert all(text in remark or re.search(text, remark) for text, remark in zip(texts, found, strict=True))


@pytest.mark.parametrize(
    ("unchosen", "verdict", "said"),
    [
        (
            40,
            Verdict.BETTER,
            "on 40 held-out prompts, where noise favoured it: verdict, win rate and table are of the 40",
        ),
        (8, Verdict.TOO_FEW_PROMPTS, "The 8 others are too few for a verdict, which needs 10"),
    ],
)
def test_what_a_chosen_policy_is_judged_on_is_said(unchosen: int, verdict: Verdict, said: str):
    stop = {"stopped_after": 30, "exported_iteration": 20, "choice_prompts": 40, "unchosen_prompts": unchosen}
    first, second = remarks(GOOD | stop | {"verdict": verdict}, before_after())
    assert "the one of iteration 20, its best evaluation" in first
    assert said in second


def test_a_win_by_the_reward_that_ppo_raised_is_said_to_prove_little():
    table = before_after()
    (found,) = remarks(GOOD | {"verdict": Verdict.REWARD_ROSE}, table[table["measure"] != "judge_score"])
    assert "evaluation.judge" in found


def test_the_holes_of_an_audited_reward_are_one_sentence():
    assert say_holes([]) == []
    assert say_holes(["echo", "keywords"]) == [
        "The audit of this reward found 2 holes: it scores answers without worth (echo, keywords) above SFT's. Look "
        "for such answers in the samples."
    ]


def test_figures_hold_every_curve_and_survive_json_as_plain_lists():
    table = history()
    table.loc[3, "objective/kl"] = np.nan
    traces = json.loads(training_curves(table, PPOConfig()).to_json())["data"]
    assert len(traces) == sum(len(panel.curves) + (panel.band is not None) for panel in PANELS)
    kl = traces[2]  # after the band and the curve of the score
    assert kl["x"] == [1, 2, 3, *range(5, 21)]
    assert kl["y"] == table["objective/kl"].drop(3).tolist()


def test_curves_are_named_without_a_legend_and_numbers_have_no_prefix():
    curves, scores = training_curves(history(), PPOConfig()), score_distribution([0.0], [1.0], "Reward")
    titles = [re.sub("<[^>]*>", "", title.text) for title in curves.layout.annotations]
    assert "Clip fraction (share of tokens): ■ policy ■ value" in titles
    assert re.sub("<[^>]*>", "", scores.layout.xaxis.title.text) == "Reward: ■ SFT ■ PPO"
    assert {axis.exponentformat for axis in curves.select_yaxes()} == {"e"}  # plotly writes 0.0004 as 400µ otherwise


def test_kedro_viz_is_given_four_panels_which_can_be_read_at_its_size(tmp_path):
    table = history().assign(**{"objective/kl": 12.0})
    dataset = TrainingCurvesDataset(filepath=str(tmp_path / "curves.json"))
    dataset.save(training_curves(table, PPOConfig()))
    shown = dataset.preview()
    assert [title["text"] for title in shown["layout"]["annotations"]] == [panel.title for panel in PANELS[:4]]
    assert [(trace.get("name"), trace["yaxis"]) for trace in shown["data"] if "fill" not in trace] == [
        *zip(["mean", "mean over responses", "win rate", "mean over tokens"], ["y2", "y3", "y4", "y5"], strict=True)
    ]
    assert [(line["yref"], line["y0"]) for line in shown["layout"]["shapes"]] == [("y3", PPOConfig().kl_warning)]
    corners = [(shown["layout"][f"xaxis{n}"]["domain"], shown["layout"][f"yaxis{n}"]["domain"]) for n in range(2, 6)]
    for (x, y), (other_x, other_y) in itertools.combinations(corners, 2):
        assert x[1] < other_x[0] or other_x[1] < x[0] or y[0] > other_y[1]
    # of Kedro-Viz's 400 by 300 pixels, 290 by 170 are left for the panels: titles of 11 pixels fit between them
    assert (corners[0][1][0] - corners[2][1][1]) * 170 > 2 * 11


def test_texts_of_any_script_have_their_direction_and_show_no_hidden_character():
    text = "שלום \u202eevil\u200b"
    page = run_reporting(sample_pairs=sample_pairs(text, rows=1))["report"]
    assert page.count(' dir="auto">שלום \\u202eevil\\u200b<') == 3
    assert "\u202e" not in page.split("</script>")[-1]


def test_charts_are_of_kinds_that_the_committed_script_has_and_scores_are_shares_of_one_grid():
    sft, ppo = score_distribution([0.0, 0.0, 3.0], [0.0, 1.5, 3.0], "Reward").data
    assert {sft.type, ppo.type, *(trace.type for trace in training_curves(history(), PPOConfig()).data)} == {
        *("bar", "scatter")
    }
    assert sft.x == ppo.x == tuple(pytest.approx(0.05 + 0.1 * i) for i in range(30))
    assert [(i, share) for i, share in enumerate(sft.y) if share] == [(0, 2 / 3), (29, 1 / 3)]
    assert [(i, share) for i, share in enumerate(ppo.y) if share] == [(0, 1 / 3), (15, 1 / 3), (29, 1 / 3)]


def test_long_curves_are_thinned_but_keep_their_ends():
    trace = panel_figure(PANELS[3], history(5_000)).data[0]
    assert len(trace.x) == MAX_POINTS
    assert (trace.x[0], trace.x[-1]) == (1, 5_000)


def test_level_is_drawn_only_where_the_curve_comes_near_it():
    kl_panel = panels_of(history(), PPOConfig())[1]
    near, far = (panel_figure(kl_panel, history().assign(**{"objective/kl": kl})) for kl in (12.0, 2.0))
    assert (len(near.layout.shapes), len(far.layout.shapes)) == (1, 0)


@pytest.mark.parametrize("limit", [8.0, 15.0, 40.0])
def test_the_kl_chart_draws_the_runs_own_warning(limit):
    far = {"training_history": history().assign(**{"objective/kl": 50.0})}
    settings = PPOConfig(kl_warning=limit, kl_alarm=60.0)
    outputs = run_reporting(**far, **{"params:ppo": settings})
    drawn = [shape.y0 for shape in outputs["training_curves_plot"].layout.shapes]
    assert limit in drawn
    assert 15.0 not in drawn or limit == 15.0
    assert panels_of(far["training_history"], settings)[1].level == limit


def test_an_expected_curve_is_drawn_beside_the_runs_own_where_its_metric_was_measured():
    curve = ExpectedCurve(metric="eval/judge_score", label="a published run", points=[[5, 0.4], [30, 0.6]])
    table = history().assign(**{"eval/judge_score": 0.5})
    first, *others = panels_of(table, PPOConfig(), curve)
    assert others == panels_of(table, PPOConfig())
    figure = panel_figure(first, table)
    own, expected = figure.data
    assert (list(own.y), own.name) == ([0.5] * 20, "this run")
    assert (list(expected.x), list(expected.y), expected.line.dash) == ([5.0, 30.0], [0.4, 0.6], "dot")
    assert figure.layout.showlegend
    assert panels_of(history(), PPOConfig(), curve) == panels_of(history(), PPOConfig())
    settings = nodes.ReportingConfig(expected_curve=curve)
    outputs = run_reporting(training_history=table, **{"params:reporting": settings})
    assert "a published run" in Page(outputs["report"]).text
    assert "expected" in [trace.name for trace in outputs["training_curves_plot"].data]


@pytest.mark.parametrize("seed", [1, 2])
def test_what_people_decided_of_these_weights_is_on_the_page_and_of_others_is_not(tmp_path, seed):
    judged, policy = (PretrainedHandle(save(tmp_path / str(each), tiny_model(seed=each))) for each in (1, seed))
    said = {"result": "PPO beats SFT, decided by 3 people on 120 pairs", "fingerprint": judged.fingerprint()}
    page = Page(run_reporting(human_evaluation=said, ppo_policy=policy)["report"])
    assert ("By people: PPO beats SFT, decided by 3 people on 120 pairs" in page.text) is (seed == 1)


def test_page_fetches_nothing_and_is_whole_after_one_iteration():
    table = pd.DataFrame({"iteration": [1], "objective/scores": [0.5], "loss/policy_avg": [np.nan]})
    page = Page(run_reporting(training_history=table)["report"])
    assert [panel.title for panel in panels_of(table, PPOConfig())] == ["Score"]
    assert not {"link", "img", "iframe", "object"} & set(page.tags)
    assert not {name for name, _ in page.attributes} & {"src", "srcset", "data"}
    assert not [value for name, value in page.attributes if name == "href" and ":" in value]  # only to the project
    assert "nan" not in page.text


def test_a_policy_of_another_origin_is_reported_without_curves_advice_and_tokens(tmp_path):
    shown = [{"iteration": 1, "responses": 64, "samples": []}]
    page = Page(run_reporting(training_history=pd.DataFrame(), token_samples=shown)["report"]).text
    assert "Before and after" in page
    assert not [word for word in ("Training", "What to change", "Token by token") if word in page]
    file = tmp_path / "history.csv"
    assert TrainingHistoryDataset(filepath=str(file)).load().empty
    TrainingHistoryDataset(filepath=str(file), save_args={"index": False}).save(history(2))
    assert len(TrainingHistoryDataset(filepath=str(file)).load()) == 2
    assert TrainingHistoryDataset(filepath=str(file), policy_path="elsewhere").load().empty


def test_texts_of_models_and_users_cannot_become_markup():
    outputs = run_reporting(
        **{
            "evaluation_summary": GOOD | SAID | {"decided_by": SCRIPT},
            "sample_pairs": sample_pairs(SCRIPT),
            "before_after": before_after(**{f"{SCRIPT}_rate": (0.1, 0.2)}),
            "params:reporting": nodes.ReportingConfig(title=SCRIPT),
        }
    )
    page = Page(outputs["report"])
    assert page.tags.count("script") == Page(run_reporting()["report"]).tags.count("script")
    assert page.text.count(SCRIPT) >= 1 + 3 * 3 + 1 + 1


def test_page_shows_responses_token_by_token_if_there_are_any():
    numbers = {quantity.name: [0.5] for quantity in QUANTITIES}
    sample = {
        "prompt": SCRIPT,
        "tokens": [SCRIPT],
        "is_policy": [True],
        "score": 1.0,
        "terminated": False,
        "numbers": numbers,
    }
    shown = [{"iteration": iteration, "responses": 64, "samples": [sample]} for iteration in (1, 80)]
    page = Page(run_reporting(token_samples=shown)["report"])
    assert page.text.count(SCRIPT) == 4
    for words in ("Token by token", "Iteration 80", "Iteration 1 ", "1 of 64 responses", "1 tokens, cut off"):
        assert words in page.text
    assert "Token by token" not in Page(run_reporting()["report"]).text


def test_long_prompt_keeps_its_end_and_long_response_its_start():
    pairs = sample_pairs("START" + "x" * (2 * MAX_TEXT) + "END", rows=1)
    text = Page(run_reporting(sample_pairs=pairs)["report"]).text
    assert text.count("START") == 2
    assert text.count("xEND") == 1


def test_pipeline_writes_page_and_plots_and_prints_the_result(capsys, monkeypatch):
    monkeypatch.setattr(nodes.running, "environment", "mine")  # also where MLflow does not track the run
    outputs = run_reporting()
    assert set(outputs) == {"report", "training_curves_plot", "score_distribution_plot"}
    page = Page(outputs["report"]).text
    settings = ("ppo.kl_coef", "mine:score, weight 1", "evaluation.judge")
    for expected in (
        "My run",
        "PPO beats SFT",
        *settings,
        "org/sft",
        "elsewhere/report.html",
        "20 iterations, 1,280 episodes",
    ):
        assert expected in page
    assert "evaluation.seed" not in page  # it follows globals
    printed = " ".join(capsys.readouterr().out.split())
    for expected in (
        "88.0% of 1,512",
        "elsewhere/report.html",
        "kedro mlflow ui --env mine",
        "data/06_models/ppo_policy/1",
    ):
        assert expected in printed
    assert str(Path.cwd()) not in printed


def test_models_of_the_project_and_the_tables_are_links_from_the_page_and_models_of_the_hub_are_none():
    policy = PretrainedHandle(str(Path.cwd() / "data/06_models/ppo policy/1"))
    reporting = nodes.ReportingConfig(report_path="data/08_reporting/report.html")
    page = Page(run_reporting(**{"ppo_policy": policy, "params:reporting": reporting})["report"])
    links = [value for name, value in page.attributes if name == "href"]
    assert links == ["../06_models/ppo%20policy/1", "."]
    assert "org/sft" in page.text


def test_terminal_shows_the_table_and_never_breaks_a_path():
    path = "data/06_models/ppo_policy/" + "very-long-name-" * 10
    console = Console(file=io.StringIO(), width=60)
    nodes.print_result(console, "PPO wins [b]not markup[/b].", before_after(), ["KL is high."], [("Policy", path)])
    text = console.file.getvalue()
    assert "[b]not markup[/b]" in text
    assert "KL is high." in text
    assert re.search(r"Grammatical\s+90.0%\s+92.0%\s+\+2.0 points", text)
    assert re.search(rf"Policy +{path}$", text, re.MULTILINE)
    console = Console(file=io.StringIO(), width=80)
    table = before_after().assign(sft_se=0.004, ppo_se=0.013, change_se=0.006)
    nodes.print_result(console, "PPO wins.", table, [], [])
    assert re.search(r"Grammatical\s+90.0 ± 0.4%\s+92.0 ± 1.3%\s+\+2.0 ± 0.6 points", console.file.getvalue())
    page = Page(run_reporting(before_after=table)["report"]).text
    assert "+2.0 ± 0.6 points" in page


def test_page_gives_the_advice_that_follows_from_settings_and_curves():
    far = history().assign(**{"objective/kl": 30.0})
    assert "Raise ppo.kl_coef" in Page(run_reporting(training_history=far)["report"]).text
    patient = {"training_history": far, "params:ppo": PPOConfig(kl_coef=0.15, kl_alarm=40.0, kl_warning=35.0)}
    assert "Raise ppo.kl_coef" not in Page(run_reporting(**patient)["report"]).text


def test_settings_and_advice_are_those_of_the_policys_training_whatever_conf_says(tmp_path):
    LlamaConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    own = {"kl_coef": 0.15, "kl_alarm": 40.0, "kl_warning": 35.0, "gamma": 0.99}
    (tmp_path / "ppo_rlhf.json").write_text(json.dumps({"processes": 1, "ppo": own, "chat_template_kwargs": {}}))
    inputs = {"training_history": history().assign(**{"objective/kl": 30.0}), "params:ppo": PPOConfig(lam=0.5)}
    page = Page(run_reporting(**inputs, ppo_policy=PretrainedHandle(str(tmp_path)))["report"]).text
    assert "ppo.gamma" in page
    assert "ppo.lam" not in page
    assert "Raise ppo.kl_coef" not in page


def test_settings_say_how_rewards_are_combined():
    models = [RewardComponentConfig(type="model", path=path, name=path[-1]) for path in ("models/a", "models/b")]
    reward = RewardConfig(components=models, combine="min", normalise="component")
    rows = nodes._settings(PPOConfig(), reward, EvaluationConfig(seed=1, prompts_path=None))
    assert rows == [
        ("reward.combine", "min", "sum"),
        ("reward.normalise", "component", "total"),
        *((f"reward.components: {name}", f"models/{name}", "–") for name in "ab"),
    ]


def test_accuracy_of_the_reward_model_is_read_from_the_model_itself(tmp_path):
    config = LlamaConfig(num_hidden_layers=1)
    config.held_out_accuracy, config.held_out_interval = 0.61, [0.58, 0.64]
    config.save_pretrained(tmp_path)
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    reward = RewardConfig(components=[RewardComponentConfig(type="model")])
    page = run_reporting(**{"reward_model": PretrainedHandle(str(tmp_path)), "params:reward": reward})["report"]
    assert "right on only 61.0% of its held-out pairs" in page


@pytest.mark.parametrize("environment", ["base", "test"])
def test_printed_path_is_where_the_catalog_writes_the_page(environment):
    config = OmegaConfigLoader(
        conf_source=str(PROJECT / "conf"),
        base_env="base",
        default_run_env=environment,
        merge_strategy={"parameters": "soft"},
        custom_resolvers=CONFIG_LOADER_ARGS["custom_resolvers"],
    )
    settings = nodes.ReportingConfig(**config["parameters"]["reporting"])
    assert settings.report_path == config["catalog"]["report"]["dataset"]["filepath"]
