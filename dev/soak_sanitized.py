"""The soak on kernels that are compiled with sanitizers, in a folder of their own."""

import argparse
import importlib.abc
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from soak_round import KINDS, bytes_per_token

ROOT = Path(__file__).parent.parent


class KernelsFrom(importlib.abc.MetaPathFinder):
    """Finds the kernel modules that are in `folder` there rather than where they are installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        file = self.folder / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
        if package != "anyrig.ops.cpu" or not file.exists():
            return None
        return importlib.util.spec_from_file_location(fullname, file)


def sanitized(args: argparse.Namespace) -> int:
    """Compile this CPU's best module with sanitizers, in a folder of its own, and soak that one."""
    from anyrig.ops.cpu import native

    module = native.module()
    if module is None:
        print(f"soak: no CPU kernels ({native.why_not()})")
        return 1
    folder = ROOT / "build" / f"soak-{args.sanitize.replace(',', '-')}"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    nanobind = subprocess.run(
        [sys.executable, "-m", "nanobind", "--cmake_dir"], capture_output=True, text=True, check=True
    ).stdout.strip()
    configure = ["cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(folder), f"-DANYRIG_SANITIZE={args.sanitize}"]
    configure += ["-DCMAKE_BUILD_TYPE=Release", f"-DPython_EXECUTABLE={sys.executable}", f"-Dnanobind_DIR={nanobind}"]
    print(
        f"soak: compiling _{module.isa} with -fsanitize={args.sanitize} (a minute or two when it changed)", flush=True
    )
    for command in (configure, ["cmake", "--build", str(folder), "--target", f"_{module.isa}"]):
        done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True)
        if done.returncode:
            print(done.stdout + done.stderr)
            return 1
    for kind in KINDS:
        bytes_per_token(args.model, kind)  # prepared here: packing needs torch, and is slow under sanitizers
    compiler = os.environ.get("CXX", "g++")
    runtime = "tsan" if "thread" in args.sanitize else "asan"
    preload = [
        subprocess.run([compiler, f"-print-file-name=lib{name}.so"], capture_output=True, text=True).stdout.strip()
        for name in (runtime, "stdc++")  # the sanitizer looks for the C++ library's exceptions when it starts
    ]
    environment = {
        **os.environ,
        "LD_PRELOAD": ":".join(preload),
        "ASAN_OPTIONS": "detect_leaks=0:quarantine_size_mb=16:malloc_context_size=8:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1:ignore_noninstrumented_modules=1",
    }
    command = [sys.executable, *sys.argv, "--kernels", str(folder), "--scale", str(args.scale / 4)]
    if "thread" in args.sanitize:
        command += ["--plain"]  # torch's own threads are not instrumented
        if setarch := shutil.which("setarch"):
            command = [setarch, "-R", *command]  # ThreadSanitizer wants its addresses
    i = command.index(next(c for c in command if c.startswith("--sanitize")))
    del command[i : i + (1 if "=" in command[i] else 2)]
    return subprocess.run(command, env=environment).returncode
