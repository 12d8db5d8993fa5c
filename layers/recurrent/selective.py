"""The mixer of Mamba: Mamba, Falcon-Mamba, Jamba (Gu and Dao, 2023, arXiv:2312.00752, section 3.4).

    x, z = split(u @ W_in^T);     x = silu(conv(x))
    r, B, C = split(x @ W_x^T);   each normalised in some families
    y = selective_scan(x, r @ W_dt^T, B, C);   out = (y * silu(z)) @ W_o^T

The scan is in kernels/recurrent/state_spaces/selective_scan.py, and adds the bias of the step in float32.
State and convolution restart at every document.

`lean` keeps x before the convolution, z, the product r | B | C, the step and y. The convolution, the norms
and the gated product run again in the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.kernels import rms_norm, selective_scan, selective_scan_step, swiglu
from liger_models.kernels.recurrent._chunk_table import ChunkTables
from liger_models.kernels.recurrent.state_spaces._selective_pieces import BYTES_IN_BACKWARD, SLAB
from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.parts.norm import LigerRMSNorm
from liger_models.layers.projections.linear import Linear
from liger_models.layers.recompute.activation_memory import ActivationMemory, carry_recipe
from liger_models.layers.recurrent.mixer import RecurrentMixer
from liger_models.layers.recurrent.short_conv import WHOLE, Share, ShortConvolution
from liger_models.layers.sequences.documents import Documents
from liger_models.layers.sequences.sequence_parallel import Slice
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import SelectiveSpec

SHORTEST_STEP, LONGEST_STEP = 0.001, 0.1  # of fresh weights (section 3.6)


class SelectiveScan(RecurrentMixer):
    """Selective scan over packed documents.

    Args:
        hidden_size: the width H of the hidden states.
        spec: channels, state, convolution and norms.
        layer: the index of this layer in the model, and in a cache.
        backend: of attention; ignored here.
    """

    stacked_vectors = ("A_log",)  # the rates of decay of each channel

    def __init__(
        self, hidden_size: int, spec: SelectiveSpec, layer: int = 0, backend: AttentionBackend = "auto"
    ):
        super().__init__(layer)
        self.spec = spec
        self.in_proj = Linear(hidden_size, 2 * spec.channels, bias=spec.bias)
        self.conv1d = ShortConvolution(((spec.channels, 1),), spec.conv, spec.conv_bias)
        self.x_proj = Linear(spec.channels, spec.step_rank + 2 * spec.state, bias=False)
        self.dt_proj = Linear(spec.step_rank, spec.channels, bias=False)
        self.dt_proj.passes_adapters = True
        self.dt_bias, self.D = (nn.Parameter(torch.empty(spec.channels)) for _ in range(2))
        self.A_log = nn.Parameter(torch.empty(spec.channels, spec.state))
        if spec.norms == "weighted":
            self.dt_layernorm = LigerRMSNorm(spec.step_rank, spec.norm_eps)
            self.b_layernorm, self.c_layernorm = (LigerRMSNorm(spec.state, spec.norm_eps) for _ in range(2))
        self.out_proj = Linear(spec.channels, hidden_size, bias=spec.bias)
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Initialise rates of decay from 1 to the number of states, residual factors of one, and biases whose
        steps are between 0.001 and 0.1, uniform in their logarithm; projections are modules of their own.
        """
        with torch.no_grad():
            self.A_log.copy_(torch.arange(1, self.spec.state + 1).log().expand_as(self.A_log))
            nn.init.uniform_(self.dt_bias, math.log(SHORTEST_STEP), math.log(LONGEST_STEP), generator)
            step = self.dt_bias.exp()
            self.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
        nn.init.ones_(self.D)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        """x [T, H] -> [T, H]."""
        inner, z = self.split(self.in_proj(x), [self.spec.channels] * 2, sequences)
        y = self.mix(inner, (), sequences).flatten(1)
        return self.out_proj(carry_recipe(swiglu(z, y), swiglu, z, y, late=True).to(x.dtype))

    def _selected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The step before its bias [T, channels], B and C [T, state], from x [T, channels]."""
        spec = self.spec
        step, b, c = self.x_proj(x).split([spec.step_rank, spec.state, spec.state], dim=-1)
        if spec.norms == "weighted":
            step, b, c = self.dt_layernorm(step), self.b_layernorm(b), self.c_layernorm(c)
        elif spec.norms == "unweighted":
            step, b, c = (
                carry_recipe(self._unit(part), self._unit, part, late=True) for part in (step, b, c)
            )
        return self.dt_proj(step), b, c

    def _unit(self, x: Tensor) -> Tensor:
        return rms_norm(x, None, self.spec.norm_eps)

    def scan(
        self,
        parts: tuple[Tensor, ...],
        gates: Sequence[Tensor],
        documents: Tensor | None,
        state: Tensor | None,
        share: Share = WHOLE,
        tables: ChunkTables | None = None,
    ) -> tuple[Tensor, Tensor]:
        x = carry_recipe(_flat(parts[0]), _flat, parts[0], late=True, deep=True)
        return self._scan(x, *self._selected(x), documents, state, share, tables)

    def _scan(
        self,
        x: Tensor,
        dt: Tensor,
        b: Tensor,
        c: Tensor,
        documents: Tensor | None,
        state: Tensor | None,
        share: Share,
        tables: ChunkTables | None,
    ) -> tuple[Tensor, Tensor]:
        rates, residual, bias = self.own_share(share, self.A_log, self.D, self.dt_bias)
        options: dict[str, Any] = {"cu_seqlens": documents, "state": state, "tables": tables}
        y, final = selective_scan(x, dt, rates, b, c, residual, bias, **options)
        return y.unsqueeze(-1), final

    def step(
        self, parts: tuple[Tensor, ...], gates: Sequence[Tensor], state: Tensor
    ) -> tuple[Tensor, Tensor]:
        x = _flat(parts[0])
        dt, b, c = self._selected(x)
        y, state = selective_scan_step(x, dt, self.A_log, b, c, self.D, self.dt_bias, state)
        return y.unsqueeze(-1), state

    def _exchange(
        self, channels: Tensor, gates: Sequence[Tensor], slice: Slice, documents: Documents
    ) -> Tensor:
        """Return the output of this rank's tokens. Convolution and scan run on this rank's share of the
        channels for all tokens; step, B and C need all channels, of this rank's tokens.
        """
        share = slice.rank, slice.ranks
        received = slice.dealt(channels.unsqueeze(-1))
        convolved = self.conv1d(received, None, documents.bounds(), share=share)[0]
        x = carry_recipe(_flat(convolved), _flat, convolved, late=True, deep=True)
        dt, b, c = self._selected(_flat(slice.to_tokens(convolved)))
        b, c = slice.gathered(torch.cat([b, c], dim=-1)).chunk(2, dim=-1)
        packed = documents.boundaries(), None, share, documents.chunk_tables()
        y, _ = self._scan(x, slice.dealt(dt.unsqueeze(-1)), b, c, *packed)
        return slice.to_tokens(y)

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.spec.channels, self.spec.state

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Bytes kept per token on a GPU: x before the convolution, z, the product for step, B and C with
        the norms' 1/rms in float32, the step and y; with `all` also x after the convolution, the norms'
        outputs and the gated product.
        """
        spec = self.spec
        product = spec.step_rank + 2 * spec.state
        kept = 4 * spec.channels + product
        outputs, numbers = (0, 0) if spec.norms is None else (product, 3)
        return itemsize * (kept + (2 * spec.channels + outputs if level == "all" else 0)) + 4 * numbers

    def backward_bytes(self, itemsize: int) -> int:
        """Peak bytes per token during the backward pass of the scan on a GPU, in addition to what `lean`
        keeps, less y, which is freed by then: gradients of y and z, x after the convolution and its gradient,
        that of the step, and states with their gradients for some channels.
        """
        spec = self.spec
        states: Any = min(spec.channels, SLAB) * spec.state * BYTES_IN_BACKWARD
        return itemsize * 4 * spec.channels + int(states)

    def extra_repr(self) -> str:
        spec = self.spec
        return f"{spec.channels} channels, state={spec.state}, step_rank={spec.step_rank}"


def _flat(x: Tensor) -> Tensor:
    return x.squeeze(-1)
