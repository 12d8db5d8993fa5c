"""Every attention backend that runs on a CPU computes the plain twin's formula."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch
import torch.nn.functional as F

from liger_models.convert.checkpoints.layout import canonical_forms
from liger_models.layers.attention import backends, fused
from liger_models.layers.attention.backends import attend, attend_plain, visible
from liger_models.layers.attention.cached import attend_cached
from liger_models.layers.attention.self_attention import Attention
from liger_models.layers.model.causal_lm import CausalLM
from liger_models.layers.sequences.cache import KVCache
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.sequences.visibility import Visibility
from liger_models.layers.specs import (
    AttentionSpec,
    BlockSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
    QKNormSpec,
    RopeSpec,
)

ROWS, LENGTH, DIM = 2, 13, 8
PACKED = torch.tensor([0, 5, 5, 6, 20, 26])  # an empty document, one with one token, one over two rows


def heads(
    groups: int, window: int | None, softcap: float | None = None, sinks: bool = False
) -> AttentionSpec:
    return AttentionSpec(4, 4 // groups, DIM, 0.3, window=window, softcap=softcap, sinks=sinks)


def sequences_of(form: str) -> Sequences:
    shape, device = (ROWS, LENGTH), torch.device("cpu")
    if form == "packed":
        return Sequences.from_call(shape, device, cu_seqlens=PACKED)
    if form == "padded":
        mask = torch.arange(LENGTH) >= torch.tensor([[0], [4]])
        return Sequences.from_call(shape, device, attention_mask=mask)
    return Sequences.from_call(shape, device)


def attention_by_hand(q, k, v, spec, documents, sinks=None):
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
            scores = k[seen, group] @ q[t, head] * spec.scale
            if spec.softcap is not None:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head : head + 1]])
            out[t, head] = scores.softmax(0)[: len(seen)] @ v[seen, group]
    return out


def random_qkv(tokens: int, spec: AttentionSpec):
    """float64 views of one packed row, as the model has them."""
    width = (spec.q_size + 2 * spec.kv_size) // DIM
    packed = torch.randn(tokens, width, DIM, dtype=torch.float64, requires_grad=True)
    sizes = [spec.num_attention_heads, spec.num_key_value_heads, spec.num_key_value_heads]
    return packed, packed.split(sizes, dim=1)


def random_sinks(spec: AttentionSpec) -> torch.Tensor | None:
    return torch.randn(4, dtype=torch.float64, requires_grad=True) if spec.sinks else None


@pytest.mark.parametrize("extras", [(None, False), (1.5, False), (None, True), (1.5, True)])
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize(("groups", "new"), [(1, 1), (4, 1), (2, 3)])
def test_new_tokens_attend_to_the_same_keys_as_in_a_full_pass(groups, new, window, extras):
    torch.manual_seed(0)
    spec, lengths = heads(groups, window, *extras), [9, 3]
    sinks = random_sinks(spec)
    cache = KVCache([], 2, torch.device("cpu"))
    cache.lengths, cache.longest = torch.tensor(lengths) - 1, 11
    cache.reserve(torch.ones(2, dtype=torch.long), 1)
    mask = cache.mask(0, window)
    for before in range(1, new):  # earlier new tokens have the mask of the last one, shifted to the left
        earlier = mask[:, -1:].roll(-before, 2)
        earlier[..., -before:] = False
        mask = torch.cat([earlier, mask], 1)
    room = [torch.randn(2, 12, spec.num_key_value_heads, DIM, dtype=torch.float64) for _ in range(2)]
    q = torch.randn(2, new, 4, DIM, dtype=torch.float64)
    found = attend_cached(q.flatten(0, 1), *room, spec, mask, sinks).unflatten(0, (2, new))
    for row, length in enumerate(lengths):
        alone = Sequences.from_call((1, length), q.device)
        queries = torch.randn(length, 4, DIM, dtype=torch.float64)
        queries[-new:] = q[row]
        k, v = (x[row, :length] for x in room)
        expected = attend_plain(queries, k, v, spec, alone, sinks)[-new:]
        torch.testing.assert_close(found[row], expected, rtol=1e-12, atol=1e-12)


def pieces(sequences: Sequences, chunk: int) -> list[tuple[int, int]]:
    """The document and chunk of each token."""
    lengths = sequences.documents.boundaries().diff().tolist()
    return [(document, i // chunk) for document, n in enumerate(lengths) for i in range(n)]


@pytest.mark.parametrize("extras", [(None, False), (1.5, True)])
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("chunk", [1, 4, 13, 14])
@pytest.mark.parametrize("form", ["rows", "packed", "padded"])
def test_a_query_attends_to_its_own_chunk_only(form, chunk, window, extras):
    torch.manual_seed(0)
    spec = dataclasses.replace(heads(2, window, *extras), chunk=chunk)
    sequences, sinks = sequences_of(form), random_sinks(spec)
    packed, qkv = random_qkv(sequences.documents.num_tokens, spec)
    expected = attention_by_hand(*qkv, spec, pieces(sequences, chunk), sinks)
    cotangent = torch.randn_like(expected)
    (truth,) = torch.autograd.grad(expected, packed, cotangent, retain_graph=True)
    for found in (attend(*qkv, spec, sequences, "auto", sinks), attend_plain(*qkv, spec, sequences, sinks)):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        (gradient,) = torch.autograd.grad(found, packed, cotangent, retain_graph=True)
        torch.testing.assert_close(gradient, truth, rtol=1e-11, atol=1e-12)


SPANS = [(1, 3), (3, 4), (8, 12), (21, 25)]


def look_ahead(sequences: Sequences) -> list[tuple[int, int]]:
    """The span of each token, as passed to the sequences: all tokens belong to one document."""
    rows = torch.arange(sequences.documents.num_tokens).repeat(2, 1)
    rows[1] += 1
    span = list(range(100, 100 + sequences.documents.num_tokens))
    documents = pieces(sequences, 99)
    for first, end in SPANS:
        if end <= sequences.documents.num_tokens and documents[first] == documents[end - 1]:
            rows[0, first:end], rows[1, first:end] = first, end
            span[first:end] = [first] * (end - first)
    sequences.visibility = Visibility(sequences.documents, rows.int())
    return span


@pytest.mark.parametrize("extras", [(None, False), (1.5, True)])
@pytest.mark.parametrize(("window", "whole"), [(None, False), (2, False), (2, True)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("form", ["rows", "packed", "padded"])
def test_a_query_attends_to_all_of_its_span_or_document(form, causal, window, whole, extras):
    torch.manual_seed(0)
    if not causal and window is not None:
        window = None
    spec = dataclasses.replace(heads(2, window, *extras), causal=causal, whole_spans=whole)
    sequences, sinks = sequences_of(form), random_sinks(spec)
    documents = pieces(sequences, 99)
    span = look_ahead(sequences) if causal else documents
    packed, (q, k, v) = random_qkv(sequences.documents.num_tokens, spec)
    expected = torch.zeros_like(q)
    for t in range(len(q)):
        seen = [
            s
            for s in range(len(q))
            if ((documents[s] == documents[t] and s <= t) or span[s] == span[t])
            and (window is None or t - s < window or (whole and span[s] == span[t]))
        ]
        for head in range(4):
            scores = k[seen, head // 2] @ q[t, head] * spec.scale
            if spec.softcap is not None:
                scores = torch.cat([spec.softcap * torch.tanh(scores / spec.softcap), sinks[head : head + 1]])
            expected[t, head] = scores.softmax(0)[: len(seen)] @ v[seen, head // 2]
    cotangent = torch.randn_like(expected)
    (truth,) = torch.autograd.grad(expected, packed, cotangent, retain_graph=True)
    for found in (
        attend(q, k, v, spec, sequences, "auto", sinks),
        attend_plain(q, k, v, spec, sequences, sinks),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        (gradient,) = torch.autograd.grad(found, packed, cotangent, retain_graph=True)
        torch.testing.assert_close(gradient, truth, rtol=1e-11, atol=1e-12)


def test_chunks_that_divide_the_rows_need_no_mask():
    spec = dataclasses.replace(heads(2, None), chunk=4)
    sequences = Sequences.from_call((2, 12), torch.device("cpu"))
    _, qkv = random_qkv(24, spec)
    found = attend(*qkv, spec, sequences, "sdpa")  # supports neither boundaries nor masks
    torch.testing.assert_close(found, attend_plain(*qkv, spec, sequences), rtol=1e-12, atol=1e-12)


def test_every_query_attends_to_a_key():
    """A row without a visible key would be a softmax over nothing: NaN."""
    for form in ("rows", "packed", "padded"):
        assert visible(heads(1, window=1), sequences_of(form).visibility).sum(1).eq(1).all()


@pytest.mark.parametrize("rows", [1, 13])  # rows of the mask: one for all queries, or one for each
@pytest.mark.parametrize("most", [1, 40, 16 * 12])  # 1, 2 or 12 of 13 queries at a time
def test_masks_with_too_many_scores_for_a_kernel_are_split_by_queries(rows, most, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 8, dtype=torch.float64, generator=generator) for n in (13, 11, 11))
    mask = torch.rand(2, 1, rows, 11, generator=generator) < 0.5
    mask[..., 3] = True

    def results():
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = fused.masked_attention(*leaves, mask, 0.3)
        (out * torch.arange(out.numel()).view_as(out)).sum().backward()
        return [out, *(x.grad for x in leaves)]

    expected, sizes, attention = results(), [], F.scaled_dot_product_attention

    def counted(q, k, *args, **options):
        sizes.append(q.shape[2])
        return attention(q, k, *args, **options)

    monkeypatch.setattr(fused, "_MOST_SCORES", most)
    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    for found, whole in zip(results(), expected, strict=True):
        torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)  # float64, sums in another order
    assert sum(sizes) == 13
    assert max(sizes) == max(most // 16, 1)  # rows of 11 keys have a stride of 16


@pytest.mark.parametrize(("form", "window"), [("packed", None), ("padded", None), ("rows", 12)])
def test_sdpa_refuses_unsupported_inputs(form, window):
    spec, sequences = heads(1, window), sequences_of(form)
    _, qkv = random_qkv(sequences.documents.num_tokens, spec)
    with pytest.raises(ValueError, match="use 'auto'"):
        attend(*qkv, spec, sequences, "sdpa")


def test_an_unknown_backend_is_refused(make_model):
    spec, sequences = heads(1, None), sequences_of("rows")
    _, qkv = random_qkv(sequences.documents.num_tokens, spec)
    with pytest.raises(ValueError, match=r"'fast'.*choose one of auto"):
        attend(*qkv, spec, sequences, "fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'fast'.*choose one of auto"):
        make_model(attention="fast")


@pytest.mark.parametrize("backend", ["sdpa", "varlen", "masked"])
@pytest.mark.parametrize("extras", [(1.5, False), (None, True)])
def test_backends_without_soft_cap_and_sinks_refuse_them(extras, backend):
    spec, sequences = heads(1, None, *extras), sequences_of("rows")
    _, qkv = random_qkv(sequences.documents.num_tokens, spec)
    with pytest.raises(ValueError, match=rf"'{backend}' supports neither soft cap, sinks nor slopes"):
        attend(*qkv, spec, sequences, backend, random_sinks(spec))


@pytest.mark.parametrize("sinks", [False, True])
def test_unexpected_and_missing_sinks_are_refused(sinks):
    spec, sequences = heads(1, None, sinks=sinks), sequences_of("rows")
    _, qkv = random_qkv(sequences.documents.num_tokens, spec)
    with pytest.raises(ValueError, match=f"the spec says sinks={sinks}"):
        attend(*qkv, spec, sequences, "auto", None if sinks else torch.zeros(4))


# Requests, and the backend chosen on a GPU with Triton.
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
CHOICES = [
    ("rows", {}, BF16, "sdpa"),
    ("rows", {}, F32, "sdpa"),
    ("rows", {"window": 13}, BF16, "sdpa"),
    ("rows", {"window": 4}, BF16, "triton"),
    ("packed", {}, BF16, "triton"),
    ("packed", {"window": 4}, BF16, "triton"),
    ("packed", {}, F32, "triton"),
    ("rows", {"window": 4}, F32, "triton"),
    ("packed", {"head_dim": 20}, BF16, "triton"),
    ("rows", {"softcap": 30.0}, BF16, "triton"),
    ("rows", {"sinks": True}, BF16, "triton"),
    ("packed", {"softcap": 30.0, "window": 4}, F32, "triton"),
    ("packed", {}, F64, "masked"),
    ("packed", {"head_dim": 520}, BF16, "masked"),
    ("rows", {"sinks": True, "head_dim": 520}, BF16, "eager"),
    ("rows", {"softcap": 30.0}, F64, "eager"),
    ("rows", {"head_dim": 512}, BF16, "triton"),
    ("packed", {"head_dim": 512}, BF16, "triton"),
    ("rows", {"head_dim": 520}, BF16, "sdpa"),
]


def choice(spec, dtype, form, value_dim=None):
    """The choice of `auto` on a GPU."""

    def operand(dim):
        device = types.SimpleNamespace(index=0)
        return types.SimpleNamespace(is_cuda=True, device=device, dtype=dtype, shape=(ROWS * LENGTH, 4, dim))

    qkv = (operand(dim) for dim in (spec.head_dim, spec.head_dim, value_dim or spec.head_dim))
    return backends._choose(*qkv, spec, sequences_of(form).visibility)


def fits(q, v):
    """`has_tiles` of a data centre's GPU."""
    return max(q.shape[-1], v.shape[-1]) <= 512


