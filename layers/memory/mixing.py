"""Operations of token mixers, and the memory of their backward pass."""

from __future__ import annotations

from typing import Any

from liger_models.layers.attention.qk_norm import norm_work
from liger_models.layers.attention.reach import REACH
from liger_models.layers.blocks import Block
from liger_models.layers.memory.on_host import heads_at_a_time, mixers_of
from liger_models.layers.memory.step import Step
from liger_models.layers.specs import AttentionSpec, RecurrentSpec


def mixing_operations(layer: Block, seq: int) -> int:
    """Operations per token of the mixer's forward pass, on average, excluding its projections."""
    mixers = layer.spec.mixers
    return sum(m.state_flops if isinstance(m, RecurrentSpec) else 4 * _attended(m, seq) for m in mixers)


def _attended(mixer: Any, seq: int) -> int:
    """Average elements of the keys, or of the values, that a query attends to, over all heads."""
    mixer = getattr(mixer, "attention", mixer)
    if not isinstance(mixer, AttentionSpec):
        return 0
    width = (mixer.q_size + mixer.o_size) // 2
    return width * min(mixer.window or mixer.chunk or seq, (seq + 1) // 2 if mixer.causal else seq)


def saved_by_segments(layer: Block, step: Step) -> int:
    """Bytes that the layer's mixers keep less than their `activation_bytes`, as long documents have longer
    segments.
    """
    return step.tokens * sum(_saved_by_segments(mixer, step)[0] for mixer in mixers_of(layer))


def _saved_by_segments(module: Any, step: Step) -> tuple[int, int]:
    """`RecurrentMixer.saved_by_segments`; none where ranks divide a sequence, whose heads are fewer there."""
    if not isinstance(module.spec, RecurrentSpec) or step.sequence_ranks > 1:
        return 0, 0
    saved: tuple[int, int] = module.saved_by_segments(step.longest or step.seq)
    return saved


def backward_mixing(layer: Block, step: Step, itemsize: int) -> int:
    """The gradients of attention's output, queries, keys and values, and what `sdpa` takes to make them:
    sums in float32, and keys' and values' gradients by query head; or `flash`, sums of all three. Of ranks
    that exchange heads the output as it came back is done with.
    """
    return max((_mixer_work(mixer, step, itemsize) for mixer in mixers_of(layer)), default=0)


def early_bytes(layer: Block, step: Step, itemsize: int) -> int:
    """Bytes of gradients that `RecurrentMixer.split` allocates before they are computed, in layers that do
    not run again.
    """
    if step.sequence_ranks > 1:
        return 0
    widths = (getattr(mixer, "early_width", 0) for mixer in mixers_of(layer))
    return step.tokens * itemsize * max(widths, default=0)


def _mixer_work(module: Any, step: Step, itemsize: int) -> int:
    if isinstance(module.spec, RecurrentSpec):
        ranks, (_, fewer) = step.sequence_ranks, _saved_by_segments(module, step)
        if ranks == 1:
            return step.tokens * (module.backward_bytes(itemsize) - fewer)
        return step.tokens * (module.divided_backward_bytes(itemsize, ranks) - fewer)
    mixer = getattr(module.spec, "attention", module.spec)
    if not isinstance(mixer, AttentionSpec):
        return 0
    output = mixer.o_size if step.sequence_ranks == 1 else 0
    gradients = itemsize * (mixer.q_size + mixer.kv_size + mixer.v_size + output)
    if getattr(module, "backend", "auto") == "flash":
        return step.tokens * (gradients + 4 * (mixer.q_size + mixer.kv_size + mixer.v_size))
    sums = 0
    if mixer.window is None and mixer.is_plain_softmax:
        by_head = 2 * itemsize if mixer.num_key_value_heads < mixer.num_attention_heads else 0
        sums = (4 + by_head) * mixer.q_size
    parts = heads_at_a_time(module, step.tokens, step.sequence_ranks > 1)
    sums //= parts
    if sums and parts > 1 and step.tokens * mixer.o_size > REACH:
        sums += itemsize * mixer.o_size // parts  # the copy of the output's gradient
    return step.tokens * (gradients + max(sums, norm_work(mixer)))
