"""A planned training step, and its plan.

Memory peaks at one of these moments:

| moment               | in addition to the weights and the optimizer's state                              |
|----------------------|-----------------------------------------------------------------------------------|
| the loss             | activations of all layers, a chunk of logits, the head's gradient; or gradients   |
|                      | where several residual streams end                                                |
| backward of a layer  | activations of it and of earlier layers, recomputed ones, gradients computed so far |
| the embedding's      | all gradients, and a second one of a weight shared with the head                  |
| the optimizer's step | all gradients, and the part of a state on the host that is being updated          |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from liger_models.layers.memory.pictures import NOTHING, Shown
from liger_models.layers.recompute.activation_memory import ON_HOST, ActivationMemory

# Candidate levels of a model's layers: the row that recomputes the least is used.
LADDERS: tuple[tuple[ActivationMemory, ...], ...] = (
    ("all", "lean", "mlp", "checkpoint"),
    ("all", "lean", "mlp", "tiled"),
    ("all", "lean", "mlp", "offload"),
)


@dataclass(frozen=True)
class Step:
    """A training step's settings, without its model.

    Attributes:
        batch, seq: rows, and tokens per row, on one GPU at a time.
        optimizer_bytes: optimizer state per trained element. AdamW in bfloat16 keeps two moments, and by
            default 16 bits that rounding would lose.
        accumulates: gradients of an earlier micro-batch exist in the forward pass.
        gpus: that share the parameters (FSDP2).
        lora_rank: of float32 adapters on all linear layers of a frozen model, whole in each process; 0: none.
        lora_experts: of adapters on the stacks of experts, too.
        dora: the adapters are DoRA's.
        weight_bytes: per element of the layers' matrices, if they are quantised.
        longest: tokens of the longest document; None: `seq`.
        labels: the fraction of tokens with a label; the others are not in the loss.
        sequence_ranks: GPUs that split each row's tokens among them.
        pass_states: their recurrent layers pass states from rank to rank instead of exchanging heads.
        optimizer_on_host: the optimizer's state is in the host's memory.
        weights_on_host: frozen weights of the layers, the embedding and the head are streamed from the host.
        optimizer_work: bytes that the optimizer's step takes in addition to the state and the gradients.
        shown, heard: the images and the sounds of these rows.
        places, axes: of the images, for layers over grids of patches: see `Shown`; 0: there are none.
        float8_copies: bytes of weights in float8 that are kept from one micro-batch to the next.
    """

    batch: int
    seq: int
    optimizer_bytes: float = 6
    accumulates: bool = False
    gpus: int = 1
    lora_rank: int = 0
    lora_experts: bool = False
    dora: bool = False
    weight_bytes: float | None = None
    longest: int | None = None
    labels: float = 1.0
    sequence_ranks: int = 1
    pass_states: bool = False
    optimizer_on_host: bool = False
    optimizer_work: int = 0
    weights_on_host: bool = False
    shown: Shown = NOTHING
    heard: Shown = NOTHING
    places: int = 0
    axes: int = 0
    float8_copies: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of one GPU."""
        return -(-self.batch * self.seq // self.sequence_ranks)

    @property
    def labelled(self) -> int:
        """Tokens of one GPU that have a label."""
        return math.ceil(self.labels * self.tokens)


@dataclass(frozen=True)
class Plan:
    """The levels of a model's layers, and the memory of a step with them.

    Attributes:
        levels: one per layer.
        encoder_levels: those of the image encoder, if any.
        peak: peak memory in bytes.
        moment: when the peak occurs.
        parts: components of the peak, in bytes.
        repeated: recomputed work relative to the work of a step that recomputes nothing.
        budget: available bytes; None: unlimited.
        host: bytes of pinned host memory.
        host_budget: available bytes of host memory; None: unlimited.
    """

    levels: tuple[ActivationMemory, ...]
    peak: int
    moment: str
    parts: dict[str, int] = field(hash=False)
    repeated: float
    budget: int | None = None
    host: int = 0
    host_budget: int | None = None
    encoder_levels: tuple[ActivationMemory, ...] = ()

    @property
    def at_rest(self) -> int:
        """Bytes of the weights, the gradients and the optimizer's state at the peak."""
        return sum(self.parts[name] for name in ("weights", "optimizer", "gradients"))

    @property
    def fits(self) -> bool:
        on_host = self.host_budget is None or self.host <= self.host_budget
        return on_host and (self.budget is None or self.peak <= self.budget)

    def __str__(self) -> str:
        layers = _describe_levels(self.levels, "layers")
        if self.encoder_levels:
            layers += ", " + _describe_levels(self.encoder_levels, "the encoder's layers")
        budget = "" if self.budget is None else f" of {self.budget / 2**30:.1f}"
        most = "" if self.host_budget is None else f" of {self.host_budget / 2**30:.1f}"
        host = f", and {self.host / 2**30:.1f}{most} GiB of the host" if self.host else ""
        peak = f"{self.peak / 2**30:.1f}{budget} GiB{host}"
        return f"{layers}; {self.repeated:.1%} of the work is recomputation; {peak}"


def _describe_levels(levels: Sequence[ActivationMemory], what: str) -> str:
    runs: list[list[Any]] = []
    for i, level in enumerate(levels):
        if level == ON_HOST:
            continue
        if not runs or runs[-1][0] != level:
            runs.append([level, i, i])
        runs[-1][2] = i
    on_host = [str(i) for i, level in enumerate(levels) if level == ON_HOST]
    but = f", but {ON_HOST} in {', '.join(on_host)}" if on_host else ""
    return ", ".join(f"{level} in {what} {first} to {last}" for level, first, last in runs) + but
