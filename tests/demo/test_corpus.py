"""The committed corpus equals the script's output, and has the properties that the demo needs."""

import ast
import json
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from scripts.write_corpus import main, write_corpus

import ppo_rlhf.demo
from ppo_rlhf.demo.grammar import VOCABULARY

RAW = Path(__file__).parents[2] / "data" / "01_raw"
FILES = ("demonstrations.jsonl", "prompts.jsonl")


def read_lines(path):
    return [json.loads(line) for line in path.read_text(encoding="ascii").splitlines()]


@pytest.fixture(scope="module")
def demonstrations():
    return read_lines(RAW / "demonstrations.jsonl")


@pytest.fixture(scope="module")
def prompts():
    return read_lines(RAW / "prompts.jsonl")


def test_the_committed_files_are_what_the_script_writes_byte_for_byte(tmp_path):
    main(["--output", str(tmp_path), "--seed", "0"])
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (RAW / name).read_bytes(), (
            f"data/01_raw/{name} is out of date: run python scripts/write_corpus.py"
        )


def test_another_seed_and_other_counts_give_another_corpus(tmp_path):
    sets = []
    for seed in (0, 1):
        paths = write_corpus(tmp_path / str(seed), seed=seed, demonstrations=50, prompts=20)
        assert [len(read_lines(path)) for path in paths] == [50, 20]
        sets.append({row["text"] for row in read_lines(paths[0])})
    assert len(sets[0] & sets[1]) == 0


def test_there_are_enough_rows_and_no_duplicates(demonstrations, prompts):
    assert {tuple(row) for row in demonstrations} == {("text",)}
    assert {tuple(row) for row in prompts} == {("prompt", "aspect")}
    assert 12_000 <= len({row["text"] for row in demonstrations}) == len(demonstrations) <= 15_000
    assert 4_000 <= len({row["prompt"] for row in prompts}) == len(prompts)


def test_the_corpus_uses_a_few_hundred_words_each_of_them_often(demonstrations, prompts):
    counts = Counter(word for row in demonstrations for word in row["text"].split(" "))
    assert 250 <= len(counts) <= 400
    assert set(counts) == VOCABULARY
    assert min(counts.values()) >= 50
    assert {word for row in prompts for word in row["prompt"].split(" ")} <= set(counts)


def test_no_prompt_and_no_prompt_title_occurs_in_a_demonstration(demonstrations, prompts):
    def title(text):
        return " ".join(text.split(" ")[:2])

    starts = {" ".join(row["text"].split(" ")[:n]) for row in demonstrations for n in range(7, 12)}
    assert not starts & {row["prompt"] for row in prompts}
    assert not {title(row["text"]) for row in demonstrations} & {title(row["prompt"]) for row in prompts}


def test_a_prompt_is_a_header_and_one_to_five_words_of_an_unfinished_sentence(prompts):
    lengths = set()
    for row in prompts:
        tokens = row["prompt"].split(" ")
        assert (tokens[2], tokens[3], *tokens[4:6]) == ("(", row["aspect"], ")", ":")
        assert "." not in tokens
        lengths.add(len(tokens) - 6)
    assert lengths == {1, 2, 3, 4, 5}


def test_lengths_fit_a_context_of_64_tokens_with_36_new_ones(demonstrations, prompts):
    bodies = [len(row["text"].split(" ")) - 6 for row in demonstrations]
    assert 8 <= min(bodies) <= max(bodies) <= 32
    assert max(len(row["prompt"].split(" ")) for row in prompts) <= 16


def test_most_sentences_of_the_demonstrations_occur_once(demonstrations):
    """A model of 165,000 parameters cannot memorise this many reviews."""
    counts = Counter(
        sentence.strip()
        for row in demonstrations
        for sentence in row["text"].split(" : ")[1].split(".")
        if sentence.strip()
    )
    assert len(counts) > 20_000
    assert sum(count for count in counts.values() if count == 1) > 0.6 * sum(counts.values())


def test_no_other_module_imports_the_demo():
    """Only files of `conf` name the demo's functions, so a user's project has no demo; `names.py` has old names."""
    package = Path(ppo_rlhf.demo.__file__).parents[1]
    files = [path for path in package.rglob("*.py") if "demo" not in path.parent.parts and path.name != "names.py"]
    assert len(files) > 100
    assert [path for path in files if re.search(r"(from|import) ppo_rlhf\.demo", path.read_text())] == []


def test_the_demo_package_imports_the_standard_library_and_itself_only():
    for path in Path(ppo_rlhf.demo.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.startswith("ppo_rlhf.demo") or name.split(".")[0] in sys.stdlib_module_names, (path, name)