@pytest.mark.parametrize(("form", "asked", "dtype", "backend"), CHOICES)
def test_auto_chooses_by_the_request(form, asked, dtype, backend, monkeypatch):
    monkeypatch.setattr(backends, "use_triton", lambda q: q.dtype != F64)
    monkeypatch.setattr(backends, "has_tiles", fits)
    monkeypatch.setattr(backends, "has_matrix_units", lambda index: True)
    monkeypatch.setattr(backends, "_cudnn_takes", lambda *_: False)
    assert choice(dataclasses.replace(heads(1, None), **asked), dtype, form) == backend


@pytest.mark.parametrize("cudnn", [False, True])
def test_values_of_another_size_go_to_cudnn_if_it_supports_them(cudnn, monkeypatch):
    monkeypatch.setattr(backends, "use_triton", lambda q: True)
    monkeypatch.setattr(backends, "has_tiles", fits)
    monkeypatch.setattr(backends, "_cudnn_takes", lambda *_: cudnn)
    spec = dataclasses.replace(heads(1, None), head_dim=192)
    assert choice(spec, BF16, "rows", 128) == ("sdpa" if cudnn else "triton")
    assert choice(spec, BF16, "packed", 128) == "triton"
    monkeypatch.setattr(backends, "use_triton", lambda q: False)
    monkeypatch.setattr(backends, "has_matrix_units", lambda index: True)
    assert choice(spec, BF16, "rows", 128) == "sdpa"
    assert choice(spec, BF16, "packed", 128) == "masked"  # varlen does not support them


