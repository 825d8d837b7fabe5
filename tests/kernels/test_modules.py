"""What is in the built modules: nothing that a CPU without the instructions could come to execute."""

import re
import shutil
import subprocess
from importlib.util import find_spec

import pytest

from anyrig.ops.cpu import native


@pytest.fixture(params=native.NEEDS)
def built(request):
    """(instruction set, file) of one built module, whether or not this CPU can run it."""
    if request.param not in native.built():
        pytest.skip(f"{request.param} is not built here")
    return request.param, find_spec(f"anyrig.ops.cpu._{request.param}").origin


def output(*command):
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} (binutils) is not installed")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_each_module_knows_its_instruction_set(kernels):
    assert kernels.__name__ == f"anyrig.ops.cpu._{kernels.isa}"
    assert isinstance(kernels.LAYOUT, int)


@pytest.mark.native_only
def test_a_module_shows_the_linker_nothing_but_its_entry_point(built):
    """An inline function that several modules share would be one symbol, and the first one loaded would serve all."""
    isa, file = built
    names = [line.split()[-1] for line in output("nm", "--dynamic", "--defined-only", file).splitlines()]
    assert names == [f"PyInit__{isa}"]


@pytest.mark.native_only
def test_a_module_has_no_instructions_of_a_better_cpu(built):
    isa, file = built
    code = output("objdump", "--disassemble", "--no-show-raw-insn", file)
    if "%eax" not in code:
        pytest.skip("not x86")
    wide = {
        "avx512": "",
        "avx2": r"%zmm\d|%k[1-7]\b|%[xy]mm(1[6-9]|2\d|3[01])\b",
        "portable": r"%[yz]mm\d|\tv[a-z0-9]+ ",
    }
    found = re.findall(wide[isa], code) if wide[isa] else []
    assert not found, f"{len(found)} places"


@pytest.mark.native_only
def test_the_modules_need_no_torch(built):
    needed = re.findall(r"NEEDED.*\[(.*)\]|NEEDED\s+(\S+)", output("objdump", "--private-headers", built[1]))
    assert needed and not any("torch" in name or "c10" in name for pair in needed for name in pair)
