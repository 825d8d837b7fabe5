"""How good the demo's answers are: measures, and the tables at its end."""

import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from demo_rows import TOPICS
from rich.console import Console
from rich.markup import escape
from rich.table import Table

Row = Mapping[str, Any]


def print_report(console: Console, model: str, rows: Sequence[Row], labelling: Row, naming: Row) -> None:
    """The tables.

    Args:
        rows: the results: `topic` and `name` are the answers, `label_output` and `name_output` the model's.
        labelling, naming: the summaries that `anyrig batch --json` printed for the two jobs.
    """
    named = names(rows)
    table = Table(title=f"{model} on {len(rows)} docstrings of Python's standard library", title_justify="left")
    table.add_column("job")
    for column in ("rows/s", "tokens/s in", "out", "right", "by guessing"):
        table.add_column(column, justify="right")
    for job, speed, good, base in (
        (f"label: one of {len(TOPICS)} topics", labelling, accuracy(rows), majority(rows)),
        ("name: a word is right", naming, share(alike(made, real) for made, real in named), chance(named)),
    ):
        rates = (f"{speed[f'{what}_per_second']:,.1f}" for what in ("rows", "prompt_tokens", "output_tokens"))
        table.add_row(job, *rates, f"[bold]{good:.0%}[/]", f"{base:.0%}")
    console.print("", table)
    console.print("By guessing: always the commonest topic; the name of another row.", style="dim")
    console.print("", per_topic(rows), "")
    print_samples(console, rows)


def per_topic(rows: Sequence[Row]) -> Table:
    """One line per topic: how many rows, how many found, and what the others were taken for."""
    table = Table(title="Labels", title_justify="left")
    for column in ("topic", "rows", "right", "mistaken for"):
        table.add_column(column, justify="right" if column in ("rows", "right") else "left")
    for topic in TOPICS:
        given = Counter(row["label_output"] for row in rows if row["topic"] == topic)
        wrong = ", ".join(f"{label or 'failed'} {n}" for label, n in given.most_common() if label != topic)
        table.add_row(topic, str(given.total()), f"{given[topic] / max(1, given.total()):.0%}", wrong)
    return table


def print_samples(console: Console, rows: Sequence[Row]) -> None:
    """A row of each topic, drawn by lot: both answers, and the model's beside them."""
    console.print("One row of each topic, drawn by lot", style="italic")
    draw = random.Random(0)
    for topic in TOPICS:
        row = draw.choice([row for row in rows if row["topic"] == topic])
        label, name = (str(row[column] or "(failed)").strip() for column in ("label_output", "name_output"))
        console.print(f"  {row['text']}", style="dim", markup=False, no_wrap=True, overflow="ellipsis")
        verdict = "[green]✓[/]" if label == topic else f"[red]✗ is {topic}[/]"
        console.print(f"    {label} {verdict} · {escape(name)} (is {row['name']})")


def accuracy(rows: Sequence[Row]) -> float:
    """A row without a label, because it failed, counts as wrong."""
    return share(row["label_output"] == row["topic"] for row in rows)


def majority(rows: Sequence[Row]) -> float:
    """The accuracy of always giving the commonest topic."""
    return max(Counter(row["topic"] for row in rows).values()) / len(rows)


def names(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Names made up and real ones."""
    return [((row["name_output"] or "").strip(), row["name"]) for row in rows]


def alike(made: str, real: str) -> bool:
    """Whether two identifiers have a word in common (`isLeap`, `is_leap_year`)."""
    return not words(made).isdisjoint(words(real))


def words(identifier: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", identifier)}


def chance(named: Sequence[tuple[str, str]]) -> float:
    """The share of `alike` when each made-up name is held against every other row's real one."""
    split = [(words(made), words(real)) for made, real in named]
    return share(
        not made.isdisjoint(real) for i, (made, _) in enumerate(split) for j, (_, real) in enumerate(split) if i != j
    )


def share(values: Iterable[float]) -> float:
    """Their mean; of truth values, the share that is true."""
    each = list(values)
    return sum(each) / len(each) if each else 0.0
