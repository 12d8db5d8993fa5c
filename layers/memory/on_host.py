"""Host memory: of layers at the level `offload`, and of streamed weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from liger_models.layers.attention import backends
from liger_models.layers.attention.kept_output import keeps_output
from liger_models.layers.attention.self_attention import Attention
from liger_models.layers.blocks import Block
from liger_models.layers.memory.own_parts import linear_matrices, own_bytes
from liger_models.layers.memory.step import Step
from liger_models.layers.recompute.host_weights import LEAST
from liger_models.layers.recompute.offload import SHARE, host_bytes
from liger_models.layers.specs import AttentionSpec, LatentAttentionSpec

_NF4_CODES = 0.5  # bytes of an element: its block's scale stays on the device


def mixers_of(layer: Block) -> list[Any]:
    """The layer's mixers, and attention that it shares."""
    return [*layer.mixers, *(module for module in layer.borrowed if isinstance(module, Attention))]


def input_bytes(layer: Block, tokens: int, itemsize: int) -> int:
    """Host memory of the layer's input."""
    return host_bytes(tokens * layer.stream_bytes(itemsize))


def result_bytes(layer: Block, tokens: int, longest: int, itemsize: int, divided: bool = False) -> int:
    """Host memory of attention's output and its log-sum-exp (float32, one per head), for `tokens` of this
    process in documents of up to `longest`, `divided` over processes or not.
    """
    total = 0
    for mixer in mixers_of(layer):
        spec = getattr(mixer.spec, "attention", mixer.spec)
        if isinstance(spec, AttentionSpec) and keeps_output(spec, longest) and _by_fused_kernels(mixer):
            parts = heads_at_a_time(mixer, tokens, divided)
            for size in (itemsize * spec.o_size, 4 * spec.num_attention_heads):
                total += parts * host_bytes(tokens * size // parts)
    return total


def heads_at_a_time(mixer: Any, tokens: int, divided: bool) -> int:
    """The number of groups of heads that attention computes one after the other (`attend_by_groups`)."""
    spec = mixer.spec
    if divided or tokens <= backends.LONG or not isinstance(mixer, Attention):
        return 1
    return spec.num_key_value_heads if spec.is_plain_softmax and spec.window is None else 1


def offloaded_bytes(layers: Iterable[Block], tokens: int, longest: int, itemsize: int, divided: bool) -> int:
    """Host memory of the inputs and results of all layers at the level `offload`."""
    return sum(
        input_bytes(layer, tokens, itemsize) + result_bytes(layer, tokens, longest, itemsize, divided)
        for layer in layers
        if layer.activation_memory == "offload"
    )


def on_host(sizes: Sequence[tuple[int, int]], host_budget: int | None) -> tuple[int, bool]:
    """Host memory of layers whose inputs and results have these sizes, and whether it includes the results:
    they must fit in the share of the host's memory that `Offload` gives them. If its size is not known, the
    inputs, which the host must hold in any case.
    """
    inputs, results = (sum(of_layer[i] for of_layer in sizes) for i in range(2))
    keeps = host_budget is not None and inputs + results <= SHARE * host_budget
    return inputs + keeps * results, keeps


def streamed_bytes(
    module: nn.Module, matrices: Sequence[tuple[Tensor, tuple[int, ...]]], step: Step, itemsize: int
) -> int:
    """Host memory of a module's weights; its `matrices` may be quantised."""
    total = sum(own_bytes(p) for p in module.parameters() if own_bytes(p) >= LEAST)
    if step.weight_bytes is None:
        return total
    own = {id(p) for p, _ in matrices}
    elements = sum(math.prod(shape) for p, shape in linear_matrices([module]) if id(p) in own)
    return total - int(elements * (itemsize - _NF4_CODES))


def streamed_at(units: Sequence[int], unit: int) -> int:
    """Bytes of streamed weights on the device in a layer's backward pass: its own, and those of the layer
    before it, which are fetched meanwhile (the embedding, unit 0, has no backward pass).

    Args:
        units: bytes of the embedding, each layer and the head; none if nothing is streamed.
        unit: the layer's number in them.
    """
    return sum(units[max(1, unit - 1) : unit + 1])


def _by_fused_kernels(mixer: Any) -> bool:
    """Whether kernels that keep a log-sum-exp compute all of attention."""
    chosen = getattr(mixer.spec, "indexer", None) is not None
    if isinstance(mixer.spec, LatentAttentionSpec):
        chosen = chosen or mixer.spec.keys_of is not None
    return mixer.backend in ("auto", "sdpa", "triton") and not chosen
