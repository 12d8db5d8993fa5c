"""The layer of experts against the formula written out, and against the blocks of transformers."""

import pytest
import torch
import torch.nn.functional as F
from moe_problem import CLAMPED, doubled, formula, operands, run, weighing_inputs, with_biases, without_gates

from liger_models.kernels import ClampedSwiGLU, moe_experts, route
from liger_models.kernels.activations.gated import activation_constants
from liger_models.kernels.experts import _expert_passes
from liger_models.kernels.experts._expert_operators import experts_operator
from liger_models.kernels.experts._expert_order import sort_by_expert
from liger_models.kernels.experts.moe_experts import moe_experts_plain


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"tokens": 7, "hidden": 10, "inner": 6, "num_experts": 5, "top_k": 2}, {}),
        # All tokens to one expert, the others empty; two tiles of rows, and an inner size that fills no tile.
        ({"tokens": 70, "hidden": 33, "inner": 20, "num_experts": 3, "top_k": 1, "favourite": 1}, {}),
        # Every token to every expert; several tiles of columns.
        (
            {"tokens": 5, "hidden": 70, "inner": 33, "num_experts": 4, "top_k": 4},
            {"activation": "gelu_tanh"},
        ),
        ({"tokens": 3, "hidden": 4, "inner": 8, "num_experts": 9, "top_k": 2}, {"activation": "gelu"}),
        ({"tokens": 70, "hidden": 33, "inner": 20, "num_experts": 3, "top_k": 1}, {"weighted": "inputs"}),
        (
            {"tokens": 7, "hidden": 10, "inner": 300, "num_experts": 5, "top_k": 2},
            {"weighted": "inputs", "activation": "gelu_tanh"},
        ),
        (
            {"tokens": 7, "hidden": 10, "inner": 6, "num_experts": 5, "top_k": 3},
            {"weighted": "inputs", "activation": CLAMPED},
        ),
    ],
)
def test_result_and_gradients_match_the_formula(sizes, options, implementation, assert_near):
    inputs = operands(**sizes)
    upstream = torch.randn(sizes["tokens"], sizes["hidden"])
    truth = run(formula, doubled(inputs), upstream, **options)
    # The sums of two products, of up to 110 terms together, random-walk to about 10 roundings, on top of
    # those of their operands.
    for actual, expected in zip(run(moe_experts, inputs, upstream, **options), truth, strict=True):
        assert_near(actual, expected, 32)


@pytest.mark.parametrize(
    "sizes",
    [
        {"tokens": 7, "hidden": 10, "inner": 6, "num_experts": 5, "top_k": 2},
        {"tokens": 70, "hidden": 33, "inner": 20, "num_experts": 3, "top_k": 1, "favourite": 1},
        {"tokens": 3, "hidden": 4, "inner": 8, "num_experts": 9, "top_k": 2},
        # Experts with one tile of tokens and with two, and several blocks of columns of either width.
        {"tokens": 90, "hidden": 70, "inner": 100, "num_experts": 3, "top_k": 2},
    ],
)
def test_biases_and_a_clamped_activation_match_the_formula(sizes, implementation, assert_near):
    inputs = operands(**sizes, biases=True)
    upstream = torch.randn(sizes["tokens"], sizes["hidden"])
    truth = run(with_biases(formula), doubled(inputs), upstream)
    # As without biases; one of them is the sum of up to 180 rows.
    for actual, expected in zip(run(with_biases(moe_experts), inputs, upstream), truth, strict=True):
        assert_near(actual, expected, 32)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"tokens": 7, "hidden": 10, "inner": 6, "num_experts": 5, "top_k": 2}, {}),
        # Empty experts, and rows of more columns than a block.
        ({"tokens": 70, "hidden": 33, "inner": 300, "num_experts": 3, "top_k": 1, "favourite": 1}, {}),
        ({"tokens": 7, "hidden": 10, "inner": 20, "num_experts": 4, "top_k": 3}, {"weighted": "inputs"}),
    ],
)
def test_experts_without_gates_match_the_formula(sizes, options, implementation, assert_near):
    inputs = operands(**sizes)
    upstream = torch.randn(sizes["tokens"], sizes["hidden"])
    truth = run(without_gates(formula), doubled(inputs), upstream, **options)
    # As with gates, of sums of up to 333 terms.
    for actual, expected in zip(
        run(without_gates(moe_experts), inputs, upstream, **options), truth, strict=True
    ):
        assert_near(actual, expected, 64)


