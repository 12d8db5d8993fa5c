"""A stand-in for Gemma 3n's encoder of images, which transformers takes from the package timm: the same
modules, in plain torch, with channels before rows. tests/vision/test_mobilenet.py compares it with timm's.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

STAGES = (
    ((128, 3, 2, 4), *((128, 3, 1, 4),) * 2),
    ((256, 3, 5, 2, 6), *((256, k, 0, 1, 4) for k in (5, 3, 5, 3))),
    ((640, 5, 5, 2, 6), *((640, 5, 0, 1, 4),) * 7, (640, 0, 0, 1, 1), *((12, 64, 2), (640, 0, 0, 1, 2)) * 14),
    ((1280, 5, 5, 2, 6), *((16, 96, 1), (1280, 0, 0, 1, 2)) * 19),
)
"""The sizes of each block, whose kind follows from their number."""


class Conv(nn.Conv2d):
    """With the zeros of TensorFlow's "same" convolutions."""

    def __init__(self, inputs, outputs, kernel=1, stride=1, groups=1, bias=False):
        super().__init__(inputs, outputs, kernel, stride, groups=groups, bias=bias)

    def forward(self, x):
        (kernel, _), (stride, _) = self.kernel_size, self.stride
        rows, columns = (max(0, (math.ceil(n / stride) - 1) * stride + kernel - n) for n in x.shape[2:])
        around = columns // 2, columns - columns // 2, rows // 2, rows - rows // 2
        return super().forward(F.pad(x, around))


class Norm(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6) * self.weight[:, None, None]


class ConvNorm(nn.Module):
    def __init__(self, inputs, outputs, kernel=1, stride=1, apart=False, bias=False, active=False):
        super().__init__()
        self.conv = Conv(inputs, outputs, kernel, stride, inputs if apart else 1, bias)
        self.bn, self.active = Norm(outputs), active

    def forward(self, x):
        x = self.bn(self.conv(x))
        return F.gelu(x, approximate="tanh") if self.active else x


class LayerScale(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((channels,), 1e-5))

    def forward(self, x):
        return x * self.gamma[:, None, None]


class Edge(nn.Module):
    def __init__(self, inputs, outputs, kernel, stride, expansion):
        super().__init__()
        self.conv_exp, self.bn1 = Conv(inputs, inputs * expansion, kernel, stride), Norm(inputs * expansion)
        self.conv_pwl, self.bn2 = Conv(inputs * expansion, outputs), Norm(outputs)
        self.skips = inputs == outputs and stride == 1

    def forward(self, x):
        y = self.bn2(self.conv_pwl(F.gelu(self.bn1(self.conv_exp(x)), approximate="tanh")))
        return x + y if self.skips else y


class Inverted(nn.Module):
    def __init__(self, inputs, outputs, start, middle, stride, expansion, scaled=True):
        super().__init__()
        inner, same = inputs * expansion, nn.Identity()
        first = 1 if middle else stride
        self.dw_start = ConvNorm(inputs, inputs, start, first, apart=True) if start else same
        self.pw_exp = ConvNorm(inputs, inner, active=True)
        self.dw_mid = ConvNorm(inner, inner, middle, stride, apart=True, active=True) if middle else same
        self.pw_proj = ConvNorm(inner, outputs)
        self.layer_scale = LayerScale(outputs) if scaled else same
        self.skips = inputs == outputs and stride == 1 and scaled

    def forward(self, x):
        y = self.layer_scale(self.pw_proj(self.dw_mid(self.pw_exp(self.dw_start(x)))))
        return x + y if self.skips else y


class Queries(nn.Module):
    def __init__(self, channels, heads, width, stride):
        super().__init__()
        self.norm, self.layer_scale, self.attn = Norm(channels), LayerScale(channels), nn.Module()
        self.attn.query = nn.Sequential()
        self.attn.query.add_module("proj", Conv(channels, heads * width))
        for name in ("key", "value"):
            way = nn.Sequential()
            if stride > 1:
                way.add_module("down_conv", Conv(channels, channels, 3, stride, channels))
                way.add_module("norm", Norm(channels))
            way.add_module("proj", Conv(channels, width))
            setattr(self.attn, name, way)
        self.attn.output = nn.Sequential()
        self.attn.output.add_module("proj", Conv(heads * width, channels))
        self.heads, self.width = heads, width

    def forward(self, x):
        normed = self.norm(x)
        q = self.attn.query(normed).unflatten(1, (self.heads, self.width)).flatten(3)  # [n, heads, width, l]
        k, v = self.attn.key(normed).flatten(2), self.attn.value(normed).flatten(2)  # [n, width, m]
        weights = torch.einsum("nhdl,ndm->nhlm", q, k).mul(self.width**-0.5).softmax(-1)
        made = torch.einsum("nhlm,ndm->nhdl", weights, v).flatten(1, 2).unflatten(2, x.shape[2:])
        return x + self.layer_scale(self.attn.output(made))


class MobileNet(nn.Module):
    def __init__(self, channel_multiplier=1.0, msfa_output_resolution=16):
        super().__init__()

        def rounded(count):
            exact = count * channel_multiplier
            near = max(8, int(exact + 4) // 8 * 8)
            return near + 8 if near < 0.9 * exact else near

        channels = 64 if channel_multiplier < 1 else rounded(64)
        self.conv_stem = ConvNorm(3, channels, 3, 2, bias=True, active=True)
        stages, ends = [], []
        for stage in STAGES:
            blocks = []
            for sizes in stage:
                if len(sizes) == 3:
                    blocks.append(Queries(channels, *sizes))
                    continue
                last = rounded(sizes[0])
                blocks.append((Edge if len(sizes) == 4 else Inverted)(channels, last, *sizes[1:]))
                channels = last
            stages.append(nn.Sequential(*blocks))
            ends.append(channels)
        self.blocks = nn.Sequential(*stages)
        self.msfa = nn.Module()
        self.msfa.ffn = Inverted(sum(ends[-2:]), 2048, 0, 0, 1, 2, scaled=False)
        self.msfa.norm, self.side = Norm(2048), msfa_output_resolution

    def forward_features(self, x):
        x, states = self.conv_stem(x), []
        for stage in self.blocks:
            states.append(x := stage(x))
        fine, coarse = states[-2:]
        fused = self.msfa.ffn(torch.cat([fine, F.interpolate(coarse, fine.shape[2:])], 1))
        return self.msfa.norm(F.avg_pool2d(fused, fused.shape[-1] // self.side))


class Wrapper(nn.Module):
    """Like transformers' `TimmWrapperModel`."""

    def __init__(self, config):
        super().__init__()
        self.timm_model = MobileNet(**(config.model_args or {}))

    def forward(self, pixel_values, **_):
        return SimpleNamespace(last_hidden_state=self.timm_model.forward_features(pixel_values))


def fake_timm():
    """Let transformers build the stand-in where it would need timm."""
    automatic = pytest.importorskip("transformers").AutoModel
    make = automatic.from_config

    def from_config(config, **options):
        return Wrapper(config) if config.model_type == "gemma3n_vision" else make(config, **options)

    return mock.patch.object(automatic, "from_config", from_config)
