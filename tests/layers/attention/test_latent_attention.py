"""Latent attention against that of transformers, and against itself in other forms."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from liger_models.convert.checkpoints.layout import Layout, canonical_forms
from liger_models.kernels._dispatch import interpret
from liger_models.layers.attention import latent_attention
from liger_models.layers.attention.latent_attention import LatentAttention
from liger_models.layers.sequences.cache import KVCache
from liger_models.layers.sequences.rotary import rotary_tables
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import IndexerSpec, LatentAttentionSpec, RopeSpec

HIDDEN, LENGTH, ROWS = 20, 9, 2
YARN = RopeSpec(
    6,
    type="yarn",
    factor=4.0,
    original_max_position_embeddings=8,
    max_position_embeddings=32,
    mscale=1.2,
    mscale_all_dim=0.7,
)
SPEC = LatentAttentionSpec(
    num_attention_heads=3,
    qk_nope_head_dim=10,
    qk_rope_head_dim=6,
    v_head_dim=7,
    kv_lora_rank=8,
    scale=0.3,
    q_lora_rank=12,
    rope=RopeSpec(6, interleaved=True),
)
SPECS = {
    "interleaved": SPEC,
    "halves": replace(SPEC, rope=RopeSpec(6)),
    "yarn": replace(SPEC, rope=YARN),
    "biases": replace(SPEC, bias=True),
    "no latent of queries": replace(SPEC, q_lora_rank=None),
    "no latent of queries, biases": replace(SPEC, q_lora_rank=None, bias=True),
}


def layer_of(spec: LatentAttentionSpec, dtype: torch.dtype = torch.float64) -> LatentAttention:
    torch.manual_seed(0)
    layer = LatentAttention(HIDDEN, spec).to(dtype)
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(std=p.shape[-1] ** -0.5 if p.dim() > 1 else 1.0)
    return layer


def sequences_of(spec: LatentAttentionSpec, shape: tuple[int, int], **options) -> Sequences:
    sequences = Sequences.from_call(shape, torch.device("cpu"), **options)
    sequences.prepare_rotary(spec.ropes)
    return sequences


def theirs_of(spec: LatentAttentionSpec):
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = modeling.DeepseekV3Config(
        hidden_size=HIDDEN,
        num_attention_heads=spec.num_attention_heads,
        num_key_value_heads=spec.num_attention_heads,
        q_lora_rank=spec.q_lora_rank,
        kv_lora_rank=spec.kv_lora_rank,
        qk_nope_head_dim=spec.qk_nope_head_dim,
        qk_rope_head_dim=spec.qk_rope_head_dim,
        v_head_dim=spec.v_head_dim,
        rope_interleave=spec.rope.interleaved,
        attention_bias=spec.bias,
    )
    config._attn_implementation = "sdpa"  # its softmax is in float64, unlike the eager one
    layer = modeling.DeepseekV3Attention(config, 0)
    layer.scaling = spec.scale
    for name, norm in list(layer.named_children()):  # theirs always compute in float32
        if name.endswith("layernorm"):
            setattr(layer, name, torch.nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon))
    return layer.double()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_results_gradients_and_names_match_transformers(spec):
    ours, theirs = layer_of(spec), theirs_of(spec)
    forms = Layout(root="").weight_map(canonical_forms(ours))
    written: dict[str, Tensor] = {}
    for name, tensor in ours.state_dict().items():
        written |= forms[name].write(tensor)
    theirs.load_state_dict(written)  # strict: exactly these names

    x = torch.randn(ROWS, LENGTH, HIDDEN, dtype=torch.float64, requires_grad=True)
    tables = rotary_tables(spec.rope, torch.arange(LENGTH))
    cos, sin = (torch.cat([table, table], -1).double().expand(ROWS, -1, -1) for table in tables)
    mask = torch.full((LENGTH, LENGTH), -torch.inf, dtype=torch.float64).triu(1)
    expected, _ = theirs(x, (cos, sin), mask[None, None])
    found = ours(x.flatten(0, 1), sequences_of(spec, (ROWS, LENGTH))).view_as(expected)
    # The reference rotates in float64 with the same tables; sums have at most 21 terms.
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)

    upstream = torch.randn_like(expected)
    expected.backward(upstream)
    of_x, expected_of_x = torch.autograd.grad(found, x, upstream, retain_graph=True)[0], x.grad
    torch.testing.assert_close(of_x, expected_of_x, rtol=1e-10, atol=1e-11)
    gradients: dict[str, Tensor] = {}
    names, parameters = zip(*ours.named_parameters(), strict=True)
    for name, gradient in zip(names, torch.autograd.grad(found, parameters, upstream), strict=True):
        gradients |= forms[name].write(gradient)
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-11)


def test_the_norms_of_the_latents_have_the_eps_of_the_spec():
    spec = replace(SPEC, norm=replace(SPEC.norm, eps=0.5))
    x, sequences = torch.randn(LENGTH, HIDDEN, dtype=torch.float64), sequences_of(SPEC, (1, LENGTH))
    layer, other = layer_of(spec), layer_of(SPEC)
    assert not torch.allclose(layer(x, sequences), other(x, sequences))
    for norm in (layer.q_a_layernorm, layer.kv_a_layernorm):
        norm.eps = 1e-6
    torch.testing.assert_close(layer(x, sequences), other(x, sequences), rtol=0, atol=0)


def test_an_indexer_rotates_the_last_dimensions_and_weighs_heads_in_float32_if_the_spec_says_so():
    """Hunyuan 4's, of a layer in bfloat16."""
    indexer = IndexerSpec(4, 10, 3, rotates_last=True, norm_eps=0.5, float32_weights=True)
    spec = replace(SPEC, rope=RopeSpec(6), indexer=indexer)
    own = layer_of(spec, torch.bfloat16).indexer
    own.weights_proj.float()
    with torch.no_grad():
        own.weights_proj.weight.normal_()
    x, sequences = torch.randn(LENGTH, HIDDEN).bfloat16(), sequences_of(spec, (1, LENGTH))
    q_latent = torch.randn(LENGTH, 12).bfloat16()
    q, weights = own._queries_and_weights(x, q_latent, sequences)
    # The same products in another order of sums, in float32.
    torch.testing.assert_close(weights, x.float() @ own.weights_proj.weight.mT / 2, rtol=1e-5, atol=1e-5)
    projected = own.wk(x).float()
    normed = torch.nn.functional.layer_norm(
        projected, (10,), own.k_norm.weight.float(), own.k_norm.bias.float(), eps=0.5
    )
    cos, sin = rotary_tables(spec.rope, torch.arange(LENGTH))
    rest, first, second = normed.split([4, 3, 3], dim=-1)
    expected = torch.cat([rest, first * cos - second * sin, second * cos + first * sin], -1)
    # bfloat16 rounds the norm's output and the rotated dimensions, by at most 2^-9 of each.
    torch.testing.assert_close(own.keys(x, sequences).float(), expected, rtol=2**-7, atol=2**-7)
    assert torch.equal(q[..., :4], own.wq_b(q_latent).unflatten(-1, (4, 10))[..., :4])


