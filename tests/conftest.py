"""Shared fixtures. GPU tests are skipped without a GPU; Triton's interpreter can run the kernels instead.

The interpreter must be enabled before Triton is first imported, hence here. Kernels run in it only inside
`liger_models.kernels._dispatch.interpret()`; all other code runs the plain twins.
"""

import atexit
import contextlib
import gc
import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))  # for interpreter, and for others in this folder

import interpreter
from fake_timm import fake_timm
from night import register_night
from older import skip_other_releases
from preloaded import SERVER, command, start_server
from ranks import use_threads_of_tests
from rewriting import rewrite_for_all

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    interpreter.prepare()

from liger_models.training import loop
from liger_models.training.observing.curves import plot_losses


def pytest_addoption(parser):
    parser.addoption(
        "--write-support-table",
        action="store_true",
        help="write the table of docs/frameworks.md after the tests that are marked `supports`",
    )
    parser.addoption(
        "--all-families",
        action="store_true",
        help="run the tests marked `of_layers` for all families, and the cases that night/ leaves out",
    )
    parser.addoption("--notebooks", action="store_true", help="run all notebooks, not only two")
    parser.addoption("--real-model", metavar="FOLDER", help="run the tests marked `real` with this model")


def pytest_configure(config):
    if config.getoption("--write-support-table") and not hasattr(config, "workerinput"):
        from support_table import TableWriter

        config.pluginmanager.register(TableWriter())
    if getattr(config.option, "numprocesses", None):
        start_server()
        rewrite_for_all(config)
    register_night(config)
    if hasattr(config, "workerinput"):  # to free the objects of all libraries one by one takes seconds
        atexit.register(os._exit, 0)  # after what is registered later


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs):
    if SERVER in os.environ:
        for spec in specs:
            spec.python = shlex.join(command(os.environ[SERVER]))


@pytest.hookimpl(tryfirst=True)  # before `-k` and markers leave out cases
def pytest_collection_modifyitems(config, items):
    skip_other_releases(items)
    if not config.getoption("--real-model"):
        left_out = [item for item in items if item.get_closest_marker("real")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    if hasattr(config, "workerinput"):
        put_forks_first(items)
    for item in items:
        # xdist workers return a test's properties, but not its markers.
        item.user_properties += [("supports", mark.args) for mark in item.iter_markers("supports")]
    if torch.cuda.is_available():
        return
    for_gpus = [item for item in items if item.get_closest_marker("gpu")]
    if hasattr(config, "workerinput"):  # to skip a sixth of the tests, each reported by itself, takes seconds
        config.hook.pytest_deselected(items=for_gpus)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    for item in for_gpus:
        item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


FORKS = {"run_ranks", "Fork", "fork_server"}, {"forked_jobs", "forked_command", "forked_ranks"}
"""What tests that fork have of ranks.py, and the fixtures that do."""


def put_forks_first(items):
    """Run files that fork from the servers of ranks.py first. Few of the test processes have them then, each
    of which would import torch and transformers once more for its servers. The longest tests are not last.
    """
    names, fixtures = FORKS
    forking = {
        item.path for item in items if names & vars(item.module).keys() or fixtures & set(item.fixturenames)
    }
    items.sort(key=lambda item: item.path not in forking)


def pytest_sessionstart():
    gc.set_threshold(10_000, 20, 20)  # collections of a model's many small objects took 3% of the time


@pytest.fixture(scope="module", autouse=True)
def frozen_heap():
    """Freeze existing objects, so that garbage collections in a module's tests, such as accelerate's, skip
    the libraries and cached models of other modules.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    """Freeze all objects, so that pytest, which collects garbage five times when it ends, has none to look
    at. Unfreeze them before exit, since nanobind would report Triton's as leaks.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Use one thread, which is faster for tiny tensors. Some runs ask for more, to change the order of sums
    (tests/matrix.py); processes that tests start then use as many, since their bits are compared.
    """
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
        use_threads_of_tests()
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def no_seeds_for_absent_gpus():
    """`torch.manual_seed` notes a seed for GPUs that are not there, with the formatted stack of the call,
    which takes most of its time.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module in (torch.cuda, torch.xpu):
            if not module.is_available():
                patch.setattr(module, "manual_seed_all", lambda seed: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_disks():
    """No test cuts the power, so files need not have reached a disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_curves():
    """Leave out the picture of a run's curves, half of the time of a tiny run, as ranks.py does in forks.
    Tests of the picture ask for `curves`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "plot_losses", lambda *_: False)
        yield


@pytest.fixture
def curves(monkeypatch):
    """Draw the picture at the end of a run."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(loop, "plot_losses", plot_losses)


@pytest.fixture
def interpreted():
    """Run the kernels in Triton's interpreter, on a CPU."""
    if torch.cuda.is_available():
        pytest.skip("on this machine the kernels are compiled: the gpu tests run them")
    from liger_models.kernels._dispatch import interpret

    with interpret():
        yield


@pytest.fixture
def within_a_second():
    """Context manager that limits its body to one second of CPU time and 200 MB."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("only Linux tells the peak of a process's memory")
    return _within_a_second


@contextlib.contextmanager
def _within_a_second():
    """Limit CPU time to one second, which does not depend on the machine's load, and memory to 200 MB."""

    def peak(reset=False):
        if reset:
            Path("/proc/self/clear_refs").write_text("5")  # reset the peak to current use
        return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024

    def waits(*_):
        raise AssertionError("waited for a file")

    handler = signal.signal(signal.SIGALRM, waits)
    signal.alarm(120)  # generous on a busy machine, but ends a read from an idle pipe
    before, started = peak(reset=True), time.process_time()
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
    assert time.process_time() - started < 1
    assert peak() - before < 200


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item):
    """Return the GPU memory that a test's process no longer uses: several processes may share the GPU."""
    yield
    if item.get_closest_marker("gpu") and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def timm(request):
    """A stand-in for that package, in tests of the family whose reference needs it."""
    needed = re.search(r"gemma3n(?!_text)", request.node.name)
    with fake_timm() if needed else contextlib.nullcontext():
        yield
