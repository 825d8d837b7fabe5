"""Which torch is installed, read from its files: importing it costs seconds, and fails where the set-up is broken.

`deep` does import it, in a process of its own, to see what torch really finds.
"""

import ast
import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Kind = Literal["cpu", "cuda", "rocm", "xpu"]


@dataclass(frozen=True)
class TorchBuild:
    """What ``torch/version.py`` and the libraries beside it say."""

    version: str
    kind: Kind
    toolkit: str | None
    """Version of CUDA or ROCm/HIP that it was built with."""
    path: Path
    """The package's folder."""
    targets: tuple[str, ...]
    """AMD targets that the bundled rocBLAS has kernels for; empty if none is bundled, which proves nothing."""

    @property
    def release(self) -> tuple[int, int]:
        """Major and minor version of torch."""
        return _release(self.version)

    @property
    def toolkit_release(self) -> tuple[int, int] | None:
        """Major and minor version of the toolkit."""
        return _release(self.toolkit) if self.toolkit else None

    @property
    def label(self) -> str:
        """``2.13.0+cpu (CPU)``, ``2.9.0 (ROCm 7.0)``, ..."""
        if self.kind == "cpu":
            return f"{self.version} (CPU)"
        name = {"cuda": "CUDA", "rocm": "ROCm", "xpu": "XPU"}[self.kind]
        return f"{self.version} ({name} {_short(self.toolkit)})"


def _release(version: str) -> tuple[int, int]:
    numbers = re.findall(r"\d+", version)[:2]
    return (int(numbers[0]), int(numbers[1])) if len(numbers) == 2 else (0, 0)


def _short(version: str | None) -> str:
    # HIP's patch number ("7.0.51831-7c9236b16") says nothing to a reader.
    return ".".join((version or "?").split(".")[:2])


def find() -> Path | None:
    """The folder of the torch that ``import torch`` would take, found without importing it."""
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent if spec and spec.origin else None


def read(folder: Path | None = None) -> TorchBuild | None:
    """The installed build, or ``None`` if there is no torch (or one without a readable version file)."""
    folder = folder or find()
    if folder is None:
        return None
    try:
        facts = _literals((folder / "version.py").read_text())
    except (OSError, SyntaxError):
        return None
    version = facts.get("__version__")
    if not isinstance(version, str):
        return None
    kind: Kind = "rocm" if facts.get("hip") else "cuda" if facts.get("cuda") else "xpu" if facts.get("xpu") else "cpu"
    toolkit = {"rocm": facts.get("rocm") or facts.get("hip"), "cuda": facts.get("cuda"), "xpu": facts.get("xpu")}
    return TorchBuild(version, kind, toolkit.get(kind), folder, _targets(folder))


def _literals(source: str) -> dict[str, Any]:
    """Names that a module assigns constants to, plain or annotated; nothing is executed."""
    names: dict[str, Any] = {}
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign):
            places = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            places = [statement.target]
        else:
            continue
        if isinstance(statement.value, ast.Constant):
            names.update({place.id: statement.value.value for place in places if isinstance(place, ast.Name)})
    return names


def _targets(folder: Path) -> tuple[str, ...]:
    """Targets named in the files of the bundled rocBLAS (``TensileLibrary_lazy_gfx942.dat``)."""
    found = set()
    for file in (folder / "lib" / "rocblas" / "library").glob("*gfx*"):
        found.update(re.findall(r"gfx[0-9a-f]{3,4}(?![0-9a-f])", file.name))
    return tuple(sorted(found))


@dataclass(frozen=True)
class DeepDevice:
    """One device as torch sees it, and whether a small matrix product on it came out right."""

    name: str
    arch: str
    memory: int
    error: str | None


@dataclass(frozen=True)
class Deep:
    """What a child process saw after ``import torch``; ``error`` when it did not get that far."""

    error: str | None
    seconds: float = 0.0
    version: str = ""
    threads: int = 0
    cpu_capability: str = ""
    arch_list: tuple[str, ...] = ()
    devices: tuple[DeepDevice, ...] = ()


_CHILD = """
import json, sys, time
start = time.monotonic()
import torch
seen = {"seconds": time.monotonic() - start, "version": torch.__version__, "threads": torch.get_num_threads()}
seen["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
seen["arch_list"] = list(torch.cuda.get_arch_list()) if torch.cuda.is_available() else []
seen["devices"] = []
for index in range(torch.cuda.device_count()):
    device = {"name": "", "arch": "", "memory": 0, "error": None}
    try:
        facts = torch.cuda.get_device_properties(index)
        device["name"], device["memory"] = facts.name, facts.total_memory
        device["arch"] = getattr(facts, "gcnArchName", f"sm_{facts.major}{facts.minor}").split(":")[0]
        ones = torch.ones(64, 64, device=f"cuda:{index}", dtype=torch.bfloat16)
        if not torch.equal((ones @ ones).cpu(), torch.full((64, 64), 64.0, dtype=torch.bfloat16)):
            device["error"] = "a bf16 matrix product of ones came out wrong"
    except Exception as error:
        device["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
    seen["devices"].append(device)
sys.stdout.write("\\nANYRIG " + json.dumps(seen) + "\\n")
"""


def deep(timeout: float = 120.0, python: str = sys.executable) -> Deep:
    """Import torch in a child process and try every device with a small matrix product.

    Args:
        timeout: seconds after which the child is killed; a broken GPU driver can hang for ever.
    """
    try:
        child = subprocess.run([python, "-c", _CHILD], capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return Deep(error=f"importing torch and trying its devices did not finish in {timeout:.0f} s")
    report = [line for line in child.stdout.splitlines() if line.startswith("ANYRIG ")]
    if not report:
        last = (child.stderr.strip().splitlines() or ["no message"])[-1]
        how = f"was killed by signal {-child.returncode}" if child.returncode < 0 else "failed"
        return Deep(error=f"importing torch {how}: {last}")
    seen = json.loads(report[-1].removeprefix("ANYRIG "))
    devices = tuple(DeepDevice(**device) for device in seen.pop("devices"))
    return Deep(error=None, devices=devices, arch_list=tuple(seen.pop("arch_list")), **seen)
