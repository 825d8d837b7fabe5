"""The house rules that keep parts apart: who may import whom, and what a quick command must not load."""

import ast
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import anyrig

ROOT = Path(anyrig.__file__).parent

# From top to bottom: a package imports itself and what stands below it.
LAYERS = (
    "cli",
    "agents",
    "train",
    "serve",
    "batch",
    "bench",
    "quant",
    "cluster",
    "engine",
    "sched",
    "kv",
    "models",
    "ops",
    "hardware",
    "core",
)
WITHOUT_TORCH = {"core", "sched", "kv", "hardware"}
# The one measurement against Transformers' own generate needs it, of course.
MAY_IMPORT_TRANSFORMERS = {"bench/throughput.py"}

FILES = sorted(ROOT.rglob("*.py"))


def layer(file: Path) -> str | None:
    """The package a file is in; None for the root's own files, which stand above all."""
    parts = file.relative_to(ROOT).parts
    return parts[0] if len(parts) > 1 else None


def imported(file: Path) -> set[str]:
    """Every module that the file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = file.relative_to(ROOT.parent).parts[: -node.level] if node.level else ()
            module = ".".join([*package, *([node.module] if node.module else [])])
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names if module == "anyrig"}
    return names


def layers_of(names: set[str]) -> set[str]:
    return {name.split(".")[1] for name in names if name.startswith("anyrig.")} & set(LAYERS)


def test_every_package_has_its_place_in_the_order() -> None:
    packages = {layer(file) for file in FILES} - {None}
    assert packages <= set(LAYERS), f"unknown packages: {packages - set(LAYERS)}"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_imports_point_downward(file: Path) -> None:
    here = layer(file)
    if here is None:
        return
    for there in layers_of(imported(file)):
        assert LAYERS.index(there) >= LAYERS.index(here), f"{here} imports {there}, which stands above it"
        assert there != "bench" or here in ("bench", "cli"), f"{here} imports bench"


@pytest.mark.parametrize("package", sorted(WITHOUT_TORCH))
def test_pure_packages_do_without_torch(package: str) -> None:
    for file in FILES:
        if layer(file) == package:
            roots = {name.split(".")[0] for name in imported(file)}
            assert not roots & {"torch", "transformers"}, f"{file} imports {roots & {'torch', 'transformers'}}"


def test_only_models_imports_transformers() -> None:
    guilty = {
        str(file.relative_to(ROOT))
        for file in FILES
        if layer(file) != "models" and any(name.split(".")[0] == "transformers" for name in imported(file))
    }
    assert guilty <= MAY_IMPORT_TRANSFORMERS


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["generate", "--help"], 0),
        (["chat", "--help"], 0),
        (["batch", "--help"], 0),
        (["doctor"], None),
        (["models"], 0),
        (["generate", "smollm2-135m", "x", "--temprature", "1"], 2),
        (["generate", "smollm2-135m", "x", "--temperature", "hot"], 2),
        (["generte"], 2),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_a_quick_command_loads_no_heavy_library(line: list[str], code: int | None) -> None:
    program = (
        "import sys; from anyrig.cli.main import run; code = run(sys.argv[1:]);"
        "print('LOADED', *sorted({'torch', 'transformers', 'ray'} & sys.modules.keys()));"
        "sys.exit(code)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", program, *line], capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stdout.splitlines()[-1] == "LOADED", done.stderr
    assert code is None or done.returncode == code, done.stderr
    # Processor time: the wall clock of a busy machine says nothing.
    assert after.ru_utime - before.ru_utime < 1.0
