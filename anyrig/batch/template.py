"""The prompt template: Jinja2 in its sandbox, over one row's columns, with errors that name the column."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
import jinja2.sandbox

from anyrig.core.errors import AnyrigError, UsageError


class TemplateError(AnyrigError):
    """A row that the template can't be filled with."""


class MissingColumn(TemplateError):
    """The template names a column that the row doesn't have."""


class _Missing(jinja2.StrictUndefined):
    """Any use of it fails, naming the column; `is defined` and `default()` work as in every template."""

    __slots__ = ("_column",)

    def __init__(self, hint: Any = None, obj: Any = jinja2.utils.missing, name: Any = None, exc: Any = None) -> None:
        self._column = hint is None and obj is jinja2.utils.missing
        super().__init__(hint, obj, name, MissingColumn if self._column else TemplateError)  # type: ignore[arg-type]

    @property
    def _undefined_message(self) -> str:
        return str(self._undefined_name) if self._column else super()._undefined_message


_ENVIRONMENT = jinja2.sandbox.ImmutableSandboxedEnvironment(
    undefined=_Missing,
    autoescape=False,
    # An empty cell is no text, rather than the word None.
    finalize=lambda value: "" if value is None else value,
)


class Template:
    """A compiled template.

    Attributes:
        text: its source.
        flag: the option it came from, for messages.
        names: the columns it names; `row` is the whole row, for columns whose names are no identifiers:
            ``{{ row["first name"] }}``.

    Raises:
        UsageError: on a syntax error, with its line.
    """

    def __init__(self, text: str, flag: str = "--prompt") -> None:
        self.text = text
        self.flag = flag
        try:
            self.names = frozenset(jinja2.meta.find_undeclared_variables(_ENVIRONMENT.parse(text)))
            self._template = _ENVIRONMENT.from_string(text)
        except jinja2.TemplateSyntaxError as e:
            raise UsageError(
                f"{flag} is not a template: {e.message} (line {e.lineno})", _shown(text, e.lineno)
            ) from None

    @classmethod
    def of_option(cls, value: str, flag: str) -> "Template":
        """The template that an option gives: its text, or ``@FILE``.

        Raises:
            UsageError: when the file can't be read, or on a syntax error.
        """
        if not value.startswith("@"):
            return cls(value, flag)
        path = Path(value[1:]).expanduser()
        try:
            return cls(path.read_text(encoding="utf-8"), f"{flag} {value}")
        except OSError as e:
            raise UsageError(f"{flag} names a file that can't be read: {path} ({e.strerror})") from None
        except UnicodeDecodeError:
            raise UsageError(f"{flag} names a file that is not UTF-8 text: {path}") from None

    def render(self, values: Mapping[str, Any]) -> str:
        """The text for one row.

        Raises:
            MissingColumn: naming the column, and the nearest one that the row has.
            TemplateError: whatever else goes wrong inside the template.
        """
        # Only what is named is looked at: a Parquet row's other columns are never decoded.
        given = {name: values[name] for name in self.names if name in values}
        if "row" in self.names:
            given.setdefault("row", values)
        try:
            return self._template.render(given)
        except MissingColumn as e:
            raise MissingColumn(missing(e.message, values)) from None
        except TemplateError as e:
            raise TemplateError(f"{self.flag} can't be filled ({e.message})") from None
        except Exception as e:  # a template runs the user's expressions on the user's data: anything can be raised
            raise TemplateError(f"{self.flag} can't be filled ({type(e).__name__}: {e})") from None


def missing(name: str, columns: Iterable[str]) -> str:
    """One sentence: the column that isn't there, the nearest one, and all of them."""
    columns = list(columns)
    by_fold = {c.casefold(): c for c in columns}
    near = [by_fold[m] for m in get_close_matches(name.casefold(), by_fold, 1, 0.6)]
    hint = f"did you mean `{near[0]}`? " if near else ""
    shown = ", ".join(columns[:12]) + (", ..." if len(columns) > 12 else "")
    return f"no column `{name}`: {hint}The row has {shown or 'no columns'}"


def _shown(text: str, line: int) -> str:
    lines = text.splitlines()
    return lines[line - 1].strip()[:100] if 0 < line <= len(lines) else text[:100]
