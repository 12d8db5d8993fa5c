"""Routing, against the routers of transformers and against the formulas."""

import importlib

import pytest
import torch
from routing_forms import IN_GROUPS, every_form, in_float64, routed, with_bias

from liger_models.kernels import route
from liger_models.kernels.experts.moe_routing import route_plain

module = importlib.import_module("liger_models.kernels.experts.moe_routing")

TOKENS, HIDDEN, EXPERTS, TOP_K = 50, 12, 16, 3


def transformers_router(family, **config):
    """A router of transformers with random weights, and its logits, weights and experts for random input."""
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    configuration = pytest.importorskip(f"transformers.models.{family}.configuration_{family}")
    name = next(n for n in dir(module) if n.lower().endswith("topkrouter"))
    config_class = getattr(configuration, name[: -len("TopKRouter")] + "Config")
    router = getattr(module, name)(
        config_class(hidden_size=HIDDEN, num_experts_per_tok=TOP_K, **config)
    ).requires_grad_(False)
    for parameter in (*router.parameters(), *router.buffers()):
        parameter.copy_(torch.randn_like(parameter))
    found = router(torch.randn(TOKENS, HIDDEN))
    if len(found) != 3 or found[2].is_floating_point():
        pytest.skip(f"this transformers' {name} does not give logits, weights and experts")
    return router, found


