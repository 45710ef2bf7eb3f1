"""The report: numbers as text, charts by coordinates, remarks by case, and a page that is safe, small and whole."""

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from kedro.config import OmegaConfigLoader
from rich.console import Console
from safetensors.torch import save_file
from transformers import LlamaConfig

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.pipelines.reporting import create_pipeline, nodes
from ppo_rlhf.pipelines.reporting.charts import LineChart, Series, histogram, interval_bar, line_chart, nice_ticks
from ppo_rlhf.pipelines.reporting.curves import PANELS, panels_of
from ppo_rlhf.pipelines.reporting.figures import score_distribution, training_curves
from ppo_rlhf.pipelines.reporting.measures import measure, write_change, write_value
from ppo_rlhf.pipelines.reporting.page import MAX_TEXT, Report, render_page
from ppo_rlhf.pipelines.reporting.remarks import headline, remarks, verdict
from ppo_rlhf.pipelines.reporting.terminal import print_result
from ppo_rlhf.ppo.comparison import Decided
from ppo_rlhf.ppo.evaluation import EvaluationConfig
from ppo_rlhf.rewards.scorers import RewardComponentConfig, RewardConfig
from tests.pipelines.support import outputs_of

PROJECT = Path(__file__).parents[2]
SCRIPT = "<script>alert('x')</script> & \"quoted\" $title"
VOID = {"meta", "br"}
MANY = Decided(wins=450, losses=62)
GOOD = {"eval/win_rate": 0.88, "eval/win_rate_low": 0.85, "eval/win_rate_high": 0.91, "eval/kl": 4.0}


def history(iterations=20):
    rng = np.random.default_rng(0)
    keys = {key for panel in PANELS for key, _ in panel.curves} | {"objective/scores_p05", "objective/scores_p95"}
    table = pd.DataFrame({key: rng.uniform(0.1, 0.2, iterations) for key in sorted(keys)})
    table.insert(0, "iteration", np.arange(1, iterations + 1))
    return table.assign(**{"episode": table["iteration"] * 64.0, "time/iteration_s": 0.5})


def before_after(**changed):
    rows = {
        "judge_score": (0.0, 0.7),
        "reward": (0.0, 1.5),
        "grammatical_rate": (0.9, 0.92),
        "kl": (0.0, 4.0),
        "response_length": (20.0, 16.0),
        "truncated_fraction": (0.02, 0.01),
        "distinct_1": (0.1, 0.1),
        "distinct_2": (0.22, 0.19),
    }
    rows |= changed
    return pd.DataFrame([{"measure": name, "sft": sft, "ppo": ppo} for name, (sft, ppo) in rows.items()])


def sample_pairs(text="the film was warm .", rows=3):
    return pd.DataFrame(
        {
            "chosen": "drawn at random",
            "outcome": "win",
            "prompt": [text] * rows,
            "sft_response": text,
            "ppo_response": text,
            "sft_score": 0.1,
            "ppo_score": 0.9,
            "ppo_kl": 3.0,
        }
    )


def report(**changed):
    rng = np.random.default_rng(1)
    content = {
        "title": "PPO-RLHF report",
        "summary": GOOD,
        "prompts": 512,
        "decided_by": "the demo's gold judge",
        "before_after": before_after(),
        "history": history(),
        "sample_pairs": sample_pairs(),
        "sft_scores": rng.normal(0, 1, 100).tolist(),
        "ppo_scores": rng.normal(1, 1, 100).tolist(),
        "score_label": "Judge score",
        "settings": [("ppo.kl_coef", "0.15", "0.05")],
        "next_steps": [("Aligned policy", "data/06_models/ppo_policy/1")],
    }
    return Report(**(content | changed))


class _Checker(HTMLParser):
    """Collects text and attributes, and fails on a tag that is not closed in order."""

    def __init__(self):
        super().__init__()
        self.open, self.text, self.tags, self.attributes = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes another tag"

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text.append(data)


def read_page(page):
    checker = _Checker()
    checker.feed(page)
    assert checker.open == []
    return checker


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("reward", -0.071, "−0.07"),
        ("kl", 4.56, "4.6"),
        ("grammatical_rate", 0.918, "91.8%"),
        ("polite_rate", 0.5, "50.0%"),  # a person's own rate
        ("distinct_2", 0.1931, "0.193"),
        ("reward", float("nan"), "–"),
    ],
)
def test_values_are_written_with_the_decimals_and_sign_of_their_measure(name, value, text):
    assert write_value(name, value) == text


