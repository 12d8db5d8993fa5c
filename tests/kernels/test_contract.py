"""Contract common to all operations of kernel_operations.py."""

import functools
import itertools

import pytest
import torch
from kernel_operations import EVERYTHING, LOSSES, OPERATIONS, assert_same
from operation_runs import (
    copies,
    cut_from_wider,
    in_float64,
    make_inputs,
    outputs_of,
    run_with_gradients,
    transposed,
)
from product_operations import WITH_PRODUCTS
from torch.utils.checkpoint import checkpoint

from liger_models.kernels import _dispatch

# Rows and widths: two documents of rows that fill no block, and a single row.
SIZES = [("plain", 5, 33), ("triton", 5, 33), ("triton", 1, 6)]

every_operation = pytest.mark.parametrize("op", EVERYTHING.values(), ids=EVERYTHING)

# Operations without matrix products.
BY_ROWS = OPERATIONS | LOSSES
every_operation_by_rows = pytest.mark.parametrize("op", BY_ROWS.values(), ids=BY_ROWS)


def usual_run(op):
    """Operands of three rows, and the outputs and gradients of a run in the present form, made once."""
    name = next(name for name, other in EVERYTHING.items() if other is op)
    inputs, outputs, grads, upstream = _usual_run(name, _dispatch._interpreting)
    own = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    return own, outputs, grads, copies(upstream)


@functools.cache
def _usual_run(name, interpreting):
    inputs = make_inputs(EVERYTHING[name], 3, 6)
    outputs, grads, upstream = run_with_gradients(EVERYTHING[name].run, inputs)
    return inputs, [output.detach() for output in outputs], grads, upstream


@every_operation
@pytest.mark.parametrize(("implementation", "rows", "width"), SIZES, indirect=["implementation"])
def test_outputs_and_gradients_are_correct(op, rows, width, implementation, assert_near):
    inputs = make_inputs(op, rows, width)
    outputs, grads, upstream = run_with_gradients(op.run, inputs)
    truth, true_grads, _ = run_with_gradients(op.eager, in_float64(inputs), in_float64(upstream))
    # An output is a chain of about a dozen operations, a gradient of twice as many, and a weight's gradient
    # also sums over rows. A matrix product sums up to 37 terms, and later operations may take differences of
    # them.
    each = 1 if op in BY_ROWS.values() else 4
    for actual, true in zip(outputs, truth, strict=True):
        assert_near(actual, true, 12 * each)
    for actual, true in zip(grads, true_grads, strict=True):
        assert_near(actual, true, (24 + rows) * each)


@every_operation
def test_a_row_may_be_one_element(op, interpreted):
    inputs = make_inputs(op, 2, 1)
    outputs, grads, upstream = run_with_gradients(op.run, inputs)
    truth, true_grads, _ = run_with_gradients(op.eager, in_float64(inputs), in_float64(upstream))
    # The terms of a norm's gradient nearly cancel: the rest has the error of terms of up to about ten.
    for actual, true in zip((*outputs, *grads), (*truth, *true_grads), strict=True):
        torch.testing.assert_close(actual.double(), true, rtol=0, atol=36 * 2**-24 * 10)


@every_operation_by_rows
def test_autocast_changes_no_bit(op, implementation):
    inputs, outputs, grads, upstream = usual_run(op)
    with torch.autocast("cpu", torch.bfloat16):
        again, grads_again, _ = run_with_gradients(op.run, inputs, upstream)
    assert_same(op, (*outputs, *grads), (*again, *grads_again))


@pytest.mark.parametrize("op", WITH_PRODUCTS.values(), ids=WITH_PRODUCTS)
def test_autocast_sets_the_dtype_of_products_and_gradients_keep_their_operands_dtypes(op, implementation):
    inputs, outputs, grads, upstream = usual_run(op)
    with torch.autocast("cpu", torch.float16):  # the interpreter multiplies no bfloat16
        cast, cast_grads, _ = run_with_gradients(
            lambda *inputs: [output.float() for output in outputs_of(op.run, inputs)], inputs, upstream
        )
    assert [grad.dtype for grad in cast_grads] == [torch.float32] * len(grads)
    # Operands, products and their gradients are rounded to float16: up to eight roundings of the largest
    # element.
    for a, b in zip((*outputs, *grads), (*cast, *cast_grads), strict=True):
        assert (a - b).abs().max() <= 8 * 2**-11 * max(1.0, a.abs().max().item())


ONE_DTYPE = ("swiglu_separate", "geglu_exact", "sigmoid_gated")  # others are refused
MIXED = {
    name: op for name, op in BY_ROWS.items() if name not in ONE_DTYPE and len(op.shapes(1, 2)) - op.tables > 1
}


@pytest.mark.parametrize("op", MIXED.values(), ids=MIXED)
@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float32), (torch.float32, torch.float16)], ids=str)
def test_operands_of_two_dtypes_lose_no_more_precision_than_the_narrower(op, dtypes, implementation):
    first, others = dtypes
    given = make_inputs(op, 3, 6, torch.float16)
    inputs = [x.detach().to(others if i else first) for i, x in enumerate(given)]
    inputs = [x.requires_grad_(y.requires_grad) for x, y in zip(inputs, given, strict=True)]
    outputs, grads, upstream = run_with_gradients(op.run, inputs)
    truth, true_grads, _ = run_with_gradients(op.eager, in_float64(inputs), in_float64(upstream))
    # Some operations round to the narrower dtype on the way: as many roundings as elsewhere, but to float16.
    for actual, true in zip((*outputs, *grads), (*truth, *true_grads), strict=True):
        assert (actual.double() - true).abs().max() <= 27 * 2**-11 * true.abs().max()