@pytest.mark.parametrize("kept", ["some", "none", "all"])
def test_slots_without_an_expert_add_nothing(kept, implementation, assert_near):
    """A slot without an expert, as occurs with experts sharded over ranks, acts like a weight of zero.

    Its weight gets no gradient.
    """
    inputs = operands(17, 10, 6, 5, 3, biases=True)
    _, weights, experts = inputs[:3]
    away = {"some": torch.rand(experts.shape) < 0.6, "none": experts >= 0, "all": experts < 0}[kept]
    upstream = torch.randn(17, 10)
    masked = [inputs[0], weights.detach().masked_fill(away, 0).requires_grad_(), *inputs[2:]]
    y, dx, dweights, *dmatrices = run(with_biases(formula), doubled(masked), upstream)
    inputs[2] = experts.masked_fill(away, -1)

    def ours(*inputs):
        return moe_experts(*inputs[:-2], CLAMPED, *inputs[-2:], num_rows=int((~away).sum()))

    expected = [y, dx, dweights.masked_fill(away, 0), *dmatrices]
    for actual, truth in zip(run(ours, inputs, upstream), expected, strict=True):
        assert_near(actual, truth, 32)  # as for the formula above


def test_slots_without_an_expert_are_counted_and_refused_under_compile(monkeypatch):
    x, weights, experts, *matrices = operands(7, 10, 6, 5, 2)
    experts[0, 0] = -1
    with pytest.raises(IndexError, match="from -1 to"):
        moe_experts(x, weights, experts, *matrices)
    with pytest.raises(ValueError, match="num_rows is 14, but 13 slots have an expert"):
        moe_experts(x, weights, experts, *matrices, num_rows=14)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(ValueError, match="empty slots are not supported under"):
        moe_experts(x, weights, experts, *matrices, num_rows=13)


def test_either_bias_alone_is_added_and_gets_its_gradient(implementation, assert_near):
    *inputs, gate_up_bias, down_bias = operands(7, 10, 6, 5, 2, biases=True)
    upstream = torch.randn(7, 10)
    for name, bias in (("gate_up_bias", gate_up_bias), ("down_bias", down_bias)):

        def ours(*operands, name=name):
            return moe_experts(*operands[:-1], **{name: operands[-1]})

        def theirs(*operands, name=name):
            return formula(*operands[:-1], **{name: operands[-1]})

        truth = run(theirs, doubled([*inputs, bias]), upstream)
        for actual, expected in zip(run(ours, [*inputs, bias], upstream), truth, strict=True):
            assert_near(actual, expected, 32)


def test_the_experts_of_gpt_oss_in_transformers_give_the_same_result_and_gradients(implementation):
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    config = modeling.GptOssConfig(hidden_size=24, intermediate_size=20, num_local_experts=6)
    config._experts_implementation = "eager"
    theirs = modeling.GptOssExperts(config)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=1.0)  # so that gates and ups pass the limit of 7
    x = torch.randn(15, 24, requires_grad=True)
    weights, experts = torch.randn(15, 6).softmax(-1).topk(3)
    weights.requires_grad_()
    parameters = theirs.gate_up_proj, theirs.down_proj, theirs.gate_up_proj_bias, theirs.down_proj_bias
    expected = theirs(x, experts, weights)
    # In transformers, the input dimension comes first, and gates and ups alternate.
    gate_up, down, gate_up_bias, down_bias = parameters
    gate_up, gate_up_bias = (torch.cat([t[..., ::2], t[..., 1::2]], -1) for t in (gate_up, gate_up_bias))
    actual = moe_experts(x, weights, experts, gate_up.mT, down.mT, ClampedSwiGLU(), gate_up_bias, down_bias)
    upstream = torch.randn_like(expected)
    leaves = x, weights, *parameters
    for a, b in zip(
        (actual, *torch.autograd.grad(actual, leaves, upstream)),
        (expected, *torch.autograd.grad(expected, leaves, upstream)),
        strict=True,
    ):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe"])
