"""A save in the background writes the values at its start, and reports errors."""

from __future__ import annotations

import threading

import pytest
import torch
from safetensors.torch import load_file

from liger_models.convert.checkpoints.expressions import Ref
from liger_models.convert.checkpoints.tensor_files import TensorFiles
from liger_models.convert.errors import CheckpointError
from liger_models.training.checkpoints import contents, saving
from liger_models.training.checkpoints.contents import Contents, Part
from liger_models.training.checkpoints.saving import Saver
from liger_models.training.processes.world import World


@pytest.fixture
def saver():
    saver = Saver(World("cpu"))
    yield saver
    saver.close()


@pytest.fixture
def write_permission(monkeypatch):
    """Event that the writing thread waits for."""
    permitted, write = threading.Event(), Contents.write

    def waiting(self, folder, pieces):
        assert permitted.wait(20)
        write(self, folder, pieces)

    monkeypatch.setattr(contents.Contents, "write", waiting)
    return permitted


def folder_of(target, tensor, done=lambda: None):
    files = TensorFiles.single("a.safetensors", {"a": tensor})
    part = Part("", files, {"a": Ref("a", tuple(tensor.shape))}, {"a": tensor})
    return Contents(target, (part,), files.lay_out, done)


def test_saved_values_are_those_at_the_start_of_the_save(saver, write_permission, tmp_path):
    tensor, done = torch.arange(6.0), threading.Event()
    assert saver.save(folder_of(tmp_path / "one", tensor, done.set), meanwhile=True)
    tensor += 1
    assert not (tmp_path / "one").exists()
    write_permission.set()
    saver.wait()
    assert done.is_set()
    assert torch.equal(load_file(tmp_path / "one" / "a.safetensors")["a"], torch.arange(6.0))


def test_a_save_waits_for_the_previous_one(saver, write_permission, tmp_path):
    order = []
    for name in ("one", "two"):
        saver.save(folder_of(tmp_path / name, torch.ones(3), lambda n=name: order.append(n)), meanwhile=True)
        write_permission.set()
    saver.wait()
    assert order == ["one", "two"]


def test_the_run_waits_if_there_is_no_room_for_a_copy(saver, tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "available_host_memory", lambda: 10)
    assert not saver.save(folder_of(tmp_path / "one", torch.ones(3)), meanwhile=True)
    assert (tmp_path / "one" / "a.safetensors").exists()


def test_errors_of_the_thread_are_raised_by_wait(saver, tmp_path):
    (tmp_path / "file").write_text("in the way")
    saver.save(folder_of(tmp_path / "file" / "one", torch.ones(3)), meanwhile=True)
    with pytest.raises(CheckpointError, match=r"cannot create a folder there|cannot be written"):
        saver.save(folder_of(tmp_path / "two", torch.ones(3)))
    assert not saver.failed
    saver.save(folder_of(tmp_path / "two", torch.ones(3)))
    assert (tmp_path / "two" / "a.safetensors").exists()
