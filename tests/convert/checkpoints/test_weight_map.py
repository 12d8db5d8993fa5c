"""The weight algebra moves elements and loses none."""

import itertools
import random

import pytest
import torch

from liger_models.convert.checkpoints.expressions import Cat, Permute, Ref, Rows, Stack
from liger_models.convert.checkpoints.weight_map import checkpoint_shapes, permuted, piece_of_groups

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8]


def random_expr(rng, shape, depth, names):
    """Random expression of the given native shape."""
    kinds = ["ref"]
    if depth > 0:
        if shape and shape[0] > 1:
            kinds += ["stack", "cat"]
        if len(shape) > 1 and shape[1] > 1:
            kinds += ["cat1"]
        if shape:
            kinds += ["permute", "permute a ref", "rows", "shuffled rows", "groups"]
    kind = rng.choice(kinds)
    if kind == "ref":
        names.append(f"t{len(names)}")
        return Ref(names[-1], shape)
    if kind == "permute":
        order = rng.sample(range(len(shape)), len(shape))
        inner = tuple(shape[order.index(dim)] for dim in range(len(shape)))
        return Permute(random_expr(rng, inner, depth - 1, names), inner, order, shape)
    if kind == "permute a ref":
        return random_permute(rng, shape, names)
    if kind == "rows":
        before, after = rng.randint(0, 3), rng.randint(0, 3)
        part = random_expr(rng, (before + shape[0] + after, *shape[1:]), depth - 1, names)
        return Rows(part, before, before + shape[0])
    if kind == "shuffled rows":
        ref = random_expr(rng, shape, 0, names)
        cuts = sorted({0, shape[0], rng.randint(0, shape[0])})
        parts = [Rows(ref, *cut) for cut in itertools.pairwise(cuts)]
        return Cat(rng.sample(parts, len(parts)))
    if kind == "groups":
        return random_groups(rng, shape, names)
    if kind == "stack":
        return Stack([random_expr(rng, shape[1:], depth - 1, names) for _ in range(shape[0])])
    dim = 0 if kind == "cat" else 1
    cut = rng.randint(1, shape[dim] - 1)
    sizes = [cut, shape[dim] - cut]
    shapes = [(*shape[:dim], size, *shape[dim + 1 :]) for size in sizes]
    return Cat([random_expr(rng, part, depth - 1, names) for part in shapes], dim)


def random_permute(rng, shape, names):
    """Ref with other dimensions in another order: each native one is split, and neighbours are joined."""
    fine = [factor for size in shape for factor in rng.choice(FACTORS.get(size, [[size]]))]
    order = rng.sample(range(len(fine)), len(fine))
    view = [fine[order.index(dim)] for dim in range(len(fine))]
    joined = [view[0]]
    for size in view[1:]:
        if rng.random() < 0.5:
            joined[-1] *= size
        else:
            joined.append(size)
    names.append(f"t{len(names)}")
    return Permute(Ref(names[-1], joined), view, order, shape)


def random_groups(rng, shape, names):
    """Pieces of unequal widths, interleaved group by group, in another order than in the tensor."""
    groups = rng.choice([n for n in range(1, shape[0] + 1) if shape[0] % n == 0])
    cuts = sorted({0, shape[0] // groups, rng.randint(0, shape[0] // groups)})
    widths = [stop - start for start, stop in itertools.pairwise(cuts)]
    names.append(f"t{len(names)}")
    pieces = [piece_of_groups(names[-1], widths, i, groups, shape[1:]) for i in range(len(widths))]
    return Cat(rng.sample(pieces, len(pieces)))


FACTORS = {1: [[1]], 2: [[2], [1, 2]], 3: [[3]], 4: [[4], [2, 2]], 5: [[5]], 6: [[6], [2, 3], [3, 1, 2]]}


def holds_all(expr):
    """Return whether an expression has every element of its tensors: shards do not."""
    match expr:
        case Rows():
            return expr.shape == expr.part.shape and holds_all(expr.part)
        case Cat(parts) if all(isinstance(part, Rows) and isinstance(part.part, Ref) for part in parts):
            return sum(part.shape[0] for part in parts) == parts[0].part.shape[0]
        case Cat(parts) if len(parts) > 1 and len(set(expr.refs())) == 1:
            return True  # pieces of groups
        case Cat() | Stack():
            return all(map(holds_all, expr.parts))
        case Permute():
            return holds_all(expr.part)
    return True


def random_case(seed):
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(0, 4)))
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
        dest.copy_(tensor.reshape(-1)[start:stop].view(dest.shape))

    return fetch


@pytest.mark.parametrize("seed", range(200))
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
        Rows(expr, start, stop).read_into(rows, fetch_from(tensors))
        assert torch.equal(rows, native[start:stop])

    if holds_all(expr):
        written = expr.write(native)
        assert list(written) == list(tensors)
        assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())
    elif native.numel():
        with pytest.raises(ValueError, match=r"some elements of checkpoint tensor .* have no place"):
            expr.write(native)