def test_a_block_of_transformers_gives_the_same_result_and_gradients(family):
    modeling = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    name = next(n for n in dir(modeling) if n.lower().endswith("sparsemoeblock"))
    config_class = getattr(modeling, name[: -len("SparseMoeBlock")] + "Config")
    config = config_class(
        hidden_size=24,
        intermediate_size=20,
        moe_intermediate_size=20,
        num_local_experts=6,
        num_experts=6,
        num_experts_per_tok=3,
    )
    config._experts_implementation = "eager"
    block = getattr(modeling, name)(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 15, 24, requires_grad=True)
    expected = block(x)
    upstream = torch.randn_like(expected)
    operands = (x, block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj)

    rows = x.flatten(0, 1)
    weights, experts = route(rows @ block.gate.weight.T, 3, renormalize=family == "mixtral")
    actual = moe_experts(rows, weights, experts, *operands[2:]).view_as(x)
    pairs = [(actual, expected)]
    pairs += zip(
        torch.autograd.grad(actual, operands, upstream),
        torch.autograd.grad(expected, operands, upstream),
        strict=True,
    )
    for a, b in pairs:
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()


def test_the_plain_twin_passes_gradcheck():
    x, weights, experts, gate_up, down = doubled(operands(4, 3, 2, 3, 2))
    assert torch.autograd.gradcheck(
        lambda x, w, g, d: moe_experts_plain(x, w, experts, g, d), (x, weights, gate_up, down)
    )
    assert torch.autograd.gradcheck(
        lambda x, w, g, d: weighing_inputs(moe_experts_plain)(x, w, experts, g, d),
        (x, weights, gate_up, down),
    )
    assert torch.autograd.gradcheck(
        lambda x, w, g, d: without_gates(moe_experts_plain)(x, w, experts, g, d), (x, weights, gate_up, down)
    )
    x, weights, experts, *matrices = doubled(operands(4, 3, 2, 3, 2, biases=True))
    assert torch.autograd.gradcheck(
        lambda x, w, *m: with_biases(moe_experts_plain)(x, w, experts, *m), (x, weights, *matrices)
    )


def test_no_tokens_give_no_rows_and_zero_gradients(implementation):
    x, weights, experts, gate_up, down = operands(0, 6, 4, 3, 2)
    y = moe_experts(x, weights, experts, gate_up, down)
    assert y.shape == (0, 6)
    for grad, operand in zip(
        torch.autograd.grad(y.sum(), (x, weights, gate_up, down)), (x, weights, gate_up, down), strict=True
    ):
        assert torch.equal(grad, torch.zeros_like(operand))


def test_an_expert_without_tokens_gets_a_zero_gradient(implementation):
    x, weights, experts, gate_up, down = operands(6, 5, 4, 3, 1, favourite=1)
    grads = torch.autograd.grad(moe_experts(x, weights, experts, gate_up, down).sum(), (gate_up, down))
    for grad in grads:
        assert torch.equal(grad[[0, 2]], torch.zeros_like(grad[[0, 2]]))
        assert grad[1].abs().min() > 0


def test_a_second_backward_and_a_second_run_give_the_same_bits_and_leave_inputs_alone(implementation):
    inputs = operands(9, 6, 5, 3, 2)
    before = [t.detach().clone() for t in inputs]
    upstream = torch.randn(9, 6)
    upstream_before = upstream.clone()
    y = moe_experts(*inputs)
    floating = [t for t in inputs if t.is_floating_point()]
    first = torch.autograd.grad(y, floating, upstream, retain_graph=True)
    second = torch.autograd.grad(y, floating, upstream)
    for a, b, c in zip((y, *first), (y, *second), run(moe_experts, inputs, upstream), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    for a, b in zip((*inputs, upstream), (*before, upstream_before), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("biases", "wanted"),
    [
        *[(True, each) for each in ((0,), (1,), (3,), (4,), (3, 4), (0, 3, 4), (5,), (6,), (1, 6))],
        *[(False, each) for each in ((1,), (3, 4))],
    ],
)
def test_frozen_operands_cost_no_product(wanted, biases, interpreted, monkeypatch):
    inputs = operands(4, 6, 5, 3, 2, biases=biases)
    upstream = torch.randn(4, 6)
    function = with_biases(moe_experts) if biases else weighing_inputs(moe_experts)
    floating = [i for i in range(len(inputs)) if i != 2]
    everything = dict(zip(floating, run(function, inputs, upstream)[1:], strict=True))
    y = function(*(t.detach().requires_grad_(i in wanted) for i, t in enumerate(inputs)))
    calls = []
    for name in ("rows_product", "weight_product"):
        product = getattr(_expert_passes, name)
        monkeypatch.setattr(
            _expert_passes,
            name,
            lambda *a, name=name, product=product, **k: calls.append(name) or product(*a, **k),
        )
    leaves = [n for n, _ in y.grad_fn.next_functions if hasattr(n, "variable")]
    y.backward(upstream)
    for leaf, i in zip(leaves, wanted, strict=True):
        assert torch.equal(leaf.variable.grad, everything[i])
    assert calls.count("weight_product") == (3 in wanted) + (4 in wanted)
    assert calls.count("rows_product") == (0 in wanted) + bool({0, 1, 3, 5} & set(wanted))


def test_nan_in_one_token_reaches_its_experts_alone(implementation):
    x, weights, experts, gate_up, down = operands(8, 6, 5, 4, 1)
    experts = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3]).view(8, 1)
    with torch.no_grad():
        x[1] = torch.nan
    y = moe_experts(x, weights, experts, gate_up, down)
    assert y.isnan().any(1).tolist() == [False, True] + [False] * 6
    for grad in torch.autograd.grad(y.sum(), (gate_up, down)):
        assert grad.flatten(1).isnan().any(1).tolist() == [False, True, False, False]


