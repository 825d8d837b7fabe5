"""How many threads torch may use for a while."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Torch computes with this many threads inside; None: with as many as it does anyway.

    Next to the CPU kernels one is best: OpenMP's threads go on spinning after each piece of work, on the cores that
    the kernels' threads are about to need.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
