"""Costs of a layer by level: memory kept, memory needed, and work of recomputation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from liger_models.layers.blocks import Block
from liger_models.layers.blocks.per_layer_input import PerLayerInput
from liger_models.layers.experts.moe import MixtureOfExperts
from liger_models.layers.memory.adapters import AdapterCosts
from liger_models.layers.memory.layer_moments import Moments
from liger_models.layers.memory.mixing import mixing_operations, saved_by_segments
from liger_models.layers.memory.on_host import input_bytes, result_bytes
from liger_models.layers.memory.own_parts import kept_of_images
from liger_models.layers.memory.places import inner_width, matrix_elements
from liger_models.layers.memory.step import Step
from liger_models.layers.recompute.activation_memory import LEVELS, ON_HOST, RERUN, ActivationMemory
from liger_models.layers.recompute.offload import host_bytes
from liger_models.layers.sequences.sequence_parallel import exchange_bytes

# Matrix operations in the time in which one byte is written or read: 660 TFLOP/s and 4.2 TB/s on an H200.
# Only used to decide what is recomputed first.
OPERATIONS_A_BYTE = 160
# The same for a byte that is copied to the host or back, mostly hidden by computation: the copies of
# Llama-3-8B's inputs take 1.6% of a step of 4 x 4,096 tokens on an H200.
OPERATIONS_A_COPIED_BYTE = 1600
# Of a byte at the level `lean@host`, whose copies run while other layers compute: 22 GB of them made the same
# step of 1,351 ms less than 2 ms slower.
OPERATIONS_A_HIDDEN_BYTE = 60
# Of recomputed elementwise work: its output is written, and about twice as much is read.
BYTES_MOVED = 3


@dataclass(frozen=True)
class LayerCosts:
    """Costs of a layer by level: bytes kept, further bytes needed in its backward pass besides its gradients,
    and operations of recomputation, for all tokens of a step.

    Attributes:
        own_input: bytes of `kept` for the layer's own input. One operation makes these inputs for all layers,
            so they are freed once the backward pass has left layer 0.
        own_gradient: bytes of that input's gradient, which waits for the same moment.
        on_host: host memory at the level `offload`: of the layer's input, and of attention's results.
        work_with_results: operations of recomputation at that level, if these results are kept.
        saved_on_host: host memory at the level `lean@host`.
        at_end: bytes needed at the end of its forward pass at `lean`, if its backward pass may need less: its
            MLP's product and output, a norm's output and the previous layer's contribution to the stream.
        running: bytes needed in its forward pass in addition to what it keeps.
    """

    kept: dict[ActivationMemory, int]
    transient: dict[ActivationMemory, int]
    work: dict[ActivationMemory, int]
    forward: int
    stream: int
    own_input: int = 0
    own_gradient: int = 0
    on_host: tuple[int, int] = (0, 0)
    work_with_results: int = 0
    at_end: int = 0
    saved_on_host: int = 0
    running: dict[ActivationMemory, int] = field(default_factory=dict)

    @staticmethod
    def of(layer: Block, step: Step, itemsize: int) -> LayerCosts:
        """Costs of a layer over all tokens of a step."""
        tokens = step.tokens
        adapters = AdapterCosts.of(layer, step, tokens, itemsize)
        kept = _kept_bytes(layer, step, itemsize, adapters)
        stream = tokens * layer.stream_bytes(itemsize)
        moments = Moments.of(layer, kept, step, itemsize, adapters)
        largest = _largest(layer, moments, kept, stream, itemsize)
        results = result_bytes(layer, tokens, step.longest or step.seq, itemsize, step.sequence_ranks > 1)
        inner, last, rest = matrix_elements(layer)
        mixing = tokens * mixing_operations(layer, step.longest or step.seq)
        again = OPERATIONS_A_BYTE * BYTES_MOVED * (kept["all"] - kept["lean"])
        whole = again + 2 * tokens * (inner + rest) + mixing
        tiled = whole + OPERATIONS_A_BYTE * moments.moved
        offloaded = tiled + OPERATIONS_A_COPIED_BYTE * 2 * stream
        leaving = kept["lean"] - kept[ON_HOST]
        own: PerLayerInput | None = getattr(layer, "per_layer_input", None)
        return LayerCosts(
            kept=kept,
            transient={level: largest[level] - kept[level] for level in kept},
            work={
                "all": 0,
                "lean": again,
                "mlp": again + 2 * tokens * inner,
                "checkpoint": whole,
                "tiled": tiled,
                "offload": offloaded,
                ON_HOST: again + OPERATIONS_A_HIDDEN_BYTE * 2 * leaving,
            },
            forward=2 * tokens * (inner + last + rest) + mixing,
            stream=stream,
            own_input=0 if own is None else tokens * own.activation_bytes("checkpoint", itemsize),
            own_gradient=0 if own is None else tokens * own.spec.size * itemsize,
            on_host=(input_bytes(layer, tokens, itemsize), results),
            work_with_results=offloaded - (mixing if results else 0) + OPERATIONS_A_COPIED_BYTE * 2 * results,
            at_end=moments.in_place and moments.in_place + 3 * stream,
            saved_on_host=host_bytes(leaving),
            running={level: moments.forward(level, largest[level], results) - kept[level] for level in kept},
        )

    def without_gradient(self) -> LayerCosts:
        """Costs of the same layer where no gradient reaches it."""
        nothing = dict.fromkeys(self.kept, 0)
        return replace(self, kept=nothing, transient=nothing, work=nothing, own_input=0, own_gradient=0)

    def with_input(self, size: int) -> LayerCosts:
        """Costs with an input of other bytes."""
        levels: tuple[ActivationMemory, ...] = ("checkpoint", "tiled")
        kept = self.kept | {level: self.kept[level] + size - self.stream for level in levels}
        return replace(self, kept=kept, stream=size)

    def repeated(self, level: ActivationMemory, keeps_results: bool) -> int:
        """Operations of recomputation, with attention's results on the host if they are kept."""
        return self.work_with_results if level == "offload" and keeps_results else self.work[level]

    def next_of(
        self, level: ActivationMemory, ladder: Sequence[ActivationMemory], keeps_results: bool
    ) -> tuple[float, ActivationMemory | None]:
        """The lower level that costs the least work per saved byte, and that price."""
        found = [
            ((self.repeated(to, keeps_results) - self.work[level]) / (self.kept[level] - self.kept[to]), to)
            for to in ladder[ladder.index(level) + 1 :]
            if self.kept[to] < self.kept[level]
        ]
        return min(found, default=(0.0, None))


