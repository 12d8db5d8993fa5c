"""Random state of a run: initialisation and dropout use torch's default generators."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the default generators of the CPU and of `device`, but not of other GPUs."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)


def random_states(device: torch.device) -> Callable[[], None]:
    """Record the states of the default generators; call the result to restore them."""
    on_host = torch.get_rng_state()
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    on_mps = torch.mps.get_rng_state() if device.type == "mps" else None

    def put_back() -> None:
        torch.set_rng_state(on_host)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)
        if on_mps is not None:
            torch.mps.set_rng_state(on_mps)

    return put_back


@contextmanager
def restored_random_states(device: torch.device) -> Iterator[None]:
    """Restore the default generators, and Python's, when the block ends."""
    put_back, python = random_states(device), random.getstate()
    try:
        yield
    finally:
        put_back()
        random.setstate(python)
