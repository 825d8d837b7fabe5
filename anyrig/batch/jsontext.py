"""JSON of data that is not ours: numbers keep the text they were written in, foreign types become text."""

import base64
import datetime
import decimal
import json
import math
import uuid
from collections.abc import Mapping
from typing import Any


class Number(float):
    """A JSON number with a fraction or exponent that prints as it was written (`1.10`, `1e5`)."""

    __slots__ = ("text",)
    text: str

    def __new__(cls, text: str) -> "Number":
        self = super().__new__(cls, text)
        self.text = text
        return self

    def __str__(self) -> str:
        return self.text


def loads(text: str) -> Any:
    """Like `json.loads`, with `Number` for floats."""
    return json.loads(text, parse_float=Number)


def dumps(value: Any) -> str:
    """JSON text of a value that came from a row or goes into one; always valid JSON, always valid UTF-8."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_foreign)
    except (ValueError, TypeError):
        text = json.dumps(_plain(value), ensure_ascii=False, default=_foreign)
    # A lone surrogate (an escaped half of an emoji in the input) has no UTF-8 form: keep it escaped.
    return text if _encodable(text) else json.dumps(json.loads(text))


def members(values: Mapping[str, Any]) -> str:
    """The inside of the JSON object that holds `values`."""
    return dumps(dict(values))[1:-1]


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _foreign(value: Any) -> Any:
    """What Parquet holds and JSON doesn't."""
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, (decimal.Decimal, uuid.UUID)):
        return str(value)
    raise TypeError(f"no JSON form for {type(value).__name__}")


def _plain(value: Any) -> Any:
    """JSON has no NaN or infinity (they become null), and only text as keys."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {k if isinstance(k, str) else str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value
