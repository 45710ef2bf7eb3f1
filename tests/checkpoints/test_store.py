"""Checkpoints: all of the state bit for bit, whole or not there at all, and damage is found and named."""

import json
import os
import shutil
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError

from ppo_rlhf.checkpoints import files, store
from ppo_rlhf.checkpoints.files import (
    checkpoint_iterations,
    checkpoint_name,
    newest_whole_checkpoint,
    prune_checkpoints,
    sweep_leftovers,
    verify_checkpoint,
)
from ppo_rlhf.checkpoints.store import (
    CheckpointRequest,
    best_iteration,
    check_free_space,
    checkpoint_bytes,
    read_checkpoint,
    saved_config,
    saved_history,
    write_checkpoint,
)
from ppo_rlhf.core.errors import CheckpointError

COUNTERS = ("iteration", "episode", "optimiser_steps", "skipped_steps", "skipped_in_a_row")
TIMED = ("time/", "throughput/", "memory/")


def everything(state, snapshot) -> dict[str, object]:
    """All that training depends on, as one dictionary of tensors and plain values."""
    tensors = {f"policy.{n}": t for n, t in snapshot(state.policy).items()}
    tensors |= {f"critic.{n}": t for n, t in snapshot(state.critic).items()}
    for name in ("policy_optimizer", "critic_optimizer"):
        for index, moments in getattr(state, name).state_dict()["state"].items():
            tensors |= {f"{name}.{index}.{key}": value.clone() for key, value in moments.items()}
    return tensors


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        first[n].dtype == second[n].dtype and torch.equal(first[n], second[n]) for n in first
    )


@pytest.fixture
def trained(make_run):
    """A run after one of its three iterations."""
    run = make_run()
    run.iteration()
    return run


@pytest.fixture
def saved(trained, tmp_path):
    return write_checkpoint(tmp_path / "run", trained.state)


# --- round trip ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bitnet"])
def test_a_checkpoint_gives_back_every_bit_of_the_state(make_run, snapshot, tmp_path, capsys, kind, dtype):
    run = make_run(kind, dtype=dtype)
    run.iteration()
    run.state.kl_controller.kl_coef = 0.0625
    run.state.skipped_steps, run.state.skipped_in_a_row = 7, 2
    before = everything(run.state, snapshot)
    directory = write_checkpoint(tmp_path, run.state)
    assert same(everything(run.state, snapshot), before)  # saving changes nothing
    assert capsys.readouterr() == ("", "")  # and draws no bar of its own

    fresh = make_run(kind, dtype=dtype, model={"seed": 9})
    assert not same(everything(fresh.state, snapshot), before)
    read_checkpoint(directory, fresh.state)
    assert same(everything(fresh.state, snapshot), before)
    for name in COUNTERS:
        assert getattr(fresh.state, name) == getattr(run.state, name)
    assert fresh.state.kl_controller.kl_coef == 0.0625
    assert fresh.state.history == run.state.history


EVERY_STATE = {
    "kl_controller": "adaptive",
    "kl_horizon": 30.0,
    "kl_hold_iterations": 1,
    "reward_normalisation": "running",
    "target_kl": 0.05,
    "weight_decay": 0.01,
    "kl_warning": 1e-4,
}


@pytest.mark.parametrize(
    ("dtype", "options"),
    [("float32", {}), ("float64", {}), ("float32", EVERY_STATE), ("bfloat16", EVERY_STATE), ("float16", EVERY_STATE)],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "defaults",
)
def test_going_on_from_a_checkpoint_equals_never_having_stopped(make_run, snapshot, tmp_path, caplog, dtype, options):
    whole = make_run("gpt2", dtype=dtype, **options)
    directory = None
    while not whole.state.finished:
        whole.iteration()
        if whole.state.iteration == 1:
            directory = write_checkpoint(tmp_path, whole.state)

    said = caplog.messages.copy()
    caplog.clear()
    resumed = make_run("gpt2", dtype=dtype, **options)
    read_checkpoint(directory, resumed.state)
    shutil.rmtree(directory)  # nothing of the state may go on living in its files
    while not resumed.state.finished:
        resumed.iteration()
    assert same(everything(resumed.state, snapshot), everything(whole.state, snapshot))
    histories = [
        [{k: v for k, v in row.items() if not k.startswith(TIMED)} for row in run.state.history]
        for run in (whole, resumed)
    ]
    assert histories[0] == histories[1]
    assert resumed.state.extra_state() == whole.state.extra_state()
    assert caplog.messages == said[len(said) - len(caplog.messages) :]  # no alarm twice


