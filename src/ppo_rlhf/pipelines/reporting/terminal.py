"""The result in the terminal: the table before and after, what looks off, and where to look next."""

from collections.abc import Sequence

import pandas as pd
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ppo_rlhf.pipelines.reporting.measures import measure, write_change, write_value


def print_result(
    console: Console,
    headline: str,
    before_after: pd.DataFrame,
    remarks: Sequence[str],
    next_steps: Sequence[tuple[str, str]],
) -> None:
    """Print the result. Texts are printed as they are: square brackets in them are no markup."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    table.add_column("Mean over held-out responses")
    for heading in ("SFT", "PPO", "change"):
        table.add_column(heading, justify="right")
    for row in before_after.to_dict("records"):
        shown, name = measure(row["measure"]), row["measure"]
        label = f"{shown.label} ({shown.unit})" if shown.unit else shown.label
        table.add_row(
            Text(label),
            write_value(name, row["sft"]),
            write_value(name, row["ppo"]),
            write_change(name, row["sft"], row["ppo"]),
        )
    steps = Table.grid(padding=(0, 3, 0, 0))
    for what, where in next_steps:
        # paths and commands are copied by people: long ones fold, they are never cut short
        steps.add_row(Text(what), Text(where, overflow="fold", style="cyan"))
    console.print()
    console.print(Text(headline, style="bold"))
    console.print()
    console.print(Padding(table, (0, 0, 1, 2)))
    for remark in remarks:
        console.print(Padding(Text(f"! {remark}", style="yellow"), (0, 0, 0, 2)))
    if remarks:
        console.print()
    console.print(Text("Where to look next", style="bold"))
    console.print(Padding(steps, (0, 0, 1, 2)))
