"""Small files that the kernel writes (procfs, sysfs, cgroupfs), read below a root: tests bring their own tree."""

from pathlib import Path


def below(root: Path, path: str) -> Path:
    """The absolute path ``path`` of a machine whose file system begins at ``root``."""
    return root / path.lstrip("/")


def text(path: Path) -> str | None:
    """The file's content without surrounding space, or ``None`` if it is absent or may not be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def integer(path: Path) -> int | None:
    """The file's content as a number (decimal, or hexadecimal with ``0x``), or ``None``."""
    return number(text(path))


def number(value: str | None) -> int | None:
    """``"0x1002"`` and ``"4098"`` as an integer; anything else, ``max`` for example, is ``None``."""
    try:
        return int(value or "", 0)
    except ValueError:
        return None


def table(path: Path, separator: str | None = None) -> dict[str, str]:
    """A file of ``name value`` lines (kfd, ``memory.stat``) or, with ``separator``, ``name: value`` lines."""
    rows: dict[str, str] = {}
    for line in (text(path) or "").splitlines():
        name, *rest = line.split(separator, 1)
        if rest:
            rows.setdefault(name.strip(), rest[0].strip())
    return rows


def numbers(path: Path) -> dict[str, int]:
    """A file of ``name number`` lines; lines of another shape are left out."""
    parsed = {name: number(value) for name, value in table(path).items()}
    return {name: value for name, value in parsed.items() if value is not None}


def entries(folder: Path) -> list[Path]:
    """What lies in the folder, numbers in their own order (``nodes/2`` before ``nodes/10``); empty if there is none."""
    try:
        found = list(folder.iterdir())
    except OSError:
        return []
    return sorted(found, key=lambda path: (0, int(path.name), "") if path.name.isdigit() else (1, 0, path.name))


def id_list(value: str | None) -> list[int]:
    """The kernel's list format: ``"0-3,8"`` is 0, 1, 2, 3, 8."""
    ids: list[int] = []
    for part in (value or "").split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit():
            ids.extend(range(int(first), int(last if last.isdigit() else first) + 1))
    return ids
