"""Checkpoints: all of the state bit for bit, whole or not there at all, and damage is found and named."""

import json
import os
import shutil
import stat
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ppo_rlhf.checkpoints import files, store
from ppo_rlhf.checkpoints.evaluations import prune_run
from ppo_rlhf.checkpoints.files import (
    Checkpoint,
    checkpoint_iterations,
    checkpoint_name,
    newest_whole_checkpoint,
)
from ppo_rlhf.checkpoints.restore import restore
from ppo_rlhf.checkpoints.store import (
    read_checkpoint,
    write_checkpoint,
)
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import CheckpointError
from ppo_rlhf.runtime import whole_files
from ppo_rlhf.runtime.manifests import MANIFEST, read_json
from ppo_rlhf.runtime.metrics_file import EVALUATION, ITERATION, METRICS, metrics_of, read_lines
from tests.checkpoints.support import assert_same, everything
from tests.ppo_runs import MEASURED


@pytest.fixture
def trained(make_run):
    """A run after one of its three iterations."""
    run = make_run()
    run.iteration()
    return run


def iterations_in(path: Path) -> list[dict[str, float]]:
    return [line.metrics for line in read_lines(path) if line.kind == ITERATION]


@pytest.fixture
def saved(trained, tmp_path):
    return write_checkpoint(tmp_path / "run", trained.state)


# --- round trip ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_gives_back_every_bit_of_the_state(make_run, tmp_path):
    run = make_run("gpt2")
    run.iteration()
    run.state.shaping.kl_controller.kl_coef = 0.0625
    run.state.learner.skipped_steps, run.state.learner.skipped_in_a_row = 7, 2
    run.state.progress.requests.end = run.state.progress.requests.restore_best = True
    run.state.progress.best_evaluation = 1
    before = everything(run.state)
    directory = write_checkpoint(tmp_path, run.state)
    assert_same(everything(run.state), before)
    fresh = make_run("gpt2", model={"seed": 9})
    read_checkpoint(Checkpoint(directory), fresh.state)
    assert_same(everything(fresh.state), before)
    for name in ("iteration", "episode"):
        assert getattr(fresh.state.progress, name) == getattr(run.state.progress, name)
    requests = fresh.state.progress.requests
    assert (requests.end, requests.restore_best, fresh.state.progress.best_evaluation) == (True, True, 1)
    for name in ("optimiser_steps", "skipped_steps", "skipped_in_a_row"):
        assert getattr(fresh.state.learner, name) == getattr(run.state.learner, name)
    assert fresh.state.shaping.kl_controller.kl_coef == 0.0625
    assert fresh.state.progress.history == run.state.progress.history == iterations_in(tmp_path / METRICS)
    assert read_json(directory / "state.json")["config"]["seed"] == run.config.seed


def test_a_checkpoint_does_not_grow_with_the_run(make_run, tmp_path):
    sizes = []
    for iterations in (100, 1000):
        state = make_run(total_episodes=12_000).state
        state.progress.history = [
            {"iteration": float(i), "objective/kl": 0.5, "objective/kl_coef": 0.05} for i in range(1, iterations + 1)
        ]
        state.progress.iteration = iterations
        directory = write_checkpoint(tmp_path / str(iterations), state)
        sizes.append(sum((directory / name).stat().st_size for name in files_of(directory)))
        fresh = make_run(total_episodes=12_000).state
        read_checkpoint(Checkpoint(directory), fresh)
        assert fresh.progress.history == state.progress.history
    assert abs(sizes[1] - sizes[0]) < 20  # more digits


@pytest.mark.parametrize("damage", ["missing", "shorter", "flipped", "another run's"])
def test_a_checkpoint_without_the_metrics_up_to_it_is_refused_with_the_name_of_their_file(
    saved, trained, make_run, damage
):
    file = saved.parent / METRICS
    if damage == "missing":
        file.unlink()
    elif damage == "shorter":
        os.truncate(file, file.stat().st_size - 1)
    elif damage == "flipped":
        flip(file)
    else:
        other = write_checkpoint(saved.parents[1] / "other", trained.state)
        file.write_bytes((other.parent / METRICS).read_bytes())
    run = make_run(model={"seed": 9})
    before = everything(run.state)
    with pytest.raises(CheckpointError) as refused:
        restore(run.state, saved)
    assert str(refused.value).startswith(f"{file}: ")
    assert "\n" not in str(refused.value)
    assert_same(everything(run.state), before)


