"""Tiles of attention by GPU, and plain attention where none fit."""

import importlib
import warnings

import pytest
import torch

from liger_models.kernels import _dispatch, attention
from liger_models.kernels._gpu import Gpu
from liger_models.kernels.attention import _tile_sizes
from liger_models.kernels.attention.compressed_keys import compressed_attention, compressed_keys
from liger_models.kernels.attention.flash_attention import attention_plain

module = importlib.import_module("liger_models.kernels.attention.flash_attention")

of_compressed = importlib.import_module("liger_models.kernels.attention.compressed_keys")

KB = 1024
H100 = Gpu("sm_90", (9, 0), 227 * KB, 132)
A100 = Gpu("sm_80", (8, 0), 163 * KB, 108)
RTX_4090 = Gpu("sm_89", (8, 9), 99 * KB, 128)
B200 = Gpu("sm_100", (10, 0), 227 * KB, 148)
RTX_5090 = Gpu("sm_120", (12, 0), 99 * KB, 170)
MI300X = Gpu("gfx942", (0, 0), 64 * KB, 304, warp_size=64)
RX_7900 = Gpu("gfx1100", (0, 0), 64 * KB, 48)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "gpu", [H100, A100, RTX_4090, B200, RTX_5090, MI300X, RX_7900], ids=lambda gpu: gpu.arch
)
def test_tiles_fit_a_programs_threads_or_there_are_none(gpu, dtype, monkeypatch):
    monkeypatch.setattr(_tile_sizes, "gpu_of", lambda x: gpu)
    for dim in (16, 64, 96, 128, 192, 256, 512):
        q = torch.empty(1, 1, dim, dtype=dtype)
        tiles = _tile_sizes.find_tiles(q, q)
        assert (tiles is None) == (gpu is RX_7900 and (dim > 64 or dtype == torch.float32))
        assert tiles is None or all(part.num_warps <= gpu.most_warps for part in tiles)
        tiles = _tile_sizes.find_compressed_tiles(q)
        narrow = gpu.family == "desktop" and dtype == torch.float32 and dim > 256
        assert (tiles is None) == (gpu is RX_7900 or narrow)
        assert tiles is None or all(part.num_warps <= gpu.most_warps for part in tiles)
        assert tiles is None or tiles.key_value_gradient.keys % 32 == 0  # words of bits


def test_chosen_blocks_have_tiles_of_their_own_where_others_spill(monkeypatch):
    q = torch.empty(1, 1, 128, dtype=torch.bfloat16)
    for gpu in (H100, A100, RTX_4090, B200, RTX_5090, MI300X):
        monkeypatch.setattr(_tile_sizes, "gpu_of", lambda x, gpu=gpu: gpu)
        usual, of_blocks = _tile_sizes.find_tiles(q, q), _tile_sizes.find_tiles(q, q, blocks=True)
        assert (usual == of_blocks) == (gpu is not RTX_5090)
        assert usual[1:] == of_blocks[1:]  # in the forward pass alone


def test_plain_attention_runs_without_tiles_and_says_so_once(monkeypatch):
    pytest.importorskip("triton")
    if not _dispatch.interpreted:
        pytest.skip("needs Triton's interpreter")
    monkeypatch.setattr(module, "find_tiles", lambda *_: None)
    module._say_no_tiles.cache_clear()
    q, k, v = torch.randn(3, 8, 2, 16)
    with _dispatch.interpret():
        with pytest.warns(UserWarning, match="no tiles for heads this large on sm_90"):
            out = attention(q, k, v)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again = attention(q, k, v)
    assert torch.equal(out, attention_plain(q, k, v, 0.25))  # the same code
    assert torch.equal(again, out)


def test_attention_to_compressed_keys_runs_without_tiles_and_says_so_once(interpreted, monkeypatch):
    monkeypatch.setattr(_tile_sizes, "gpu_of", lambda x: RX_7900)
    of_compressed._say_no_tiles.cache_clear()
    places, sinks = compressed_keys((0, 8), 0, torch.device("cpu")), torch.zeros(2)
    operands = torch.randn(8, 2, 16), torch.randn(8, 16), None, sinks, places
    with pytest.warns(UserWarning, match="compressed keys have no tiles"):
        compressed_attention(*operands, scale=1.0, window=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compressed_attention(*operands, scale=1.0, window=4)
