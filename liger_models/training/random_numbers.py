"""Random numbers of a run: fresh weights and dropout draw from torch's default generators."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the default generators of the CPU and of `device`, and none of another GPU."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def random_states(device: torch.device) -> Callable[[], None]:
    """Note the states of the default generators now; calling the result restores them."""
    on_host = torch.get_rng_state()
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def put_back() -> None:
        torch.set_rng_state(on_host)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)

    return put_back


@contextmanager
def restored_random_states(device: torch.device) -> Iterator[None]:
    """At the end the default generators, and Python's, continue as if the block had not run."""
    put_back, python = random_states(device), random.getstate()
    try:
        yield
    finally:
        put_back()
        random.setstate(python)
