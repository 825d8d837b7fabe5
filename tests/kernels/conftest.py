"""Tests of csrc/cpu against numpy: every build that this CPU can run.

No torch and no model, so that they also run under an emulator of another CPU (test_qemu.py).
"""

import importlib

import pytest

from anyrig.ops.cpu import native


@pytest.fixture(params=native.NEEDS)
def kernels(request):
    """The module of one instruction set."""
    isa = request.param
    if isa not in native.built():
        pytest.skip(f"{isa} is not built here")
    if missing := native.missing(isa):
        pytest.skip(f"this CPU lacks {', '.join(missing)}")
    return importlib.import_module(f"anyrig.ops.cpu._{isa}")
