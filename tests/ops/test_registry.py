"""Which implementation is chosen, why not another, and that choosing imports nothing."""

import subprocess
import sys
from typing import Any

import pytest

from anyrig.core.errors import UsageError
from anyrig.ops import registry
from anyrig.ops.cpu import native

needs_kernels = pytest.mark.skipif(native.module() is None, reason=f"CPU kernels: {native.why_not()}")


def test_the_report_loads_no_implementation() -> None:
    program = (
        "import sys; from anyrig.ops import registry; rows = registry.report();"
        "assert {r[0] for r in rows if r[2]} == {'attention', 'sample'}, rows;"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def not_cpu(loaded: Any) -> str | None:
    return "too wide" if loaded.name == "cpu" else None


@needs_kernels
def test_work_decides_among_those_that_run_here() -> None:
    assert registry.choose("attention", "cpu").name == "cpu"
    assert registry.choose("attention", "cpu", suits=not_cpu).name == "ref"
    assert registry.choose("attention", "cuda").name == "ref"


@needs_kernels
def test_one_that_was_asked_for_must_suit_the_work_too() -> None:
    assert registry.choose("attention", "cpu", "cpu").name == "cpu"
    assert registry.choose("attention", "cpu", "ref", not_cpu).name == "ref"
    with pytest.raises(UsageError, match="too wide"):
        registry.choose("attention", "cpu", "cpu", not_cpu)
    with pytest.raises(UsageError, match="for CPUs"):
        registry.choose("attention", "cuda", "cpu")


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UsageError, match="no implementation 'fast'"):
        registry.choose("attention", "cpu", "fast")