@pytest.mark.parametrize(
    ("name", "before", "after", "text"),
    [
        ("reward", 0.5, 1.75, "+1.25"),
        ("reward", 1.0, 0.5, "−0.50"),
        ("reward", 1.0, 1.001, "±0"),
        ("grammatical_rate", 0.9, 0.925, "+2.5 points"),
    ],
)
def test_changes_carry_their_sign_and_shares_change_in_points(name, before, after, text):
    assert write_change(name, before, after) == text


def test_rate_of_a_person_is_called_by_its_name():
    assert measure("very_polite_rate").label == "Very polite"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.5, 1.0]),
        (0.0, 4.0, [0.0, 1.0, 2.0, 3.0, 4.0]),
        (-0.9, 1.2, [-1.0, 0.0, 1.0, 2.0]),
        (3e-6, 1e-5, [2e-6, 4e-6, 6e-6, 8e-6, 1e-5]),
        (5.0, 5.0, [4.4, 4.6, 4.8, 5.0, 5.2, 5.4, 5.6]),
    ],
)
def test_ticks_are_round_and_enclose_the_values(low, high, expected):
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low
    assert ticks[-1] >= high
    step = float(f"{ticks[1] - ticks[0]:.6g}")
    assert step / 10 ** np.floor(np.log10(step)) == pytest.approx(round(step / 10 ** np.floor(np.log10(step))))
    if (low, high) != (0.0, 1.0) and low != high:
        assert ticks == pytest.approx(expected)


def test_curve_runs_from_corner_to_corner_of_its_axes():
    """The plot area is x 46 to 350 and y 156 (bottom) to 10 (top) of a 360 x 190 drawing."""
    chart = LineChart("Line", "", np.array([0.0, 10.0]), [Series("line", np.array([0.0, 4.0]))])
    assert 'd="M46 156L350 10"' in line_chart(chart)


def test_missing_measurements_are_bridged_and_a_single_one_is_a_dot():
    x = np.array([1.0, 2.0, 3.0])
    bridged = line_chart(LineChart("a", "", x, [Series("a", np.array([0.0, np.nan, 4.0]))]))
    single = line_chart(LineChart("a", "", x, [Series("a", np.array([np.nan, 2.0, np.nan]))]))
    assert "nan" not in bridged + single
    assert bridged.count('class="line') == 1
    assert single.count('class="line') == 0
    assert single.count("<circle") == 1


def test_values_below_the_floor_are_drawn_on_the_edge_and_said():
    series = Series("critic", np.array([-50.0, 0.5, 1.0]))
    chart = line_chart(LineChart("a", "", np.array([1.0, 2.0, 3.0]), [series], floor=-1.0, include=(0.0, 1.0)))
    assert "values below −1 lie on the edge" in chart
    assert 'd="M46 156L' in chart


def test_reference_level_is_drawn_only_where_curves_come_near_it():
    x = np.array([1.0, 2.0])
    near = line_chart(LineChart("kl", "", x, [Series("kl", np.array([0.0, 12.0]))], level=15.0))
    far = line_chart(LineChart("kl", "", x, [Series("kl", np.array([0.0, 2.0]))], level=15.0))
    assert 'class="level"' in near
    assert 'class="level"' not in far


def test_long_curves_are_thinned_but_keep_their_ends():
    x = np.arange(1.0, 100_001.0)
    chart = line_chart(LineChart("a", "", x, [Series("a", np.linspace(0.0, 4.0, len(x)))]))
    assert len(chart) < 10_000
    assert "M46 156L" in chart
    assert "L350 10" in chart


def test_histogram_is_drawn_when_every_score_is_the_same():
    chart = histogram(np.full(5, 2.0), np.full(5, 2.0), ("SFT", "PPO"), "Reward")
    assert "nan" not in chart
    assert chart.count('class="step') == 2


@pytest.mark.parametrize("scale", [1.0, -1.0, 1e-30, 1e30])
def test_charts_are_drawn_of_scores_that_only_rounding_parts(scale):
    scores = scale * np.array([0.3, 0.1 + 0.2])
    assert scores[0] != scores[1]
    ticks = nice_ticks(float(scores.min()), float(scores.max()))
    assert len(set(ticks)) == len(ticks) > 1
    drawn = histogram(scores, scores, ("SFT", "PPO"), "Reward")
    drawn += line_chart(LineChart("a", "", np.array([1.0, 2.0]), [Series("a", scores)]))
    assert "nan" not in drawn


