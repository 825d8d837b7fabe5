"""Torch's build from its files, and what a child process sees of it."""

import subprocess
import sys
from pathlib import Path

import pytest

from anyrig.hardware import torch_build

VERSION = """from typing import Optional
__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip']
__version__ = {version!r}
debug = False
cuda: Optional[str] = {cuda!r}
git_version = 'cf30153c4c131c8164ee7798e5022d810682e2cb'
hip: Optional[str] = {hip!r}
"""


def package(folder: Path, version: str = "2.9.0", cuda: str | None = None, hip: str | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "version.py").write_text(VERSION.format(version=version, cuda=cuda, hip=hip))
    return folder


@pytest.mark.parametrize(
    ("cuda", "hip", "kind", "label"),
    [
        (None, None, "cpu", "2.9.0 (CPU)"),
        ("12.8", None, "cuda", "2.9.0 (CUDA 12.8)"),
        (None, "7.0.51831-7c9236b16", "rocm", "2.9.0 (ROCm 7.0)"),
    ],
)
def test_the_version_file_tells_the_kind_of_build(tmp_path, cuda, hip, kind, label):
    build = torch_build.read(package(tmp_path, cuda=cuda, hip=hip))
    assert build is not None
    assert (build.kind, build.label) == (kind, label)
    assert build.release == (2, 9)


def test_nothing_in_the_version_file_is_executed(tmp_path):
    package(tmp_path)
    with (tmp_path / "version.py").open("a") as file:
        file.write("raise SystemExit('executed')\n")
    assert torch_build.read(tmp_path) is not None


@pytest.mark.parametrize("content", ["", "__version__ = compute()", "this is no python ("])
def test_a_version_file_that_tells_nothing_is_no_build(tmp_path, content):
    (tmp_path / "version.py").write_text(content)
    assert torch_build.read(tmp_path) is None


def test_the_bundled_rocblas_tells_the_targets(tmp_path):
    library = package(tmp_path, hip="6.4.1") / "lib/rocblas/library"
    library.mkdir(parents=True)
    for name in ("TensileLibrary_lazy_gfx90a.dat", "TensileLibrary_lazy_gfx1100.dat", "Kernels.so-000-gfx942.hsaco"):
        (library / name).touch()
    build = torch_build.read(tmp_path)
    assert build is not None and build.targets == ("gfx1100", "gfx90a", "gfx942")


def test_the_installed_torch_is_found_without_importing_it():
    code = (
        "import sys; from anyrig.hardware import torch_build; build = torch_build.read(); "
        "assert build is not None; assert not [name for name in sys.modules if name.split('.')[0] == 'torch']; "
        "print(build.version)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    from importlib.metadata import version

    assert printed.partition("+")[0] == version("torch").partition("+")[0]


def fake_python(folder: Path, script: str) -> str:
    program = folder / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return str(program)


def test_a_child_that_hangs_is_stopped_and_said_so(tmp_path):
    deep = torch_build.deep(timeout=0.3, python=fake_python(tmp_path, "exec sleep 60"))
    assert deep.error is not None and "did not finish" in deep.error


def test_a_child_that_is_killed_names_the_signal(tmp_path):
    deep = torch_build.deep(python=fake_python(tmp_path, "kill -11 $$"))
    assert deep.error is not None and "signal 11" in deep.error


def test_a_child_that_fails_passes_on_its_last_words(tmp_path):
    script = "echo Traceback >&2; echo 'ImportError: libamdhip64.so.7: cannot open shared object file' >&2; exit 1"
    deep = torch_build.deep(python=fake_python(tmp_path, script))
    assert deep.error is not None and deep.error.endswith("libamdhip64.so.7: cannot open shared object file")


def test_chatter_on_the_childs_output_does_not_hide_its_report(tmp_path):
    report = (
        '{"seconds": 1.5, "version": "2.9.0+rocm7.0", "threads": 4, "cpu_capability": "AVX2", "arch_list": ["gfx942"], '
        '"devices": [{"name": "AMD Instinct MI300X", "arch": "gfx942", "memory": 1, "error": null}]}'
    )
    script = f"echo some library says hello\necho 'ANYRIG {report}'\necho bye"
    deep = torch_build.deep(python=fake_python(tmp_path, script))
    assert deep.error is None and deep.devices[0].arch == "gfx942" and deep.arch_list == ("gfx942",)


def test_the_real_child_reports_the_installed_torch():
    deep, build = torch_build.deep(), torch_build.read()
    assert build is not None
    assert deep.error is None
    assert deep.version == build.version
    assert deep.threads >= 1
