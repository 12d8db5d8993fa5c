"""Query/key norm fused with rotary. The contract common to all operations is in test_contract.py."""

import itertools

import pytest
import torch

from liger_models.kernels import split_norm_rotary_qkv
from liger_models.kernels.rotary import qk_norm_rotary
from liger_models.kernels.rotary.qk_norm_rotary import split_norm_rotary_qkv_plain

# Options that reproduce the families' attention in transformers.
FAMILIES = {
    "qwen3": {},
    "gemma3": {"offset": 1.0, "cast": "gemma"},
    "olmo2": {"per_head": False, "cast": "float32"},
    "hunyuan": {"norm_first": False},
    "llama4": {"norm_first": False, "interleaved": True},
}
every_family = pytest.mark.parametrize("family", FAMILIES)


class Part(torch.nn.Module):
    """Replacement for a projection of transformers' attention: a slice of its input, which is qkv."""

    def __init__(self, start, end):
        super().__init__()
        self.start, self.end = start, end

    def forward(self, qkv):
        return qkv[..., self.start : self.end]


def transformers_attention(family, heads, kv_heads, head_dim):
    """Norms and rotary of a family's attention in transformers as a function of qkv; the norms' weights."""
    import transformers as hf
    from transformers.models.gemma3.modeling_gemma3 import Gemma3Attention
    from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import HunYuanDenseV1Attention
    from transformers.models.llama4.modeling_llama4 import Llama4TextAttention
    from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

    config_class, attention_class = {
        "qwen3": (hf.Qwen3Config, Qwen3Attention),
        "gemma3": (hf.Gemma3TextConfig, Gemma3Attention),
        "olmo2": (hf.Olmo2Config, Olmo2Attention),
        "hunyuan": (hf.HunYuanDenseV1Config, HunYuanDenseV1Attention),
        "llama4": (hf.Llama4TextConfig, Llama4TextAttention),
    }[family]
    captured = []

    def capture(module, q, k, v, *args, **kwargs):
        captured[:] = [x.transpose(1, 2)[0] for x in (q, k, v)]  # [S, heads, D]
        return v.transpose(1, 2), None

    hf.AttentionInterface.register("capture_qkv", capture)
    config = config_class(
        hidden_size=heads * head_dim,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-3,
        attn_implementation="capture_qkv",
    )
    attention = attention_class(config, layer_idx=0)
    ends = list(itertools.accumulate(count * head_dim for count in (heads, kv_heads, kv_heads)))
    for name, start, end in zip(("q_proj", "k_proj", "v_proj"), [0, *ends], ends, strict=False):
        setattr(attention, name, Part(start, end))
    attention.o_proj = torch.nn.Identity()
    weights = list(attention.parameters())  # only the norms have any; the queries' comes first
    for weight in weights:
        torch.nn.init.normal_(weight)

    def run(qkv, cos, sin):
        positions = torch.cat([cos, cos], -1)[None], torch.cat([sin, sin], -1)[None]
        if family == "llama4":
            positions = torch.complex(cos.float(), sin.float())[None]
        attention(qkv[None], position_embeddings=positions, attention_mask=None)
        return tuple(captured)

    return attention, weights, run


def tables(tokens, half, device="cpu"):
    angles = torch.randn(tokens, half, device=device) * 3
    return angles.cos(), angles.sin()


def gradients(outputs, inputs, upstream):
    return torch.autograd.grad(outputs, inputs, upstream)


