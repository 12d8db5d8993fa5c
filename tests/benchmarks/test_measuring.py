"""Measurement of time, and the tables and the plot made from rows."""

import dataclasses
import time

import pytest
import torch


@pytest.fixture
def meter(benchmarks):
    return benchmarks.measure.Meter(torch.device("cpu"), quick=True)


def test_a_calls_time_is_the_median_of_rounds(meter):
    timing = meter.time(lambda i: time.sleep(0.002))
    assert 2.0 <= timing.low <= timing.median <= timing.high


def test_calls_rotate_through_the_copies_and_overwritten_ones_are_restored_between_groups(meter):
    seen = []
    meter.time(lambda i: seen.append(i) or time.sleep(0.0005), 3, restore=lambda: seen.append("restore"))
    rounds = "".join(map(str, seen)).split("restore")
    assert len(rounds) > meter.min_groups
    timed = "".join(rounds[1:])
    assert timed == ("012" * len(timed))[: len(timed)]


def test_a_measurement_takes_five_calls_at_most_where_they_are_slow(benchmarks):
    meter, calls = benchmarks.measure.Meter(torch.device("cpu")), []
    meter.time(lambda i: calls.append(i) or time.sleep(0.08))
    assert len(calls) <= 5 + 4  # and the first few, which warm up and show how long a call takes


def test_launches_take_turns_and_are_timed_separately(meter):
    order = []

    def batch(name, seconds):
        return lambda: order.append(name) or time.sleep(seconds)

    found = meter.launch_microseconds({"slow": batch("slow", 0.002), "fast": batch("fast", 0.0)}, 4, 24)
    assert found["slow"] >= 500 > found["fast"]
    # One untimed and one timed call in each turn, including two turns of warm-up.
    assert order == ["slow", "slow", "fast", "fast"] * 26


def test_the_time_of_a_launch_is_the_lower_quartile_of_the_turns(meter, monkeypatch):
    """A host that is disturbed in most turns gets the time of the others."""
    clock, calls = [0.0], [0]

    def batch():
        calls[0] += 1
        clock[0] += 8e-3 if calls[0] % 3 else 4e-3

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    assert meter.launch_microseconds({"one": batch}, 4, 24) == {"one": pytest.approx(1000)}


def test_one_backward_pass_goes_through_all_copies(benchmarks, build):
    """Each copy gets the gradients that it would get by itself."""
    case = build("rms_norm", (4, 8), torch.float32)
    bound = benchmarks.bound.Bound(case, case.provider("eager"), 3)
    alone = [gradient for i in range(3) for gradient in bound.train(i)[1:]]
    found = bound.train_all()
    assert len(found) == len(alone) == 6
    for a, b in zip(found, alone, strict=True):
        torch.testing.assert_close(a, b)


def test_a_copy_moves_the_requested_bytes_once_per_run(meter, monkeypatch):
    timed = []

    def noted(call, copies):
        timed.append(call(0).nbytes)
        return type(meter).time(meter, call, copies)

    monkeypatch.setattr(meter, "time", noted)
    assert meter.copy_milliseconds(1 << 20) == meter.copy_milliseconds(1 << 20) > 0
    assert timed == [1 << 19]  # as many bytes are read as written


def test_a_row_has_the_speed_of_copies_of_its_passes(benchmarks, meter, monkeypatch, build):
    """A forward pass is compared with one copy, training with one per pass; products have no such figure."""
    monkeypatch.setattr(meter, "copy_milliseconds", lambda num_bytes: 1.0 + num_bytes / 1e6)
    ceilings = benchmarks.measure.Ceilings(1e9, 1e12)  # a byte takes 1e-6 ms
    session = benchmarks.ops.Session(meter, ceilings, torch.bfloat16, ("ours",), time.monotonic(), 60.0)
    row = benchmarks.row.Row("rms_norm", "norms", "4x8", "ours")
    session._set_copies([row], build("rms_norm", (500, 1000)))
    assert row.forward_copy == pytest.approx(2 / 3)  # 2 MB in 1 + 2 ms
    assert row.training_copy == pytest.approx(5 / 7)  # 5 MB in 1 + 2 and 1 + 3 ms
    product = benchmarks.row.Row("attention", "attention", "1x4x2x1x8", "ours")
    session._set_copies([product], build("attention", (1, 4, 2, 1, 8)))
    assert product.forward_copy is None is product.training_copy


