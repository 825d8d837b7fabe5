"""NVML, the library that comes with NVIDIA's driver, called through ctypes.

API: https://docs.nvidia.com/deploy/nvml-api/ (nvmlMemory_t is three unsigned 64-bit numbers: total, free, used).
"""

import ctypes
import threading
from dataclasses import dataclass

_LIBRARY = "libnvidia-ml.so.1"
_NAME_BYTES = 96
_BUS_BYTES = 32


@dataclass(frozen=True)
class Answer:
    """What the driver says about one GPU; memory in bytes."""

    name: str
    memory: int | None
    capability: str | None


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Pci(ctypes.Structure):
    # nvmlPciInfo_t: a legacy 16-byte address, five numbers, then the address as domain:bus:device.function.
    _fields_ = (
        ("legacy", ctypes.c_char * 16),
        ("numbers", ctypes.c_uint * 5),
        ("bus", ctypes.c_char * _BUS_BYTES),
    )


def read(wait: float = 0.5) -> dict[str, Answer]:
    """Devices by PCI address (``0000:62:00.0``); empty where there is no library or it does not answer.

    Args:
        wait: seconds to wait at most. Without the persistence daemon the driver wakes every GPU first, which can take
            longer than a person wants to wait for a list; the memory is then simply not known.
    """
    answers: dict[str, Answer] = {}
    worker = threading.Thread(target=_ask, args=(answers,), daemon=True)
    worker.start()
    worker.join(wait)
    return {} if worker.is_alive() else answers


def _ask(answers: dict[str, Answer]) -> None:
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return
    if library.nvmlInit_v2() != 0:
        return
    try:
        count = ctypes.c_uint()
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for index in range(count.value):
            device = ctypes.c_void_p()
            if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0:
                bus, answer = _device(library, device)
                answers[bus] = answer
    finally:
        library.nvmlShutdown()


def _device(library: ctypes.CDLL, device: ctypes.c_void_p) -> tuple[str, Answer]:
    name = ctypes.create_string_buffer(_NAME_BYTES)
    library.nvmlDeviceGetName(device, name, _NAME_BYTES)
    address, room = _Pci(), _Memory()
    library.nvmlDeviceGetPciInfo_v3(device, ctypes.byref(address))
    has_memory = library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(room)) == 0
    major, minor = ctypes.c_int(), ctypes.c_int()
    has_capability = library.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)) == 0
    # NVML writes the domain with eight digits, the kernel with four.
    domain, _, rest = address.bus.decode().lower().partition(":")
    return f"{domain[-4:]}:{rest}", Answer(
        name=name.value.decode(errors="replace"),
        memory=room.total if has_memory else None,
        capability=f"{major.value}.{minor.value}" if has_capability else None,
    )