@pytest.mark.parametrize(
    ("family", "config", "options"),
    [
        ("mixtral", {"num_local_experts": EXPERTS}, {}),
        ("qwen3_moe", {"num_experts": EXPERTS, "norm_topk_prob": True}, {}),
        ("qwen3_moe", {"num_experts": EXPERTS, "norm_topk_prob": False}, {"renormalize": False}),
        ("olmoe", {"num_experts": EXPERTS, "norm_topk_prob": False}, {"renormalize": False}),
        ("granitemoe", {"num_local_experts": EXPERTS}, {"softmax_after_top_k": True}),
        (
            "deepseek_v3",
            {"n_routed_experts": EXPERTS, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
            {"score": "sigmoid", "num_groups": 4, "top_groups": 2, "scale": 2.5},
        ),
        (
            "deepseek_v2",
            {
                "n_routed_experts": EXPERTS,
                "n_group": 4,
                "topk_group": 2,
                "topk_method": "group_limited_greedy",
                "routed_scaling_factor": 16.0,
                "num_attention_heads": 2,
            },
            {"renormalize": False, "num_groups": 4, "top_groups": 2, "group_score": "max", "scale": 16.0},
        ),
        (
            "glm4_moe",
            {"n_routed_experts": EXPERTS, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
            {"score": "sigmoid", "renormalize": False},
        ),
    ],
)
def test_routes_as_transformers_does(family, config, options):
    router, (logits, weights, experts) = transformers_router(family, **config)
    options = dict(options)
    if options.get("score") == "sigmoid":
        options["correction_bias"] = router.e_score_correction_bias
    ours, ours_experts = route(logits, TOP_K, **options)
    # transformers does not sort DeepSeek's chosen experts: compare expert by expert.
    dense = torch.zeros(TOKENS, EXPERTS).scatter(1, experts, weights)
    ours_dense = torch.zeros(TOKENS, EXPERTS).scatter(1, ours_experts.long(), ours)
    torch.testing.assert_close(ours_dense, dense, rtol=1e-6, atol=1e-7)
    assert ours.dtype == torch.float32
    assert ours_experts.dtype == torch.int32


def test_scores_are_computed_in_float32_from_bfloat16_logits(implementation):
    logits = torch.randperm(TOKENS * EXPERTS).view(TOKENS, EXPERTS).bfloat16() / 100
    for mine, truth in zip(route(logits, TOP_K), route(logits.float(), TOP_K), strict=True):
        assert torch.equal(mine, truth)


def test_ties_are_broken_as_in_torch_topk():
    logits = torch.randint(0, 3, (TOKENS, EXPERTS)).float()
    assert torch.equal(route(logits, TOP_K)[1].long(), logits.softmax(-1).topk(TOP_K).indices)


def test_the_correction_bias_affects_the_choice_and_not_the_weights(implementation, assert_near):
    logits = torch.randn(TOKENS, EXPERTS)
    bias = torch.zeros(EXPERTS)
    bias[5] = 10
    weights, experts = route(logits, TOP_K, score="sigmoid", correction_bias=bias, renormalize=False)
    assert (experts[:, 0] == 5).all()
    # An exponential, a sum and a division.
    assert_near(weights, logits.double().sigmoid().gather(1, experts.long()), 4)


def test_only_experts_of_the_best_groups_are_chosen_even_if_their_scores_are_negative():
    logits = torch.randn(TOKENS, EXPERTS)
    bias = torch.randn(EXPERTS) - 5  # every corrected score lies below the zero of a masked one
    options = {"score": "sigmoid", "correction_bias": bias, "num_groups": 4, "top_groups": 2}
    experts = route(logits, 8, **options)[1].long()  # all experts of two groups
    quality = (logits.sigmoid() + bias).unflatten(1, (4, 4)).topk(2).values.sum(-1)
    assert torch.equal((experts // 4).sort(1).values[:, ::4], quality.topk(2).indices.sort(1).values)


def test_experts_of_other_groups_may_count_as_zero(implementation):
    """A.X K2: experts of the groups that are left out have the corrected score 0, and others lie below."""
    logits = torch.randn(TOKENS, EXPERTS)
    bias = torch.randn(EXPERTS) / 4 - 0.5
    options = {"score": "sigmoid", "correction_bias": bias, "num_groups": 4, "top_groups": 2}
    experts = route(logits, TOP_K, **options, group_score="top_2_else_0")[1].long()
    corrected = logits.sigmoid() + bias
    groups = corrected.unflatten(1, (4, 4)).topk(2).values.sum(-1).topk(2).indices
    inside = (torch.arange(EXPERTS)[:, None] // 4 == groups[:, None]).any(-1)
    expected = corrected.where(inside, 0.0)
    chosen = torch.zeros_like(inside).scatter(1, experts, True)
    least = expected.where(chosen, torch.inf).min(1).values
    assert (expected.masked_fill(chosen, -torch.inf).max(1).values <= least).all()
    assert (chosen & ~inside).any()


def test_a_correction_of_logits_chooses_by_their_sum(implementation, assert_near):
    """Kolibri 1. The choice by corrected scores differs."""
    logits, bias = torch.randn(TOKENS, EXPERTS) * 3, torch.randn(EXPERTS)
    options = {"score": "sigmoid", "correction_bias": bias}
    weights, experts = route(logits, TOP_K, **options, correct_logits=True)
    assert torch.equal(experts.long(), (logits + bias).topk(TOP_K).indices)
    assert not torch.equal(experts, route(logits, TOP_K, **options)[1])
    scores = logits.double().sigmoid().gather(1, experts.long())
    assert_near(weights, scores / scores.sum(1, keepdim=True), 8)


some_forms = pytest.mark.parametrize(
    "options",
    [
        {},
        {"renormalize": False},
        {"softmax_after_top_k": True, "scale": 1.5},
        {"score": "sigmoid", "num_groups": 4, "top_groups": 2, "scale": 2.5},
        {"num_groups": 4, "top_groups": 2, "group_score": "max", "renormalize": False},
    ],
    ids=str,
)


@some_forms
def test_given_experts_are_weighted_by_the_formula(options, implementation):
    """The experts were not chosen from these logits: weights and gradients still follow the formula."""
    given = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)]).int()
    before = given.clone()
    logits = torch.randn(TOKENS, EXPERTS, requires_grad=True)
    weights, experts = route(logits, TOP_K, **options, experts=given)
    assert experts is given
    assert torch.equal(given, before)
    wide = logits.detach().double().requires_grad_()
    scores = wide.sigmoid() if options.get("score") == "sigmoid" else wide.softmax(-1)
    expected = scores.gather(-1, given.long())
    if options.get("renormalize", True) or options.get("softmax_after_top_k"):
        expected = expected / expected.sum(-1, keepdim=True)
    expected = expected * options.get("scale", 1.0)
    upstream = torch.randn_like(weights)
    # An exponential, a sum and quotients in float32, of numbers up to the scale.
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-6)
    found = torch.autograd.grad(weights, logits, upstream)[0]
    true = torch.autograd.grad(expected, wide, upstream.double())[0]
    assert (found - true).norm() <= 1e-5 * true.norm()


@some_forms
def test_passing_its_own_experts_back_changes_no_bit(options, implementation):
    logits = torch.randn(TOKENS, EXPERTS, requires_grad=True)
    weights, grad, experts, upstream = routed(route, logits, TOP_K, options)
    again = routed(route, logits, TOP_K, {**options, "experts": experts}, upstream)
    for a, b in zip(again, (weights, grad, experts), strict=False):
        assert torch.equal(a, b)


@some_forms
def test_gradients_pass_gradcheck(options):
    logits = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: route(x, 3, **options)[0], logits, fast_mode=True)


