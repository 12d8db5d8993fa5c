"""Pictures are cut into the same patches as by processors, in the right places."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pairs
import pytest
import torch

from liger_models.convert.errors import DataError
from liger_models.kernels._copies import to_device
from liger_models.layers import vision
from liger_models.layers.specs import FadingTable, PatchSpec
from liger_models.layers.vision.patch_order import cut, in_blocks, places_of, windows_of
from liger_models.layers.vision.pictures import PooledPictures
from liger_models.layers.vision.position_table import make_table


@pytest.mark.parametrize("size", [(28, 56), (84, 28)])
def test_a_picture_is_cut_as_by_qwens_processor(size):
    pil = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    module = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    processor = module.Qwen2VLImageProcessorPil()
    pixels = torch.randint(0, 256, (*size, 3), dtype=torch.uint8)
    theirs = processor(images=[pil.fromarray(pixels.numpy())], do_resize=False, return_tensors="pt")
    mean, std = (torch.tensor(x)[:, None, None] for x in (processor.image_mean, processor.image_std))
    picture = (pixels.permute(2, 0, 1) / 255 - mean) / std
    patches, grid = cut(picture, PatchSpec(14, frames=2), merge=2)
    assert [list(grid)] == theirs["image_grid_thw"].tolist()
    torch.testing.assert_close(patches, theirs["pixel_values"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("side", [1, 2, 3, 4])
def test_pooled_pictures_are_shrunk_bilinearly(side):
    """Two time steps; a mask leaves out only tokens of videos."""
    grids, x = [(1, 12, 12), (2, 12, 24)], torch.randn(144 + 2 * 12 * 24, 5)
    expected = []
    for (t, h, w), own in zip(grids, x.split([144, 2 * 12 * 24]), strict=True):
        rows = own.view(t, h // side, w // side, side, side, 5).transpose(2, 3).reshape(t, h, w, 5)
        image = torch.nn.functional.interpolate(
            rows.permute(0, 3, 1, 2), size=(h // side, w // side), mode="bilinear"
        )
        expected.append(image.permute(0, 2, 3, 1).reshape(-1, 5))
    pictures = PooledPictures(x, grids, 1, [side, side])
    torch.testing.assert_close(pictures.pooled(x), torch.cat(expected))
    assert pictures.counts(1) == [len(own) for own in expected]
    kept = torch.rand(len(expected[1])) < 0.5
    pictures = PooledPictures(x, grids, 1, [side, side], kept)
    torch.testing.assert_close(pictures.pooled(x), torch.cat([expected[0], expected[1][kept]]))
    assert pictures.counts(1) == [len(expected[0]), int(kept.sum())]


def test_frames_of_a_video_fill_patches_and_the_last_frame_is_repeated():
    video = torch.randn(3, 3, 8, 4)
    spec = PatchSpec(2, frames=2)
    patches, grid = cut(video, spec, merge=2)
    assert grid == (2, 4, 2)
    padded = torch.cat([video, video[-1:]])
    expected = torch.cat([cut(padded[i : i + 2], spec, merge=2)[0] for i in (0, 2)])
    assert torch.equal(patches, expected)
    weight = torch.randn(5, 3, 2, 2, 2)  # order of a convolution
    result = torch.nn.functional.conv3d(padded.transpose(0, 1)[None], weight, stride=2)[0].permute(1, 2, 3, 0)
    row, column = places_of([grid], 2)
    time = torch.arange(2).repeat_interleave(8)
    torch.testing.assert_close(patches @ weight.flatten(1).T, result[time, row, column], rtol=1e-5, atol=1e-5)


def test_patches_in_raster_order_are_put_into_blocks():
    spec, videos = PatchSpec(2, frames=2), [torch.randn(4, 3, 8, 12), torch.randn(1, 3, 4, 8)]
    grids, raster = [], []
    for video in videos:
        patches, grid = cut(video, spec, merge=2, raster=True)
        grids.append(grid)
        raster.append(patches)
    second = raster[0].view(2, 4, 6, 2, 3, 2, 2)[0, 1, 2]  # [time, row, column, frame, channel, pixels]
    assert torch.equal(second, videos[0][:2, :, 2:4, 4:6])
    expected = torch.cat([cut(video, spec, merge=2)[0] for video in videos])
    assert torch.equal(in_blocks(torch.cat(raster), grids, spec, merge=2), expected)


@pytest.mark.parametrize("grid", [(1, 6, 10), (2, 2, 4), (1, 4, 4)])
def test_a_fading_table_is_sampled_with_zeros_around_it(grid):
    """As by `grid_sample`, whose coordinates reach from -1 to 1 over the table, width first. The released
    model gave it heights first, for patches in the order of `meshgrid(indexing="xy")`.
    """
    spec = replace(pairs.spec_of("muse_glimmer").vision, position_table=FadingTable(4))
    table = make_table(spec)
    torch.nn.init.normal_(table.weight)
    rows, columns = ((2 * torch.arange(n) + 1) / n - 1 for n in grid[1:])
    at = torch.stack(torch.meshgrid(rows, columns, indexing="xy"), -1)[None]
    square = table.weight.T.unflatten(1, (4, 4))[None]
    sampled = torch.nn.functional.grid_sample(square, at, padding_mode="zeros", align_corners=False)[0]
    row, column = places_of([grid], 2)
    torch.testing.assert_close(
        table([grid], 2), sampled.flatten(1)[:, row * grid[2] + column].T, rtol=1e-5, atol=1e-5
    )


def test_a_picture_that_does_not_make_whole_tokens_is_refused():
    with pytest.raises(DataError, match="multiples of 28"):
        cut(torch.zeros(3, 28, 42), PatchSpec(14, frames=2), merge=2)


def test_windows_are_cut_row_by_row_and_ragged_at_the_edges():
    order, lengths = windows_of([(1, 6, 10)], merge=2, side=2)
    assert order.tolist() == [0, 1, 5, 6, 2, 3, 7, 8, 4, 9, 10, 11, 12, 13, 14]
    assert lengths == [16, 16, 8, 8, 8, 4]
    order, lengths = windows_of([(2, 4, 4)], merge=2, side=9)
    assert order.tolist() == list(range(8))
    assert lengths == [16, 16]


def test_large_copies_to_a_gpu_wait_for_nothing(monkeypatch):
    """CUDA makes a copy of more than 64 KiB from memory that is not pinned wait for all earlier work."""
    pinned, copied = [], []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: pinned.append(x.nbytes) or x)
    monkeypatch.setattr(torch.Tensor, "to", lambda x, *_, **options: copied.append(options) or x)
    for size in (1 << 13, (1 << 13) + 1):  # 64 KiB, and more
        to_device(torch.zeros(size, dtype=torch.int64), torch.device("cuda"))
        to_device(torch.zeros(size, dtype=torch.int64), torch.device("cpu"))
    assert pinned == [(1 << 16) + 8]
    assert copied == [{"non_blocking": True}] * 4


def test_encoders_copy_nothing_to_a_gpu_otherwise():
    for path in Path(vision.__file__).parent.glob("*.py"):
        assert "non_blocking" not in path.read_text(), path
