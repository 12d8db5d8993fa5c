"""Tuning replaces the configuration chosen in a kernel's file during timing, and reports the fastest."""

import csv
import importlib
import itertools
from typing import NamedTuple

import pytest
import torch

from liger_models.kernels.norms import _norm_kernels


def test_every_choice_exists_and_has_its_fields(benchmarks):
    from benchmarks.tune import CHOICES

    for choice in CHOICES:
        module = importlib.import_module(f"liger_models.kernels.{choice.module}")
        value = getattr(module, choice.name)
        if not callable(value):
            assert len(choice.fields) == (len(value) if isinstance(value, tuple) else 1), choice
        for name in choice.operations:
            assert name in benchmarks.operations.REGISTRY


def test_neighbours_differ_by_one_step_in_one_field_or_two(benchmarks):
    from benchmarks.tune import neighbours

    assert neighbours(("rows", "warps"), (4, 32)) == [(2, 32), (8, 32), (4, 16), (2, 16), (8, 16)]
    assert neighbours(("stages",), (1,)) == [(2,)]
    three = neighbours(("rows", "warps", "stages"), (4, 8, 3))
    assert len(three) == len(set(three)) == 6 + 3 * 4
    assert all(sum(a != b for a, b in zip(found, (4, 8, 3), strict=True)) in (1, 2) for found in three)


class Tiles(NamedTuple):
    queries: int
    warps: int


class Configuration(NamedTuple):
    forward: Tiles
    backward: Tiles


@pytest.mark.parametrize(
    ("part", "value", "numbers", "changed"),
    [
        (None, 4096, (4096,), 64),
        (None, (1024, 8), (1024, 8), (64, 2)),
        (None, Tiles(128, 8), (128, 8), Tiles(64, 2)),
        (
            "backward",
            Configuration(Tiles(128, 8), Tiles(32, 4)),
            (32, 4),
            Configuration(Tiles(128, 8), Tiles(64, 2)),
        ),
    ],
)
def test_a_configuration_is_changed_in_the_form_that_it_has(benchmarks, part, value, numbers, changed):
    choice = benchmarks.tune.Choice((), "", "", ("queries", "warps"), part=part)
    assert choice.numbers(value) == numbers
    found = choice.value(value, (64, 2)[: len(numbers)])
    assert found == changed
    assert type(found) is type(changed)


@pytest.fixture
def fake_timer(benchmarks, monkeypatch):
    """Times depend on the chosen rows and warps: the more, the faster."""
    from benchmarks.measure import Meter, Timing

    def time(self, call, copies, restore, sustained):
        call(0)
        ms = 100.0 / sum(_norm_kernels._forward_config(16, False))
        return Timing(ms, ms, ms)

    monkeypatch.setattr(Meter, "time", time)


def test_the_fastest_comes_first_and_all_changes_are_undone(
    benchmarks, build, interpreted, fake_timer, monkeypatch, tmp_path, capsys
):
    def original(block_width, center):
        return 128, 4

    monkeypatch.setattr(_norm_kernels, "_forward_config", original)
    arguments = ["tune", "rms_norm", "--shape", "4x16", "--dtype", "float32", "--device", "cpu"]
    choices = [
        choice for choice in benchmarks.tune.CHOICES if choice.place == "norms._norm_kernels._forward_config"
    ]
    monkeypatch.setattr(benchmarks.tune, "CHOICES", choices)
    assert benchmarks.__main__.main([*arguments, "--out", str(tmp_path)]) == 0
    assert _norm_kernels._forward_config is original
    with (tmp_path / "tune.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = [(row["rows"], row["warps"]) for row in rows]
    assert found == list(itertools.product(("256", "128", "64"), ("8", "4", "2")))
    assert [row["chosen"] == "True" for row in rows] == [numbers == ("128", "4") for numbers in found]
    assert "| 256 | 8 | 0.3788 | 0.3788 to 0.3788 | 0.500 |  |" in capsys.readouterr().out


def test_a_configuration_with_other_results_is_not_timed(benchmarks, build, interpreted, fake_timer):
    """Simulate a kernel that does not stride over its tiles: fewer programs than rows."""
    from benchmarks.measure import Meter
    from benchmarks.tune import Choice, tune

    choice = Choice(("softmax",), "activations.softmax", "_LEAST_ELEMENTS", ("elements",))
    case = build("softmax", (9, 16), torch.float32)
    meter = Meter(torch.device("cpu"), quick=True)
    right = case.providers["ours"]().run
    module = importlib.import_module("liger_models.kernels.activations.softmax")
    chosen = module._LEAST_ELEMENTS

    def wrong_if_changed(x):
        return right(x) * (1.0 if chosen >= module._LEAST_ELEMENTS else 1.1)

    case.providers["ours"] = lambda: benchmarks.operations.Provider(wrong_if_changed)
    found = {trial.numbers[0]: trial for trial in tune(choice, case, torch.float32, meter)}
    assert found[chosen].chosen
    assert found[chosen].timing
    assert found[chosen // 2].timing
    assert found[2 * chosen].timing is None
    assert found[2 * chosen].note.startswith("wrong: relative error")


def test_a_choice_that_does_not_affect_an_operation_gives_no_trials(benchmarks, build, interpreted):
    from benchmarks.measure import Meter
    from benchmarks.tune import Choice, tune

    choice = Choice(("softmax",), "norms._norm_kernels", "_forward_config", ("rows", "warps"))
    assert tune(choice, build("softmax", (4, 16)), torch.bfloat16, Meter(torch.device("cpu"))) == []


def test_the_listing_names_operations_and_where_their_sizes_are_defined(benchmarks, capsys):
    assert benchmarks.__main__.main(["tune"]) == 0
    listing = capsys.readouterr().out
    assert "| swiglu, geglu | activations.gated._TILE | elements, warps | (1024, 4) |" in listing
