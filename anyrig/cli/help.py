"""How `anyrig VERB --help` looks: whole names and short texts, a heading per config class."""

from typing import Any

import typer.core


class Command(typer.core.TyperCommand):
    """A verb whose options are listed under their panels ("Engine", "Sampling") after its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["rich_markup_mode"] = None
        super().__init__(*args, **kwargs)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            if param.param_type_name == "argument":
                title = "Arguments"
            else:
                panel = getattr(param, "rich_help_panel", None)
                title = f"{panel} options" if panel else "Options"
            sections.setdefault(title, []).append((record[0].replace(" <bool>", "").replace(" <int>", ""), record[1]))
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows, col_max=34)
