"""Installing without a C++ compiler, or with one that doesn't work: pure Python, everything there, and it says so."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = pytest.mark.native_only
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """What git would have here, without what was built."""
    if not (ROOT / "CMakeLists.txt").exists():
        pytest.skip("not a source tree")
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("anyrig", "csrc"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return copy


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An environment of its own that borrows our packages and build tools: nothing is downloaded."""
    place = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    own = next(place.glob("lib/python*/site-packages"))
    (own / "borrowed.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return str(place / "bin" / "python")


@pytest.mark.parametrize("compiler", ["/nowhere/c++", shutil.which("false")], ids=["missing", "broken"])
def test_without_a_working_compiler_the_installation_is_pure_python_and_whole(source, python, compiler, tmp_path):
    pytest.importorskip("scikit_build_core", reason="the build tools of the dev extra")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-build-isolation", "--no-deps"]
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(tmp_path), "CXX": compiler}
    done = subprocess.run(
        [*pip, "-w", str(tmp_path), str(source)], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    wheel = next(tmp_path.glob("*.whl"))
    assert wheel.name.endswith("-py3-none-any.whl")
    target = tmp_path / "installed"
    shutil.unpack_archive(wheel, target, "zip")
    files = {str(file.relative_to(target)) for file in target.rglob("*") if file.is_file()}
    package = {
        str(file.relative_to(source))
        for file in source.glob("anyrig/**/*")
        if file.suffix in (".py", ".toml", ".typed")
    }
    assert package <= files, package - files

    program = (
        "import anyrig; from anyrig.ops.cpu import native; print(anyrig.__file__, native.module(), native.why_not())"
    )
    environment = {"PYTHONPATH": str(target), "PATH": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(
        [python, "-c", program], capture_output=True, text=True, env=environment, cwd=tmp_path, check=True
    )
    assert done.stdout == f"{target}/anyrig/__init__.py None not built: no C++ compiler at install\n"
