"""Conversion of a batch to documents: masks, boundaries, positions, and refusals."""

from __future__ import annotations

import pytest
import torch

from liger_models.convert.errors import DataError
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import RopeSpec

CPU = torch.device("cpu")


def read(shape, **given) -> Sequences:
    return Sequences.from_call(shape, CPU, **given)


def documents(sequences: Sequences) -> list[list[int]]:
    """The positions of each document's tokens."""
    lengths = sequences.documents.boundaries().diff().tolist()
    return [part.tolist() for part in sequences.positions.ids.split(lengths)]


def test_rows_are_documents():
    sequences = read((2, 3))
    assert documents(sequences) == [[0, 1, 2], [0, 1, 2]]
    assert (sequences.documents.max_seqlen, sequences.positions.end, sequences.documents.kept) == (3, 3, None)


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32])
def test_padding_is_removed_and_positions_of_the_row_are_kept(dtype):
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]]).to(dtype)
    sequences = read((3, 4), attention_mask=mask)
    assert documents(sequences) == [[2, 3], [0, 1, 2], []]
    assert (sequences.documents.max_seqlen, sequences.positions.end) == (3, 4)
    values = torch.arange(12).view(3, 4)
    assert sequences.pack(values).tolist() == [2, 3, 4, 5, 6]
    restored = sequences.unpack(sequences.pack(values) + 1)
    assert restored.tolist() == [[0, 0, 3, 4], [5, 6, 7, 0], [0, 0, 0, 0]]


def test_a_mask_of_ones_has_no_effect():
    assert read((2, 3), attention_mask=torch.ones(2, 3)).documents.cu_seqlens is None


@pytest.mark.parametrize(
    ("given", "expected", "single"),
    [
        ({"shape": (1, 6)}, [0, 6], True),
        ({"shape": (2, 3)}, [0, 3, 6], False),
        ({"shape": (2, 3), "attention_mask": torch.tensor([[0, 1, 1], [1, 0, 0]])}, [0, 2, 3], False),
        ({"shape": (1, 6), "cu_seqlens": torch.tensor([0, 2, 2, 6])}, [0, 2, 2, 6], False),
    ],
)
def test_documents_of_every_kind_have_boundaries(given, expected, single):
    found = read(**given).documents
    assert found.boundaries().dtype == torch.int32
    assert found.boundaries().tolist() == expected
    assert found.boundaries() is found.boundaries()  # made once for all layers
    assert found.is_single == single


@pytest.mark.parametrize("cu_seqlens", [None, torch.tensor([0, 5, 12])], ids=["rows", "packed"])
def test_boundaries_and_chunks_never_wait_for_the_device(cu_seqlens):
    """A tensor on the meta device has no values: whoever asks for one raises."""
    found = Sequences.from_call((2, 6), torch.device("meta"), cu_seqlens=cu_seqlens).documents
    for documents in (found, found.chunks(3), found.chunks(4)):
        assert documents.boundaries().is_meta
        assert documents.bounds().shape == (2, 12)


@pytest.mark.parametrize("dtype", [torch.int32, torch.long])
def test_boundaries_cover_the_flattened_batch(dtype):
    sequences = read((2, 3), cu_seqlens=torch.tensor([0, 4, 4, 6], dtype=dtype))
    assert documents(sequences) == [[0, 1, 2, 3], [], [0, 1]]
    assert sequences.documents.cu_seqlens.dtype == torch.int32
    assert (sequences.documents.max_seqlen, sequences.positions.end) == (4, 4)


def test_given_positions_may_come_with_given_boundaries():
    positions = torch.tensor([[5, 6, 7, 1, 2, 3]])
    sequences = read((1, 6), cu_seqlens=torch.tensor([0, 3, 6]), position_ids=positions)
    assert documents(sequences) == [[5, 6, 7], [1, 2, 3]]
    assert sequences.positions.end == 8


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ([[0, 1, 0, 1, 2, 0]], [[0, 1], [0, 1, 2], [0]]),
        ([[3, 4, 5, 6, 9, 10]], [[3, 4, 5, 6], [9, 10]]),
        ([[0, 1, 2, 2, 1, 0]], [[0, 1, 2], [2], [1], [0]]),
        ([[0, 1, 2, 0], [0, 1, 2, 3]], [[0, 1, 2], [0], [0, 1, 2, 3]]),
        ([[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]),  # no document spans two rows
    ],
)
def test_a_jump_in_the_positions_begins_a_document(positions, expected):
    positions = torch.tensor(positions)
    assert documents(read(tuple(positions.shape), position_ids=positions)) == expected


def test_positions_without_a_jump_are_rows():
    sequences = read((2, 3), position_ids=torch.tensor([[4, 5, 6]]))  # one row for all
    assert sequences.documents.cu_seqlens is None
    assert documents(sequences) == [[4, 5, 6]] * 2
    assert sequences.positions.end == 7