def test_a_state_without_a_single_step_can_be_saved_and_read(make_run, snapshot, tmp_path):
    run, fresh = make_run(), make_run(model={"seed": 9})
    read_checkpoint(write_checkpoint(tmp_path, run.state), fresh.state)
    assert same(everything(fresh.state, snapshot), everything(run.state, snapshot))


def test_the_directory_holds_safetensors_and_json_only_and_the_policy_is_a_plain_model(saved):
    names = {path.relative_to(saved).as_posix() for path in saved.rglob("*") if path.is_file()}
    assert names >= {
        "manifest.json",
        "state.json",
        "policy/config.json",
        "policy/model.safetensors",
        "policy/tokenizer.json",
        "critic.safetensors",
        "policy_optimizer.safetensors",
        "critic_optimizer.safetensors",
    }
    assert {name.rsplit(".", 1)[-1] for name in names} <= {"safetensors", "json", "jinja"}
    assert saved.name == "iteration_000001"


def test_the_metrics_of_every_iteration_are_kept_in_the_checkpoint(saved, trained):
    assert saved_history(saved) == trained.state.history
    assert len(trained.state.history) == 1


def test_hyperparameters_are_kept_in_the_checkpoint(saved, trained):
    kept = saved_config(saved)
    assert kept["learning_rate"] == trained.config.learning_rate
    assert kept["seed"] == trained.config.seed


def test_a_checkpoint_of_another_architecture_is_refused(saved, make_run):
    other = make_run(model={"hidden_size": 32})
    with pytest.raises(CheckpointError, match=r"iteration_000001: made for other models: "):
        read_checkpoint(saved, other.state)


# --- integrity -------------------------------------------------------------------------------------------------------


def files_of(directory):
    return sorted(p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file())


def refusal(directory) -> str:
    with pytest.raises(CheckpointError) as caught:
        verify_checkpoint(directory)
    return str(caught.value)


def test_the_manifest_names_every_other_file_with_its_size_and_sha256(saved):
    manifest = verify_checkpoint(saved)
    assert manifest["iteration"] == 1
    assert sorted([*manifest["files"], "manifest.json"]) == files_of(saved)
    for name, entry in manifest["files"].items():
        assert entry["bytes"] == (saved / name).stat().st_size
        assert len(entry["sha256"]) == 64


def test_one_changed_byte_in_any_file_is_refused_with_its_name(saved):
    for name in files_of(saved):
        if name == "manifest.json":
            continue
        path = saved / name
        whole = path.read_bytes()
        middle = len(whole) // 2
        path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
        assert refusal(saved) == f"{path}: damaged; size or SHA-256 differs from the manifest"
        path.write_bytes(whole)
    verify_checkpoint(saved)


def test_a_file_that_was_cut_off_is_refused_with_its_name(saved):
    for name in files_of(saved):
        path = saved / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        assert str(path) in refusal(saved)
        path.write_bytes(whole)


def test_a_missing_file_is_refused_with_its_name(saved):
    for name in files_of(saved):
        path = saved / name
        whole = path.read_bytes()
        path.unlink()
        text = refusal(saved)
        assert text.startswith(f"{path}: ")
        if name != "manifest.json":
            assert text == f"{path}: missing, though the manifest lists it"
        path.write_bytes(whole)


