"""Blocks on several residual streams."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.blocks.block import IDS, Block, keys_and_values, own_input
from liger_models.layers.blocks.per_layer_input import PerLayerInput
from liger_models.layers.parts.altup import AltUp, Laurel
from liger_models.layers.parts.gated_streams import GatedConnection
from liger_models.layers.parts.hyper_connection import HyperConnection
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.recompute.activation_memory import RERUN, ActivationMemory
from liger_models.layers.recurrent.ngrams import NgramInput
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import (
    AltUpSpec,
    BlockSpec,
    GatedNormSpec,
    GatedStreamsSpec,
    MoESpec,
    NormSpec,
    RecurrentSpec,
    SharedAttentionSpec,
    StreamsSpec,
)


class HyperConnectedBlock(Block):
    """A pre-norm layer whose branches read a weighted sum of several residual streams, and are added to
    mixtures of them (layers/parts/hyper_connection.py). With n streams the hidden states are [T, n H].

    Raises:
        ValueError: a spec without streams.
    """

    supports = ("streams",)
    needs = ("mixer", "mlp", "streams")

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__(hidden_size, spec, layer, attention)
        if not isinstance(spec.streams, StreamsSpec):
            raise ValueError(f"layers of topology {spec.topology!r} have a StreamsSpec, found {spec.streams}")
        self.streams = spec.streams
        self.input_layernorm = make_norm(hidden_size, spec.norm)
        self.post_attention_layernorm = make_norm(hidden_size, spec.norm)
        self.attn_hc = HyperConnection(hidden_size, spec.streams)
        self.ffn_hc = HyperConnection(hidden_size, spec.streams)
        if isinstance(spec.mlp, MoESpec) and spec.mlp.by_token_id is not None:
            self.reads = (IDS,)

    def forward(self, x: Tensor, residual: Tensor | None, sequences: Sequences, *read: Tensor) -> Any:
        assert residual is None
        h, *ways = self.attn_hc(x)
        y = self._scaled(self.token_mixer(self.input_layernorm(h), sequences))
        x = self.attn_hc.add(x, y, *ways)
        h, *ways = self.ffn_hc(x)
        h = self.post_attention_layernorm(h)
        y = self.mlp(h, sequences, ids=read[0]) if read else self.mlp(h, sequences)
        return self.ffn_hc.add(x, self._scaled(y), *ways), None

    def stream_bytes(self, itemsize: int) -> int:
        """Bytes per token of all residual streams."""
        return self.streams.count * super().stream_bytes(itemsize)

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Bytes per token as of other layers, and of two connections the streams, the branches' outputs, and
        in float32 the weights, if streams are mixed also M, and what they are computed from.
        """
        kept = super().activation_bytes(level, itemsize)
        if level in RERUN:
            return kept
        n = self.streams.count
        weights = n * (2 * n + 3 if self.streams.iterations else 3) + 1
        return kept + 2 * (self.stream_bytes(itemsize) + itemsize * self.hidden_size + 4 * weights)

    def connection_bytes(self, itemsize: int) -> int:
        """Bytes per token of gradients in the backward pass of a connection: of the streams after it, of
        those before it by both their ways, and of the branch's input. Streams that are not mixed have the
        first as the gradient by one of the ways.
        """
        ways = 3 if self.streams.iterations else 2
        return itemsize * (ways * self.streams.count + 1) * self.hidden_size

    def norm_outputs(self) -> int:
        """Number of norm outputs [T, H] that only the level `all` keeps."""
        return 2

    def _branch_inputs(self, level: ActivationMemory) -> int:
        return 2 if level == "all" else 0


