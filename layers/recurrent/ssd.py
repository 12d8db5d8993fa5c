"""The mixer of Mamba 2: Mamba 2, Nemotron-H, Granite 4, Bamba.

    z, xBC, dt = split(u @ W_in^T);   x, B, C = silu(conv(xBC))
    y = ssd(x, dt, B, C);             out = norm(y * silu(z)) @ W_o^T

The scan and its gates are in kernels/recurrent/ssd.py. State and convolution begin anew with every document.

Between the projections and the norm, `lean` keeps x, B, C before the convolution, dt, z and y. The
convolution runs again in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from liger_models.kernels import document_bounds, ssd, ssd_step
from liger_models.kernels.recurrent.ssd import CHUNK
from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.projections.linear import Linear
from liger_models.layers.recompute.activation_memory import ActivationMemory
from liger_models.layers.recurrent.branches import States, over_branches
from liger_models.layers.recurrent.gated_norm import GatedNormalisation
from liger_models.layers.recurrent.short_conv import ShortConvolution
from liger_models.layers.sequences.documents import Documents
from liger_models.layers.sequences.sequence_parallel import Slice
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import SSDSpec


class SSD(nn.Module):
    """State space duality over packed documents.

    Args:
        hidden_size: the width H of the hidden states.
        spec: heads, groups, convolution and step.
        layer: this layer's place in the model (its room in a cache).
        backend: of attention; without effect here.
    """

    def __init__(self, hidden_size: int, spec: SSDSpec, layer: int = 0, backend: AttentionBackend = "auto"):
        super().__init__()
        self.spec, self.layer = spec, layer
        self.in_proj = Linear(hidden_size, spec.size + spec.conv_size + spec.heads, bias=spec.bias)
        heads, groups = (spec.heads, spec.head_dim), (spec.groups, spec.state)
        self.conv1d = ShortConvolution((heads, groups, groups), spec.conv, spec.conv_bias)
        self.A_log, self.D, self.dt_bias = (nn.Parameter(torch.empty(spec.heads)) for _ in range(3))
        self.norm = GatedNormalisation(spec.size, spec.norm_eps, spec.size // spec.groups, gate_first=True)
        self.out_proj = Linear(spec.size, hidden_size, bias=spec.bias)
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Decay rates from 1 to the number of heads, and biases and residual factors of one; the projections
        are parts of their own.
        """
        with torch.no_grad():
            self.A_log.copy_(torch.arange(1, self.spec.heads + 1).log())
        nn.init.ones_(self.D)
        nn.init.ones_(self.dt_bias)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        """x [T, H] -> [T, H]."""
        spec, sequences = self.spec, sequences.on(x.device)
        z, xbc, dt = self.in_proj(x).split([spec.size, spec.conv_size, spec.heads], dim=-1)
        if sequences.cache is not None:
            y = self._continue(xbc, dt, sequences)
        elif sequences.documents.tree is not None:
            y = over_branches(sequences.documents.tree, [xbc, dt], self._branches)
        elif sequences.slice is not None:
            y = self._exchange(xbc, dt, sequences.slice, sequences.documents)
        else:
            y, _ = self._mix(xbc, dt, sequences.documents.boundaries(), sequences.documents.bounds())
        return self.out_proj(self.norm(y.flatten(1), z).to(x.dtype))

    def _mix(
        self,
        xbc: Tensor,
        dt: Tensor,
        documents: Tensor | None,
        bounds: Tensor | None = None,
        states: States | None = None,
    ) -> tuple[Tensor, Tensor]:
        """y [T, heads, head_dim] of documents, and the states of the scan behind them. `states` are those
        that they continue, of the convolution and of the scan.
        """
        conv_state, state = (None, None) if states is None else states
        x, b, c = self.conv1d(xbc, documents, bounds, conv_state)
        of_heads = self.A_log, self.D, self.dt_bias
        limit = self.spec.dt_limit
        return ssd(x, dt, b, c, *of_heads, dt_limit=limit, cu_seqlens=documents, state=state)

    def _exchange(self, xbc: Tensor, dt: Tensor, slice: Slice, documents: Documents) -> Tensor:
        """y [t, heads, head_dim] of this rank's tokens, each rank computing its share of the heads and groups
        for all tokens.
        """
        spec, ranks = self.spec, slice.ranks
        groups = spec.groups * spec.state
        x, b, c = xbc.split([spec.size, groups, groups], dim=-1)
        parts = x.unflatten(-1, (-1, spec.head_dim)), *(v.unflatten(-1, (-1, spec.state)) for v in (b, c))
        rows = slice.dealt(*parts, dt[..., None])
        xbc, dt = rows.split([spec.conv_size // ranks, spec.heads // ranks], dim=-1)
        x, b, c = self.conv1d(xbc, None, documents.bounds(), share=(slice.rank, ranks))
        of_heads = (p.chunk(ranks)[slice.rank] for p in (self.A_log, self.D, self.dt_bias))
        limit, bounds = spec.dt_limit, documents.boundaries()
        y, _ = ssd(x, dt, b, c, *of_heads, dt_limit=limit, cu_seqlens=bounds)
        return slice.to_tokens(y)

    def _branches(self, operands: list[Tensor], documents: Tensor, states: States | None) -> Any:
        xbc, dt = operands
        return self._with_states(xbc, dt, documents, document_bounds(documents, len(xbc)), states)

    def _with_states(
        self,
        xbc: Tensor,
        dt: Tensor,
        documents: Tensor | None,
        bounds: Tensor | None,
        states: States | None,
    ) -> tuple[Tensor, States]:
        """The same with all states behind the documents."""
        y, state = self._mix(xbc, dt, documents, bounds, states)
        return y, (self.conv1d.next_state(xbc, documents, None if states is None else states[0]), state)

    def _continue(self, xbc: Tensor, dt: Tensor, sequences: Sequences) -> Tensor:
        """y [T, heads, head_dim] of new tokens, whose documents are the rows of a cache."""
        cache = sequences.cache
        assert cache is not None
        before = cache.states(self.layer)
        if (real := cache.real_tokens()) is not None:
            tokens, rows = real
            bounds = document_bounds(rows, len(tokens))
            y, behind = self._with_states(xbc[tokens], dt[tokens], rows, bounds, before)
            y = y.new_zeros(len(xbc), *y.shape[1:]).index_copy(0, tokens, y)
        elif before is not None and cache.newest == 1 and len(xbc) == len(before[0]):
            (x, b, c), conv_state = self.conv1d.step(xbc, before[0])
            of_heads = self.A_log, self.D, self.dt_bias
            y, state = ssd_step(x, dt, b, c, *of_heads, before[1], dt_limit=self.spec.dt_limit)
            behind = conv_state, state
        else:
            documents = sequences.documents
            y, behind = self._with_states(xbc, dt, documents.boundaries(), documents.bounds(), before)
        cache.keep_states(self.layer, *behind)
        return y

    def new_cache(
        self, batch: int, max_length: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Room for the convolution's last inputs [batch, width - 1, conv_size], and for states [batch, heads,
        head_dim, state] in float32.
        """
        spec = self.spec
        inputs = torch.zeros(batch, spec.conv - 1, spec.conv_size, device=device, dtype=dtype)
        wide = torch.promote_types(dtype, torch.float32)
        shape = batch, spec.heads, spec.head_dim, spec.state
        return inputs, torch.zeros(shape, device=device, dtype=wide)

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Of a token: x, B and C before the convolution, z, dt and y; with `all` also x, B and C behind it
        and the norm's output.
        """
        spec = self.spec
        kept = spec.conv_size + 2 * spec.size + spec.heads
        return itemsize * (kept + (spec.conv_size + spec.size if level == "all" else 0))

    def backward_bytes(self, itemsize: int) -> int:
        """Of a token, the most during the backward pass of the scan beside what `lean` keeps, in float32 as
        the plain form computes: for every head its products within a chunk and B and C by head, for every
        chunk and head three states, and the same again for gradients.
        """
        spec = self.spec
        by_head = 3 * CHUNK + 4 * spec.state + 4 * spec.head_dim + 3 * spec.head_dim * spec.state // CHUNK
        return itemsize * (2 * spec.size + 2 * spec.conv_size) + 8 * spec.heads * by_head

    def extra_repr(self) -> str:
        spec = self.spec
        return f"heads={spec.heads}, head_dim={spec.head_dim}, groups={spec.groups}, state={spec.state}"
