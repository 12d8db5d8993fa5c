"""Tensors with more than 2^31 elements are processed to the end: 32-bit offsets would wrap to the
beginning.
"""

from __future__ import annotations

import pytest
import torch

import liger_models
from liger_models.layers.attention.backends import attend
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import AttentionSpec

GIB = 2**30


@pytest.fixture(autouse=True)
def room():
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
    if free < 70 * GIB:
        pytest.skip(f"needs a GPU with 70 GiB to spare; there are {free / GIB:.0f}")


def error(found, expected):
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


# bfloat16 numbers after about twenty roundings by 2^-9 each: 2^-9 sqrt(20) < 2^-6.
TOLERANCE = 2.0**-6


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["sdpa", "triton"])
def test_attention_reaches_the_last_heads_of_the_last_tokens(backend):
    tokens, heads, kv_heads, width, tail = 32768, 576, 72, 128, 64
    assert tokens * heads * width > 2**31
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(heads):
        shape = (tokens, heads, width)
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()

    q, k, v = draw(heads), draw(kv_heads), draw(kv_heads)
    spec = AttentionSpec(heads, kv_heads, width, width**-0.5, None)
    sequences = Sequences.from_call((1, tokens), torch.device("cuda"))
    out = attend(q, k, v, spec, sequences, backend, None)
    dout = torch.randn(out.shape, device="cuda", dtype=torch.bfloat16, generator=generator)
    found = (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))
    found = [x[-tail:, -8 if x.shape[1] == heads else -1 :] for x in found]

    # The last eight heads share the last keys, to which only the last tokens attend.
    q8 = q.detach()[-tail:, -8:].float().requires_grad_()
    k1, v1 = (x.detach()[:, -1].float().requires_grad_() for x in (k, v))
    places = torch.arange(tokens, device="cuda")
    hidden = places > places[-tail:, None]
    scores = (torch.einsum("qhd,kd->hqk", q8, k1) * spec.scale).masked_fill(hidden, -torch.inf)
    expected = torch.einsum("hqk,kd->qhd", scores.softmax(-1), v1)
    gradients = torch.autograd.grad(expected, (q8, k1, v1), dout[-tail:, -8:].float())
    expected = (expected, gradients[0], gradients[1][-tail:, None], gradients[2][-tail:, None])
    for name, ours, truth in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        assert error(ours, truth) < TOLERANCE, name


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["tiled", "offload"])
def test_the_last_row_of_a_long_batch_equals_the_row_alone(level):
    rows, seq, hidden = 17, 32768, 4096
    assert rows * seq * hidden > 2**31
    config = {
        "model_type": "llama",
        "vocab_size": 1024,
        "hidden_size": hidden,
        "intermediate_size": 2048,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": seq,
        "tie_word_embeddings": False,
    }
    model = liger_models.from_config(config, dtype="bfloat16", device="cuda", activation_memory=level)
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (rows, seq, hidden)
    embeds = torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()
    labels = torch.randint(0, 1024, (rows, seq), device="cuda", generator=generator)
    model(inputs_embeds=embeds, labels=labels, num_items_in_batch=1000).loss.backward()
    last = embeds.detach()[-1:].clone().requires_grad_()
    model(inputs_embeds=last, labels=labels[-1:], num_items_in_batch=1000).loss.backward()
    assert error(embeds.grad[-1:], last.grad) < TOLERANCE