def test_lines_behind_a_checkpoint_do_not_hinder_going_on_from_it(saved, trained, make_run):
    trained.iteration()
    metrics_of(saved.parent).catch_up(trained.state.progress.history)
    (saved.parent / METRICS).open("ab").write(b'{"kind": "iter')  # as a kill leaves it
    fresh = make_run()
    restore(fresh.state, saved)
    assert fresh.state.progress.history == trained.state.progress.history[:1]


def test_another_number_of_iterations_than_the_checkpoints_is_refused(make_run, tmp_path):
    run = make_run()
    run.iteration()
    run.state.progress.history = []
    directory = write_checkpoint(tmp_path, run.state)
    with pytest.raises(CheckpointError, match=rf"^{tmp_path / METRICS}: has 0 iterations up to .* iteration 1\."):
        restore(make_run().state, directory)


EVERY_STATE = {
    "kl_controller": "adaptive",
    "kl_horizon": 30.0,
    "reward_normalisation": "running",
    "target_kl": 0.05,
    "weight_decay": 0.01,
    "kl_warning": 1e-4,
}


@pytest.mark.parametrize(
    "options",
    [pytest.param({"dtype": "float64"}, marks=pytest.mark.slow), {"dtype": "bfloat16", **EVERY_STATE}],
    ids=len,
)
def test_going_on_from_a_checkpoint_equals_never_having_stopped(make_run, tmp_path, caplog, options):
    whole = make_run("gpt2", **options)
    whole.iteration()
    directory = write_checkpoint(tmp_path, whole.state)
    while not whole.state.progress.finished:
        whole.iteration()
    said = caplog.messages.copy()
    caplog.clear()
    resumed = make_run("gpt2", **options)
    read_checkpoint(Checkpoint(directory), resumed.state)
    shutil.rmtree(directory)  # nothing of the state may live on in the files
    while not resumed.state.progress.finished:
        resumed.iteration()
    assert_same(everything(resumed.state), everything(whole.state))
    histories = [
        [{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in run.state.progress.history]
        for run in (whole, resumed)
    ]
    assert histories[0] == histories[1]
    assert resumed.state.extra_state() == whole.state.extra_state()
    assert caplog.messages == said[len(said) - len(caplog.messages) :]  # no alarm twice


def test_the_directory_holds_safetensors_and_json_that_follow_the_umask(trained, tmp_path):
    before = os.umask(0o027)
    try:
        directory = write_checkpoint(tmp_path / "run", trained.state)
    finally:
        os.umask(before)
    names = files_of(directory)
    assert {"state.json", "policy/config.json", "policy/model.safetensors"} <= set(names)
    assert {name.rsplit(".", 1)[-1] for name in names} <= {"safetensors", "json", "jinja"}
    assert {stat.S_IMODE((directory / name).stat().st_mode) for name in names} == {0o640}


def test_a_checkpoint_of_another_architecture_is_refused(saved, make_run):
    other = make_run(model={"hidden_size": 32})
    with pytest.raises(CheckpointError, match=r"iteration_000001: .*models") as refusal:
        read_checkpoint(Checkpoint(saved), other.state)
    assert "\n" not in str(refusal.value)


# --- damage ----------------------------------------------------------------------------------------------------------


def files_of(directory):
    return sorted(p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file())


def refusal(directory) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(directory)
    return str(caught.value)


def flip(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1
    path.write_bytes(whole)


@pytest.mark.parametrize(
    "damage",
    [
        flip,
        pytest.param(lambda path: path.write_bytes(path.read_bytes()[:-1]), marks=pytest.mark.slow),
        pytest.param(Path.unlink, marks=pytest.mark.slow),
    ],
)
def test_a_file_that_was_changed_cut_off_or_lost_is_refused_by_name(saved, damage):
    for name in files_of(saved):
        path = saved / name
        whole = path.read_bytes()
        damage(path)
        assert str(path) in refusal(saved) or name == "manifest.json"
        path.write_bytes(whole)
    Checkpoint(saved)


@pytest.mark.parametrize(
    "flipped", [pytest.param(1, marks=pytest.mark.slow), 4, pytest.param(32, marks=pytest.mark.slow)]
)
def test_no_changed_byte_of_the_manifest_gives_other_content(saved, flipped):
    path = saved / "manifest.json"
    whole = path.read_bytes()
    content = json.loads(whole)
    for position in range(0, len(whole), 3):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ flipped]) + whole[position + 1 :])
        if newest_whole_checkpoint(saved.parent) is not None:
            assert json.loads(path.read_bytes()) == content  # a space has become another one


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        pytest.param("[" * 100_000, marks=pytest.mark.slow),
        pytest.param("[]", marks=pytest.mark.slow),
        pytest.param("{}", marks=pytest.mark.slow),
        pytest.param('{"files": 3}', marks=pytest.mark.slow),
        pytest.param('{"format": 1, "files": {"state.json": 3}}', marks=pytest.mark.slow),
    ],
)
def test_a_manifest_that_is_none_is_refused(saved, content):
    (saved / "manifest.json").write_text(content)
    assert refusal(saved).startswith(f"{saved / 'manifest.json'}: ")


