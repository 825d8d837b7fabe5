"""The table of AMD targets (``amd_targets.toml``): which products they are, and what runs on them."""

import sys
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Product:
    """A card or chip as sold."""

    name: str
    memory_gb: int
    """GB per ROCm device, 0 where it shares the system's memory."""
    units: int
    """Compute units of the whole card."""
    device_ids: tuple[int, ...]
    devices: int = 1
    """ROCm devices that one card makes."""
    apu: bool = False


@dataclass(frozen=True)
class Target:
    """One compiler target and what the software of the field does on it; the fields are described in the TOML file."""

    gfx: str
    architecture: str
    wave: int
    fp8: str
    bf16: str
    sdpa: str
    flash_ck: bool
    flash_triton: bool
    paged_attention: str
    gptq: bool
    products: tuple[Product, ...]
    mxfp: bool = False
    sdpa_experimental_through: str | None = None
    min_rocm: str | None = None
    note: str | None = None


@cache
def _document() -> dict[str, Any]:
    return tomllib.loads(resources.files("anyrig.hardware").joinpath("amd_targets.toml").read_text())


@cache
def targets() -> dict[str, Target]:
    """All rows by target name, in the file's order."""
    rows = {}
    for row in _document()["target"]:
        products = tuple(Product(**{**item, "device_ids": tuple(item["device_ids"])}) for item in row["products"])
        rows[row["gfx"]] = Target(**{**row, "products": products})
    return rows


def sources() -> dict[str, str]:
    """Where each group of columns was read."""
    return dict(_document()["sources"])


def gfx_name(version: int) -> str | None:
    """The target's name for kfd's ``gfx_target_version``: 90010 is ``gfx90a``; ``None`` for 0, a CPU.

    Decimal ``major * 10000 + minor * 100 + stepping``; the name writes minor and stepping as hexadecimal digits.
    """
    if version <= 0:
        return None
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def by_device_id(device_id: int) -> Target | None:
    """The target of a PCI device id, for kernels too old to name it."""
    for target in targets().values():
        if any(device_id in product.device_ids for product in target.products):
            return target
    return None


def product(gfx: str | None, device_id: int, units: int, memory: int = 0) -> Product | None:
    """The product with this device id; among boards of one id (or an id not in the table), the one that fits best.

    Args:
        units: compute units of the whole card (of one device where a card makes several).
        memory: bytes of that device, to tell boards with equally many units apart; 0 if not known.
    """
    target = targets().get(gfx or "") or by_device_id(device_id)
    if target is None:
        return None
    fitting = [item for item in target.products if item.units == units * item.devices]
    same_id = [item for item in target.products if device_id in item.device_ids]
    both = [item for item in same_id if item in fitting]
    by_memory = [item for item in fitting if item.memory_gb == round(memory / 2**30)]
    for candidates in (both, same_id, fitting, by_memory):
        if len(candidates) == 1:
            return candidates[0]
    several = both or same_id
    return several[0] if several else None


def markdown() -> str:
    """The table as Markdown, for docs/doctor.md."""
    heads = (
        "target | products | memory (GB) | wave | fp8 | bf16 | torch SDPA | flash-attn | vLLM paged attention | GPTQ"
    )
    lines = [f"| {heads} | ROCm from |", "|" + "---|" * (heads.count("|") + 2)]
    for target in targets().values():
        memory = [
            "shared"
            if not item.memory_gb
            else f"{item.devices}×{item.memory_gb}"
            if item.devices > 1
            else str(item.memory_gb)
            for item in target.products
        ]
        fp8 = {"fnuz": "FNUZ", "ocp": "OCP", "none": "no"}[target.fp8] + (", MXFP8/6/4" if target.mxfp else "")
        sdpa = target.sdpa
        if target.sdpa_experimental_through:
            sdpa += f" (experimental up to torch {target.sdpa_experimental_through})"
        flash = " + ".join(name for name, there in (("CK", target.flash_ck), ("Triton", target.flash_triton)) if there)
        cells = (
            f"{target.gfx} ({target.architecture})",
            ", ".join(item.name for item in target.products),
            " / ".join(dict.fromkeys(memory)),
            str(target.wave),
            fp8,
            target.bf16,
            sdpa,
            flash or "no",
            target.paged_attention,
            "yes" if target.gptq else "no",
            target.min_rocm or "",
        )
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", *(f"- {target.gfx}: {target.note}." for target in targets().values() if target.note)]
    return "\n".join(lines) + "\n"


def update(document: Path) -> None:
    """Write the table between the document's two ``<!-- targets: ... -->`` marks."""
    before, begin, rest = document.read_text().partition("<!-- targets: begin -->\n")
    _, end, after = rest.partition("<!-- targets: end -->")
    if not begin or not end:
        raise ValueError(f"{document} has no <!-- targets: begin --> and <!-- targets: end --> lines")
    document.write_text(before + begin + markdown() + end + after)


if __name__ == "__main__":
    update(Path(sys.argv[1]))