class GatedStreamsBlock(Block):
    """A layer whose branches read a gated mean of several residual streams, and are added to each of them
    with a weight (layers/parts/gated_streams.py). With n streams the hidden states are [T, n H]. Before the
    branches it may add embeddings of n-grams to the streams (layers/recurrent/ngrams.py).

    Raises:
        ValueError: a spec without such streams, with norms of another kind, or with n-grams and a mixer that
            has no state.
    """

    supports = ("streams", "ngrams")
    needs = ("mixer", "mlp", "streams")

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__(hidden_size, spec, layer, attention)
        streams, norm = spec.streams, spec.norm
        if not isinstance(streams, GatedStreamsSpec) or not isinstance(norm, NormSpec):
            raise ValueError(
                f"layers of topology {spec.topology!r} have a GatedStreamsSpec and a NormSpec, found "
                f"{streams} and {norm}"
            )
        if spec.ngrams is not None and not isinstance(spec.mixer, RecurrentSpec):
            raise ValueError("n-grams belong to layers whose mixer has a state, found none")
        self.ple = None
        if spec.ngrams is not None:
            self.reads = (IDS,)
            self.ple = NgramInput(hidden_size, streams, spec.ngrams, norm, layer)
        self.attn_hyper_connection = GatedConnection(hidden_size, streams, norm)
        self.mlp_hyper_connection = GatedConnection(hidden_size, streams, norm)

    def forward(self, x: Tensor, residual: Tensor | None, sequences: Sequences, *read: Tensor) -> Any:
        assert residual is None
        if self.ple is not None:
            x = self.ple(x, *read, sequences)
        h, weights = self.attn_hyper_connection(x)
        x = self.attn_hyper_connection.add(x, self._scaled(self.token_mixer(h, sequences)), weights)
        h, weights = self.mlp_hyper_connection(x)
        return self.mlp_hyper_connection.add(x, self._scaled(self.mlp(h, sequences)), weights), None

    def new_cache(
        self, batch: int, max_length: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """As for other layers, followed by the states of n-grams."""
        tokens, states = super().new_cache(batch, max_length, device, dtype)
        return tokens, states if self.ple is None else (*states, *self.ple.new_cache(batch, device, dtype))

    def stream_bytes(self, itemsize: int) -> int:
        """Bytes per token of all residual streams."""
        assert self.spec.streams is not None
        return self.spec.streams.count * super().stream_bytes(itemsize)

    def connection_bytes(self, itemsize: int) -> int:
        """Bytes per token of gradients in the backward pass of a connection: of the streams after it, of
        their norms and of the logits of their gates, and of the branch's input; and these norms and logits.
        """
        assert self.spec.streams is not None
        return itemsize * (5 * self.spec.streams.count + 1) * self.hidden_size

    def norm_outputs(self) -> int:
        """Number of norm outputs [T, H] that only the level `all` keeps: connections count theirs."""
        return 0

    def _branch_inputs(self, level: ActivationMemory) -> int:
        return 2


class AltUpBlock(Block):
    """A layer that computes the prediction P of its active stream, and corrects all streams by the result y
    (layers/parts/altup.py); with n streams the hidden states are [T, n H] (Gemma 3n):

        x = norm(P),     h = (P + norm(attention(x)) + x + norm(right(left(x)))) / sqrt(2)
        y = h + norm(mlp(norm(h)))

    Streams but the first also get norm(own(s X)), with X the corrected active stream, s a learned vector, and
    `own` the branch of the layer's own input (layers/blocks/per_layer_input.py).

    Raises:
        ValueError: a spec without one of these parts, or with other streams.
    """

    supports = ("per_layer_input", "keys of another layer", "streams", "laurel_rank")
    needs = ("mixer", "mlp", "streams", "laurel_rank", "per_layer_input")
    norms_after_branches = 2

    def __init__(self, hidden_size: int, spec: BlockSpec, layer: int, attention: AttentionBackend = "auto"):
        super().__init__(hidden_size, spec, layer, attention)
        if not isinstance(spec.streams, AltUpSpec):
            raise ValueError(f"layers of topology 'altup' have an AltUpSpec, found {spec.streams}")
        assert spec.laurel_rank is not None
        assert spec.per_layer_input is not None
        assert not isinstance(spec.norm, GatedNormSpec)  # refused above
        self.altup = AltUp(hidden_size, spec.streams, spec.norm)
        self.laurel = Laurel(hidden_size, spec.laurel_rank, spec.norm)
        self.per_layer_input = PerLayerInput(hidden_size, spec.per_layer_input)
        self.input_layernorm = make_norm(hidden_size, spec.norm)
        self.post_attention_layernorm = make_norm(hidden_size, spec.norm)
        self.pre_feedforward_layernorm = make_norm(hidden_size, spec.norm)
        self.post_feedforward_layernorm = make_norm(hidden_size, spec.norm)
        self.post_per_layer_input_norm = make_norm(hidden_size, spec.norm)
        self.reads_keys = isinstance(spec.mixer, SharedAttentionSpec)
        self.reads = (own_input(layer),)
        if isinstance(spec.mixer, SharedAttentionSpec):
            self.reads = (*keys_and_values(spec.mixer.keys_of), *self.reads)

    def forward(
        self, x: Tensor, residual: Tensor | None, sequences: Sequences, *read: Tensor
    ) -> tuple[Any, ...]:
        assert residual is None
        streams = x
        predicted, mixture = self.altup.predict(streams)
        x = self.input_layernorm(predicted)
        keys = read[:2] if self.reads_keys else (True,) if self.makes else ()
        attended = self.token_mixer(x, sequences, *keys)
        attended, *made = attended if self.makes else (attended,)
        attended = predicted + self._scaled(self.post_attention_layernorm(attended))
        h = (attended + self.laurel(x)) * 2**-0.5
        y = h + self._scaled(self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(h))))
        change, shares, corrected = self.altup.correct(predicted, y)
        own = self.post_per_layer_input_norm(self.per_layer_input(corrected, read[-1]))
        return (self.altup.add(streams, change, shares, mixture, own), None, *made)

    def stream_bytes(self, itemsize: int) -> int:
        """Bytes per token of all residual streams."""
        assert isinstance(self.spec.streams, AltUpSpec)
        return self.spec.streams.count * super().stream_bytes(itemsize)

    def connection_bytes(self, itemsize: int) -> int:
        """Bytes per token of gradients at the end of the backward pass: of the streams after the layer, of
        those before it by the mixture, the prediction and the router, the sum of two of these, and two of one
        stream.
        """
        assert isinstance(self.spec.streams, AltUpSpec)
        return itemsize * (5 * self.spec.streams.count + 2) * self.hidden_size

    def _branch_inputs(self, level: ActivationMemory) -> int:
        # Outputs of norms before products, both routers' among them, the change, and the corrected stream.
        return 7 if level == "all" else 0

    def _shared_kv_bytes(self, itemsize: int) -> int:
        own: int = self.per_layer_input.activation_bytes("checkpoint", itemsize)
        return super()._shared_kv_bytes(itemsize) + own
