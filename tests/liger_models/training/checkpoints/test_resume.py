"""A run that was stopped in any way and resumed gives the bits of an uninterrupted one."""

import contextlib
import json
import os
import random
import signal
import time

import pytest
import torch
from ranks import Fork
from safetensors.torch import load_file

from liger_models.convert.errors import CheckpointError, ConfigError, DataError
from liger_models.training import TrainingInterrupted, loop, newest_checkpoint, train
from liger_models.training.checkpoints.state import STATE
from liger_models.training.data import Documents


def weights(folder):
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_same_bits(a, b):
    one, other = weights(a), weights(b)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.fixture(scope="module")
def unstopped(tmp_path_factory, settings_for):
    return train(settings_for(tmp_path_factory.mktemp("unstopped")))


@pytest.fixture
def stop_at(monkeypatch, run):
    """Function that trains and signals this process while batch n (training or evaluation) is made."""

    def train(config, n, signum=signal.SIGINT):
        make, made = Documents.batch, []

        def batch(self, rows):
            made.append(rows)
            if len(made) == n:
                os.kill(os.getpid(), signum)
            return make(self, rows)

        with monkeypatch.context() as patch:
            patch.setattr(Documents, "batch", batch)
            run(config)

    return train


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("seed", range(3))
def test_a_run_resumes_after_a_signal_at_any_moment(run, settings, losses, unstopped, stop_at, signum, seed):
    handler = signal.getsignal(signum)
    with pytest.raises(TrainingInterrupted, match="--resume") as stop:
        stop_at(settings(save_every=0), random.Random(f"{seed} {signum}").randint(1, 25), signum)
    assert stop.value.exit_code == 128 + signum
    assert signal.getsignal(signum) is handler
    result = run(settings(resume="auto", save_every=0))
    assert losses(result) == losses(unstopped)
    assert_same_bits(result.final, unstopped.final)


KILLED = """
import json, os, signal, sys
from liger_models.training import TrainConfig, train
from liger_models.training.checkpoints import contents

write, calls = contents.Contents.write, []

def killed_in_mid_write(self, folder, pieces):
    calls.append(folder)
    if len(calls) < 2:
        return write(self, folder, pieces)
    pieces = list(pieces)
    write(self, folder, pieces[: len(pieces) // 2])
    os.kill(os.getpid(), signal.SIGKILL)

contents.Contents.write = killed_in_mid_write
options = json.loads(sys.argv[1])
train(TrainConfig(**options | {key: tuple(options[key]) for key in ("data", "eval_data")}))
"""


def test_a_run_resumes_after_a_kill_during_a_save(run, settings, losses, unstopped, tmp_path):
    config = settings()
    killed = Fork("code", KILLED, json.dumps(config.to_dict()), output=tmp_path / "said")
    assert killed.wait() == -signal.SIGKILL
    assert newest_checkpoint(config.output).name == "checkpoint-2"  # checkpoint-4 was being written
    result = run(settings(resume="auto"))
    assert losses(result) == losses(unstopped)
    assert_same_bits(result.final, unstopped.final)
    assert not [path.name for path in (tmp_path / "run").iterdir() if path.name.startswith(".")]


