import hashlib
import shutil
from pathlib import Path

import pytest
import torch
from kedro.config import OmegaConfigLoader
from kedro.io import DataCatalog, DatasetError
from torch.testing import assert_close

from ppo_rlhf.core.errors import ConfigError, ModelError
from ppo_rlhf.datasets import PretrainedModelDataset
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.trained_model import TrainedModel
from ppo_rlhf.runtime.paths import last_name
from ppo_rlhf.settings import CONFIG_LOADER_ARGS
from tests.tiny_models import save, tiny_model, word_tokenizer, write_gguf

CONF = Path(__file__).parents[2] / "conf"
IDS = torch.tensor([[4, 5, 6]])


def trained(seed: int = 0) -> TrainedModel:
    return TrainedModel(tiny_model(seed=seed), word_tokenizer())


def digest(folder: Path) -> dict[str, str]:
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_what_was_saved_is_loaded(tmp_path):
    dataset = PretrainedModelDataset(str(tmp_path / "policy"))
    assert not dataset.exists()
    dataset.save(trained())
    assert dataset.exists()
    model = dataset.load().causal_lm()
    assert torch.equal(model(IDS).logits, tiny_model()(IDS).logits)
    assert dataset.load().tokenizer().get_vocab() == word_tokenizer().get_vocab()


@pytest.mark.parametrize("named", ["folder", "folder/tiny.gguf"])
def test_a_gguf_file_or_its_folder_is_a_model_that_is_never_overwritten(tmp_path, named):
    (tmp_path / "folder").mkdir()
    model = write_gguf(tmp_path / "folder" / "tiny.gguf")
    dataset = PretrainedModelDataset(str(tmp_path / named), gguf_cache={"path": str(tmp_path / "kept")})
    assert dataset.exists()
    assert_close(dataset.load().causal_lm()(IDS).logits, model(IDS).logits, rtol=0.0, atol=1e-5)
    assert [path.parent for path in tmp_path.rglob("*.safetensors")] == [*(tmp_path / "kept").iterdir()]
    assert not PretrainedModelDataset(str(tmp_path / "other.gguf")).exists()
    with pytest.raises(DatasetError, match="never overwritten"):
        dataset.save(trained())


def test_the_newest_version_is_loaded_and_older_ones_stay(tmp_path):
    for seed in (0, 1):
        PretrainedModelDataset(str(tmp_path / "policy")).save(trained(seed))
    handle = PretrainedModelDataset(str(tmp_path / "policy")).load()
    assert torch.equal(handle.causal_lm()(IDS).logits, tiny_model(seed=1)(IDS).logits)
    assert len(list((tmp_path / "policy").iterdir())) == 2


def test_the_newest_version_is_the_one_written_last_though_the_clock_was_set_back(tmp_path, monkeypatch):
    """Save twice, then once more beside a user's folder; a copy of the folder has other modification times."""
    times = iter(["2026-05-01T00.00.00.000Z", "2026-03-01T00.00.00.000Z", "2026-02-01T00.00.00.000Z"])
    monkeypatch.setattr("ppo_rlhf.datasets.pretrained_model.generate_timestamp", lambda: next(times))
    dataset = PretrainedModelDataset(str(tmp_path / "policy"))
    for seed in (0, 1, 2):
        dataset.save(trained(seed))
        shutil.copytree(tmp_path / "policy", tmp_path / f"copy{seed}", copy_function=shutil.copyfile)
        newest = PretrainedModelDataset(str(tmp_path / f"copy{seed}")).load().causal_lm()
        assert torch.equal(newest(IDS).logits, tiny_model(seed=seed)(IDS).logits)
    save(tmp_path / "policy" / "mine", tiny_model())
    monkeypatch.undo()
    dataset.save(trained(3))
    newest = PretrainedModelDataset(str(tmp_path / "policy")).load().causal_lm()
    assert torch.equal(newest(IDS).logits, tiny_model(seed=3)(IDS).logits)


