"""Shell scripts: what is read as a shell would read it, and what is refused by its line."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ppo_rlhf.compat.command_line import find_command
from ppo_rlhf.core.errors import ConfigError

NAMES = [("train", "now")]


def words(script: str) -> list[str]:
    return find_command(script, NAMES, "x.sh").words


@pytest.mark.parametrize(
    "script",
    [
        "train now --a 1 'b c' \"d e\" f\\ g\n",
        "# comment\nA=1 # another\ntrain now --a $A --b=${A} c#d # end\n",
        'A=\'x y\'\nB="$A z"; train now $A "$A" \'$A\' "\\$A" p$A.q"$B"\n',
        'A=\ntrain now --a $A --b "$A" ${A:-1} ${A-2} ${C:-3} ${C-$HOME} ${D:-${A:-4}}\n',
        'n=4\ntrain now $(expr 16 / $n) $((n * 2)) $((16-$n)) "$(expr 2 \\* 3)"\n',
        "train now \\\n  --a 1 \\\n  --b 2\n\n",
        'set -euo pipefail\nexport A=1 B="2 3"\nexport C\nmkdir -p made\necho\ntrain now $A $B 2>&1\n',
        "A=x\nA=$A$A\nA=1 train now $A\n",
        'A=old\nA=new B=$A C="$B"; train now $A $B $C\n',
        "A='x y'\nexport B=1 C=$A; train now $C\n",
        "mkdir -p made\ncd made\ntrain now $PWD/x\n",
        'train now "a"b\'c\'d "$@" $@ *.nothing [a,b] --e=f=g\n',
    ],
)
def test_words_are_those_that_a_shell_passes(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """bash itself is the judge: a function stands in for the command."""
    judge = f"train() {{ printf '%s\\n' \"$@\"; }}\n{script}"
    said = subprocess.run(["bash", "-c", judge], capture_output=True, text=True, check=True, cwd=tmp_path)
    monkeypatch.chdir(tmp_path)
    assert words(script) == said.stdout.removeprefix("\n").splitlines()[1:]


@pytest.mark.parametrize(
    ("script", "line", "shown"),
    [
        ("LR=1\nif [[ $X == 1 ]]; then\n  LR=2\nfi\ntrain now --lr $LR\n", 2, "if"),
        ("for x in 1 2; do\ntrain now\ndone\n", 1, "for"),
        ("train now\nwhile true; do\n:\ndone", 2, "while"),
        ("f() {\ntrain now\n}\nf\n", 1, "f()"),
        ("cd x && train now\n", 1, "&"),
        ("false || train now\n", 1, "|"),
        ("cat a | train now\n", 1, "|"),
        ("train now | grep loss\n", 1, "|"),
        ("source env.sh\ntrain now\n", 1, "source"),
        (". ./env.sh\ntrain now\n", 1, "env.sh"),
        ("A=1\n\npip install x\ntrain now\n", 3, "pip install x"),
        ("cat > a.yaml <<EOF\nx\nEOF\ntrain now\n", 1, "<"),
        ("echo 'kl: 1' > a.yaml\ntrain now\n", 1, "echo"),
        ("A=(1 2)\ntrain now\n", 1, "A=(1 2)"),
        ("A+=x\ntrain now\n", 1, "A+=x"),
        ("set -a\ntrain now\n", 1, "set -a"),
        ("set -- 1 2\ntrain now\n", 1, "set -- 1 2"),
        ("unset A\ntrain now\n", 1, "unset A"),
        ("cd $UNKNOWN\ntrain now\n", 1, "cd"),
        ("cd x &\ntrain now\n", 1, "cd x"),
        ("train now --a $(date)\n", 1, "$(date)"),
        ("A=`date`\ntrain now\n", 1, "`date`"),
        ("train now --a $((1/0))\n", 1, "$((1/0))"),
        ("train now --a $((2**64))\n", 1, "$((2**64))"),
        ("train now --a $((010 + 1))\n", 1, "$((010 + 1))"),
        ("IFS=,\nA=b,c\ntrain now --a $A\n", 1, "IFS"),
        ("train now --a $B\n", 1, "$B"),
        ("A=$B\ntrain now --a $A\n", 2, "$B"),
        ("train now --a ${A:?no}\n", 1, "${A:?no}"),
        ("train now --a ${A//x/y}\n", 1, "${A//x/y}"),
        ("train now --a {x,y}\n", 1, "{"),
        ("train now --a 'x\n", 1, "is not closed"),
        ("train now --a 1 \\ \n --b 2\n", 1, "backslash"),
        ("train now --a \\\n  # b \\\n  --c 1\n", 3, "--c 1"),
        ("train now --a \\\n\n  --c 1\n", 3, "--c 1"),
        ("A=x\n" + "A=$A$A\n" * 40 + "train now\n", 19, "longer than"),
        ("train now --a $" + "(" * 5000, 1, "$"),
        ("[[ " * 5000 + "\ntrain now\n", 1, "[["),
    ],
)
def test_anything_else_is_refused_by_its_line(script: str, line: int, shown: str):
    with pytest.raises(ConfigError) as refused:
        words(script)
    assert f"line {line}: " in str(refused.value)
    assert shown in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_unknown_variable_matters_only_where_the_command_has_it():
    assert words("export PATH=$CONDA/bin:$PATH\necho $WHO\ntrain now --a 1 > log.txt 2>&1 &\n") == ["--a", "1"]
    assert words("train now --a 1 2>&1 | tee -a log.txt\n") == ["--a", "1"]


def test_a_variable_that_the_command_does_not_see_is_no_number_of_processes():
    command = find_command("N=8\ntrain now\n", NAMES, "x.sh")
    with pytest.raises(ConfigError, match="N is set, but the command does not see it"):
        command.processes(("N",))
    assert find_command("export N\nN=8\ntrain now\n", NAMES, "x.sh").processes(("N",)) == 8
    command = find_command("M=8\nM=2 N=$M train now\n", NAMES, "x.sh")
    assert command.processes(("N",)) == 2  # as in bash: an assignment sees those on its left
    with pytest.raises(ConfigError, match=r"line 1: python starts one process whatever N say"):
        find_command("N=8 python train now\n", NAMES, "x.sh").processes(("N",))
    command = find_command("CUDA_VISIBLE_DEVICES=0,1, deepspeed train now\n", NAMES, "x.sh")
    assert command.processes() == 2
    for launch in ("srun", "time", "torchrun --nproc_per_node 1:4", "torchrun --nproc_per_node gpu", "deepspeed"):
        with pytest.raises(ConfigError, match="line 1"):
            find_command(f"{launch} train now\n", NAMES, "x.sh").processes()