def test_with_a_mask_jumps_are_only_positions():
    positions = torch.tensor([[0, 2, 4, 6]])
    sequences = read((1, 4), position_ids=positions, attention_mask=torch.ones(1, 4))
    assert sequences.documents.cu_seqlens is None
    assert sequences.positions.ids.tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [1, 2, -100, 4, 5, -100]),
        ({"cu_seqlens": torch.tensor([0, 2, 2, 6])}, [1, -100, 3, 4, 5, -100]),
        ({"cu_seqlens": torch.tensor([0, 0, 6, 6])}, [1, 2, 3, 4, 5, -100]),
        ({"position_ids": torch.tensor([[0, 1, 0], [0, 1, 2]])}, [1, -100, -100, 4, 5, -100]),
    ],
)
def test_labels_are_the_next_tokens_of_the_document(given, expected):
    labels = torch.arange(6)
    assert read((2, 3), **given).documents.next_labels(labels).tolist() == expected
    assert labels.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"attention_mask": torch.ones(2, 3), "cu_seqlens": torch.tensor([0, 6])},
            "both attention_mask and cu_seqlens",
        ),
        ({"attention_mask": torch.ones(2, 4)}, r"\(2, 3\); found \(2, 4\)"),
        ({"attention_mask": torch.ones(2, 1, 3, 3)}, "cu_seqlens, not by a mask"),
        ({"attention_mask": torch.zeros(2, 3)}, "0 everywhere"),
        (
            {"attention_mask": torch.tensor([[0.0, 0.0, 0.0], [-1e9, 0.0, 0.0]])},
            "1 at tokens and 0 at padding",
        ),
        ({"cu_seqlens": torch.tensor([0, 5])}, "rise from 0 to the number of tokens, 6.*from 0 to 5"),
        ({"cu_seqlens": torch.tensor([1, 6])}, "from 1 to 6"),
        ({"cu_seqlens": torch.tensor([0, 4, 2, 6])}, "must rise"),
        ({"cu_seqlens": torch.tensor([6])}, "1 values"),
        ({"cu_seqlens": torch.tensor([], dtype=torch.long)}, "0 values"),
        ({"cu_seqlens": torch.tensor([[0, 6]])}, r"row of integers, found torch.int64 of shape \(1, 2\)"),
        ({"cu_seqlens": torch.tensor([0.0, 6.0])}, "row of integers, found torch.float32"),
        ({"position_ids": torch.zeros(2, 3)}, "integers, found torch.float32"),
        ({"position_ids": torch.arange(4)}, r"\(2, 3\); found \(1, 4\)"),
        ({"position_ids": torch.zeros(3, 3, dtype=torch.long)}, r"found \(3, 3\)"),
        ({"position_ids": torch.zeros(2, 3, 1, dtype=torch.long)}, r"found \(2, 3, 1\)"),
    ],
)
def test_inconsistent_inputs_are_refused(given, message):
    with pytest.raises(DataError, match=message):
        read((2, 3), **given)


@pytest.mark.parametrize(
    ("shape", "given", "size", "expected"),
    [
        ((2, 6), {}, 3, [[0, 1, 2], [3, 4, 5]] * 2),
        ((2, 5), {}, 3, [[0, 1, 2], [3, 4]] * 2),
        ((1, 9), {"cu_seqlens": torch.tensor([0, 4, 4, 5, 9])}, 2, [[0, 1], [2, 3], [0], [0, 1], [2, 3]]),
        ((1, 9), {"cu_seqlens": torch.tensor([0, 4, 9])}, 4, [[0, 1, 2, 3], [0, 1, 2, 3], [4]]),
        (
            (2, 4),
            {"attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])},
            2,
            [[1, 2], [3], [0, 1], [2, 3]],
        ),
    ],
)
def test_chunks_are_documents_cut_into_pieces(shape, given, size, expected):
    sequences = read(shape, **given)
    cut = sequences.documents.chunks(size)
    pieces = sequences.positions.ids.split(cut.boundaries().diff().tolist())
    assert [piece.tolist() for piece in pieces if len(piece)] == expected
    assert (cut.max_seqlen, cut.num_tokens) == (size, sequences.documents.num_tokens)
    assert sequences.documents.chunks(size) is cut  # made once for all layers
    assert (cut.cu_seqlens is None) == (not given and shape[1] % size == 0)  # in that case they are rows


def test_no_document_is_cut_by_chunks_as_long_as_the_longest():
    sequences = read((1, 9), cu_seqlens=torch.tensor([0, 4, 9]))
    assert sequences.visibility.chunks(5) is sequences.visibility


def test_positions_beyond_the_tables_are_refused():
    rope = RopeSpec(4, max_position_embeddings=8)
    read((1, 8)).prepare_rotary((rope,))
    with pytest.raises(DataError, match=r"position 8 is beyond .* max_position_embeddings is 8"):
        read((1, 9)).prepare_rotary((rope,))
    with pytest.raises(DataError, match="position 8 is beyond"):
        read((1, 3), position_ids=torch.tensor([[6, 7, 8]])).prepare_rotary((rope,))
    # The longest packed document counts, and padding if tokens follow it.
    read((1, 12), cu_seqlens=torch.tensor([0, 8, 12])).prepare_rotary((rope,))
    read((1, 12), attention_mask=torch.arange(12)[None] < 8).prepare_rotary((rope,))
    with pytest.raises(DataError, match="position 11 is beyond"):
        read((1, 12), attention_mask=torch.arange(12)[None] >= 8).prepare_rotary((rope,))


def test_dynamic_tables_have_no_limit():
    read((1, 99)).prepare_rotary((RopeSpec(4, type="dynamic", factor=2.0, max_position_embeddings=8),))