def test_of_two_runs_that_export_in_the_same_millisecond_the_second_takes_the_next_name(tmp_path, monkeypatch):
    """The first process publishes the version name while the second process is still writing."""
    now = "2026-11-28T15.00.00.000Z"
    monkeypatch.setattr("ppo_rlhf.datasets.pretrained_model.generate_timestamp", lambda: now)
    model, folder = trained(1), tmp_path / "policy"
    write = model.save

    def write_while_the_first_ends(draft: Path) -> None:
        write(draft)
        save(folder / now, tiny_model(seed=0))

    monkeypatch.setattr(model, "save", write_while_the_first_ends)
    second = PretrainedModelDataset(str(folder))
    second.save(model)
    for handle in (second.load(), PretrainedModelDataset(str(folder)).load()):
        assert torch.equal(handle.causal_lm()(IDS).logits, tiny_model(seed=1)(IDS).logits)
    assert torch.equal(PretrainedHandle(str(folder / now)).causal_lm()(IDS).logits, tiny_model(seed=0)(IDS).logits)
    assert sorted(path.name for path in folder.iterdir()) == [now, f"{now}+{now}"]


def test_a_session_reads_what_it_wrote_though_another_wrote_later(tmp_path):
    mine = PretrainedModelDataset(str(tmp_path / "policy"))
    mine.save(trained(0))
    PretrainedModelDataset(str(tmp_path / "policy")).save(trained(1))
    assert torch.equal(mine.load().causal_lm()(IDS).logits, tiny_model(seed=0)(IDS).logits)


def test_a_session_can_be_told_which_version_to_read(tmp_path):
    first = PretrainedModelDataset(str(tmp_path / "policy"))
    first.save(trained(0))
    PretrainedModelDataset(str(tmp_path / "policy")).save(trained(1))
    dataset = PretrainedModelDataset(str(tmp_path / "policy"))
    dataset.pinned = first.pinned
    assert torch.equal(dataset.load().causal_lm()(IDS).logits, tiny_model(seed=0)(IDS).logits)


def test_kedros_load_version_is_the_version_that_is_read(tmp_path):
    entry = {"m": {"type": "ppo_rlhf.datasets.PretrainedModelDataset", "filepath": str(tmp_path / "policy")}}
    for seed in (0, 1):
        DataCatalog.from_config(entry).save("m", trained(seed))
    older, newer = sorted(path.name for path in (tmp_path / "policy").iterdir())
    pinned = DataCatalog.from_config(entry, load_versions={"m": older})
    assert pinned.exists("m")
    assert pinned.load("m").source == str(tmp_path / "policy" / older)
    assert DataCatalog.from_config(entry).load("m").source == str(tmp_path / "policy" / newer)
    for path in (tmp_path / "policy", tmp_path / "policy" / older, "a/hub"):
        entry["m"]["filepath"] = str(path)
        with pytest.raises(DatasetError) as refusal:
            DataCatalog.from_config(entry, load_versions={"m": "ema"}).get("m")
        assert str(refusal.value.__cause__).startswith(f"--load-versions: {path}/ema ")


def test_a_path_may_begin_at_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    save(tmp_path / "mine", tiny_model())
    handle = PretrainedModelDataset("/project/~/mine").load()  # as Kedro passes the path
    assert handle.source == str(tmp_path / "mine")


def test_a_folder_whose_name_is_the_sign_of_the_home_directory_is_that_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    save(tmp_path / "~" / "mine", tiny_model())
    assert PretrainedModelDataset(str(tmp_path / "~/mine")).load().source == str(tmp_path / "~/mine")


