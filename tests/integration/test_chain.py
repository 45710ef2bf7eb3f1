"""The whole DAG through the command line, as a user runs it: `kedro run --env test` in a copy of the project."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from kedro.config import OmegaConfigLoader
from kedro.io import DataCatalog

from ppo_rlhf.pipeline_registry import register_pipelines
from ppo_rlhf.runtime.metrics_file import EVALUATION, ITERATION, read_lines
from ppo_rlhf.settings import CONFIG_LOADER_ARGS
from tests.contracts import checkers
from tests.integration.outcomes import Run
from tests.integration.processes import kedro_run

ROOT = Path(__file__).parents[2]


def digest(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_chain_ends_with_the_table_and_where_to_look_next(chain: Run) -> None:
    for words in ("held-out prompts", "SFT", "PPO", "report.html", "kedro mlflow ui", "kedro viz run --env test"):
        assert words in chain.output


def test_lines_in_a_file_are_whole_and_without_padding(chain: Run) -> None:
    lines = chain.output.splitlines()
    assert [line for line in lines if line.endswith(" ")] == []
    [result] = [line for line in lines if "held-out prompts (95% interval" in line]
    assert result.endswith("decided by the judge ppo_rlhf.demo.judge:gold_score.")


def test_every_persisted_dataset_is_written_below_data_test_and_the_raw_data_stay_as_they_are(chain: Run) -> None:
    assert digest(chain.project / "data/01_raw") == digest(ROOT / "data/01_raw")
    assert {path.name for path in (chain.project / "data").iterdir()} == {"01_raw", "test"}
    for name in ("report.html", "before_after.csv", "sample_pairs.csv", "evaluation_summary.json"):
        assert (chain.project / "data/test/08_reporting" / name).stat().st_size > 0


def test_every_table_and_plot_has_a_preview_that_kedro_viz_can_send(
    chain: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(chain.project)
    entries = OmegaConfigLoader(str(chain.project / "conf"), env="test", **CONFIG_LOADER_ARGS)["catalog"]
    catalog = DataCatalog.from_config({name: entry for name, entry in entries.items() if not name.startswith("_")})
    written = [name for name in register_pipelines()["__default__"].datasets() if name in catalog]
    shown = {name: json.dumps(catalog[name].preview()) for name in written if hasattr(catalog[name], "preview")}
    assert {"preferences", "evaluation_prompts", "sample_pairs", "training_curves_plot"} <= set(shown)


def test_the_mlflow_run_is_finished_with_every_hyperparameter_as_a_param_of_its_own(chain: Run) -> None:
    assert chain.tracked.info.status == "FINISHED"
    params = chain.tracked.data.params
    assert params["ppo.kl_coef"] == "0.08"
    assert params["ppo.gamma"] == "1.0", "defaults are logged too"
    assert {"seed", "pipeline", "environment", "ppo.not_default"} <= set(chain.tracked.data.tags)


def test_the_metrics_logged_are_those_documented(chain: Run) -> None:
    documented = checkers.documented_metrics((ROOT / "docs/metrics.md").read_text())
    of_others = {"throughput/mfu", "eval/pass_at_<k>", "response/turns"}  # of some GPUs and settings
    of_others |= {"response/redraws", "response/uniform_prompts"}
    of_others |= {"critic/loss", "critic/explained_variance", "critic/learning_rate", "critic/eval_explained_variance"}
    of_others |= {"reward_std/<component>"}  # `test_normalised_components.py` has it
    of_others |= {"reward/disagreement"}  # `test_combined_rewards.py` has it
    of_others |= {"eval/judge_gap", "eval/judge_gap_p", "eval/judge_gap_prompts"}  # of rewards with few values
    of_others |= {
        "eval/attack_share",
        "eval/attack_share_sft",
        "eval/attack_share_p",
    }  # `test_reward_holes.py` has them
    of_others |= {key for key in documented if key.startswith("eval/reference_")}  # `test_recipes.py` has them
    of_others |= {"eval/since_best_exploits", "eval/since_best_level", "eval/since_best_exported"}  # with a judge
    of_others |= {key for key in documented if key.endswith("_halvings")}  # `test_halvings.py` has them
    of_others |= {key for key in documented if key.startswith("judge/")}  # `test_llm_judge.py` has them
    assert {"eval/kl_se", "eval/reward_se"} <= set(chain.metrics())
    assert re.search(r"eval/reward_sft \d[\d.e-]{0,9}(,|$)", chain.tracked.data.tags["standard_errors"])  # three digits
    assert set(checkers.metric_problems(chain.metrics(), documented)) <= {f"never logged: {key}" for key in of_others}


def test_each_iteration_is_logged_once_and_the_final_evaluation_at_the_last_step(chain: Run) -> None:
    metrics = chain.metrics()
    assert [step for step, _ in metrics["objective/kl"]] == [1, 2, 3]
    assert [step for step, _ in metrics["eval/win_rate"]] == [2, 3]
    assert [step for step, _ in metrics["eval/reward_sft"]] == [3]
    assert [step for step, _ in metrics["eval/since_best_p"]] == [2, 3]  # only evaluations while training have it


def test_optimiser_steps_are_batches_times_epochs_times_minibatches(chain: Run) -> None:
    """conf/test: 48 episodes in batches of 8 x 2, two epochs of two minibatches: 3 x 2 x 2."""
    assert chain.metrics()["optimiser/steps"][-1] == (3, 12.0)


def test_responses_are_shown_token_by_token_in_mlflow_and_in_the_report(chain: Run) -> None:
    """Samples are due at the first and the last of the three iterations."""
    pages = [artifact.path for artifact in chain.client.list_artifacts(chain.tracked.info.run_id, "token_view")]
    assert pages == [f"token_view/iteration_{iteration:06d}.html" for iteration in (1, 3)]
    first, newest = json.loads((chain.project / "data/test/08_reporting/token_samples.json").read_text())
    assert (first["iteration"], newest["iteration"]) == (1, 3)
    assert (
        max(abs(kl) for sample in first["samples"] for kl in sample["numbers"]["kl"]) < 1e-4
    )  # the policy is still SFT
    history = pd.read_csv(chain.project / "data/test/07_model_output/training_history/training_history.csv")
    scores = [sample["score"] for sample in newest["samples"]]
    assert scores == sorted(scores, reverse=True)
    assert scores[-1] <= history["objective/scores"].iloc[-1] <= scores[0]
    report = (chain.project / "data/test/08_reporting/report.html").read_text()
    assert report.count('class="token"') == sum(len(s["tokens"]) for shown in (first, newest) for s in shown["samples"])


def test_checkpoints_lie_below_the_run_id_pruned_to_the_newest_and_the_best(chain: Run) -> None:
    kept = {path.name for path in chain.folder.iterdir()}
    newest = {"iteration_000002", "iteration_000003"}
    assert (
        newest
        <= kept
        <= newest
        | {
            "outputs.json",
            "iteration_000001",
            "run.lock",
            "completions",
            "callbacks.sent.json",
            "run.json",
            "metrics.jsonl",
            "mlflow.sent.json",
            "token_view",
            "tensorboard",
        }
    )
    lines = [(line.kind, line.step) for line in read_lines(chain.folder / "metrics.jsonl")]
    assert [step for kind, step in lines if kind == ITERATION] == [1, 2, 3]
    assert [step for kind, step in lines if kind == EVALUATION] == [2, 3]


@pytest.mark.slow
def test_aligning_leaves_a_persons_own_models_as_they_are(
    chain: Run, make_project: Callable[[], Path], tmp_path: Path
) -> None:
    """`align` with models, a reward function and prompts of one's own, named in --params and conf/local only."""
    own = tmp_path / "own"
    shutil.copytree(chain.model("sft_policy"), own / "sft")
    shutil.copytree(chain.model("reward_model"), own / "reward")
    before = digest(own)
    project = make_project()
    (project / "my_reward.py").write_text(
        "def length(prompts, completions, **columns):\n    return [float(len(text.split())) for text in completions]\n"
    )
    (project / "conf/local/parameters.yml").write_text(
        "reward: {components: [{type: model}, {type: function, function: 'my_reward:length', weight: 0.1}]}\n"
        "ppo: {total_episodes: 16, per_device_train_batch_size: 8, response_length: 8}\n"
        "evaluation: {iteration_prompts: 8}\nprompts: {max_held_out: 8}\n"
    )
    prompts = project / "my_prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"burning station ( plot ) : {w}"}) + "\n" for w in "abcdefgh"))
    paths = f"sft_model_path={own}/sft,reward_model_path={own}/reward,prompts_path={prompts}"
    finished = kedro_run(project, "--pipelines", "align", "--params", paths)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert digest(own) == before
    history = pd.read_csv(project / "data/07_model_output/training_history/training_history.csv")
    total = history["reward/model"] + 0.1 * history["reward/length"]
    assert history["objective/scores"].tolist() == pytest.approx(total.tolist(), abs=1e-5)
