"""The mixer of Mamba 2: Mamba 2, Nemotron-H, Granite 4, Bamba, Falcon-H1.

    z, xBC, dt = split(u @ W_in^T);   x, B, C = silu(conv(xBC))
    y = ssd(x, dt, B, C);             out = norm(y * silu(z)) @ W_o^T

The scan and its gates are in kernels/recurrent/state_spaces/ssd.py. State and convolution restart at every
document.

Between the projections and the norm, `lean` keeps x, B, C before the convolution, dt, z and y. The
convolution runs again in the backward pass. The states of chunks are never kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.kernels import ssd, ssd_step, swiglu
from liger_models.kernels._dispatch import ceil_div
from liger_models.kernels.recurrent._chunk_table import CHUNK, SEGMENT, ChunkTables
from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.projections.linear import Linear, project_scaled
from liger_models.layers.recompute.activation_memory import ActivationMemory, carry_recipe
from liger_models.layers.recurrent.gated_norm import GatedNormalisation
from liger_models.layers.recurrent.mixer import RecurrentMixer
from liger_models.layers.recurrent.short_conv import WHOLE, Share, ShortConvolution
from liger_models.layers.sequences.sequence_parallel import passes_states
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import SSDSpec


class SSD(RecurrentMixer):
    """State space duality over packed documents.

    Args:
        hidden_size: the width H of the hidden states.
        spec: heads, groups, convolution and step.
        layer: the index of this layer in the model, and in a cache.
        backend: of attention; ignored here.
    """

    transfers = "factors"

    def __init__(self, hidden_size: int, spec: SSDSpec, layer: int = 0, backend: AttentionBackend = "auto"):
        super().__init__(layer)
        self.spec, self.hidden_size = spec, hidden_size
        self.in_proj = Linear(hidden_size, spec.size + spec.conv_size + spec.heads, bias=spec.bias)
        heads, groups = (spec.heads, spec.head_dim), (spec.groups, spec.state)
        self.conv1d = ShortConvolution((heads, groups, groups), spec.conv, spec.conv_bias)
        self.A_log, self.D, self.dt_bias = (nn.Parameter(torch.empty(spec.heads)) for _ in range(3))
        if spec.gating != "without_norm":
            first, width = spec.gating == "before_norm", spec.size // spec.groups
            self.norm = GatedNormalisation(spec.size, spec.norm_eps, width, first, cast=spec.norm_cast)
        self.out_proj = Linear(spec.size, hidden_size, bias=spec.out_bias)
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Initialise decay rates from 1 to the number of heads, and biases and residual factors of one;
        projections are modules of their own.
        """
        with torch.no_grad():
            self.A_log.copy_(torch.arange(1, self.spec.heads + 1).log())
        nn.init.ones_(self.D)
        nn.init.ones_(self.dt_bias)

    def forward(self, x: Tensor, sequences: Sequences, scale: float = 1.0) -> Tensor:
        """x [T, H] -> [T, H], multiplied by `scale`."""
        spec = self.spec
        widths = spec.size, spec.conv_size, spec.heads
        z, xbc, dt = self.split(self._scaled(self.in_proj(x)), widths, sequences)
        y = self.mix(xbc, (dt,), sequences).flatten(1)
        gated = (
            carry_recipe(swiglu(z, y), swiglu, z, y, late=True)
            if spec.gating == "without_norm"
            else self.norm(y, z)
        )
        return project_scaled(self.out_proj, gated.to(x.dtype), scale)

    def _scaled(self, projected: Tensor) -> Tensor:
        """Multiply the parts z, x, B, C and dt."""
        spec = self.spec
        if set(spec.scales) == {1.0}:
            return projected
        by_group = spec.groups * spec.state
        parts = projected.split([spec.size, spec.size, by_group, by_group, spec.heads], dim=-1)
        return torch.cat([part * scale for part, scale in zip(parts, spec.scales, strict=True)], dim=-1)

    def scan(
        self,
        parts: tuple[Tensor, ...],
        gates: Sequence[Tensor],
        documents: Tensor | None,
        state: Tensor | None,
        share: Share = WHOLE,
        tables: ChunkTables | None = None,
    ) -> tuple[Tensor, Tensor]:
        (x, b, c), (dt,) = parts, gates
        by_head = self.own_share(share, self.A_log, self.D, self.dt_bias)
        options: dict[str, Any] = {"cu_seqlens": documents, "state": state, "tables": tables}
        return ssd(x, dt, b, c, *by_head, dt_limit=self.spec.dt_limit, **options)

    def step(
        self, parts: tuple[Tensor, ...], gates: Sequence[Tensor], state: Tensor
    ) -> tuple[Tensor, Tensor]:
        (x, b, c), (dt,) = parts, gates
        by_head = self.A_log, self.D, self.dt_bias
        return ssd_step(x, dt, b, c, *by_head, state, dt_limit=self.spec.dt_limit)

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.spec.heads, self.spec.head_dim, self.spec.state

    @property
    def early_width(self) -> int:
        return 0 if self.spec.gating == "without_norm" else self.spec.conv_size

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Bytes kept per token on a GPU: x, B and C before the convolution, z, dt and y; with `all` also x, B
        and C after it and the norm's output; and in float32 the states between segments.
        """
        spec = self.spec
        kept = spec.conv_size + 2 * spec.size + spec.heads
        states = 4 * spec.size * spec.state // SEGMENT
        return itemsize * (kept + (spec.conv_size + spec.size if level == "all" else 0)) + states

    def backward_bytes(self, itemsize: int) -> int:
        """Peak bytes per token during the backward pass of the scan on a GPU, in addition to what `lean`
        keeps, less y, which the norm has freed: gradients of y and z; x, B and C after the convolution and
        their gradients; the states of a slice of the heads and their gradients, together no larger than x;
        and in float32 four numbers for each token and head, states and their gradients between segments, and
        gradients of B and C of groups that several slices share.
        """
        spec = self.spec
        of_scan = scan_bytes(spec.size, spec.conv_size, spec.heads, spec.groups, spec.state, itemsize)
        return of_scan - itemsize * spec.size

    def divided_backward_bytes(self, itemsize: int, ranks: int) -> int:
        """The same for ranks that exchange heads, or the peak of the forward pass if that is higher. In the
        backward pass `in_proj`'s product is freed after the norm's gradients; in the forward pass inputs, the
        convolution's output, and outputs before and after they are sent back exist at once.
        """
        spec = self.spec
        if self.pass_states or passes_states(spec, ranks):
            return self.backward_bytes(itemsize)
        sizes = spec.size, spec.conv_size, spec.heads, spec.groups, spec.state
        of_scan = scan_bytes(*sizes, itemsize, ranks)
        product = 2 * spec.size + spec.conv_size + spec.heads
        forward = spec.conv_size + 2 * spec.size + self.hidden_size
        return max(of_scan - itemsize * product, itemsize * forward)

    def extra_repr(self) -> str:
        spec = self.spec
        return f"heads={spec.heads}, head_dim={spec.head_dim}, groups={spec.groups}, state={spec.state}"


def scan_bytes(
    size: int, conv_size: int, heads: int, groups: int, state: int, itemsize: int, ranks: int = 1
) -> int:
    """`SSD.backward_bytes` with y, from fields of the spec; `ranks` that exchange heads."""
    slices = max(ceil_div(2 * state, CHUNK), 1)
    shared = 2 * groups * state if slices > groups // ranks else 0
    wide = shared + 4 * heads + 2 * size * state // SEGMENT
    return itemsize * (3 * size + 2 * conv_size) + 4 * wide
