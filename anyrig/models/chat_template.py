"""Chat templates: Jinja as Transformers renders it (same sandbox, filters and globals), without Transformers."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from anyrig.core.errors import InvalidRequest


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant said, for trainers; the text is its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as an instance attribute)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return caller()


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which a prompt must not.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def render(template: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """The prompt text of a conversation.

    Args:
        template: Jinja source.
        messages: OpenAI-style, `{"role": ..., "content": ...}`; a content of text parts becomes their text.
        variables: what else the template may read (special tokens, `tools`, `add_generation_prompt`, ...).

    Raises:
        InvalidRequest: with the template's own words, when it refuses the conversation or is broken.
    """
    try:
        return _compile(template).render(messages=[_plain(m, i) for i, m in enumerate(messages)], **variables)
    except jinja2.TemplateSyntaxError as error:
        raise InvalidRequest(f"The chat template is broken at line {error.lineno}: {error.message}") from error
    except jinja2.TemplateError as error:
        raise InvalidRequest(f"The chat template refuses this conversation: {error}") from error
    except (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError, OverflowError) as error:
        raise InvalidRequest(f"The chat template fails on this conversation: {error}") from error


def _plain(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest(f"Message {index} is not an object with a `role`: {message!r}")
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text":
                kind = part.get("type") if isinstance(part, Mapping) else part
                raise InvalidRequest(f"Message {index} has a part of type {kind!r}", "only text parts are taken")
        content = "\n".join(str(part.get("text", "")) for part in content)
    return {**message, "content": content}