@every_family
def test_queries_and_keys_match_transformers(family, implementation, assert_near):
    heads, kv_heads, head_dim, tokens = 4, 2, 8, 5
    _, weights, run = transformers_attention(family, heads, kv_heads, head_dim)
    qkv = torch.randn(tokens, 8 * head_dim, requires_grad=True)
    cos, sin = tables(tokens, head_dim // 2)
    pair = weights or [None, None]
    outputs = split_norm_rotary_qkv(
        qkv, *pair, cos, sin, heads, kv_heads, head_dim, eps=1e-3, **FAMILIES[family]
    )
    expected = run(qkv, cos, sin)
    upstream = [torch.randn_like(output) for output in outputs]
    ours = gradients(outputs, [qkv, *weights], upstream)
    theirs = gradients(expected, [qkv, *weights], upstream)
    # Both are float32: each has a dozen roundings in outputs, and twice as many and a sum of 20 in gradients.
    for a, b in zip(outputs, expected, strict=True):
        assert_near(a, b, 24)
    for a, b in zip(ours, theirs, strict=True):
        assert_near(a, b, 2 * (24 + 20))


@pytest.fixture
def small_tiles(request, monkeypatch):
    """Make tiles small, so that a few tokens fill several; the backward pass runs as a single program."""
    rows = request.param
    monkeypatch.setattr(qk_norm_rotary, "_forward_config", lambda *_: (rows, rows, 1))
    monkeypatch.setattr(qk_norm_rotary, "_backward_config", lambda *_: (rows, rows, 1, 1, 1))
    return rows


def check_against_truth(assert_near, heads, kv_heads, head_dim, half, tokens=3, weights=True, **options):
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, requires_grad=True)
    one = options.get("per_head", True)
    widths = [head_dim if one else count * head_dim for count in (heads, kv_heads)]
    pair = [torch.randn(width, requires_grad=True) if weights else None for width in widths]
    cos, sin = tables(tokens, half)
    arguments = (cos, sin, heads, kv_heads, head_dim)
    inputs = [x for x in (qkv, *pair) if x is not None]
    outputs = split_norm_rotary_qkv(qkv, *pair, *arguments, eps=1e-3, **options)
    upstream = [torch.randn_like(output) for output in outputs]
    wide = [None if x is None else x.detach().double().requires_grad_() for x in (qkv, *pair)]
    truth = split_norm_rotary_qkv_plain(*wide, *arguments, eps=1e-3, **options)
    true_grads = gradients(truth, [x for x in wide if x is not None], [u.double() for u in upstream])
    # As in test_contract.py: a dozen roundings, twice as many in gradients, and a sum over the weights' rows.
    for a, b in zip(outputs, truth, strict=True):
        assert_near(a, b, 12)
    for a, b in zip(gradients(outputs, inputs, upstream), true_grads, strict=True):
        assert_near(a, b, 24 + tokens * (heads if one else 1))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize(("half", "weights"), [(3, True), (5, False)])
def test_every_order_and_layout_is_correct(
    per_head, norm_first, interleaved, half, weights, interpreted, assert_near
):
    options = {"per_head": per_head, "norm_first": norm_first, "interleaved": interleaved}
    check_against_truth(assert_near, 3, 1, 10, half, weights=weights, **options)


@pytest.mark.parametrize("small_tiles", [1, 2, 4], indirect=True)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1), (5, 3)])
def test_tiles_may_hold_some_heads_of_a_token_or_heads_of_several_tokens(
    small_tiles, heads, kv_heads, interpreted, assert_near
):
    check_against_truth(assert_near, heads, kv_heads, 6, 2, offset=1.0, cast="gemma")


# Rows of a tile of keys, and the rows of one token in it: 2 and 1, 4 and 2, 8 and 4.
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (6, 2), (12, 3)])
@pytest.mark.parametrize("tokens", [1, 3])
def test_keys_of_several_tokens_share_a_tile_but_no_norm(heads, kv_heads, tokens, interpreted, assert_near):
    options = {"per_head": False, "norm_first": tokens == 1, "offset": 1.0, "cast": "gemma"}
    check_against_truth(assert_near, heads, kv_heads, 6, 2, tokens, **options)


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2)])
@pytest.mark.parametrize("per_head", [False, True])
def test_outputs_that_nobody_uses_contribute_zeros(used, per_head, interpreted, assert_near):
    qkv = torch.randn(2, 5 * 8, requires_grad=True)
    weights = [torch.randn(8 if per_head else n * 8, requires_grad=True) for n in (3, 1)]
    cos, sin = tables(2, 4)
    options = {"eps": 1e-3, "per_head": per_head}
    outputs = split_norm_rotary_qkv(qkv, *weights, cos, sin, 3, 1, 8, **options)
    upstream = [torch.randn_like(outputs[i]) for i in used]
    grads = gradients([outputs[i] for i in used], [qkv, *weights], upstream)
    everything = [torch.zeros_like(output) for output in outputs]
    for i, gradient in zip(used, upstream, strict=True):
        everything[i] = gradient
    outputs = split_norm_rotary_qkv(qkv, *weights, cos, sin, 3, 1, 8, **options)
    for a, b in zip(grads, gradients(outputs, [qkv, *weights], everything), strict=True):
        assert torch.equal(a, b)


