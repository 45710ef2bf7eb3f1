"""From the times of single iterations to the rows of the results and a table for people."""

from __future__ import annotations

from statistics import median
from typing import Any

PHASES = ("rollout", "score", "update", "iteration")
Iteration = dict[str, Any]  # what a worker says of one iteration


def rows_of(
    labels: dict[str, str],
    ours: list[Iteration],
    peer: list[Iteration],
    defaults: list[Iteration],
    needed: list[tuple[dict[str, float], dict[str, float]]],
) -> list[dict[str, Any]]:
    """Return a row a phase.

    A time is the median over the iterations; a ratio, like the share of the roofline, is the median of the pairs'.

    Args:
        labels: preset, form, precision.
        ours: This project's iterations.
        peer: The peer's, at its best settings: as many, the i-th measured next to our i-th.
        defaults: The peer's with its default settings; or none.
        needed: Least seconds by phase of each of our iterations (`roofline.Work`): with torch's own products, and with
            the fastest ones there are.
    """
    rows = []
    for phase in PHASES:
        mine = [run[phase] for run in ours]
        theirs = [run[phase] for run in peer]
        row: dict[str, Any] = {
            **labels,
            "phase": phase,
            "ours_s": median(mine),
            "peer_s": median(theirs),
            "ratio": median(their / my for their, my in zip(theirs, mine, strict=True)),
            "roofline": median(least[phase] / my for (least, _), my in zip(needed, mine, strict=True)),
            "roofline_s": median(least[phase] for least, _ in needed),
            "roofline_fastest": median(least[phase] / my for (_, least), my in zip(needed, mine, strict=True)),
        }
        if defaults:
            usual = [run[phase] for run in defaults]
            row["peer_defaults_s"] = median(usual)
            row["ratio_defaults"] = median(their / my for their, my in zip(usual, mine, strict=True))
        row |= {"ours_runs_s": mine, "peer_runs_s": theirs}
        if phase == "iteration":
            row |= _memory(ours, peer, defaults)
        row |= {"ours_tokens": _tokens(ours), "peer_tokens": _tokens(peer), "pairs": len(mine)}
        rows.append(row)
    return rows


def _memory(ours: list[Iteration], peer: list[Iteration], defaults: list[Iteration]) -> dict[str, float]:
    peaks = {"memory_ours_mib": ours, "memory_peer_mib": peer, "memory_defaults_mib": defaults}
    memory = {name: max(run["memory_mib"] for run in runs) for name, runs in peaks.items() if runs}
    return {**memory, "memory_share": memory["memory_ours_mib"] / memory["memory_peer_mib"]}


def _tokens(runs: list[Iteration]) -> float:
    """Mean response tokens of an iteration."""
    return sum(sum(run["response_tokens"]) for run in runs) / len(runs)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as an aligned table."""
    head = ["preset", "form", "precision", "phase", "ours s", "peer s", "ratio", "defaults s", "ratio", "roofline"]
    head += ["of the fastest"]
    head += ["tokens, ours and peer", "MiB, ours and peer"]
    lines = [head]
    for row in rows:
        if "phase" not in row:
            continue
        lines.append(
            [
                *(row[key] for key in ("preset", "form", "precision", "phase")),
                f"{row['ours_s']:.3f}",
                f"{row['peer_s']:.3f}",
                f"{row['ratio']:.2f}",
                f"{row['peer_defaults_s']:.3f}" if "peer_defaults_s" in row else "-",
                f"{row['ratio_defaults']:.2f}" if "ratio_defaults" in row else "-",
                f"{row['roofline']:.0%}",
                f"{row['roofline_fastest']:.0%}",
                f"{row['ours_tokens']:.0f} {row['peer_tokens']:.0f}",
                f"{row['memory_ours_mib']:.0f} {row['memory_peer_mib']:.0f} ({row['memory_share']:.0%})"
                if "memory_share" in row
                else "",
            ]
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    left = 4  # columns of names; the rest are numbers
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
