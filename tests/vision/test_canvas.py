"""Positions of images and slices on one canvas, and the strips of patches that come with them."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from older import class_of_transformers
from scenes import Image

from liger_models.convert.errors import DataError
from liger_models.layers.sequences.documents import Documents
from liger_models.layers.specs import CanvasSpec
from liger_models.layers.vision.canvas import canvas_positions
from liger_models.layers.vision.packing import VisionConversation, pack_conversations
from liger_models.layers.vision.pictures import Pictures
from liger_models.layers.vision.position_table import _at_fractions

FIRST, LAST, FIRST_OF_SLICE, LAST_OF_SLICE, NEWLINE = 5, 6, 7, 8, 2
SPEC = CanvasSpec((FIRST, LAST), (FIRST_OF_SLICE, LAST_OF_SLICE), NEWLINE)
IMAGE_ID, VIDEO_ID, PADDING = 3, 4, 9
TEXT = (10, 11, 12, NEWLINE, FIRST, LAST)  # some markers frame no picture


def conversation(draw: random.Random, images: list, videos: list) -> list[int]:
    """Text with images, frames of videos and slices of several sizes, some markers left out."""
    ids: list[int] = []

    def picture(sizes, token, before, after):
        h, w = draw.randint(1, 6), draw.randint(1, 6)
        sizes.append((4 * h, 4 * w))
        ids.extend([before, *[token] * (h * w), *after])

    for _ in range(draw.randint(0, 3)):
        ids.extend(draw.choices(TEXT, k=draw.randint(0, 4)))
        sizes, token = draw.choice([(images, IMAGE_ID), (videos, VIDEO_ID)])
        for _ in range(draw.choice([1, 1, 2])):
            rows, columns = draw.choice([(0, 0), (0, 0), (1, 2), (2, 2), (2, 1), (3, 2)])
            first = FIRST if draw.random() < 0.95 else TEXT[0]
            picture(sizes, token, first, [LAST] if rows or draw.random() < 0.9 else [])
            for row in range(rows):
                for _ in range(columns):
                    noise = [NEWLINE] if draw.random() < 0.05 else []
                    picture(sizes, token, FIRST_OF_SLICE, [LAST_OF_SLICE, *noise])
                if row + 1 < rows or draw.random() < 0.3:
                    ids.extend([NEWLINE] * draw.choice([1, 1, 1, 2]))
    return ids + draw.choices(TEXT, k=draw.randint(1, 4))


@pytest.mark.parametrize("seed", range(25))
def test_positions_on_canvases_equal_the_references(seed):
    reference = class_of_transformers("MiniCPMV4_7Model")
    names = "image_start_id", "image_end_id", "slice_start_id", "slice_end_id", "newline_id"
    ids_of_markers = FIRST, LAST, FIRST_OF_SLICE, LAST_OF_SLICE, NEWLINE
    config = SimpleNamespace(**dict(zip(names, ids_of_markers, strict=True)), downsample_mode="16x")
    model = SimpleNamespace(config=config, _frame_end_idx=reference._frame_end_idx)
    for name in ("_group_visual_frames", "get_vision_position_ids"):
        setattr(model, name, getattr(reference, name).__get__(model))
    draw, images, videos = random.Random(seed), [], []
    rows = [conversation(draw, images, videos) for _ in range(3)]
    longest = max(map(len, rows))
    ids = torch.tensor([[PADDING] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    kinds = (ids == IMAGE_ID).long() + 2 * (ids == VIDEO_ID).long()
    sizes = [torch.tensor(own) if own else None for own in (images, videos)]
    if not images and not videos:
        images.append((4, 4))  # of a fourth row
        rows, ids = [[FIRST, IMAGE_ID]], torch.tensor([[FIRST, IMAGE_ID]])
        mask, kinds, sizes = torch.ones_like(ids), (ids == IMAGE_ID).long(), [torch.tensor(images), None]
    expected, _ = reference.get_rope_index(model, ids, kinds, *sizes, attention_mask=mask)
    documents = Documents.of_mask(mask.bool(), ids.device)
    pictures = Pictures(torch.empty(0), [(1, h, w) for h, w in images + videos], len(images))
    found = canvas_positions(documents, documents.pack(kinds), documents.pack(ids), pictures, 4, SPEC)
    assert not found.wrong
    assert torch.equal(torch.stack([documents.unpack(axis) for axis in found.axes]), expected)


@pytest.mark.parametrize(
    ("ids", "wrong"),
    [
        ([FIRST, IMAGE_ID, LAST], False),
        ([IMAGE_ID, LAST, 10], True),  # no token before it
        ([FIRST, IMAGE_ID, IMAGE_ID, LAST], True),  # too many
        ([FIRST, 10, LAST], True),
        ([FIRST, IMAGE_ID, LAST, FIRST, IMAGE_ID], True),
        ([FIRST, VIDEO_ID, LAST], True),
    ],
)
def test_a_picture_that_does_not_match_its_tokens_is_noticed(ids, wrong):
    tokens = torch.tensor(ids)
    kinds = (tokens == IMAGE_ID).long() + 2 * (tokens == VIDEO_ID).long()
    documents = Documents.of_rows((1, len(ids)), tokens.device)
    pictures = Pictures(torch.empty(0), [(1, 4, 4)], 1)
    found = canvas_positions(documents, kinds, tokens, pictures, 4, SPEC)
    assert bool(found.wrong) == wrong


@pytest.mark.parametrize("marker", [NEWLINE, 10])
def test_a_frame_that_would_continue_in_an_answer_is_refused(marker):
    """By itself with its prompt, a marker right after an image takes the position of the image."""
    prompt, answer = torch.tensor([10, FIRST, IMAGE_ID, LAST]), torch.tensor([marker, 11])
    ids = torch.cat([prompt, answer, answer])
    bounds = torch.tensor([0, 4, 6, 8])
    documents = Documents.packed((1, 8), ids.device, bounds, [-1, 0, 0])
    pictures = Pictures(torch.empty(0), [(1, 4, 4)], 1)
    kinds = (ids == IMAGE_ID).long()
    found = canvas_positions(documents, kinds, ids, pictures, 4, SPEC)
    assert bool(found.wrong) == (marker == NEWLINE)
    if marker != NEWLINE:
        alone = torch.cat([prompt, answer])
        one = Documents.of_rows((1, 6), ids.device)
        expected = canvas_positions(one, (alone == IMAGE_ID).long(), alone, pictures, 4, SPEC).axes
        assert torch.equal(found.axes[:, :6], expected)
        assert torch.equal(found.axes[:, 6:], expected[:, 4:])


def test_positions_at_the_border_of_two_rows_of_the_table_are_the_references(make_pair):
    """Of 100 rows of patches, some lie there; a product with 1 / 100 rounds one of them elsewhere."""
    rounded = (_at_fractions((1, 100, 4), 4, 5, divided) for divided in (True, False))
    assert not torch.equal(*rounded)
    pair = make_pair("minicpm_ocr")
    call = pair.scene([1, Image(100, 2), 3])
    with torch.no_grad():
        expected = pair.reference.get_image_features(call["pixel_values"], call["target_sizes"])
        found = pair.ours.vision(pair.ours.vision.take(dict(call)).pictures)[0]
    torch.testing.assert_close(found, torch.cat(expected.pooler_output), rtol=1e-4, atol=1e-5)


def test_another_number_of_tokens_for_an_image_than_the_models_is_refused(make_pair):
    pair = make_pair("minicpm_ocr")
    call = pair.scene([1, Image(4, 4), 3])
    assert pair.ours(**call, downsample_mode="4x").loss == pair.ours(**call).loss
    with pytest.raises(DataError, match="downsample_mode is '16x', and this model was loaded with '4x'"):
        pair.ours(**call, downsample_mode="16x")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda call: {"target_sizes": torch.tensor([[4, 6]])}, r"target_sizes\[0\] is \(4, 6\); expected"),
        (lambda call: {"target_sizes": torch.tensor([[8, 8]])}, r"must be .* of shape \(1, 3, 3, 192\)"),
        (lambda call: {"target_sizes": torch.tensor([[1, 4, 4]])}, r"integers \[pictures, 2\]"),
        (
            lambda call: {"pixel_values": call["pixel_values"][..., :-3]},
            "pixel_values must be floating point",
        ),
        (lambda call: {"target_sizes": None}, "got pixel_values without target_sizes"),
    ],
)
def test_strips_that_do_not_fit_are_refused(change, error, make_pair):
    pair = make_pair("minicpmv4_6")
    call = pair.scene([1, Image(4, 4), 3])
    with pytest.raises(DataError, match=error):
        pair.ours(**call | change(call))


def test_conversations_are_joined_along_the_strip(make_pair):
    pair = make_pair("minicpmv4_6")
    calls = [pair.scene([1, Image(4, 8), 3]), pair.scene([2, Image(12, 4), 5])]
    packed = pack_conversations(
        pair.vision,
        [VisionConversation(call["input_ids"][0], torch.tensor([]), pair.images(call)) for call in calls],
    )
    assert torch.equal(packed["pixel_values"], torch.cat([call["pixel_values"] for call in calls], 3))
    assert packed["target_sizes"].tolist() == [[4, 8], [12, 4], *[[4, 8], [4, 4]]]