def test_interval_bar_places_its_ends_in_proportion():
    """0 to 100 % is x 8 to 412."""
    assert 'class="span" d="M109 18H311"' in interval_bar(0.5, 0.25, 0.75)


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (0.51, 0.6, "PPO beats SFT"),
        (0.4, 0.49, "PPO loses to SFT"),
        (0.5, 0.7, "No clear difference between PPO and SFT"),
    ],
)
def test_a_winner_is_named_only_if_the_interval_is_on_one_side(low, high, text):
    assert verdict({"eval/win_rate_low": low, "eval/win_rate_high": high}, MANY) == text


TOO_FEW = "Too few held-out prompts to tell PPO and SFT apart"


@pytest.mark.parametrize(
    ("wins", "losses", "text"),
    [(4, 0, TOO_FEW), (5, 0, TOO_FEW), (6, 0, "PPO beats SFT"), (0, 5, TOO_FEW), (0, 6, "PPO loses to SFT")],
)
def test_no_winner_is_named_from_prompts_that_chance_alone_would_decide_so(wins, losses, text):
    """All won or all lost, so the bootstrap's interval is one point: 1 or 0."""
    rate = float(wins > 0)
    summary = GOOD | {f"eval/win_rate{end}": rate for end in ("", "_low", "_high")}
    decided = Decided(wins, losses)
    assert verdict(summary, decided) == text
    found = remarks(summary, decided, before_after())
    assert len(found) == (0 if text == "PPO beats SFT" else 1)
    if text == TOO_FEW:
        assert f"{wins} held-out prompts were won and {losses} lost" in found[0]


def test_page_and_terminal_claim_nothing_from_four_prompts_that_were_all_won(capsys):
    outputs = run_reporting(prompts=4, evaluation_summary=GOOD | {"prompts": 4, "decided_by": "the reward"})
    text = "".join(read_page(outputs["report"]).text)
    assert TOO_FEW in text
    assert "PPO beats SFT" not in text
    said = "4 held-out prompts were won and 0 lost: equal policies would differ by that much with probability 0.12"
    assert said in text
    assert said in " ".join(capsys.readouterr().out.split())


def test_headline_gives_rate_interval_number_of_prompts_and_judge():
    assert headline(GOOD, 1512, "the judge a:b") == (
        "PPO's response is the better one on 88.0% of 1,512 held-out prompts (95% interval 85.0% to 91.0%; ties count "
        "half), decided by the judge a:b."
    )


def test_good_numbers_draw_no_remark():
    assert remarks(GOOD, MANY, before_after(), 0.74) == []


@pytest.mark.parametrize(
    ("summary", "table", "accuracy", "text"),
    [
        ({"eval/win_rate_low": 0.45}, {}, None, "contains 50%"),
        ({"eval/win_rate_low": 0.3, "eval/win_rate_high": 0.45}, {}, None, "PPO lost to SFT"),
        ({}, {"judge_score": (0.5, 0.1)}, None, "exploits its reward"),
        (
            {"eval/win_rate_low": 0.3, "eval/win_rate_high": 0.45},
            {"judge_score": (0.5, 0.1)},
            None,
            "exploits its reward",
        ),
        ({}, {"grammatical_rate": (0.9, 0.8)}, None, "95% of SFT's rate"),
        ({}, {}, 0.55, "right on only 55.0%"),
    ],
)
def test_each_thing_that_looks_off_draws_one_remark(summary, table, accuracy, text):
    found = remarks(GOOD | summary, MANY, before_after(**table), accuracy)
    assert len(found) == 1
    assert text in found[0]


def test_a_remark_names_no_setting_that_the_advice_moves():
    """The advice has the curves: a second opinion beside it, from the result alone, could only contradict it."""
    worst = GOOD | {"eval/win_rate_low": 0.1, "eval/win_rate_high": 0.2, "eval/kl": 90.0}
    for summary in (worst, GOOD | {"eval/kl": 0.01}, GOOD | {"eval/win_rate_low": 0.4}):
        bad = before_after(distinct_2=(0.2, 0.02), truncated_fraction=(0.0, 0.9), response_length=(20.0, 90.0))
        assert "ppo." not in " ".join(remarks(summary, MANY, bad, 0.5))


