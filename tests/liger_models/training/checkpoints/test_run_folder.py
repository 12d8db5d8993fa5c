"""A run never loses the contents of its folder, and never resumes from damaged checkpoints."""

import json
import math
import os
import random
import re
import resource
import shutil
import signal
import time

import pytest
import torch
from ranks import Fork
from safetensors.torch import load_file, save_file

from liger_models.convert.errors import CheckpointError, ConfigError, TrainingError
from liger_models.training import loop, newest_checkpoint
from liger_models.training.checkpoints.run_folder import MANIFEST, STATE, checkpoints, written_folder
from liger_models.training.checkpoints.saving import Saver
from liger_models.training.checkpoints.state import Progress, Trained, describe_state, read_state, restore
from liger_models.training.objectives.sft import SFT
from liger_models.training.processes.world import World


def weights(folder):
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def same_bits(a, b):
    one, other = weights(a), weights(b)
    return one.keys() == other.keys() and all(torch.equal(t, other[name]) for name, t in one.items())


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def finished(tmp_path_factory, settings_for):
    """A finished run with checkpoints 2, 4 and 6."""
    from liger_models.training import train

    output = tmp_path_factory.mktemp("finished") / "run"
    train(settings_for(output, keep=0))
    return output


@pytest.fixture
def output(finished, tmp_path):
    """Untouched copy of the finished run."""
    return shutil.copytree(finished, tmp_path / "run", symlinks=True)  # copies times too


@pytest.fixture
def nan_at(monkeypatch, run):
    """Function that trains with a loss that is NaN from a given step on."""

    def train(config, first):
        step, share_of, bad = loop.Run.step, SFT.share, []

        def noted(self, *args):
            bad[:] = [self.progress.step + 1 >= first]
            return step(self, *args)

        def spoiled(*args):
            share = share_of(*args)
            return share._replace(loss=share.loss * (math.nan if any(bad) else 1))

        with monkeypatch.context() as patch:
            patch.setattr(loop.Run, "step", noted)
            patch.setattr(SFT, "share", spoiled)
            run(config)

    return train


# --------------------------------------------------------------------------------------------------- damage


FILES = [
    MANIFEST,
    f"{STATE}/state.json",
    f"{STATE}/tensors.safetensors",
    "model.safetensors",
    "config.json",
]


@pytest.mark.parametrize("file", FILES)
def test_a_flipped_bit_is_detected_and_the_previous_checkpoint_used(
    run, settings, output, finished, file, capsys
):
    rng = random.Random(file)
    path = output / "checkpoint-6" / file
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    result = run(settings(keep=0, resume="auto"))
    output_text = capsys.readouterr().err
    assert f"{output}/checkpoint-6 is damaged, skipping it: {path}" in output_text
    assert f"resumed from {output}/checkpoint-4" in output_text
    assert same_bits(result.final, finished / "final")


def test_every_bit_of_the_state_is_checked(output):
    """The checksums cover every bit of every file."""
    rng = random.Random(0)
    checkpoint = output / "checkpoint-6"
    read_state(checkpoint)
    for path in [p for p in checkpoint.rglob("*") if p.is_file()]:
        whole = path.read_bytes()
        for _ in range(4):
            content = bytearray(whole)
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            path.write_bytes(content)
            with pytest.raises(CheckpointError):
                read_state(checkpoint)
        path.write_bytes(whole)


@pytest.mark.parametrize(
    "content",
    [None, b"", b"{", b"[]", b"null", b"{}", b"\xff\xfe", b'{"version": 2}', b"[" * 100_000, b"9" * 5000],
)
def test_any_damage_to_a_state_file_is_a_clear_error(run, settings, output, content):
    for file in FILES[:3]:
        path = output / "checkpoint-6" / file
        kept = path.read_bytes()
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(CheckpointError, match="checkpoint-6"):
            run(settings(resume=str(output / "checkpoint-6")))
        path.unlink(missing_ok=True)
        path.write_bytes(kept)


