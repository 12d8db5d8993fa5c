"""A save killed at any moment leaves either the complete old folder or the complete new one."""

import contextlib
import ctypes
import errno
import fcntl
import os
import signal
import stat
import time

import pytest

from liger_models.convert.checkpoints import atomic
from liger_models.convert.checkpoints.atomic import atomic_folder
from liger_models.convert.errors import CheckpointError

OLD = {"weights": b"old weights", "config": b"old config"}
NEW = {"weights": b"new weights", "config": b"new config"}


def fill(folder, files):
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def save(target, files=NEW, **kwargs):
    with atomic_folder(target, **kwargs) as new:
        fill(new, files)


def hidden(parent):
    return [path.name for path in parent.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("existing", [None, {}, OLD])
def test_the_target_becomes_the_new_folder(tmp_path, existing):
    target = tmp_path / "a" / "out"
    if existing is not None:
        target.parent.mkdir()
        fill(target, existing)
    save(target)
    assert content(target) == NEW
    assert hidden(target.parent) == []


def test_an_error_in_the_block_leaves_the_old_folder(tmp_path):
    target = tmp_path / "out"
    fill(target, OLD)
    for error in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(error), atomic_folder(target) as new:  # noqa: PT012
            fill(new, {"weights": b"half"})
            raise error
    assert content(target) == OLD
    assert hidden(tmp_path) == []


def test_entries_that_are_not_replaced_are_kept_as_the_same_files(tmp_path):
    target = tmp_path / "out"
    fill(target, {**OLD, "notes": b"keep me"})
    (target / "logs" / "deep").mkdir(parents=True)
    (target / "logs" / "deep" / "metrics").write_bytes(b"1\n")
    (target / "link").symlink_to("notes")
    log = open(target / "logs" / "deep" / "metrics", "ab")  # noqa: SIM115 - like a running trainer's open log
    save(target, replaces=lambda name: name in ("weights", "config"))
    log.write(b"2\n")
    log.close()
    assert content(target) == {**NEW, "notes": b"keep me", "link": b"keep me"}
    assert os.readlink(target / "link") == "notes"
    assert (target / "logs" / "deep" / "metrics").read_bytes() == b"1\n2\n"


def test_without_hard_links_kept_entries_are_copied(tmp_path, monkeypatch):
    target = tmp_path / "out"
    fill(target, {**OLD, "notes": b"keep me"})

    def no_links(*args, **kwargs):
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", no_links)
    save(target, replaces=lambda name: name != "notes")
    assert content(target) == {**NEW, "notes": b"keep me"}


def test_a_file_that_the_block_wrote_wins_over_one_to_keep(tmp_path):
    target = tmp_path / "out"
    fill(target, OLD)
    save(target, {"config": b"new"}, replaces=lambda name: False)
    assert content(target) == {"weights": b"old weights", "config": b"new"}


def test_every_file_and_folder_is_synced_before_the_exchange(tmp_path, monkeypatch):
    target, synced = tmp_path / "out", []
    fill(target, OLD)
    true_fsync, true_exchange = os.fsync, atomic._exchange

    def fsync(handle):
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        true_fsync(handle)

    def exchange(a, b):
        assert set(synced) >= {*NEW, "deep", "inner", a.name}
        return true_exchange(a, b)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(atomic, "_exchange", exchange)
    with atomic_folder(target) as new:
        fill(new, NEW)
        fill(new / "deep", {"inner": b"x"})
    assert synced[-1] == tmp_path.name


def test_the_new_folder_has_the_old_ones_permissions(tmp_path):
    target = tmp_path / "out"
    fill(target, OLD)
    target.chmod(0o750)
    save(target)
    assert stat.S_IMODE(target.stat().st_mode) == 0o750


def test_a_symlink_is_kept_and_its_folder_replaced(tmp_path):
    fill(tmp_path / "real", OLD)
    (tmp_path / "out").symlink_to("real")
    save(tmp_path / "out")
    assert (tmp_path / "out").is_symlink()
    assert content(tmp_path / "real") == NEW


def test_a_file_and_a_mount_point_are_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(CheckpointError, match="file: is a file, expected a folder"):
        save(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"mine"
    fill(tmp_path / "out", OLD)
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    with pytest.raises(CheckpointError, match="out: is a mount point"):
        save(tmp_path / "out")
    assert content(tmp_path / "out") == OLD


def test_a_parent_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"file: cannot create a folder there \(File exists\)"):
        save(tmp_path / "file" / "out")


class _Libc:
    """C library whose renameat2 fails with a code, or is missing."""

    def __init__(self, code):
        if code is not None:
            self.renameat2 = lambda *args: ctypes.set_errno(code) or -1


@pytest.mark.parametrize("code", [None, errno.ENOSYS, errno.EINVAL])
def test_two_renames_are_used_where_names_cannot_be_exchanged(tmp_path, monkeypatch, code):
    fill(tmp_path / "out", OLD)
    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **kwargs: _Libc(code))
    save(tmp_path / "out")
    assert content(tmp_path / "out") == NEW
    assert hidden(tmp_path) == []


def test_an_exchange_that_fails_leaves_the_old_folder(tmp_path, monkeypatch):
    fill(tmp_path / "out", OLD)
    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **kwargs: _Libc(errno.EACCES))
    with pytest.raises(PermissionError):
        save(tmp_path / "out")
    assert content(tmp_path / "out") == OLD
    assert hidden(tmp_path) == []


