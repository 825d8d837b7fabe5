"""Real text with known answers, on every machine with Python: the standard library's own docstrings.

The first sentence of a function's or class's docstring is the text; the part of the library that it comes from is its
topic, and the function's name is known too. Source files are parsed, never imported.
"""

import ast
import hashlib
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Modules and packages of each topic. A name that this Python doesn't have is passed over (`_pydatetime` came in 3.12).
TOPICS: dict[str, tuple[str, ...]] = {
    "dates": ("datetime", "_pydatetime", "calendar", "zoneinfo", "_strptime"),
    "files": (
        *("os", "posixpath", "pathlib", "glob", "shutil", "tempfile", "fileinput"),
        *("tarfile", "zipfile", "gzip", "bz2", "lzma"),
    ),
    "email": ("email", "mailbox", "smtplib", "imaplib", "poplib"),
    "numbers": ("numbers", "fractions", "_pydecimal", "statistics", "random"),
    "testing": ("unittest", "doctest"),
    "threads": ("threading", "multiprocessing", "concurrent", "asyncio", "queue"),
}

_WORDS = range(4, 31)  # of a usable sentence
_ROLE = re.compile(r":\w+(?::\w+)?:`~?\.?([^`<]+?)(?: <[^>]*>)?`")
_SENTENCE = re.compile(r".+?[.!?](?=\s|$)")
_MARKUP = (">>>", ".. ", "{")


class NoSources(Exception):
    """The standard library isn't there as source files, or holds too few docstrings."""


@dataclass(frozen=True, slots=True)
class Docstring:
    """One documented function, method or class.

    Attributes:
        id: module and qualified name, such as ``email.utils.parsedate``.
        text: first sentence of the docstring.
        topic: the answer of the labelling job, a key of `TOPICS`.
        name: the last part of `id`, the answer of the naming job.
    """

    id: str
    text: str
    topic: str
    name: str


@dataclass(frozen=True, slots=True)
class Split:
    """Docstrings for two uses; none is in both. The topics come one after the other.

    Attributes:
        development: prompts were chosen on these, and the job is calibrated with some of them.
        rows: the job. Nothing was tuned on them.
    """

    development: list[Docstring]
    rows: list[Docstring]


def split(development: int, rows: int, stdlib: Path | None = None, *, fewest: int = 20) -> Split:
    """Docstrings of this Python, the same number of each topic where it has that many.

    Which docstring is used for what depends on nothing but its text: a hash of it gives the order.

    Args:
        development, rows: how many of each topic; fewer rows where a topic has no more.
        stdlib: folder of the standard library, by default that of the running Python.
        fewest: rows that a topic must have, however many are asked for.

    Raises:
        NoSources: when a topic has fewer.
    """
    folder = stdlib or Path(sysconfig.get_path("stdlib"))
    found = collect(folder)
    for topic, docs in found.items():
        if len(docs) < development + fewest:
            raise NoSources(
                f"{folder} has {len(docs)} usable docstrings about {topic}, {development + fewest} are needed: "
                "use a Python whose standard library is there as .py files"
            )
    return Split(
        development=[d for docs in found.values() for d in docs[:development]],
        rows=[d for docs in found.values() for d in docs[development : development + rows]],
    )


def collect(stdlib: Path) -> dict[str, list[Docstring]]:
    """All usable docstrings by topic, no sentence twice, in the order of the sentences' hashes."""
    seen: set[str] = set()
    found: dict[str, list[Docstring]] = {}
    for topic, modules in TOPICS.items():
        found[topic] = []
        for module in modules:
            for doc in _of_module(stdlib, module, topic):
                if doc.text not in seen:
                    seen.add(doc.text)
                    found[topic].append(doc)
        found[topic].sort(key=lambda d: hashlib.sha256(d.text.encode()).digest())
    return found


def first_sentence(docstring: str) -> str | None:
    """The first sentence as plain text on one line; None when it is too short, too long, or no plain English."""
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    match = _SENTENCE.match(paragraph)
    text = _ROLE.sub(r"\1", match[0] if match else paragraph).replace("`", "")
    usable = text.isascii() and len(text.split()) in _WORDS and not any(mark in text for mark in _MARKUP)
    return text if usable else None


def _of_module(stdlib: Path, module: str, topic: str) -> Iterator[Docstring]:
    package = stdlib / module
    files = sorted(package.rglob("*.py")) if package.is_dir() else [stdlib / f"{module}.py"]
    for file in files:
        path = file.relative_to(stdlib).with_suffix("")
        if not file.is_file() or {"test", "tests"} & set(path.parts):
            continue
        parts = path.parts[:-1] if path.name == "__init__" else path.parts
        tree = ast.parse(file.read_bytes(), filename=str(file))
        for name, docstring in _documented(tree, ".".join(parts)):
            text = first_sentence(docstring)
            if text is not None:
                yield Docstring(name, text, topic, name.rpartition(".")[2])


def _documented(node: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[str, str]]:
    """Qualified name and docstring of everything public in a module or class."""
    for child in node.body:
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not child.name.startswith("_"):
            name = f"{prefix}.{child.name}"
            docstring = ast.get_docstring(child)
            if docstring:
                yield name, docstring
            if isinstance(child, ast.ClassDef):
                yield from _documented(child, name)