def _kept_bytes(
    layer: Block, step: Step, itemsize: int, adapters: AdapterCosts
) -> dict[ActivationMemory, int]:
    """Bytes that the layer keeps for its backward pass, by level."""
    tokens, of_images = step.tokens, kept_of_images(layer, step, itemsize)
    more = of_images + tokens * adapters.columns * itemsize - saved_by_segments(layer, step)
    if step.sequence_ranks > 1:
        way = step.sequence_ranks, itemsize, step.pass_states
        more += tokens * sum(exchange_bytes(spec, *way) for spec in layer.spec.mixers)
    kept = {
        level: tokens * layer.activation_bytes(level, itemsize) + (level not in RERUN) * more
        for level in LEVELS
    }
    kept["all"] += adapters.kept - tokens * _unkept(layer, adapters, itemsize)
    masks = 0 if layer.branch_dropout is None else 2 * tokens * layer.hidden_size
    kept[ON_HOST] = kept["offload"] + masks + of_images
    return kept


def _largest(
    layer: Block, moments: Moments, kept: dict[ActivationMemory, int], stream: int, itemsize: int
) -> dict[ActivationMemory, int]:
    """Peak bytes of the backward pass, by level."""
    largest = {level: moments.largest("lean" if level == ON_HOST else level) for level in kept}
    if layer.float32_stream and itemsize < 4:  # `lean` saves it rounded, so this one is in addition
        largest |= {level: largest[level] + stream for level in ("checkpoint", "tiled")}
    if hasattr(layer, "connection_bytes"):  # a layer that runs again makes all of its streams once more
        largest |= {level: largest[level] + stream for level in RERUN}
    return largest


def _unkept(layer: Block, adapters: AdapterCosts, itemsize: int) -> int:
    """Bytes per token of inputs counted at the level `all` that are not kept: PEFT keeps a cast instead, or
    nothing if the weight is not trained.
    """
    if not adapters.peft or layer.norm_outputs() != 2 or isinstance(layer.mlp, MixtureOfExperts):
        return 0
    sizes = {"last": inner_width(layer), "front": layer.hidden_size, "mixer": layer.hidden_size}
    return itemsize * sum(size for place, size in sizes.items() if place not in adapters.keeps_input)
