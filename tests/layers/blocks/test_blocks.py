"""Layers of every kind: the bytes that they report are the bytes that autograd keeps; fresh parameters have
values.
"""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from live_bytes import LiveBytes, as_on_a_gpu

from liger_models.layers.blocks import BLOCKS as TOPOLOGIES
from liger_models.layers.model.causal_lm import CausalLM
from liger_models.layers.recompute import activation_memory
from liger_models.layers.recompute.activation_memory import Kept
from liger_models.layers.specs import (
    AltUpSpec,
    AttentionSpec,
    BlockSpec,
    ConvolvedAttentionSpec,
    DifferentialAttentionSpec,
    GatedDeltaSpec,
    GatedNormSpec,
    GatedStreamsSpec,
    LatentAttentionSpec,
    LayerNormSpec,
    LightConvSpec,
    LightningSpec,
    LocalAttentionSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    NgramSpec,
    NormSpec,
    PerLayerInputSpec,
    QKNormSpec,
    QueryScaleSpec,
    RGLRUSpec,
    RopeSpec,
    SharedAttentionSpec,
    SharedSpec,
    SparseMixerSpec,
    SSDSpec,
    StreamsSpec,
    TernarySpec,
)

TOKENS, HIDDEN = 12, 32
# As many key/value heads as heads: with fewer, attention repeats them on a CPU but not on a GPU.
ATTENTION = AttentionSpec(4, 4, 16, 0.25, RopeSpec(16, max_position_embeddings=64))
DIFFERENTIAL = DifferentialAttentionSpec(4, 4, 16, 0.25, RopeSpec(16, max_position_embeddings=64), 0.5)
LATENT = LatentAttentionSpec(
    *(4, 10, 6, 12, 20, 0.25, 28),
    rope=RopeSpec(6, max_position_embeddings=64),
    gates="channels",
    sinks=True,
)
GROWING = QueryScaleSpec(0.5, 4)
CONVOLVED = ConvolvedAttentionSpec(4, 4, 16, 0.25, NormSpec(), extent=5, distance_dim=3, window=5)
PRE_NORM = BlockSpec(ATTENTION, MLPSpec(40), NormSpec())
EXPERTS = MoESpec(4, 2, 12)
ROUTED = {
    "experts": EXPERTS,
    "router's loss": replace(EXPERTS, aux_loss_coef=0.1),
    "shared expert": replace(EXPERTS, shared_expert=MLPSpec(20), shared_gate=True),
    "normalised experts": replace(EXPERTS, shared_expert=MLPSpec(20), output_norm=NormSpec()),
    "drawn experts": replace(EXPERTS, sparse_mixer=SparseMixerSpec(0.4), input_noise=0.1),
    "weighted inputs": replace(EXPERTS, weighted="inputs", shared_expert=MLPSpec(20)),
    "all in float32": replace(EXPERTS, float32_router=True, score="sigmoid", correction_bias=True),
}
CONFORMER = BlockSpec(
    LocalAttentionSpec(4, 8, q_scale=0.5, k_scale=2.0, window=3, softcap=5.0),
    MLPSpec(40, gated=False),
    NormSpec(),
    "conformer_sandwich",
    second_mixer=LightConvSpec(3, NormSpec(), bound=9.0),
    bound=9.0,
)
BLOCKS = {
    "pre_norm": PRE_NORM,
    "layer scale": replace(PRE_NORM, topology="layer_scale"),
    "several streams": replace(PRE_NORM, topology="hyper_connected", streams=StreamsSpec(3, 4)),
    "streams that are not mixed": replace(
        PRE_NORM, topology="hyper_connected", streams=StreamsSpec(3, 0), mixer=LATENT
    ),
    "gated streams": replace(PRE_NORM, topology="gated_streams", streams=GatedStreamsSpec(3, 5)),
    "n-grams": replace(
        PRE_NORM,
        mixer=GatedDeltaSpec(2, 4, 8, 8),
        topology="gated_streams",
        streams=GatedStreamsSpec(2, 5),
        ngrams=NgramSpec(3, 2, 16, 1, (5, 7, 11, 13), (3, 5, 7), 36),
    ),
    "altup": replace(
        PRE_NORM,
        topology="altup",
        mlp=MLPSpec(40, "gelu_tanh", sparsity=0.6),
        streams=AltUpSpec(3, 1, 0.02),
        laurel_rank=5,
        per_layer_input=PerLayerInputSpec(6, "gelu_tanh"),
    ),
    "sandwich": replace(PRE_NORM, topology="sandwich"),
    "a sandwich of scaled sums": replace(
        PRE_NORM, topology="sandwich", branch_scales=(0.5, 1.0, 2.0), stream_scales=(2.0, 0.5)
    ),
    "scaled sandwich": replace(PRE_NORM, topology="scaled_sandwich"),
    "own inputs": replace(
        PRE_NORM, topology="scaled_sandwich", per_layer_input=PerLayerInputSpec(6, "gelu_tanh")
    ),
    "experts with an MLP": replace(
        PRE_NORM,
        topology="scaled_sandwich_with_experts",
        experts=replace(EXPERTS, router_norm_eps=1e-6, expert_scale=True),
    ),
    "post_norm": replace(PRE_NORM, topology="post_norm"),
    "a norm of the MLP alone": replace(PRE_NORM, topology="mlp_norm"),
    "norms of sums": replace(PRE_NORM, topology="normed_sums"),
    "parallel": replace(PRE_NORM, topology="parallel"),
    "parallel after two norms": replace(PRE_NORM, topology="parallel_two_norms"),
    "attention alone": replace(PRE_NORM, topology="one_part", mlp=None),
    "mlp alone": replace(PRE_NORM, topology="one_part", mixer=None),
    "experts alone": replace(PRE_NORM, topology="one_part", mixer=None, mlp=EXPERTS),
    "layer norm": replace(PRE_NORM, norm=LayerNormSpec()),
    "norms with gates": replace(PRE_NORM, norm=GatedNormSpec(NormSpec(), 5)),
    "a norm with a gate": replace(PRE_NORM, norm=GatedNormSpec(NormSpec(), 5), plain_mlp_norm=True),
    "gates next to latent queries": replace(
        PRE_NORM, mixer=replace(LATENT, gates=None, gated=True, raw_q_latent=True)
    ),
    "norms of rotated keys, and a window": replace(
        PRE_NORM, mixer=replace(LATENT, gates="heads", k_rope_norm=True, window=5)
    ),
    "plain mlp": replace(PRE_NORM, mlp=MLPSpec(40, "relu2", gated=False)),
    "norms before output projections": replace(
        PRE_NORM,
        mixer=replace(ATTENTION, out_norm=NormSpec()),
        mlp=MLPSpec(40, "relu2", down_norm=NormSpec()),
    ),
    "scaled branches": replace(PRE_NORM, residual_scale=0.5),
    "branches scaled apart": replace(PRE_NORM, branch_scales=(0.5, 1.0, 2.0)),
    "streams from norms": replace(
        PRE_NORM, topology="from_norms", stream_scales=(2.0, 0.5), branch_scales=(0.5, 1.0, 1.5)
    ),
    "gated recurrence": replace(PRE_NORM, mixer=RGLRUSpec(2, 16)),
    "lightning attention": replace(PRE_NORM, mixer=LightningSpec((0.5, 0.02), 16)),
    "norms of heads": replace(PRE_NORM, mixer=replace(ATTENTION, qk_norm=QKNormSpec())),
    "norms of all heads": replace(
        PRE_NORM, mixer=replace(ATTENTION, qk_norm=QKNormSpec(scope="all_heads", before_rope=False))
    ),
    "norms of values": replace(PRE_NORM, mixer=replace(ATTENTION, qk_norm=QKNormSpec(values=True))),
    "values that are keys": replace(
        PRE_NORM, mixer=replace(ATTENTION, qk_norm=QKNormSpec(values=True), values_are_keys=True)
    ),
    "narrow values": replace(PRE_NORM, mixer=replace(ATTENTION, v_head_dim=12, gates="channels")),
    "narrow values after norms": replace(
        PRE_NORM, mixer=replace(ATTENTION, v_head_dim=12, qk_norm=QKNormSpec())
    ),
    "differential attention": replace(PRE_NORM, mixer=DIFFERENTIAL),
    "convolved attention": replace(PRE_NORM, topology="convolved", mixer=CONVOLVED),
    "convolved experts, and queries that grow": replace(
        PRE_NORM,
        topology="convolved",
        mixer=replace(CONVOLVED, window=None, query_scale=GROWING),
        mlp=replace(EXPERTS, score="sigmoid", float32_router=True, sink_experts=2),
    ),
    "without positions": replace(PRE_NORM, mixer=replace(ATTENTION, rope=None)),
    "norms without weights": replace(
        PRE_NORM, mixer=replace(ATTENTION, qk_norm=QKNormSpec(scope="unweighted", before_rope=False))
    ),
    "gates by channel": replace(PRE_NORM, mixer=replace(ATTENTION, gates="channels")),
    "gates with biases": replace(PRE_NORM, mixer=replace(ATTENTION, gates="channels", gate_bias=True)),
    "queries that grow as a power": replace(
        PRE_NORM, mixer=replace(ATTENTION, query_scale=QueryScaleSpec(0.1, 4, 1, power=True))
    ),
    "softplus gates by head": replace(PRE_NORM, mixer=replace(ATTENTION, gates="heads", softplus_gates=True)),
    "clamped projections": replace(PRE_NORM, mixer=replace(ATTENTION, qkv_limit=0.1)),
    "layer norm without parameters": replace(PRE_NORM, norm=LayerNormSpec(bias=False, weighted=False)),
    "norm without a weight": replace(PRE_NORM, norm=NormSpec(weighted=False)),
    "chunks": replace(PRE_NORM, mixer=replace(ATTENTION, chunk=7)),
    "queries that grow": replace(PRE_NORM, mixer=replace(ATTENTION, query_scale=GROWING)),
    "queries that grow without positions": replace(
        PRE_NORM, mixer=replace(ATTENTION, rope=None, query_scale=GROWING)
    ),
    "scaled queries after a norm": replace(
        PRE_NORM, mixer=replace(ATTENTION, qk_norm=QKNormSpec(), query_scale=GROWING)
    ),
    **{name: replace(PRE_NORM, mlp=mlp) for name, mlp in ROUTED.items()},
    "conformer_sandwich": CONFORMER,
    "clipped conformer": replace(
        CONFORMER,
        mixer=replace(CONFORMER.mixer, clipped=True),
        mlp=replace(CONFORMER.mlp, clipped=True),
        second_mixer=replace(CONFORMER.second_mixer, clipped=True),
    ),
}