def test_writing_gives_views_wherever_strides_describe_the_tensor():
    expr = Stack([Cat([Ref("a", (2, 3)), Ref("b", (4, 3))]), permuted("c", (6, 3), "i o -> o i")])
    native = torch.randn(expr.shape)
    for tensor in expr.write(native).values():
        assert tensor.untyped_storage().data_ptr() == native.untyped_storage().data_ptr()


def test_read_into_fetches_straight_into_the_destination():
    expr = Stack(
        [Cat([Ref("a", (2, 3)), Ref("b", (4, 3))]), permuted("c", (6, 3), "o (i 3) -> (i o) 3", o=3)]
    )
    tensors = {name: torch.randn(shape) for name, shape in checkpoint_shapes({"w": expr}).items()}
    dest, log = torch.empty(2, 6, 3), []
    expr.read_into(dest, fetch_from(tensors, log))
    storage = dest.untyped_storage().data_ptr()
    assert [entry[:3] for entry in log] == [("a", 0, 6), ("b", 0, 12), ("c", 0, 18)]
    assert all(view.untyped_storage().data_ptr() == storage for *_, view in log)


def test_a_row_shard_fetches_only_its_rows():
    expr = Cat([Ref("q", (8, 4)), Ref("k", (2, 4)), Ref("v", (2, 4))])
    tensors = {name: torch.randn(shape) for name, shape in checkpoint_shapes({"w": expr}).items()}
    log = []
    Rows(expr, 6, 10).read_into(torch.empty(4, 4), fetch_from(tensors, log))
    assert [entry[:3] for entry in log] == [("q", 24, 32), ("k", 0, 8)]

    experts = Stack([Ref(f"e{i}", (4, 4)) for i in range(8)])
    tensors = {f"e{i}": torch.randn(4, 4) for i in range(8)}
    log = []
    Rows(experts, 2, 4).read_into(torch.empty(2, 4, 4), fetch_from(tensors, log))
    assert [entry[:3] for entry in log] == [("e2", 0, 16), ("e3", 0, 16)]


def test_rows_of_a_transposed_matrix_are_read_as_columns_of_its_tensor():
    tensor = torch.arange(12.0).view(3, 4)
    rows = torch.empty(2, 3)
    Rows(permuted("a", (4, 3), "i o -> o i"), 1, 3).read_into(rows, fetch_from({"a": tensor}))
    assert torch.equal(rows, tensor.t()[1:3])


def test_a_shard_by_heads_fetches_the_rows_of_its_heads():
    """Two ranks share 4 query heads and 2 key/value heads of 3 rows each."""
    q, k, v = Ref("q", (12, 5)), Ref("k", (6, 5)), Ref("v", (6, 5))
    second = Cat([Rows(q, 6, 12), Rows(k, 3, 6), Rows(v, 3, 6)])
    tensors, log = {ref.name: torch.randn(ref.shape) for ref in (q, k, v)}, []
    found = torch.empty(second.shape)
    second.read_into(found, fetch_from(tensors, log))
    assert torch.equal(found, torch.cat([tensors["q"][6:], tensors["k"][3:], tensors["v"][3:]]))
    assert [entry[:3] for entry in log] == [("q", 30, 60), ("k", 15, 30), ("v", 15, 30)]


def test_alternating_gate_and_up_are_separated():
    """gpt-oss: from [E, H, 2 I] with gate and up alternating, to [E, 2 I, H] with the gate's rows first."""
    experts, hidden, inner = 3, 4, 5
    disk = torch.randn(experts, hidden, 2 * inner)
    expr = permuted("w", (experts, 2 * inner, hidden), "e h (i 2) -> e (2 i) h")
    assert expr.part.shape == disk.shape
    native = expr.read({"w": disk}.__getitem__)
    assert torch.equal(native[:, :inner], disk[:, :, 0::2].mT)
    assert torch.equal(native[:, inner:], disk[:, :, 1::2].mT)
    bias = permuted("b", (experts, 2 * inner), "e (i 2) -> e (2 i)").read({"b": disk[:, 0]}.__getitem__)
    assert torch.equal(bias, torch.cat([disk[:, 0, 0::2], disk[:, 0, 1::2]], dim=1))
    log = []
    shard = torch.empty(2, 2 * inner, hidden)
    Rows(expr, 1, 3).read_into(shard, fetch_from({"w": disk}, log))
    assert torch.equal(shard, native[1:])
    assert [entry[:3] for entry in log] == [("w", disk[0].numel(), disk.numel())]


def test_query_key_and_value_ordered_by_head_are_separated():
    """GPT-NeoX: from [heads * 3 * D, H] ordered by head, to all queries, all keys, all values."""
    heads, dim, hidden = 4, 3, 6
    disk = torch.randn(heads * 3 * dim, hidden)
    expr = permuted("w", tuple(disk.shape), "(heads 3 d) h -> (3 heads d) h", d=dim, heads=heads)
    native = expr.read({"w": disk}.__getitem__)
    by_head = disk.view(heads, 3, dim, hidden)
    assert torch.equal(native, torch.cat([by_head[:, i].flatten(0, 1) for i in range(3)]))
    log = []
    keys = torch.empty(heads * dim, hidden)
    Rows(expr, heads * dim, 2 * heads * dim).read_into(keys, fetch_from({"w": disk}, log))
    assert torch.equal(keys, by_head[:, 1].flatten(0, 1))
    assert sum(stop - start for _, start, stop, _ in log) == keys.numel()