def test_a_run_with_only_damaged_checkpoints_does_not_start_over(run, settings, output):
    before = weights(output / "final")
    for checkpoint in checkpoints(output):
        (checkpoint / STATE / "tensors.safetensors").write_bytes(b"half")
    with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged"):
        run(settings(resume="auto"))
    assert all(torch.equal(t, before[name]) for name, t in weights(output / "final").items())
    assert (output / "metrics.jsonl").read_text().count("\n") == 7


@pytest.fixture
def forged(output):
    """Function that changes tensors and state of a checkpoint and updates the checksums."""

    def forge(change_tensors=lambda tensors: None, change_state=lambda state: None):
        checkpoint = output / "checkpoint-4"
        copy = shutil.copytree(checkpoint, output / "copy")
        tensors = load_file(copy / STATE / "tensors.safetensors")
        change_tensors(tensors)
        save_file(tensors, copy / STATE / "tensors.safetensors")
        state = json.loads((copy / STATE / "state.json").read_text())
        change_state(state)
        (copy / STATE / "state.json").write_text(json.dumps(state))
        (copy / MANIFEST).unlink()
        with written_folder(checkpoint) as new:
            shutil.copytree(copy, new, dirs_exist_ok=True)
        shutil.rmtree(copy)
        return str(checkpoint)

    return forge


KEY = "exp_avg.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({KEY: t[KEY][:-1].clone()}), "expected .*32, 48"),
        (lambda t: t.update({KEY: t[KEY].T.contiguous()}), "expected .*32, 48"),
        (lambda t: t.update({KEY: t[KEY].flatten()}), "expected .*32, 48"),
        (lambda t: t.update({KEY: torch.zeros(())}), "expected .*32, 48"),
        (lambda t: t.update({KEY: t[KEY].double()}), "expected .*float32"),
        (lambda t: t.update({KEY: t[KEY].to(torch.int32)}), "expected .*float32"),
        (lambda t: t.update({KEY.replace("exp_avg", "step"): torch.zeros(2)}), "as step of .*expected"),
        (lambda t: t.pop(KEY), "has .*NoneType.* as exp_avg of"),
        (lambda t: t.update({KEY.replace("1", "7"): t[KEY].clone()}), r"has exp_avg\.layers\.7.*do not have"),
        (
            lambda t: t.update({KEY.replace("avg", "sum"): t[KEY].clone()}),
            r"has exp_sum\.layers.*do not have",
        ),
        (lambda t: t.pop("random.torch"), "random.torch must be"),
        (lambda t: t.update({"random.torch": torch.zeros(7, dtype=torch.uint8)}), "random.torch must be"),
        (lambda t: t.update({"random.torch": torch.zeros(5056)}), "random.torch must be"),
    ],
)
def test_a_state_that_does_not_match_the_optimizer_is_refused(run, settings, forged, change, message):
    """A fused kernel trusts the shapes of its state, and would read and write out of bounds."""
    with pytest.raises(CheckpointError, match=rf"{STATE}: .*{message}"):
        run(settings(resume=forged(lambda t: (change(t), None)[1])))


@pytest.mark.parametrize(
    "changes",
    [
        {"step": "4"},
        {"step": -1},
        {"step": True},
        {"tokens": None},
        {"position": [0, 1]},
        {"position": {"epoch": 0}},
        {"position": {"epoch": 0, "row": 1.5}},
        {"data": 3},
        {"config": []},
        {"optimizer": None},
        {"python_random": None},
        {"python_random": [3, [1, 2], None]},
        {"python_random": [3, ["a"] * 625, None]},
        {"python_random": [3, [2**70] * 625, None]},
    ],
)
def test_a_state_of_a_wrong_form_is_refused(run, settings, forged, changes):
    with pytest.raises(CheckpointError, match=rf"state\.json: .*{next(iter(changes))}|counts"):
        run(settings(resume=forged(change_state=lambda state: state.update(changes))))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.Adam(p, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.Adafactor(p),
        lambda p: torch.optim.Rprop(p),
        lambda p: torch.optim.RAdam(p),
    ],
    ids=["AdamW", "amsgrad", "momentum", "SGD", "Adafactor", "Rprop", "RAdam"],
)
def test_the_state_of_any_optimizer_is_restored(tmp_path, checkpoint, tokenizer_folder, make):
    import liger_models

    def step(model, optimizer, seed):
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()

    model = liger_models.from_hub(checkpoint)
    optimizer = make(model.parameters())
    step(model, optimizer, 0)
    options = {"config": {}, "data": "", "tokenizer": tokenizer_folder, "keep": 0}
    contents = describe_state(tmp_path, Trained.of_model(model), model, optimizer, Progress(1), **options)
    Saver(World("cpu")).save(contents)
    saved = contents.target
    step(model, optimizer, 1)
    again = liger_models.from_hub(saved)
    other = make(again.parameters())
    assert restore(saved, read_state(saved), again, other) == Progress(1)
    step(again, other, 1)
    for (name, one), two in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two), name


