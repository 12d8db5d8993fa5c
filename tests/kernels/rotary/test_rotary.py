"""Rotary embedding. The contract common to all operations is in test_contract.py."""

import pytest
import torch

from liger_models.kernels import multi_axis_tables, rotary, split_rotary_qkv
from liger_models.kernels._dispatch import as_heads


def tables(*shape, scaling=1.0):
    angles = torch.randn(shape) * 3
    return angles.cos() * scaling, angles.sin() * scaling


def test_half_split_rotary_matches_transformers(implementation, assert_near):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 1, 8)  # [B, S, heads, D]
    cos, sin = tables(2, 5, 4)
    doubled = torch.cat([cos, cos], -1).double(), torch.cat([sin, sin], -1).double()
    expected = apply_rotary_pos_emb(q.double(), k.double(), *doubled, unsqueeze_dim=2)
    for a, b in zip(rotary(q, k, cos, sin), expected, strict=True):
        assert_near(a, b, 6)


def test_interleaved_rotary_is_the_product_of_complex_numbers(implementation, assert_near):
    q, k = torch.randn(5, 3, 8), torch.randn(5, 2, 8)
    cos, sin = tables(5, 4)
    turn = torch.complex(cos.double(), sin.double())[:, None]
    for x, y in zip((q, k), rotary(q, k, cos, sin, interleaved=True), strict=True):
        expected = torch.view_as_real(torch.view_as_complex(x.double().unflatten(-1, (4, 2))) * turn)
        assert_near(y, expected.flatten(-2), 6)


def test_interleaved_rotary_matches_the_complex_form_of_llama_4(implementation, assert_near):
    from transformers.models.llama4.modeling_llama4 import apply_rotary_emb

    q, k = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 1, 8)
    cos, sin = tables(2, 5, 4)
    expected = apply_rotary_emb(q, k, torch.complex(cos, sin))
    for a, b in zip(rotary(q, k, cos, sin, interleaved=True), expected, strict=True):
        assert_near(a, b, 8)  # transformers computes in float32 too, with as many roundings


@pytest.mark.parametrize(
    ("family", "sections", "interleaved"),
    [("qwen2_vl", [2, 3, 3], False), ("qwen3_vl", [4, 2, 2], True), ("qwen3_vl", [2, 3, 3], True)],
)
def test_multi_axis_tables_match_transformers(family, sections, interleaved):
    if family == "qwen2_vl":
        from transformers.models.qwen2_vl import modeling_qwen2_vl as modeling
        from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig as Config

        embedding = modeling.Qwen2VLRotaryEmbedding
    else:
        from transformers.models.qwen3_vl import modeling_qwen3_vl as modeling
        from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig as Config

        embedding = modeling.Qwen3VLTextRotaryEmbedding
    rope = {"rope_type": "default", "rope_theta": 50.0, "mrope_section": sections}
    config = Config(hidden_size=32, num_attention_heads=2, head_dim=16, rope_parameters=rope)
    positions = torch.randint(0, 90, (3, 2, 5))  # [axes, B, S]
    cos, sin = embedding(config)(torch.zeros(()), positions)  # [B, S, R], every angle twice
    angles = positions[..., None].float() * 50.0 ** -(torch.arange(0, 16, 2) / 16)
    ours = multi_axis_tables(angles.cos(), angles.sin(), sections, interleaved)
    # float32 angles up to 90, from frequencies that the two compute with one operation more or fewer.
    for table, expected in zip(ours, (cos, sin), strict=True):
        assert (table - expected[..., :8]).abs().max() <= 90 * 2 * torch.finfo(torch.float32).eps


def test_sections_that_do_not_add_up_to_the_frequencies_are_refused():
    cos, sin = tables(3, 5, 8)
    with pytest.raises(ValueError, match=r"expected tables \[3, ..., 9\] for these sections"):
        multi_axis_tables(cos, sin, [3, 3, 3])
    with pytest.raises(ValueError, match=r"expected tables \[2, ..., 8\]"):
        multi_axis_tables(cos, sin, [4, 4])


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_partial_rotary_rotates_the_first_elements_and_keeps_the_rest(interleaved, implementation):
    qkv = torch.randn(4, 5 * 10)
    cos, sin = tables(4, 3)
    q, k, v = split_rotary_qkv(qkv, cos, sin, 3, 1, 10, interleaved)
    given_q, given_k, given_v = qkv.view(4, 5, 10).split([3, 1, 1], 1)
    whole_q, whole_k = rotary(given_q[..., :6], given_k[..., :6], cos, sin, interleaved)
    for turned, whole, given in ((q, whole_q, given_q), (k, whole_k, given_k)):
        assert torch.equal(turned[..., :6], whole)
        assert torch.equal(turned[..., 6:], given[..., 6:])
    assert torch.equal(v, given_v)


