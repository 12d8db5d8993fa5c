"""Attention by torch's own kernels, on a GPU: close to the truth, and other models keep their kernels."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

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
print(json.dumps({"kernels": theirs(), "changed": changed}))
"""


def neighbour(first: str) -> dict:
    """Which kernels another model's attention takes in a fresh process, after our model or alone."""
    done = subprocess.run([sys.executable, "-c", PROCESS, first], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_attention_of_another_model_takes_the_same_kernels_after_ours():
    alone, after = neighbour("nothing"), neighbour("ours")
    assert after["changed"] == []
    assert after["kernels"] == alone["kernels"]
    assert alone["kernels"], "no kernel of attention was seen"
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
def test_unmasked_attention_is_as_close_to_the_truth_as_torchs(heads, kv_heads, dim, causal):
    leaves = operands(heads, kv_heads, dim=dim)

    def theirs(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.1, enable_gqa=True)

    found = results(lambda q, k, v: unmasked_attention(q, k, v, 0.1, causal), leaves)
    assert_no_worse(found, results(theirs, leaves), results(theirs, [x.double() for x in leaves]))


@pytest.mark.parametrize("keys", [300, 304, 1])
@pytest.mark.parametrize("dim", [128, 80, 36])  # the last is for no fused kernel
def test_masked_attention_is_as_close_to_the_truth_as_torchs(keys, dim):
    leaves = operands(4, 4, keys=keys, dim=dim)
    mask = torch.rand(2, 1, 300, keys, device="cuda", generator=torch.Generator("cuda").manual_seed(1)) < 0.5
    mask[..., 0] = True

    def theirs(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, mask, scale=0.1)

    found = results(lambda q, k, v: masked_attention(q, k, v, mask, 0.1), leaves)
    # Other kernels sum in other orders: the distance of the unfused form in the same dtype.
    plain = results(lambda q, k, v: plain_attention(q, k, v, mask), leaves)
    assert_no_worse(found, plain, results(theirs, [x.double() for x in leaves]))


def plain_attention(q, k, v, mask):
    scores = (q @ k.mT * 0.1).float().masked_fill(~mask, float("-inf"))
    return scores.softmax(-1).to(q.dtype) @ v


def test_autocast_casts_the_operands_as_it_does_for_torch():
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
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert not cudnn_takes(*leaves, True)