def test_frozen_weights_change_nothing_for_the_activations(interpreted):
    qkv = torch.randn(4, 5 * 8, requires_grad=True)
    weights = [torch.randn(8, requires_grad=True) for _ in range(2)]
    cos, sin = tables(4, 4)
    upstream = [torch.randn(4, n, 8) for n in (3, 1, 1)]
    trained = split_norm_rotary_qkv(qkv, *weights, cos, sin, 3, 1, 8, eps=1e-3)
    (expected, *_) = gradients(trained, [qkv, *weights], upstream)
    frozen = split_norm_rotary_qkv(qkv, *(w.detach() for w in weights), cos, sin, 3, 1, 8, eps=1e-3)
    (grad,) = gradients(frozen, [qkv], upstream)
    assert torch.equal(grad, expected)


def test_gradients_of_any_strides_give_the_same_bits(interpreted):
    qkv = torch.randn(4, 5 * 8, requires_grad=True)
    weights = [torch.randn(8, requires_grad=True) for _ in range(2)]
    outputs = split_norm_rotary_qkv(qkv, *weights, *tables(4, 4), 3, 1, 8, eps=1e-3)
    upstream = [torch.randn_like(output) for output in outputs]
    by_head = [u.transpose(0, 1).contiguous().transpose(0, 1) for u in upstream]  # as attention gives them
    expected = torch.autograd.grad(outputs, [qkv, *weights], upstream, retain_graph=True)
    for a, b in zip(gradients(outputs, [qkv, *weights], by_head), expected, strict=True):
        assert torch.equal(a, b)