@pytest.mark.parametrize("flipped", [1, 7, 32])
def test_a_manifest_with_any_byte_changed_is_refused(saved, flipped):
    path = saved / "manifest.json"
    whole = path.read_bytes()
    for position in range(0, len(whole), 3):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ flipped]) + whole[position + 1 :])
        assert refusal(saved).startswith(f"{path}: ")


def test_a_manifest_that_fits_other_files_but_not_its_own_hash_is_refused(saved):
    path = saved / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["iteration"] = 7
    path.write_text(json.dumps(manifest, indent=1))
    assert refusal(saved) == f"{path}: damaged; its content differs from its own SHA-256"


def test_a_file_that_was_added_is_refused_unless_it_is_hidden(saved):
    (saved / "policy" / ".DS_Store").write_text("a desktop's")
    verify_checkpoint(saved)
    added = saved / "policy" / "adapter_config.json"
    added.write_text("{}")
    assert refusal(saved) == f"{added}: is not in the manifest; take it out of the checkpoint"


def test_a_checkpoint_under_the_name_of_another_iteration_is_refused(saved):
    other = saved.rename(saved.with_name("iteration_000009"))
    assert refusal(other) == f"{other / 'manifest.json'}: is of iteration 1, not of this directory"
    verify_checkpoint(other.rename(saved.with_name("kept_for_later")))  # a name of one's own says nothing


def mutated(kind: str, path: Path, other: Path, random: Random) -> None:
    """Do one kind of damage to a file; `other` is the same file of another checkpoint of the same run."""
    whole = path.read_bytes()
    position = random.randrange(len(whole))
    if kind == "flipped":
        changed = whole[position] ^ (1 << random.randrange(8))
        path.write_bytes(whole[:position] + bytes([changed]) + whole[position + 1 :])
    elif kind == "truncated":
        path.write_bytes(whole[:position])
    elif kind == "missing":
        path.unlink()
    else:
        path.write_bytes(other.read_bytes())


def test_of_200_mutated_checkpoints_none_is_accepted(trained, saved, tmp_path):
    trained.iteration()
    second = write_checkpoint(saved.parent, trained.state)
    random = Random(0)
    kinds = ("flipped", "truncated", "missing", "swapped")
    differing = [name for name in files_of(saved) if (saved / name).read_bytes() != (second / name).read_bytes()]
    assert len(differing) >= 6  # the manifest, the state, the history and three or more files of tensors
    accepted = []
    for number in range(200):
        kind = kinds[number % len(kinds)]
        name = random.choice(differing if kind == "swapped" else files_of(saved))
        run_directory = tmp_path / f"mutated_{number}" / saved.parent.name
        copy = shutil.copytree(second, run_directory / second.name)
        mutated(kind, copy / name, saved / name, random)
        assert str(copy / name) in refusal(copy) or kind == "swapped"
        if newest_whole_checkpoint(run_directory) is not None:
            accepted.append((kind, name))
        shutil.rmtree(run_directory)
    assert accepted == []
    assert newest_whole_checkpoint(saved.parent) == second  # what was copied is still whole


def test_the_newest_whole_checkpoint_is_the_one_before_a_damaged_one_which_is_named(trained, saved, caplog):
    trained.iteration()
    second = write_checkpoint(saved.parent, trained.state)
    (second / "critic.safetensors").write_bytes(b"")
    assert newest_whole_checkpoint(saved.parent) == saved
    assert caplog.messages == [
        f"A damaged checkpoint is left out: {second / 'critic.safetensors'}: damaged; size or SHA-256 differs from the "
        "manifest"
    ]
    (saved / "state.json").unlink()
    assert newest_whole_checkpoint(saved.parent) is None
    assert newest_whole_checkpoint(saved.parent / "nothing") is None


