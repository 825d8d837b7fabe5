"""`anyrig doctor`: what this machine can do, and what is in the way. Well under a second: torch stays shut."""

import json as jsonlib
import os
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from anyrig.hardware.facts import Facts
    from anyrig.hardware.finding import Finding

_MARKS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "problem": ("problem", "bold red")}


def doctor(
    json: Annotated[bool, typer.Option("--json", help="print the report as JSON")] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="import torch in a child process and try every device (seconds)")
    ] = False,
    ops: Annotated[
        bool, typer.Option("--ops", help="show which implementation of each op was chosen, and why not the others")
    ] = False,
) -> None:
    """Say what this machine can do, what is in the way, and how to remove it.

    Exit code 0: no problem found; 1: there is a problem.
    """
    # Imported here so that `anyrig --help` does not pay for them.
    from anyrig.hardware import doctor as diagnosis
    from anyrig.hardware import facts as machine
    from anyrig.ops.cpu import native

    facts = machine.collect(deep=deep, kernels=native.report())
    findings = diagnosis.diagnose(facts)
    rows = op_rows("cuda" if diagnosis.ready(facts) else "cpu") if ops else None
    if json:
        report = diagnosis.as_json(facts, findings)
        if rows is not None:
            report["ops"] = [dict(zip(("op", "implementation", "chosen", "reason"), row, strict=True)) for row in rows]
        typer.echo(jsonlib.dumps(report, indent=2))
    else:
        show(facts, findings, rows, _console())
    if any(finding.state == "problem" for finding in findings):
        raise typer.Exit(1)


def _console() -> "Console":
    """Standard output. Off a terminal lines are not folded, so that `grep` finds whole sentences."""
    from rich.console import Console

    plain = bool(os.environ.get("NO_COLOR"))
    console = Console(highlight=False, color_system=None if plain else "auto")
    return console if console.is_terminal else Console(highlight=False, width=500)


def op_rows(device: str) -> list[tuple[str, str, bool, str]]:
    """(op, implementation, chosen, reason) on a device of torch's kind ("cpu", "cuda")."""
    from anyrig.ops import registry

    return registry.report(device)


def show(
    facts: "Facts", findings: "list[Finding]", rows: list[tuple[str, str, bool, str]] | None, console: "Console"
) -> None:
    """Print the report for people: machine, devices, software, findings, verdict."""
    from anyrig.hardware import doctor as diagnosis

    sections = [
        ("Machine", _machine(facts)),
        ("Devices", _devices(facts)),
        ("Software", _software(facts)),
        ("Findings", _findings(findings)),
    ]
    if rows is not None:
        sections.append(("Ops", _ops(rows)))
    for heading, table in sections:
        with console.capture() as captured:
            console.print(table)
        console.print(heading, style="bold")
        # Tables fill their lines with spaces up to the edge, which a copied report need not carry.
        typer.echo("\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n")
    bad = any(finding.state == "problem" for finding in findings)
    verdict = diagnosis.verdict(facts, findings)
    console.print(verdict, style="bold yellow" if bad else "bold green", markup=False, soft_wrap=True)


def _grid(*columns: str) -> "Table":
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column("  ")
    for style in columns:
        table.add_column(style=style, overflow="fold")
    return table


def _machine(facts: "Facts") -> "Table":
    from anyrig.hardware.finding import size

    cpu = facts.cpu
    cores = f"{cpu.cores} of {cpu.machine_cores} usable" if cpu.cores < cpu.machine_cores else str(cpu.cores)
    if cpu.physical_cores < cpu.cores:
        cores += f" ({cpu.physical_cores} without hyper-threads)"
    memory = f"{size(cpu.memory_available)} available of {size(cpu.memory_total)}"
    if cpu.memory_limit < cpu.memory_total:
        memory += f", limit {size(cpu.memory_limit)}"
    table = _grid("dim", "")
    table.add_row("", "CPU", cpu.model)
    table.add_row("", "cores", cores)
    table.add_row("", "instructions", " ".join(cpu.instruction_sets) or "none of those that matter")
    table.add_row("", "memory", memory)
    table.add_row("", "cache", f"{facts.cache} ({size(facts.cache_free)} free)")
    return table


def _devices(facts: "Facts") -> "Table":
    from anyrig.hardware.finding import size

    table = _grid("dim", "", "", "", "", "")
    for amd in facts.amd.gpus:
        part = f" part {amd.partition + 1}/{amd.partitions}" if amd.partitions > 1 else ""
        table.add_row(
            "",
            "GPU -" if amd.index is None else f"GPU {amd.index}",
            amd.name + part,
            amd.gfx or "target unknown",
            f"{size(amd.memory)}{' shared' if amd.apu else ''}" if amd.memory else "memory unknown",
            f"{amd.units} CU",
            f"{_short(amd.bus)}  {_file(amd.render.path)}",
        )
    for nvidia in facts.nvidia.gpus:
        table.add_row(
            "",
            "GPU -" if nvidia.index is None else f"GPU {nvidia.index}",
            nvidia.name,
            f"sm_{nvidia.capability.replace('.', '')}" if nvidia.capability else "",
            size(nvidia.memory) if nvidia.memory else "memory unknown",
            "",
            f"{_short(nvidia.bus)}  {_file(nvidia.node.path)}",
        )
    if not table.row_count:
        table.add_row("", "no AMD or NVIDIA GPU that the kernel shows here")
    return table


def _short(bus: str) -> str:
    """A PCI address without the domain 0, so that a device's line fits into 80 columns."""
    return bus.removeprefix("0000:")


def _file(path: str) -> str:
    return path.rpartition("/")[2]


def _software(facts: "Facts") -> "Table":
    table = _grid("dim", "")
    table.add_row("", "Python", ".".join(map(str, facts.python)))
    table.add_row("", "torch", facts.torch.label if facts.torch else "not installed")
    if facts.nvidia.driver:
        table.add_row("", "driver", f"NVIDIA {facts.nvidia.driver}")
    compilers = ", ".join(f"{name} {version}" for name, version in facts.compilers.items())
    table.add_row("", "compilers", compilers or "none")
    others = ", ".join(f"{name} {version}" for name, version in facts.packages.items() if name != "torch")
    table.add_row("", "packages", others or "none of those that matter")
    return table


def _findings(findings: "list[Finding]") -> "Table":
    from rich.text import Text

    table = _grid("", "", "")
    for finding in findings:
        mark, style = _MARKS[finding.state]
        table.add_row("", Text(mark, style=style), finding.name, Text(finding.sentence))
        if finding.remedy is not None:
            table.add_row("", "", "", Text(f"-> {finding.remedy}", style="cyan"))
    return table


def _ops(rows: list[tuple[str, str, bool, str]]) -> "Table":
    from rich.text import Text

    table = _grid("", "", "", "")
    for op, name, chosen, reason in rows:
        table.add_row("", op, Text(name, style="green" if chosen else "dim"), "chosen" if chosen else "", Text(reason))
    return table