# The kernel


@pytest.mark.parametrize("options", IN_GROUPS.values(), ids=IN_GROUPS)
@pytest.mark.parametrize(("tokens", "num_experts", "top_k"), [(9, 256, 8), (30, 160, 6), (40, 24, 3)])
def test_the_kernel_takes_the_best_groups_as_the_plain_twin_does(
    options, tokens, num_experts, top_k, interpreted, assert_near
):
    options = with_bias(options, num_experts)
    logits = torch.randn(tokens, num_experts, requires_grad=True)
    weights, gradient, experts, upstream = routed(route, logits, top_k, options)
    truth, true_gradient, true_experts, _ = routed(route_plain, in_float64(logits), top_k, options, upstream)
    assert torch.equal(experts, true_experts)
    assert_near(weights, truth, 8)
    assert_near(gradient, true_gradient, 24)


def test_with_groups_nan_affects_its_own_token_only(interpreted):
    options = with_bias(IN_GROUPS["DeepSeek-V3"], 16)
    logits = torch.randn(6, 16)
    expected = route(logits, 3, **options)
    logits[2, 5] = torch.nan
    weights, experts = route(logits, 3, **options)
    assert weights.isnan().all(1).tolist() == [False, False, True, False, False, False]
    assert 0 <= experts.min() <= experts.max() < 16
    others = [0, 1, 3, 4, 5]
    for found, before in zip((weights, experts), expected, strict=True):
        assert torch.equal(found[others], before[others])


@every_form
@pytest.mark.parametrize(
    ("tokens", "num_experts", "top_k"), [(300, 5, 2), (9, 128, 8), (2, 1000, 16), (3, 4, 4), (3, 1, 1)]
)
def test_the_kernel_gives_the_true_weights_experts_and_gradients(
    options, tokens, num_experts, top_k, interpreted, assert_near
):
    options = with_bias(options, num_experts)
    logits = (2 * torch.randn(tokens, num_experts)).requires_grad_()
    weights, grad, experts, upstream = routed(route, logits, top_k, options)
    true_weights, true_grad, true_experts, _ = routed(
        route_plain, in_float64(logits), top_k, options, upstream
    )
    assert torch.equal(experts, true_experts)
    assert weights.dtype == torch.float32
    # An exponential of a rounded difference of about 10, a sum, two quotients and the scale; in the gradient
    # all occur twice, in differences of products of a weight with upstream gradients, which may cancel.
    assert_near(weights, true_weights, 16)
    unit = torch.finfo(torch.float32).eps / 2 * true_weights.max() * upstream.abs().max()
    assert (grad - true_grad).abs().max() <= 32 * unit


@every_form
@pytest.mark.parametrize("layout", ["transposed", "cut from wider", "broadcast"])
def test_the_layout_in_memory_changes_no_bit(options, layout, interpreted):
    options = with_bias(options, EXPERTS)
    logits = torch.randn(7, EXPERTS)
    laid_out = {
        "transposed": logits.mT.contiguous().mT,
        "cut from wider": torch.cat([torch.randn(7, 3), logits], 1)[:, 3:],
        "broadcast": logits[:1].expand(7, EXPERTS),
    }[layout]
    solid = laid_out.contiguous()
    weights, grad, experts, upstream = routed(route, solid.requires_grad_(), TOP_K, options)
    spread = torch.stack([upstream, upstream], -1)[..., 0]
    again = routed(route, laid_out.detach().requires_grad_(), TOP_K, options, spread)
    for a, b in zip((weights, grad, experts), again, strict=False):
        assert torch.equal(a, b)