def test_tables_of_one_sequence_serve_every_sequence_of_a_batch(implementation):
    q, k = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 1, 8)
    cos, sin = tables(5, 4)
    shared = rotary(q, k, cos, sin)
    repeated = rotary(q, k, cos.expand(2, 5, 4), sin.expand(2, 5, 4))
    for a, b in zip(shared, repeated, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((2, 3, 2, 4), (100, 20, 4, 1)),  # sequences with a gap between them
        ((3, 2, 2, 4), (8, 40, 4, 1)),  # a transposed batch
        ((3, 1, 2, 4), (8, 7, 4, 1)),  # the stride of a dimension of one means nothing
        ((1, 3, 2, 4), (5, 16, 8, 1)),
        ((1, 1, 2, 4), (0, 0, 4, 1)),
        ((2, 3, 2, 4), (0, 0, 4, 1)),  # one token for all
        ((2, 2, 3, 4), (48, 24, 1, 3)),  # elements apart
    ],
)
def test_batches_of_any_strides_give_the_same_bits(shape, strides, interpreted):
    q = torch.randn(200).as_strided(shape, strides)
    cos, sin = torch.rand(2, shape[1], 2)
    dense = torch.empty(shape).copy_(q)  # contiguous, whatever the strides of dimensions of one
    for turned, expected in zip(rotary(q, q, cos, sin), rotary(dense, dense, cos, sin), strict=True):
        assert torch.equal(turned, expected)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((3, 4), (9, 1)),  # rows with a gap between them
        ((3, 4), (1, 3)),  # elements apart
        ((2, 3, 4), (30, 9, 1)),  # sequences with a gap between them
        ((2, 3, 4), (0, 4, 1)),  # one sequence for all
        ((2, 3, 4), (4, 8, 1)),  # a transposed batch
        ((2, 1, 4), (4, 7, 1)),  # the stride of a dimension of one means nothing
        ((2, 3, 1), (3, 1, 5)),
    ],
)
def test_tables_of_any_strides_give_the_same_bits(shape, strides, interpreted):
    q, k = torch.randn(2, shape[-2], 3, 8), torch.randn(2, shape[-2], 1, 8)
    strided = torch.randn(60).as_strided(shape, strides)
    dense, other = torch.empty(shape).copy_(strided), torch.randn(shape)
    for given, same in (((strided, other), (dense, other)), ((other, strided), (other, dense))):
        for turned, expected in zip(rotary(q, k, *given), rotary(q, k, *same), strict=True):
            assert torch.equal(turned, expected)
    for turned, expected in zip(rotary(q, k, strided, strided), rotary(q, k, dense, dense), strict=True):
        assert torch.equal(turned, expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_gradient_is_the_transpose_even_if_the_tables_are_scaled(
    interleaved, implementation, assert_near
):
    # <rotate(x), y> = <x, transpose(y)>, for a rotation that also scales by 1.3.
    qkv = torch.randn(4, 5 * 8, requires_grad=True)
    cos, sin = tables(4, 4, scaling=1.3)
    outputs = split_rotary_qkv(qkv, cos, sin, 3, 1, 8, interleaved)
    upstream = [torch.randn_like(output) for output in outputs]
    (grad,) = torch.autograd.grad(outputs, qkv, upstream)
    forward = sum((o.double() * u.double()).sum() for o, u in zip(outputs, upstream, strict=True))
    backward = (qkv.double() * grad.double()).sum()
    assert_near(forward.detach().float(), backward.detach(), 40)


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2)])
def test_outputs_that_nobody_uses_contribute_zeros(used, interpreted, assert_near):
    qkv = torch.randn(4, 5 * 8, requires_grad=True)
    cos, sin = tables(4, 3)
    outputs = split_rotary_qkv(qkv, cos, sin, 3, 1, 8)
    upstream = [torch.randn_like(outputs[i]) for i in used]
    (grad,) = torch.autograd.grad([outputs[i] for i in used], qkv, upstream)
    qkv64 = qkv.detach().double().requires_grad_()
    truth = split_rotary_qkv(qkv64, cos, sin, 3, 1, 8)
    (true,) = torch.autograd.grad([truth[i] for i in used], qkv64, [u.double() for u in upstream])
    assert_near(grad, true, 6)


def test_each_of_query_and_key_may_be_unused(interpreted):
    q, k = torch.randn(4, 3, 8, requires_grad=True), torch.randn(4, 1, 8, requires_grad=True)
    turned_q, turned_k = rotary(q, k, *tables(4, 4))
    for output, used, unused in ((turned_q, q, k), (turned_k, k, q)):
        grad, none = torch.autograd.grad(output.sum(), [used, unused], retain_graph=True, allow_unused=True)
        assert grad.any()
        assert none is None


class Ignore(torch.autograd.Function):
    """Function that returns None as the gradient of its inputs, which autograd nevertheless passes on."""

    @staticmethod
    def forward(ctx, *tensors):
        return sum(x.sum() for x in tensors)

    @staticmethod
    def backward(ctx, _):
        return None, None


def test_a_missing_gradient_is_accepted(implementation):
    q, k = torch.randn(4, 3, 8, requires_grad=True), torch.randn(4, 1, 8, requires_grad=True)
    turned = rotary(q, k, *tables(4, 4))
    grads = torch.autograd.grad(Ignore.apply(*turned), [q, k], allow_unused=True)
    assert not any(grad is not None and grad.any() for grad in grads)