def part_that_differs_from_the_twin(family, tokens, head_dim, dtype, device):
    options = FAMILIES[family]
    widths = [head_dim * (1 if options.get("per_head", True) else count) for count in (3, 1)]
    pair = [None, None] if family == "llama4" else [torch.randn(n, device=device).to(dtype) for n in widths]
    qkv = torch.randn(tokens, 5 * head_dim, device=device).to(dtype)
    arguments = (qkv, *pair, *tables(tokens, head_dim // 2, device), 3, 1, head_dim)
    outputs = split_norm_rotary_qkv(*arguments, eps=1e-3, **options)
    plain = split_norm_rotary_qkv_plain(*arguments, eps=1e-3, **options)
    pairs = zip(outputs[:2], plain[:2], strict=True)
    return torch.cat([(a != b).flatten() for a, b in pairs]).float().mean().item()


@every_family
def test_the_kernel_rounds_where_its_twin_does(family, interpreted):
    # One rounding more or fewer would change a quarter of all elements; the order of float32 sums changes one
    # in hundreds.
    assert part_that_differs_from_the_twin(family, 4, 64, torch.float16, "cpu") < 0.02


@pytest.mark.parametrize("cast", ["llama", "gemma"])
def test_wider_weights_leave_queries_and_keys_in_the_dtype_of_the_values(cast, implementation, assert_near):
    qkv = torch.randn(4, 5 * 8).bfloat16().requires_grad_()
    weights = [torch.randn(8, requires_grad=True) for _ in range(2)]
    cos, sin = tables(4, 4)
    outputs = split_norm_rotary_qkv(qkv, *weights, cos, sin, 3, 1, 8, eps=1e-3, cast=cast)
    upstream = [torch.randn_like(output) for output in outputs]
    wide = [x.detach().double().requires_grad_() for x in (qkv, *weights)]
    truth = split_norm_rotary_qkv(*wide, cos, sin, 3, 1, 8, eps=1e-3, cast=cast)
    true_grads = gradients(truth, wide, [u.double() for u in upstream])
    for a, b in zip(outputs, truth, strict=True):
        assert a.dtype == torch.bfloat16
        assert_near(a, b, 6)  # rounded after the norm, the weight and the rotation, which may double an error
    for a, b, x in zip(gradients(outputs, [qkv, *weights], upstream), true_grads, wide, strict=True):
        bf16 = a.to(torch.bfloat16)  # float32 sums of terms, some of which were rounded to bfloat16
        assert a.dtype == (torch.bfloat16 if x is wide[0] else torch.float32)
        assert_near(bf16, b, 24)


def test_only_the_operands_and_one_number_per_norm_are_saved(interpreted):
    qkv = torch.randn(4, 5 * 8, requires_grad=True)
    weights = [torch.randn(8, requires_grad=True) for _ in range(2)]
    cos, sin = tables(4, 4)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        _, _, v = split_norm_rotary_qkv(qkv, *weights, cos, sin, 3, 1, 8, eps=1e-3)
    operands = {t.data_ptr() for t in (qkv, *weights, cos, sin)}
    assert [t.numel() for t in kept if t.data_ptr() not in operands] == [4 * (3 + 1)]
    assert v.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()


def test_mismatched_operands_are_refused():
    qkv, weight = torch.randn(4, 5 * 8), torch.randn(8)
    cos, sin = tables(4, 4)

    def run(q_weight, k_weight, heads=3, **options):
        split_norm_rotary_qkv(qkv, q_weight, k_weight, cos, sin, heads, 1, 8, eps=1e-3, **options)

    with pytest.raises(ValueError, match=r"expected \[T, 48\] for \(4 \+ 2 \* 1\) heads of 8"):
        run(weight, weight, heads=4)
    with pytest.raises(ValueError, match=r"expected \(24,\) and \(8,\) in one dtype"):
        run(weight, weight, per_head=False)
    with pytest.raises(ValueError, match="in one dtype"):
        run(weight, weight.double())
    with pytest.raises(ValueError, match="expected both or neither"):
        run(weight, None)
    with pytest.raises(ValueError, match="no weights to add it to"):
        run(None, None, offset=1.0)
    with pytest.raises(ValueError, match="expected 'llama', 'gemma' or 'float32'"):
        run(weight, weight, cast="qwen")


# On a GPU


def error_of(actual, truth):
    return (actual.double() - truth).square().mean().sqrt().item()


@pytest.mark.gpu
@every_family
def test_at_a_real_size_it_is_as_accurate_as_transformers(family):
    tokens, heads, kv_heads, head_dim = 8 * 4096, 32, 8, 128
    attention, weights, run = transformers_attention(family, heads, kv_heads, head_dim)
    attention.to("cuda", torch.bfloat16)
    qkv = torch.randn(tokens, 48 * head_dim, device="cuda").bfloat16().requires_grad_()
    cos, sin = (table.bfloat16() for table in tables(tokens, head_dim // 2, "cuda"))
    arguments = (cos.float(), sin.float(), heads, kv_heads, head_dim)
    pair = weights or [None, None]
    outputs = split_norm_rotary_qkv(qkv, *pair, *arguments, eps=1e-3, **FAMILIES[family])
    upstream = [torch.randn_like(output) for output in outputs]
    ours = (*outputs, *gradients(outputs, [qkv, *weights], upstream))
    expected = run(qkv, cos, sin)
    theirs = (*expected, *gradients(expected, [qkv, *weights], upstream))
    wide = [None if x is None else x.detach().double().requires_grad_() for x in (qkv, *pair)]
    truth = split_norm_rotary_qkv_plain(*wide, *arguments, eps=1e-3, **FAMILIES[family])
    inputs = [x for x in wide if x is not None]
    truth = (*truth, *gradients(truth, inputs, [u.double() for u in upstream]))
    for a, b, true in zip(ours, theirs, truth, strict=True):
        assert error_of(a, true) <= 1.1 * error_of(b, true)


@pytest.mark.gpu
@every_family
def test_the_kernel_rounds_where_its_twin_does_on_a_gpu(family):
    assert part_that_differs_from_the_twin(family, 999, 128, torch.bfloat16, "cuda") < 0.01
