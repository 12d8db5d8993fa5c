"""Attribution of the kernels of a step to parts of the model."""

import gzip
import json

import pytest
import torch

from liger_models.training.observing.profiling import StepProfiler, summary


def kernel(name, ts, dur, launched_by):
    return {"cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": {"External id": launched_by}}


def operation(name, ts, dur, number, thread=1):
    return {
        "cat": "cpu_op",
        "name": name,
        "ts": ts,
        "dur": dur,
        "tid": thread,
        "args": {"External id": number},
    }


def test_a_kernel_is_attributed_by_the_enclosing_operation():
    events = [
        operation("_Experts", 0, 100, 1),
        operation("aten::mm", 10, 5, 2),
        operation("_RMSNorm", 100, 10, 3),
        operation("_Experts", 105, 2, 4, thread=2),
        kernel("_rows_kernel", 1000, 300, 1),
        kernel("_forward_kernel", 1300, 100, 1),
        kernel("nvjet_h", 1500, 200, 2),
        kernel("_forward_kernel", 1700, 50, 3),
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 1600, "dur": 200, "args": {}},
        {"cat": "python_function", "name": "step", "ts": 0, "dur": 9000, "args": {}},
    ]
    found = summary(events)
    assert found["milliseconds"] == {
        "experts' products": 0.3,
        "experts' rows: routing, permutation, activation": pytest.approx(0.3),
        "norms": 0.05,
        "copies": 0.2,
        "idle": 0.1,
    }
    assert next(iter(found["longest"])) == "_Experts _rows_kernel"


def test_without_a_gpu_operations_count_with_their_self_time():
    events = [
        operation("aten::linear", 0, 10, 1),
        operation("aten::mm", 2, 6, 2),
        operation("aten::mul", 9, 1, 3),
    ]
    assert summary(events)["milliseconds"] == {
        "other": pytest.approx(0.004),
        "matrix products": 0.006,
        "idle": 0,
    }


def test_the_requested_steps_are_in_the_trace_and_the_table(tmp_path):
    x = torch.ones(8, 8)
    with StepProfiler(tmp_path / "profile", 2, after=1) as profiler:
        for operation in (torch.sin, torch.exp, torch.mm, torch.cos):
            with profiler.step():
                operation(x, x) if operation is torch.mm else operation(x)
    with gzip.open(tmp_path / "profile" / "trace.json.gz") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"aten::exp", "aten::mm"} <= names
    assert not {"aten::sin", "aten::cos"} & names
    assert "| matrix products |" in (tmp_path / "profile" / "kernels.md").read_text()
