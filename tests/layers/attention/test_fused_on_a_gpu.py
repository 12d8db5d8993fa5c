"""Attention by torch's own kernels, on a GPU: close to the truth, and other models keep their kernels."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from liger_models.layers.attention.fused import cudnn_takes, masked_attention, unmasked_attention

pytestmark = pytest.mark.gpu

PROCESS = """
import json, sys
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile


def flags():
    names = [name for name in dir(torch._C) if name.startswith("_get_") and "sdp" in name]
    return {name: str(getattr(torch._C, name)()) for name in names}


def ours():
    import liger_models

    config = {
        "model_type": "llama", "hidden_size": 512, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512, "tie_word_embeddings": False,
    }
    model = liger_models.from_config(config, dtype=torch.bfloat16, device="cuda")
    ids = torch.randint(64, (2, 512), device="cuda")
    for level in ("lean", "checkpoint"):
        model.set_activation_memory(level)
        model(ids, labels=ids).loss.backward()
    model.eval().generate(ids[:, :8], max_new_tokens=4)


def theirs():
    q, k, v = (torch.randn(2, 4, 512, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
               for _ in range(3))
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
        torch.cuda.synchronize()
    names = {event.key for event in found.key_averages()}
    return sorted({kind for kind in ("cudnn", "flash_fwd", "flash_bwd", "fmha") for name in names
                   if kind in name.lower()})


before = flags()
if sys.argv[1] == "ours":
    ours()
changed = sorted(name for name, value in flags().items() if before[name] != value)
print(json.dumps({"kernels": theirs(), "changed": changed, "flags": flags()}))
"""


def neighbour(first: str) -> dict:
    """Kernels of another model's attention in a fresh process, after our model or without it."""
    done = subprocess.run([sys.executable, "-c", PROCESS, first], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_another_models_attention_uses_the_same_kernels_after_ours():
    alone, after = neighbour("nothing"), neighbour("ours")
    # torch itself sets the priority order at the first scaled_dot_product_attention of a process on a GPU.
    assert set(after["changed"]) <= {"_get_sdp_priority_order"}
    assert after["flags"] == alone["flags"]
    assert after["kernels"] == alone["kernels"]
    assert alone["kernels"], "no attention kernel was recorded"
    if torch.cuda.get_device_capability() == (9, 0):
        assert alone["kernels"] == ["cudnn"]


def operands(heads=8, kv_heads=2, queries=300, keys=300, dim=128, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = (2, heads, queries, dim), (2, kv_heads, keys, dim), (2, kv_heads, keys, dim)
    return [torch.randn(shape, device="cuda", generator=generator).to(dtype) for shape in shapes]


def results(function, leaves):
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    out = function(*leaves)
    out.backward(torch.ones_like(out).cumsum(-1) / out.shape[-1])
    return [out.detach(), *(x.grad for x in leaves)]


def assert_no_worse(found, torchs, truth):
    """At most 1.1 times as far from float64 as scaled_dot_product_attention in the same dtype."""
    for ours, theirs, exact in zip(found, torchs, truth, strict=True):
        scale = exact.norm()
        ours, theirs = (((x.double() - exact).norm() / scale).item() for x in (ours, theirs))
        assert ours <= 1.1 * theirs, (ours, theirs)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 128), (4, 4, 64), (4, 2, 256), (4, 1, 80)])
def test_unmasked_attention_is_as_accurate_as_torchs(heads, kv_heads, dim, causal):
    leaves = operands(heads, kv_heads, dim=dim)

    def theirs(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.1, enable_gqa=True)

    found = results(lambda q, k, v: unmasked_attention(q, k, v, 0.1, causal), leaves)
    assert_no_worse(found, results(theirs, leaves), results(theirs, [x.double() for x in leaves]))


@pytest.mark.parametrize("keys", [300, 304, 1])
@pytest.mark.parametrize("dim", [128, 80, 36])  # no fused kernel supports the last
def test_masked_attention_is_as_accurate_as_torchs(keys, dim):
    leaves = operands(4, 4, keys=keys, dim=dim)
    mask = torch.rand(2, 1, 300, keys, device="cuda", generator=torch.Generator("cuda").manual_seed(1)) < 0.5
    mask[..., 0] = True

    def theirs(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, mask, scale=0.1)

    found = results(lambda q, k, v: masked_attention(q, k, v, mask, 0.1), leaves)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        torchs = results(theirs, leaves)
    truth = results(theirs, [x.double() for x in leaves])
    if keys == 1:  # its weight is always one: these gradients are only rounding
        for of_scores in (*found[1:3], *torchs[1:3]):
            assert of_scores.abs().max() <= 2**-8
        found, torchs, truth = ([of[0], of[3]] for of in (found, torchs, truth))
    assert_no_worse(found, torchs, truth)


