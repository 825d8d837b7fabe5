"""Types of JSON values, merged over a whole file, so that Parquet's schema holds every row.

A type is plain data, so that the ledger can keep it: `"null"`, `"bool"`, `"int"`, `"float"`, `"string"`,
`{"list": item}`, `{"struct": {name: type}}`, or `"json"` where rows disagree (a number here, a list there): such a
column holds JSON text.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from anyrig.batch import jsontext

JsonType = str | dict[str, Any]

_SCALARS = {"bool": pa.bool_(), "int": pa.int64(), "float": pa.float64(), "string": pa.string()}


def type_of(value: Any) -> JsonType:
    """The type of one JSON value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int" if -(2**63) <= value < 2**63 else "json"
    if isinstance(value, float):
        return "float"
    if isinstance(value, str):
        return "string"
    if isinstance(value, list):
        item: JsonType = "null"
        for v in value:
            item = merge(item, type_of(v))
        return {"list": item}
    # Parquet has no struct without fields.
    return {"struct": {k: type_of(v) for k, v in value.items()}} if value else "json"


def merge(a: JsonType, b: JsonType) -> JsonType:
    """The narrowest type that holds both."""
    if a == b or b == "null":
        return a
    if a == "null":
        return b
    if isinstance(a, str) and isinstance(b, str) and {a, b} == {"int", "float"}:
        return "float"
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        if "list" in a:
            return {"list": merge(a["list"], b["list"])}
        ours, theirs = a["struct"], b["struct"]
        names = [*ours, *(n for n in theirs if n not in ours)]
        return {"struct": {n: merge(ours.get(n, "null"), theirs.get(n, "null")) for n in names}}
    return "json"


def merge_columns(into: dict[str, JsonType], types: Mapping[str, JsonType]) -> None:
    for name, kind in types.items():
        into[name] = merge(into[name], kind) if name in into else kind


def arrow_type(kind: JsonType) -> pa.DataType:
    """A column of nothing but nulls is text: many readers know no null type."""
    if isinstance(kind, str):
        return _SCALARS.get(kind, pa.string())
    if "list" in kind:
        return pa.list_(arrow_type(kind["list"]))
    return pa.struct([pa.field(name, arrow_type(t)) for name, t in kind["struct"].items()])


def to_arrow(values: Iterable[Any], kind: JsonType) -> pa.Array:
    """A column of JSON values, all of which `kind` holds."""
    return pa.array([_fit(v, kind) for v in values], type=arrow_type(kind))


def _fit(value: Any, kind: JsonType) -> Any:
    if value is None:
        return None
    if kind == "json":
        return value if isinstance(value, str) else _text(value)
    if kind == "float":
        return float(value)
    if isinstance(kind, dict):
        if "list" in kind:
            return [_fit(v, kind["list"]) for v in value]
        return {name: _fit(value.get(name), t) for name, t in kind["struct"].items()}
    return value


def _text(value: Any) -> str:
    return str(value) if isinstance(value, jsontext.Number) else json.dumps(value, ensure_ascii=False)
