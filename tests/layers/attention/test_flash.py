"""attention="flash" on a CPU: a stand-in for flash-attn-4 computes what that package documents, and rejects
arguments that the package does not have.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from liger_models.layers.attention import flash
from liger_models.layers.attention.backends import attend, attend_plain
from liger_models.layers.memory import mixing
from liger_models.layers.recompute.activation_memory import LEVELS
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.sequences.visibility import Visibility
from liger_models.layers.specs import AttentionSpec

CPU = torch.device("cpu")
ROWS, LENGTH, DIM = 2, 13, 8
PACKED = torch.tensor([0, 5, 5, 6, 20, 26])  # an empty document, one with one token


def one_document(q, k, v, scale, causal, window, sinks):
    """[S, heads, D]. A window is the number of visible tokens before and after a query, None: all."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    distance = torch.arange(len(q))[:, None] - torch.arange(len(k))
    before, after = window
    after = 0 if causal else after
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if before is not None:
        hidden |= distance > before
    if after is not None:
        hidden |= -distance > after
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v)


class StandIn:
    """The package's two functions, and their recorded arguments."""

    def __init__(self):
        self.calls = []

    def flash_attn_func(
        self, q, k, v, *, softmax_scale, causal, window_size, learnable_sink, deterministic
    ):  # [rows, S, heads, D]
        assert q.dim() == k.dim() == v.dim() == 4
        assert deterministic
        assert not torch.compiler.is_compiling()
        self.calls.append(("rows", window_size))
        options = softmax_scale, causal, window_size, learnable_sink
        return torch.stack([one_document(*row, *options) for row in zip(q, k, v, strict=True)]), None

    def flash_attn_varlen_func(
        self,
        q,
        k,
        v,
        *,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        causal,
        window_size,
        learnable_sink,
        deterministic,
    ):  # [T, heads, D]
        assert q.dim() == k.dim() == v.dim() == 3
        assert deterministic
        assert not torch.compiler.is_compiling()
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert torch.equal(cu_seqlens_q, cu_seqlens_k)
        bounds = cu_seqlens_q.tolist()
        longest = max(end - start for start, end in pairwise(bounds))
        assert longest <= max_seqlen_q == max_seqlen_k
        assert type(max_seqlen_q) is type(max_seqlen_k) is int
        self.calls.append(("packed", window_size))
        options = softmax_scale, causal, window_size, learnable_sink
        pieces = [one_document(q[a:b], k[a:b], v[a:b], *options) for a, b in pairwise(bounds)]
        return torch.cat(pieces), None


@pytest.fixture
def library(monkeypatch):
    stand_in = StandIn()
    monkeypatch.setattr(flash, "_library", lambda: stand_in)
    monkeypatch.setattr(flash, "_device", lambda q: "sm_90")
    monkeypatch.setattr(flash, "_DTYPES", (torch.float64,))
    monkeypatch.setattr(flash, "_SIZES", ((DIM, DIM), (16, 16), (DIM, 16)))
    return stand_in


def sequences_of(form: str) -> Sequences:
    if form == "packed":
        return Sequences.from_call((ROWS, LENGTH), CPU, cu_seqlens=PACKED)
    if form == "padded":
        mask = torch.arange(LENGTH) >= torch.tensor([[0], [4]])
        return Sequences.from_call((ROWS, LENGTH), CPU, attention_mask=mask)
    return Sequences.from_call((ROWS, LENGTH), CPU)


def operands(tokens: int, kv_heads: int = 2, dim: int = DIM, value_dim: int = DIM, dtype=torch.float64):
    sizes = (4, dim), (kv_heads, dim), (kv_heads, value_dim)
    return [torch.randn(tokens, *size, dtype=dtype).requires_grad_() for size in sizes]


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("limits", "kv_heads"), [
    ({}, 4), ({}, 1), ({"window": 1}, 2), ({"window": 4}, 2), ({"window": LENGTH}, 2),
    ({"chunk": 3}, 2), ({"chunk": 4, "window": 2}, 2),
])  # fmt: skip
@pytest.mark.parametrize("form", ["rows", "packed", "padded"])
def test_the_package_is_called_for_what_the_plain_twin_computes(form, limits, kv_heads, sinks, library):
    torch.manual_seed(0)
    spec = AttentionSpec(4, kv_heads, DIM, 0.3, sinks=sinks, **limits)
    sequences = sequences_of(form)
    leaves = operands(sequences.documents.num_tokens, kv_heads)
    if sinks:
        leaves.append(torch.randn(4, dtype=torch.float64).requires_grad_())
    q, k, v, *rest = leaves
    found = attend(q, k, v, spec, sequences, "flash", *rest)
    expected = attend_plain(q, k, v, spec, sequences, *rest)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    cotangent = torch.randn_like(expected)
    truth = torch.autograd.grad(expected, leaves, cotangent)
    for ours, exact in zip(torch.autograd.grad(found, leaves, cotangent), truth, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-11, atol=1e-12)
    assert len(library.calls) == 1


