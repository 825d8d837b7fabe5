"""How `anyrig VERB --help` looks: whole names and short texts, a heading per config class."""

import re
from typing import Any

import typer.core

_TYPES = re.compile(r" <([^>]*)>")
_WORDS = {"bool": "", "int": " INTEGER", "float": " NUMBER", "str": " TEXT", "path": " PATH"}


class Command(typer.core.TyperCommand):
    """A verb whose options are listed under their panels ("Engine", "Sampling") after its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["rich_markup_mode"] = None
        super().__init__(*args, **kwargs)

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        required: list[str] = []
        optional: list[str] = []
        for param in self.get_params(ctx):
            if param.param_type_name == "argument":
                name = param.metavar or param.name.upper()
                (required if param.required else optional).append(name if param.required else f"[{name}]")
        formatter.write_usage(ctx.command_path, " ".join([*required, *optional, "[OPTIONS]"]))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_options(self, ctx, formatter)


class Group(typer.core.TyperGroup):
    """A group of verbs; alone, it shows its help."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["rich_markup_mode"] = None
        super().__init__(*args, **kwargs)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args and self.no_args_is_help:
            print(ctx.get_help())
            ctx.exit()
        return super().parse_args(ctx, args)

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        formatter.write_usage(ctx.command_path, "[COMMAND] [OPTIONS]" if self.invoke_without_command else "COMMAND")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)


def write_options(command: Any, ctx: Any, formatter: Any) -> None:
    """The sections of arguments and options, in the order in which they were declared."""
    sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for param in command.get_params(ctx):
        if (record := param.get_help_record(ctx)) is None:
            continue
        if param.param_type_name == "argument":
            title, record = "Arguments", (param.metavar or param.name.upper(), param.help or "")
        else:
            panel = getattr(param, "rich_help_panel", None)
            title = f"{panel} options" if panel else "Options"
        name, text = record
        # Typer's own words, in ours
        if getattr(param, "count", False):
            name = name.replace(" <int>", "")
        name = _TYPES.sub(lambda m: _WORDS.get(m[1], f" [{m[1]}]"), name)
        text = text.replace("Show this message and exit.", "show this help and leave")
        sections.setdefault(title, []).append((name, text))
    for title, rows in sections.items():
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows, col_max=34)
