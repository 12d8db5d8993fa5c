"""No operation reads uninitialised memory.

New memory is filled with NaN, and operations must give the same bits as without. Matrix products need a
further check: on a CPU with AMX, values in the gaps between the rows of a bfloat16 matrix are multiplied by
zero, so that NaN reaches the result. To detect this on every machine, the gaps of operands are inspected
directly.
"""

import product_operations
import pytest
import torch
from kernel_operations import EVERYTHING, LOSSES, WITH_PRODUCTS
from operation_runs import copies, make_inputs, run_with_gradients
from torch.utils._python_dispatch import TorchDispatchMode

LINEAR = {name: op for name, op in WITH_PRODUCTS.items() if name.startswith("linear")}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Vocabularies that are not multiples of a tile, an odd and an even one in every dtype.
VOCABULARIES = [(vocab, torch.bfloat16) for vocab in (1000, 1423, 131, 5)] + [
    (vocab, dtype) for vocab in (131, 70) for dtype in (torch.float16, torch.float32)
]
# The plain twins leave products to a library, which reads each dtype differently; kernels read 16 bits alike.
FORMS = [*(("plain", dtype) for dtype in DTYPES), ("triton", torch.float16)]
TILE = 64  # columns: the widest tile of a matrix library, the last of which may be partly empty

SMALL_FORMS = [
    *(("plain", *each) for each in VOCABULARIES),
    *(("triton", *each) for each in ((1423, torch.bfloat16), (131, torch.float16), (70, torch.float32))),
]

PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "mv", "addmv", "_grouped_mm"}
NEW = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "resize_"}


class Poisoned(TorchDispatchMode):
    """Fill new memory with NaN, and check that operands of products are finite between their rows."""

    def __init__(self):
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in PRODUCTS:
            self.products += 1
            # With a beta of zero the first operand is not read: it is the memory of the result.
            read = args[1:] if (kwargs or {}).get("beta", 1) == 0 else args
            for x in read:
                if isinstance(x, torch.Tensor) and x.dim() > 1:
                    assert between_rows(x).isfinite().all(), f"{function} of {list(x.shape)}, {x.stride()}"
        result = function(*args, **(kwargs or {}))
        if name in NEW:
            result.fill_(poison(result.dtype))
        return result


def poison(dtype):
    return float("nan") if dtype.is_floating_point else 1 if dtype == torch.bool else torch.iinfo(dtype).max


def between_rows(x):
    """Memory between the rows of x [..., rows, columns] that a library may read as part of whole tiles."""
    if x.stride(-1) != 1:
        x = x.mT
    if x.is_contiguous() or x.stride(-1) != 1:  # there are no gaps, or PyTorch makes a copy
        return x.new_zeros(0)
    *lead, rows, columns = x.shape
    gap = max(0, min(x.stride(-2) - columns, -columns % TILE))
    return x.as_strided((*lead, rows - 1, gap), x.stride(), x.storage_offset() + columns)


def check(op, inputs):
    outputs, grads, upstream = run_with_gradients(op.run, inputs)
    with Poisoned() as mode:
        again, grads_again, _ = run_with_gradients(op.run, inputs, copies(upstream))
    for a, b in zip((*outputs, *grads), (*again, *grads_again), strict=True):
        assert a.isfinite().all()
        assert torch.equal(a, b)
    return mode


@pytest.mark.parametrize(("implementation", "dtype"), FORMS, ids=str, indirect=["implementation"])
@pytest.mark.parametrize("op", EVERYTHING.values(), ids=EVERYTHING)
def test_no_operation_reads_unwritten_memory(op, dtype, implementation):
    check(op, make_inputs(op, 2, 5, dtype))


@pytest.mark.parametrize(
    ("implementation", "vocab", "dtype"), SMALL_FORMS, ids=str, indirect=["implementation"]
)
@pytest.mark.parametrize("op", LOSSES.values(), ids=LOSSES)
def test_no_loss_reads_unwritten_memory_at_a_vocabulary_that_fills_no_tile(op, vocab, dtype, implementation):
    check(op, make_inputs(op, 2, vocab, dtype))


def check_linear(op, vocab, dtype, monkeypatch, device="cpu"):
    monkeypatch.setattr(product_operations, "VOCAB", vocab)
    mode = check(op, make_inputs(op, 3, 3, dtype, device))
    assert mode.products >= 3  # logits, dx and dw


@pytest.mark.parametrize(
    ("implementation", "vocab", "dtype"), SMALL_FORMS, ids=str, indirect=["implementation"]
)
@pytest.mark.parametrize("op", LINEAR.values(), ids=LINEAR)
def test_no_loss_of_a_linear_layer_reads_unwritten_memory(op, vocab, dtype, implementation, monkeypatch):
    check_linear(op, vocab, dtype, monkeypatch)


@pytest.mark.parametrize("op", LINEAR.values(), ids=LINEAR)
def test_no_loss_of_a_linear_layer_reads_unwritten_memory_in_chunks(op, monkeypatch):
    from liger_models.kernels.losses import _linear_chunks

    monkeypatch.setattr(
        _linear_chunks, "_chunk_size", lambda rows, *_: 3
    )  # 4 rows: of two chunks one is short
    check_linear(op, 131, torch.bfloat16, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize(("vocab", "dtype"), VOCABULARIES, ids=str)
@pytest.mark.parametrize("op", LINEAR.values(), ids=LINEAR)
def test_no_loss_of_a_linear_layer_reads_unwritten_memory_on_a_gpu(op, vocab, dtype, monkeypatch):
    check_linear(op, vocab, dtype, monkeypatch, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", EVERYTHING.values(), ids=EVERYTHING)
def test_no_operation_reads_unwritten_memory_on_a_gpu(op, dtype):
    check(op, make_inputs(op, 5, 7, dtype, "cuda"))


@pytest.mark.parametrize("op", LINEAR.values(), ids=LINEAR)
def test_numbers_between_the_rows_of_operands_do_not_reach_the_result(op, implementation):
    def cut_out_of_nan(x):
        return torch.cat([x.detach(), torch.full_like(x, float("nan"))], -1)[..., : x.shape[-1]]

    inputs = [
        cut_out_of_nan(x).requires_grad_(x.requires_grad) for x in make_inputs(op, 3, 15, torch.bfloat16)
    ]
    check(op, inputs)