def test_heads_too_far_apart_for_32_bits_are_copied():
    for heads, far in ((32, 2**26), (33, 2**26 - 8)):  # [heads, T, D] viewed as [T, heads, D]
        x = torch.empty_strided((2, heads, 8), (8, far, 1), device="meta")
        assert as_heads(x).stride() == (heads * 8, 8, 1)
    near = torch.empty_strided((2, 32, 8), (8, 2**26 - 8, 1), device="meta")
    assert as_heads(near) is near


@pytest.mark.gpu
def test_the_last_of_heads_far_apart_are_rotated_too():
    heads, tokens, dim = 34, 2**19, 128  # the last head begins at element 33 * 2**26
    q = torch.randn(heads, tokens, dim, device="cuda", dtype=torch.bfloat16).transpose(0, 1)
    cos, sin = (torch.rand(tokens, dim // 2, device="cuda") for _ in range(2))
    turned, _ = rotary(q, q[:, :1], cos, sin)
    last = slice(-16, None)
    expected, _ = rotary(q[last].contiguous(), q[last, :1], cos[last], sin[last])
    assert torch.equal(turned[last], expected)


def test_gradients_come_from_separate_tensors_of_any_strides(interpreted):
    qkv = torch.randn(4, 5 * 8, requires_grad=True)
    outputs = split_rotary_qkv(qkv, *tables(4, 4), 3, 1, 8)
    upstream = [torch.randn_like(output) for output in outputs]
    (expected,) = torch.autograd.grad(outputs, qkv, upstream, retain_graph=True)
    by_head = [u.transpose(0, 1).contiguous().transpose(0, 1) for u in upstream]  # as attention gives them
    before = [u.clone() for u in by_head]
    (grad,) = torch.autograd.grad(outputs, qkv, by_head)
    assert torch.equal(grad, expected)
    for a, b in zip(by_head, before, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("half", [4, 3])
def test_inplace_gives_the_same_bits_in_the_memory_of_its_operand(interleaved, half, interpreted):
    qkv = torch.randn(4, 5 * 8)
    cos, sin = tables(4, half)
    expected = split_rotary_qkv(qkv, cos, sin, 3, 1, 8, interleaved)
    outputs = split_rotary_qkv(qkv, cos, sin, 3, 1, 8, interleaved, inplace=True)
    for a, b in zip(outputs, expected, strict=True):
        assert torch.equal(a, b)
        assert a.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()


def test_autograd_detects_inplace_rotation_of_a_saved_operand(interpreted):
    leaf = torch.randn(4, 5 * 8, requires_grad=True)
    qkv = leaf * 1
    squares = qkv.square()  # keeps qkv
    outputs = split_rotary_qkv(qkv, *tables(4, 4), 3, 1, 8, inplace=True)
    sum(output.sum() for output in outputs).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.sum().backward()


def test_inplace_leaves_rows_that_share_memory_alone(interpreted):
    row = torch.randn(1, 5 * 8)
    before = row.clone()
    cos, sin = tables(4, 4)
    outputs = split_rotary_qkv(row.expand(4, -1), cos, sin, 3, 1, 8, inplace=True)
    expected = split_rotary_qkv(row.repeat(4, 1), cos, sin, 3, 1, 8)
    assert torch.equal(row, before)
    for a, b in zip(outputs, expected, strict=True):
        assert torch.equal(a, b)


def test_only_the_tables_are_saved(interpreted):
    qkv = torch.randn(4, 5 * 8, requires_grad=True)
    cos, sin = tables(4, 4)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        split_rotary_qkv(qkv, cos, sin, 3, 1, 8)
    assert {t.data_ptr() for t in kept} == {cos.data_ptr(), sin.data_ptr()}


def test_inference_mode_may_rotate_in_place(interpreted):
    with torch.inference_mode():
        qkv = torch.randn(4, 5 * 8)
        cos, sin = tables(4, 4)
        expected = split_rotary_qkv(qkv, cos, sin, 3, 1, 8)
        for a, b in zip(split_rotary_qkv(qkv, cos, sin, 3, 1, 8, inplace=True), expected, strict=True):
            assert torch.equal(a, b)


def test_mismatched_operands_are_refused():
    qkv, q = torch.randn(4, 5 * 8), torch.randn(4, 3, 8)
    cos, sin = tables(4, 4)
    with pytest.raises(ValueError, match=r"expected \[T, 48\] for \(4 \+ 2 \* 1\) heads of 8"):
        split_rotary_qkv(qkv, cos, sin, 4, 1, 8)
    with pytest.raises(ValueError, match=r"expected \[4, 'R/2'\] for both"):
        split_rotary_qkv(qkv, cos[:3], sin[:3], 3, 1, 8)
    with pytest.raises(ValueError, match="rotate 10 elements per head; heads have 8"):
        split_rotary_qkv(qkv, *tables(4, 5), 3, 1, 8)
    with pytest.raises(ValueError, match="detach them"):
        rotary(q, q, cos.requires_grad_(), sin)
    with pytest.raises(ValueError, match="equal except for the heads"):
        rotary(q, torch.randn(4, 3, 6), cos.detach(), sin)