# ---------------------------------------------------------------------------------------------- kills

STEPS = ["write", "fsync", "exchange", "exchanged", "rmtree", "rename", "renamed"]


def run_killed(target, step, count, two_renames):
    """Save in a child that kills itself before the `count`-th call of `step`; return whether it did so."""
    child = os.fork()
    if child == 0:
        calls = 0

        def die_at(function, kind, after=False):
            def wrapped(*args, **kwargs):
                nonlocal calls
                if kind == step and not after:
                    calls += 1
                    if calls == count:
                        os.kill(os.getpid(), signal.SIGKILL)
                result = function(*args, **kwargs)
                if kind == step and after:
                    calls += 1
                    if calls == count:
                        os.kill(os.getpid(), signal.SIGKILL)
                return result

            return wrapped

        os.fsync = die_at(os.fsync, "fsync")
        exchange = (lambda a, b: False) if two_renames else atomic._exchange
        atomic._exchange = die_at(die_at(exchange, "exchange"), "exchanged", after=True)
        atomic.shutil.rmtree = die_at(atomic.shutil.rmtree, "rmtree")
        os.rename = die_at(die_at(os.rename, "rename"), "renamed", after=True)
        write = die_at(lambda path, data: path.write_bytes(data), "write")
        with contextlib.suppress(BaseException), atomic_folder(target) as new:
            for name, data in NEW.items():
                write(new / name, data)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("two_renames", [False, True], ids=["exchange", "two-renames"])
@pytest.mark.parametrize("step", STEPS)
def test_a_kill_at_any_step_leaves_a_complete_folder_and_the_next_save_cleans_up(tmp_path, step, two_renames):
    target, kills = tmp_path / "out", 0
    for count in range(1, 20):
        fill(target, OLD)
        if not run_killed(target, step, count, two_renames):
            break
        kills += 1
        if not two_renames:
            assert content(target) in (OLD, NEW)
        with contextlib.suppress(RuntimeError), atomic_folder(target):
            assert content(target) in (OLD, NEW)  # with two renames the next save restores it first
            raise RuntimeError
        assert hidden(tmp_path) == []
        assert content(target) in (OLD, NEW)
    assert kills > 0 or (step in ("rename", "renamed") and not two_renames)


def test_the_folder_of_a_save_that_is_still_running_is_left_alone(tmp_path):
    with atomic_folder(tmp_path / "out") as first:
        fill(first, OLD)
        save(tmp_path / "out")
        assert content(first) == OLD
        assert content(tmp_path / "out") == NEW
    assert content(tmp_path / "out") == OLD


def test_folders_of_other_targets_are_left_alone(tmp_path):
    (tmp_path / ".other.tmp-012345").mkdir()
    (tmp_path / ".out2.tmp-012345").mkdir()
    save(tmp_path / "out")
    assert sorted(hidden(tmp_path)) == [".other.tmp-012345", ".out2.tmp-012345"]


def test_remains_of_a_killed_save_of_another_target_are_removed_after_an_hour(tmp_path):
    """Otherwise they would stay forever if the next save has another name."""
    stale, recent, locked = (tmp_path / f".other.tmp-{i:012x}" for i in range(3))
    for folder in (stale, recent, locked):
        folder.mkdir()
        fill(folder / "deep", OLD)
    for folder in (stale, locked):
        for path in (*folder.rglob("*"), folder):
            os.utime(path, times=(0, time.time() - 3700))
    os.utime(recent / "deep" / "weights")
    os.utime(recent, times=(0, 0))
    handle = os.open(locked, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    save(tmp_path / "out")
    os.close(handle)
    assert sorted(hidden(tmp_path)) == sorted([recent.name, locked.name])


# ------------------------------------------------------------------------------------- several processes


def in_a_child(program):
    """Run `program` in a forked process; return its id and a pipe that gets a byte when it signals."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            program(lambda: os.write(writing, b"x"))
            code = 0
        os._exit(code)
    os.close(writing)
    return child, reading


def test_one_of_several_processes_writes_and_the_others_wait_for_it(tmp_path):
    target = tmp_path / "out"

    def write(ready):
        with atomic.alone_at(target) as is_writer:
            assert is_writer
            ready()
            time.sleep(0.3)
            save(target)

    child, ready = in_a_child(write)
    os.read(ready, 1)
    with atomic.alone_at(target) as is_writer:
        assert not is_writer
        assert content(target) == NEW
    assert os.waitpid(child, 0)[1] == 0
    with atomic.alone_at(target) as is_writer:
        assert is_writer  # no other process wrote in the meantime
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("killed", [True, False])
def test_the_next_process_takes_over_from_one_that_dies_or_fails(tmp_path, killed):
    target = tmp_path / "out"
    fill(target, OLD)

    def fail(ready):
        with atomic.alone_at(target):
            ready()
            time.sleep(0.2)
            if killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError

    child, ready = in_a_child(fail)
    os.read(ready, 1)
    with atomic.alone_at(target) as is_writer:
        assert is_writer
        save(target)
    os.waitpid(child, 0)
    assert content(target) == NEW
    assert hidden(tmp_path) == []