def test_strided_operands_are_read_as_they_are(implementation, assert_near):
    x, weights, experts, gate_up, down = (t.detach() for t in operands(6, 10, 4, 3, 2))
    expected = moe_experts(x, weights, experts, gate_up, down)
    strided = (
        x.T.contiguous().T,
        weights.T.contiguous().T,
        experts.T.contiguous().T,
        gate_up.mT.contiguous().mT,
        F.pad(down, (1, 2))[..., 1:-2],
    )
    assert_near(
        moe_experts(*strided), expected.double(), 8
    )  # a product with other strides may sum in another order


def test_autocast_sets_the_output_dtype_and_gradients_keep_the_operands_dtypes(implementation):
    inputs = operands(5, 8, 6, 3, 2)
    with torch.autocast("cpu", torch.float16):
        y = moe_experts(*inputs)
    assert y.dtype == torch.float16
    truth = formula(*doubled(inputs))
    # Operands, two products and their results: about six roundings by 2^-12 of the largest element.
    assert (y.double() - truth).abs().max() <= 12 * 2**-12 * truth.abs().max()
    floating = [t for t in inputs if t.is_floating_point()]
    assert [g.dtype for g in torch.autograd.grad(y.sum(), floating)] == [torch.float32] * 4


def test_the_backward_pass_keeps_only_operands_the_gate_up_product_and_the_order(interpreted):
    x, weights, experts, gate_up, down = operands(5, 8, 6, 3, 2)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        moe_experts(x, weights, experts, gate_up, down)
    floating = [t.data_ptr() for t in (x, weights, gate_up, down)]
    others = [t for t in kept if t.data_ptr() not in floating]
    assert [t.shape for t in others if t.is_floating_point()] == [(10, 12)]
    assert all(t.numel() <= 10 for t in others if not t.is_floating_point())


def test_a_compiled_graph_without_breaks_gives_the_same(assert_near):
    inputs = operands(7, 6, 5, 3, 2, biases=True)
    upstream = torch.randn(7, 6)
    cases = (with_biases, inputs), (weighing_inputs, inputs[:-2]), (without_gates, inputs[:-2])
    for case, given in cases:
        compiled = torch.compile(case(moe_experts), backend="aot_eager", fullgraph=True)
        truth = run(case(formula), doubled(given), upstream)
        for actual, expected in zip(run(compiled, given, upstream), truth, strict=True):
            assert_near(actual, expected, 32)