# --------------------------------------------------------------------------------------- other people's files


@pytest.mark.parametrize("linked", [False, True])
def test_files_that_a_run_did_not_write_are_never_deleted(run, settings, output, linked, tmp_path):
    if linked:
        (output / "final").rename(tmp_path / "elsewhere")
        (output / "final").symlink_to(tmp_path / "elsewhere")
    for folder in (output / "final", output / "checkpoint-2", output / "checkpoint-4"):
        (folder / "notes").mkdir()
        (folder / "notes" / "paper.tex").write_text("mine")
        (folder / "adapter.safetensors").write_text("mine")
        (folder / "generation.txt").symlink_to("/nowhere")
    (output / "final" / "config.json").write_text("edited by hand")
    (output / "thesis.docx").write_text("mine")
    run(settings(resume="auto", steps=8, keep=1, schedule="constant"))
    assert (output / "final").is_symlink() == linked
    for folder in (output / "final", output / "checkpoint-2.kept", output / "checkpoint-4.kept"):
        assert (folder / "notes" / "paper.tex").read_text() == "mine"
        assert (folder / "adapter.safetensors").read_text() == "mine"
        assert os.readlink(folder / "generation.txt") == "/nowhere"
    assert (output / "final" / "config.json.old").read_text() == "edited by hand"
    assert json.loads((output / "final" / "config.json").read_text())["model_type"] == "llama"
    assert names(output / "checkpoint-2.kept") == ["adapter.safetensors", "generation.txt", "notes"]
    assert (output / "thesis.docx").read_text() == "mine"
    assert [path.name for path in checkpoints(output)] == ["checkpoint-8"]


@pytest.mark.parametrize("kind", ["file", "folder", "link to a folder", "link to nothing"])
def test_obstacles_to_writing_the_model_are_detected_before_training(run, settings, tmp_path, kind):
    output = tmp_path / "run"
    output.mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("mine")
    if kind == "file":
        (output / "final").write_text("mine")
    elif kind == "folder":
        shutil.copytree(elsewhere, output / "final")
    else:
        (output / "final").symlink_to(elsewhere if kind == "link to a folder" else tmp_path / "nothing")
    with pytest.raises(ConfigError, match=rf"{output}/final is not (a folder|empty)"):
        run(settings())
    assert names(output) == ["final"]
    assert (elsewhere / "mine").read_text() == "mine"


@pytest.mark.parametrize("name", ["metrics.jsonl", "metrics.csv", "loss.png"])
def test_foreign_metrics_are_not_overwritten(run, settings, tmp_path, name):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("the only copy\n1,2\n")
    with pytest.raises(ConfigError, match=f"already holds a run|contains {name} from elsewhere"):
        run(settings())
    assert (tmp_path / "run" / name).read_text() == "the only copy\n1,2\n"


@pytest.mark.parametrize("name", ["run", "x" * 300, "a\0b", "~nosuchuser/run"])
def test_an_output_that_cannot_be_a_folder_is_refused_before_training(run, settings, tmp_path, name):
    (tmp_path / "run").write_text("a file")
    output = name if name.startswith("~") else str(tmp_path / name)
    with pytest.raises(ConfigError, match=r"cannot be a folder|not a usable path"):
        run(settings(output=output))


# ------------------------------------------------------------------------------------------- history of a run


