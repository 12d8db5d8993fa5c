"""Measurements at small sizes on a GPU."""

import csv

import pytest

pytestmark = pytest.mark.gpu


def rows_of(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_ours_and_eager_are_timed_with_their_launches_and_memory(benchmarks, tmp_path):
    arguments = ["--quick", "--op", "rms_norm", "--op", "cross_entropy", "--shape", "1024x512"]
    providers = ["--provider", "ours", "--provider", "eager"]
    assert benchmarks.__main__.main([*arguments, *providers, "--out", str(tmp_path)]) == 0
    timed = [row for row in rows_of(tmp_path / "ops.csv") if row["shape"] == "1024x512"]
    assert len(timed) == 4
    assert all(float(row["training_ms_median"]) > 0 and int(row["peak_bytes"]) > 0 for row in timed)
    assert all(float(row["training_copy"]) > 0 for row in timed)
    launches = [row for row in rows_of(tmp_path / "ops.csv") if row["training_launch_us"]]
    assert len(launches) == 4
    # A launch takes microseconds, unlike a wait for the device, which takes milliseconds.
    assert all(1 < float(row["training_launch_us"]) < 5000 for row in launches)


@pytest.mark.parametrize("operation", ["swiglu", "rms_norm"])
def test_tuning_times_the_chosen_configuration_and_others(benchmarks, tmp_path, operation):
    assert benchmarks.__main__.main(["tune", operation, "--shape", "512x1024", "--out", str(tmp_path)]) == 0
    rows = rows_of(tmp_path / "tune.csv")
    assert any(row["chosen"] == "True" and float(row["ms_median"]) > 0 for row in rows)
    assert sum(bool(row["ms_median"]) for row in rows) > len(rows) / 2
