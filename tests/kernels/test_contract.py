"""What every operation promises, told once. A new operation adds one entry to `OPERATIONS`."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.kernels import (
    add_rms_norm,
    geglu,
    layer_norm,
    relu2,
    rms_norm,
    rotary,
    softmax,
    split_norm_rotary_qkv,
    split_rotary_qkv,
    swiglu,
)


@dataclass
class Operation:
    run: Callable  # on the tensors of `shapes`; gives a tensor or a tuple of tensors
    eager: Callable  # the same in plain PyTorch, as a model that uses no kernels computes it in its own dtype
    shapes: Callable[[int, int], list[tuple[int, ...]]]  # of the operands, from rows and width
    tables: int = 0  # so many of the last operands are tables without gradients


def eager_rms_norm(x, weight, eps, offset, cast):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if cast == "llama":
        return (weight + offset) * normed.to(x.dtype)
    return (normed * (weight.to(normed.dtype) + offset)).to(x.dtype)


def eager_turn(x, cos, sin, interleaved):
    cos, sin = cos.to(x.dtype).unsqueeze(-2), sin.to(x.dtype).unsqueeze(-2)
    turned, rest = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
    if interleaved:
        a, b = turned[..., ::2], turned[..., 1::2]
        half_turned = torch.stack([-b, a], -1).flatten(-2)
        cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
    else:
        a, b = turned.chunk(2, -1)
        half_turned = torch.cat([-b, a], -1)
        cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    return torch.cat([turned * cos + half_turned * sin, rest], -1)


def eager_split(qkv, cos, sin, interleaved):
    q, k, v = qkv.unflatten(-1, (5, -1)).split([3, 1, 1], 1)
    return eager_turn(q, cos, sin, interleaved), eager_turn(k, cos, sin, interleaved), v


def eager_split_norm(qkv, q_weight, k_weight, cos, sin, per_head, offset, cast):
    q, k, v = qkv.unflatten(-1, (5, -1)).split([3, 1, 1], 1)

    def norm(x, weight):
        rows = x if per_head else x.flatten(1)
        return eager_rms_norm(rows, weight, 1e-5, offset, cast).view(x.shape)

    return *(eager_turn(norm(x, w), cos, sin, False) for x, w in ((q, q_weight), (k, k_weight))), v


def eager_split_norm_last(qkv, cos, sin):
    q, k, v = eager_split(qkv, cos, sin, True)
    ones = torch.ones(q.shape[-1], dtype=q.dtype, device=q.device)
    return *(eager_rms_norm(x, ones, 1e-5, 0.0, "llama") for x in (q, k)), v


def halves(x):
    return x.chunk(2, -1)


def norm_shapes(rows, width):
    return [(rows, width), (width,)]


def qkv_shapes(rows, width):  # five heads of at least two elements, of which about two thirds turn
    half = (width + 1) // 3 + (width < 2)
    return [(rows, 5 * max(width, 2)), (rows, half), (rows, half)]


def qkv_norm_shapes(rows, width, q_heads=1, k_heads=1):  # as many heads have weights of their own
    qkv, *tables = qkv_shapes(rows, width)
    return [qkv, (q_heads * max(width, 2),), (k_heads * max(width, 2),), *tables]


def batch_shapes(rows, width):  # two sequences with tables in common
    half = (width + 1) // 3 + (width < 2)
    return [(2, rows, 3, max(width, 2)), (2, rows, 1, max(width, 2)), (rows, half), (rows, half)]


OPERATIONS = {
    "rms_norm": Operation(
        lambda x, w: rms_norm(x, w, 1e-5, 0.0, "llama"),
        lambda x, w: eager_rms_norm(x, w, 1e-5, 0.0, "llama"),
        norm_shapes,
    ),
    "rms_norm_gemma": Operation(
        lambda x, w: rms_norm(x, w, 1e-5, 1.0, "gemma"),
        lambda x, w: eager_rms_norm(x, w, 1e-5, 1.0, "gemma"),
        norm_shapes,
    ),
    "rms_norm_unscaled": Operation(
        lambda x: rms_norm(x, None),
        lambda x: eager_rms_norm(
            x, torch.ones(x.shape[-1], dtype=x.dtype, device=x.device), 1e-6, 0.0, "llama"
        ),
        lambda rows, width: [(rows, width)],
    ),
    "add_rms_norm": Operation(
        lambda x, r, w: add_rms_norm(x, r, w, 1e-5, 0.0, "float32"),
        lambda x, r, w: (eager_rms_norm(x + r, w, 1e-5, 0.0, "float32"), x + r),
        lambda rows, width: [(rows, width), (rows, width), (width,)],
    ),
    "layer_norm": Operation(
        lambda x, w, b: layer_norm(x, w, b, 1e-5),
        lambda x, w, b: F.layer_norm(x, w.shape, w, b, 1e-5),
        lambda rows, width: [(rows, width), (width,), (width,)],
    ),
    "layer_norm_unbiased": Operation(
        lambda x, w: layer_norm(x, w, None, 1e-5, 1.0),
        lambda x, w: F.layer_norm(x, w.shape, w + 1.0, None, 1e-5),
        norm_shapes,
    ),
    "split_rotary_qkv": Operation(
        lambda qkv, c, s: split_rotary_qkv(qkv, c, s, 3, 1, qkv.shape[1] // 5),
        lambda qkv, c, s: eager_split(qkv, c, s, False),
        qkv_shapes,
        tables=2,
    ),
    "split_rotary_qkv_interleaved": Operation(
        lambda qkv, c, s: split_rotary_qkv(qkv, c, s, 3, 1, qkv.shape[1] // 5, interleaved=True),
        lambda qkv, c, s: eager_split(qkv, c, s, True),
        qkv_shapes,
        tables=2,
    ),
    "split_rotary_qkv_inplace": Operation(
        # The product is what the operation consumes, so here too no operand is altered.
        lambda qkv, c, s: split_rotary_qkv(qkv * 1, c, s, 3, 1, qkv.shape[1] // 5, inplace=True),
        lambda qkv, c, s: eager_split(qkv, c, s, False),
        qkv_shapes,
        tables=2,
    ),
    "split_norm_rotary_qkv": Operation(
        lambda qkv, q, k, c, s: split_norm_rotary_qkv(qkv, q, k, c, s, 3, 1, qkv.shape[1] // 5, eps=1e-5),
        lambda qkv, q, k, c, s: eager_split_norm(qkv, q, k, c, s, True, 0.0, "llama"),
        qkv_norm_shapes,
        tables=2,
    ),
    "split_norm_rotary_qkv_all_heads": Operation(
        lambda qkv, q, k, c, s: split_norm_rotary_qkv(
            qkv, q, k, c, s, 3, 1, qkv.shape[1] // 5, eps=1e-5, offset=1.0, cast="gemma", per_head=False
        ),
        lambda qkv, q, k, c, s: eager_split_norm(qkv, q, k, c, s, False, 1.0, "gemma"),
        lambda rows, width: qkv_norm_shapes(rows, width, 3, 1),
        tables=2,
    ),
    "split_norm_rotary_qkv_norm_last": Operation(
        lambda qkv, c, s: split_norm_rotary_qkv(
            qkv, None, None, c, s, 3, 1, qkv.shape[1] // 5, eps=1e-5, norm_first=False, interleaved=True
        ),
        eager_split_norm_last,
        qkv_shapes,
        tables=2,
    ),
    "rotary": Operation(
        lambda q, k, c, s: rotary(q, k, c, s),
        lambda q, k, c, s: (eager_turn(q, c, s, False), eager_turn(k, c, s, False)),
        batch_shapes,
        tables=2,
    ),
    "swiglu": Operation(
        swiglu,
        lambda x: F.silu(halves(x)[0]) * halves(x)[1],
        lambda rows, width: [(rows, 2 * width)],
    ),
    "swiglu_separate": Operation(
        swiglu, lambda g, u: F.silu(g) * u, lambda rows, width: [(rows, width), (rows, width)]
    ),
    "geglu_tanh": Operation(
        geglu,
        lambda x: F.gelu(halves(x)[0], approximate="tanh") * halves(x)[1],
        lambda rows, width: [(rows, 2 * width)],
    ),
    "geglu_exact": Operation(
        lambda g, u: geglu(g, u, approximate="none"),
        lambda g, u: F.gelu(g) * u,
        lambda rows, width: [(rows, width), (rows, width)],
    ),
    "relu2": Operation(relu2, lambda x: F.relu(x).square(), lambda rows, width: [(rows, width)]),
    "softmax": Operation(softmax, lambda x: x.softmax(-1), lambda rows, width: [(rows, width)]),
}

every_operation = pytest.mark.parametrize("op", OPERATIONS.values(), ids=OPERATIONS)


def make_inputs(op: Operation, rows: int, width: int, dtype=torch.float32, device="cpu") -> list[Tensor]:
    shapes = op.shapes(rows, width)
    operands = len(shapes) - op.tables
    inputs = [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes[:operands]]
    return inputs + [torch.randn(shape, device=device) for shape in shapes[operands:]]


def outputs_of(function, inputs) -> tuple[Tensor, ...]:
    outputs = function(*inputs)
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def run_with_gradients(function, inputs, gradients=None, **options):
    """Outputs, and the gradients of all operands that need one."""
    outputs = outputs_of(function, inputs)
    if gradients is None:
        gradients = [torch.randn_like(output) for output in outputs]
    needed = [x for x in inputs if x.requires_grad]
    return outputs, torch.autograd.grad(outputs, needed, gradients, **options), gradients


def in_float64(tensors) -> list[Tensor]:
    return [x.detach().double().requires_grad_(x.requires_grad) for x in tensors]


def copies(tensors) -> list[Tensor]:
    return [x.detach().clone() for x in tensors]


@every_operation
@pytest.mark.parametrize(("rows", "width"), [(1, 6), (5, 7), (3, 33)])
def test_outputs_and_gradients_are_the_true_ones(op, rows, width, implementation, assert_near):
    inputs = make_inputs(op, rows, width)
    outputs, grads, upstream = run_with_gradients(op.run, inputs)
    truth, true_grads, _ = run_with_gradients(op.eager, in_float64(inputs), in_float64(upstream))
    # An output is a chain of about a dozen operations, a gradient of twice as many and a weight's a sum
    # over rows besides.
    for actual, true in zip(outputs, truth, strict=True):
        assert_near(actual, true, 12)
    for actual, true in zip(grads, true_grads, strict=True):
        assert_near(actual, true, 24 + rows)


@every_operation
def test_zero_rows_give_empty_results_and_zero_weight_gradients(op, implementation):
    inputs = make_inputs(op, 0, 8)
    outputs, grads, _ = run_with_gradients(op.run, inputs)
    assert [output.shape for output in outputs] == [o.shape for o in outputs_of(op.eager, inputs)]
    for grad, x in zip(grads, inputs, strict=False):
        assert grad.shape == x.shape
        assert not grad.any()


def transposed(x):
    return x.detach().mT.contiguous().mT if x.dim() > 1 else torch.stack([x.detach(), x.detach()], -1)[:, 0]


def cut_from_wider(x):
    return torch.cat([x.detach(), torch.randn_like(x)], -1)[..., : x.shape[-1]]


def shifted(x):  # memory that is not aligned to 16 bytes
    return torch.cat([x.new_zeros(1), x.detach().flatten()])[1:].view(x.shape)


@every_operation
@pytest.mark.parametrize("layout", [transposed, cut_from_wider, shifted])
def test_the_layout_in_memory_changes_no_bit(op, layout, interpreted):
    inputs = make_inputs(op, 3, 6)
    outputs, grads, upstream = run_with_gradients(op.run, inputs)
    laid_out = [layout(x).requires_grad_(x.requires_grad) for x in inputs]
    again, grads_again, _ = run_with_gradients(op.run, laid_out, [layout(g) for g in upstream])
    for a, b in zip((*outputs, *grads), (*again, *grads_again), strict=True):
        assert torch.equal(a, b)


@every_operation
def test_broadcast_operands_and_gradients_are_as_good_as_copies(op, interpreted):
    inputs = [x.detach()[:1].expand(x.shape).requires_grad_(x.requires_grad) for x in make_inputs(op, 3, 6)]
    upstream = [torch.randn(()).expand(output.shape) for output in outputs_of(op.run, inputs)]
    outputs, grads, _ = run_with_gradients(op.run, inputs, upstream)
    solid = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    again, grads_again, _ = run_with_gradients(op.run, solid, copies(upstream))
    for a, b in zip((*outputs, *grads), (*again, *grads_again), strict=True):
        assert torch.equal(a, b)


@every_operation
def test_operands_and_incoming_gradients_are_not_altered(op, interpreted):
    inputs = make_inputs(op, 3, 6)
    before = copies(inputs)
    outputs, _, upstream = run_with_gradients(op.run, inputs, retain_graph=True)
    upstream_before = copies(upstream)
    run_with_gradients(lambda *_: outputs, inputs, upstream)
    for a, b in zip((*inputs, *upstream), (*before, *upstream_before), strict=True):
        assert torch.equal(a, b)


@every_operation
def test_a_second_backward_and_a_second_run_give_the_same_bits(op, interpreted):
    inputs = make_inputs(op, 3, 6)
    outputs, grads, upstream = run_with_gradients(op.run, inputs, retain_graph=True)
    _, second_backward, _ = run_with_gradients(lambda *_: outputs, inputs, upstream)
    second_run, second_grads, _ = run_with_gradients(op.run, inputs, upstream)
    for a, b, c in zip(grads, second_backward, second_grads, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    for a, b in zip(outputs, second_run, strict=True):
        assert torch.equal(a, b)


@every_operation
def test_operands_shared_between_uses_add_up_their_gradients(op, interpreted, assert_near):
    inputs = make_inputs(op, 3, 6)
    _, once, upstream = run_with_gradients(op.run, inputs)
    with_input = [x for x in inputs if x.requires_grad]

    def run_twice_and_pass_inputs_on(*inputs):
        first, second = outputs_of(op.run, inputs), outputs_of(op.run, inputs)
        return *(a + 2 * b for a, b in zip(first, second, strict=True)), *(x * 1 for x in with_input)

    passed = [torch.randn_like(x) for x in with_input]
    _, thrice, _ = run_with_gradients(run_twice_and_pass_inputs_on, inputs, [*upstream, *passed])
    for grad, single, own in zip(thrice, once, passed, strict=True):
        assert_near(grad, 3 * single.double() + own.double(), 12)


@every_operation
def test_a_second_derivative_is_refused_and_not_wrong(op, interpreted):
    inputs = make_inputs(op, 3, 6)
    outputs = outputs_of(op.run, inputs)
    (grad, *_) = torch.autograd.grad([o.square().sum() for o in outputs], inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@every_operation
def test_the_plain_twin_passes_gradcheck_in_float64(op):
    inputs = in_float64(make_inputs(op, 3, 4))
    assert torch.autograd.gradcheck(op.run, inputs, raise_exception=True)


@every_operation
def test_it_traces_without_a_graph_break(op):
    inputs = make_inputs(op, 3, 6)
    compiled = torch.compile(op.run, fullgraph=True, backend="eager")
    outputs, grads, upstream = run_with_gradients(op.run, inputs)
    again, grads_again, _ = run_with_gradients(compiled, inputs, upstream)
    for a, b in zip((*outputs, *grads), (*again, *grads_again), strict=True):
        assert torch.equal(a, b)


@every_operation
def test_integers_and_operands_on_two_devices_are_refused(op):
    inputs = make_inputs(op, 3, 6)
    with pytest.raises(TypeError, match="floating point"):
        op.run(*(x.detach().int() if x.requires_grad else x for x in inputs))
    if len(inputs) > 1:
        with pytest.raises(ValueError, match="move them to one device"):
            op.run(*inputs[:-1], inputs[-1].detach().to("meta"))


# On a GPU


def error_of(actual, truth) -> float:
    return (actual.double() - truth).square().mean().sqrt().item()


@pytest.mark.gpu
@every_operation
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("rows", "width"), [(4096, 128), (2048, 2048), (1024, 5000), (512, 16384), (64, 65600)]
)
def test_no_further_from_the_truth_than_eager(op, rows, width, dtype):
    if "rotary" in next(name for name, other in OPERATIONS.items() if other is op):
        width = min(width, 256)  # the width of a head
    inputs = make_inputs(op, rows, width, dtype, "cuda")
    outputs, grads, upstream = run_with_gradients(op.run, inputs)
    eager, eager_grads, _ = run_with_gradients(op.eager, inputs, upstream)
    truth, true_grads, _ = run_with_gradients(op.eager, in_float64(inputs), in_float64(upstream))
    for ours, theirs, true in zip(
        (*outputs, *grads), (*eager, *eager_grads), (*truth, *true_grads), strict=True
    ):
        assert ours.dtype == theirs.dtype
        # Both round at random: over n elements the two errors differ by chance by a few parts in sqrt(n). In
        # float32, where eager itself is off by a rounding or less, two roundings are as good.
        chance = 1 + 4 / true.numel() ** 0.5
        two_roundings = torch.finfo(torch.float32).eps * true.square().mean().sqrt().item()
        assert error_of(ours, true) <= max(chance * error_of(theirs, true), two_roundings)


@pytest.mark.gpu
@every_operation
def test_more_than_2_to_the_31_elements(op):
    width = 128
    per_row = max(x.numel() for x in make_inputs(op, 1, width))
    rows = 2**31 // per_row + 1000
    inputs = make_inputs(op, rows, width, torch.bfloat16, "cuda")
    outputs, grads, upstream = run_with_gradients(op.run, inputs)
    last = 512  # the operations are by rows: the last rows must be as if they were alone

    def tail(x):
        return x.detach()[..., -last:, :, :] if x.dim() == 4 else x.detach()[-last:]

    def has_rows(x):
        return x.dim() > 1

    few = [(tail(x) if has_rows(x) else x.detach()).requires_grad_(x.requires_grad) for x in inputs]
    few_outputs, few_grads, _ = run_with_gradients(op.run, few, [tail(g) for g in upstream])
    pairs = list(zip((*outputs, *grads), (*few_outputs, *few_grads), strict=True))
    for many, alone in pairs:
        if has_rows(many):
            assert torch.equal(tail(many), alone)


@pytest.mark.gpu
@every_operation
def test_a_cuda_graph_captures_forward_and_backward(op):
    inputs = make_inputs(op, 64, 256, torch.bfloat16, "cuda")
    upstream = [torch.randn_like(output) for output in outputs_of(op.run, inputs)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run_with_gradients(op.run, inputs, upstream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, captured_grads, _ = run_with_gradients(op.run, inputs, upstream)
    with torch.no_grad():
        for x in (*inputs, *upstream):
            x.copy_(torch.randn_like(x))
    graph.replay()
    outputs, grads, _ = run_with_gradients(op.run, inputs, upstream)
    for a, b in zip((*captured, *captured_grads), (*outputs, *grads), strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_one_compiled_module_of_all_operations_gives_the_same_gradients():
    class Everything(torch.nn.Module):
        def forward(self, x, residual, weight, bias, cos, sin):
            y, total = add_rms_norm(x, residual, weight)
            q, k, v = split_rotary_qkv(y, cos, sin, 2, 1, 64, inplace=True)
            q, k = rotary(q, k, cos, sin, interleaved=True)
            y = torch.cat([t.flatten(1) for t in (q, k, v)], -1)
            y = layer_norm(y + total, weight, bias)
            return geglu(torch.cat([swiglu(y, total), relu2(rms_norm(y, weight, cast="gemma"))], -1))

    def operands():
        torch.manual_seed(0)
        shapes = [(300, 256), (300, 256), (256,), (256,)]
        return [torch.randn(s, device="cuda").requires_grad_() for s in shapes] + [
            torch.randn(300, 32, device="cuda") for _ in range(2)
        ]

    inputs = operands()
    (y,), grads, upstream = run_with_gradients(Everything(), inputs)
    (again,), compiled_grads, _ = run_with_gradients(
        torch.compile(Everything(), fullgraph=True), inputs, upstream
    )
    for a, b in zip((y, *grads), (again, *compiled_grads), strict=True):
        # Two orders of a sum over 300 rows, and a chain of about fifty operations.
        assert (a - b).abs().max() <= 400 * torch.finfo(torch.float32).eps * a.abs().max()


@pytest.mark.gpu
@every_operation
def test_a_gpu_that_is_not_the_current_one(op):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    inputs = make_inputs(op, 5, 6, device="cuda:1")
    outputs, grads, upstream = run_with_gradients(op.run, inputs)
    assert torch.cuda.current_device() == 0
    truth, true_grads, _ = run_with_gradients(op.eager, in_float64(inputs), in_float64(upstream))
    for a, b in zip((*outputs, *grads), (*truth, *true_grads), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
