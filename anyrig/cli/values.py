"""From what was written (a flag, an environment variable, a YAML value) to what a config dataclass's field holds."""

import json
import types
import typing
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from anyrig.core.errors import UsageError

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def kinds_of(hint: Any) -> tuple[list[Any], bool]:
    """The alternatives of a type hint without None, and whether None is one of them."""
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    kinds = list(typing.get_args(hint)) if union else [hint]
    return [k for k in kinds if k is not type(None)], type(None) in kinds


def is_list(hint: Any) -> bool:
    return any(_origin(k) in (Sequence, list, tuple) for k in kinds_of(hint)[0])


def metavar(hint: Any) -> str:
    """How help shows the value: `INTEGER`, `[auto|float32]`, `JSON|@FILE`."""
    kinds, _ = kinds_of(hint)
    if any(_origin(k) is Mapping for k in kinds):
        return "JSON|@FILE"
    kind = kinds[0]
    if is_list(hint):
        kind = (typing.get_args(kind) or (str,))[0]
    if _origin(kind) is Literal:
        return f"[{'|'.join(map(str, typing.get_args(kind)))}]"
    return {int: "INTEGER", float: "NUMBER", Path: "PATH"}.get(kind, "TEXT")


def parse(value: Any, hint: Any, where: str, *, commas: bool = False) -> Any:
    """`value` as the type `hint`; text is read the way a person writes it.

    Args:
        where: how the message calls the option, such as ``--top-k`` or ``ANYRIG_TOP_K``.
        commas: one text may hold a whole list of texts (lists of numbers always may).

    Raises:
        UsageError: naming the option, what it must be, and the value.
    """
    kinds, optional = kinds_of(hint)
    if value is None or (optional and str not in kinds and isinstance(value, str) and value.lower() == "none"):
        if optional:
            return None
        raise UsageError(f"`{where}` must have a value")
    if any(_origin(k) is Mapping for k in kinds):
        return _mapping(value, next(k for k in kinds if _origin(k) is Mapping), where)
    if is_list(hint):
        return _list(value, kinds[0], where, commas)
    if len(kinds) > 1:  # a size: 512MB or a number of bytes; the dataclass checks it
        return value if isinstance(value, (int, float)) else str(value)
    return _scalar(value, kinds[0], where)


def _scalar(value: Any, kind: Any, where: str) -> Any:
    if _origin(kind) is Literal:
        allowed = typing.get_args(kind)
        if value in allowed:
            return value
        near = get_close_matches(str(value), map(str, allowed), 1)
        raise UsageError(
            f"`{where}` must be one of {', '.join(map(str, allowed))}. Given: {value!r}",
            f"did you mean `{near[0]}`?" if near else None,
        )
    if kind is bool:
        text = str(value).lower()
        if text in _TRUE + _FALSE:
            return text in _TRUE
        raise UsageError(f"`{where}` must be true or false. Given: {value!r}")
    if kind in (int, float):
        try:
            if isinstance(value, bool) or (kind is int and isinstance(value, float)):
                raise ValueError
            return kind(value)
        except (TypeError, ValueError):
            noun = "a whole number" if kind is int else "a number"
            raise UsageError(f"`{where}` must be {noun}. Given: {value!r}") from None
    if isinstance(value, (Mapping, list)):
        raise UsageError(f"`{where}` must be one value. Given: {value!r}")
    return Path(value).expanduser() if kind is Path else str(value)


def _list(value: Any, kind: Any, where: str, commas: bool) -> tuple[Any, ...]:
    item = (typing.get_args(kind) or (str,))[0]
    parts: list[Any] = []
    given = value if isinstance(value, (list, tuple)) else [value]
    for part in given:
        if isinstance(part, str) and part.startswith("[") and len(given) == 1:
            parts += _json(part, where)
        elif isinstance(part, str) and (item is not str or (commas and len(given) == 1)):
            parts += [p.strip() for p in part.split(",")]
        else:
            parts.append(part)
    return tuple(_scalar(part, item, where) for part in parts)


def _mapping(value: Any, kind: Any, where: str) -> Mapping[Any, Any]:
    if isinstance(value, str):
        if value.startswith("@"):
            path = Path(value[1:]).expanduser()
            try:
                value = _json(path.read_text(encoding="utf-8"), f"{where} @{path}")
            except (OSError, UnicodeDecodeError) as e:
                raise UsageError(f"`{where}` names a file that cannot be read: {path} ({_reason(e)})") from None
        else:
            value = _json(value, where)
    if not isinstance(value, Mapping):
        raise UsageError(f"`{where}` must be a JSON object. Given: {json.dumps(value)}")
    key, item = typing.get_args(kind)
    keys = [_scalar(k, key, where) if key is not str else str(k) for k in value]
    items = [v if item is Any else _scalar(v, item, where) for v in value.values()]
    return dict(zip(keys, items, strict=True))


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as e:
        hint = "a file is given as @FILE" if Path(text).suffix in (".json", ".yaml") else None
        raise UsageError(
            f"`{where}` is not JSON ({e.msg} at character {e.pos + 1}). Given: {text[:80]!r}", hint
        ) from None


def _origin(hint: Any) -> Any:
    return typing.get_origin(hint) or hint


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or "not UTF-8 text"