def test_resuming_from_an_older_checkpoint_sets_later_ones_aside(run, settings, output, capsys):
    run(settings(resume=str(output / "checkpoint-2"), steps=4, keep=1, lr=1e-3))
    assert "checkpoint-6 is set aside" not in capsys.readouterr().out
    assert [path.name for path in checkpoints(output)] == ["checkpoint-4"]
    assert {"abandoned-checkpoint-4", "abandoned-checkpoint-6"} <= set(names(output))
    assert not same_bits(output / "checkpoint-4", output / "abandoned-checkpoint-4")
    run(settings(resume="auto", steps=4, keep=1, lr=1e-3))
    assert same_bits(output / "final", output / "checkpoint-4")


def test_abandoned_checkpoints_are_not_resumed_after_a_kill(run, settings, output, monkeypatch):
    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("liger_models.training.checkpoints.state.describe_state", killed)
        with pytest.raises(KeyboardInterrupt):
            run(settings(resume=str(output / "checkpoint-2"), keep=1))
    assert newest_checkpoint(output) == output / "checkpoint-2"


def test_a_nan_does_not_delete_the_last_good_checkpoint(nan_at, run, settings, tmp_path):
    with pytest.raises(TrainingError, match=r"checkpoint-4; resume from an earlier checkpoint"):
        nan_at(settings(save_every=3, keep=1), 5)
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-3", "checkpoint-4"]
    run(settings(save_every=3, keep=1, resume=str(tmp_path / "run" / "checkpoint-3")))
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-6"]


def test_overflowed_weights_do_not_replace_a_good_checkpoint(run, settings, tmp_path):
    good = settings(save_every=1, keep=1, steps=2, schedule="constant", warmup=0, eval_fraction=0.0)
    run(good)
    bad = settings(
        save_every=1, keep=1, steps=4, lr=3e38, schedule="constant", eval_fraction=0.0, resume="auto"
    )
    with pytest.raises(TrainingError, match=r"checkpoint-2 with a lower|checkpoint-2; resume"):
        run(bad)
    found = checkpoints(tmp_path / "run")[0]
    assert all(t.isfinite().all() for t in weights(found).values())


def test_resuming_a_finished_run_does_not_start_over(run, settings, tmp_path):
    result = run(settings(save_every=0))
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes(), weights(result.final)
    with pytest.raises(ConfigError, match="holds a finished run without a checkpoint"):
        run(settings(save_every=0, resume="auto"))
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before[0]
    assert all(torch.equal(t, before[1][name]) for name, t in weights(result.final).items())


# --------------------------------------------------------------------------------------------------- the lock

HOLDS = """
import json, sys, time
from liger_models.training import TrainConfig, train
from liger_models.training.data import Documents
batch = Documents.batch
def waiting(self, rows):
    print("running", flush=True)
    time.sleep(600)
Documents.batch = waiting
options = json.loads(sys.argv[1])
train(TrainConfig(**options | {key: tuple(options[key]) for key in ("data", "eval_data")}))
"""


def test_two_runs_do_not_share_a_folder_and_a_killed_one_leaves_no_lock(run, settings, tmp_path):
    config = settings(steps=2)
    process = Fork("code", HOLDS, json.dumps(config.to_dict()), output=tmp_path / "said")
    try:
        end = time.monotonic() + 120
        while not (process.output.exists() and "running" in process.output.read_text()):
            assert time.monotonic() < end
            time.sleep(0.02)
        with pytest.raises(ConfigError, match="another run is writing to"):
            run(config)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert run(config).steps == 2


# ------------------------------------------------------------------------------------------------ a full disk


@pytest.mark.parametrize(
    ("limit", "file"),
    [
        (150_000, "tensors.safetensors"),
        (20_000, "model.safetensors"),
        (1_200, "metrics.jsonl"),
        (150, "config.yaml"),
    ],
)
def test_a_full_disk_names_the_file(run, settings, capsys, tmp_path, limit, file):
    """A limit on file sizes simulates a full disk: the system refuses writes in the same way."""
    # (capsys keeps output in memory instead of a file of pytest's)
    run(settings(steps=1, output=str(tmp_path / "tokenized")))  # tokenize the data beforehand
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises((CheckpointError, TrainingError), match=rf"{re.escape(file)}\b.*File too large"):
            run(settings(save_every=0 if file == "metrics.jsonl" else 2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