def test_a_half_written_version_is_never_loaded(tmp_path, monkeypatch):
    dataset = PretrainedModelDataset(str(tmp_path / "policy"))
    dataset.save(trained(0))
    broken = trained(1)
    monkeypatch.setattr(broken.tokenizer, "save_pretrained", lambda folder: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(DatasetError, match="disk full"):
        PretrainedModelDataset(str(tmp_path / "policy")).save(broken)
    assert len(list((tmp_path / "policy").iterdir())) == 1
    save(tmp_path / "policy" / ".9999.0123456789abcdef.draft", tiny_model(seed=1))  # the draft of a killed process
    handle = PretrainedModelDataset(str(tmp_path / "policy")).load()
    assert torch.equal(handle.causal_lm()(IDS).logits, tiny_model(seed=0)(IDS).logits)


def test_a_model_directory_is_loaded_itself_and_never_written(tmp_path):
    source = Path(save(tmp_path / "own", tiny_model()))
    before = digest(source)
    dataset = PretrainedModelDataset(str(source))
    assert dataset.load().source == str(source)
    with pytest.raises(DatasetError, match=r"model directory.*never overwritten"):
        dataset.save(trained(1))
    assert digest(source) == before


def test_a_user_who_gave_no_model_gets_none():
    dataset = PretrainedModelDataset(None)
    assert dataset.load() is None
    assert not dataset.exists()
    with pytest.raises(DatasetError, match="filepath"):
        dataset.save(trained())


def test_a_missing_model_is_refused_in_one_line_when_it_is_used_and_not_before(tmp_path):
    """A run whose rewards are functions may name a reward model that does not exist."""
    handle = PretrainedModelDataset(str(tmp_path / "nothing" / "here")).load()
    with pytest.raises(ModelError, match="there is no such model directory") as caught:
        handle.config()
    assert "\n" not in str(caught.value)


def test_a_hub_id_survives_kedro_making_paths_absolute(tmp_path):
    """Kedro joins every relative `filepath` to the project's directory before the dataset sees it."""
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "data").mkdir()
    sources = {
        name: PretrainedModelDataset((tmp_path / name).as_posix())._describe()["filepath"]
        for name in ("gpt2", "org/name", "org/name@refs/pr/3", "data/model", "data/06_models/model", "a/b/c")
    }
    assert sources == {
        "gpt2": "gpt2",
        "org/name": "org/name",
        "org/name@refs/pr/3": "org/name@refs/pr/3",
        "data/model": str(tmp_path / "data/model"),
        "data/06_models/model": str(tmp_path / "data/06_models/model"),
        "a/b/c": str(tmp_path / "a/b/c"),
    }


@pytest.mark.parametrize(
    ("source", "name"),
    [("/models/mine", "mine"), ("/my@home/v2", "v2"), ("gpt2", "gpt2"), ("org/name@refs/pr/3", "name@refs/pr/3")],
)
def test_a_model_is_called_by_the_last_part_of_its_path_or_by_its_name_on_the_hub(source, name):
    assert last_name(source) == name


def test_a_hub_id_gives_a_lazy_handle():
    assert PretrainedModelDataset("organisation/model", trust_remote_code=True).load() == PretrainedHandle(
        "organisation/model", trust_remote_code=True
    )


@pytest.mark.parametrize("value", ["false", "true", 1, None])
def test_trust_is_never_taken_from_what_only_looks_like_a_truth_value(value):
    with pytest.raises(ConfigError, match=f"trust_remote_code.*{value!r}"):
        PretrainedModelDataset("organisation/model", trust_remote_code=value)


def test_the_catalog_makes_it_from_its_entry(tmp_path):
    entry = {
        "type": "ppo_rlhf.datasets.PretrainedModelDataset",
        "filepath": str(tmp_path / "m"),
        "metadata": {"description": "x", "kedro-viz": {"layer": "06_models"}},
    }
    catalog = DataCatalog.from_config({"policy": entry})
    catalog["policy"].save(trained())
    assert catalog["policy"].load().config().model_type == "llama"
    assert catalog["policy"].metadata == entry["metadata"]


@pytest.mark.parametrize("is_trusted", [True, False])
def test_one_setting_of_the_project_says_for_all_its_models_whether_their_own_code_is_trusted(is_trusted):
    given = {"trust_remote_code": True} if is_trusted else {}
    loader = OmegaConfigLoader(str(CONF), env="base", runtime_params=given, **CONFIG_LOADER_ARGS)
    entries = {name: entry for name, entry in loader["catalog"].items() if "PretrainedModelDataset" in entry["type"]}
    assert sorted(entries) == [
        "base_model",
        "ppo_critic",
        "ppo_policy",
        "pretrained_critic",
        "reward_model",
        "sft_policy",
    ]
    trusts = {
        name: dataset._describe()["trust_remote_code"] for name, dataset in DataCatalog.from_config(entries).items()
    }
    assert trusts == dict.fromkeys(entries, is_trusted)
