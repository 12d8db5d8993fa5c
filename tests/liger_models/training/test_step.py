"""A training step: gradients that are not finite, reported metrics, trackers, and GPU synchronisation."""

import json
import math
import signal
import sys
import types
import warnings

import pytest
import torch
from fake_cuda_graphs import record_on_a_cpu

from liger_models.convert.errors import ConfigError, TrainingError
from liger_models.layers.experts.router import Router
from liger_models.training import loop
from liger_models.training.objectives.sft import SFT
from liger_models.training.observing import trackers


@pytest.fixture
def spoil(monkeypatch):
    """Function that makes the loss of these micro-batches NaN, counted from 0."""

    def make(numbers):
        share_of, calls = SFT.share, iter(range(10**6))

        def spoiled(*arguments):
            share = share_of(*arguments)
            return share._replace(loss=share.loss * math.nan) if next(calls) in numbers else share

        monkeypatch.setattr(SFT, "share", spoiled)

    return make


def state_of(run):
    tensors = [t for state in run.optimizer.state.values() for t in state.values()]
    return [t.detach().clone() for t in (*run.model.state_dict().values(), *tensors)]


def test_a_skipped_step_changes_no_bit_and_advances_in_the_data(start, spoil):
    run = start(not_finite="skip")
    spoil({3})  # with two micro-batches per step
    run.step(1e-3, loop.Signals())
    before, position = state_of(run), run.progress.position
    outcome = run.step(1e-3, loop.Signals())
    assert not outcome.finite
    assert all(torch.equal(a, b) for a, b in zip(state_of(run), before, strict=True))
    assert run.progress.step == 2
    assert run.progress.position != position
    assert run.step(1e-3, loop.Signals()).finite
    assert not all(torch.equal(a, b) for a, b in zip(state_of(run), before, strict=True))


def test_a_step_interrupted_by_a_signal_leaves_no_trace(start, monkeypatch):
    run, signals, share_of = start(), loop.Signals(), SFT.share
    run.step(1e-3, signals)

    def draw_and_signal(*arguments):
        torch.rand(3)  # as dropout draws
        signals.received = signal.SIGTERM
        return share_of(*arguments)

    monkeypatch.setattr(SFT, "share", draw_and_signal)
    before, random, progress = state_of(run), torch.get_rng_state(), run.progress
    assert run.step(1e-3, signals) is None
    assert all(torch.equal(a, b) for a, b in zip(state_of(run), before, strict=True))
    assert torch.equal(torch.get_rng_state(), random)
    assert run.progress == progress
    assert all(p.grad is None for p in run.parameters)


def test_a_skipped_step_changes_no_correction_bias_and_resets_the_load(
    start, spoil, checkpoint_of_experts, monkeypatch
):
    run = start(model=str(checkpoint_of_experts), not_finite="skip", bias_update_rate=0.25)
    spoil({0, 1})
    before = state_of(run)
    run.step(1e-3, loop.Signals())
    assert all(torch.equal(a, b) for a, b in zip(state_of(run), before, strict=True))
    loads = [m.load for m in run.model.modules() if isinstance(m, Router) and m.load is not None]
    assert loads
    assert not torch.stack(loads).any()


def test_skipped_steps_are_counted_in_metrics_with_valid_json(run, settings, spoil, tmp_path):
    spoil({2, 8})
    records = run(settings(not_finite="skip", eval_fraction=0.0)).records
    assert [record["skipped"] for record in records] == [0, 1, 0, 0, 1, 0]
    assert [record["loss"] is None for record in records] == [False, True, False, False, True, False]

    def refuse(name):
        raise ValueError(f"{name} is no JSON")

    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)


def test_ten_skipped_steps_in_a_row_stop_the_run_and_nine_do_not(run, settings, spoil, tmp_path):
    spoil({*range(2, 20), *range(22, 42)})
    with pytest.raises(TrainingError, match=r"step 21: .* must be finite \(10 steps in a row\)"):
        run(settings(not_finite="skip", steps=30, eval_fraction=0.0))


def test_flops_of_a_step_are_reported_with_their_utilisation(run, settings):
    records = run(settings(steps=2, eval_fraction=0.0)).records
    peak = {record["flops_per_s"] / record["mfu"] for record in records}
    assert max(peak) == pytest.approx(min(peak))
    for record in records:
        # A tiny model: 2 layers with 32 x 32 attention and MLPs of width 48 have about 10,000 elements.
        assert 6 * 10_000 < record["flops_per_s"] / record["tokens_per_s"] < 6 * 100_000


def test_profiled_steps_write_a_trace_and_a_table(run, settings, tmp_path):
    run(settings(steps=6, profile=2, eval_fraction=0.0))
    assert (tmp_path / "run" / "profile" / "trace.json.gz").stat().st_size > 0
    table = (tmp_path / "run" / "profile" / "kernels.md").read_text()
    assert "| matrix products |" in table
    assert "| optimizer |" in table


