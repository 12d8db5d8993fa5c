"""Every attention backend that runs on a CPU computes the plain twin's formula."""

from __future__ import annotations

import pytest
import torch

from liger_models.layers.attention_backends import attend, attend_cached, attend_plain, visible
from liger_models.layers.sequences import Sequences
from liger_models.layers.spec import AttentionSpec

ROWS, LENGTH, DIM = 2, 13, 8
PACKED = torch.tensor([0, 5, 5, 6, 20, 26])  # an empty document, one of one token, one over two rows


def heads(groups: int, window: int | None) -> AttentionSpec:
    return AttentionSpec(4, 4 // groups, DIM, 0.3, window=window)


def sequences_of(form: str) -> Sequences:
    shape, device = (ROWS, LENGTH), torch.device("cpu")
    if form == "packed":
        return Sequences.from_call(shape, device, cu_seqlens=PACKED)
    if form == "padded":
        mask = torch.arange(LENGTH) >= torch.tensor([[0], [4]])
        return Sequences.from_call(shape, device, attention_mask=mask)
    return Sequences.from_call(shape, device)


def attention_by_hand(q, k, v, spec, documents):
    """Token by token, over the keys that the words of the docstring allow."""
    out = torch.zeros_like(q)
    for t in range(len(q)):
        seen = [
            s
            for s in range(t + 1)
            if documents[s] == documents[t] and (spec.window is None or t - s < spec.window)
        ]
        for head in range(spec.num_attention_heads):
            group = head // (spec.num_attention_heads // spec.num_key_value_heads)
            weights = (k[seen, group] @ q[t, head] * spec.scale).softmax(0)
            out[t, head] = weights @ v[seen, group]
    return out


def random_qkv(tokens: int, spec: AttentionSpec):
    """float64 views of one packed row, as the model has them."""
    width = (spec.q_size + 2 * spec.kv_size) // DIM
    packed = torch.randn(tokens, width, DIM, dtype=torch.float64, requires_grad=True)
    sizes = [spec.num_attention_heads, spec.num_key_value_heads, spec.num_key_value_heads]
    return packed, packed.split(sizes, dim=1)


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("form", ["rows", "packed", "padded"])
def test_the_plain_twin_is_the_formula(form, groups, window):
    torch.manual_seed(0)
    spec, sequences = heads(groups, window), sequences_of(form)
    if form == "packed":
        documents = [0] * 5 + [1] + [2] * 14 + [3] * 6
    else:
        documents = [0] * 13 + [1] * (13 if form == "rows" else 9)
    _, qkv = random_qkv(sequences.num_tokens, spec)
    expected = attention_by_hand(*qkv, spec, documents)
    torch.testing.assert_close(attend_plain(*qkv, spec, sequences), expected, rtol=1e-12, atol=1e-12)


# `sdpa` does equal documents alone, and a window only if it is as long as they are.
CASES = [
    (form, window, backend)
    for form in ("rows", "packed", "padded")
    for window in (None, 1, 4, 13, 14)
    for backend in ("auto", "masked", "sdpa")
    if backend != "sdpa" or (form == "rows" and window not in (1, 4))
]


@pytest.mark.parametrize(("form", "window", "backend"), CASES)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_backends_agree_with_the_plain_twin(form, groups, window, backend):
    torch.manual_seed(0)
    spec, sequences = heads(groups, window), sequences_of(form)
    packed, qkv = random_qkv(sequences.num_tokens, spec)
    expected = attend_plain(*qkv, spec, sequences)
    cotangent = torch.randn_like(expected)
    (expected_gradient,) = torch.autograd.grad(expected, packed, cotangent)
    found = attend(*qkv, spec, sequences, backend)
    (gradient,) = torch.autograd.grad(found, packed, cotangent)
    # float64 sums of at most 26 terms
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("groups", [1, 4])
def test_a_new_token_sees_what_a_whole_pass_lets_the_last_token_see(groups, window):
    torch.manual_seed(0)
    spec, lengths = heads(groups, window), [9, 3]
    room = [torch.randn(2, 12, spec.num_key_value_heads, DIM, dtype=torch.float64) for _ in range(2)]
    q = torch.randn(2, 4, DIM, dtype=torch.float64)
    found = attend_cached(q, *room, spec, torch.tensor(lengths) - 1)
    for row, length in enumerate(lengths):
        alone = Sequences.from_call((1, length), q.device)
        queries = torch.randn(length, 4, DIM, dtype=torch.float64)
        queries[-1] = q[row]
        k, v = (x[row, :length] for x in room)
        expected = attend_plain(queries, k, v, spec, alone)[-1]
        torch.testing.assert_close(found[row], expected, rtol=1e-12, atol=1e-12)


def test_no_query_sees_nothing():
    """A row without a visible key would be a softmax over nothing: NaN."""
    for form in ("rows", "packed", "padded"):
        assert visible(sequences_of(form), window=1).sum(1).eq(1).all()


@pytest.mark.parametrize(("form", "window"), [("packed", None), ("padded", None), ("rows", 12)])
def test_sdpa_refuses_what_it_cannot_do(form, window):
    spec, sequences = heads(1, window), sequences_of(form)
    _, qkv = random_qkv(sequences.num_tokens, spec)
    with pytest.raises(ValueError, match="use 'auto'"):
        attend(*qkv, spec, sequences, "sdpa")


def test_an_unknown_backend_is_refused(make_model):
    spec, sequences = heads(1, None), sequences_of("rows")
    _, qkv = random_qkv(sequences.num_tokens, spec)
    with pytest.raises(ValueError, match=r"'flash'.*choose one of auto"):
        attend(*qkv, spec, sequences, "flash")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'flash'.*choose one of auto"):
        make_model(attention="flash")
