"""Compiled, the kernel that chooses experts is as accurate as plain PyTorch, and breaks ties alike."""

import pytest
import torch
from routing_forms import IN_GROUPS, every_form, in_float64, routed, with_bias

from liger_models.kernels import route
from liger_models.kernels.experts.moe_routing import route_plain


@pytest.mark.gpu
@every_form
@pytest.mark.parametrize(
    ("num_experts", "top_k", "dtype"),
    [
        (8, 2, torch.bfloat16),
        (60, 4, torch.float16),
        (128, 8, torch.bfloat16),
        (512, 10, torch.float32),
        (1024, 16, torch.float32),
    ],
    ids=str,
)
def test_on_a_gpu_it_is_as_accurate_as_plain_pytorch(options, num_experts, top_k, dtype):
    options = with_bias(options, num_experts, "cuda")
    # Multiples of a power of two, in a different order in each row: exact in every dtype, and distinct.
    steps = torch.arange(num_experts, device="cuda") - num_experts // 2
    order = torch.rand(4000, num_experts, device="cuda").argsort(1)
    logits = (steps / 2 ** (num_experts.bit_length() - 3))[order].to(dtype).requires_grad_()
    ours = routed(route, logits, top_k, options)
    plain = routed(route_plain, logits, top_k, options, ours[-1])
    truth = routed(route_plain, in_float64(logits), top_k, options, ours[-1])
    # With a bias, two scores may lie within a rounding of each other.
    same = ((ours[2] == truth[2]) & (plain[2] == truth[2])).all(1)
    assert same.float().mean() > (0.99 if "correction_bias" in options else 0.9999)
    for mine, theirs, true in zip(ours[:2], plain[:2], truth[:2], strict=True):
        assert mine.dtype == theirs.dtype
        true = true[same]
        error, their_error = ((t[same].double() - true).square().mean().sqrt() for t in (mine, theirs))
        # Both errors are random; in float32, two roundings are allowed.
        two_roundings = torch.finfo(torch.float32).eps * true.square().mean().sqrt()
        assert error <= max(1.02 * their_error, two_roundings)


@pytest.mark.gpu
@pytest.mark.parametrize("options", IN_GROUPS.values(), ids=IN_GROUPS)
@pytest.mark.parametrize(("num_experts", "top_k"), [(256, 8), (160, 6)])
def test_on_a_gpu_the_best_groups_match_the_plain_twin(options, num_experts, top_k):
    options = with_bias(options, num_experts, "cuda")
    logits = torch.randn(4000, num_experts, device="cuda", requires_grad=True)
    ours = routed(route, logits, top_k, options)
    plain = routed(route_plain, logits, top_k, options, ours[-1])
    same = (ours[2] == plain[2]).all(1)  # two sums may lie within a rounding of each other
    assert same.float().mean() > 0.99
    for mine, theirs in zip(ours[:2], plain[:2], strict=True):
        few = 32 * torch.finfo(torch.float32).eps * theirs.abs().max().item()
        torch.testing.assert_close(mine[same], theirs[same], rtol=0, atol=few)


@pytest.mark.gpu
@every_form
def test_on_a_gpu_passing_its_own_experts_back_gives_the_same_weights(options):
    options = with_bias(options, 128, "cuda")
    logits = torch.randn(300, 128, device="cuda", requires_grad=True)
    weights, grad, experts, upstream = routed(route, logits, 8, options)
    others = logits.detach() + torch.randn_like(logits)  # would choose other experts
    weighed, chosen = route(others, 8, **options, experts=experts)
    assert chosen is experts
    # Weights of at most the scale, after an exponential, a sum and quotients in float32.
    expected = route_plain(others, 8, **options, experts=experts)[0]
    assert (weighed - expected).abs().max() <= 1e-6 * options.get("scale", 1.0)
    again = routed(route, logits, 8, {**options, "experts": experts}, upstream)
    assert torch.equal(again[2], experts)
    assert torch.equal(again[1], grad)  # computed by the same kernel
    # Computed by two kernels: where a bias is added, multiply and add may be fused in one, which rounds
    # differently.
    torch.testing.assert_close(again[0], weights, rtol=4 * torch.finfo(torch.float32).eps, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"softmax_after_top_k": True}, {"score": "sigmoid"}], ids=str)
@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (60, 4), (128, 8), (512, 10)])
def test_on_a_gpu_equal_scores_choose_the_experts_that_torch_topk_chooses(num_experts, top_k, options):
    """Both break ties in favour of the lowest indices; torch.topk does not define the order of ties."""
    logits = torch.randint(1, 4, (4000, num_experts), device="cuda").float()
    scores = logits if "softmax_after_top_k" in options else logits.softmax(-1)
    scores = logits.sigmoid() if "score" in options else scores
    chosen = route(logits, top_k, **options)[1].long()
    assert torch.equal(chosen.sort(dim=1).values, scores.topk(top_k, dim=1).indices.sort(dim=1).values)
    assert torch.equal(chosen, logits.sort(dim=1, descending=True, stable=True).indices[:, :top_k])


@pytest.mark.gpu
def test_a_cuda_graph_captures_forward_and_backward():
    logits = torch.randn(64, 128, device="cuda", requires_grad=True)
    upstream = torch.randn(64, 8, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        routed(route, logits, 8, {}, upstream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = routed(route, logits, 8, {}, upstream)
    with torch.no_grad():
        logits.copy_(torch.randn_like(logits))
    graph.replay()
    for a, b in zip(captured, routed(route, logits, 8, {}, upstream), strict=True):
        assert torch.equal(a, b)