def plain_attention(q, k, v, mask):
    scores = (q @ k.mT * 0.1).float().masked_fill(~mask, float("-inf"))
    return scores.softmax(-1).to(q.dtype) @ v


def test_autocast_casts_the_operands_as_for_torch():
    leaves = operands(dtype=torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        found = unmasked_attention(*leaves, 0.1, True)
        masked = masked_attention(
            leaves[0],
            *(x.repeat_interleave(4, 1) for x in leaves[1:]),
            torch.ones(300, 300, dtype=torch.bool, device="cuda").tril(),
            0.1,
        )
    assert found.dtype == masked.dtype == torch.bfloat16


def test_a_kernel_that_the_user_disabled_does_not_run():
    leaves = operands()
    assert cudnn_takes(*leaves, True)
    with sdpa_kernel(SDPBackend.MATH):
        assert not cudnn_takes(*leaves, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_of_more_than_two_to_the_32_scores_is_applied_correctly(dtype):
    """torch's memory-efficient kernel, not split, takes the masks of rows 2^32 / 66,000 before for the last
    922 queries.
    """
    length, last = 66_000, slice(65_500, 66_000)
    leaves = [x[:1].requires_grad_() for x in operands(1, 1, length, length, 64, dtype)]
    place = torch.arange(length, dtype=torch.int32, device="cuda")
    before = place[:, None] - place
    mask = (before >= 0) & (before < 512)  # so that those other rows share no keys with these
    del before
    out = masked_attention(*leaves, mask, 0.1)
    weights = torch.randn(1, 1, 500, 64, device="cuda", dtype=dtype)
    (out[:, :, last] * weights).sum().backward()
    found = [out[:, :, last].detach(), *(x.grad for x in leaves)]
    del out

    def plain(exact):
        q, k, v = (x.detach().to(exact).requires_grad_() for x in leaves)
        part = plain_attention(q[:, :, last], k, v, mask[last])
        (part * weights.to(exact)).sum().backward()
        return [part.detach(), q.grad, k.grad, v.grad]

    for ours, same_dtype, truth in zip(found, plain(dtype), plain(torch.float64), strict=True):
        size = truth.norm()
        ours, same_dtype = (((x.double() - truth).norm() / size).item() for x in (ours, same_dtype))
        # In float32 the kernel may round the operands of its products to TF32 (2^-11), twice in a row.
        assert ours <= max(1.1 * same_dtype, 2**-10 if dtype == torch.float32 else 0), (ours, same_dtype)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("length", [64, 576, 704, 640])
def test_gradients_without_a_mask_are_finite_if_every_score_is_far_below_zero(length, dim, causal):
    """For lengths 64 beyond a multiple of 128, cuDNN's masked backward returns NaN: it treats the padding of
    its last tile as scores of zero, and exp(0 - log-sum-exp) overflows float32 if that is below -88.7
    (pytorch 196678). Here it is about -115.
    """
    leaves = [x.detach() * 0.1 for x in operands(4, 4, keys=length, queries=length, dim=dim)]
    leaves[0][..., 0], leaves[1][..., 0] = 1.0, -120 * dim**0.5
    leaves = [x.requires_grad_() for x in leaves]
    assert cudnn_takes(*leaves, causal) == (causal or length % 128 == 0)

    def theirs(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=dim**-0.5)

    def plain(q, k, v):
        mask = torch.ones(length, length, dtype=torch.bool, device="cuda")
        scores = (q @ k.mT * dim**-0.5).float().masked_fill(~(mask.tril() if causal else mask), float("-inf"))
        return scores.softmax(-1).to(q.dtype) @ v

    found = results(lambda q, k, v: unmasked_attention(q, k, v, dim**-0.5, causal), leaves)
    assert all(x.isfinite().all() for x in found)
    unfused, truth = results(plain, leaves), results(theirs, [x.double() for x in leaves])
    for of_queries in (found[1], unfused[1], truth[1]):
        of_queries[..., 0] = 0.0  # zero except for rounding, since k is constant there
    assert_no_worse(found, unfused, truth)
