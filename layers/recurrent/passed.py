"""Recurrent layers whose states pass from rank to rank, for sequences divided over ranks.

    rank 0: a a a b b | rank 1: b b b b b | rank 2: b c c c c

Each rank computes all heads of its own tokens. The state of a document that spans ranks goes from each rank
to the next, in float32, with the last inputs of the convolution; gradients take the opposite way. A rank
first computes its last document, whose state the next rank waits for, unless that document began on an
earlier rank. Ranks wait for one another only for documents longer than a slice, and send nothing where a
document ends with the slice.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_models.kernels import document_bounds
from liger_models.kernels._copies import to_device
from liger_models.layers.sequences.documents import Documents
from liger_models.layers.sequences.sequence_parallel import Slice


def over_ranks(
    mixer: Any, channels: Tensor, gates: Sequence[Tensor], slice: Slice, documents: Documents
) -> Tensor:
    """Return the output of this rank's tokens; arguments as in `RecurrentMixer.mix`."""
    bounds = own_bounds(documents.host_boundaries(), slice)
    tokens, continued, continues = len(channels), bounds[0] < 0, bounds[-1] > len(channels)
    bounds = [min(max(bound, 0), tokens) for bound in bounds]
    trained = torch.is_grad_enabled() and any(
        x.requires_grad for x in (channels, *gates, *mixer.parameters())
    )
    rows = _with_inputs_before(mixer, channels, bounds, slice, continued, continues, trained)
    if mixer.state_shape is None:
        return _run(mixer, rows, gates, bounds, None)[0]
    if continued and continues and len(bounds) > 2:
        cut = bounds[-2]
        earlier, later = rows.split([len(rows) - tokens + cut, tokens - cut])
        pieces = [gate.split([cut, tokens - cut]) for gate in gates]
        output, final = _run(mixer, later, [last for _, last in pieces], [0, tokens - cut], None)
        output = slice.send(output, final, trained)
        before = slice.receive(_state_of_one(mixer, channels), trained)
        first = _run(mixer, earlier, [piece for piece, _ in pieces], bounds[:-1], before)[0]
        return torch.cat([first, output])
    state = slice.receive(_state_of_one(mixer, channels), trained) if continued else None
    output, final = _run(mixer, rows, gates, bounds, state)
    return slice.send(output, final, trained) if continues else output


def own_bounds(bounds: list[int], slice: Slice) -> list[int]:
    """Boundaries of the documents with tokens on this rank, counted from its first token: the first one is
    negative if its document began on an earlier rank.
    """
    first, tokens = slice.first, slice.sizes[slice.rank]
    begin, end = bisect_right(bounds, first) - 1, bisect_left(bounds, first + tokens)
    return [bound - first for bound in bounds[begin : end + 1]]


def _with_inputs_before(
    mixer: Any,
    channels: Tensor,
    bounds: list[int],
    slice: Slice,
    continued: bool,
    continues: bool,
    trained: bool,
) -> Tensor:
    """The convolution's inputs, after those that it needs of a document that began on an earlier rank. Sends
    the last ones to the next rank, if that continues the last document.
    """
    before = mixer.conv1d.taps - 1
    if not before:
        return channels
    trained = trained and channels.requires_grad
    rows, length = channels, len(channels) - bounds[-2]
    if continued:
        rows = torch.cat([slice.receive(channels[:1].expand(before, -1), trained), channels])
        length += before * (len(bounds) == 2)
    if continues:
        last = rows[len(rows) - min(length, before) :]
        zeros = last.new_zeros(before - len(last), last.shape[1])  # before the start of the document
        rows = slice.send(rows, torch.cat([zeros, last]), trained)
    return rows


def _run(
    mixer: Any, rows: Tensor, gates: Sequence[Tensor], bounds: list[int], state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The output for documents between `bounds`, and the state after the last one.

    Args:
        mixer: the layer.
        rows: the convolution's inputs, maybe after further ones of the first document.
        gates: as in `RecurrentMixer.mix`.
        bounds: boundaries of the documents, without those further inputs.
        state: that before the first document; None for zeros.
    """
    before, device = len(rows) - bounds[-1], rows.device
    spans = None
    if len(bounds) > 2:
        inputs = torch.tensor([0, *(bound + before for bound in bounds[1:])], dtype=torch.int32)
        spans = document_bounds(to_device(inputs, device), len(rows))
        if state is not None:
            state = torch.cat([state, state.new_zeros(len(bounds) - 2, *state.shape[1:])])
    parts = mixer.conv1d(rows, None, spans, before=before)
    documents = to_device(torch.tensor(bounds, dtype=torch.int32), device)
    output, final = mixer.scan(parts, gates, documents, state)
    return output, output if final is None else final[-1:]


def _state_of_one(mixer: Any, like: Tensor) -> Tensor:
    """Allocate the state of one document, uninitialised."""
    assert mixer.state_shape is not None
    wide = torch.promote_types(like.dtype, torch.float32)
    return like.new_empty(1, *mixer.state_shape, dtype=wide)
