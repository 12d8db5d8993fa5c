"""The weight algebra moves elements and loses none."""

import random

import pytest
import torch

from liger_models.convert.checkpoints.weight_map import Cat, Ref, Stack, Transpose, checkpoint_shapes

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8]


def random_expr(rng, shape, depth, names):
    """An expression of the given native shape, made of random parts."""
    kinds = ["ref"]
    if depth > 0:
        if shape and shape[0] > 1:
            kinds += ["stack", "cat"]
        if len(shape) > 1 and shape[1] > 1:
            kinds += ["cat1"]
        if len(shape) > 1:
            kinds += ["transpose"]
    kind = rng.choice(kinds)
    if kind == "ref":
        names.append(f"t{len(names)}")
        return Ref(names[-1], shape)
    if kind == "transpose":
        inner = (*shape[:-2], shape[-1], shape[-2])
        return Transpose(random_expr(rng, inner, depth - 1, names))
    if kind == "stack":
        return Stack([random_expr(rng, shape[1:], depth - 1, names) for _ in range(shape[0])])
    dim = 0 if kind == "cat" else 1
    cut = rng.randint(1, shape[dim] - 1)
    sizes = [cut, shape[dim] - cut]
    shapes = [(*shape[:dim], size, *shape[dim + 1 :]) for size in sizes]
    return Cat([random_expr(rng, part, depth - 1, names) for part in shapes], dim)


def random_case(seed):
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(0, 4)))
    expr = random_expr(rng, shape, 3, [])
    assert expr.shape == shape
    dtype = rng.choice(DTYPES)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        ref.name: torch.randint(-100, 100, ref.shape, generator=generator).to(dtype) for ref in expr.refs()
    }
    return rng, expr, tensors


def fetch_from(tensors, log=None):
    def fetch(name, dest, start, stop):
        if log is not None:
            log.append((name, start, stop, dest))
        tensor = tensors[name]
        dest.copy_(tensor[start:stop] if tensor.dim() else tensor)

    return fetch


@pytest.mark.parametrize("seed", range(60))
def test_reading_in_any_way_gives_one_tensor_and_writing_is_its_inverse(seed):
    rng, expr, tensors = random_case(seed)
    native = expr.read(tensors.__getitem__)

    into = torch.empty_like(native)
    expr.read_into(into, fetch_from(tensors))
    assert torch.equal(into, native)

    if native.dim():
        start = rng.randint(0, native.shape[0])
        stop = rng.randint(start, native.shape[0])
        rows = torch.empty_like(native[start:stop])
        expr.read_rows(rows, fetch_from(tensors), start, stop)
        assert torch.equal(rows, native[start:stop])

    written = expr.write(native)
    assert list(written) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(written[name], tensor)
        assert written[name].untyped_storage().data_ptr() == native.untyped_storage().data_ptr()


def test_read_into_fetches_straight_into_the_destination():
    expr = Stack([Cat([Ref("a", (2, 3)), Ref("b", (4, 3))]), Transpose(Ref("c", (3, 6)))])
    tensors = {name: torch.randn(shape) for name, shape in checkpoint_shapes({"w": expr}).items()}
    dest, log = torch.empty(2, 6, 3), []
    expr.read_into(dest, fetch_from(tensors, log))
    storage = dest.untyped_storage().data_ptr()
    assert [entry[:3] for entry in log] == [("a", 0, 2), ("b", 0, 4), ("c", 0, 3)]
    assert all(view.untyped_storage().data_ptr() == storage for *_, view in log)


def test_a_row_shard_fetches_only_its_rows():
    expr = Cat([Ref("q", (8, 4)), Ref("k", (2, 4)), Ref("v", (2, 4))])
    tensors = {name: torch.randn(shape) for name, shape in checkpoint_shapes({"w": expr}).items()}
    log = []
    expr.read_rows(torch.empty(4, 4), fetch_from(tensors, log), 6, 10)
    assert [entry[:3] for entry in log] == [("q", 6, 8), ("k", 0, 2)]

    experts = Stack([Ref(f"e{i}", (4, 4)) for i in range(8)])
    tensors = {f"e{i}": torch.randn(4, 4) for i in range(8)}
    log = []
    experts.read_rows(torch.empty(2, 4, 4), fetch_from(tensors, log), 2, 4)
    assert [entry[:3] for entry in log] == [("e2", 0, 4), ("e3", 0, 4)]


def test_rows_of_a_transposed_matrix_are_columns_of_its_tensor():
    tensor = torch.arange(12.0).view(3, 4)
    rows = torch.empty(2, 3)
    Transpose(Ref("a", (3, 4))).read_rows(rows, fetch_from({"a": tensor}), 1, 3)
    assert torch.equal(rows, tensor.t()[1:3])


@pytest.mark.parametrize(
    ("build", "both"),
    [
        (lambda: Cat([Ref("a", (2, 3)), Ref("b", (2, 4))]), ["(2, 3)", "(2, 4)", "'a'", "'b'"]),
        (lambda: Cat([Ref("a", (2, 3)), Ref("b", (3, 3))], dim=1), ["(2, 3)", "(3, 3)"]),
        (lambda: Cat([Ref("a", (2,))], dim=1), ["(2,)", "dim 1"]),
        (lambda: Stack([Ref("a", (2, 3)), Ref("b", (3, 2))]), ["(2, 3)", "(3, 2)"]),
        (lambda: Transpose(Ref("a", (2,))), ["'a'", "(2,)"]),
        (lambda: Ref("a", (2, 3)).read(lambda name: torch.empty(3, 2)), ["'a'", "(3, 2)", "(2, 3)"]),
        (lambda: Ref("a", (2, 3)).write(torch.empty(3, 2)), ["'a'", "(3, 2)", "(2, 3)"]),
        (lambda: Stack([Ref("a", (2,))]).write(torch.empty(2, 2)), ["(2, 2)", "(1, 2)"]),
        (lambda: Cat([Ref("a", (2,))]).read_into(torch.empty(3), fetch_from({})), ["(3,)", "(2,)"]),
        (lambda: Ref("a", (2,)).read_rows(torch.empty(2), fetch_from({}), 1, 3), ["[1, 3)", "'a'"]),
        (lambda: Cat([]), ["at least one part"]),
    ],
)
def test_a_wrong_shape_is_an_error_that_shows_both(build, both):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        build()
    for text in both:
        assert text in str(error.value)


def test_checkpoint_shapes_lists_every_tensor_once_and_in_order():
    weight_map = {"qkv": Cat([Ref("q", (4, 2)), Ref("k", (2, 2))]), "norm": Ref("n", (2,))}
    assert list(checkpoint_shapes(weight_map).items()) == [("q", (4, 2)), ("k", (2, 2)), ("n", (2,))]


@pytest.mark.parametrize(
    "weight_map",
    [{"x": Ref("a", (2,)), "y": Ref("a", (2,))}, {"x": Cat([Ref("a", (2,)), Ref("a", (2,))])}],
)
def test_a_tensor_that_is_used_twice_is_an_error(weight_map):
    with pytest.raises(ValueError, match="'a' is used twice"):
        checkpoint_shapes(weight_map)