def test_the_scale_of_an_indexer_multiplies_its_scores_in_the_loss():
    """As larger queries would: scores are linear in them."""
    spec = LatentAttentionSpec(2, 4, 4, 4, 6, 0.3, q_lora_rank=5, indexer=IndexerSpec(3, 8, 20, scale=2.0))
    scaled = LatentAttention(16, spec).double().indexer
    plain = LatentAttention(16, replace(spec, indexer=replace(spec.indexer, scale=1.0))).double().indexer
    plain.load_state_dict(scaled.state_dict())
    x, q_latent, q, k = (torch.randn(9, *shape).double() for shape in ((16,), (5,), (2, 8), (2, 8)))
    sequences = Sequences.from_call((1, 9), torch.device("cpu"))
    call = x, q_latent, (q, k, None), 0.3, None, sequences
    found, without = scaled.loss(*call), plain.loss(*call)
    plain.wq_b.weight.data.mul_(2)
    torch.testing.assert_close(found, plain.loss(*call))
    assert abs(found - without) > 1e-3 * found


def test_packed_documents_stay_separate():
    layer = layer_of(SPEC)
    x = torch.randn(12, HIDDEN, dtype=torch.float64)
    found = layer(x, sequences_of(SPEC, (1, 12), cu_seqlens=torch.tensor([0, 5, 6, 12])))
    alone = [layer(part, sequences_of(SPEC, (1, len(part)))) for part in x.split([5, 1, 6])]
    torch.testing.assert_close(found, torch.cat(alone), rtol=1e-12, atol=1e-12)


def test_without_positions_nothing_is_rotated():
    spec = replace(SPEC, rope=None)
    layer, turning = layer_of(spec), layer_of(SPEC)
    x = torch.randn(3, HIDDEN, dtype=torch.float64)
    first = layer(x, sequences_of(spec, (1, 3)))
    still = sequences_of(SPEC, (1, 3))
    no_angle = torch.ones(3, 3), torch.zeros(3, 3)  # cosines and sines
    still.positions = replace(still.positions, rotary={SPEC.rope: no_angle})
    torch.testing.assert_close(first, turning(x, still), rtol=1e-12, atol=1e-12)


def test_values_are_not_padded_for_the_product(monkeypatch):
    seen = []
    attend = latent_attention.attend

    def noting(*operands, **options):
        seen.append(operands[:3])
        return attend(*operands, **options)

    monkeypatch.setattr(latent_attention, "attend", noting)
    layer_of(SPEC)(torch.randn(4, HIDDEN, dtype=torch.float64), sequences_of(SPEC, (1, 4)))
    ((q, k, v),) = seen
    assert [x.shape for x in (q, k, v)] == [(4, 3, 16), (4, 3, 16), (4, 3, 7)]
    assert (
        v.untyped_storage().nbytes() == 4 * 3 * (10 + 7) * 8
    )  # next to the unrotated part of the keys, without a copy


@pytest.mark.parametrize("spec", [SPEC, SPECS["no latent of queries"]], ids=["", "no latent of queries"])
def test_generation_caches_latents_and_equals_a_full_pass(spec):
    layer = layer_of(spec)
    x = torch.randn(7, HIDDEN, dtype=torch.float64)
    room = layer.new_cache(1, 7, x.device, x.dtype)
    assert [tuple(tensor.shape) for tensor in room] == [(1, 7, 8), (1, 7, 6)]
    cache, found = KVCache([room], 1, x.device), []
    for start, end in ((0, 5), (5, 6), (6, 7)):
        positions = cache.reserve(torch.tensor([end - start]), end - start)
        step = sequences_of(spec, (1, end - start), position_ids=positions)
        step.cache = cache
        found.append(layer(x[start:end], step))
    expected = layer(x, sequences_of(spec, (1, 7)))
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here the kernels are compiled")
@pytest.mark.parametrize("documents", [None, torch.tensor([0, 5, 9])])
def test_the_kernels_give_the_same(documents):
    layer = layer_of(SPEC)
    x = torch.randn(9, HIDDEN, dtype=torch.float64)
    expected = layer(x, sequences_of(SPEC, (1, 9), cu_seqlens=documents))
    with interpret():
        found = layer.float()(x.float(), sequences_of(SPEC, (1, 9), cu_seqlens=documents))
    # float32 against float64: sums of up to 21 terms in five consecutive products
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5 * expected.abs().max().item())
