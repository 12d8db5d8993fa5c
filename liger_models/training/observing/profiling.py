"""Profile of training steps: GPU milliseconds by class of kernel, and idle time.

torch's profiler records which operation launched a kernel and its enclosing operations; a kernel belongs to
the first class whose pattern matches its own name or theirs. Without a GPU, operations take the place of
kernels, each with its self time.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

CLASSES: Mapping[str, str] = {
    "between GPUs": r"nccl(Dev)?Kernel",
    "copies of data between them": r"fsdp::|chunk_cat|split_with_sizes_copy",
    "optimizer": r"adam|multi_tensor|Optimizer",
    "embedding": r"embedding",
    "experts' products": r"_Experts.* (_rows_kernel|_weight_kernel)|grouped_mm"
    r"|fused_(up|down)_proj|_moe_bwd_d",
    "experts' rows: routing, permutation, activation": r"_Experts|_Route|FusedMoE|_moe_|token_gather"
    r"|topk|sort|histc|cumsum|bincount",
    "attention": r"_Attention|attention|flash|fmha|sdpa",
    "recurrent layers": r"DeltaRule|SSD|_SelectiveScan|_RGLRU|_ShortConv|delta_rule|causal_conv1d|mamba",
    "matrix products": r"gemm|nvjet|cutlass|splitK|cublas|aten::(add|b)?mm",
    "loss": r"_ReducedLoss|CrossEntropy|cross_entropy|nll_loss|log_softmax",
    "norms": r"RMSNorm|LayerNorm|layer_norm|rms_norm",
    "rotary": r"[Rr]otary|[Rr]ope",
    "activations": r"_Packed|_Separate|_ReLU2|_XIELU|SiLUMul|GELUMul|silu|gelu",
    "rows gathered and scattered": r"index|gather|scatter",
    "copies": r"[Mm]emcpy|[Mm]emset|copy_",
}
OTHER, IDLE = "other", "idle"


def by_class(step: Callable[[], object], cuda: bool) -> dict[str, Any]:
    """Milliseconds of one warmed-up step by class, and its ten longest kernels; empty without a GPU."""
    if not cuda:
        return {}
    with tempfile.TemporaryDirectory() as folder, StepProfiler(Path(folder), 1, after=0) as profiler:
        with profiler.step():
            step()
        return profiler.found


class StepProfiler:
    """Profiles `steps` steps after the first `after` ones. `folder` then contains trace.json.gz, for
    chrome://tracing or Perfetto, and kernels.md, a table of kernel times by purpose.

    Attributes:
        found: the summary, once they have run.
    """

    def __init__(self, folder: Path, steps: int, after: int = 3) -> None:
        self.folder, self.steps, self.left = folder, steps, steps + after
        self.found: dict[str, Any] = {}
        self._profile: Any = None

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(self, *_: object) -> None:
        """If the steps were not reached, write what was recorded."""
        if self._profile is not None:
            self._finish()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        if self.left == self.steps > 0:
            self._begin()
        yield
        self.left -= 1
        if self.left == 0 and self._profile is not None:
            self._finish()

    def _begin(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.__enter__()

    def _finish(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profile.__exit__(None, None, None)
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "trace.json.gz"
        self._profile.export_chrome_trace(str(path))
        self._profile = None
        with gzip.open(path) as file:
            self.found = summary(json.load(file)["traceEvents"])
        (self.folder / "kernels.md").write_text(table(self.found) + "\n", encoding="utf-8")


def table(found: Mapping[str, Any]) -> str:
    """Format a summary as Markdown: classes, then the longest kernels."""
    times = found["milliseconds"]
    total = sum(times.values()) or 1.0
    ordered = sorted(times.items(), key=lambda item: (item[0] == IDLE, -item[1]))
    rows = [*ordered, *found["longest"].items()]
    lines = [f"| {name.replace('|', '/')} | {ms:.2f} | {ms / total:.1%} |" for name, ms in rows]
    return "\n".join(["|  | ms | share |", "| --- | --- | --- |", *lines])


def summary(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Summarise a trace's events (Chrome's format)."""
    events = [event for event in events if "dur" in event]
    operations = [event for event in events if event.get("cat") in ("cpu_op", "user_annotation")]
    names, own = _nested(operations)
    times: dict[str, float] = defaultdict(float)
    kernels: dict[str, float] = defaultdict(float)

    def add(full: str, microseconds: float) -> None:
        times[class_of(full)] += microseconds / 1e3
        kernels[full[-150:]] += microseconds / 1e3

    on_device = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    for event in on_device:
        number = event.get("args", {}).get("External id")
        add(f"{names.get(number, '')} {event['name']}".strip(), event["dur"])
    if not on_device:
        for number, microseconds in own.items():
            add(names[number], microseconds)
    longest = sorted(kernels.items(), key=lambda item: -item[1])[:10]
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in on_device]
    return {"milliseconds": {**times, IDLE: _idle(spans)}, "longest": dict(longest)}


def class_of(name: str) -> str:
    """Class of a kernel, given the names of its enclosing operations, outermost first, and its own."""
    return next((label for label, pattern in CLASSES.items() if re.search(pattern, name)), OTHER)


def _nested(operations: list[Mapping[str, Any]]) -> tuple[dict[Any, str], dict[Any, float]]:
    """For each operation's id: the names of its enclosing operations in its thread and its own; and its self
    time in microseconds.
    """
    names: dict[Any, str] = {}
    own: dict[Any, float] = {}
    threads = defaultdict(list)
    for event in operations:
        threads[event.get("tid")].append(event)
    for thread in threads.values():
        around: list[Mapping[str, Any]] = []
        for event in sorted(thread, key=lambda event: (event["ts"], -event["dur"])):
            while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"]:
                around.pop()
            if around:
                own[_number(around[-1])] -= event["dur"]
            around.append(event)
            own[_number(event)] = event["dur"]
            names[_number(event)] = " ".join(outer["name"] for outer in around)
    return names, own


def _number(event: Mapping[str, Any]) -> Any:
    return event.get("args", {}).get("External id")


def _idle(spans: list[tuple[float, float]]) -> float:
    """Milliseconds without a running kernel between the first kernel's start and the last one's end."""
    idle, end = 0.0, None
    for start, stop in sorted(spans):
        if end is not None and start > end:
            idle += start - end
        end = stop if end is None else max(end, stop)
    return idle / 1e3
