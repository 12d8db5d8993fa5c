"""What the kernels of a training step are for: milliseconds by class, and of the device doing nothing.

torch's profiler says which operation launched a kernel, and inside which others that one ran; a kernel
belongs to the first class whose pattern is found in its own name or in one of theirs.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

CLASSES: Mapping[str, str] = {
    "optimizer": r"adam|multi_tensor|Optimizer",
    "embedding": r"embedding",
    "experts' products": r"_Experts.* (_rows_kernel|_weight_kernel)|grouped_mm"
    r"|fused_(up|down)_proj|_moe_bwd_d",
    "experts' rows: routing, permutation, activation": r"_Experts|_Route|FusedMoE|_moe_|token_gather"
    r"|topk|sort|histc|cumsum|bincount",
    "attention": r"_Attention|attention|flash|fmha|sdpa",
    "matrix products": r"gemm|nvjet|cutlass|splitK|cublas",
    "loss": r"_ReducedLoss|CrossEntropy|cross_entropy|nll_loss|log_softmax",
    "norms": r"RMSNorm|LayerNorm|layer_norm|rms_norm",
    "rotary": r"[Rr]otary|[Rr]ope",
    "activations": r"_Packed|_Separate|_ReLU2|_XIELU|SiLUMul|GELUMul|silu|gelu",
    "rows gathered and scattered": r"index|gather|scatter",
    "copies": r"[Mm]emcpy|[Mm]emset|copy_",
}
OTHER, IDLE = "other", "idle"


def by_class(step: Callable[[], object], cuda: bool) -> dict[str, Any]:
    """Milliseconds of one step, which has run before, and its ten longest kernels; empty without a GPU."""
    if not cuda:
        return {}
    from torch.profiler import ProfilerActivity, profile

    with tempfile.TemporaryDirectory() as folder:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            step()
            torch.cuda.synchronize()
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    return summary(events)


def summary(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Of a trace's events (Chrome's format)."""
    events = [event for event in events if "dur" in event]
    launches = _operations([event for event in events if event.get("cat") == "cpu_op"])
    times: dict[str, float] = defaultdict(float)
    kernels: dict[str, float] = defaultdict(float)
    spans = []
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        operations = launches.get(event.get("args", {}).get("External id"), "")
        full = f"{operations} {event['name']}".strip()
        times[class_of(full)] += event["dur"] / 1e3
        kernels[full[-150:]] += event["dur"] / 1e3
        spans.append((event["ts"], event["ts"] + event["dur"]))
    longest = sorted(kernels.items(), key=lambda item: -item[1])[:10]
    return {"milliseconds": {**times, IDLE: _idle(spans)}, "longest": dict(longest)}


def class_of(name: str) -> str:
    """Of the names of operations from the outermost on, then of the kernel."""
    return next((label for label, pattern in CLASSES.items() if re.search(pattern, name)), OTHER)


def _operations(operations: list[Mapping[str, Any]]) -> dict[Any, str]:
    """For each operation's id: the names of those around it in its thread, and its own."""
    names: dict[Any, str] = {}
    threads = defaultdict(list)
    for event in operations:
        threads[event.get("tid")].append(event)
    for thread in threads.values():
        around: list[Mapping[str, Any]] = []
        for event in sorted(thread, key=lambda event: (event["ts"], -event["dur"])):
            while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"]:
                around.pop()
            around.append(event)
            names[event.get("args", {}).get("External id")] = " ".join(outer["name"] for outer in around)
    return names


def _idle(spans: list[tuple[float, float]]) -> float:
    """Milliseconds between the first kernel's begin and the last one's end in which none ran."""
    idle, end = 0.0, None
    for start, stop in sorted(spans):
        if end is not None and start > end:
            idle += start - end
        end = stop if end is None else max(end, stop)
    return idle / 1e3
