"""Compilers on the path, what they made of our kernels, and installed packages, without importing any of these."""

import re
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata

COMPILERS = ("g++", "clang++", "cmake")

#: Distributions whose version a bug report needs, or whose presence changes what works.
PACKAGES = (
    *("torch", "transformers", "triton", "pytorch-triton-rocm", "ray", "vllm", "deepspeed", "flash-attn"),
    *("amdsmi", "pynvml", "nvidia-ml-py"),
)

_SECONDS = 3.0


@dataclass(frozen=True)
class Kernels:
    """The CPU kernels of this installation; filled in by `anyrig.ops.cpu.native.report`."""

    built: tuple[str, ...]
    """Instruction sets they are built for, best first."""
    used: str | None
    """The one that runs."""
    reason: str
    """Why that one, or why none: the end of a sentence."""
    remedy: str | None = None
    """What makes it better, where something does."""


def version_of(command: str) -> str | None:
    """The version that ``command --version`` prints first; ``None`` if the command is not there or does not answer."""
    path = shutil.which(command)
    if path is None:
        return None
    try:
        run = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse(run.stdout) if run.returncode == 0 else None


def parse(output: str) -> str | None:
    """The last number with a dot in the first line: distributions put their package version in brackets before it."""
    found = re.findall(r"\b\d+\.\d+(?:\.\d+)*\b", output.partition("\n")[0])
    return found[-1] if found else None


def compilers(ask: Callable[[str], str | None] = version_of) -> dict[str, str]:
    """Versions of the compilers that are there, asked at the same time (cmake takes as long as all else)."""
    with ThreadPoolExecutor(len(COMPILERS)) as pool:
        found = dict(zip(COMPILERS, pool.map(ask, COMPILERS), strict=True))
    return {name: version for name, version in found.items() if version is not None}


def packages(names: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Versions of the installed distributions among ``names``."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