def test_a_manifest_of_another_format_is_refused(saved):
    path = saved / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
    assert "format 2" in refusal(saved)


def test_of_a_part_just_its_files_are_checked(saved):
    flip(saved / "critic.safetensors")
    Checkpoint(saved, part="policy")
    flip(saved / "policy" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"policy/model\.safetensors: damaged"):
        Checkpoint(saved, part="policy")


@pytest.mark.parametrize("files", [{}, {"state.json": {"bytes": 1, "sha256": ""}}])
def test_a_manifest_without_files_of_the_part_is_refused(saved, files):
    (saved / "manifest.json").write_text(json.dumps({"format": 1, "iteration": 1, "files": files}))
    with pytest.raises(CheckpointError, match=r"manifest\.json: lists no files of policy"):
        Checkpoint(saved, part="policy")


def test_a_file_that_was_added_is_refused_unless_it_is_hidden(saved):
    (saved / "policy" / ".DS_Store").write_text("a desktop's")
    Checkpoint(saved)
    added = saved / "policy" / "adapter_config.json"
    added.write_text("{}")
    assert refusal(saved).startswith(f"{added}: ")


def test_a_checkpoint_under_the_name_of_another_iteration_or_run_is_refused(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "another" / saved.name)
    assert newest_whole_checkpoint(tmp_path / "another") is None
    other = saved.rename(saved.with_name("iteration_000009"))
    assert "iteration 1" in refusal(other)
    Checkpoint(other.rename(saved.with_name("kept_for_later")))


def test_the_newest_whole_checkpoint_is_the_one_before_a_damaged_one_which_is_named(trained, saved, caplog):
    trained.iteration()
    second = write_checkpoint(saved.parent, trained.state)
    assert newest_whole_checkpoint(saved.parent) == second
    flip(second / "critic.safetensors")
    assert newest_whole_checkpoint(saved.parent) == saved
    assert str(second / "critic.safetensors") in caplog.text
    (second / "manifest.json").write_text("{")
    assert newest_whole_checkpoint(saved.parent) == saved
    (saved / "state.json").unlink()
    assert newest_whole_checkpoint(saved.parent) is None
    assert newest_whole_checkpoint(saved.parent / "nothing") is None


def sealed(directory: Path) -> Path:
    """Write the manifest of the files as they are now, as a program would that changes a checkpoint."""
    iteration = read_json(directory / MANIFEST)["iteration"]
    content = directory.parent / "content"
    shutil.copytree(directory, content, ignore=lambda *_: [MANIFEST])
    files.write_directory(directory, iteration, lambda draft: shutil.copytree(content, draft, dirs_exist_ok=True))
    shutil.rmtree(content)
    Checkpoint(directory)
    return directory