def test_what_a_model_wrote_cannot_become_markup():
    page = render_page(
        report(
            title=SCRIPT,
            decided_by=SCRIPT,
            sample_pairs=sample_pairs(SCRIPT),
            score_label=SCRIPT,
            settings=[(SCRIPT, SCRIPT, SCRIPT)],
            next_steps=[(SCRIPT, SCRIPT)],
            before_after=before_after(**{"<script>_rate": (0.1, 0.2)}),
        )
    )
    checked = read_page(page)
    assert "script" not in checked.tags
    assert "".join(checked.text).count(SCRIPT) >= 3 * 3 + 2 + 3 + 2


def test_page_needs_nothing_but_itself():
    checked = read_page(render_page(report()))
    assert not {"script", "link", "img", "iframe", "object"} & set(checked.tags)
    assert not {name for name, _ in checked.attributes} & {"src", "href", "srcset", "data"}
    assert "url(" not in render_page(report())
    assert "://" not in render_page(report())


def test_page_has_its_sections_charts_and_numbers():
    checked = read_page(render_page(report(reward_model_accuracy=0.742)))
    text = "".join(checked.text)
    for expected in (
        "PPO beats SFT",
        "88.0% of 512",
        "Before and after",
        "Samples",
        "ppo.kl_coef",
        "ppo_policy/1",
        "74.2%",
    ):
        assert expected in text
    assert checked.tags.count("svg") == len(PANELS) + 2
    assert "20 iterations, 1,280 episodes, 10 seconds" in text


def test_page_stays_small_after_a_long_run_with_long_responses():
    page = render_page(report(history=history(5_000), sample_pairs=sample_pairs("word " * 20_000, rows=14)))
    assert len(page.encode()) < 500_000


def test_long_prompt_keeps_its_end_and_long_response_its_start():
    text = "START" + "x" * (2 * MAX_TEXT) + "END"
    pairs = sample_pairs(rows=1).assign(prompt=text, ppo_response=text)
    page = render_page(report(sample_pairs=pairs))
    assert page.count("START") == 1
    assert page.count("END") == 1


def test_page_is_whole_after_one_iteration_with_few_metrics():
    table = pd.DataFrame({"iteration": [1], "objective/scores": [0.5], "loss/policy_avg": [np.nan]})
    checked = read_page(render_page(report(history=table)))
    assert checked.tags.count("svg") == 3
    assert [panel.name for panel in panels_of(table)] == ["score"]
    assert "nan" not in "".join(checked.text)


def test_figures_hold_every_curve_and_survive_json_as_plain_lists():
    table = history()
    table.loc[3, "objective/kl"] = np.nan
    figure = json.loads(training_curves(table).to_json())
    assert len(figure["data"]) == sum(len(panel.curves) for panel in PANELS)
    kl = next(trace for trace in figure["data"] if trace["name"].startswith("KL from SFT"))
    assert kl["x"] == list(range(1, 21))
    assert kl["y"][3] is None
    assert kl["y"][:3] == table["objective/kl"][:3].tolist()
    scores = json.loads(score_distribution([0.0, 1.0], [1.0, 2.0], "Reward").to_json())
    assert [(trace["name"], trace["x"]) for trace in scores["data"]] == [("SFT", [0.0, 1.0]), ("PPO", [1.0, 2.0])]


def test_terminal_shows_the_table_and_never_cuts_a_path():
    path = "data/06_models/ppo_policy/" + "very-long-name-" * 10
    written = io.StringIO()
    console = Console(file=written, width=60)
    print_result(console, "PPO wins [b]not markup[/b].", before_after(), ["KL is high."], [("Aligned policy", path)])
    text = written.getvalue()
    assert "[b]not markup[/b]" in text
    assert "KL is high." in text
    assert re.search(r"Grammatical\s+90.0%\s+92.0%\s+\+2.0 points", text)
    assert path in "".join(re.findall(r"[\w/-]+", text.partition("Aligned policy")[2]))