def test_a_checkpoint_of_another_run_is_no_whole_checkpoint_of_this_one(saved, tmp_path, caplog):
    shutil.copytree(saved, tmp_path / "another" / saved.name)
    assert newest_whole_checkpoint(tmp_path / "another") is None
    assert caplog.messages[0].endswith("manifest.json: is of run run, not of this directory")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"files": 3}', '{"format": 2, "files": {"state.json": 3}}'])
def test_a_manifest_that_is_none_is_refused(saved, content):
    (saved / "manifest.json").write_text(content)
    assert str(saved) in refusal(saved)


def test_a_manifest_of_another_format_is_refused(saved):
    path = saved / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 1}))
    assert refusal(saved) == f"{path}: format 1, this version reads format 2"


def test_a_damaged_checkpoint_is_not_read_into_the_state(saved, make_run, snapshot):
    weights = saved / "critic.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    run = make_run(model={"seed": 9})
    before = everything(run.state, snapshot)
    with pytest.raises(CheckpointError, match=r"critic\.safetensors: damaged"):
        read_checkpoint(saved, run.state)
    assert same(everything(run.state, snapshot), before)


# --- writing that fails ----------------------------------------------------------------------------------------------


def break_at(monkeypatch, name: str, error: BaseException):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(store if hasattr(store, name) else files, name, fail)


@pytest.mark.parametrize(
    ("stage", "error"),
    [
        ("save_file", OSError(28, "No space left on device")),
        ("save_file", SafetensorError("I/O error: No space left on device")),
        ("_write_manifest", PermissionError(13, "Permission denied")),
        ("_sha256", OSError(5, "Input/output error")),
        ("_sync", OSError(5, "Input/output error")),
    ],
    ids=["disk full", "disk full in safetensors", "no permission", "unreadable", "unsynced"],
)
def test_a_failure_while_writing_is_one_error_that_leaves_the_earlier_checkpoint_and_no_temporary(
    trained, saved, monkeypatch, stage, error
):
    earlier = {name: (saved / name).read_bytes() for name in files_of(saved)}
    trained.iteration()
    break_at(monkeypatch, stage, error)
    with pytest.raises(CheckpointError) as caught:
        write_checkpoint(saved.parent, trained.state)
    assert str(caught.value) == f"{saved.parent / 'iteration_000002'}: cannot write the checkpoint: {error}"
    assert [path.name for path in saved.parent.iterdir()] == ["iteration_000001"]
    assert {name: (saved / name).read_bytes() for name in files_of(saved)} == earlier


@pytest.mark.parametrize("error", [SystemExit(143), KeyboardInterrupt()], ids=["SIGTERM", "Ctrl-C"])
def test_a_signal_while_writing_goes_through_and_leaves_no_temporary(trained, saved, monkeypatch, error):
    trained.iteration()
    break_at(monkeypatch, "_write_manifest", error)
    with pytest.raises(type(error)):
        write_checkpoint(saved.parent, trained.state)
    assert [path.name for path in saved.parent.iterdir()] == ["iteration_000001"]


def test_a_failed_rename_over_a_checkpoint_of_the_same_iteration_leaves_that_one_whole(trained, saved, monkeypatch):
    rename = type(saved).rename

    def fail_for_the_new_one(self, target):
        if self.name.endswith(".tmp"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(type(saved), "rename", fail_for_the_new_one)
    with pytest.raises(CheckpointError):
        write_checkpoint(saved.parent, trained.state)
    assert [path.name for path in saved.parent.iterdir()] == ["iteration_000001"]
    verify_checkpoint(saved)


def test_a_checkpoint_of_the_same_iteration_is_replaced(trained, saved, make_run, snapshot):
    with torch.no_grad():
        trained.state.critic.value_head.bias.fill_(3.5)
    assert write_checkpoint(saved.parent, trained.state) == saved
    assert [path.name for path in saved.parent.iterdir()] == ["iteration_000001"]
    fresh = make_run()
    read_checkpoint(saved, fresh.state)
    assert float(fresh.state.critic.value_head.bias.detach()) == 3.5


def test_a_place_that_cannot_be_written_is_one_error(trained, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot write the checkpoint"):
        write_checkpoint(tmp_path / "file" / "run", trained.state)


def test_a_checkpoint_larger_than_the_free_space_is_refused_before_a_byte_is_written(trained, saved, monkeypatch):
    trained.iteration()
    free = checkpoint_bytes(trained.state) - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=free))
    with pytest.raises(CheckpointError) as caught:
        write_checkpoint(saved.parent, trained.state)
    assert str(caught.value) == (
        f"{saved.parent}: about 17 MB do not fit, 17 MB are free. Free space, lower ppo.save_total_limit, or set "
        "data_root to a place on a larger disk"
    )
    assert [path.name for path in saved.parent.iterdir()] == ["iteration_000001"]
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=free + 1))
    write_checkpoint(saved.parent, trained.state)


