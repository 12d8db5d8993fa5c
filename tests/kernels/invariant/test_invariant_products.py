"""Products in blocks, on libraries whose rows depend on the batch."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.nn import functional as F

from liger_models.kernels.invariant import blocks
from liger_models.kernels.invariant.mode import (
    as_in_this_pass,
    batch_invariant,
    is_batch_invariant,
    without_batch_invariance,
)

ROWS, INNER, WIDTH = 150, 24, 40


@pytest.fixture
def library(monkeypatch):
    """Replace the matrix library: library(error), where error(y) changes a result [rows, N] in place."""
    multiply = blocks._multiply

    def replace(error):
        def inexact(a, b, c, out, beta, alpha):
            y = multiply(a, b, c, out, beta, alpha)
            error(y)
            return y

        monkeypatch.setattr(blocks, "_multiply", inexact)

    blocks._sizes_of.cache_clear()
    yield replace
    blocks._sizes_of.cache_clear()


def by_count(y):
    """As if the sums were split by the number of rows: sums of short blocks differ."""
    y += len(y) % 64


def by_place(y):
    """As if some tiles were split."""
    y[1::2] += 1


def operands():
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(ROWS, INNER, generator=generator)
    return a, torch.randn(INNER, WIDTH, generator=generator)


@pytest.mark.parametrize("error", [by_count, by_place])
def test_rows_of_a_product_keep_their_bits_in_every_batch(library, error):
    library(error)
    a, b = operands()
    whole, order = blocks.product(a, b), torch.arange(ROWS).flip(0)
    assert torch.equal(blocks.product(a[order], b), whole[order])
    for count in (1, 2, 63, 64, 65, 129):
        assert torch.equal(blocks.product(a[:count], b), whole[:count]), count
        assert torch.equal(blocks.product(a[-count:], b), whole[-count:]), count


@pytest.mark.parametrize("c", ["none", "row", "rows"])
@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0.5, -2), (0, 1)])
def test_a_product_in_blocks_is_that_of_torch(c, beta, alpha, assert_near):
    a, b = operands()
    added = {"none": None, "row": torch.randn(WIDTH), "rows": torch.randn(ROWS, WIDTH)}[c]
    expected = alpha * (a.double() @ b.double()) + (0 if added is None else beta * added)
    # A sum of 24 terms random-walks to about 5 roundings, and the result is scaled and added to.
    assert_near(blocks.product(a, b, added, beta=beta, alpha=alpha), expected, 8)
    out = torch.full((ROWS, WIDTH + 3), torch.nan)[:, 1:-2]  # rows with gaps, from an odd address on
    assert blocks.product(a, b, added, beta=beta, alpha=alpha, out=out) is out
    assert_near(out, expected, 8)
    if c == "rows":
        in_place = added.clone()
        blocks.product(a, b, in_place, beta=beta, alpha=alpha, out=in_place)
        assert_near(in_place, expected, 8)


def test_every_form_of_a_product_runs_in_blocks(library):
    library(by_count)
    a, b = operands()
    bias, weight = torch.randn(WIDTH), b.T.contiguous()

    def in_place(x):
        y = torch.ones(len(x), WIDTH)
        return y.addmm_(x, b)

    forms = {
        "linear": lambda x: F.linear(x, weight),
        "with a bias": lambda x: F.linear(x, weight, bias),
        "in rows": lambda x: F.linear(x[None], weight, bias)[0],
        "out": lambda x: torch.mm(x, b, out=torch.empty(len(x), WIDTH)),
        "in place": in_place,
        "batches": lambda x: torch.stack([x, x]) @ torch.stack([b, b]),
    }
    with batch_invariant():
        for inference in (False, True):
            with torch.inference_mode(inference):
                for name, form in forms.items():
                    whole, part = form(a), form(a[:70])
                    assert torch.equal(whole[..., :70, :], part), (name, inference)


@pytest.mark.parametrize("function", [torch.sigmoid, F.silu, F.gelu, torch.tanh, torch.exp])
def test_an_element_keeps_its_bits_at_the_end_of_a_vector(function):
    x = torch.randn(9, 53)  # rows end within a vector of 8 elements
    with batch_invariant():
        whole = function(x)
        assert torch.equal(torch.stack([function(row) for row in x]), whole)
        if in_place := getattr(torch, f"{function.__name__}_", None):
            assert torch.equal(in_place(x.clone()), whole)
    torch.testing.assert_close(whole, function(x))


def test_gradients_are_those_of_torch(assert_near):
    given = torch.randn(WIDTH), *operands()
    results = []
    for context, dtype in ((batch_invariant(), torch.float32), (without_batch_invariance(), torch.float64)):
        leaves = [x.to(dtype).clone().requires_grad_() for x in given]
        with context:
            torch.addmm(*leaves).square().sum().backward()
        results.append([x.grad for x in leaves])
    # Sums of up to 150 terms random-walk to about 12 roundings, after those of 24 terms in the product.
    for found, expected in zip(*results, strict=True):
        assert_near(found, expected, 16)


def test_the_context_is_of_this_thread_and_ends_with_an_error():
    seen = []

    def fail():
        with batch_invariant():
            thread = threading.Thread(target=lambda: seen.append(is_batch_invariant()))
            thread.start()
            thread.join()
            seen.append(is_batch_invariant())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert seen == [False, True]
    assert not is_batch_invariant()


def test_a_second_run_in_the_backward_pass_is_in_the_context_again():
    with batch_invariant():
        again = as_in_this_pass(is_batch_invariant)
    assert again()
    assert not is_batch_invariant()
    assert as_in_this_pass(is_batch_invariant)() is False


def test_operations_that_mix_tokens_are_refused():
    x = torch.randn(2, 2, 2, 4)
    with batch_invariant():
        with pytest.raises(RuntimeError, match=r"cannot run in batch_invariant\(\)"):
            F.scaled_dot_product_attention(x, x, x)
        with pytest.raises(RuntimeError, match="convolution"):
            F.conv1d(x[0], torch.randn(3, 2, 3))
        with without_batch_invariance():
            F.conv1d(x[0], torch.randn(3, 2, 3))
