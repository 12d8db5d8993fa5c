"""Scans of recurrent mixers with published models' heads, forward and backward, against other libraries.

Kernel times are sums over the kernels of `torch.profiler`; a call also includes the gaps between them. Each
library has a process of its own. flash-linear-attention 0.6 refuses its backward pass of the gated delta rule
on Hopper with Triton 3.4 to 3.7.0, where its gradients are wrong; here it runs all the same. On a CPU the
shapes are tiny, to test the command.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.apart import Rows, add_rows_argument, rows_apart, write_rows
from benchmarks.measure import Meter
from benchmarks.report import machine, markdown_table, publish
from liger_models import kernels

SUMMARY = "scans of recurrent mixers, forward and backward, against flash-linear-attention and mamba_ssm"

DOCUMENTS = {
    "4 x 4096": [4096] * 4,
    "16 documents": [3000, 64, 1200, 2500, 1, 800, 1500, 333, 700, 2100, 450, 1024, 900, 600, 212, 1000],
    "1 x 32768": [32768],
}
RUNS = 5  # calls under the profiler
Leaves = tuple[Tensor, ...]


class Mixer(NamedTuple):
    leaves: Callable[[int, bool, torch.device], Leaves]  # of tokens, and whether few heads will do
    values: int  # the leaf that is shaped as the output
    ours: Callable[[Leaves, Tensor], Tensor]  # of leaves and cu_seqlens
    peer: str
    theirs: Callable[[], Callable[[Leaves, Tensor, tuple[int, int]], Tensor]]  # also of batch and length


def _gated_delta(tokens: int, few: bool, device: torch.device) -> Leaves:
    heads, dim = (2, 16) if few else (32, 128)
    bf16, f32 = _normal(torch.bfloat16, device), _normal(torch.float32, device)
    q, k = (bf16(tokens, heads // 2, dim) for _ in range(2))
    by_token = (bf16(tokens, heads) for _ in range(2))
    return q, k, bf16(tokens, heads, dim), *by_token, 0.5 * f32(heads), 0.5 * f32(heads)


def _channel_delta(tokens: int, few: bool, device: torch.device) -> Leaves:
    """Decays as in a new model (Kimi Linear): exp(A_log) from 1 to 16, steps from 0.001 to 0.1."""
    heads, dim = (1, 16) if few else (32, 128)
    bf16 = _normal(torch.bfloat16, device)
    q, k, v = (bf16(tokens, heads, dim) for _ in range(3))
    A_log = torch.empty(heads, device=device).uniform_(1, 16).log()
    step = torch.empty(heads, dim, device=device).uniform_(-6.9, -2.3).exp()
    return q, k, v, 0.2 * bf16(tokens, heads, dim), bf16(tokens, heads), A_log, step.expm1().log()


def _ssd(groups: int) -> Callable[[int, bool, torch.device], Leaves]:
    def leaves(tokens: int, few: bool, device: torch.device) -> Leaves:
        heads, dim, state = (groups, 16, 16) if few else (128, 64, 128)
        bf16 = _normal(torch.bfloat16, device)
        x, dt = bf16(tokens, heads, dim), bf16(tokens, heads)
        A_log, dt_bias = torch.rand(2, heads, device=device)
        B, C = (bf16(tokens, groups, state) for _ in range(2))
        return x, dt, B, C, 2 * A_log, torch.ones(heads, device=device), 3 * dt_bias - 4

    return leaves


def _normal(dtype: torch.dtype, device: torch.device) -> Callable[..., Tensor]:
    return lambda *shape: torch.randn(shape, dtype=dtype, device=device)


def _fla_gated_delta() -> Callable[[Leaves, Tensor, tuple[int, int]], Tensor]:
    import fla.ops.common.chunk_o as chunk_o
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    chunk_o.TRITON_ABOVE_3_7_1 = True  # of its check

    def run(leaves: Leaves, cu_seqlens: Tensor, batch: tuple[int, int]) -> Tensor:
        q, k, v, a, b = (x.view(*batch, *x.shape[1:]) for x in leaves[:5])
        options = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True}
        options |= {"A_log": leaves[5], "dt_bias": leaves[6], "use_beta_sigmoid_in_kernel": True}
        documents = cu_seqlens.long() if batch[0] == 1 else None
        return chunk_gated_delta_rule(q, k, v, g=a, beta=b, cu_seqlens=documents, **options)[0].flatten(0, 1)

    return run


def _fla_channel_delta() -> Callable[[Leaves, Tensor, tuple[int, int]], Tensor]:
    from fla.ops.kda import chunk_kda

    def run(leaves: Leaves, cu_seqlens: Tensor, batch: tuple[int, int]) -> Tensor:
        q, k, v, f, b = (x.view(*batch, *x.shape[1:]) for x in leaves[:5])
        options = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True}
        options |= {"A_log": leaves[5], "dt_bias": leaves[6].flatten()}
        documents = cu_seqlens.long() if batch[0] == 1 else None
        o = chunk_kda(q, k, v, g=f, beta=b.sigmoid(), cu_seqlens=documents, **options)[0]
        return o.flatten(0, 1)

    return run


def _mamba_ssm(chunk: int) -> Callable[[], Callable[[Leaves, Tensor, tuple[int, int]], Tensor]]:
    def load() -> Callable[[Leaves, Tensor, tuple[int, int]], Tensor]:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        def run(leaves: Leaves, cu_seqlens: Tensor, batch: tuple[int, int]) -> Tensor:
            x, dt, B, C = (x.view(*batch, *x.shape[1:]) for x in leaves[:4])
            A_log, D, dt_bias = leaves[4:]
            options = {"D": D, "dt_bias": dt_bias, "dt_softplus": True}
            if batch[0] == 1 and len(cu_seqlens) > 2:
                lengths = cu_seqlens.diff()
                numbers = torch.arange(len(lengths), dtype=torch.int32, device=x.device)
                options["seq_idx"] = numbers.repeat_interleave(lengths)[None]
            y = mamba_chunk_scan_combined(x, dt, -A_log.exp(), B, C, chunk, **options)
            return y.flatten(0, 1)

        return run

    return load


def _ours(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[[Leaves, Tensor], Tensor]:
    return lambda leaves, cu_seqlens: function(*leaves, cu_seqlens=cu_seqlens)[0]


FLA, MAMBA = "flash-linear-attention", "mamba_ssm"
MIXERS = {
    "gated delta rule (Qwen3-Next)": Mixer(
        _gated_delta, 2, _ours(kernels.gated_delta_rule), FLA, _fla_gated_delta
    ),
    "decay by channel (Kimi Linear)": Mixer(
        _channel_delta, 2, _ours(kernels.channel_delta_rule), FLA, _fla_channel_delta
    ),
    "SSD (Granite-4-H-Small)": Mixer(_ssd(1), 0, _ours(kernels.ssd), MAMBA, _mamba_ssm(256)),
    "SSD (Nemotron-H-8B)": Mixer(_ssd(8), 0, _ours(kernels.ssd), MAMBA, _mamba_ssm(128)),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mixer", action="append", choices=MIXERS, help="repeatable; default: all")
    parser.add_argument("--documents", action="append", choices=DOCUMENTS, help="repeatable; default: all")
    parser.add_argument(
        "--provider", action="append", choices=("ours", FLA, MAMBA), help="repeatable; default: all"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_rows_argument(parser)


def run(args: argparse.Namespace) -> int:
    providers = args.provider or ["ours", FLA, MAMBA]
    mixers, documents = args.mixer or list(MIXERS), args.documents or list(DOCUMENTS)
    if args.rows:
        write_rows(args.rows, _measure(providers[0], mixers, documents, torch.device(args.device)))
        return 0
    rows: Rows = []
    for provider in providers:
        asked = [f for name in mixers for f in ("--mixer", name)]
        asked += [f for name in documents for f in ("--documents", name)]
        asked += ["--provider", provider, "--device", args.device]
        rows += rows_apart(["recurrent", *asked], provider)
    header = ["mixer", "documents", "provider", "kernels, ms", "call, ms", "peak GiB"]
    table = [
        [row.get("mixer", ""), row.get("documents", ""), row["provider"], row["note"], "", ""]
        if row.get("note")
        else [row[name] for name in ("mixer", "documents", "provider")]
        + ["" if row[name] is None else f"{row[name]:.2f}" for name in ("kernel_ms", "ms", "peak_gib")]
        for row in rows
    ]
    title = f"{machine(torch.device(args.device), 'fla-core', 'mamba-ssm')}. bfloat16, forward and backward."
    publish(args.out, "recurrent", f"{title}\n\n{markdown_table(header, table)}", rows)
    return 0


def _measure(provider: str, mixers: list[str], documents: list[str], device: torch.device) -> Rows:
    meter, rows = Meter(device, quick=True), []
    for name in mixers:
        mixer = MIXERS[name]
        if provider not in ("ours", mixer.peer):
            continue
        for layout in documents:
            row: dict[str, Any] = {"mixer": name, "documents": layout, "provider": provider}
            try:
                row |= _times(mixer, provider, layout, device, meter)
            except Exception as error:
                row["note"] = f"failed: {type(error).__name__}: {str(error)[:200]}"
            rows.append(row)
            print(*row.values(), file=sys.stderr, flush=True)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return rows


def _times(
    mixer: Mixer, provider: str, layout: str, device: torch.device, meter: Meter
) -> dict[str, float | None]:
    tiny = device.type == "cpu"
    lengths = [9, 4] if tiny else DOCUMENTS[layout]
    batch = (len(lengths), lengths[0]) if len(set(lengths)) == 1 else (1, sum(lengths))
    torch.manual_seed(0)
    leaves = tuple(x.requires_grad_() for x in mixer.leaves(sum(lengths), tiny, device))
    upstream = torch.randn_like(leaves[mixer.values])
    cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    theirs = None if provider == "ours" else mixer.theirs()

    def both(_: int = 0) -> Leaves:
        y = mixer.ours(leaves, cu_seqlens) if theirs is None else theirs(leaves, cu_seqlens, batch)
        return torch.autograd.grad(y, leaves, upstream)

    both()
    peak = meter.peak_bytes(both)
    return {
        "kernel_ms": None if tiny else _kernel_milliseconds(both),
        "ms": meter.time(both).median,
        "peak_gib": None if peak is None else peak / 2**30,
    }


def _kernel_milliseconds(call: Callable[[], object]) -> float:
    """Sum of the device's kernel times per call."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(RUNS):
            call()
        torch.cuda.synchronize()
    on_device = (e for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA)
    return sum(event.device_time_total for event in on_device) / RUNS / 1e3
