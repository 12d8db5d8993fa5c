"""Base class of recurrent mixers: a short convolution, mostly followed by a scan with a state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.kernels import document_bounds
from liger_models.kernels._split_columns import split_columns
from liger_models.kernels.recurrent._chunk_table import SEGMENT, ChunkTables, most_segments, tokens_of_segment
from liger_models.layers.recompute.activation_memory import RERUN, ActivationMemory
from liger_models.layers.recurrent.branches import States, over_branches
from liger_models.layers.recurrent.passed import over_ranks
from liger_models.layers.recurrent.short_conv import WHOLE, Share
from liger_models.layers.sequences.cache import KVCache
from liger_models.layers.sequences.documents import Documents
from liger_models.layers.sequences.sequence_parallel import Slice
from liger_models.layers.sequences.sequences import Sequences


class RecurrentMixer(nn.Module):
    """Convolution and scan over packed documents, trees of documents, the rows of a cache, or a slice of the
    sequence per rank. State and convolution restart at every document.

    A subclass defines `conv1d`, and for a scan `scan`, `step` and `state_shape`. It calls `mix` between its
    projections. Without a scan, the convolution's last inputs are the only state.

    Args:
        layer: index of this layer in the model, and in a cache.
    """

    conv1d: Any  # a ShortConvolution, or a module with its interface
    transfers: str | None = None  # how a segment changes a state: by "factors" or "matrices"
    pass_states = False  # from rank to rank, instead of exchanging heads, where sequences are divided
    activation_memory: ActivationMemory = "lean"

    def __init__(self, layer: int):
        super().__init__()
        self.layer = layer

    def split(self, projected: Tensor, widths: Sequence[int], sequences: Sequences) -> tuple[Tensor, ...]:
        """Parts [T, width] of a projection, whose gradients are written next to each other (`split_columns`).

        This saves a copy, but the scan's backward pass then holds memory for all of these gradients. Layers
        that run again and ranks that divide a sequence need that memory, so they split as `torch.split` does.
        """
        if self.activation_memory in RERUN or sequences.slice is not None:
            return projected.split(list(widths), dim=1)
        return split_columns(projected, widths)

    @property
    def early_width(self) -> int:
        """Columns of the projection's gradient that `split` allocates early, before the scan's backward pass:
        those of the convolution's inputs, if the norm's gradient comes first.
        """
        return 0

    def scan(
        self,
        parts: tuple[Tensor, ...],
        gates: Sequence[Tensor],
        documents: Tensor | None,
        state: Tensor | None,
        share: Share = WHOLE,
        tables: ChunkTables | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [T, heads, head_dim], and the state after each document.

        Args:
            parts: of the convolution's output, [T, heads, width] each.
            gates: [T, heads] or [T, heads, width] each, as given to `mix`.
            documents: [n + 1], boundaries of the documents; None for one.
            state: [n, *state_shape], initial states; None for zeros.
            share: (index, count): parts and gates hold this share of the heads.
            tables: of chunks of the same documents.
        """
        return parts[0], None

    def step(
        self, parts: tuple[Tensor, ...], gates: Sequence[Tensor], state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`scan` of one further token per sequence."""
        raise NotImplementedError

    @property
    def state_shape(self) -> tuple[int, ...] | None:
        """Shape of the state of one sequence; None if there is no scan."""
        return None

    def backward_bytes(self, itemsize: int) -> int:
        """Peak bytes per token during the backward pass of the scan on a GPU, in addition to what `lean`
        keeps.
        """
        raise NotImplementedError

    def divided_backward_bytes(self, itemsize: int, ranks: int) -> int:
        """The same for a sequence that is divided over ranks."""
        return self.backward_bytes(itemsize)

    def saved_by_segments(self, longest: int) -> tuple[int, int]:
        """Bytes per token, kept and in the backward pass, that documents of `longest` tokens save by segments
        longer than `SEGMENT`, or as they have one segment each.
        """
        if self.state_shape is None or self.transfers is None:
            return 0, 0
        heads, rows, columns = self.state_shape
        share = 1 - (longest > SEGMENT) * SEGMENT / tokens_of_segment(longest, most_segments(heads))
        numbers, matrices = heads * rows * columns, self.transfers == "matrices"
        kept, needed = numbers + matrices * heads * rows * rows, numbers * (1 if matrices else 2)
        return int(4 * kept * share / SEGMENT), int(4 * needed * share / SEGMENT)

    def mix(self, channels: Tensor, gates: Sequence[Tensor], sequences: Sequences) -> Tensor:
        """Return the scan's output [T, heads, head_dim].

        Args:
            channels: [T, C], the convolution's input.
            gates: inputs of the scan that are not convolved, [T, heads] or [T, heads, width] each.
        """
        sequences = sequences.on(channels.device)
        documents, cache = sequences.documents, sequences.cache
        if cache is not None:
            return self._continue(channels, gates, documents, cache)
        if documents.tree is not None:
            return over_branches(documents.tree, [channels, *gates], self._branches)
        if sequences.slice is not None and self.pass_states:
            return over_ranks(self, channels, gates, sequences.slice, documents)
        if sequences.slice is not None:
            return self._exchange(channels, gates, sequences.slice, documents)
        parts = self.conv1d(channels, documents.boundaries(), documents.bounds())
        return self.scan(parts, gates, documents.boundaries(), None, tables=documents.chunk_tables())[0]

    def own_share(self, share: Share, *by_head: Tensor) -> tuple[Tensor, ...]:
        """This share of parameters with one row per head."""
        return tuple(parameter.chunk(share[1])[share[0]] for parameter in by_head)

    def _exchange(
        self, channels: Tensor, gates: Sequence[Tensor], slice: Slice, documents: Documents
    ) -> Tensor:
        """Return the output of this rank's tokens. Each rank computes its share of the heads for all tokens:
        channels move with their heads, so that convolution and state see whole documents.
        """
        heads, share = self.conv1d.heads, (slice.rank, slice.ranks)
        parts = channels.split([number * width for number, width in heads], dim=-1)
        by_head = [part.unflatten(-1, shape) for part, shape in zip(parts, heads, strict=True)]
        rows = slice.dealt(*by_head, *gates)
        sizes = [tensor[0].numel() // slice.ranks for tensor in (channels, *gates)]
        channels, *received = rows.split(sizes, dim=-1)
        gates = [new.unflatten(-1, (-1, *old.shape[2:])) for new, old in zip(received, gates, strict=True)]
        own = self.conv1d(channels, None, documents.bounds(), share=share)
        packed = documents.boundaries(), None, share, documents.chunk_tables()
        return slice.to_tokens(self.scan(own, gates, *packed)[0])

    def _branches(self, operands: list[Tensor], documents: Tensor, states: States | None) -> Any:
        channels, *gates = operands
        return self._with_states(
            channels, gates, documents, document_bounds(documents, len(channels)), states
        )

    def _with_states(
        self,
        channels: Tensor,
        gates: Sequence[Tensor],
        documents: Tensor | None,
        bounds: Tensor | None,
        states: States | None,
    ) -> tuple[Tensor, States]:
        """Return the output, and the states of convolution and scan after each document."""
        before, state = (*(states or ()), None, None)[:2]
        parts = self.conv1d(channels, documents, bounds, before)
        output, state = self.scan(parts, gates, documents, state)
        inputs = self.conv1d.next_state(channels, documents, before)
        return output, (inputs,) if state is None else (inputs, state)

    def _continue(
        self, channels: Tensor, gates: Sequence[Tensor], documents: Documents, cache: KVCache
    ) -> Tensor:
        """Return the output of new tokens, whose documents are the rows of a cache."""
        before = cache.states(self.layer)
        if (real := cache.real_tokens()) is not None:
            tokens, rows = real
            new = channels[tokens], [gate[tokens] for gate in gates]
            output, after = self._with_states(*new, rows, document_bounds(rows, len(tokens)), before)
            padded = output.new_zeros(len(channels), *output.shape[1:])
            output = padded.index_copy(0, tokens, output)
        elif before is not None and cache.newest == 1 and len(channels) == len(before[0]):
            parts, inputs = self.conv1d.step(channels, before[0])
            if len(before) == 1:
                output, after = parts[0], (inputs,)
            else:
                output, state = self.step(parts, gates, before[1])
                after = inputs, state
        else:
            packed = documents.boundaries(), documents.bounds()
            output, after = self._with_states(channels, gates, *packed, before)
        cache.keep_states(self.layer, *after)
        return output

    def new_cache(
        self, batch: int, max_length: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Allocate the convolution's last inputs [batch, K - 1, C], and for a scan its states
        [batch, *state_shape] in float32.
        """
        inputs = torch.zeros(batch, self.conv1d.taps - 1, self.conv1d.channels, device=device, dtype=dtype)
        if self.state_shape is None:
            return (inputs,)
        wide = torch.promote_types(dtype, torch.float32)
        return inputs, torch.zeros(batch, *self.state_shape, device=device, dtype=wide)