def test_a_window_without_effect_is_not_passed(library):
    """It would be another kernel, and another compilation."""
    for form, longest in (("rows", 13), ("packed", 14)):
        sequences = sequences_of(form)
        for window in (None, longest - 1, longest):
            attend(*operands(26), AttentionSpec(4, 2, DIM, 0.3, window=window), sequences, "flash")
    open_, limited = (None, None), (12, 0)
    assert [window for _, window in library.calls] == [open_, (11, 0), open_, open_, limited, open_]


def spans(sequences: Sequences) -> Sequences:
    token = torch.arange(sequences.documents.num_tokens, dtype=torch.int32)
    sequences.visibility = Visibility(sequences.documents, torch.stack([token, token + 1]))
    return sequences


SPEC = AttentionSpec(4, 2, DIM, 0.3)
REFUSED = [
    ("a soft cap", {"softcap": 2.0}, {}),
    ("attention that is not causal", {"causal": False}, {}),
    ("spans", {}, {}),
    ("heads of 20 with values of 20", {}, {"dim": 20, "value_dim": 20}),
    ("heads of 16 with values of 8", {}, {"dim": 16}),
    ("values of another size than keys that query heads share", {}, {"value_dim": 16}),
]


@pytest.mark.parametrize(("what", "asked", "sizes"), REFUSED, ids=[row[0] for row in REFUSED])
def test_unsupported_options_are_refused_by_name(what, asked, sizes, library):
    sequences = spans(sequences_of("rows")) if what == "spans" else sequences_of("rows")
    with pytest.raises(ValueError, match=rf"'flash' does not take {what}.*use 'auto' or 'triton'"):
        attend(*operands(26, **sizes), replace(SPEC, **asked), sequences, "flash")
    assert not library.calls


def test_documents_that_continue_others_are_refused(library):
    sequences = Sequences.from_call((1, 9), CPU, cu_seqlens=torch.tensor([0, 5, 9]), parents=[-1, 0])
    with pytest.raises(ValueError, match="'flash' does not support documents that continue others"):
        attend(*operands(9), SPEC, sequences, "flash")


def test_other_dtypes_and_devices_are_refused(monkeypatch):
    monkeypatch.setattr(flash, "_device", lambda q: "sm_90")
    monkeypatch.setattr(flash, "_SIZES", ((DIM, DIM),))
    with pytest.raises(ValueError, match=r"does not take torch\.float32 \(only 16 bits are supported\)"):
        attend(*operands(26, dtype=torch.float32), SPEC, sequences_of("rows"), "flash")
    monkeypatch.undo()
    monkeypatch.setattr(flash, "_SIZES", ((DIM, DIM),))
    with pytest.raises(ValueError, match=r"does not take cpu \(only Hopper GPUs are supported\)"):
        attend(*operands(26, dtype=torch.bfloat16), SPEC, sequences_of("rows"), "flash")


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(flash, "_device", lambda q: "sm_90")
    monkeypatch.setattr(flash, "_SIZES", ((DIM, DIM),))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    flash._library.cache_clear()
    with pytest.raises(
        ValueError, match=r"needs the package flash-attn-4.*pip install 'liger_models\[flash\]'"
    ):
        attend(*operands(26, dtype=torch.bfloat16), SPEC, sequences_of("rows"), "flash")


def test_a_second_derivative_is_refused(library):
    q, k, v = operands(26)
    out = attend(q, k, v, SPEC, sequences_of("rows"), "flash")
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


def test_compiled_models_call_it_outside_of_the_graph(library):
    """The package launches nothing while it is traced, and would return memory that nobody wrote."""
    compiled = torch.compile(attend, backend="eager")
    leaves = operands(26)
    found = compiled(*leaves, SPEC, sequences_of("rows"), "flash")
    expected = attend_plain(*leaves, SPEC, sequences_of("rows"))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert len(library.calls) == 1


def test_the_choice_of_auto_does_not_depend_on_installed_packages(library):
    for form in ("rows", "packed", "padded"):
        sequences = sequences_of(form)
        attend(*operands(sequences.documents.num_tokens), SPEC, sequences, "auto")
    assert not library.calls


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_has_the_gradients_of_the_plain_twin_at_every_level_of_activation_memory(
    level, library, make_model
):
    ids = torch.randint(0, 61, (1, 26), generator=torch.Generator().manual_seed(0))

    def results(backend: str) -> dict[str, torch.Tensor]:
        model = make_model(layers=2, window=4, attention=backend).double()
        model.set_activation_memory(level)
        loss = model(ids, labels=ids, cu_seqlens=PACKED).loss
        loss.backward()
        return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}

    found, expected = results("flash"), results("eager")
    for name, exact in expected.items():
        torch.testing.assert_close(found[name], exact, rtol=1e-9, atol=1e-11, msg=name)
    assert len(library.calls) >= 2


def test_the_plan_counts_its_float32_sums():
    """With 32 + 8 heads of 128 and 32,768 tokens it took 1,420 MiB in addition to the operands on an H200, 12
    of them for three rows of statistics per query head.
    """
    spec = AttentionSpec(32, 8, 128, 128**-0.5)
    module, step = (
        SimpleNamespace(spec=spec, backend="flash"),
        SimpleNamespace(tokens=32768, sequence_ranks=1),
    )
    assert mixing._mixer_work(module, step, 2) == (1420 - 12) << 20  # type: ignore[arg-type]
