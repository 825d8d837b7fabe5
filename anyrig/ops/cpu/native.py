"""Which of the built kernel modules this CPU runs. Imports no torch: `anyrig doctor` asks here too.

`pip install` compiles csrc/cpu/module.cpp once per instruction set (CMakeLists.txt), as far as the compiler can. What
the CPU has is asked of the portable module: cpuid is right in virtual machines and emulators too, where /proc/cpuinfo
shows the machine outside. A module whose instructions the CPU lacks is never imported.
"""

import importlib
import importlib.util
import os
import platform
import shutil
import sys
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Final

from anyrig.core import env
from anyrig.core.errors import UsageError

if TYPE_CHECKING:
    from anyrig.hardware.toolchain import Kernels

#: Best first, with what each needs beyond the architecture's baseline.
NEEDS: Final[dict[str, tuple[str, ...]]] = {
    "avx512": (
        *("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni", "avx512bf16"),
        *("avx2", "fma", "f16c", "bmi2"),
    ),
    "avx2": ("avx2", "fma", "f16c", "bmi2"),
    "portable": (),
}
VARIABLE: Final = "ANYRIG_CPU_ISA"
CHOICES: Final = (*NEEDS, "none")
_REBUILD: Final = (
    "Install a C++20 compiler (Debian: apt-get install g++; Fedora: dnf install gcc-c++), then run make setup or "
    "pip install again."
)


def module() -> ModuleType | None:
    """The best module that this CPU runs, or the one that `ANYRIG_CPU_ISA` names; None when there is none.

    Raises:
        UsageError: when `ANYRIG_CPU_ISA` has a value that doesn't exist, isn't built or isn't for this CPU.
    """
    return _choose(env.cpu_isa())[0]


def why_not() -> str | None:
    """The reason why `module()` is None, or None when it isn't one. Raises as `module` does."""
    return _choose(env.cpu_isa())[1]


def built() -> tuple[str, ...]:
    """Instruction sets that were compiled at install, best first. Imports nothing."""
    return tuple(isa for isa in NEEDS if importlib.util.find_spec(f"{__package__}._{isa}") is not None)


@cache
def features() -> frozenset[str]:
    """What this CPU has of `NEEDS`, by the compiler's names; empty when no module is built.

    Raises:
        ImportError: when the portable module is there but can't be imported.
    """
    if "portable" not in built():
        return frozenset()
    return frozenset(_import("portable").features())


def missing(isa: str) -> list[str]:
    """Instructions that `isa` needs and this CPU lacks."""
    return [name for name in NEEDS[isa] if name not in features()]


def report() -> "Kernels":
    """What `anyrig doctor` says about the kernels; raises nothing."""
    from anyrig.hardware.toolchain import Kernels

    wish, there = env.cpu_isa(), built()
    unset = f"Unset {VARIABLE}."
    try:
        chosen, reason = _choose(wish)
    except UsageError as error:
        return Kernels(there, None, error.message, f"{unset} It takes {', '.join(CHOICES)}.")
    if chosen is None:
        return Kernels(there, None, reason or "", unset if wish == "none" else _REBUILD)
    used = next(isa for isa in there if chosen is sys.modules.get(f"{__package__}._{isa}"))
    if wish is not None:
        return Kernels(
            there,
            used,
            f"{VARIABLE}={wish} asks for them",
            unset if any(not missing(isa) for isa in there[: there.index(used)]) else None,
        )
    better = list(NEEDS)[: list(NEEDS).index(used)]
    if not better or platform.machine() not in ("x86_64", "AMD64"):
        return Kernels(there, used, "the best there are")
    if absent := [isa for isa in better if isa not in there and not missing(isa)]:
        return Kernels(there, used, f"the compiler at install could not build {absent[0]}", _REBUILD)
    return Kernels(there, used, f"for {better[-1]} the CPU lacks {', '.join(missing(better[-1]))}")


@cache
def _choose(wish: str | None) -> tuple[ModuleType | None, str | None]:
    """The module and why there is none, for a value of `ANYRIG_CPU_ISA`."""
    if wish is not None and wish not in CHOICES:
        raise UsageError(
            f"{VARIABLE}={wish} names no build of the CPU kernels",
            f"use one of {', '.join(CHOICES)}, or leave it unset for the best",
        )
    if wish == "none":
        return None, f"switched off by {VARIABLE}=none"
    there = built()
    if not there:
        return None, _not_built()
    try:
        able = [isa for isa in there if not missing(isa)]
    except ImportError as error:
        return None, f"import failed: {error}"
    if wish is not None and wish not in able:
        why = f"this CPU lacks {', '.join(missing(wish))}" if missing(wish) else "it isn't built here"
        raise UsageError(f"{VARIABLE}={wish}: {why}", f"use one of {', '.join((*able, 'none'))}")
    try:
        return _import(wish or able[0]), None
    except ImportError as error:
        return None, f"import failed: {error}"


def _import(isa: str) -> ModuleType:
    return importlib.import_module(f"{__package__}._{isa}")


def _not_built() -> str:
    compilers = ("c++", "g++", "clang++")
    if os.environ.get("CXX") or any(shutil.which(name) for name in compilers):
        return "not built: the build failed at install, or there was no C++ compiler then"
    return "not built: no C++ compiler at install"
