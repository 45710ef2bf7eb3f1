"""Record the numbers that a checkout of this project computes, and compare two such records to the last bit.

    git worktree add ../before HEAD~1
    python scripts/same_numbers.py record ../before before.json
    python scripts/same_numbers.py record . after.json
    python scripts/same_numbers.py compare before.json after.json

`record` runs the checkout's code and `conf/base` on tiny models and settings that this script writes, on the CPU with
one thread. It keeps every point of MLflow and every column of the training history that no clock decides, and the
SHA-256 of the weights in the exported policy and in the last checkpoint. `compare` names what differs and then exits
with 1. Record both trees on one machine: another processor rounds differently.

A change that only adds up in another order is shown in float64:

    python scripts/same_numbers.py record . after.json ppo lora chats --float64
    python scripts/same_numbers.py compare before.json after.json --close 1e-10

`--float64` also computes Llama's norm in float64, which transformers computes in float32 at any precision, and records
of each tensor of weights a sum in place of the hash.

Recipes on toy data take minutes and are recorded if they are named: `record . after.json demo calculator randomwalks`.
They run with the checkout's own settings, but few episodes of PPO. `obedience` also needs the recipe's model, a folder
or a GGUF file: `record . after.json obedience --model MODEL`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

Record = dict[str, Any]

OF_THE_CLOCK = re.compile(r"(time|throughput|memory)/")
WORDS = [chr(ord("a") + i) for i in range(20)]
VOCABULARY = ["<pad>", "<unk>", "</s>", *WORDS]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + ' ' + m['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a ' }}{% endif %}"
)
PPO = {
    "total_episodes": 48,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "num_mini_batches": 2,
    "num_ppo_epochs": 2,
    "response_length": 10,
    "temperature": 0.9,
    "learning_rate": 1e-3,
    "value_learning_rate": 2e-3,
    "kl_coef": 0.05,
    "missing_eos_penalty": 0.5,
    "value_model": "separate",
    "eval_interval": 2,
    "save_interval": 1,
    "dtype": "float32",
    "device": "cpu",
}
FUNCTION = {"type": "function", "function": "same_numbers:early_letters", "weight": 2.0}
ENVIRONMENTS: dict[str, Record] = {
    "ppo": {"ppo": {"value_model": "reward_init"}, "components": [{"type": "model"}, FUNCTION]},
    "lora": {"ppo": {"use_peft": True, "lora_r": 4, "learning_rate": 1e-2}},
    "chats": {"ppo": {"value_model": "shared", "value_learning_rate": None}, "prompts": "chats.jsonl"},
    "two_processes": {"ppo": {"per_device_train_batch_size": 4}, "processes": 2},
}
"""What the pipeline's configurations change in `PPO`, their reward, prompts and number of processes."""
RECIPES = {
    "demo": ["--params", "ppo.total_episodes=256"],
    "calculator": [
        *("--pipelines", "data_preparation,supervised_finetuning,align"),
        *("--params", "ppo.total_episodes=256"),
    ],
    "randomwalks": [
        *("--pipelines", "data_preparation,supervised_finetuning,align"),
        *("--params", "ppo.total_episodes=512"),
    ],
    "obedience": ["--pipelines", "align", "--params", "ppo.total_episodes=128,sft_model_path={model}"],
}
TINY = [*ENVIRONMENTS, "trainer"]
SHOWN = 10
"""Differences of one configuration that `compare` prints."""