def _tensors(file: str, name: str, value: torch.Tensor | None):
    def damage(directory: Path) -> None:
        tensors = load_file(directory / file)
        name_of = next(each for each in tensors if each.endswith(name))
        old = tensors.pop(name_of)
        if value is not None:
            tensors[name_of] = value.to(old.dtype) if value.dim() else torch.full_like(old, float(value))
        save_file(tensors, directory / file, metadata={"format": "pt"})

    return damage


def _state(**values: object):
    def damage(directory: Path) -> None:
        state = read_json(directory / "state.json")
        (directory / "state.json").write_text(json.dumps({**state, **values}))

    return damage


def _moments(mean: float):
    extra = {"kl_controller": {"kl_coef": 0.1}, "reward_moments": {"count": 1, "mean": mean, "m2": 0.0}}
    return _state(extra={**extra, "early_stops": 0, "component_moments": {}})


NAN, EMPTY = torch.tensor(float("nan")), torch.zeros(2, 3)
UNFIT = {
    "moment's shape": (_tensors("policy_optimizer.safetensors", ".exp_avg", EMPTY), r"exp_avg has shape \(2, 3\), not"),
    "critic's moment": (
        _tensors("critic_optimizer.safetensors", ".exp_avg_sq", EMPTY),
        r"exp_avg_sq has shape \(2, 3\)",
    ),
    "step's shape": (_tensors("policy_optimizer.safetensors", ".step", EMPTY), r"step has shape \(2, 3\), not \(\)"),
    "lost moment": (_tensors("policy_optimizer.safetensors", ".exp_avg", None), "has the moments exp_avg_sq, step"),
    "NaN moment": (_tensors("critic_optimizer.safetensors", ".exp_avg", NAN), "moment .*exp_avg holds NaN"),
    "NaN critic": (
        _tensors("critic.safetensors", "value_head.weight", NAN),
        r"critic\.safetensors: .*value_head.* NaN",
    ),
    "NaN policy": (_tensors("policy/model.safetensors", "norm.weight", NAN), r"/policy: the weight .*norm.* NaN"),
    "lost weight": (_tensors("policy/model.safetensors", "norm.weight", None), r"/policy: the weight .*norm.* missing"),
    "billion": (_state(iteration=1_000_000_000), "iteration=1000000000, but manifest.json is of iteration 1"),
    "negative": (_state(episode=-12), "episode=-12 is no number"),
    "text": (_state(optimiser_steps="4"), "optimiser_steps='4' is no number"),
    "no length": (_state(metrics=None), "has another form"),
    "NaN mean": (_moments(float("nan")), "mean is NaN"),
}


@pytest.mark.parametrize("what", UNFIT)
def test_a_checkpoint_whose_content_does_not_fit_is_refused_in_one_line(saved, make_run, what):
    damage, message = UNFIT[what]
    damage(saved)
    with pytest.raises(CheckpointError, match=message) as refused:
        restore(make_run().state, sealed(saved))
    assert str(refused.value).startswith(str(saved))
    assert "\n" not in str(refused.value)


def test_a_checkpoint_that_was_only_sealed_again_is_read(saved, trained, make_run):
    fresh = make_run()
    restore(fresh.state, sealed(saved))
    assert_same(everything(fresh.state), everything(trained.state))


def test_a_damaged_checkpoint_is_not_read_into_the_state(saved, make_run):
    flip(saved / "critic.safetensors")
    run = make_run(model={"seed": 9})
    before = everything(run.state)
    with pytest.raises(CheckpointError, match=r"critic\.safetensors: damaged"):
        restore(run.state, saved)
    assert_same(everything(run.state), before)


# --- writing that fails ----------------------------------------------------------------------------------------------


def break_at(monkeypatch, name: str, error: BaseException):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(next(module for module in (store, files, whole_files) if hasattr(module, name)), name, fail)


