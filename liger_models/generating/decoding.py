"""Decoding: one token per sequence and step, with a key/value cache.

On a GPU, steps are captured and replayed as CUDA graphs, since launching the kernels of a small batch takes
the host several times as long as the device needs to run them. A captured step reads ids and positions from
fixed memory and attends to a fixed number of cache slots, its extent, masking the empty ones. When sequences
outgrow it, a step with twice the extent is captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from liger_models.layers.model.causal_lm import CausalLM
from liger_models.layers.projections.linear import has_hooks
from liger_models.layers.sequences.cache import KVCache
from liger_models.layers.sequences.documents import Documents
from liger_models.layers.sequences.positions import Positions
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.sequences.visibility import Visibility

LEAST_EXTENT = 256


class Decoding:
    """Decoding steps after the prompts.

    Args:
        model: in evaluation mode.
        cache: holds the prompts.
        room: capacity of the cache in tokens per sequence.
        fixed: capture steps on a GPU; otherwise they run eagerly.
    """

    def __init__(self, model: CausalLM, cache: KVCache, room: int, fixed: bool) -> None:
        self.model, self.cache, self.room, self.fixed = model, cache, room, fixed
        self.extent = 0
        self.slots = torch.zeros_like(cache.lengths)
        self.ids = torch.zeros_like(cache.lengths)
        self._play: Callable[[], None]
        self._logits: Tensor

    def __call__(self, ids: Tensor) -> Tensor:
        """Logits [batch, V] after each sequence's next token, ids [batch]. The next call may overwrite them.

        Raises:
            DataError: a position beyond the model's rotary tables.
        """
        cache, limit = self.cache, self.model.spec.position_limit
        cache.longest += 1
        if not self.fixed or (limit is not None and cache.longest + cache.ahead > limit):
            logits = self._step(ids, cache.lengths, cache.longest)
        else:
            self.ids.copy_(ids)
            self.slots.copy_(cache.lengths)
            if self.extent < cache.longest:
                self._record()
            self._play()
            logits = self._logits
        cache.lengths = cache.lengths + 1
        return logits

    def _step(self, ids: Tensor, slots: Tensor, extent: int) -> Tensor:
        cache = self.cache
        cache.reserve_next(slots, extent)
        positions = slots if cache.shift is None else slots + cache.shift
        documents = Documents.of_rows((len(ids), 1), positions.device)
        end = cache.longest + cache.ahead
        sequences = Sequences(Visibility(documents), Positions(positions, end), cache)
        return self.model.logits(self.model.hidden_states(sequences, ids[:, None]))

    def _record(self) -> None:
        self.extent = max(LEAST_EXTENT, self.extent)
        while self.extent < self.cache.longest:
            self.extent *= 2
        self.extent = min(self.extent, self.room)

        def step() -> None:
            self._logits = self._step(self.ids, self.slots, self.extent)

        with self._states_kept():
            self._play = record(step) if self.ids.is_cuda else step

    @contextmanager
    def _states_kept(self) -> Iterator[None]:
        """Restore the states of recurrent layers at the end, since running a step advances them."""
        rooms = [state for states in self.cache.recurrent for state in states]
        before = [state.clone() for state in rooms]
        yield
        for state, kept in zip(rooms, before, strict=True):
            state.copy_(kept)


def record(step: Callable[[], None]) -> Callable[[], None]:
    """Capture `step` as a CUDA graph. It runs once before, to compile kernels and reserve memory."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def can_be_recorded(model: CausalLM) -> bool:
    """Whether a step only launches kernels on one GPU: no foreign hooks, which may move weights or
    synchronise, no weight subclasses other than torch's own, and no casts cached by autocast.
    """
    devices = {p.device for p in model.parameters()}
    if len(devices) > 1 or devices.pop().type != "cuda" or torch.is_autocast_enabled("cuda"):
        return False
    own = all(p.is_floating_point() and type(p.data) is Tensor for p in model.parameters())
    return own and not any(has_hooks(module) for module in model.modules())