@every_operation
def test_zero_rows_give_empty_results_and_zero_weight_gradients(op, implementation):
    inputs = make_inputs(op, 0, 8)
    outputs, grads, _ = run_with_gradients(op.run, inputs)
    assert [output.shape for output in outputs] == [o.shape for o in outputs_of(op.eager, inputs)]
    for grad, x in zip(grads, inputs, strict=False):
        assert grad.shape == x.shape
        assert not grad.any()


@every_operation
@pytest.mark.parametrize("first", [0, 1])
def test_the_layout_in_memory_changes_nothing(op, first, interpreted):
    """Each operand has both layouts, and its neighbours the other: none is read by their strides."""
    inputs, outputs, grads, upstream = usual_run(op)
    layouts = itertools.cycle([transposed, cut_from_wider][:: -1 if first else 1])
    laid_out = [next(layouts)(x).requires_grad_(x.requires_grad) for x in inputs]
    again, grads_again, _ = run_with_gradients(op.run, laid_out, [next(layouts)(g) for g in upstream])
    assert_same(op, (*outputs, *grads), (*again, *grads_again))


@every_operation
def test_broadcast_operands_and_gradients_are_read_correctly(op, interpreted, assert_near):
    inputs = [x.detach()[:1].expand(x.shape).requires_grad_(x.requires_grad) for x in make_inputs(op, 3, 6)]
    upstream = [torch.randn(()).expand(output.shape) for output in usual_run(op)[1]]
    outputs, grads, _ = run_with_gradients(op.run, inputs, upstream)
    truth, true_grads, _ = run_with_gradients(op.eager, in_float64(inputs), in_float64(upstream))
    # Terms of gradients that nearly cancel have an error of terms of up to about ten.
    for actual, true in zip((*outputs, *grads), (*truth, *true_grads), strict=True):
        torch.testing.assert_close(actual.double(), true, rtol=27 * 2**-22, atol=36 * 2**-24 * 10)


@every_operation
def test_second_runs_and_backward_passes_give_the_same_bits_add_up_and_modify_nothing(
    op, interpreted, assert_near
):
    inputs, first_outputs, first_grads, upstream = usual_run(op)
    with_input = [x for x in inputs if x.requires_grad]
    passed = [torch.randn_like(x) for x in with_input]
    before = copies((*inputs, *upstream, *passed))
    outputs, again = outputs_of(op.run, inputs), outputs_of(op.run, inputs)
    grads = torch.autograd.grad(outputs, with_input, upstream, retain_graph=True)
    for a, b in zip((*outputs, *grads), (*first_outputs, *first_grads), strict=True):
        assert torch.equal(a, b)
    # A second backward pass through the first run, with the gradients of another run and of the operands
    # themselves.
    used = [a + 2 * b for a, b in zip(outputs, again, strict=True)] + [x * 1 for x in with_input]
    shared = torch.autograd.grad(used, with_input, [*upstream, *passed])
    for grad, single, own in zip(shared, first_grads, passed, strict=True):
        assert_near(grad, 3 * single.double() + own.double(), 12)
    for a, b in zip((*inputs, *upstream, *passed), before, strict=True):
        assert torch.equal(a, b)


@every_operation
def test_second_derivatives_are_refused_at_once(op, implementation):
    inputs = make_inputs(op, 3, 6)
    needed = [x for x in inputs if x.requires_grad]
    for output in outputs_of(op.run, inputs):
        for function in (torch.sum, torch.linalg.vector_norm):  # linear or not in the outputs
            if output.requires_grad:
                with pytest.raises(RuntimeError, match="create_graph=True"):
                    torch.autograd.grad(function(output), needed, create_graph=True, allow_unused=True)


@every_operation
@pytest.mark.parametrize(
    ("implementation", "reentrant"), [("plain", True), ("triton", False)], indirect=["implementation"]
)
def test_it_may_run_again_under_checkpointing(op, reentrant, implementation):
    inputs, outputs, grads, upstream = usual_run(op)

    def run(*inputs):
        return checkpoint(lambda *x: outputs_of(op.run, x), *inputs, use_reentrant=reentrant)

    again = outputs_of(run, inputs)
    torch.autograd.backward(again, upstream, retain_graph=not reentrant)
    grads_again = [x.grad for x in inputs if x.requires_grad]
    assert_same(op, (*outputs, *grads), (*again, *grads_again))


@every_operation
def test_the_plain_twin_passes_gradcheck_in_float64(op):
    inputs = in_float64(make_inputs(op, 3, 4))
    assert torch.autograd.gradcheck(op.run, inputs, fast_mode=True)


@every_operation
def test_it_traces_without_a_graph_break(op):
    inputs = make_inputs(op, 3, 6)
    compiled = torch.compile(op.run, fullgraph=True, backend="eager")
    outputs, grads, upstream = run_with_gradients(op.run, inputs)
    again, grads_again, _ = run_with_gradients(compiled, inputs, upstream)
    assert_same(op, (*outputs, *grads), (*again, *grads_again))


@every_operation
def test_integers_and_operands_on_two_devices_are_refused(op):
    inputs = make_inputs(op, 3, 6)
    with pytest.raises(TypeError, match="float"):
        op.run(*(x.detach().int() if x.requires_grad else x for x in inputs))
    if len(inputs) > 1:
        with pytest.raises((ValueError, RuntimeError), match="device"):  # some leave it to PyTorch's product
            op.run(*inputs[:-1], inputs[-1].detach().to("meta"))
