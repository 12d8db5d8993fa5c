"""attention on a CPU and in the interpreter. Real sizes are in test_flash_attention_on_a_gpu.py."""

import importlib
import itertools
import types

import pytest
import torch
import torch.nn.functional as F
from attention_forms import attend, eager_attention, operands
from operation_runs import in_float64, run_with_gradients

from liger_models.kernels import KeyRanges, attention, document_bounds, key_ranges, marked_spans
from liger_models.kernels._dispatch import rows_to_copy

module = importlib.import_module("liger_models.kernels.attention.flash_attention")

# An empty document, documents of one and two tokens, one that ends inside a tile, one that spans several
# tiles.
PACKED = (0, 3, 3, 4, 6, 23, 50)
TOKENS = PACKED[-1]


@pytest.fixture
def small_tiles(monkeypatch):
    """Make tiles small, so that few tokens fill several; tiles of queries and of keys differ in size."""
    tiles = (module.Tiles(16, 16, 4, 1), module.Tiles(16, 32, 4, 1), module.Tiles(16, 32, 4, 1))
    monkeypatch.setattr(module, "_configuration", lambda *_: module.Configuration(*tiles))


def test_results_that_are_given_again_take_the_place_of_the_forward_kernel(interpreted, small_tiles):
    """With sinks, whose gradient reads the log-sum-exp."""
    inputs, kept = operands(23, sinks=True), []

    def once(run):
        if not kept:
            kept.append(run())
        return kept[0]

    def found(once):
        return run_with_gradients(
            lambda q, k, v, sinks: attention(q, k, v, sinks=sinks, once=once), inputs, up
        )

    up = [torch.randn(23, 4, 8)]
    (expected,), gradients, _ = found(None)
    for _ in range(2):
        (out,), again, _ = found(once)
        assert out.data_ptr() == kept[0][0].data_ptr()
        assert torch.equal(out, expected)
        assert all(torch.equal(*pair) for pair in zip(again, gradients, strict=True))


def by_hand(q, k, v, *, scale=None, cu_seqlens=None, window=None, softcap=None, sinks=None, slopes=None):
    """Attention one query at a time, over the keys that the docstring of `attention` lets it attend to."""
    tokens, heads, dim = q.shape
    ends = [tokens] if cu_seqlens is None else cu_seqlens.tolist()
    out = []
    for t in range(tokens):
        first = max((end for end in ends if end <= t), default=0)
        first = first if window is None else max(first, t - window + 1)
        for head in range(heads):
            group = head // (heads // k.shape[1])
            scores = k[first : t + 1, group] @ q[t, head] * (dim**-0.5 if scale is None else scale)
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if slopes is not None:
                scores = scores - slopes[head] * torch.arange(t - first, -1, -1)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head : head + 1]])
            weights = scores.softmax(0)[: t + 1 - first]
            out.append(weights @ v[first : t + 1, group])
    return torch.stack(out).view(tokens, heads, v.shape[2])


