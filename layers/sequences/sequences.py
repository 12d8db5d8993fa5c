"""The door of a model: how a batch becomes one row of tokens, and what the layers need to know about it.

Inside a model hidden states are `[T, H]`: the tokens of all documents, one after another, without padding. A
`[batch, seq]` call is the case of equal documents. Padding is taken out here; it comes back only in logits
that a caller asks for.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_models.convert.errors import DataError
from liger_models.kernels import KeyRanges, document_bounds, key_ranges
from liger_models.layers.sequences.cache import KVCache
from liger_models.layers.sequences.rotary import rotary_tables
from liger_models.layers.sequences.router_loss import RouterLogits
from liger_models.layers.sequences.routing_decisions import RoutingDecisions
from liger_models.layers.sequences.sequence_parallel import Slice
from liger_models.layers.sequences.tree import Tree
from liger_models.layers.specs import QueryScaleSpec, RopeSpec

IGNORE_INDEX = -100


class Sequences:
    """T tokens and the documents that they form.

    `shape` is the caller's (batch, seq); `kept` the flat positions of the T tokens in it (None: all of them).
    `cu_seqlens` [n + 1] int32 holds the documents' boundaries; None says that every row of `shape` is one
    document. `max_seqlen` is the longest document's length. `cache` is given in generation alone. `axes` [A,
    T] are the positions of tokens that have several, `positions_given` says that a caller chose what
    positions there are, and `begin_anew` that they alone tell the documents. `spans` [2, T] int32 says where
    the span begins and ends in which a token stands whose tokens all see one another (an image's, say; a
    token in none is a span by itself). `with_images` says that images are shown, and `tiles` are those that
    tokens see (`SeenTiles`); `pads` [T] bool are tokens of padding that were not taken out, behind the others
    of their row, none of which sees another. `tree` says which documents continue others (tree.py).
    `torn` is the extent of the longest row that had padding between its tokens, and not only around them.
    `bounds` is made by `document_bounds`, `rotary` by `prepare_rotary`, `cut` by `chunks`. `router_logits`
    are noted by the layers of experts whose router has a loss, and `routing` what all of them decided.

    Of sequences that are divided over ranks (`divided`) the T tokens are those of this rank, `slice` says
    which, and `whole` is what the documents are read off, which lie across slices.

    Not a dataclass: frameworks that cast a layer's arguments (FSDP2's mixed precision among them) copy the
    dataclasses, lists and dicts that they find, and round the tensors in them. Other objects they leave, and
    the rotary tables stay float32.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        position_ids: Tensor,  # [T]
        longest_position: int,
        max_seqlen: int,
        cu_seqlens: Tensor | None = None,
        kept: Tensor | None = None,
    ):
        self.shape, self.position_ids = shape, position_ids
        self.longest_position, self.max_seqlen = longest_position, max_seqlen
        self.cu_seqlens, self.kept = cu_seqlens, kept
        self.cache: KVCache | None = None
        self.bounds: Tensor | None = None
        self.axes: Tensor | None = None
        self.positions_given = self.begin_anew = False
        self.with_images = False
        self.spans: Tensor | None = None
        self._plain: Sequences | None = None
        self.tiles: Any = None
        self.pads: Tensor | None = None
        self.tree: Tree | None = None
        self.host_bounds: list[int] | None = None
        self.torn = 0
        self.ranges: dict[tuple[int | None, bool, bool], KeyRanges] = {}
        self.rotary: dict[RopeSpec, tuple[Tensor, Tensor]] = {}
        self.query_scales: dict[QueryScaleSpec, Tensor] = {}
        self.cut: dict[int, Sequences] = {}
        self.router_logits = RouterLogits()
        self.routing = RoutingDecisions()
        self.slice: Slice | None = None
        self._whole: Sequences | None = None
        self._elsewhere: dict[torch.device, Sequences] = {}

    @classmethod
    def from_call(
        cls,
        shape: tuple[int, int],
        device: torch.device,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        parents: Sequence[int] | Tensor | None = None,
    ) -> Sequences:
        """Read the documents off what the caller gave.

        `attention_mask` [batch, seq] is 0 at padding. `cu_seqlens` [n + 1] bounds packed documents over the
        flattened tokens (on the CPU it costs no synchronisation), and `parents` [n] or [2, n] says which of
        them each continues, -1 for none (layers/sequences/tree.py). Position ids that start anew without
        `attention_mask` or `cu_seqlens` mark packed documents too, as in transformers. `position_ids` [3,
        batch, seq] are those on three axes, and [4, batch, seq] has in front of them those that count tokens.

        Raises:
            DataError: shapes that do not fit, two descriptions of the documents at once, boundaries out of
                order, documents that continue what they cannot.
        """
        if attention_mask is not None and cu_seqlens is not None:
            raise DataError(
                "got both attention_mask and cu_seqlens: the first is for padding, the second for packed rows"
            )
        counted, axes = (None, None) if position_ids is None else split_axes(position_ids, shape)
        sequences = cls._from_call(shape, device, attention_mask, counted, cu_seqlens, parents)
        sequences.take_positions(position_ids is not None, axes)
        sequences.begin_anew = cu_seqlens is None and sequences.host_bounds is not None
        return sequences

    @classmethod
    def _from_call(
        cls,
        shape: tuple[int, int],
        device: torch.device,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,  # [T]
        cu_seqlens: Tensor | None,
        parents: Sequence[int] | Tensor | None,
    ) -> Sequences:
        batch, seq = shape
        total = batch * seq
        if parents is not None and cu_seqlens is None:
            raise DataError("parents names documents of cu_seqlens: give both")
        if cu_seqlens is not None:
            return cls._packed(shape, device, cu_seqlens, position_ids, parents)
        if attention_mask is not None:
            _check_mask(attention_mask, shape)
            mask = attention_mask.bool()
            lengths = mask.sum(1)
            counts, extents = torch.stack([lengths, _extents(mask)]).tolist()
            if sum(counts) < total:
                sequences = cls._padded(shape, device, mask, lengths, counts, position_ids)
                torn = (extent for extent, count in zip(extents, counts, strict=True) if extent > count)
                sequences.torn = max(torn, default=0)
                return sequences
        if position_ids is None:
            positions = torch.arange(seq, device=device).repeat(batch)
            return cls(shape, positions, seq, seq)
        if attention_mask is None:
            row_starts = torch.arange(0, total, seq, device=device)
            jumps = position_ids[1:] != position_ids[:-1] + 1
            starts = torch.cat([torch.ones(1, dtype=torch.bool, device=device), jumps])
            starts[row_starts] = True
            boundaries = starts.nonzero()[:, 0]
            if boundaries.numel() > batch:
                bounds = torch.cat([boundaries, boundaries.new_tensor([total])])
                return cls._packed(shape, device, bounds, position_ids)
        return cls(shape, position_ids, int(position_ids.max()) + 1, seq)

    @classmethod
    def _packed(
        cls,
        shape: tuple[int, int],
        device: torch.device,
        cu_seqlens: Tensor,
        position_ids: Tensor | None,
        parents: Sequence[int] | Tensor | None = None,
    ) -> Sequences:
        total = shape[0] * shape[1]
        if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point():
            raise DataError(
                f"cu_seqlens must be a row of integers, found {cu_seqlens.dtype} of shape "
                f"{tuple(cu_seqlens.shape)}"
            )
        bounds = cu_seqlens.tolist()
        lengths = [end - start for start, end in itertools.pairwise(bounds)]
        if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != total or min(lengths) < 0:
            raise DataError(
                f"cu_seqlens must rise from 0 to the number of tokens, {total}; it holds {len(bounds)} values"
                f"{f' from {bounds[0]} to {bounds[-1]}' if bounds else ''}"
            )
        cu = cu_seqlens.to(torch.int32).to(device, non_blocking=True)
        if parents is not None:
            tree = Tree(bounds, parents, device)
            longest = tree.longest if position_ids is None else int(position_ids.max()) + 1
            positions = tree.position_ids() if position_ids is None else position_ids
            sequences = cls(shape, positions, longest, tree.longest, cu)
            sequences.tree, sequences.host_bounds = tree, bounds
            return sequences
        if position_ids is None:
            starts = torch.repeat_interleave(cu[:-1], cu.diff(), output_size=total)
            position_ids = torch.arange(total, device=device) - starts
            longest = max(lengths)
        else:
            longest = int(position_ids.max()) + 1 if total else 0
        sequences = cls(shape, position_ids, longest, max(lengths), cu)
        sequences.host_bounds = bounds
        return sequences

    @classmethod
    def _padded(
        cls,
        shape: tuple[int, int],
        device: torch.device,
        mask: Tensor,
        lengths: Tensor,
        counts: list[int],
        position_ids: Tensor | None,
    ) -> Sequences:
        if not sum(counts):
            raise DataError("attention_mask is 0 everywhere: the batch holds no token")
        kept = mask.flatten().nonzero()[:, 0]
        cu = torch.zeros(shape[0] + 1, dtype=torch.int32, device=device)
        cu[1:] = lengths.cumsum(0)
        if position_ids is None:
            position_ids = torch.arange(shape[1], device=device).repeat(shape[0])
        positions = position_ids[kept]
        return cls(shape, positions, int(positions.max()) + 1, max(counts), cu, kept)

    @classmethod
    def of_lengths(cls, lengths: list[int], device: torch.device) -> Sequences:
        """One row of documents of these lengths."""
        total = sum(lengths)
        if len(set(lengths)) == 1:
            return cls.from_call((len(lengths), lengths[0]), device)
        cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        return cls.from_call((1, total), device, cu_seqlens=cu_seqlens)

    def take_positions(self, given: bool, axes: Tensor | None) -> None:
        """Note whether a caller chose the positions, and those on axes [A, batch * seq], if there are any."""
        self.positions_given = given
        if axes is not None:
            self.axes = axes if self.kept is None else axes[:, self.kept]
            self.longest_position = int(self.axes.max()) + 1

    def divided(self, group: Any) -> Sequences:
        """This rank's share of the batch in a process group (sequence_parallel.py); without one, all."""
        if group is None:
            return self
        if self.tree is not None:
            raise DataError("documents that continue others cannot be divided over ranks: leave out parents")
        part = self._copy()
        part._whole = self
        part.slice = Slice(group, self.num_tokens)
        part.position_ids = part.slice.of(self.position_ids)
        part.cu_seqlens = part.kept = None  # which are those of the whole
        return part

    @property
    def whole(self) -> Sequences:
        return self if self._whole is None else self._whole

    def own(self, tokens: Tensor) -> Tensor:
        """Of all tokens [T, ...] of a batch those that are here."""
        return tokens if self.slice is None else self.slice.of(tokens)

    def summed(self, value: Tensor) -> Tensor:
        """The sum of a number over the ranks that divide a batch."""
        return value if self.slice is None else self.slice.summed(value)

    def afresh(self) -> Sequences:
        """The same documents for another model, whose layers have noted nothing yet."""
        positions = self.position_ids, self.longest_position, self.max_seqlen
        fresh = Sequences(self.shape, *positions, self.cu_seqlens, self.kept)
        fresh.tree, fresh.torn = self.tree, self.torn
        return fresh

    @property
    def device(self) -> torch.device:
        return self.position_ids.device

    def on(self, device: torch.device) -> Sequences:
        """What a layer on that device reads, where a model is divided over several: the tensors are copied
        once, and what layers note is noted here.
        """
        if device == self.device:
            return self
        if device not in self._elsewhere:
            there = self._elsewhere[device] = self._copy()
            for name in ("position_ids", "cu_seqlens", "kept", "bounds", "axes", "spans", "pads"):
                tensor = getattr(self, name)
                setattr(there, name, None if tensor is None else tensor.to(device))
            there.rotary = {
                rope: (cos.to(device), sin.to(device)) for rope, (cos, sin) in self.rotary.items()
            }
            there.tiles = None if self.tiles is None else self.tiles.to(device)
            there.tree = None if self.tree is None else self.tree.on(device)
            there._whole = None if self._whole is None else self._whole.on(device)
        return self._elsewhere[device]

    def _copy(self) -> Sequences:
        """A copy that shares the tensors and what layers note, and caches for itself what is made lazily."""
        copied = copy.copy(self)
        copied.rotary, copied._plain = dict(self.rotary), None
        copied.ranges, copied.query_scales, copied.cut, copied._elsewhere = {}, {}, {}, {}
        return copied

    @property
    def num_tokens(self) -> int:
        return self.position_ids.shape[0]

    def document_bounds(self) -> Tensor | None:
        """Where each token's document begins and ends, [2, T] int32, made once for all layers; None if one
        document holds all tokens.
        """
        if self.bounds is None and (self.cu_seqlens is not None or self.shape[0] > 1):
            cu_seqlens = self._bounds_of_rows() if self.cu_seqlens is None else self.cu_seqlens
            self.bounds = document_bounds(cu_seqlens, self.num_tokens)
        return self.bounds

    def key_ranges(self, window: int | None, causal: bool, whole_spans: bool = False) -> KeyRanges:
        """What is seen where attention is not causal, or not everywhere: see `kernels.key_ranges`. Made once
        for all layers that are alike.
        """
        if self.tree is not None:
            raise ValueError("in documents that continue others attention is causal, and there are no spans")
        if (window, causal, whole_spans) not in self.ranges:
            bounds = self.document_bounds()
            if bounds is None:
                whole = torch.tensor([[0], [self.num_tokens]], dtype=torch.int32, device=self.device)
                bounds = whole.expand(2, self.num_tokens)
            spans = self.spans if causal else None
            self.ranges[window, causal, whole_spans] = key_ranges(bounds, spans, window, whole_spans)
        return self.ranges[window, causal, whole_spans]

    def ranges_beside_padding(self) -> KeyRanges:
        """What is seen where all tokens of a row see one another, but for padding behind them, which sees the
        others. Padding of a row that is nothing else sees itself. Made once for all layers.
        """
        if (None, False, False) not in self.ranges:
            assert self.pads is not None
            rows, length = self.shape
            pads = self.pads.view(rows, length)
            first = torch.arange(0, rows * length, length, device=self.device)[:, None]
            real = length - pads.sum(1, keepdim=True)
            end = first + torch.where(pads & (real > 0), real, length)
            seen = torch.stack([first.expand_as(end), end]).flatten(1).int()
            self.ranges[None, False, False] = KeyRanges(seen, seen)  # a key is seen by those that it sees
        return self.ranges[None, False, False]

    def without_spans(self) -> Sequences:
        """The same, in which no token sees ahead; made once for all layers."""
        if self.spans is None:
            return self
        if self._plain is None:
            self.document_bounds()
            self._plain = self._copy()
            self._plain.spans = None
        return self._plain

    def chunks(self, size: int) -> Sequences:
        """The same tokens as shorter documents: each document cut into pieces of `size` tokens, its last what
        is left. For attention alone; made once for all layers, without waiting for a device.
        """
        if size >= self.max_seqlen:
            return self
        if self.spans is not None or self.tree is not None:
            raise ValueError("documents with spans that see ahead, or that continue others, cannot be cut")
        if size not in self.cut:
            total = self.num_tokens
            shape, cu_seqlens = (total // size, size), None
            if self.cu_seqlens is not None or self.shape[1] % size:
                whole = self._bounds_of_rows() if self.cu_seqlens is None else self.cu_seqlens
                shape, cu_seqlens = self.shape, _with_cuts(whole, size, total)
            self.cut[size] = Sequences(shape, self.position_ids, self.longest_position, size, cu_seqlens)
        return self.cut[size]

    def _bounds_of_rows(self) -> Tensor:
        batch, seq = self.shape
        return torch.arange(0, (batch + 1) * seq, seq, dtype=torch.int32, device=self.device)

    def query_scale(self, spec: QueryScaleSpec) -> Tensor:
        """The factor of each token's query, [T] float32, made once for all layers."""
        if spec not in self.query_scales:
            lengths_passed = torch.floor((self.position_ids.float() + spec.first) / spec.length)
            self.query_scales[spec] = 1 + spec.beta * torch.log(1 + lengths_passed)
        return self.query_scales[spec]

    def prepare_rotary(self, ropes: tuple[RopeSpec, ...]) -> None:
        """Make the tables of every rotary setting in the model.

        Raises:
            DataError: a position that the tables were not made for, or on axes that the model does not have.
        """
        for rope in ropes:
            limit = rope.position_limit
            if limit is not None and self.longest_position > limit:
                raise DataError(
                    f"position {self.longest_position - 1} is beyond the rotary tables: the config's "
                    f"max_position_embeddings is {limit}. Shorten the sequences, or load the model with a "
                    "longer context in its config (max_position_embeddings, with a rope_scaling that fits)."
                )
            if rope.axes is None and self.axes is not None and self.positions_given:
                raise DataError(
                    f"position_ids came on {len(self.axes)} axes, and the positions of this model "
                    f"have one: expected the shape of the tokens, {self.shape}"
                )
            positions = self.position_ids if rope.axes is None or self.axes is None else self.axes
            self.rotary[rope] = rotary_tables(rope, positions, self.longest_position)

    def pack(self, tensor: Tensor) -> Tensor:
        """[batch, seq, ...] -> the T tokens, [T, ...]."""
        if self.slice is not None:
            return self.slice.of(self.whole.pack(tensor))
        flat = tensor.flatten(0, 1)
        return flat if self.kept is None else flat[self.kept.to(flat.device)]

    def unpack(self, tensor: Tensor) -> Tensor:
        """[T, ...] -> [batch, seq, ...], zero at padding."""
        if self.slice is not None:
            return self.whole.unpack(self.slice.gathered(tensor))
        if self.kept is not None:
            full = tensor.new_zeros((self.shape[0] * self.shape[1], *tensor.shape[1:]))
            tensor = full.index_put((self.kept.to(tensor.device),), tensor)
        return tensor.unflatten(0, self.shape)

    def next_labels(self, labels: Tensor) -> Tensor:
        """The label of the next token of the document, [T]; a document's last token has none."""
        if self.cu_seqlens is None:
            rows = labels.view(self.shape)
            ends = rows.new_full((self.shape[0], 1), IGNORE_INDEX)
            return torch.cat([rows[:, 1:], ends], dim=1).flatten()
        shifted = labels.roll(-1)
        if self.kept is not None:  # across a hole in a mask the next token is not the one to predict
            shifted[:-1][self.kept.diff() != 1] = IGNORE_INDEX
        # An empty document's end is its neighbour's end (or index -1, the very last): always the end of some
        # document.
        shifted[self.cu_seqlens[1:].long() - 1] = IGNORE_INDEX
        return shifted


def _extents(mask: Tensor) -> Tensor:
    """How many places of each row of a mask [batch, seq] lie from its first token to its last, [batch]."""
    places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    last, before_end = (places * mask).amax(1), (places * mask.flip(1)).amax(1)
    return (last + before_end - mask.shape[1]).clamp(min=0)


def _with_cuts(cu_seqlens: Tensor, size: int, total: int) -> Tensor:
    """Boundaries of documents, and of pieces of `size` tokens within them. How many there are is known on the
    device alone: empty documents at the end make up for that.
    """
    counts = (cu_seqlens.diff() + size - 1) // size
    ends = counts.cumsum(0)
    piece = torch.arange(total // size + len(counts), device=cu_seqlens.device)  # no more than these
    document = torch.searchsorted(ends, piece, right=True).clamp(max=len(counts) - 1)
    starts = cu_seqlens[document] + size * (piece - (ends - counts)[document])
    starts = torch.where(piece < ends[-1], starts, total)
    return torch.cat([starts, starts.new_full((1,), total)]).to(torch.int32)


def split_axes(position_ids: Tensor, shape: tuple[int, int]) -> tuple[Tensor | None, Tensor | None]:
    """Of positions as a call has them those that count tokens, [T], and those on axes, [3, T].

    Raises:
        DataError: another shape, or dtype.
    """
    if position_ids.dim() != 3:
        return _flat_positions(position_ids, shape), None
    if len(position_ids) not in (3, 4):
        raise DataError(
            f"position_ids of three dimensions must be [3, batch, seq], or [4, batch, seq] with those of the "
            f"text in front; found {tuple(position_ids.shape)}"
        )
    counted, *axes = [None] * (4 - len(position_ids)) + [_flat_positions(one, shape) for one in position_ids]
    return counted, torch.stack([axis for axis in axes if axis is not None])


def _flat_positions(position_ids: Tensor, shape: tuple[int, int]) -> Tensor:
    if position_ids.is_floating_point():
        raise DataError(f"position_ids must be integers, found {position_ids.dtype}")
    if position_ids.dim() == 1:
        position_ids = position_ids[None]
    if (
        position_ids.dim() != 2
        or position_ids.shape[1] != shape[1]
        or position_ids.shape[0] not in (1, shape[0])
    ):
        raise DataError(
            f"position_ids must have the shape of the tokens, {shape}; found {tuple(position_ids.shape)}"
        )
    return position_ids.expand(shape).flatten()


def _check_mask(attention_mask: Tensor, shape: tuple[int, int]) -> None:
    if tuple(attention_mask.shape) != shape:
        raise DataError(
            f"attention_mask must have the shape of the tokens, {shape}; found "
            f"{tuple(attention_mask.shape)}. Packed documents are given by cu_seqlens, not by a mask."
        )
    if bool(((attention_mask != 0) & (attention_mask != 1)).any()):
        low, high = (value.item() for value in attention_mask.aminmax())
        raise DataError(
            f"attention_mask holds values from {low} to {high}; expected 1 at tokens and 0 at padding. What "
            "is added to scores is no such mask, nor are numbers of documents: cu_seqlens takes their bounds."
        )