WITHOUT_TRITON = [
    ("rows", {}, BF16, "sdpa"),
    ("rows", {"window": 4}, BF16, "varlen"),
    ("packed", {}, BF16, "varlen"),
    ("packed", {}, F32, "masked"),
    ("packed", {"head_dim": 20}, BF16, "masked"),
    ("packed", {"sinks": True}, BF16, "eager"),
]


@pytest.mark.parametrize(("form", "asked", "dtype", "backend"), WITHOUT_TRITON)
def test_auto_chooses_torch_on_a_gpu_where_the_kernel_would_run_its_twin(
    form, asked, dtype, backend, monkeypatch
):
    """As under torch.compile."""
    monkeypatch.setattr(backends, "use_triton", lambda q: False)
    monkeypatch.setattr(backends, "has_matrix_units", lambda index: True)
    monkeypatch.setattr(backends, "has_varlen", lambda device: True)
    assert choice(dataclasses.replace(heads(1, None), **asked), dtype, form) == backend


@pytest.mark.parametrize("window", [None, 4])
def test_packed_documents_on_a_cpu_cost_the_sum_of_their_squares(window, monkeypatch):
    calls = []
    torchs = F.scaled_dot_product_attention

    def noted(q, k, v, attn_mask=None, *rest, **options):
        calls.append((q.shape[2], k.shape[2], attn_mask is not None))
        return torchs(q, k, v, attn_mask, *rest, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    spec, sequences = heads(2, window), sequences_of("packed")
    _, qkv = random_qkv(sequences.documents.num_tokens, spec)
    attend(*qkv, spec, sequences)
    lengths = [5, 1, 14, 6]
    assert calls == [(n, n, window is not None and n > window) for n in lengths]


@pytest.mark.parametrize("extras", [(None, False), (1.5, True)])
@pytest.mark.parametrize(("window", "chunk"), [(None, None), (4, None), (None, 3)])
@pytest.mark.parametrize("form", ["rows", "packed"])
def test_it_compiles_without_a_graph_break_to_the_same_values(form, window, chunk, extras):
    torch.manual_seed(0)
    torch.compiler.reset()  # a function is recompiled only a limited number of times
    spec = dataclasses.replace(heads(2, window, *extras), chunk=chunk)
    _, qkv = random_qkv(ROWS * LENGTH, spec)
    sinks = random_sinks(spec)
    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    found = compiled(*qkv, spec, sequences_of(form), "auto", sinks)
    expected = attend_plain(*qkv, spec, sequences_of(form), sinks)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def layer_with_everything(**changes) -> Attention:
    torch.manual_seed(0)
    spec = AttentionSpec(4, 2, DIM, 0.3, RopeSpec(DIM), window=4, softcap=1.5, sinks=True)
    spec = dataclasses.replace(spec, **changes)
    layer = Attention(24, spec).double()
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(std=1 / p.shape[-1] ** 0.5 if p.dim() > 1 else 1.0)
    return layer


def prepared(layer: Attention, shape: tuple[int, int], **options) -> Sequences:
    sequences = Sequences.from_call(shape, torch.device("cpu"), **options)
    sequences.prepare_rotary(layer.spec.ropes)
    return sequences


def test_a_layer_trains_its_sinks_and_applies_its_soft_cap():
    layer = layer_with_everything()
    x = torch.randn(26, 24, dtype=torch.float64)
    sequences = prepared(layer, (ROWS, LENGTH), cu_seqlens=PACKED)
    q, k, v = layer._query_key_value(layer.qkv_proj(x), sequences)
    documents = [0] * 5 + [1] + [2] * 14 + [3] * 6
    expected = layer.o_proj(attention_by_hand(q, k, v, layer.spec, documents, layer.sinks).flatten(1))
    found = layer(x, sequences)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    cotangent = torch.randn_like(found)
    gradients = [torch.autograd.grad(y, list(layer.parameters()), cotangent) for y in (found, expected)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
    assert layer.sinks in set(layer.parameters())


@pytest.mark.parametrize("changes", [{}, {"chunk": 3}, {"chunk": 6, "window": None}], ids=str)
def test_a_layer_with_a_cache_equals_a_full_pass(changes):
    layer = layer_with_everything(**changes)
    x = torch.randn(7, 24, dtype=torch.float64)
    expected = layer(x, prepared(layer, (1, 7)))
    torch.testing.assert_close(with_cache(layer, x), expected, rtol=1e-12, atol=1e-12)


def with_cache(layer: Attention, x: torch.Tensor) -> torch.Tensor:
    """The layer's output for a row of seven tokens in three calls."""
    cache, found = KVCache([layer.new_cache(1, 7, x.device, x.dtype)], 1, x.device), []
    for start, end in ((0, 5), (5, 6), (6, 7)):
        positions = cache.reserve(torch.tensor([end - start]), end - start)
        step = prepared(layer, (1, end - start), position_ids=positions)
        step.cache = cache
        found.append(layer(x[start:end], step))
    return torch.cat(found)


@pytest.mark.parametrize(
    "changes",
    [{}, {"softcap": None, "sinks": False}, {"rope": None}, {"qk_norm": QKNormSpec(NormSpec())}],
    ids=["all", "plain softmax", "without positions", "norms"],
)
def test_narrow_values_are_wide_ones_whose_other_elements_are_zero(changes):
    """Outputs and gradients, of packed documents and with a cache."""
    wide = layer_with_everything(**changes)
    narrow = Attention(24, dataclasses.replace(wide.spec, v_head_dim=5)).double()
    kept = torch.arange(2 * DIM).view(2, DIM)[:, :5].flatten()
    rows = torch.cat([torch.arange(6 * DIM), 6 * DIM + kept])
    columns = torch.arange(4 * DIM).view(4, DIM)[:, :5].flatten()
    with torch.no_grad():
        for name, p in narrow.named_parameters():
            whole = wide.get_parameter(name)
            p.copy_(whole[rows] if "qkv" in name else whole[:, columns] if "o_proj" in name else whole)
        others = torch.ones(8 * DIM, dtype=torch.bool)
        others[rows] = False
        wide.qkv_proj.weight[others] = 0
    x = torch.randn(26, 24, dtype=torch.float64)
    pair = [layer(x, prepared(layer, (ROWS, LENGTH), cu_seqlens=PACKED)) for layer in (wide, narrow)]
    torch.testing.assert_close(pair[1], pair[0], rtol=1e-12, atol=1e-12)
    dwide, dnarrow = (
        torch.autograd.grad(y.square().sum(), layer.qkv_proj.weight)[0]
        for y, layer in zip(pair, (wide, narrow), strict=True)
    )
    torch.testing.assert_close(dnarrow, dwide[rows], rtol=1e-10, atol=1e-11)
    cached = [with_cache(layer, x[:7]) for layer in (wide, narrow)]
    torch.testing.assert_close(cached[1], cached[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("changes", [{"gated": True}, {"values_are_keys": True, "qk_norm": QKNormSpec()}])
def test_narrow_values_next_to_gates_or_equal_to_keys_are_refused(changes):
    with pytest.raises(ValueError, match="heads of values are 5 wide and those of keys 8"):
        Attention(24, AttentionSpec(4, 2, DIM, 0.3, v_head_dim=5, **changes))


def test_the_weight_map_includes_sinks_if_the_layer_has_them():
    forms = canonical_forms(layer_with_everything())
    assert set(forms) == {name for name, _ in layer_with_everything().named_parameters()}
    assert forms["sinks"].name == "sinks"
    assert not any("sinks" in name for name in canonical_forms(Attention(24, heads(1, None))))


def test_a_model_maps_and_initialises_its_sinks():
    attention = dataclasses.replace(heads(2, 4, 1.5, True), rope=RopeSpec(DIM))
    block = BlockSpec(attention, MLPSpec(40), NormSpec())
    model = CausalLM(ModelSpec(61, 24, (block, block), NormSpec(), initializer_range=0.3))
    assert set(model.weight_map()) == {name for name, _ in model.named_parameters()}
    assert model.weight_map()["layers.1.self_attn.sinks"].name == "model.layers.1.self_attn.sinks"
    with torch.no_grad():
        model.layers[0].self_attn.sinks.fill_(float("nan"))
    model.reset_parameters(torch.Generator().manual_seed(0))
    # Four normal numbers with a standard deviation of 0.3
    assert 0 < model.layers[0].self_attn.sinks.abs().max() < 5 * 0.3
