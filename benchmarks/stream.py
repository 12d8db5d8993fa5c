"""A model's stream of weights for an inference engine, against copying as many bytes.

Random weights in bfloat16. `device` fills buckets in the GPU's memory, as for a broadcast, and `host` copies
each bucket to pinned memory. The copy moves the same number of bytes, bucket by bucket, without names.
`stream` is the time until the device has finished, and `host` its part until the last call has returned.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.one_model import add_model_arguments, build, milliseconds, publish_page
from benchmarks.report import markdown_table

SUMMARY = "a whole stream of weights in buckets, against copying its bytes"
TITLE = "Streams of weights"
HEADER = ("to", "GiB", "tensors", "copy, ms", "stream, ms", "ratio", "host, ms", "first stream, ms")
BUCKET = 512 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, steps=7, memory=False)


def run(args: argparse.Namespace) -> int:
    import liger_models

    model, _, device, about = build(args)
    about += f"; buckets of 512 MiB; median of {args.steps} runs."
    weights = [parameter.detach() for parameter in model.parameters()]
    size, tensors = sum(weight.nbytes for weight in weights), 0
    buffer = torch.empty(BUCKET, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def copy(host: bool) -> None:
        source = torch.empty(BUCKET, dtype=torch.uint8, device=device)
        target = buffer if host else torch.empty(BUCKET, dtype=torch.uint8, device=device)
        for start in range(0, size, BUCKET):
            part = slice(0, min(BUCKET, size - start))
            target[part].copy_(source[part], non_blocking=True)

    def stream(host: bool) -> None:
        nonlocal tensors
        tensors = 0
        largest: Tensor = buffer
        for bucket in liger_models.stream_weights(model, names="vllm", dtype="bfloat16").buckets(BUCKET):
            tensors += len(bucket.tensors)
            if not host:
                continue
            for start in range(0, len(bucket.buffer), BUCKET):  # an embedding may exceed a bucket
                piece = bucket.buffer[start : start + BUCKET]
                largest[: len(piece)].copy_(piece, non_blocking=True)

    rows = []
    for host in (False, True):
        copying, _, _ = _times(lambda to=host: copy(to), args.steps, device)  # type: ignore[misc]
        streaming, own, first = _times(lambda to=host: stream(to), args.steps, device)  # type: ignore[misc]
        rows.append(["host" if host else "device", f"{size / 2**30:.2f}", str(tensors)])
        rows[-1] += [f"{copying:.2f}", f"{streaming:.2f}", f"{streaming / copying:.2f}", f"{own:.2f}"]
        rows[-1].append(f"{first:.1f}")
    text = f"{about}\n\n{markdown_table(HEADER, rows)}"
    table = [dict(zip(HEADER, row, strict=True)) for row in rows]
    publish_page(args, "stream", text, table, TITLE, "streams")
    return 0


def _times(function: Callable[[], None], steps: int, device: torch.device) -> tuple[float, float, float]:
    """Milliseconds of a run and of its part on the host, medians without the first run; and of the first."""
    hosts = []

    def timed() -> None:
        begin = time.perf_counter()
        function()
        hosts.append(1e3 * (time.perf_counter() - begin))

    times = [milliseconds(timed, device) for _ in range(1 + steps)]
    return statistics.median(times[1:]), statistics.median(hosts[1:]), times[0]