SHARED = SharedAttentionSpec(4, 4, 16, 0.25, 0, ATTENTION.rope, q_norm=NormSpec())


LEARNED = RopeSpec(6, interleaved=True, learned=True)
SCALED_LATENT = LatentAttentionSpec(4, 10, 6, 12, 20, 0.25, rope=LEARNED, learned_query_scale=True)


def model_of(*blocks: BlockSpec, ternary: TernarySpec | None = None, **options) -> CausalLM:
    ids = 61 if blocks[0].per_layer_input else None
    spec = ModelSpec(61, HIDDEN, blocks, NormSpec(), per_layer_vocab_size=ids, ternary=ternary)
    return CausalLM(spec, **options)


def kept_bytes(blocks: tuple[BlockSpec, ...], level: str, ternary: TernarySpec | None = None) -> int:
    torch.manual_seed(0)
    model = model_of(*blocks, ternary=ternary, activation_memory=level)
    model.reset_parameters()
    ids = torch.randint(61, (1, TOKENS))
    saved = weakref.WeakSet()

    class Noted(Kept):
        def __init__(self, tensor):
            super().__init__(tensor)
            saved.add(self)

    # At these levels the model's own hooks get all tensors that its layers keep, and wrap them in Kept
    # objects.
    with as_on_a_gpu(), LiveBytes(zero=True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(activation_memory, "Kept", Noted)
        loss = model(ids, labels=ids).loss
    assert loss.requires_grad
    parameters = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    storages = {k.tensor.untyped_storage().data_ptr(): k.tensor.untyped_storage().nbytes() for k in saved}
    return sum(size for place, size in storages.items() if place not in parameters)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize("level", ["lean", "mlp"])
@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_a_layer_reports_the_bytes_it_keeps(block, level):
    layer = model_of(block).layers[0]
    found = kept_bytes((block,) * 2, level) - kept_bytes((block,), level)
    unsaid = found - TOKENS * layer.activation_bytes(level, 4)
    if block.per_layer_input is not None:  # its norm runs before the layers, outside their hooks
        unsaid += TOKENS * 4 * (block.per_layer_input.size + 1)
    # Experts also keep the starts of tiles, whose number does not grow with tokens alone: the offset of each
    # expert and the end, and two numbers per tile, with at most as many tiles as rows and experts.
    spec = block.mixture
    routed = spec is not None and level == "lean"
    tiles = TOKENS * spec.experts_per_token + spec.num_experts if routed else 0
    most = 4 * (spec.num_experts + 1) + 8 * tiles if routed else 0
    if isinstance(block.mixer, DifferentialAttentionSpec):
        most += 3 * 4  # two exponentials and lambda, whatever the number of tokens
    if isinstance(block.streams, AltUpSpec):
        most += 4 * block.streams.count**2  # clamped coefficients, the same
    if isinstance(block.mixer, LocalAttentionSpec):
        # Relative positions, their projection and the scales of queries, whatever the number of tokens.
        most += 4 * ((block.mixer.window + 1) * 2 * HIDDEN + block.mixer.head_dim)
    if isinstance(block.mixer, RGLRUSpec):
        most += 4 * 2 * block.mixer.size  # states of two pieces, of fewer tokens than they have room for
    if isinstance(block.mixer, ConvolvedAttentionSpec):
        # The taps of the convolutions, whatever the number of tokens.
        most += 4 * block.mixer.conv * 2 * (block.mixer.kv_size + HIDDEN)
    assert 0 <= unsaid <= most


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize("name", ["pre_norm", "norms before output projections"])
def test_layers_that_round_their_operands_keep_no_more(name):
    blocks = (BLOCKS[name],) * 2
    assert kept_bytes(blocks, "lean", TernarySpec()) == kept_bytes(blocks, "lean")


# Topologies whose bytes are compared elsewhere.
ELSEWHERE = {
    "conformer": "its layers share a table: tests/audio/test_phi4_multimodal.py",
    "gated_cross": "tests/vision/test_memory_plan.py",
    "gated_pre_norm": "of an encoder alone: tests/vision/test_memory_plan.py",
    "shared_latents": "two layers together: see below",
    "shared_transformer": "its layers share weights: see below",
    "shortcut": "two layers in turn: see below",
    "side_by_side": "its mixers keep what they keep alone: tests/layers/blocks/test_free_blocks.py",
}


def test_the_bytes_of_every_topology_are_compared():
    assert {block.topology for block in BLOCKS.values()} | ELSEWHERE.keys() == TOPOLOGIES.keys()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize("level", ["lean", "mlp"])
@pytest.mark.parametrize("read", ["keys", "latents"])
def test_a_layer_that_reads_anothers_keys_keeps_none(read, level):
    source = replace(PRE_NORM, topology="scaled_sandwich")
    reader = replace(source, mixer=SHARED)
    if read == "latents":
        source = replace(PRE_NORM, topology="shared_latents", mixer=SCALED_LATENT)
        reader = replace(source, mixer=replace(SCALED_LATENT, latents_of=0))
    found = kept_bytes((source, reader, reader), level) - kept_bytes((source, reader), level)
    assert found == TOKENS * model_of(source, reader).layers[1].activation_bytes(level, 4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize("level", ["lean", "mlp"])
@pytest.mark.parametrize("adapts", [True, False])
def test_a_layer_reports_the_bytes_of_weights_that_it_shares(adapts, level):
    mamba = SSDSpec(4, 6, 2, 5, conv=3)
    block = replace(PRE_NORM, mixer=mamba, topology="shared_transformer", second_mixer=ATTENTION)
    blocks = tuple(replace(block, shared=SharedSpec(0, use, 3, adapts)) for use in range(2))
    found = kept_bytes(blocks, level) - kept_bytes(blocks[:1], level)
    assert found == TOKENS * model_of(*blocks).layers[1].activation_bytes(level, 4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize("level", ["lean", "mlp"])
def test_layers_around_experts_that_skip_one_report_the_bytes_they_keep(level):
    after = replace(PRE_NORM, topology="shortcut")
    both = replace(after, experts=replace(EXPERTS, identity_experts=3)), after
    found = kept_bytes(both * 2, level) - kept_bytes(both, level)
    stated = TOKENS * sum(layer.activation_bytes(level, 4) for layer in model_of(*both).layers)
    tiles = 4 * (EXPERTS.num_experts + 1) + 8 * (TOKENS * EXPERTS.experts_per_token + EXPERTS.num_experts)
    assert 0 <= found - stated <= (tiles if level == "lean" else 0)


def test_layers_share_latents_of_an_earlier_layer_that_are_alike():
    source = replace(PRE_NORM, topology="shared_latents", mixer=SCALED_LATENT)
    reader = replace(source, mixer=replace(SCALED_LATENT, latents_of=0))
    other = replace(source, mixer=replace(SCALED_LATENT, rope=None))
    alone = replace(source, topology="pre_norm")
    for blocks in ((reader, source), (alone, reader), (other, reader), (source, reader, at(reader, 1))):
        with pytest.raises(
            ValueError, match=r"reads the latents of layer \d; expected an earlier one that has"
        ):
            model_of(*blocks)
    with pytest.raises(ValueError, match="layer 2 of topology 'shared_latents' shares no latents"):
        model_of(source, reader, source)
    with pytest.raises(ValueError, match="need latent attention"):
        model_of(replace(PRE_NORM, topology="shared_latents"))


def at(reader, layer):
    """The same layer with the latents of `layer`."""
    return replace(reader, mixer=replace(reader.mixer, latents_of=layer))


def test_experts_that_skip_a_layer_need_a_next_one():
    after = replace(PRE_NORM, topology="shortcut")
    first = replace(after, experts=EXPERTS)
    for blocks in ((first,), (first, first), (first, PRE_NORM)):
        with pytest.raises(ValueError, match=r"experts of layer 0 skip a layer; expected layer 1"):
            model_of(*blocks)
    with pytest.raises(ValueError, match="layer 0 of topology 'shortcut' needs experts"):
        model_of(after)
    with pytest.raises(ValueError, match="layer 1 adds the output of experts of layer 0, which has none"):
        model_of(PRE_NORM, after)


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_every_parameter_and_buffer_has_a_fresh_value(block):
    ids = 61 if block.per_layer_input else None
    spec = ModelSpec(
        *(61, HIDDEN, (block,), NormSpec(offset=1.0)),
        initializer_range=0.3,
        head_bias=True,
        per_layer_vocab_size=ids,
    )
    model = CausalLM(spec)
    tensors = model.saved_tensors()
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
    model.reset_parameters(torch.Generator().manual_seed(0))
    for name, tensor in tensors.items():
        if tensor.dim() > 1 and not name.endswith(
            "_gate_bias"
        ):  # hundreds of draws: the tolerance is several times the error of their spread
            assert tensor.std().item() == pytest.approx(0.3, rel=0.5 if tensor.numel() < 200 else 0.2), name
        elif ".lambda_" in name or name.endswith(
            ("_hc.base", ".A_log", ".recurrent_param")
        ):  # drawn, or different by use
            assert tensor.isfinite().all(), name
        elif not tensor.is_floating_point():  # constants of hashes
            assert (tensor >= 0).all(), name
        else:
            assert tensor.unique().numel() == 1, name
    assert not any(p.any() for p in model.norm.parameters() if p.dim() == 1)