def test_the_backward_pass_gets_no_gradient_tensor_for_the_experts(interpreted, monkeypatch):
    logits = torch.randn(7, EXPERTS).requires_grad_()
    weights, _ = route(logits, TOP_K)
    seen = []
    original = module._Route.backward
    monkeypatch.setattr(module._Route, "backward", lambda *a: seen.append(a) or original(*a))
    weights.sum().backward()
    assert seen[0][2] is None


@every_form
def test_a_second_backward_and_a_second_run_give_the_same_bits_and_alter_nothing(options, interpreted):
    options = with_bias(options, EXPERTS)
    logits = torch.randn(7, EXPERTS).requires_grad_()
    before = logits.detach().clone()
    weights, experts = route(logits, TOP_K, **options)
    upstream = torch.randn_like(weights)
    upstream_before = upstream.clone()
    grads = [torch.autograd.grad(weights, logits, upstream, retain_graph=True)[0] for _ in range(2)]
    again = routed(route, logits, TOP_K, options, upstream)
    for a, b in zip((weights, grads[0], experts, upstream), again, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(*grads)
    assert torch.equal(logits, before)
    assert torch.equal(upstream, upstream_before)


def test_the_kernel_breaks_ties_in_favour_of_the_first_expert(interpreted):
    logits = torch.randint(0, 3, (TOKENS, EXPERTS)).float() - 1
    logits = logits.where(torch.rand_like(logits) < 0.5, -logits)  # zeros of both signs tie
    expected = logits.sort(dim=1, descending=True, stable=True).indices[:, :TOP_K]
    assert torch.equal(route(logits, TOP_K)[1].long(), expected)


@pytest.mark.parametrize("options", [{}, {"softmax_after_top_k": True}, {"score": "sigmoid"}], ids=str)
def test_experts_stay_distinct_and_in_range_whatever_the_logits_hold(options, interpreted):
    logits = torch.randn(4, 5)
    logits[0, 1:] = -torch.inf
    logits[1] = torch.nan
    logits[2, 3] = -torch.nan
    logits[3, :2] = torch.inf
    weights, experts = route(logits, 3, **options)
    assert experts.min() >= 0
    assert experts.max() < 5
    assert all(len(set(row)) == 3 for row in experts.tolist())
    assert experts[2, 0] == 3  # as torch.topk does
    assert experts[3, :2].tolist() == [0, 1]
    assert weights[1].isnan().all()
    assert not weights[0].isnan().any()


def test_small_scores_are_divided_by_their_sum_and_the_epsilon(implementation, assert_near):
    logits = (torch.rand(5, 4) - 14.5).requires_grad_()  # sigmoids of 0.5e-6 to 1.4e-6
    weights, experts = route(logits, 2, score="sigmoid", renormalize_eps=1e-6)
    scores = logits.double().sigmoid().gather(1, experts.long())
    expected = scores / (scores.sum(1, keepdim=True) + 1e-6)
    assert expected.sum(1).max() < 0.9
    upstream = torch.randn(5, 2)
    (found,), (true,) = (torch.autograd.grad(w, logits, upstream.to(w)) for w in (weights, expected))
    # A sigmoid has four roundings: two of the exponential, a sum and a quotient. A weight has those of its
    # own sigmoid, of those in the divisor, of the divisor and of its quotient; a gradient two more products.
    assert_near(weights, expected, 4 + 4 + 2 + 1)
    assert_near(found, true, 2 * (4 + 4 + 2 + 1) + 2)


def test_sigmoids_that_all_underflow_give_zero_weights(implementation):
    logits = torch.full((2, 4), -200.0, requires_grad=True)
    weights, _ = route(logits, 2, score="sigmoid")
    assert not weights.any()
    assert not torch.autograd.grad(weights.sum(), logits)[0].any()


@pytest.mark.parametrize(("num_experts", "top_k"), [(1025, 2), (70, 65)])
def test_unsupported_sizes_run_in_plain_pytorch(num_experts, top_k, interpreted, monkeypatch):
    monkeypatch.setattr(module, "_launch", None)
    logits = torch.randn(3, num_experts)
    for a, b in zip(route(logits, top_k), route_plain(logits, top_k), strict=True):
        assert torch.equal(a, b)


def test_it_traces_without_a_graph_break():
    logits = torch.randn(5, EXPERTS, requires_grad=True)
    compiled = torch.compile(route, fullgraph=True, backend="eager")
    expected = routed(route, logits, TOP_K, {})
    for a, b in zip(routed(compiled, logits, TOP_K, {}, expected[-1]), expected, strict=True):
        assert torch.equal(a, b)


def test_no_tokens_and_top_k_of_all_experts_are_accepted(implementation):
    logits = torch.randn(0, 4, requires_grad=True)
    weights, experts = route(logits, 2)
    assert weights.shape == experts.shape == (0, 2)
    assert torch.autograd.grad(weights.sum(), logits)[0].shape == (0, 4)
    weights, experts = route(torch.randn(3, 4), 4)
    torch.testing.assert_close(weights.sum(1), torch.ones(3))
    assert torch.equal(experts.sort(1).values, torch.arange(4, dtype=torch.int32).expand(3, 4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 0}, "top_k is 0; expected 1 to 8"),
        ({"top_k": 9}, "top_k is 9; expected 1 to 8"),
        ({"score": "tanh"}, "score is 'tanh'"),
        ({"score": "sigmoid", "softmax_after_top_k": True}, "expected score 'softmax'"),
        ({"correction_bias": torch.zeros(7)}, r"correction_bias is \(7,\); expected \(8,\)"),
        ({"num_groups": 2, "top_groups": 3}, "top_groups is 3; expected 1 to num_groups, 2"),
        ({"num_groups": 3, "top_groups": 1}, "3 groups with top_groups=1"),
        ({"correct_logits": True}, "correct_logits is for a choice by a correction_bias"),
        ({"group_score": "sum"}, "group_score is 'sum'; expected 'top_2', 'top_2_else_0' or 'max'"),
        ({"num_groups": 8, "top_groups": 4}, "8 groups with top_groups=4"),
        ({"num_groups": 4, "top_groups": 1, "top_k": 3}, "4 groups with top_groups=1"),
        ({"experts": torch.zeros(3, 1, dtype=torch.int32)}, r"experts are \(3, 1\), torch.int32; expected"),
        ({"experts": torch.zeros(3, 2, dtype=torch.int64)}, r"expected \(3, 2\) int32"),
        ({"logits": torch.zeros(2, 3, 8)}, r"logits are \(2, 3, 8\); expected \[tokens, experts\]"),
    ],
)
def test_incompatible_inputs_raise_clear_errors(change, message):
    with pytest.raises(ValueError, match=message):
        route(**({"logits": torch.zeros(3, 8), "top_k": 2} | change))


def test_integers_and_operands_on_two_devices_are_refused():
    with pytest.raises(TypeError, match="floating point"):
        route(torch.ones(3, 4, dtype=torch.int64), 2)
    with pytest.raises(ValueError, match="move them to one device"):
        route(torch.zeros(3, 4), 2, correction_bias=torch.zeros(4, device="meta"))


def test_scores_that_round_to_the_same_value_keep_the_order_of_their_logits(implementation):
    logits = torch.tensor([[20.0, 40.0, 30.0, 25.0], [35.0, 18.0, 21.0, 50.0]])
    assert (logits.sigmoid() == 1).all()
    weights, experts = route(logits, 2, score="sigmoid", renormalize=False)
    assert experts.tolist() == [[1, 2], [3, 0]]
    assert weights.tolist() == [[1.0, 1.0]] * 2