@pytest.mark.parametrize(
    ("biases", "wanted"),
    [
        (True, (0, 1, 3, 4, 5, 6)),
        (True, (4,)),
        (True, (5,)),
        (True, (1, 6)),
        (False, (0, 1, 3, 4)),
        (False, (0,)),
    ],
)
def test_the_operator_that_a_compiled_graph_calls_gives_the_same_bits(wanted, biases, interpreted):
    operators_inputs = operands(5, 8, 6, 3, 2, biases=biases)
    inputs = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(operators_inputs)]
    leaves = [inputs[i] for i in wanted]
    if biases:
        expected = with_biases(moe_experts)(*inputs)
        actual = experts_operator(*inputs, *activation_constants(CLAMPED).values(), False)[0]
    else:
        expected = weighing_inputs(moe_experts)(*inputs)
        actual = experts_operator(*inputs, None, None, *activation_constants("silu").values(), True)[0]
    upstream = torch.randn(5, 8)
    assert torch.equal(actual, expected)
    for a, b in zip(
        torch.autograd.grad(actual, leaves, upstream),
        torch.autograd.grad(expected, leaves, upstream),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_the_operator_that_a_compiled_graph_calls_reports_correct_shapes(interpreted):
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for rest in (
        (None, None, "silu", 0.0, 0.0, True),
        (*operands(5, 8, 6, 3, 2, biases=True)[-2:], "silu", 0.0, 0.0, False),
    ):
        torch.library.opcheck(experts_operator, (*operands(5, 8, 6, 3, 2), *rest), test_utils=checks)


@pytest.mark.parametrize(("tokens", "top_k", "num_experts"), [(90, 1, 200), (60, 4, 5)])
def test_sorting_keeps_the_order_of_tokens_and_tiles_cover_every_row_once(
    tokens, top_k, num_experts, interpreted
):
    experts = torch.randint(0, num_experts // 2, (tokens, top_k)) * 2  # odd experts get no tokens
    order = sort_by_expert(experts, num_experts)
    keys, stable = experts.flatten().sort(stable=True)
    assert torch.equal(order.order.long(), stable)
    assert torch.equal(order.position[stable].long(), torch.arange(tokens * top_k))
    assert torch.equal(order.offsets[1:].long(), torch.bincount(keys, minlength=num_experts).cumsum(0))
    covered = []
    for expert, row in zip(order.tile_expert.tolist(), order.tile_row.tolist(), strict=True):
        if expert >= 0:
            end = min(row + order.block, order.offsets[expert + 1].item())
            assert (keys[row:end] == expert).all()
            covered += range(row, end)
    assert covered == list(range(tokens * top_k))
    assert order.num_tiles.tolist() == [sum(expert >= 0 for expert in order.tile_expert.tolist())]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"activation": "relu"}, ValueError, "activation is 'relu'"),
        ({"weighted": "both"}, ValueError, "weighted is 'both'; expected 'outputs', or without biases"),
        (
            {"weighted": "inputs", "down_bias": torch.zeros(5, 4)},
            ValueError,
            "weighted is 'inputs'; expected",
        ),
        ({"x": torch.zeros(3, 4)}, ValueError, r"x is \(3, 4\).*expected \[T, H\]"),
        ({"weights": torch.zeros(2, 3)}, ValueError, r"weights \(2, 3\), experts \(2, 2\)"),
        ({"gate_up": torch.zeros(5, 7, 4)}, ValueError, r"gate_up is \(5, 7, 4\); expected \[E, 2 I, 4\]"),
        ({"down": torch.zeros(5, 4, 6)}, ValueError, r"down is \(5, 4, 6\); expected \(5, 4, 3\)"),
        ({"gate_up_bias": torch.zeros(5, 3)}, ValueError, r"gate_up_bias is \(5, 3\); expected \(5, 6\)"),
        ({"down_bias": torch.zeros(4)}, ValueError, r"down_bias is \(4,\); expected \(5, 4\)"),
        ({"down_bias": torch.zeros(5, 4).half()}, TypeError, "torch.float32, torch.float16; expected one"),
        ({"experts": torch.zeros(2, 2)}, TypeError, "experts are torch.float32"),
        ({"weights": torch.zeros(2, 2).long()}, TypeError, "weights torch.int64"),
        ({"x": torch.zeros(2, 4).bfloat16()}, TypeError, "torch.bfloat16 and torch.float32, torch.float32"),
        ({"experts": torch.full((2, 2), 5)}, IndexError, "experts range from 5 to 5; expected 0 to 4"),
        ({"experts": torch.full((2, 2), -1)}, IndexError, "experts range from -1 to -1; expected 0 to 4"),
    ],
)
def test_incompatible_inputs_raise_clear_errors(change, error, message):
    good = {
        "x": torch.zeros(2, 4),
        "weights": torch.zeros(2, 2),
        "experts": torch.zeros(2, 2, dtype=torch.int32),
        "gate_up": torch.zeros(5, 6, 4),
        "down": torch.zeros(5, 4, 3),
    }
    with pytest.raises(error, match=message):
        moe_experts(**(good | change))