@pytest.mark.parametrize(
    ("stage", "error"),
    [
        ("save_tensors", OSError(28, "No space left on device")),
        ("save_tensors", SafetensorError("I/O error: No space left on device")),
        ("follow_umask", SystemExit(143)),
        ("sync", KeyboardInterrupt()),
    ],
)
def test_a_failure_or_a_signal_while_writing_leaves_the_earlier_checkpoint_and_no_temporary(
    trained, saved, monkeypatch, stage, error
):
    trained.iteration()
    break_at(monkeypatch, stage, error)
    with pytest.raises(CheckpointError if isinstance(error, Exception) else type(error)):
        write_checkpoint(saved.parent, trained.state)
    assert sorted(path.name for path in saved.parent.iterdir()) == ["iteration_000001", METRICS]
    Checkpoint(saved)


def test_a_checkpoint_of_the_same_iteration_is_replaced(trained, saved, make_run):
    with torch.no_grad():
        trained.state.learner.critic.value_head.bias.fill_(3.5)
    assert write_checkpoint(saved.parent, trained.state) == saved
    assert sorted(path.name for path in saved.parent.iterdir()) == ["iteration_000001", METRICS]
    fresh = make_run()
    read_checkpoint(Checkpoint(saved), fresh.state)
    assert float(fresh.state.learner.critic.value_head.bias.detach()) == 3.5


# --- after a kill ----------------------------------------------------------------------------------------------------


def test_leftovers_of_a_killed_writer_are_swept_and_nothing_else(saved):
    run = saved.parent
    for name in (".iteration_000002.0123456789abcdef.draft", ".iteration_000001.fedcba9876543210.draft"):
        (run / name / "draft" / "policy").mkdir(parents=True)
        (run / name / "lock").touch()
    (run / ".nfs0001").write_text("of a file system")
    whole_files.delete_abandoned_drafts(run)
    assert sorted(path.name for path in run.iterdir()) == [".nfs0001", "iteration_000001", METRICS]
    Checkpoint(saved)


STEPS_OF_WRITING = 60


@pytest.mark.slow
def test_a_kill_at_any_step_of_writing_leaves_the_earlier_checkpoint_or_the_new_one(trained, saved):
    """Every change that the process makes to the disk is counted; a forked child dies right before the n-th one."""
    earlier = {name: (saved / name).read_bytes() for name in files_of(saved)}
    trained.iteration()
    finished = 0
    for step in range(1, STEPS_OF_WRITING + 1):
        child = os.fork()
        if child == 0:
            die_before_step(step)
            write_checkpoint(saved.parent, trained.state)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert status in (0, 9)  # whole, or killed
        finished += status == 0
        whole = newest_whole_checkpoint(saved.parent)
        assert whole in (saved, saved.with_name("iteration_000002"))
        assert {name: (saved / name).read_bytes() for name in files_of(saved)} == earlier
        whole_files.delete_abandoned_drafts(saved.parent)
        assert not list(saved.parent.glob(".*"))
        assert checkpoint_iterations(saved.parent) == [1] if whole == saved else [1, 2]
        shutil.rmtree(saved.with_name("iteration_000002"), ignore_errors=True)
        if finished == 2:
            break
    assert 0 < finished < step  # the steps reach from the first change to beyond the last


def die_before_step(step: int) -> None:
    """Let this process kill itself before its `step`-th fsync, rename, chmod, mkdir or open."""
    count = 0

    def counted(call):
        def wrapper(*arguments, **options):
            nonlocal count
            count += 1
            if count == step:
                os.kill(os.getpid(), 9)
            return call(*arguments, **options)

        return wrapper

    for name in ("fsync", "rename", "replace", "chmod", "mkdir", "open"):
        setattr(os, name, counted(getattr(os, name)))


# --- kept checkpoints ------------------------------------------------------------------------------------------------


def run_with(tmp_path, *iterations):
    for iteration in iterations:
        (tmp_path / checkpoint_name(iteration) / "policy").mkdir(parents=True)
        (tmp_path / checkpoint_name(iteration) / "policy" / "weights").write_text("w")
    return tmp_path