def test_space_is_looked_for_where_the_run_directory_will_be_made(trained, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(shutil, "disk_usage", lambda place: asked.append(place) or SimpleNamespace(free=10**7))
    with pytest.raises(CheckpointError, match=r"run: 3 checkpoints of about 17 MB each do not fit, 10 MB are free"):
        check_free_space(tmp_path / "not" / "there" / "run", trained.state, copies=3)
    assert asked == [tmp_path]


def test_the_expected_size_holds_weights_and_two_moments_of_both_models(trained, saved):
    tensors = [p.stat().st_size for p in saved.rglob("*.safetensors") if p.name != "history.safetensors"]
    expected = checkpoint_bytes(trained.state)
    assert sum(tensors) * 0.9 < expected - 16 * 2**20 <= sum(tensors)  # files have headers; the state has some slack
    assert sum(p.stat().st_size for p in saved.rglob("*") if p.is_file()) < expected


# --- after a kill ----------------------------------------------------------------------------------------------------


def test_leftovers_of_a_killed_writer_are_swept_and_nothing_else(saved):
    run = saved.parent
    for name in (".iteration_000002.17.tmp", ".iteration_000001.17.replaced", ".iteration_000000.17.deleted"):
        (run / name / "policy").mkdir(parents=True)
    (run / ".evaluations.json.17.tmp").write_text("[")
    (run / ".nfs0001").write_text("of a file system")
    (run / "evaluations.json").write_text("[]")
    sweep_leftovers(run)
    assert sorted(path.name for path in run.iterdir()) == [".nfs0001", "evaluations.json", "iteration_000001"]
    verify_checkpoint(saved)


def test_a_checkpoint_whose_replacement_was_killed_between_two_renames_is_given_its_name_back(saved):
    saved.rename(saved.with_name(f".{saved.name}.17.replaced"))
    sweep_leftovers(saved.parent)
    assert [path.name for path in saved.parent.iterdir()] == ["iteration_000001"]
    verify_checkpoint(saved)


STEPS_OF_WRITING = 40


def test_a_kill_at_any_step_of_writing_leaves_the_earlier_checkpoint_or_the_new_one(trained, saved, tmp_path):
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
        sweep_leftovers(saved.parent)
        assert checkpoint_iterations(saved.parent) == [1] if whole == saved else [1, 2]
        shutil.rmtree(saved.with_name("iteration_000002"), ignore_errors=True)
    assert 0 < finished < STEPS_OF_WRITING  # the steps reach from the first change to beyond the last


def die_before_step(step: int) -> None:
    """Let this process kill itself before its `step`-th fsync, rename or mkdir."""
    count = 0

    def counted(call):
        def wrapper(*arguments, **options):
            nonlocal count
            count += 1
            if count == step:
                os.kill(os.getpid(), 9)
            return call(*arguments, **options)

        return wrapper

    for module, name in ((os, "fsync"), (os, "rename"), (os, "mkdir"), (os, "open")):
        setattr(module, name, counted(getattr(module, name)))


# --- what is kept ----------------------------------------------------------------------------------------------------


def run_with(tmp_path, *iterations):
    for iteration in iterations:
        (tmp_path / checkpoint_name(iteration) / "policy").mkdir(parents=True)
        (tmp_path / checkpoint_name(iteration) / "policy" / "weights").write_text("w")
    return tmp_path


def test_names_sort_in_time():
    assert [checkpoint_name(i) for i in (1, 90, 1234567)] == [
        "iteration_000001",
        "iteration_000090",
        "iteration_1234567",
    ]


def test_iterations_are_listed_in_order_without_temporaries_and_strangers(tmp_path):
    run_with(tmp_path, 30, 4, 1000000)
    for name in (".iteration_000040.17.tmp", ".iteration_000004.17.replaced", "evaluations.json"):
        (tmp_path / name).mkdir()
    assert checkpoint_iterations(tmp_path) == [4, 30, 1000000]
    assert checkpoint_iterations(tmp_path / "nothing") == []


@pytest.mark.parametrize(
    ("keep", "best", "left"),
    [
        (2, None, [40, 50]),
        (2, 50, [40, 50]),
        (2, 20, [20, 40, 50]),
        (1, 10, [10, 50]),
        (5, None, [10, 20, 30, 40, 50]),
        (9, 10, [10, 20, 30, 40, 50]),
        (2, 35, [40, 50]),  # a best that has no checkpoint
    ],
)
def test_pruning_keeps_the_newest_and_the_best(tmp_path, keep, best, left):
    run_with(tmp_path, 10, 20, 30, 40, 50)
    deleted = prune_checkpoints(tmp_path, keep, best)
    assert checkpoint_iterations(tmp_path) == left
    assert sorted(path.name for path in deleted) == [checkpoint_name(i) for i in (10, 20, 30, 40, 50) if i not in left]
    assert len(list(tmp_path.iterdir())) == len(left)


def test_a_checkpoint_whose_deletion_is_cut_short_is_not_found_any_more(tmp_path, monkeypatch):
    run_with(tmp_path, 10, 20)

    def killed(*_):
        raise SystemExit(143)

    monkeypatch.setattr(files.shutil, "rmtree", killed)
    with pytest.raises(SystemExit):
        prune_checkpoints(tmp_path, 1, None)
    assert checkpoint_iterations(tmp_path) == [20]


@pytest.mark.parametrize(
    ("iteration", "interval", "due"), [(1, 2, False), (2, 2, True), (3, 2, True), (3, 10, True), (1, 1, True)]
)
def test_a_checkpoint_is_due_at_every_interval_and_at_the_end(make_run, iteration, interval, due):
    state = make_run(save_interval=interval).state  # 3 iterations
    state.iteration = iteration
    assert CheckpointRequest(state).due is due


def row(iteration, kl, reward, **judge):
    return {"iteration": float(iteration), "eval/kl": kl, "eval/reward": reward, **judge}


@pytest.mark.parametrize(
    ("rows", "best"),
    [
        ([], None),
        ([row(10, 1.0, 0.5)], 10),
        ([row(10, 1.0, 0.5), row(20, 2.0, 0.9), row(30, 3.0, 0.7)], 20),
        ([row(10, 1.0, 0.5), row(20, 25.0, 0.9)], 10),  # beyond the alarm
        ([row(10, 20.0, 0.5)], 10),  # on the alarm
        ([row(10, 20.1, 0.5)], None),
        ([row(10, 1.0, 0.5), row(20, 1.0, 0.5)], 20),  # of equals the later
        (
            [row(10, 1.0, 0.9, **{"eval/judge_score": 0.1}), row(20, 1.0, 0.2, **{"eval/judge_score": 0.3})],
            20,  # the judge decides, not the reward
        ),
    ],
)
def test_the_best_iteration_has_the_highest_judge_score_else_reward_below_the_alarm(rows, best):
    assert best_iteration(rows, kl_alarm=20.0) == best