def test_launches_are_measured_at_the_small_shape_forward_and_in_training(benchmarks, meter):
    session = benchmarks.ops.Session(
        meter, meter.ceilings(), torch.bfloat16, ("ours", "eager"), time.monotonic(), 60.0
    )
    operation = dataclasses.replace(benchmarks.operations.REGISTRY["relu2"], small=(2, 8))
    rows = session.measure_launches(operation, ["ours", "eager", "torch.nothing"])
    assert [(row.provider, row.shape) for row in rows[:2]] == [("ours", "2x8"), ("eager", "2x8")]
    assert all(0 < row.forward_launch_us < row.training_launch_us for row in rows[:2])
    assert rows[2].note == "has no such operation"
    assert rows[2].training_launch_us is None


@pytest.fixture
def rows(benchmarks):
    from benchmarks.measure import Timing
    from benchmarks.row import Row

    def row(operation, provider, ms, share, **others):
        return Row(
            operation, "", "8x8", provider, training=Timing(ms, ms, ms), training_ceiling=share, **others
        )

    return [
        row("rms_norm", "ours", 1.0, 0.9, peak_bytes=3 << 20, training_copy=0.95),
        row("rms_norm", "eager", 2.0, 0.45, note="slow"),
        row("attention", "ours", 4.0, 0.5, tflops=300.0),
        row("attention", "SDPA", 2.0, 1.0, tflops=600.0),
        Row("attention", "", "8x8", "varlen", note="out of memory", failed=True),
    ]


def test_the_tables_show_share_rate_memory_and_failures(benchmarks, rows):
    ceilings = benchmarks.measure.Ceilings(4e12, 600e12)
    text = benchmarks.tables.markdown(rows, "a machine", ceilings, "bfloat16")
    assert "a machine; bfloat16. Copy 4.00 TB/s, bfloat16 matrix product 600 TFLOP/s." in text
    assert "| rms_norm | 8x8 | 1.000, 90%, 3 MiB | 2.000, 45% |" in text
    assert "| attention | 8x8 | 4.000, 50% (300 TFLOP/s) | 2.000, 100% (600 TFLOP/s) | fails |" in text
    assert "| operation | shape | ours | eager |" in text
    assert "| operation | shape | ours | SDPA | varlen |" in text
    assert "- eager: slow (rms_norm)" in text
    assert "- varlen: out of memory (attention)" in text
    assert "Forward: " not in text  # no row has a forward pass


def test_forward_tables_show_a_copy_where_memory_binds(benchmarks, rows):
    from benchmarks.measure import Timing

    for row in rows:
        row.forward, row.forward_ceiling = Timing(0.5, 0.5, 0.5), 0.8
        row.forward_copy = 0.84 if row.operation == "rms_norm" else None
    text = benchmarks.tables.markdown(rows, "a machine", benchmarks.measure.Ceilings(4e12, 6e14), "bfloat16")
    assert "| operation | shape | ours | eager | a copy |" in text
    assert "| rms_norm | 8x8 | 0.500, 80% | 0.500, 80% | 84% |" in text
    assert "| attention | 8x8 | 0.500, 80% | 0.500, 80% | 0.500, 80% |" in text


def test_the_share_of_the_ceiling_is_by_bytes_or_by_flop(benchmarks):
    ceilings = benchmarks.measure.Ceilings(copy=4e12, matmul=500e12)
    cost = benchmarks.operations.core.Cost
    assert cost(bytes=8_000_000_000).milliseconds(ceilings) == pytest.approx(2.0)
    assert cost(flops=10**12).milliseconds(ceilings) == pytest.approx(2.0)


@pytest.mark.parametrize("kept", ["rms_norm", "attention", ""])
def test_the_plot_has_one_panel_or_two(benchmarks, rows, tmp_path, kept):
    path = tmp_path / "picture.png"
    chosen = [row for row in rows if kept in row.operation]
    note = benchmarks.picture.draw(chosen, "a machine", benchmarks.measure.Ceilings(4e12, 6e14), str(path))
    assert note == f"picture: {path}"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_each_provider_is_measured_in_a_process_of_its_own(benchmarks, tmp_path, monkeypatch, forked_command):
    from benchmarks import ops
    from benchmarks.row import ROWS, read_rows, write_rows

    monkeypatch.setattr(ops, "subprocess", forked_command)
    args = benchmarks.__main__.parse(["ops", "--op", "swiglu", "--device", "cpu", "--out", str(tmp_path)])
    rows, ceilings = ops.measure_apart(args, ["ours", "eager"], time.monotonic())
    assert [(row.operation, row.provider) for row in rows] == [("swiglu", "ours"), ("swiglu", "eager")]
    assert all(row.training is not None and row.training.median > 0 for row in rows)
    write_rows(tmp_path / ROWS, rows, ceilings)
    assert read_rows(tmp_path / ROWS) == (rows, ceilings)
