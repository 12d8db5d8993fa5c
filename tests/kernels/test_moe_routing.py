"""Routing and the router's losses, against the routers of transformers and against the formulas."""

import pytest
import torch
import torch.nn.functional as F

from liger_models.kernels import load_balancing_loss, route, router_z_loss

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
    return router, router(torch.randn(TOKENS, HIDDEN))


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
    # transformers does not sort DeepSeek's choice: compare expert by expert.
    dense = torch.zeros(TOKENS, EXPERTS).scatter(1, experts, weights)
    ours_dense = torch.zeros(TOKENS, EXPERTS).scatter(1, ours_experts.long(), ours)
    torch.testing.assert_close(ours_dense, dense, rtol=1e-6, atol=1e-7)
    assert ours.dtype == torch.float32
    assert ours_experts.dtype == torch.int32


def test_scores_are_computed_in_float32_from_bfloat16_logits():
    logits = torch.randn(TOKENS, EXPERTS).bfloat16()
    for mine, truth in zip(route(logits, TOP_K), route(logits.float(), TOP_K), strict=True):
        assert torch.equal(mine, truth)


def test_ties_are_broken_as_in_torch_topk():
    logits = torch.randint(0, 3, (TOKENS, EXPERTS)).float()
    assert torch.equal(route(logits, TOP_K)[1].long(), logits.softmax(-1).topk(TOP_K).indices)


def test_the_correction_bias_chooses_and_does_not_weigh():
    logits = torch.randn(TOKENS, EXPERTS, requires_grad=True)
    bias = torch.zeros(EXPERTS)
    bias[5] = 10
    weights, experts = route(logits, TOP_K, score="sigmoid", correction_bias=bias, renormalize=False)
    assert (experts[:, 0] == 5).all()
    assert torch.equal(weights, logits.sigmoid().gather(1, experts.long()))


def test_only_experts_of_the_best_groups_are_chosen_even_if_their_scores_are_negative():
    logits = torch.randn(TOKENS, EXPERTS)
    bias = torch.randn(EXPERTS) - 5  # every corrected score lies below the zero of a masked one
    options = {"score": "sigmoid", "correction_bias": bias, "num_groups": 4, "top_groups": 2}
    experts = route(logits, 8, **options)[1].long()  # all experts of two groups
    quality = (logits.sigmoid() + bias).unflatten(1, (4, 4)).topk(2).values.sum(-1)
    assert torch.equal((experts // 4).sort(1).values[:, ::4], quality.topk(2).indices.sort(1).values)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"renormalize": False},
        {"softmax_after_top_k": True, "scale": 1.5},
        {"score": "sigmoid", "num_groups": 4, "top_groups": 2, "scale": 2.5},
    ],
)
def test_gradients_pass_gradcheck(options):
    logits = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: route(x, 3, **options)[0], logits)


def test_no_tokens_and_all_experts():
    weights, experts = route(torch.randn(0, 4), 2)
    assert weights.shape == experts.shape == (0, 2)
    weights, experts = route(torch.randn(3, 4), 4)
    torch.testing.assert_close(weights.sum(1), torch.ones(3))
    assert torch.equal(experts.sort(1).values, torch.arange(4, dtype=torch.int32).expand(3, 4))


def test_the_load_balancing_loss_is_that_of_transformers_with_its_gradient():
    reference = pytest.importorskip("transformers.models.mixtral.modeling_mixtral").load_balancing_loss_func
    layers = [torch.randn(TOKENS, EXPERTS, requires_grad=True) for _ in range(2)]
    for chosen in (layers[:1], layers):
        expected = reference(tuple(chosen), EXPERTS, TOP_K)
        actual = load_balancing_loss(chosen, TOP_K)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)
        for a, b in zip(
            torch.autograd.grad(actual, chosen), torch.autograd.grad(expected, chosen), strict=True
        ):
            # Sums over 50 tokens in another order.
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * b.abs().max().item())
    assert torch.equal(load_balancing_loss(layers[0], TOP_K), load_balancing_loss(layers[:1], TOP_K))


def test_the_load_balancing_loss_of_an_even_load_is_top_k():
    rolled = torch.stack([torch.arange(4.0).roll(i) for i in range(4)])
    torch.testing.assert_close(load_balancing_loss(rolled, 2), torch.tensor(2.0))


def test_the_z_loss_is_the_mean_squared_logsumexp_with_its_gradient():
    logits = torch.randn(TOKENS, EXPERTS, requires_grad=True)
    loss = router_z_loss(logits)
    z = logits.detach().double().exp().sum(1).log()
    torch.testing.assert_close(loss.double(), (z**2).mean(), rtol=1e-6, atol=0)
    (grad,) = torch.autograd.grad(loss, logits)
    expected = 2 * z[:, None] * F.softmax(logits.detach().double(), 1) / TOKENS
    torch.testing.assert_close(grad.double(), expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 0}, "top_k is 0; expected 1 to 8"),
        ({"top_k": 9}, "top_k is 9; expected 1 to 8"),
        ({"score": "tanh"}, "score is 'tanh'"),
        ({"score": "sigmoid", "softmax_after_top_k": True}, "expected score 'softmax'"),
        ({"correction_bias": torch.zeros(7)}, r"correction_bias is \(7,\); expected \(8,\)"),
        ({"num_groups": 2, "top_groups": 3}, "top_groups is 3; expected 1 to num_groups, 2"),
        ({"num_groups": 3, "top_groups": 1}, "3 groups, of which 1"),
        ({"num_groups": 8, "top_groups": 4}, "8 groups, of which 4"),
        ({"num_groups": 4, "top_groups": 1, "top_k": 3}, "4 groups, of which 1"),
        ({"logits": torch.zeros(2, 3, 8)}, r"logits are \(2, 3, 8\); expected \[tokens, experts\]"),
    ],
)
def test_what_does_not_fit_is_a_clear_error(change, message):
    with pytest.raises(ValueError, match=message):
        route(**({"logits": torch.zeros(3, 8), "top_k": 2} | change))


def test_losses_of_nothing_are_a_clear_error():
    with pytest.raises(ValueError, match="found no router logits"):
        load_balancing_loss([], 2)
    with pytest.raises(ValueError, match="top_k is 5; expected 1 to 4"):
        load_balancing_loss(torch.zeros(3, 4), 5)
