"""The kernel tests on an emulated CPU without AVX512: AVX2 is chosen, nothing else is executed, results are right."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from anyrig.ops.cpu import native

pytestmark = pytest.mark.native_only
HERE = Path(__file__).parent
QEMU = "qemu-x86_64-static"


def emulated(*arguments, timeout):
    """Run this Python on an emulated Haswell (2013: AVX2 and FMA, nothing after)."""
    if platform.machine() != "x86_64":
        pytest.skip("the emulator of another x86 CPU needs an x86 Python")
    if shutil.which(QEMU) is None:
        pytest.skip(f"{QEMU} is not installed (Debian: apt-get install qemu-user-static)")
    if "avx2" not in native.built():
        pytest.skip("avx2 is not built here")
    environment = {k: v for k, v in os.environ.items() if k != native.VARIABLE} | {"OPENBLAS_NUM_THREADS": "1"}
    command = [QEMU, "-cpu", "Haswell", sys.executable, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=environment, cwd=HERE.parents[1]
    )


@pytest.fixture(scope="module")
def haswell():
    """Skips where the emulator itself is too old for AVX2."""
    program = "from anyrig.ops.cpu import native; print(*native.features()); print(native.module().isa)"
    done = emulated("-c", program, timeout=120)
    assert done.returncode == 0, done.stderr
    features, isa = done.stdout.splitlines()
    if "avx2" not in features:
        pytest.skip("this QEMU can't emulate AVX2 (7.2 and newer can)")
    return features.split(), isa


def test_a_cpu_without_avx512_gets_the_avx2_kernels(haswell):
    features, isa = haswell
    assert isa == "avx2"
    assert set(features) == {"avx2", "fma", "f16c", "bmi2"}


def test_the_kernel_tests_pass_on_it(haswell):
    options = ["-k", "avx2", "-m", "not native_only", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-rs"]
    done = emulated("-m", "pytest", str(HERE), *options, timeout=540)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout.splitlines()[-1], done.stdout[-500:]
    assert " skipped" not in done.stdout.splitlines()[-1], done.stdout[-2000:]