def run_reporting(prompts=6, **changed):
    scores = np.linspace(0.0, 1.0, prompts)
    evaluation = pd.DataFrame(
        {
            "prompt": [f"prompt {row}" for row in range(prompts)],
            "response": "warm film",
            "reward": scores,
            "kl": 1.0,
            "length": 3,
            "terminated": True,
        }
    )
    inputs = {
        "training_history": history(),
        "evaluation_summary": {**GOOD, "prompts": 6, "decided_by": "the reward"},
        "before_after": before_after(),
        "sample_pairs": sample_pairs(),
        "sft_evaluation": evaluation,
        "ppo_evaluation": evaluation.assign(reward=scores + 1.0),
        "sft_policy": PretrainedHandle("org/sft"),
        "ppo_policy": PretrainedHandle(str(Path.cwd() / "data/06_models/ppo_policy/1")),
        "params:ppo": PPOConfig(kl_coef=0.15),
        "params:reward": RewardConfig(components=[RewardComponentConfig(type="function", function="mine:score")]),
        "params:evaluation": EvaluationConfig(judge="mine:judge", seed=7),
        "params:reporting": nodes.ReportingConfig(title="My run", report_path="elsewhere/report.html"),
    }
    return outputs_of(create_pipeline(), {"reward_model": None} | inputs | changed)


def test_pipeline_writes_page_and_plots_and_prints_the_result_last(capsys):
    outputs = run_reporting()
    assert set(outputs) == {"report", "training_curves_plot", "score_distribution_plot"}
    page = "".join(read_page(outputs["report"]).text)
    for expected in (
        "My run",
        "ppo.kl_coef",
        "mine:score, weight 1",
        "evaluation.judge",
        "org/sft",
        "elsewhere/report.html",
    ):
        assert expected in page
    assert "evaluation.seed" not in page  # it follows globals, it is no setting of the group
    printed = capsys.readouterr().out
    for expected in (
        "88.0% of 6 held-out prompts",
        "decided by the reward",
        "elsewhere/report.html",
        "kedro mlflow ui",
    ):
        assert expected in " ".join(printed.split())
    assert "data/06_models/ppo_policy/1" in printed
    assert str(Path.cwd()) not in printed


def test_page_says_what_to_change_first_from_settings_and_curves():
    far = history().assign(**{"objective/kl": 30.0})
    page = "".join(read_page(run_reporting(training_history=far)["report"]).text)
    assert "What to change first" in page
    assert "1. [KL: kl_alarm] KL is 30 nats per response, above 20" in page
    assert "Raise ppo.kl_coef from 0.15 to 0.45." in page
    assert "kl_alarm]" not in page.partition("What to change first")[0]
    patient = PPOConfig(kl_coef=0.15, kl_alarm=40.0, kl_warning=35.0)
    page = "".join(read_page(run_reporting(**{"training_history": far, "params:ppo": patient})["report"]).text)
    assert "kl_alarm]" not in page


def test_advice_cannot_become_markup_and_without_any_there_is_no_section():
    found = read_page(render_page(report(advice=[SCRIPT, "second"])))
    assert SCRIPT in "".join(found.text)
    assert "script" not in found.tags
    assert "What to change first" not in render_page(report())


def test_what_else_speaks_for_a_change_stands_below_it():
    page = render_page(report(advice=["1. first.", "   [also other] more.", "2. second."]))
    assert '<p>1. first.</p><p class="also">[also other] more.</p><p>2. second.</p>' in page


def test_accuracy_of_the_reward_model_is_read_from_the_model_itself(tmp_path):
    config = LlamaConfig()
    config.held_out_accuracy = 0.61
    config.save_pretrained(tmp_path)
    save_file({}, tmp_path / "model.safetensors")
    reward = RewardConfig(components=[RewardComponentConfig(type="model")])
    page = run_reporting(**{"reward_model": PretrainedHandle(str(tmp_path)), "params:reward": reward})["report"]
    assert "right on only 61.0% of its held-out pairs" in page
    assert "the reward model, weight 1" in page


def test_pipeline_is_one_namespace_whose_nodes_have_docstrings():
    pipeline = create_pipeline()
    assert {node.name for node in pipeline.nodes} == {
        f"reporting.{name}" for name in ("plot_training", "plot_scores", "write_report", "print_summary")
    }
    assert all((node.func.__doc__ or "").strip() for node in pipeline.nodes)


@pytest.mark.parametrize("environment", ["base", "test"])
def test_printed_path_is_where_the_catalog_writes_the_page(environment):
    config = OmegaConfigLoader(
        conf_source=str(PROJECT / "conf"),
        base_env="base",
        default_run_env=environment,
        merge_strategy={"parameters": "soft"},
    )
    settings = nodes.ReportingConfig(**config["parameters"]["reporting"])
    assert settings.report_path == config["catalog"]["report"]["dataset"]["filepath"]


def test_page_template_has_no_placeholder_left():
    assert not re.search(r"\$[a-z_]+", render_page(report()))
