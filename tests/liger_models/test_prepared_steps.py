"""Launches of AdamW and of its clipping are used again while their operands stay where they are."""

import copy
import weakref

import pytest
import torch
from torch import nn

from liger_models.kernels._dispatch import interpret, interpreted
from liger_models.optim import adamw, prepared


@pytest.fixture
def lists(monkeypatch):
    """One entry for each time that the operands of an update ("step") or of a norm were listed. Stand-ins of
    the launches, which a CPU runs faster, go on using the tensors that they were given.
    """
    found = []

    class Step:
        def __init__(self, tensors, settings, *scaling):
            found.append("step")
            self.tensors = tensors

        def __call__(self, now, factor, found_inf):
            adamw.adamw(self.tensors, now, factor, found_inf)

        def moved(self, addresses):
            return False

    class Norm:
        copied = False

        def moved(self, addresses):
            return False

        def __init__(self, gradients):
            found.append("norm")
            self.gradients = gradients

        def __call__(self):
            return adamw.sum_of_squares_plain(self.gradients)

    monkeypatch.setattr(adamw, "prepare_adamw", Step)
    monkeypatch.setattr(prepared, "SumOfSquares", Norm)
    for module in (adamw, prepared):
        monkeypatch.setattr(module, "use_triton", lambda *tensors: True)
    return found


def parameters():
    generator = torch.Generator().manual_seed(1)
    made = [nn.Parameter(torch.randn(size, generator=generator)) for size in (5, 16)]
    for p in made:
        p.grad = torch.zeros_like(p)
    return made


def step(optimizer, number):
    """A step with other gradients at the same addresses."""
    generator = torch.Generator().manual_seed(number)
    for group in optimizer.param_groups:
        group["lr"] = 0.1 / number
        for p in group["params"]:
            if p.grad is not None:
                p.grad.copy_(torch.randn(p.shape, generator=generator))
    norm = optimizer.clip_grad_norm(1.0)
    optimizer.step()
    return norm


def test_operands_are_listed_once_and_again_after_one_has_moved(lists):
    ours, other = parameters(), parameters()
    optimizer, expected = adamw.AdamW(ours), adamw.AdamW(other)

    def run(number):
        lists.clear()
        norm = step(optimizer, number)
        noted = list(lists)
        expected._prepared = prepared.Prepared()
        assert torch.equal(norm, step(expected, number))
        assert all(torch.equal(a, b) for a, b in zip(ours, other, strict=True))
        return noted

    assert run(1) == ["norm"]  # the state does not exist yet
    assert run(2) == ["step"]
    assert run(3) == run(4) == []
    ours[0].grad = torch.zeros_like(ours[0])
    assert run(5) == ["norm", "step"]
    optimizer.state[ours[1]]["exp_avg"] = optimizer.state[ours[1]]["exp_avg"].clone()
    assert run(6) == ["step"]
    ours[1].data = ours[1].data.clone()
    assert run(7) == ["step"]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert run(8) == ["norm", "step"]
    ours[0].grad = other[0].grad = None
    assert run(9) == ["norm", "step"]
    optimizer.param_groups[0]["weights"] = expected.param_groups[0]["weights"] = "plain"
    assert run(10) == ["step"]


def test_operands_are_listed_again_for_a_gradient_with_another_layout(lists):
    """Its copy is made anew in each step."""
    p, q = (nn.Parameter(torch.ones(4, 6)) for _ in range(2))
    places = [torch.zeros(6, 4).t(), torch.zeros(4, 6)]
    ours, expected = adamw.AdamW([p]), adamw.AdamW([q])
    for number in range(1, 5):
        for optimizer, parameter, place in zip((ours, expected), (p, q), places, strict=True):
            parameter.grad = place.copy_(torch.arange(24.0).view(4, 6) ** number - 50)
            optimizer.step()
        assert torch.equal(p, q)


@pytest.mark.skipif(not interpreted, reason="runs the kernels in Triton's interpreter")
def test_launches_follow_gradients_that_moved(monkeypatch):
    """Also past a parameter without elements, and not to an address that vector loads cannot read."""
    made = []
    for module, name in ((adamw, "prepare_adamw"), (prepared, "SumOfSquares")):
        own = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, own=own, name=name: made.append(name) or own(*given))
    generator = torch.Generator().manual_seed(1)
    ours = [nn.Parameter(torch.randn(size, generator=generator)) for size in (16, 0, 32, 5)]
    other = [nn.Parameter(p.detach().clone()) for p in ours]
    optimizer, expected = adamw.AdamW(ours, lr=0.1), adamw.AdamW(other, lr=0.1)
    kept = []
    with interpret():
        for number in range(6):
            for p, q in zip(ours, other, strict=True):
                room = torch.zeros(p.numel() + 1)
                p.grad = room[1:] if number == 5 else torch.empty_like(p)
                kept += room, p.grad
                q.grad = p.grad.copy_(torch.randn(p.shape, generator=generator))
            noted = len(made)
            norm = optimizer.clip_grad_norm(1.0)
            optimizer.step()
            noted = made[noted:]
            expected._prepared = prepared.Prepared()
            assert torch.equal(norm, expected.clip_grad_norm(1.0))
            expected.step()
            assert all(map(torch.equal, ours, other))
            assert noted == {
                0: ["SumOfSquares"],
                1: ["prepare_adamw"],
                5: ["SumOfSquares", "prepare_adamw"],
            }.get(number, [])


@pytest.mark.skipif(not interpreted, reason="runs the kernels in Triton's interpreter")
def test_gradients_are_not_kept_alive():
    ours = parameters()
    optimizer = adamw.AdamW(ours)
    with interpret():
        for number in (1, 2):
            step(optimizer, number)
    gradient = weakref.ref(ours[0].grad.untyped_storage())
    optimizer.zero_grad()
    assert gradient() is None
