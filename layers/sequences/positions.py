"""The positions of the tokens of a batch, and the tables that layers read by position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from liger_models.convert.errors import DataError
from liger_models.layers.sequences.part import Part
from liger_models.layers.sequences.rotary import rotary_tables
from liger_models.layers.sequences.sequence_parallel import Slice
from liger_models.layers.specs import QueryScaleSpec, RopeSpec


@dataclass(frozen=True, eq=False)
class Positions(Part):
    """Positions of the tokens in their documents.

    Attributes:
        ids: [T], one position a token.
        end: one more than the largest position.
        axes: [A, T], positions on several axes, if the tokens have them.
        given: whether the caller chose the positions.
        counted: whether positions that count tokens came with those on axes.
        of_packed: whether the caller gave positions that count the tokens of packed documents.
        rotary: cosines and sines of each rotary setting, added by `with_rotary`.
    """

    ids: Tensor
    end: int
    axes: Tensor | None = None
    given: bool = False
    counted: bool = True
    of_packed: bool = False
    rotary: Mapping[RopeSpec, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.ids.device

    def own(self, part: Slice) -> Positions:
        """The positions of the tokens that a rank holds, if sequences are divided over ranks."""
        axes = None if self.axes is None else part.of(self.axes.T).T
        return replace(self, ids=part.of(self.ids), axes=axes)

    def with_rotary(
        self, ropes: tuple[RopeSpec, ...], shape: tuple[int, int], factors: Tensor | None = None
    ) -> Positions:
        """The positions with the tables of these rotary settings. `shape` (batch, seq) is for the error, and
        `factors` are those of learned frequencies.

        Raises:
            DataError: a position that the tables were not made for, or on axes that the model does not have.
        """
        tables = dict(self.rotary)
        for rope in ropes:
            limit = rope.position_limit
            if limit is not None and self.end > limit:
                raise DataError(
                    f"position {self.end - 1} is beyond the rotary tables: the config's "
                    f"max_position_embeddings is {limit}. Shorten the sequences, or load the model with a "
                    "longer context in its config (max_position_embeddings, with a rope_scaling that fits)."
                )
            if rope.axes is None and self.axes is not None and self.given:
                raise DataError(
                    f"position_ids came on {len(self.axes)} axes, and the positions of this model "
                    f"have one: expected the shape of the tokens, {shape}"
                )
            tables[rope] = rotary_tables(rope, self.of(rope), self.end, factors)
        return replace(self, rotary=tables)

    def of(self, rope: RopeSpec) -> Tensor:
        """The positions that rotate heads: [T], or [A, T] if both settings and tokens have several axes."""
        return self.ids if rope.axes is None or self.axes is None else self._on_axes(rope.axes)

    def _on_axes(self, axes: tuple[int, ...]) -> Tensor:
        """The positions on axes, [A, T]; with those that count tokens as the first, if there are too few."""
        assert self.axes is not None
        if max(axes) >= len(self.axes) and not self.counted:
            raise DataError(
                f"position_ids came on {len(self.axes)} axes, and this model has {max(axes) + 1}, of which "
                "the first counts tokens"
            )
        return self.axes if max(axes) < len(self.axes) else torch.cat([self.ids[None], self.axes])

    def check_end(self, limit: int, shape: tuple[int, int]) -> None:
        """Check that a table of `limit` learned positions has all of these. `shape` (batch, seq) is for the
        error.

        Raises:
            DataError: a position beyond the table, or positions on several axes.
        """
        if self.end > limit:
            raise DataError(
                f"position {self.end - 1} is beyond the {limit} positions that the model has learned vectors "
                "for; shorten the sequences"
            )
        if self.axes is not None and self.given:
            raise DataError(
                f"position_ids came on {len(self.axes)} axes, and the positions of this model have one: "
                f"expected the shape of the tokens, {shape}"
            )

    def query_scale(self, spec: QueryScaleSpec) -> Tensor:
        """The factor of each token's query, [T] float32, made once for all layers."""
        return self._once(spec, lambda: self._query_scale(spec))

    def logarithms(self) -> Tensor:
        """log(1 + position) of each token, [T] float32, made once for all layers."""
        return self._once("logarithms", lambda: (self.ids + 1).float().log())

    def _query_scale(self, spec: QueryScaleSpec) -> Tensor:
        if spec.power:
            return torch.exp(spec.beta * torch.log1p((self.ids.float() + spec.first) / spec.length))
        if spec.late:
            return 1 + spec.beta * ((self.ids.float() + spec.first) / spec.length).clamp(min=1).log()
        lengths_passed = torch.floor((self.ids.float() + spec.first) / spec.length)
        return 1 + spec.beta * torch.log(1 + lengths_passed)


def split_axes(position_ids: Tensor, shape: tuple[int, int]) -> tuple[Tensor | None, Tensor | None]:
    """Split the positions of a call into those that count tokens, [T], and those on axes, [3, T].

    Raises:
        DataError: another shape, or dtype.
    """
    if position_ids.dim() != 3:
        return _flat_positions(position_ids, shape), None
    if len(position_ids) not in (3, 4):
        raise DataError(
            f"position_ids of three dimensions must be [3, batch, seq], or [4, batch, seq] with text "
            f"positions first; found {tuple(position_ids.shape)}"
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
