"""Of a layer, by level: what it keeps and needs, and the work of making again what it does not keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from liger_models.layers.attention.backends import LONG
from liger_models.layers.attention.cross_attention import CrossAttention
from liger_models.layers.blocks import Block
from liger_models.layers.experts.moe import MixtureOfExperts
from liger_models.layers.memory import tiles
from liger_models.layers.memory.activation_memory import LEVELS, RERUN, ActivationMemory
from liger_models.layers.memory.plan.step import Step
from liger_models.layers.sequence_parallel import exchange_bytes
from liger_models.layers.spec import AttentionSpec, MoESpec

# Operations of a matrix product in the time that a byte takes to be written or read: 660 TFLOP/s beside 4.2
# TB/s on an H200. It decides only which of two things is done again first.
OPERATIONS_A_BYTE = 160
# Of elementwise work that is done again: its output is written, and about twice as much is read.
BYTES_MOVED = 3


@dataclass(frozen=True)
class LayerCosts:
    """Of a layer, by level: what it keeps, what it needs beside that while its backward pass runs, and the
    work of making again what it does not keep. Bytes, and operations; of all tokens of a step.
    """

    kept: dict[ActivationMemory, int]
    transient: dict[ActivationMemory, int]
    work: dict[ActivationMemory, int]
    forward: int
    stream: int

    @staticmethod
    def of(layer: Block, step: Step, itemsize: int) -> LayerCosts:
        """Of a layer over all tokens of a step."""
        tokens = step.tokens
        kept = {level: tokens * layer.activation_bytes(level, itemsize) for level in LEVELS}
        if step.sequence_ranks > 1:
            exchanged = tokens * exchange_bytes(layer.spec.mixer, step.sequence_ranks, itemsize)
            kept = {level: kept[level] + (level not in RERUN) * exchanged for level in LEVELS}
        beside = _kept_of_images(layer, step, itemsize)
        kept = {level: kept[level] + (level not in RERUN) * beside for level in LEVELS}
        inner, last, rest = matrix_elements(layer)
        mixing = 4 * _attended(layer, step.longest or step.seq)
        again = OPERATIONS_A_BYTE * BYTES_MOVED * (kept["all"] - kept["lean"])
        # Behind gate and up their product and its gradient, as wide as either.
        product = tokens * itemsize * _inner_width(layer)
        whole = again + tokens * (2 * (inner + rest) + mixing)
        stream = tokens * itemsize * layer.hidden_size
        of_second_run = kept["all"] - layer.norms_made_late() * stream
        tiled, sums = _in_tiles(layer, of_second_run, step, itemsize)
        return LayerCosts(
            kept,
            {
                "all": product,
                "lean": 2 * product,
                "mlp": 4 * product,
                "checkpoint": of_second_run,
                # The layer's own input is kept, or came back from the host.
                "tiled": tiled - (stream if step.tokens > tiles.TILE else 0),
                "offload": tiled,
            },
            {
                "all": 0,
                "lean": again,
                "mlp": again + 2 * tokens * inner,
                "checkpoint": whole,
                "tiled": whole + OPERATIONS_A_BYTE * sums,
                "offload": whole + OPERATIONS_A_BYTE * sums,
            },
            tokens * (2 * (inner + last + rest) + mixing),
            stream,
        )

    def next_of(
        self, level: ActivationMemory, ladder: Sequence[ActivationMemory]
    ) -> tuple[float, ActivationMemory | None]:
        """The level further down to which a saved byte costs the least work, and that price."""
        found = [
            ((self.work[to] - self.work[level]) / (self.kept[level] - self.kept[to]), to)
            for to in ladder[ladder.index(level) + 1 :]
            if self.kept[to] < self.kept[level]
        ]
        return min(found, default=(0.0, None))


def _kept_of_images(layer: Block, step: Step, itemsize: int) -> int:
    """What a layer that reads features keeps of them, and of which of them each token sees."""
    mixer = layer.mixer
    if not isinstance(mixer, CrossAttention) or not step.shown.read:
        return 0
    seen = itemsize * step.tokens * (step.shown.read // step.batch)
    return seen + step.shown.read * mixer.image_bytes(itemsize)


def _in_tiles(layer: Block, whole: int, step: Step, itemsize: int) -> tuple[int, int]:
    """What a layer needs for its backward pass whose MLP runs in tiles and which else needs `whole`; and the
    bytes of float32 sums that are moved. Experts are not in tiles.
    """
    if step.tokens <= tiles.TILE or isinstance(layer.mlp, MixtureOfExperts):
        return whole, 0
    spec, elements = layer.mlp.spec, 0
    if step.lora_rank == 0:
        elements = sum(p.numel() for p in layer.mlp.parameters() if p.requires_grad)
    # Of a tile: what stands before the activation, what comes out, and the gradients of both.
    of_tiles = tiles.working_bytes(step.tokens, 4 * spec.intermediate_size, elements, itemsize)
    rest = whole - step.tokens * layer.mlp.activation_bytes("all", itemsize)
    # In attention the MLP's norm is done with, and the streams in front of it and behind it.
    attention = rest - 4 * step.tokens * layer.hidden_size * itemsize + _attention_work(layer, step, itemsize)
    return max(rest + of_tiles, attention), 8 * elements * -(-step.tokens // tiles.TILE)


def _attention_work(layer: Block, step: Step, itemsize: int) -> int:
    """The gradients of attention's output, queries, keys and values, and what `sdpa` takes to make them:
    sums in float32, and keys' and values' gradients by query head.
    """
    mixer: Any = layer.spec.mixer
    mixer = getattr(mixer, "attention", mixer)
    if not isinstance(mixer, AttentionSpec):
        return 0
    gradients = 2 * itemsize * (mixer.q_size + mixer.kv_size)
    sums = 0
    if mixer.window is None and mixer.softcap is None and not mixer.sinks:
        by_head = 2 * itemsize if mixer.num_key_value_heads < mixer.num_attention_heads else 0
        sums = (4 + by_head) * mixer.q_size
    if step.tokens > LONG:
        sums //= mixer.num_key_value_heads
    return step.tokens * (gradients + sums)


def matrix_elements(layer: Block) -> tuple[int, int, int]:
    """Elements of the matrices that a token meets: of gate and up, of the last product, of all others."""
    inner = last = rest = 0
    for name, p in layer.named_parameters():
        if p.ndim < 2:
            continue
        mixture, elements = layer.spec.mixture, p.numel()
        if p.ndim == 3 and mixture is not None:
            elements = elements * mixture.experts_per_token // mixture.num_experts
        if not name.startswith("mlp."):
            rest += elements
        elif "down_proj" in name:
            last += elements
        else:
            inner += elements
    return inner, last, rest


def _attended(layer: Block, seq: int) -> int:
    """Elements of the values that a query meets, over all heads, on average."""
    mixer: Any = layer.spec.mixer
    mixer = getattr(mixer, "attention", mixer)
    if not isinstance(mixer, AttentionSpec):
        return 0
    return mixer.q_size * min(mixer.window or mixer.chunk or seq, (seq + 1) // 2 if mixer.causal else seq)


def _inner_width(layer: Block) -> int:
    spec = layer.spec.mlp
    if not isinstance(spec, MoESpec):
        return spec.intermediate_size
    shared = 0 if spec.shared_expert is None else spec.shared_expert.intermediate_size
    return spec.experts_per_token * spec.intermediate_size + shared
