"""How time is taken, and how the rows become tables and a picture."""

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
    assert len(calls) <= 5 + 4  # and the first few, which warm up and say how long a call takes


def test_launches_take_turns_and_each_is_timed_by_itself(meter):
    order = []

    def call(name, seconds):
        return lambda: order.append(name) or time.sleep(seconds)

    found = meter.launch_microseconds({"slow": call("slow", 0.0005), "fast": call("fast", 0.0)})
    assert found["slow"] >= 500 > found["fast"]
    timed = order[40:]  # after both have warmed up
    assert timed == (["slow"] * 20 + ["fast"] * 20) * 20


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
    from benchmarks.ops import Row

    def row(operation, provider, ms, share, **others):
        return Row(
            operation, "", "8x8", provider, training=Timing(ms, ms, ms), training_ceiling=share, **others
        )

    return [
        row("rms_norm", "ours", 1.0, 0.9, peak_bytes=3 << 20),
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


def test_the_share_of_the_ceiling_is_by_bytes_or_by_flop(benchmarks):
    ceilings = benchmarks.measure.Ceilings(copy=4e12, matmul=500e12)
    cost = benchmarks.operations.core.Cost
    assert cost(bytes=8_000_000_000).milliseconds(ceilings) == pytest.approx(2.0)
    assert cost(flops=10**12).milliseconds(ceilings) == pytest.approx(2.0)


@pytest.mark.parametrize("kept", ["rms_norm", "attention", ""])
def test_the_picture_is_drawn_with_one_panel_or_two(benchmarks, rows, tmp_path, kept):
    path = tmp_path / "picture.png"
    chosen = [row for row in rows if kept in row.operation]
    note = benchmarks.picture.draw(chosen, "a machine", benchmarks.measure.Ceilings(4e12, 6e14), str(path))
    assert note == f"picture: {path}"
    assert path.read_bytes().startswith(b"\x89PNG")
