"""Time from `kedro run` to the first rollout with many prompts, against the same start with few. See docs/speed.md.

python benchmarks/many_prompts.py --prompts 300000
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[1]
WORDS, FEW = 60, 1_000
DONE = "Iteration 1/"  # said after the first iteration, which is tiny
SETTINGS = (
    "ppo.total_episodes=8,ppo.per_device_train_batch_size=4,ppo.gradient_accumulation_steps=2,ppo.response_length=8,"
    "ppo.value_model=separate,ppo.num_mini_batches=1"
)
MAPPED = """
import sys, time
import datasets
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
start = time.perf_counter()
table = datasets.load_dataset("json", data_files=sys.argv[1], split="train", cache_dir=sys.argv[3])
table.map(lambda batch: {"ids": tokenizer(batch["prompt"])["input_ids"]}, batched=True)
print(time.perf_counter() - start)
"""


def words() -> list[str]:
    """Return made-up words, as many as a small vocabulary of English has."""
    rng = random.Random(0)
    return ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(8_000)]


def write_prompts(path: Path, count: int) -> None:
    """Write JSON Lines with `count` distinct prompts of 60 words."""
    rng, vocabulary = random.Random(1), words()
    with path.open("w") as file:
        for row in range(count):
            file.write(json.dumps({"prompt": " ".join(rng.choices(vocabulary, k=WORDS)), "row": row}) + "\n")


def make_model(folder: Path, kind: str, prompts: Path) -> Path:
    """Save a tiny GPT-2 with a tokenizer trained on the prompts: by words as the demo's, or by bytes as GPT-2's."""
    with prompts.open() as file:
        texts = [json.loads(line)["prompt"] for line, _ in zip(file, range(5_000), strict=False)]
    special = ["<pad>", "<unk>", "</s>"]
    if kind == "words":
        backend = Tokenizer(models.WordLevel(unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        backend.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=special))
    else:
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=20_000, special_tokens=special))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>", eos_token="</s>", model_max_length=512
    )
    shape = GPT2Config(
        vocab_size=len(tokenizer), n_positions=512, n_embd=32, n_layer=1, n_head=2, eos_token_id=2, bos_token_id=None
    )
    GPT2LMHeadModel(shape).save_pretrained(folder / kind)
    tokenizer.save_pretrained(folder / kind)
    return folder / kind


def start_of(project: Path, model: Path, prompts: Path) -> tuple[float, float]:
    """Return seconds from `kedro run --pipelines ppo` to the end of the first iteration, and the peak memory in MiB."""
    settings = f"sft_model_path={model},prompts_path={prompts},evaluation.judge=reward_of_length:reward,{SETTINGS}"
    command = [sys.executable, "-m", "kedro", "run", "--pipelines", "ppo", "--params", settings]
    begin, peak, output = time.perf_counter(), 0, project / "output.txt"
    with output.open("w") as file, subprocess.Popen(command, cwd=project, stdout=file, stderr=file) as run:
        watched = psutil.Process(run.pid)
        while run.poll() is None and DONE not in output.read_text():
            with contextlib.suppress(psutil.Error):  # it has ended since
                peak = max(peak, watched.memory_info().rss)
            time.sleep(0.05)
        seconds = time.perf_counter() - begin
        run.terminate()
    if DONE not in output.read_text():
        sys.exit(output.read_text())
    return seconds, peak / 2**20


def main() -> None:
    """Print one line for each tokenizer: the three times, their ratios, and the memory on top."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=300_000)
    parser.add_argument("--tokenizers", nargs="+", choices=("words", "bytes"), default=("words", "bytes"))
    given = parser.parse_args()
    count = given.prompts
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        many, few = folder / "many.jsonl", folder / "few.jsonl"
        write_prompts(many, count)
        write_prompts(few, FEW)
        for kind in given.tokenizers:
            model, project = make_model(folder, kind, few), folder / f"project_{kind}"
            shutil.copytree(ROOT / "conf", project / "conf", ignore=shutil.ignore_patterns("local"))
            shutil.copytree(ROOT / "src", project / "src")
            (project / "conf/local").mkdir()
            shutil.copy(ROOT / "pyproject.toml", project)
            (project / "src/reward_of_length.py").write_text(
                "def reward(prompts, completions, **columns):\n    return [float(len(text)) for text in completions]\n"
            )
            (project / "conf/local/parameters.yml").write_text(
                "reward:\n  components:\n    - type: function\n      function: reward_of_length:reward\n"
            )
            start_of(project, model, few)  # compiles Python's files
            base, memory = start_of(project, model, few)
            command = [sys.executable, "-c", MAPPED, str(many), str(model), str(folder / f"cache_{kind}")]
            mapped = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            first, first_memory = start_of(project, model, many)
            second, second_memory = start_of(project, model, many)
            print(
                f"{kind}: start on {FEW} {base:.1f} s, datasets.map {mapped:.1f} s; on {count} first {first:.1f} s = "
                f"{first / (base + mapped):.2f} x (map + start), second {second:.1f} s = {second / base:.2f} x start; "
                f"memory {max(first_memory, second_memory) - memory:+.0f} MiB",
                flush=True,
            )


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    main()
