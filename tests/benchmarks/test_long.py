"""Cases of long contexts are read, capped and measured."""

from __future__ import annotations

import argparse
import csv

import pytest


@pytest.fixture
def long(benchmarks):
    from benchmarks import long

    return long


def test_a_case_is_read_and_named(long):
    case = long._case("32:1x217000:offload:device:nf4:23.5GiB")
    assert case == long.Case(32, 1, 217000, "offload", "device", "nf4", int(23.5 * 2**30))
    assert long._case(case.name) == case
    assert long._case("4:8x8192:tiled:host").name == "4:8x8192:tiled:host:full"
    case = long._case("2/80:1xmax:offload:device:lora+host:48GiB")
    assert (case.layers, case.all_layers, case.seq, case.on_host) == (2, 80, 0, True)
    assert long._case(case.name) == case
    with pytest.raises(argparse.ArgumentTypeError, match="expected for instance"):
        long._case("4:8x8192:lean:device")


def test_the_longest_row_fits_the_plan_of_a_card_and_ballast_is_what_the_other_layers_hold(long):
    args = argparse.Namespace(model="tiny", rank=32, steps=2)
    case = long._longest(long._case("2/8:1xmax:offload:device:nf4:1GiB"), args)
    assert long._plan(case, args).peak <= 0.95 * (2**30 - long.CONTEXT)
    assert long._plan(case._replace(seq=case.seq + case.seq // 64), args).peak > 0.95 * (2**30 - long.CONTEXT)
    few, every = (long._plan(case._replace(all_layers=n), args) for n in (None, 8))
    assert every.peak - few.peak == every.at_rest - few.at_rest  # of one layer at a time


def test_adapters_on_quantised_weights_are_planned_and_run(long, tmp_path):
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    parser = argparse.ArgumentParser()
    long.add_arguments(parser)
    options = [
        "--model",
        "tiny",
        "--case",
        "1:1x32:offload:device:nf4:1GiB",
        "--steps",
        "9",
        "--seconds",
        "0",
    ]
    args = parser.parse_args([*options, "--seconds", "0", "--device", "cpu"])
    args.out = str(tmp_path)
    assert long.run(args) == 0
    with (tmp_path / "long.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert row["steps"] == "1"  # as many as the seconds allow, at least one
    assert float(row["planned"]) > 0
