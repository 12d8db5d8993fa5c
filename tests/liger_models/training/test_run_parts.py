"""Stages in which a run opens its resources: if one fails, nothing stays open."""

import gc
import weakref

import pytest

from liger_models.training import run_parts
from liger_models.training.observing import trackers
from liger_models.training.processes.world import World

STAGES = ("_make_objective", "_make_optimizer", "_restore", "_read_steps", "_join_processes", "_open_outputs")


class StageError(Exception):
    """Raised by the stage under test."""


class Recorded(trackers.Tracker):
    """Tracker that records how it was closed."""

    def __init__(self):
        self.closed = []

    def write(self, step, numbers):
        pass

    def close(self, failed):
        self.closed.append(failed)


@pytest.fixture
def opened(monkeypatch):
    """Record of everything that a run opens: trackers, savers, step readers, models."""
    found = {"trackers": [], "savers": [], "steps": [], "models": []}

    def open_trackers(*arguments):
        for _ in range(2):
            found["trackers"].append(Recorded())
            yield found["trackers"][-1]

    class Saver(run_parts.Saver):
        def __init__(self, world):
            super().__init__(world)
            found["savers"].append(self)

    def ahead(items, ahead=run_parts.ahead):
        found["steps"].append(ahead(items))
        return found["steps"][-1]

    def load_model(*arguments, load=run_parts.load_model):
        loaded = load(*arguments)
        found["models"].append(weakref.ref(loaded.model))
        return loaded

    for function in (open_trackers, Saver, ahead, load_model):
        monkeypatch.setattr(run_parts, function.__name__, function)
    return found


def all_are_closed(opened, failed):
    gc.collect()
    return (
        all(tracker.closed == [failed] for tracker in opened["trackers"])
        and all(saver._thread._shutdown for saver in opened["savers"])
        and all(steps.gi_frame is None for steps in opened["steps"])
        and all(model() is None for model in opened["models"])
    )


@pytest.mark.parametrize(("epochs", "few"), [(1, True), (3, False)])
def test_a_run_of_few_steps_says_so(settings, opened, capsys, monkeypatch, epochs, few):
    monkeypatch.setattr(run_parts, "FEW_STEPS", 60)
    with run_parts.RunParts(settings(steps=None, epochs=epochs, eval_fraction=0.0), World("cpu")) as parts:
        assert (parts.total < 60) == few
    assert ("which hardly train a model" in capsys.readouterr().err) == few


@pytest.mark.parametrize(("fraction", "apart"), [(0.001, True), (0.2, False)])
def test_held_out_data_far_from_the_fraction_are_pointed_out(settings, opened, capsys, fraction, apart):
    with run_parts.RunParts(settings(eval_fraction=fraction), World("cpu")):
        pass
    assert ("of the tokens instead of 0.10%, since documents" in capsys.readouterr().err) == apart


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_fails_leaves_nothing_open(stage, run, settings, opened, monkeypatch):
    whole = getattr(run_parts.RunParts, stage)

    def failing(self, *arguments):
        whole(self, *arguments)  # everything that the stage opens is open now
        raise StageError

    monkeypatch.setattr(run_parts.RunParts, stage, failing)
    with pytest.raises(StageError):
        run(settings())
    assert opened["models"]
    assert bool(opened["trackers"]) == (stage == "_open_outputs")
    assert all_are_closed(opened, failed=True)


def test_a_tracker_that_cannot_be_opened_closes_the_previous_one(run, settings, opened, monkeypatch):
    first = Recorded()

    def open_trackers(*arguments):
        yield first
        raise StageError

    monkeypatch.setattr(run_parts, "open_trackers", open_trackers)
    with pytest.raises(StageError):
        run(settings())
    assert first.closed == [True]
    assert all_are_closed(opened, failed=True)


def test_a_finished_run_closes_everything_it_opened(run, settings, opened):
    run(settings(steps=1))
    assert len(opened["trackers"]) == 2
    assert all_are_closed(opened, failed=False)
