"""Compilers on the path, and installed packages that matter, without importing any of them."""

import re
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata

COMPILERS = ("g++", "clang++", "cmake")

#: Distributions whose version a bug report needs, or whose presence changes what works.
PACKAGES = (
    *("torch", "transformers", "triton", "pytorch-triton-rocm", "ray", "vllm", "deepspeed", "flash-attn"),
    *("amdsmi", "pynvml", "nvidia-ml-py"),
)

_SECONDS = 3.0


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