class Written(list):
    """Stub of TensorBoard's writer, of a run of Weights & Biases and of Trackio, and of MLflow's client."""

    def __init__(self, *arguments, **options):
        self.options, self.ended = options, False
        self.info = types.SimpleNamespace(run_id="the run")

    def add_scalar(self, name, value, step):
        self.append((step, name, value))

    def log(self, numbers, step):
        self.extend((step, name, value) for name, value in numbers.items())

    def log_batch(self, run_id, metrics=(), params=()):
        assert run_id == "the run"
        self.options |= dict(params)
        self.extend((step, name, value) for name, value, _, step in metrics)

    def get_experiment_by_name(self, name):
        return None

    def create_experiment(self, name):
        return name

    def create_run(self, experiment, run_name):
        self.options |= {"experiment": experiment, "name": run_name}
        return self

    def update_run(self, run_id, status):
        self.options["resume"] = (run_id, status)

    def close(self, *_, **how):
        self.ended = True
        self.options |= how

    finish = set_terminated = close


def test_trackers_receive_the_metrics_records(run, settings, monkeypatch, tmp_path):
    opened = []

    def open_one(*arguments, **options):
        opened.append(Written(**options))
        return opened[-1]

    board = types.SimpleNamespace(SummaryWriter=open_one)
    monkeypatch.setattr(trackers.TensorBoard, "client", staticmethod(lambda: board))
    for module in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(init=open_one))
    entities = types.SimpleNamespace(
        Metric=lambda *of: of, Param=lambda *of: of, __name__="mlflow.entities", __spec__=None
    )
    mlflow = types.SimpleNamespace(MlflowClient=open_one, entities=entities, __path__=[], __spec__=None)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    everything = {"save_every": 2, "keep": 0, "log": "tensorboard,wandb,trackio,mlflow"}
    records = run(settings(steps=4, **everything)).records
    expected = [
        (record["step"], name, value)
        for record in records
        for name, value in record.items()
        if name not in ("step", "time")
    ]
    assert opened == [expected] * 4
    assert all(written.ended for written in opened)
    assert opened[3].options["experiment"] == "liger_models"
    assert opened[3].options["batch_size"] == "1"
    assert opened[3].options["status"] == "FINISHED"
    again = run(settings(steps=6, resume=str(tmp_path / "run" / "checkpoint-2"), **everything)).records
    first = opened[4][0][0]
    assert opened[4].options["purge_step"] == first == 3  # TensorBoard takes steps back; the others do not
    assert all(later == [entry for entry in opened[4] if entry[0] > 4] for later in opened[5:])
    assert {step for step, _, _ in opened[4]} == {r["step"] for r in again if r["step"] >= first}
    assert opened[1].options["id"] == opened[5].options["id"]
    assert opened[2].options["name"] == opened[6].options["name"]
    assert (opened[2].options["resume"], opened[6].options["resume"]) == ("never", "allow")
    assert opened[7].options["resume"] == ("the run", "RUNNING")


def test_a_tracker_that_refuses_is_an_error_with_its_reason(run, settings, monkeypatch):
    def init(**options):
        raise RuntimeError("no account")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    with pytest.raises(ConfigError, match=r"wandb cannot start a run \(RuntimeError: no account\)"):
        run(settings(log="wandb"))


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio", "mlflow"])
def test_a_missing_tracker_is_an_error_before_anything_is_loaded(run, settings, monkeypatch, name):
    for module in ("tensorboard", "torch.utils.tensorboard", "wandb", "trackio", "mlflow"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"log needs {name}, which is not installed .*pip install {name}"):
        run(settings(log=name, model="/nowhere"))
    with pytest.raises(ConfigError, match="'comet'; expected any of tensorboard, wandb"):
        run(settings(log="comet", model="/nowhere"))


@pytest.mark.gpu
def test_a_step_synchronises_with_the_gpu_once(start):
    run = start(device="cuda", gradient_accumulation=3)
    for _ in range(3):  # compiles kernels and creates state
        run.step(1e-3, loop.Signals())
    for _ in range(3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                run.step(1e-3, loop.Signals())
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert len([w for w in caught if "synchronizing CUDA operation" in str(w.message)]) == 1
    run.steps.close()


def steps_of(start, **settings):
    run = start(**settings)
    outcomes = [run.step(1e-3, loop.Signals()) for _ in range(2)]
    run.steps.close()
    return [(o.loss, o.norm, o.metrics) for o in outcomes], state_of(run)


def test_recorded_steps_of_a_run_have_the_same_bits(start, monkeypatch):
    recorded = record_on_a_cpu(monkeypatch)
    ours, state = steps_of(start, cuda_graphs=True)
    expected, other = steps_of(start)
    assert ours == expected
    assert all(torch.equal(a, b) for a, b in zip(state, other, strict=True))
    assert recorded


@pytest.mark.gpu
def test_recorded_steps_of_a_run_have_the_same_bits_on_a_gpu(start):
    ours, state = steps_of(start, device="cuda", cuda_graphs=True)
    expected, other = steps_of(start, device="cuda")
    assert ours == expected
    assert all(torch.equal(a, b) for a, b in zip(state, other, strict=True))


def test_weights_and_activations_on_the_host_are_refused_with_cuda_graphs(settings):
    for changes in ({"activation_memory": "offload"}, {"weights_memory": "host", "lora": ""}):
        with pytest.raises(ConfigError, match="cuda_graphs needs weights_memory 'device'"):
            settings(cuda_graphs=True, **changes)
