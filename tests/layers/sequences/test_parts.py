"""The parts of a batch: what another device gets of each field, and what frameworks find of them."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass, field, fields, replace
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from liger_models.layers.attention.cross_attention import VisibleTiles
from liger_models.layers.sequences.documents import Documents
from liger_models.layers.sequences.modality import Modality
from liger_models.layers.sequences.part import SHARED, Part
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.sequences.visibility import Visibility
from liger_models.layers.specs import QueryScaleSpec, RopeSpec

CPU, META = torch.device("cpu"), torch.device("meta")
ROPE = RopeSpec(dim=4)


def full_sequences(**given) -> Sequences:
    """Nine tokens in two documents, with a value in every field."""
    sequences = Sequences.from_call((1, 9), CPU, cu_seqlens=torch.tensor([0, 4, 9]), **given)
    token = torch.arange(9)
    flags = torch.ones(9, 1, dtype=torch.bool)
    tiles = VisibleTiles(flags.view(1, 9, 1), flags, flags, [(0, 9, 0, 1)])
    documents = replace(sequences.documents, kept=token)
    spans = torch.stack([token, token + 1]).int()
    sequences.visibility = Visibility(documents, spans, token.int(), flags[:, 0], (1, 2), tiles)
    sequences.positions = replace(sequences.positions, axes=token.expand(3, 9))
    sequences.prepare_rotary((ROPE,))
    sequences.modality = Modality.of(token > 4)
    return sequences


def tensors_within(value, seen: set[int]):
    """Every tensor held by one of our objects, at any depth, except for copies on other devices."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        there = (item for key, item in value.items() if not (isinstance(key, tuple) and key[0] == "copy"))
        yield from (x for item in there for x in tensors_within(item, seen))
    elif isinstance(value, (tuple, list)):
        yield from (x for item in value for x in tensors_within(item, seen))
    elif type(value).__module__.startswith("liger_models."):
        yield from tensors_within(vars(value), seen)


def make_everything(sequences: Sequences, size: int, window: int) -> None:
    """All that is made lazily, as each kind of layer asks for it."""
    visibility = sequences.visibility
    sequences.positions.query_scale(QueryScaleSpec(0.1, 4))
    visibility.ranges_with_padding()
    visibility.ranges_without_hidden()
    visibility.documents.bounds()
    if visibility.documents.tree is None:
        visibility.key_ranges(window, causal=False)
        visibility.key_ranges(window, causal=True)
        plain = visibility.without_spans()
        plain.key_ranges(window, causal=True)
        plain.chunks(size).documents.bounds()
    else:
        visibility.documents.tree.key_ranges(window, size, visibility.spans)


@pytest.mark.parametrize("given", [{}, {"parents": [-1, 0]}], ids=["packed", "tree"])
def test_a_layer_reads_and_creates_tensors_on_its_own_device(given):
    """As in a model that is divided over devices: layers on each in turn make the same things."""
    for order in ((CPU, META), (META, CPU)):
        sequences = full_sequences(**given)
        for device in (*order, META):
            there = sequences.on(device)
            make_everything(there, 2, 3)
            assert {tensor.device for tensor in tensors_within(there, set())} == {device}


def test_every_field_of_every_part_has_a_value_in_these_tests():
    """Or the test above would not look at it."""
    sequences, tree = full_sequences(), full_sequences(parents=[-1, 0]).documents.tree
    visibility, documents = sequences.visibility, replace(sequences.documents, tree=tree)
    parts = visibility, documents, tree, sequences.positions, visibility.tiles, sequences.modality
    kinds = {type(part): part for part in parts}
    assert kinds.keys() == {kind for kind in Part.__subclasses__() if kind.__module__.startswith("liger_")}
    for kind, part in kinds.items():
        missing = [f.name for f in fields(kind) if getattr(part, f.name) is None]
        assert not missing, kind


def test_data_left_by_layers_is_shared_by_all_devices():
    sequences = full_sequences()
    assert sequences.on(CPU) is sequences
    there, again = sequences.on(META), sequences.on(META)
    assert there.notes is sequences.notes
    assert (there.visibility, there.positions) == (again.visibility, again.positions)  # copied once
    assert all(table.is_meta for table in there.positions.rotary[ROPE])


def test_another_device_never_reads_a_part_that_was_replaced():
    sequences = full_sequences()
    sequences.on(META)
    sequences.visibility = Visibility(sequences.documents)
    assert sequences.on(META).visibility.spans is None


@dataclass(frozen=True, eq=False)
class Extended(Documents):
    """Documents with fields that somebody has added."""

    added: object = None
    shared: object = field(default=None, metadata=SHARED)


def test_an_added_field_is_moved():
    part = Extended((1, 2), CPU, 2, added={"pairs": [(torch.ones(2), 3)]}, shared=torch.ones(2))
    there = part.to(META)
    (moved, number), *_ = there.added["pairs"]
    assert moved.is_meta
    assert number == 3
    assert there.shared is part.shared  # as specified in its metadata
    assert part.to(META) is there


def test_an_added_field_of_an_unknown_type_is_refused():
    with pytest.raises(TypeError, match=r"Extended.added holds a slice, .* declare the field as shared"):
        Extended((1, 2), CPU, 2, added=slice(0, 1)).to(META)


def test_parts_are_frozen():
    sequences = full_sequences()
    for part in (sequences.documents, sequences.positions, sequences.visibility):
        name = fields(part)[1].name
        with pytest.raises(FrozenInstanceError):
            setattr(part, name, None)


def test_frameworks_pass_the_same_object_on():
    """Whoever moves or casts the arguments of a module: FSDP2, DistributedDataParallel, accelerate."""
    from accelerate.utils.operations import convert_to_fp32, send_to_device
    from torch.distributed.utils import _apply_to_tensors, _recursive_to
    from torch.nn.parallel.scatter_gather import scatter
    from torch.utils._pytree import tree_leaves

    sequences = full_sequences()
    assert _apply_to_tensors(torch.Tensor.bfloat16, (sequences,))[0] is sequences
    assert _recursive_to((sequences,), META, False)[0][0] is sequences
    assert scatter((sequences,), [META])[0][0] is sequences
    assert send_to_device((sequences,), META)[0] is sequences
    assert convert_to_fp32((sequences,))[0] is sequences
    assert tree_leaves((sequences,)) == [sequences]


def test_sharding_in_mixed_precision_does_not_change_positions_and_tables(tmp_path):
    """FSDP2 casts the hidden states that a layer gets, and hands on the batch next to them as it is."""
    for found in run_ranks(Path(__file__).with_name("mixed_precision_rank.py"), tmp_path):
        assert found == {
            "hidden states": (torch.float32, torch.bfloat16),
            "same batch": True,
            "positions": True,
            "tables": [torch.float32] * 2,
        }