OPTIONS = {
    "plain": {},
    "scale": {"scale": 0.7},
    "window": {"window": 20},
    "window of one": {"window": 1},
    "softcap": {"softcap": 1.5},
    "packed": {"cu_seqlens": PACKED},
    "packed, window": {"cu_seqlens": PACKED, "window": 9},
    "slopes": {"slopes": (0.5, 0.25, 2.0, 0.0)},
    "all": {
        **{"cu_seqlens": PACKED, "window": 9, "softcap": 1.5, "scale": 0.7},
        "slopes": (0.5, 0.25, 2.0, 0.0),
    },
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@every_option
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_the_plain_twin_is_the_formula(options, sinks):
    inputs = operands(TOKENS, sinks=sinks, dtype=torch.float64, value_dim=5)
    found, grads, upstream = run_with_gradients(attend(options), inputs)
    expected, expected_grads, _ = run_with_gradients(attend(options, by_hand), inputs, upstream)
    for a, b in zip((*found, *grads), (*expected, *expected_grads), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


# A tile takes milliseconds in the interpreter, so each case covers something that the others do not.
ALL = {**OPTIONS["all"], "slopes": (0.25, 0.5)}  # of two heads
CASES = {
    "a head each, two tiles of queries": (32, {}, {"heads": 2, "kv_heads": 2, "dim": 16}),
    "all heads share one": (50, {}, {"heads": 3, "kv_heads": 1, "dim": 5}),
    "window": (70, {"window": 20}, {"heads": 2, "kv_heads": 1, "sinks": True}),
    "window of one": (20, {"window": 1}, {"heads": 2, "kv_heads": 1, "sinks": True}),
    "softcap": (40, {"softcap": 1.5, "scale": 0.9}, {"heads": 2, "kv_heads": 1}),
    "packed": (TOKENS, {"cu_seqlens": PACKED}, {"heads": 2, "kv_heads": 2, "dim": 20}),
    "slopes": (70, {"slopes": (0.125, 0.5)}, {"heads": 2, "kv_heads": 1}),
    "all": (TOKENS, ALL, {"heads": 2, "kv_heads": 1, "sinks": True}),
    "one token": (1, {}, {"sinks": True}),
    "narrow values": (
        TOKENS,
        ALL,
        {"heads": 2, "kv_heads": 1, "dim": 24, "value_dim": 7, "sinks": True},
    ),
    "wide values": (20, {}, {"heads": 2, "kv_heads": 2, "dim": 7, "value_dim": 24}),
    "keys in two parts": (40, {"window": 20}, {"heads": 2, "kv_heads": 1, "dim": 150, "value_dim": 128}),
    "the widest heads": (20, {}, {"heads": 2, "kv_heads": 1, "dim": 512}),
}


@pytest.mark.parametrize(("tokens", "options", "shape"), CASES.values(), ids=CASES)
def test_the_kernels_compute_the_formula(tokens, options, shape, interpreted, small_tiles, assert_near):
    inputs = operands(tokens, **shape)
    found, grads, upstream = run_with_gradients(attend(options), inputs)
    truth, true_grads, _ = run_with_gradients(attend(options), in_float64(inputs), in_float64(upstream))
    # Scores of up to about 8 have an error of a few roundings, which becomes the relative error of the
    # weights: a mean of values is off by about 16 roundings. A gradient multiplies two such, and sums over
    # more terms.
    assert_near(found[0], truth[0], 16)
    for actual, true in zip(grads, true_grads, strict=True):
        assert_near(actual, true, 48)


def test_tiles_of_real_gpu_sizes_compute_the_formula_too(interpreted, assert_near):
    inputs = operands(140, heads=1, kv_heads=1)
    options = {"cu_seqlens": (0, 9, 140), "window": 100}
    found, grads, upstream = run_with_gradients(attend(options), inputs)
    truth, true_grads, _ = run_with_gradients(attend(options), in_float64(inputs), in_float64(upstream))
    for actual, true in zip((*found, *grads), (*truth, *true_grads), strict=True):
        assert_near(actual, true, 48)


# Hopper loads tiles of 64 by TMA; test_flash_attention_on_a_gpu.py has other widths.
@pytest.mark.parametrize("dim", [40, 64])
def test_in_16_bits_it_is_as_accurate_as_eager(dim, interpreted, small_tiles):
    *_, sinks = operands(40, heads=4, kv_heads=2, sinks=True, dtype=torch.float16)
    row = torch.randn(40, 8, dim).half()  # queries, keys and values are views of it, as in a model
    inputs = [x.detach().requires_grad_() for x in (*row.split([4, 2, 2], dim=1), sinks)]
    options = {"softcap": 3.0, "cu_seqlens": (0, 9, 40), "window": 20}
    run = attend(options)
    found, grads, upstream = run_with_gradients(run, inputs)
    eager, eager_grads, _ = run_with_gradients(attend(options, eager_attention), inputs, upstream)
    truth, true_grads, _ = run_with_gradients(run, in_float64(inputs), in_float64(upstream))
    results = (*found, *grads), (*eager, *eager_grads), (*truth, *true_grads)
    for ours, theirs, true in zip(*results, strict=True):
        assert ours.dtype == torch.float16
        # The gradient of the sinks has only four elements: the ratio of two such errors is mostly chance.
        assert (ours - true).norm() <= (4.0 if true.numel() == 4 else 1.1) * (theirs - true).norm()


@pytest.mark.parametrize("window", [None, 6])
def test_masked_tokens_have_no_effect(window, interpreted, small_tiles):
    q, k, v = (x.detach() for x in operands(TOKENS, heads=2, kv_heads=1))
    run = attend({"cu_seqlens": PACKED, "window": window})
    before = run(q, k, v)
    first, last = 6, 22  # a document: its keys and values affect its own tokens only
    k[first:], v[first:] = k[first:] + 3, v[first:] * 2
    after = run(q, k, v)
    assert torch.equal(after[:first], before[:first])
    k[:last], v[:last] = k[:last] - 2, v[:last] * 3
    assert torch.equal(run(q, k, v)[last + 1 :], after[last + 1 :])


def test_sinks_of_minus_infinity_have_no_effect_and_large_ones_take_all_weight(implementation):
    q, k, v = operands(20, heads=2, kv_heads=1)
    nothing = torch.full((2,), float("-inf"), requires_grad=True)
    without, without_grads, upstream = run_with_gradients(attention, [q, k, v])
    found, grads, _ = run_with_gradients(attend({}), [q, k, v, nothing], upstream)
    for a, b in zip((*found, *grads), (*without, *without_grads, torch.zeros(2)), strict=True):
        torch.testing.assert_close(a, b)
    assert not attention(q, k, v, sinks=torch.full((2,), 1e4)).any()


def test_large_scores_do_not_overflow(implementation, small_tiles):
    q, k, v = operands(40, heads=1, kv_heads=1)
    found, grads, upstream = run_with_gradients(attend({"scale": 1e4}), [q, k, v])
    truth, _, _ = run_with_gradients(attend({"scale": 1e4}), in_float64([q, k, v]), in_float64(upstream))
    # With scores of 10^4, off by 10^-3, the softmax is one at the largest score, or close to it.
    torch.testing.assert_close(found[0].double(), truth[0], rtol=0, atol=1e-2)
    assert all(grad.isfinite().all() for grad in grads)
    capped, grads, _ = run_with_gradients(attend({"scale": 1e4, "softcap": 2.0}), [q, k, v], upstream)
    assert all(x.isfinite().all() for x in (*capped, *grads))


def test_views_of_one_packed_row_give_the_bits_of_copies(interpreted, small_tiles):
    packed = torch.randn(20, 4, 8)
    views = packed.split([2, 1, 1], dim=1)
    copies = [x.contiguous().requires_grad_() for x in views]
    expected, expected_grads, upstream = run_with_gradients(attention, copies)
    found, grads, _ = run_with_gradients(attention, [x.requires_grad_() for x in views], upstream)
    for a, b in zip((*found, *grads), (*expected, *expected_grads), strict=True):
        assert torch.equal(a, b)


def test_bounds_may_replace_cu_seqlens(implementation):
    q, k, v = operands(TOKENS)
    cu_seqlens = torch.tensor(PACKED, dtype=torch.int32)
    bounds = document_bounds(cu_seqlens, TOKENS)
    starts = [0] * 3 + [3] + [4] * 2 + [6] * 17 + [23] * 27
    ends = [3] * 3 + [4] + [6] * 2 + [23] * 17 + [50] * 27
    assert bounds.tolist() == [starts, ends]
    assert bounds.dtype == torch.int32
    assert torch.equal(attention(q, k, v, bounds=bounds), attention(q, k, v, cu_seqlens=cu_seqlens))
    with pytest.raises(ValueError, match="pass only one of them"):
        attention(q, k, v, bounds=bounds, cu_seqlens=cu_seqlens)


def ranges_by_hand(spans, window, whole):
    """[TOKENS, TOKENS] bool mask for the documents of PACKED; tokens of a span all attend to one another."""
    token = torch.arange(TOKENS)
    document = torch.bucketize(token, torch.tensor(PACKED), right=True)
    span = torch.full((TOKENS,), -1)
    for number, (first, end) in enumerate(spans):
        span[first:end] = number
    together = (span[:, None] == span) & (span[:, None] >= 0)
    visible = (token[:, None] >= token) | together
    if window is not None:
        within = token > token[:, None] - window
        visible &= (within | together) if whole else within
    return visible & (document[:, None] == document)


SPANS = {
    "documents": list(itertools.pairwise(PACKED)),
    "some": [(0, 2), (6, 7), (8, 20), (30, 49)],
    "none": [],
}


WINDOWS = ((None, False), (9, False), (5, True))
# Kernels read ranges alone, which the plain twin gets for every pair of spans and a window.
RANGES = [("plain", spans, *window) for spans in SPANS for window in WINDOWS]
RANGES += [("triton", "some", None, False), ("triton", "documents", 9, False), ("triton", "some", 5, True)]


@pytest.mark.parametrize(("implementation", "spans", "window", "whole"), RANGES, indirect=["implementation"])
def test_key_ranges_may_replace_the_causal_mask(
    spans, window, whole, implementation, small_tiles, assert_near
):
    spans = SPANS[spans]
    token = torch.arange(TOKENS)
    rows = torch.stack([token, token + 1])
    for first, end in spans:
        rows[0, first:end], rows[1, first:end] = first, end
    bounds = document_bounds(torch.tensor(PACKED), TOKENS)
    ranges = key_ranges(bounds, rows.int(), window, whole)
    visible = ranges_by_hand(spans, window, whole)
    assert torch.equal(module.visible_keys(TOKENS, ranges, None, token.device), visible)
    first, end = ranges.of_keys
    assert torch.equal((token >= first[:, None]) & (token < end[:, None]), visible.T)
    check_with_mask(ranges, visible, assert_near)
    if spans == SPANS["documents"] and window is None:
        assert all(map(torch.equal, ranges[:2], key_ranges(bounds)[:2]))


def check_with_mask(ranges, visible, assert_near):
    """Compare attention over ranges of keys, and its gradients, with the formula with a mask."""

    def formula(q, k, v, sinks):
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
        return torch.einsum("hqk,khd->qhd", module.attention_weights(scores, visible, None, sinks), v)

    inputs = operands(TOKENS, sinks=True)
    found, grads, upstream = run_with_gradients(
        lambda q, k, v, sinks: attention(q, k, v, bounds=ranges, sinks=sinks), inputs
    )
    truth, true_grads, _ = run_with_gradients(formula, in_float64(inputs), in_float64(upstream))
    for actual, true in zip((*found, *grads), (*truth, *true_grads), strict=True):
        assert_near(actual, true, 48)


# In documents of 3, 17 and 27 tokens; and in one document whole tiles, with a tile of others between them.
MARKED = {PACKED: (0, 2, 7, 9, 10, 24, 25, 40, 48), (0, TOKENS): (*range(16), *range(32, TOKENS))}
MARKS = [("plain", PACKED, 9), ("triton", PACKED, None), ("triton", (0, TOKENS), None)]


@pytest.mark.parametrize(("implementation", "documents", "window"), MARKS, indirect=["implementation"])
def test_marked_tokens_attend_to_one_another_across_others(
    documents, window, implementation, small_tiles, assert_near
):
    token = torch.arange(TOKENS)
    marked = torch.isin(token, torch.tensor(MARKED[documents]))
    bounds = document_bounds(torch.tensor(documents), TOKENS)
    ranges = key_ranges(bounds, marked_spans(bounds, marked.int()), window, marked=marked.int())
    visible = token <= token[:, None]
    if window is not None:
        visible &= token > token[:, None] - window
    visible = (visible | (marked & marked[:, None] & (token > token[:, None]))) & (
        bounds[0] == bounds[0][:, None]
    )
    assert torch.equal(module.visible_keys(TOKENS, ranges, None, token.device), visible)
    check_with_mask(ranges, visible, assert_near)
    with pytest.raises(ValueError, match=r"marked is torch.bool .* expected \[50\] int32"):
        attention(*operands(TOKENS), bounds=ranges._replace(marked=marked))
    with pytest.raises(ValueError, match="no whole spans"):
        key_ranges(bounds, marked_spans(bounds, marked.int()), 3, True, marked.int())


def test_a_window_without_spans_limits_both_sides():
    bounds = document_bounds(torch.tensor(PACKED), TOKENS)
    ranges = key_ranges(bounds, window=3)
    token = torch.arange(TOKENS)
    together = bounds[0] == bounds[0][:, None]
    visible = together & ((token - token[:, None]).abs() < 3)
    assert torch.equal(module.visible_keys(TOKENS, ranges, None, token.device), visible)
    assert torch.equal(*ranges[:2])  # attention is symmetric


def test_ranges_and_a_window_are_refused(implementation):
    ranges = key_ranges(document_bounds(torch.tensor(PACKED), TOKENS))
    with pytest.raises(ValueError, match="pass the window to key_ranges"):
        attention(*operands(TOKENS), bounds=ranges, window=3)
    with pytest.raises(ValueError, match="from key_ranges"):
        attention(*operands(TOKENS), bounds=KeyRanges(ranges.of_queries[:1], ranges.of_keys))


def test_bounds_of_invalid_cu_seqlens_stay_within_the_tokens(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # values are not checked, as on a GPU
    for wrong in ((-5, 2, 6), (0, 3, 9), (4, 1, 9)):
        bounds = document_bounds(torch.tensor(wrong), 6)
        assert bounds.min() >= 0
        assert bounds.max() <= 6


def test_empty_documents_without_any_tokens_are_accepted(implementation):
    inputs = operands(0, sinks=True)
    (out,), grads, _ = run_with_gradients(attend({"cu_seqlens": (0, 0, 0), "window": 3}), inputs)
    assert out.shape == (0, 4, 8)
    assert not grads[3].any()


@every_option
def test_the_plain_twin_passes_gradcheck_in_float64(options):
    if "cu_seqlens" in options:
        options = {**options, "cu_seqlens": (0, 2, 2, 7)}
    if "slopes" in options:
        options = {**options, "slopes": options["slopes"][:2]}
    inputs = operands(7, heads=2, kv_heads=1, dim=3, sinks=True, dtype=torch.float64)
    assert torch.autograd.gradcheck(attend(options), inputs)


def test_it_traces_without_a_graph_break():
    inputs = operands(TOKENS, sinks=True)
    run = attend(OPTIONS["all"])
    found, grads, upstream = run_with_gradients(run, inputs)
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    again, grads_again, _ = run_with_gradients(compiled, inputs, upstream)
    for a, b in zip((*found, *grads), (*again, *grads_again), strict=True):
        assert torch.equal(a, b)


# Against reference implementations


@pytest.mark.parametrize("groups", [1, 2])
def test_it_matches_torchs_attention(groups, implementation):
    q, k, v = operands(24, heads=4, kv_heads=4 // groups, dim=16)
    found, grads, upstream = run_with_gradients(attention, [q, k, v])

    def torchs(q, k, v):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    expected, expected_grads, _ = run_with_gradients(torchs, [q, k, v], upstream)
    for a, b in zip((*found, *grads), (*expected, *expected_grads), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_it_matches_the_eager_attention_of_transformers(family, implementation):
    name = f"transformers.models.{family}.modeling_{family}"
    theirs = pytest.importorskip(name).eager_attention_forward
    q, k, v, sinks = operands(24, dim=16, sinks=True)
    options = {"softcap": 1.5} if family == "gemma2" else {}
    inputs = [q, k, v] if family == "gemma2" else [q, k, v, sinks]
    found, grads, upstream = run_with_gradients(attend({**options, "window": 9, "scale": 0.5}), inputs)

    def reference(q, k, v, sinks=None):
        layer = types.SimpleNamespace(num_key_value_groups=2, sinks=sinks, training=False)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        visible = module.visible_keys(24, None, 9, q.device)
        mask = torch.zeros(24, 24).masked_fill(~visible, torch.finfo(q.dtype).min)
        return theirs(layer, q, k, v, mask, scaling=0.5, **options)[0][0]

    expected, expected_grads, _ = run_with_gradients(reference, inputs, upstream)
    for a, b in zip((*found, *grads), (*expected, *expected_grads), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# Errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.randn(5, 3, 8)}, "must be a multiple of"),
        ({"q": torch.randn(5, 0, 8)}, "must be a multiple of"),
        ({"q": torch.randn(6, 4, 8)}, r"expected q \[T, heads, D\]"),
        ({"k": torch.randn(5, 2, 4)}, r"expected q \[T, heads, D\]"),
        ({"v": torch.randn(5, 1, 8)}, r"v \[T, kv_heads, V\]"),
        ({"v": torch.randn(5, 2, 0)}, "head size is 0"),
        ({"v": torch.randn(5, 2, 513)}, "head size is 513"),
        ({"k": torch.randn(5, 2, 8).double()}, "expected one dtype"),
        ({"window": 0}, "window is 0"),
        ({"softcap": 0.0}, "softcap is 0.0"),
        ({"softcap": float("inf")}, "softcap is inf"),
        ({"sinks": torch.randn(2)}, "expected \[4\]"),
        ({"cu_seqlens": torch.tensor([0, 4])}, "rise from 0 to the number of tokens, 5"),
        ({"cu_seqlens": torch.tensor([0, 3, 2, 5])}, "rise from 0"),
        ({"cu_seqlens": torch.tensor(5)}, "documents . 1"),
        ({"bounds": torch.zeros(2, 4, dtype=torch.int32)}, r"expected \[2, 5\]"),
    ],
)
def test_incompatible_inputs_are_refused(change, message, implementation):
    q, k, v = operands(5)
    with pytest.raises(ValueError, match=message):
        attention(**{"q": q, "k": k, "v": v, **change})


def test_too_wide_heads_and_wrong_types_are_refused(implementation):
    with pytest.raises(ValueError, match="head size is 513"):
        attention(*operands(2, dim=513))
    q, k, v = operands(5)
    with pytest.raises(TypeError, match="sinks holds"):
        attention(q, k, v, sinks=torch.zeros(4, dtype=torch.int32))
    with pytest.raises(TypeError, match="expected int32 or int64"):
        attention(q, k, v, cu_seqlens=torch.tensor([0.0, 5.0]))
    with pytest.raises(ValueError, match="move them to one device"):
        attention(q, k, v, cu_seqlens=torch.tensor([0, 5]).to("meta"))


def test_rows_that_tma_cannot_load_use_ordinary_loads(interpreted):
    """TMA needs distinct rows, row strides that are multiples of 16 bytes, and contiguous heads."""
    rows = torch.zeros(5, 2, 64, dtype=torch.bfloat16)
    assert None not in rows_to_copy(32, rows, rows.clone())
    for other in (
        rows[:1].expand(5, 2, 64),
        rows.float(),
        rows[..., :48],
        rows.transpose(0, 1).contiguous().transpose(0, 1),
        torch.zeros(5 * 129, dtype=torch.bfloat16).as_strided((5, 2, 64), (129, 64, 1)),
    ):
        assert rows_to_copy(32, rows, other) == [None, None]