def early_letters(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """Score a response by the share of its words that are among the first ten letters."""
    texts = [text.split() for text in completions]
    return [sum(word in WORDS[:10] for word in words) / max(len(words), 1) for words in texts]


def write_inputs(folder: Path) -> None:
    """Write models with large random weights, so that outputs depend on inputs, and prompts as texts and as chats."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "</s>"}
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"vocab_size": len(VOCABULARY), "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    config = LlamaConfig(**shape, **ids, num_key_value_heads=1, max_position_embeddings=64, num_labels=1)
    for seed, (name, model_class) in enumerate(
        {"policy": LlamaForCausalLM, "reward": LlamaForSequenceClassification}.items()
    ):
        model, generator = model_class(config), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.3, generator=generator)
        model.save_pretrained(folder / name)
        PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(folder / name)
    shutil.copytree(folder / "policy", folder / "chat_policy")
    chat_tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special, chat_template=CHAT_TEMPLATE)
    chat_tokenizer.save_pretrained(folder / "chat_policy")
    texts = [" ".join(WORDS[(5 * row + 3 * i) % 20] for i in range(1 + row % 7)) for row in range(40)]
    earlier = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c d"}]
    chats = [[*earlier[: 2 * (row % 2)], {"role": "user", "content": text}] for row, text in enumerate(texts)]
    for name, prompts in (("texts.jsonl", texts), ("chats.jsonl", chats)):
        lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in prompts]
        (folder / name).write_text("".join(lines), encoding="utf-8")


def write_project(tree: Path, folder: Path, dtype: str) -> None:
    """Write a Kedro project with the checkout's settings and, in `conf`, an environment for each configuration."""
    shutil.copytree(tree / "conf", folder / "conf", ignore=shutil.ignore_patterns("local"))
    shutil.copytree(tree / "data" / "01_raw", folder / "data" / "01_raw")
    for name in ("pyproject.toml", ".telemetry"):
        shutil.copy(tree / name, folder / name)
    for name in ("src", "conf/local", "inputs"):
        (folder / name).mkdir()
    write_inputs(folder / "inputs")
    for name, changes in ENVIRONMENTS.items():
        chats = "prompts" in changes
        paths = {
            "sft_model_path": "inputs/chat_policy" if chats else "inputs/policy",
            "prompts_path": f"inputs/{changes.get('prompts', 'texts.jsonl')}",
            "data_root": f"data/{name}",
            "experiment": name,
        }
        components = changes.get("components", [FUNCTION])
        if len(components) > 1:
            paths["reward_model_path"] = "inputs/reward"
        parameters = {
            "ppo": {**PPO, **changes["ppo"], "dtype": dtype},
            "prompts": {"held_out_share": 0.2},
            "reward": {"components": components},
            "evaluation": {"iteration_prompts": 4, "judge": "same_numbers:early_letters"},
        }
        (folder / "conf" / name).mkdir()
        for file, values in (("globals", paths), ("parameters", parameters)):
            text = yaml.safe_dump(values, sort_keys=False)
            (folder / "conf" / name / f"{file}.yml").write_text(text, encoding="utf-8")


def train_in_script(project: Path, dtype: str) -> None:
    """Train with PPOTrainer on the fixed models, as a script does; results lie where the pipeline's would."""
    from ppo_rlhf import PPOConfig, PPOTrainer

    inputs, results = project / "inputs", project / "data" / "trainer" / "06_models"
    texts = [json.loads(line)["prompt"] for line in (inputs / "texts.jsonl").read_text(encoding="utf-8").splitlines()]
    config = PPOConfig(**{**PPO, "sft_model_path": str(inputs / "policy"), "dtype": dtype})
    given = {"prompts": texts[8:], "evaluation_prompts": texts[:8], "judge": early_letters}
    trainer = PPOTrainer(config, reward=early_letters, **given)  # type: ignore[arg-type]
    trainer.train(output_dir=results / "ppo_checkpoints" / "trainer")
    trainer.save_pretrained(results / "ppo_policy" / "trainer")


def compute_norms_in_float64() -> None:
    """Let Llama's norm compute in the precision of its input: in float32 it rounds an order of sums up to 1e-7."""
    import torch
    from torch import Tensor, nn
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def forward(self: nn.Module, states: Tensor) -> Tensor:
        return self.weight * states * torch.rsqrt(states.square().mean(-1, keepdim=True) + self.variance_epsilon)

    LlamaRMSNorm.forward = forward


def record(tree: Path, names: list[str], model: Path | None = None, dtype: str = "float32") -> Record:
    """Run the configurations of these names with a checkout's code, and return their numbers.

    Args:
        tree: Folder of the checkout.
        names: Configurations to run.
        model: Model of the recipe `obedience`.
        dtype: Precision of the tiny configurations. In float64 weights are recorded by sums, in place of hashes.
    """
    git = ["git", "-C", str(tree), "describe", "--always", "--dirty", "--abbrev=12"]
    described = subprocess.run(git, capture_output=True, text=True, encoding="utf-8").stdout.strip()
    versions = _run(
        tree, tree, "-c", "import torch, transformers as t; print(torch.__version__ + ', transformers', t.__version__)"
    )
    found: Record = {"tree": described, "machine": f"{platform.machine()} {_processor()}, torch {versions[1].strip()}"}
    with tempfile.TemporaryDirectory(prefix="same_numbers_") as temporary:
        project = Path(temporary)
        write_project(tree, project, dtype)
        found["configurations"] = {}
        for name in names:
            began = time.monotonic()
            arguments = _arguments(name, project, model, dtype)
            failed, said = _run(tree, project, *arguments)
            outcome = (
                {"not run": _reason(said)}
                if failed
                else results(project, name, _sums_of if dtype == "float64" else _hash_of)
            )
            found["configurations"][name] = outcome
            print(f"{name}: {outcome.get('not run') or 'recorded'} ({time.monotonic() - began:.0f} s)", flush=True)
    return found


def _arguments(name: str, project: Path, model: Path | None, dtype: str) -> list[str]:
    if name == "trainer":
        return [__file__, "train-in-script", str(project), dtype]
    run = [*([__file__, "kedro-in-float64"] if dtype == "float64" else ["-m", "kedro"]), "run", "--env", name]
    if name in RECIPES:
        return [*run, *(argument.format(model=model) for argument in RECIPES[name])]
    processes = ENVIRONMENTS[name].get("processes", 1)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    return [*(launcher if processes > 1 else []), *run, "--pipelines", "ppo,evaluation"]


def _run(tree: Path, folder: Path, *arguments: str) -> tuple[bool, str]:
    """Run Python with a checkout's package, and return whether that failed and what was printed."""
    path = os.pathsep.join([str(tree / "src"), str(Path(__file__).parent)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "COLUMNS": "1000"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, encoding="utf-8")
    return done.returncode != 0, done.stdout + done.stderr if done.returncode else done.stdout


def _reason(said: str) -> str:
    """Return the last line that names an error, else the last line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ["nothing was printed"]
    return next((line for line in reversed(lines) if "Error" in line and "torch.distributed" not in line), lines[-1])


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpuinfo.read_text(encoding="utf-8")) if cpuinfo.exists() else None
    return found[1] if found else platform.processor()


def results(project: Path, name: str, described: Callable[[Path], Any]) -> Record:
    """Return the numbers of the configuration's run, as text of full precision, and `described` of its weight files."""
    from mlflow import MlflowClient

    models = project / "data" / name / "06_models"
    points: Record = {}
    if name != "trainer":
        client = MlflowClient(f"sqlite:///{project}/mlflow.db")
        title = name if name in ENVIRONMENTS else f"ppo_rlhf_{name}"
        experiment = client.get_experiment_by_name(title)
        for run in client.search_runs([experiment.experiment_id], order_by=["attributes.start_time"]):
            for key in sorted(key for key in run.data.metrics if not OF_THE_CLOCK.match(key)):
                history = client.get_metric_history(run.info.run_id, key)
                points.setdefault(key, []).extend(sorted([point.step, repr(point.value)] for point in history))
    checkpoint = max(models.glob("ppo_checkpoints/*/iteration_*"))
    lines = (checkpoint.parent / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [line["metrics"] for line in map(json.loads, lines) if line["kind"] == "iteration"]
    columns = sorted({key for row in rows for key in row if not OF_THE_CLOCK.match(key)})
    folders = {"policy": max(models.glob("ppo_policy/*/")), "checkpoint": checkpoint}
    return {
        "mlflow": points,
        "history": {key: [[i, repr(row.get(key))] for i, row in enumerate(rows, start=1)] for key in columns},
        "weights": {
            f"{title}/{file.relative_to(folder)}": described(file)
            for title, folder in folders.items()
            for file in sorted(folder.rglob("*.safetensors"))
        },
    }


def _hash_of(file: Path) -> str:
    """Return the SHA-256 of the names, dtypes, shapes and bytes of a file's tensors."""
    import torch
    from safetensors.torch import load_file

    total = hashlib.sha256()
    for name, tensor in sorted(load_file(file).items()):
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        total.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def _sums_of(file: Path) -> list[list[str]]:
    """Return of each of a file's tensors its name and, as text, the sum of its numbers times 1, 1/2, 1/3, …."""
    import torch
    from safetensors.torch import load_file

    sums = {}
    for name, tensor in sorted(load_file(file).items()):
        numbers = tensor.double().flatten()
        sums[name] = float(numbers @ (1.0 / torch.arange(1, 1 + len(numbers), dtype=torch.float64)))
    return [[name, repr(total)] for name, total in sums.items()]


def compare(first: Record, second: Record, close: float = 0.0) -> dict[str, list[str]]:
    """Return the differences of each configuration, one line each; a configuration without any has an empty list.

    Numbers that differ by no more than `close`, or by this share, are the same.
    """
    one, other = first["configurations"], second["configurations"]
    found: dict[str, list[str]] = {}
    for name in {**one, **other}:
        pair = [each.get(name, {"not run": "not recorded"}) for each in (one, other)]
        sides = zip(("first", "second"), pair, strict=True)
        missing = [f"not run in the {side}: {each['not run']}" for side, each in sides if "not run" in each]
        found[name] = missing or [
            line for kind in pair[0] for line in _differences(kind, pair[0][kind], pair[1][kind], close)
        ]
    return found


def _differences(kind: str, one: Mapping[str, Any], other: Mapping[str, Any], close: float) -> list[str]:
    lines = [
        f"{kind} {key}: only in the {'first' if key in one else 'second'}" for key in sorted(set(one) ^ set(other))
    ]
    for key in (key for key in one if key in other and one[key] != other[key]):
        if isinstance(one[key], str):
            lines.append(f"{kind} {key}: other weights")
        elif len(one[key]) != len(other[key]):
            lines.append(f"{kind} {key}: {len(one[key])} and {len(other[key])} points")
        else:
            pairs = (pair for pair in zip(one[key], other[key], strict=True) if not _same(*pair, close))
            lines += [
                f"{kind} {key}: {before[1]} at step {before[0]}, {after[1]} at step {after[0]}"
                for before, after in islice(pairs, 1)
            ]
    return lines


def _same(one: list[Any], other: list[Any], close: float) -> bool:
    """Return whether two points, of step and number as text, are the same."""
    if one == other or close == 0.0 or one[0] != other[0] or "None" in (one[1], other[1]):
        return bool(one == other)
    return math.isclose(float(one[1]), float(other[1]), rel_tol=close, abs_tol=close)


def main() -> int:
    """Read the command, and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="run a checkout and write its numbers")
    recording.add_argument("tree", type=Path, help="the folder of a checkout")
    recording.add_argument("file", type=Path, help="JSON file to write")
    every = [*TINY, *RECIPES]
    names_help = f"configurations to run, of {', '.join(every)}; without any the first {len(TINY)}"
    recording.add_argument("names", nargs="*", metavar="NAME", help=names_help)
    recording.add_argument("--float64", action="store_true", help="the tiny configurations in float64")
    recording.add_argument("--model", type=Path, help="model of the recipe obedience: a folder or a GGUF file")
    comparing = commands.add_parser("compare", help="compare two files of `record`")
    comparing.add_argument("first", type=Path)
    comparing.add_argument("second", type=Path)
    comparing.add_argument("--close", type=float, default=0.0, help="the largest difference that counts as none")
    script = commands.add_parser("train-in-script", help="what `record` runs for PPOTrainer")
    script.add_argument("project", type=Path)
    script.add_argument("dtype")
    kedro = commands.add_parser("kedro-in-float64", help="what `record --float64` runs in place of `python -m kedro`")
    kedro.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    if given.command == "kedro-in-float64" or (given.command == "train-in-script" and given.dtype == "float64"):
        compute_norms_in_float64()
    if given.command == "kedro-in-float64":
        sys.argv = ["kedro", *given.arguments]
        runpy.run_module("kedro", run_name="__main__")
        return 0
    if given.command == "train-in-script":
        train_in_script(given.project, given.dtype)
        return 0
    if given.command == "record":
        if unknown := set(given.names) - set(every):
            parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(every)}")
        if not (given.tree / "src" / "ppo_rlhf").is_dir():
            parser.error(f"{given.tree} is no checkout of this project: it has no src/ppo_rlhf")
        if "obedience" in given.names and not (given.model and given.model.exists()):
            parser.error("obedience runs with --model MODEL, the folder or the GGUF file of SmolLM2 (docs/recipes.md)")
        model = given.model and given.model.resolve()
        dtype = "float64" if given.float64 else "float32"
        found = record(given.tree.resolve(), given.names or TINY, model, dtype)
        given.file.write_text(json.dumps(found, indent=1), encoding="utf-8")
        return int(any("not run" in each for each in found["configurations"].values()))
    records = [json.loads(path.read_text(encoding="utf-8")) for path in (given.first, given.second)]
    if records[0]["machine"] != records[1]["machine"]:
        print(f"recorded on different machines: {records[0]['machine']}; {records[1]['machine']}")
    found = compare(*records, close=given.close)
    for name, lines in found.items():
        print(f"{name}: {f'{len(lines)} differences' if lines else 'the same'}")
        print("".join(f"    {line}\n" for line in lines[:SHOWN]), end="")
        if len(lines) > SHOWN:
            print(f"    and {len(lines) - SHOWN} more")
    return int(any(found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