def test_iterations_are_listed_in_order_without_temporaries_and_strangers(tmp_path):
    run_with(tmp_path, 30, 4, 1000000)
    for name in (".iteration_000040.0123456789abcdef.draft", "completions"):
        (tmp_path / name).mkdir()
    assert checkpoint_iterations(tmp_path) == [4, 30, 1000000]
    assert checkpoint_iterations(tmp_path / "nothing") == []


@pytest.mark.parametrize("name", ["iteration_00000٣", "iteration_٣", "iteration_7", "iteration_0000007", "iteration_²"])
def test_only_the_name_that_a_run_writes_is_a_checkpoints(tmp_path, name):
    """A folder of another name was listed as iteration 3 or 7, whose folder is not there."""
    run_with(tmp_path, 4, 30)
    (tmp_path / name).mkdir()
    assert checkpoint_iterations(tmp_path) == [4, 30]
    prune_run(tmp_path, PPOConfig(save_total_limit=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["iteration_000030", name])


@pytest.mark.parametrize("is_there", [True, False])
def test_a_checkpoint_that_is_a_link_is_pruned_and_replaced_and_what_it_names_stays(trained, tmp_path, is_there):
    run, disk = tmp_path / "run", tmp_path / "disk"
    run.mkdir()
    if is_there:
        run_with(disk, 1)
    (run / "iteration_000001").symlink_to(disk / "iteration_000001")
    write_checkpoint(run, trained.state)
    Checkpoint(run / "iteration_000001", of_its_run=True)
    assert sorted(path.name for path in run.iterdir()) == ["iteration_000001", METRICS]
    assert not (run / "iteration_000001").is_symlink()
    (run / "iteration_000000").symlink_to(disk / "iteration_000001")
    prune_run(run, PPOConfig(save_total_limit=1))
    assert sorted(path.name for path in run.iterdir()) == ["iteration_000001", METRICS]
    assert (disk / "iteration_000001" / "policy" / "weights").is_file() == is_there


def test_a_checkpoint_on_another_disk_is_read_through_its_link_and_checked(saved, tmp_path):
    (tmp_path / "run2").mkdir()
    saved.rename(tmp_path / "there")
    saved.symlink_to(tmp_path / "there")
    assert newest_whole_checkpoint(saved.parent) == saved
    flip(saved / "state.json")
    assert newest_whole_checkpoint(saved.parent) is None


@pytest.mark.parametrize(
    ("keep", "best", "left"),
    [
        (2, None, [40, 50]),
        (2, 20, [20, 40, 50]),
        (1, 10, [10, 50]),
        (9, 10, [10, 20, 25, 30, 40, 50]),
        (2, 35, [40, 50]),  # a best that has no checkpoint
        (2, 25, [40, 50]),  # a best that only time asked to save
    ],
)
def test_pruning_keeps_the_newest_and_the_best(tmp_path, keep, best, left):
    run_with(tmp_path, 10, 20, 25, 30, 40, 50)
    if best is not None:
        metrics_of(tmp_path).append(EVALUATION, best, {"iteration": best, "eval/kl": 0.0, "eval/reward": 1.0})
    prune_run(tmp_path, PPOConfig(save_interval=10, save_total_limit=keep))
    assert checkpoint_iterations(tmp_path) == left
    assert len([path for path in tmp_path.iterdir() if path.name != METRICS]) == len(left)


def test_pruning_keeps_what_a_stop_would_export(tmp_path):
    run_with(tmp_path, 10, 20, 30, 40)
    prune_run(tmp_path, PPOConfig(save_total_limit=1), 20)
    assert checkpoint_iterations(tmp_path) == [20, 40]


def test_a_checkpoint_whose_deletion_is_cut_short_is_not_found_any_more(tmp_path, monkeypatch):
    run_with(tmp_path, 10, 20)

    def killed(*_, **__):
        raise SystemExit(143)

    monkeypatch.setattr(whole_files.shutil, "rmtree", killed)
    with pytest.raises(SystemExit):
        prune_run(tmp_path, PPOConfig(save_total_limit=1))
    assert checkpoint_iterations(tmp_path) == [20]
