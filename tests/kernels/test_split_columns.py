"""Gradients of columns have the bits of torch's split, and none is copied that was written at its place."""

import pytest
import torch

from liger_models.kernels import gated_rms_norm, short_conv, ssd
from liger_models.kernels._split_columns import place_of, room_for, split_columns

WIDTHS = [3, 1, 4]


class Twice(torch.autograd.Function):
    """2 x, whose gradient is written at its place."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.place = place_of(x)
        return 2 * x

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        room = room_for(x, ctx.place)
        return room.copy_(2 * dy)


@pytest.fixture
def x():
    return torch.randn(5, 8, requires_grad=True)


def whole_of(x, loss, **options):
    """The gradient of x, and the gradients of its parts as they arrive."""
    return torch.autograd.grad(loss, x, **options)[0]


def test_gradients_at_their_places_become_the_whole(x):
    parts = split_columns(x, WIDTHS)
    arrived = []
    for part in parts:
        part.register_hook(arrived.append)
    factors = torch.randn(5, 8).split(WIDTHS, 1)
    found = whole_of(x, sum((Twice.apply(p) * f).sum() for p, f in zip(parts, factors, strict=True)))
    assert torch.equal(found, 2 * torch.cat(factors, 1))
    assert {g.untyped_storage().data_ptr() for g in arrived} == {found.untyped_storage().data_ptr()}


@pytest.mark.parametrize("there", [(), (0,), (1, 2), (0, 2)])
def test_other_gradients_are_copied(x, there):
    parts = split_columns(x, WIDTHS)
    factors = torch.randn(5, 8).split(WIDTHS, 1)
    doubled = [Twice.apply(p) if i in there else 2 * p for i, p in enumerate(parts)]
    found = whole_of(x, sum((p * f).sum() for p, f in zip(doubled, factors, strict=True)))
    assert torch.equal(found, 2 * torch.cat(factors, 1))


def test_parts_without_a_gradient_have_zeros(x):
    first, _, last = split_columns(x, WIDTHS)
    found = whole_of(x, Twice.apply(last).sum() + 0 * first.sum())
    assert torch.equal(found, torch.tensor([0.0] * 4 + [2.0] * 4).expand(5, 8))


def test_a_part_with_two_uses_has_their_sum(x):
    first, second, last = split_columns(x, WIDTHS)
    factors = torch.randn(5, 4)
    twice = Twice.apply(last)
    loss = (twice * factors).sum() + (Twice.apply(last) * 3).sum() + Twice.apply(first).sum() + second.sum()
    ones = torch.ones(5, 4)
    ones[:, :3] = 2
    assert torch.equal(whole_of(x, loss), torch.cat([ones, 2 * factors + 6], 1))


def test_gradients_of_an_earlier_pass_stay_as_they_are(x):
    first, second, last = split_columns(x, WIDTHS)
    outputs = Twice.apply(first), Twice.apply(second), Twice.apply(last)
    loss = sum(output.square().sum() for output in outputs)
    (kept,) = torch.autograd.grad(loss, last, retain_graph=True)  # x is not reached
    before = kept.clone()
    found = whole_of(x, outputs[0].sum() + outputs[1].sum(), retain_graph=True)
    assert torch.equal(kept, before)
    assert torch.equal(found, torch.tensor([2.0] * 4 + [0.0] * 4).expand(5, 8))
    again = whole_of(x, loss, retain_graph=True)
    once_more = whole_of(x, loss)
    assert torch.equal(kept, before)
    assert again.data_ptr() != once_more.data_ptr()
    assert torch.equal(again, 8 * x)
    assert torch.equal(once_more, 8 * x)


def test_a_changed_gradient_counts_and_the_first_one_stays_as_it_is(x):
    parts, seen = split_columns(x, WIDTHS), []
    parts[0].register_hook(lambda gradient: seen.append(gradient) or 3 * gradient)
    found = whole_of(x, sum(Twice.apply(part).sum() for part in parts))
    assert torch.equal(found, torch.tensor([6.0] * 3 + [2.0] * 5).expand(5, 8))
    assert torch.equal(seen[0], torch.full((5, 3), 2.0))


def test_other_tensors_have_no_place(x):
    part = split_columns(x, WIDTHS)[0]
    assert place_of(part) is not None
    assert place_of(part.view_as(part)) is None
    assert place_of(x) is None


@pytest.mark.parametrize(("tokens", "wide"), [(0, False), (70, False), (5, True)])
def test_operations_of_a_state_space_write_there(interpreted, monkeypatch, tokens, wide):
    """The gated norm, the convolution and the scan of Mamba 2, with their gradients' bits."""
    if wide:  # the norm of wide groups
        monkeypatch.setattr("liger_models.kernels.norms.gated_rms_norm._WIDE", 0)
    heads, width, state, taps = 2, 4, 4, 3
    size, conv = heads * width, heads * width + 2 * state
    torch.manual_seed(0)
    weights = torch.randn(conv, taps), torch.randn(size), *torch.randn(3, heads)
    factors = torch.randn(tokens, size)

    def gradient(split):
        x = torch.randn(tokens, size + conv + heads, generator=torch.Generator().manual_seed(1))
        x.requires_grad_()
        z, xbc, dt = split(x, [size, conv, heads])
        arrived = []
        for part in (z, xbc, dt):
            part.register_hook(arrived.append)
        mixed, b, c = short_conv(xbc, weights[0], activation="silu").split([size, state, state], 1)
        operands = mixed.unflatten(1, (heads, width)), dt, b[:, None], c[:, None]
        y = ssd(*operands, *weights[2:])[0].flatten(1)
        loss = (gated_rms_norm(y, z, weights[1], group_size=size, gate_first=True) * factors).sum()
        return torch.autograd.grad(loss, x)[0], arrived

    expected, _ = gradient(lambda x, widths: x.split(widths, 1))
    found, arrived = gradient(split_columns)
    assert torch.equal(found, expected)
    assert {g.untyped_storage().data_ptr() for g in arrived} == {found.untyped_storage().data_ptr()}