def test_a_float32_run_from_a_bfloat16_checkpoint_resumes(
    run, settings, losses, tiny_checkpoint, stop_at, tmp_path
):
    """Checkpoints have the training dtype: the source's would lose most bits of the weights."""
    source = str(tiny_checkpoint(torch.bfloat16))
    changes = {"model": source, "dtype": "float32", "save_every": 0}
    whole = run(settings(output=str(tmp_path / "unstopped"), **changes))
    with pytest.raises(TrainingInterrupted):
        stop_at(settings(**changes), 12)
    checkpoint = newest_checkpoint(tmp_path / "run")
    result = run(settings(resume=str(checkpoint), **changes))
    assert losses(result) == losses(whole)
    assert_same_bits(result.final, whole.final)
    trained = weights(result.final)
    assert {tensor.dtype for tensor in trained.values()} == {torch.float32}
    assert not any(tensor.bfloat16().float().equal(tensor) for tensor in trained.values())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_bfloat16_run_resumes(
    device, run, settings, losses, tiny_checkpoint, stop_at, tmp_path, monkeypatch
):
    """On a GPU, with PyTorch's deterministic kernels; ours always are."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    changes = {"model": str(tiny_checkpoint(torch.bfloat16)), "save_every": 0, "device": device}
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(device == "cuda", warn_only=True)
    try:
        whole = run(settings(output=str(tmp_path / "unstopped"), **changes))
        with pytest.raises(TrainingInterrupted):
            stop_at(settings(**changes), 12)
        result = run(settings(resume="auto", **changes))
    finally:
        torch.use_deterministic_algorithms(before)
    assert losses(result) == losses(whole)
    assert_same_bits(result.final, whole.final)


def test_a_run_stopped_before_the_first_step_resumes(run, settings, losses, unstopped, stop_at):
    with pytest.raises(TrainingInterrupted, match="after step 0 of 6"):
        stop_at(settings(), 1)
    assert losses(run(settings(resume="auto"))) == losses(unstopped)


COMMAND = "import sys; from liger_models.cli import main; sys.exit(main(sys.argv[1:]))"


def test_ctrl_c_ends_the_command_with_130_and_a_state(settings, tmp_path, data, checkpoint):
    words = ["train", str(checkpoint), "--data", data, "--output", str(tmp_path / "run"), "--seq-len", "64"]
    words += ["--steps", "100000", "--device", "cpu"]
    command = Fork("code", COMMAND, *words, output=tmp_path / "said")
    metrics, end = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
    while time.monotonic() < end and not (metrics.exists() and metrics.read_text().count("\n") > 2):
        time.sleep(0.05)
    os.kill(command.pid, signal.SIGINT)
    code, errors = command.wait(60), command.output.read_text()
    assert code == 130, errors
    saved = newest_checkpoint(tmp_path / "run")
    assert f"the state is in {saved}. Repeat the command with --resume to continue." in errors
    assert "Traceback" not in errors


def test_random_states_are_restored(run, settings, stop_at, monkeypatch):
    # Keep the random states of the run in the process, to read them.
    monkeypatch.setattr(loop, "restored_random_states", lambda device: contextlib.nullcontext())
    with pytest.raises(TrainingInterrupted):
        stop_at(settings(save_every=0), 12)
    expected = torch.rand(3), random.random()
    torch.manual_seed(6)
    random.seed(6)
    run(settings(resume="auto", save_every=0))
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]


def test_only_the_newest_checkpoints_are_kept(run, settings, tmp_path):
    run(settings(save_every=1, keep=2))
    assert sorted(p.name for p in (tmp_path / "run").glob("*checkpoint*")) == ["checkpoint-5", "checkpoint-6"]


def test_the_folder_of_a_run_is_not_overwritten(run, settings):
    run(settings(save_every=0))
    with pytest.raises(ConfigError, match=r"already holds a run; choose another .*run/final"):
        run(settings())


def test_resuming_without_a_checkpoint_starts_from_the_beginning(run, settings, losses, unstopped):
    assert losses(run(settings(resume="auto"))) == losses(unstopped)


def test_the_optimizer_state_may_move_to_the_host_and_back(run, settings, losses, unstopped, stop_at):
    for n, place in ((9, "host"), (6, "device")):
        with pytest.raises(TrainingInterrupted):
            stop_at(settings(resume="auto", optimizer_memory=place), n)
    result = run(settings(resume="auto", optimizer_memory="host"))
    assert losses(result) == losses(unstopped)
    assert_same_bits(result.final, unstopped.final)


def test_a_run_is_a_model_to_train_further(run, settings, tmp_path):
    run(settings(steps=2, save_every=0))
    further = settings(model=str(tmp_path / "run"), steps=1, output=str(tmp_path / "further"))
    assert run(further).steps == 1
    assert f'model: "{tmp_path}/run/final"' in (tmp_path / "further" / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=r"already holds a run; choose another .* further is .*run/final"):
        run(settings(steps=2))


def test_a_run_can_be_made_longer(run, settings):
    run(settings(schedule="constant", steps=4))
    result = run(settings(schedule="constant", steps=6, resume="auto"))
    assert [r["step"] for r in result.records] == list(range(7))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"seq_len": 32, "truncate": True}, ConfigError, "seq_len=64, but this run has 32; keep 64"),
        ({"seed": 5}, ConfigError, "seed=0, but this run has 5"),
        ({"eval_fraction": 0.2}, DataError, r"other tokens than these: eval_fraction=0\.2, which was 0\.1; "),
    ],
)
def test_a_resumed_run_on_other_data_is_refused(run, settings, changes, error, message):
    run(settings(steps=2))
    with pytest.raises(error, match=message):
        run(settings(resume="auto", **changes))


def test_a_checkpoint_without_state_is_refused(run, settings, checkpoint):
    with pytest.raises(CheckpointError, match="holds no training state"):
        run(settings(resume=str(checkpoint)))


def test_a_partially_deleted_folder_is_not_used_as_a_checkpoint(run, settings, tmp_path):
    run(settings())
    (tmp_path / "run" / "checkpoint-6" / STATE / "state.json").unlink()
    assert newest_checkpoint(tmp_path / "run").name == "checkpoint-4"
