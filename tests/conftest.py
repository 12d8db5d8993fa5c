"""GPU tests are skipped where there is no GPU; Triton's interpreter can run the kernels instead.

The interpreter must be asked for before Triton is first imported, hence here. It changes nothing by itself:
kernels run in it only inside `liger_models.kernels._dispatch.interpret()`, all else runs the plain twins.
"""

import contextlib
import gc
import os
import re
import signal
import sys
import time
import types
from pathlib import Path

import pytest
import torch


def patch_triton_once():
    """At every launch, and at every call of a function within a kernel, the interpreter looks through all of
    triton.language for what it must replace, and in the end puts all back: half of the time of a small
    kernel. Here nothing is compiled, and once for each module of kernels will do.
    """
    from triton.runtime import interpreter

    patch_lang, patched = interpreter._patch_lang, set()

    def patch(function):
        if id(function.__globals__) not in patched:
            patched.add(id(function.__globals__))
            patch_lang(function)
        return types.SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch


if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    with contextlib.suppress(ImportError):
        patch_triton_once()

sys.path.append(str(Path(__file__).parent))  # for support_table, which lies beside it


def pytest_addoption(parser):
    parser.addoption(
        "--write-support-table",
        action="store_true",
        help="write the table of docs/frameworks.md after the tests that are marked `supports`",
    )
    parser.addoption("--real-model", metavar="FOLDER", help="run the tests marked `real` with this model")


def pytest_configure(config):
    if config.getoption("--write-support-table") and not hasattr(config, "workerinput"):
        from support_table import TableWriter

        config.pluginmanager.register(TableWriter())


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--real-model"):
        left_out = [item for item in items if item.get_closest_marker("real")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    for item in items:
        # A test's properties, unlike its markers, come back from the processes of xdist.
        item.user_properties += [("supports", mark.args) for mark in item.iter_markers("supports")]
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish():
    """What is there by now lives to the end. Whoever collects garbage from here on, as accelerate does after
    every run, need not look through it.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    """Let the interpreter free it all at exit: nanobind would list Triton's objects as leaks."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tensors of a few hundred elements gain nothing from a second thread, and wait for it. Some runs ask for
    more, since the order of sums is another with them (tests/matrix.py).
    """
    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    yield
    torch.set_num_threads(before)


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
    """`with within_a_second():` holds what stands in it to one second of the processor and 200 MB."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("only Linux tells the peak of a process's memory")
    return _within_a_second


@contextlib.contextmanager
def _within_a_second():
    """One second of the processor, of which a busy machine needs no more, 200 MB, and no waiting at all."""

    def peak(reset=False):
        if reset:
            Path("/proc/self/clear_refs").write_text("5")  # the peak becomes what is in use now
        return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024

    def waits(*_):
        raise AssertionError("waited for a file")

    handler = signal.signal(signal.SIGALRM, waits)
    signal.alarm(120)  # a busy machine may take long for a second of work; a pipe nobody writes to, for ever
    before, started = peak(reset=True), time.process_time()
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
    assert time.process_time() - started < 1
    assert peak() - before < 200
