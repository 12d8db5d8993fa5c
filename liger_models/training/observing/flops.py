"""Operations of a step and peak of the device: model FLOPs utilisation (PaLM, arXiv:2204.02311).

    FLOPs = f (2 N tokens + 2 H V labels + sum over layers, documents, heads of 2 (d_qk + d_v) pairs
               + sum over recurrent layers, value heads of 7 d_k d_v tokens)
    MFU   = FLOPs a second / (processes * FLOPs a second of a large matrix product)

N is the number of matrix elements used per token: of experts, only the active ones; of embeddings, none.
Ignored labels do not enter the head. Pairs are of a query and a visible key: n (n + 1) / 2 for a document of
n tokens, fewer with a window or chunks. f is 3, the forward pass and two products of its size backward; 2
for matrices without a gradient, below adapters or frozen, and 3 for the adapters themselves; 1 for first
layers that no gradient reaches. Modules for multi-token prediction count as further layers and heads.
Recomputation and image encoders are not counted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.layers.memory import layers_without_gradient, matrix_elements
from liger_models.layers.specs import AttentionSpec, BlockSpec, RecurrentSpec
from liger_models.models.causal_lm import LigerCausalLM

Sees = tuple[int | None, int | None]  # a window, and a chunk


class StepFlops:
    """Counts the operations of a model's steps, before adapters and quantisation.

    Args:
        model: provides its spec and the shapes of its matrices.
    """

    def __init__(self, model: LigerCausalLM) -> None:
        spec = model.spec
        self.head = spec.hidden_size * model.lm_head.out_features
        modules: list[Any] = [] if model.mtp is None else [*model.mtp.values()]
        self.head *= 1 + len(modules)
        layers = [*model.layers, *(module.block for module in modules)]
        self.elements = sum(sum(matrix_elements(layer)) for layer in layers)
        own: list[Any] = [module.eh_proj.weight for module in modules]
        own += [] if model.head_layers is None else [model.head_layers.dense.weight]
        own += [
            m.weight for m in (model.per_layer_inputs or nn.Module()).modules() if isinstance(m, nn.Linear)
        ]
        self.elements += sum(weight.numel() for weight in own)
        self.mixing = _Mixing([layer.spec for layer in layers])
        self.factor, self.adapters = 3, 0
        # Without a gradient of the weight, and without any.
        self.frozen = sum(sum(matrix_elements(layer, frozen=True)) for layer in layers)
        self.frozen += sum(weight.numel() for weight in own if not weight.requires_grad)
        self.frozen_head = 0 if model.lm_head.weight.requires_grad else self.head
        idle = layers_without_gradient(model)
        self.idle = sum(sum(matrix_elements(layer)) for layer in model.layers[:idle])
        self.idle_mixing = _Mixing(spec.blocks[:idle])

    def below_adapters(self, elements: int) -> None:
        """Count only adapters, with this many elements, as trained from now on."""
        self.factor, self.adapters = 2, elements
        self.frozen = self.frozen_head = self.idle = 0
        self.idle_mixing = _Mixing(())

    def of(self, lengths: Tensor, labels: int) -> int:
        """Operations of a step over documents of these lengths, with this many counted labels."""
        tokens = int(lengths.sum())
        adapters = 2 * self.adapters * tokens
        whole = self.factor * (self.forward(lengths, labels) - adapters) + 3 * adapters
        left_out = 2 * ((self.frozen + self.idle) * tokens + self.frozen_head * labels)
        return whole - left_out - 2 * self.idle_mixing.forward(lengths)

    def forward(self, lengths: Tensor, labels: int) -> int:
        """Operations of a forward pass only."""
        tokens = int(lengths.sum())
        products = (self.elements + self.adapters) * tokens + self.head * labels
        return 2 * products + self.mixing.forward(lengths)


class _Mixing:
    """Operations of attention and of recurrent states in some blocks, without their matrices."""

    def __init__(self, blocks: Sequence[BlockSpec]) -> None:
        # Elements of the queries and of the weighted values, over all heads.
        self.widths: Counter[Sees] = Counter()
        mixers: list[Any] = [mixer for block in blocks for mixer in block.mixers]
        for mixer in mixers:
            heads = getattr(mixer, "attention", mixer)  # latent and shared attention contain one
            if isinstance(heads, AttentionSpec):  # not cross-attention to images
                values = getattr(mixer, "v_head_dim", None) or heads.head_dim
                width = heads.num_attention_heads * (heads.head_dim + values)
                self.widths[heads.window, heads.chunk] += width
        self.states = sum(mixer.state_flops for mixer in mixers if isinstance(mixer, RecurrentSpec))

    def forward(self, lengths: Tensor) -> int:
        """Operations of a forward pass over documents of these lengths."""
        pairs = sum(width * visible_pairs(lengths, *sees) for sees, width in self.widths.items())
        return 2 * pairs + self.states * int(lengths.sum())


def visible_pairs(lengths: Tensor, window: int | None = None, chunk: int | None = None) -> int:
    """Number of pairs of a query and a visible key, for documents of these lengths."""
    if chunk is not None:
        whole, rest = int((lengths // chunk).sum()), lengths % chunk
        return whole * visible_pairs(torch.tensor([chunk]), window) + visible_pairs(rest, window)
    short = lengths if window is None else lengths.clamp(max=window)
    return int((short * (short + 1) // 2 + (lengths - short) * short).sum())


def measure_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a square matrix product of random numbers, large enough for the device and
    long enough for a GPU to settle at its power-limited clock.
    """
    cuda = device.type == "cuda"
    side, seconds = (8192, 0.3) if cuda else (2048, 0.1) if device.type == "mps" else (256, 0.01)
    # Does not touch the run's random generator.
    random = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(side, side, device=device, generator=random).to(dtype) for _ in range(2))

    def run(seconds: float) -> float:
        calls, begin = 0, time.perf_counter()
        while (taken := time.perf_counter() - begin) < seconds or calls < 2:
            for _ in range(4):
                torch.mm(a, b)
            calls += 4
            if cuda:
                torch.cuda.synchronize(device)
            elif device.type == "mps":
                torch.mps.synchronize()
        return 2 * side**3 * calls / taken

    run(seconds)
    return run(seconds)