def test_pieces_of_unequal_widths_are_extracted_from_their_groups():
    """Qwen3-Next: each of 2 groups has 2 rows of query, 2 of key and 3 of value."""
    rows = {"q": slice(0, 2), "k": slice(2, 4), "v": slice(4, 7)}  # in each group
    pieces = [piece_of_groups("w", (2, 2, 3), i, groups=2, rest=(5,)) for i in range(3)]
    expr = Cat(pieces)
    assert checkpoint_shapes({"w": expr}) == {"w": (14, 5)}
    assert checkpoint_shapes(dict(zip("qkv", pieces, strict=True))) == {"w": (14, 5)}  # no row twice
    tensor = torch.randn(14, 5)
    native = expr.read({"w": tensor}.__getitem__)
    groups = tensor.view(2, 7, 5)
    assert torch.equal(native, torch.cat([groups[:, cut].flatten(0, 1) for cut in rows.values()]))
    assert torch.equal(expr.write(native)["w"], tensor)
    log = []
    pieces[1].read_into(torch.empty(4, 5), fetch_from({"w": tensor}, log))
    assert [entry[1:3] for entry in log] == [(10, 20), (45, 55)]  # the rows of keys, and nothing else


@pytest.mark.parametrize(
    ("build", "both"),
    [
        (lambda: Cat([Ref("a", (2, 3)), Ref("b", (2, 4))]), ["(2, 3)", "(2, 4)", "'a'", "'b'"]),
        (lambda: Cat([Ref("a", (2, 3)), Ref("b", (3, 3))], dim=1), ["(2, 3)", "(3, 3)"]),
        (lambda: Cat([Ref("a", (2,))], dim=1), ["(2,)", "dim 1"]),
        (lambda: Stack([Ref("a", (2, 3)), Ref("b", (3, 2))]), ["(2, 3)", "(3, 2)"]),
        (lambda: permuted("a", (2,), "i o -> o i"), ["'a'", "(2,)", "2 dimensions"]),
        (lambda: permuted("a", (2, 3), "(i 2) -> (2 i)"), ["'a'", "(2, 3)", "1 dimensions"]),
        (lambda: permuted("a", (2, 3), "e (i 2) -> e (2 i)"), ["'a'", "(2, 3)", "['2', 'i']"]),
        (lambda: permuted("a", (8, 3), "(a b) c -> (b a) c"), ["'a'", "(8, 3)", "['b', 'a']"]),
        (lambda: permuted("a", (2, 3), "i o"), ["'i o'", "one arrow"]),
        (lambda: permuted("a", (2, 3), "i o -> o p"), ["'i o -> o p'", "same axes"]),
        (lambda: permuted("a", (2, 2), "2 2 -> 2 2"), ["'2 2 -> 2 2'", "once"]),
        (lambda: Permute(Ref("a", (6,)), (2, 3), (1, 1), (6,)), ["'a'", "(1, 1)", "not a permutation"]),
        (lambda: Permute(Ref("a", (6,)), (2, 2), (1, 0), (4,)), ["'a'", "(6,)", "(2, 2)"]),
        (lambda: Permute(Ref("a", (6,)), (2, 3), (1, 0), (2, 3)), ["'a'", "(3, 2)", "(2, 3)"]),
        (lambda: Permute(Cat([Ref("a", (6,))]), (2, 3), (1, 0), (6,)), ["permute each Ref instead"]),
        (lambda: Rows(Ref("a", (2, 3)), 1, 4), ["[1, 4)", "'a'", "2"]),
        (lambda: Ref("a", (2, 3)).read(lambda name: torch.empty(3, 2)), ["'a'", "(3, 2)", "(2, 3)"]),
        (lambda: Ref("a", (2, 3)).write(torch.empty(3, 2)), ["'a'", "(3, 2)", "(2, 3)"]),
        (lambda: Stack([Ref("a", (2,))]).write(torch.empty(2, 2)), ["(2, 2)", "(1, 2)"]),
        (lambda: Cat([Ref("a", (2,))]).read_into(torch.empty(3), fetch_from({})), ["(3,)", "(2,)"]),
        (lambda: Rows(Ref("a", (2,)), 1, 3).read_into(torch.empty(2), fetch_from({})), ["[1, 3)", "'a'"]),
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
    [
        {"x": Ref("a", (2,)), "y": Ref("a", (2,))},
        {"x": Cat([Ref("a", (2,)), Ref("a", (2,))])},
        {"x": Cat([Rows(Ref("a", (4,)), 0, 2), Rows(Ref("a", (4,)), 1, 4)])},
    ],
)
def test_a_tensor_that_is_used_twice_is_an_error(weight_map):
    with pytest.raises(ValueError, match="'a' is used twice"):
        checkpoint_shapes(weight_map)
