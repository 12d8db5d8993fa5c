"""Run tests in processes forked from the one that has collected them: `pytest -n 4 --dist worksteal`, on
Linux without a GPU. Each of pytest-xdist's processes would import all libraries and collect all tests again.

Each process has a part of the tests in their order, since neighbours use the same models and libraries. One
that has no more takes half of what the slowest has left.
"""

from __future__ import annotations

import gc
import io
import multiprocessing
import multiprocessing.util
import os
import sys
import warnings
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch

MANY = 2000
"""From this number of tests on, most of the reference's models are used, and imported before the forks."""


def fork_in_place_of_xdist(config: pytest.Config) -> None:
    """Let forks run the tests if `-n` and `--dist worksteal` ask for processes and a fork is safe: CUDA does
    not survive one, and neither do macOS's libraries.
    """
    count = getattr(config.option, "numprocesses", None)
    wanted = isinstance(count, int) and count > 1 and config.option.dist == "worksteal"
    if wanted and sys.platform == "linux" and not config.option.usepdb and not torch.cuda.is_available():
        config.option.numprocesses, config.option.dist = None, "no"
        torch.set_num_threads(1)  # a pool of threads would not survive, either
        config.pluginmanager.register(Forks(count), "forks")


class Forks:
    """Plugin of the process that collects."""

    def __init__(self, count: int) -> None:
        self.count = count

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly or len(session.items) < 2 * self.count:
            return None  # as pytest does
        if len(session.items) > MANY:
            import_references()
        session.config._tmp_path_factory.getbasetemp()
        gc.collect()
        gc.freeze()  # collections would copy the pages of what the processes share
        count, total = self.count, len(session.items)
        parts = [range(i * total // count, (i + 1) * total // count) for i in range(count)]
        workers: list[Worker] = []
        try:
            for part in parts:
                workers.append(Worker(session, deque(part), workers))
                workers[-1].start()
            while running := {worker.connection: worker for worker in workers if worker.given}:
                for connection in wait(list(running)):
                    running[connection].take()
                    if session.shouldfail:
                        raise session.Failed(session.shouldfail)
                    if session.shouldstop:
                        raise session.Interrupted(session.shouldstop)
            for worker in workers:
                worker.process.join()
        finally:
            for worker in workers:
                worker.process.kill()
        return True


def import_references() -> None:
    """Import transformers' classes of all families."""
    try:
        import liger_models.hf
    except ImportError:  # it is not installed
        return
    liger_models.hf.register()
    liger_models.hf.unregister()


class Worker:
    """A process that runs tests, as the process that forked it sees it."""

    def __init__(self, session: pytest.Session, part: deque[int], workers: list[Worker]) -> None:
        self.session, self.part, self.workers, self.number = session, part, workers, len(workers)
        self.given: deque[int] = (
            deque()
        )  # the test that runs, and the next: pytest keeps the fixtures of both

    def start(self) -> None:
        context = multiprocessing.get_context("fork")
        self.connection, other = context.Pipe()
        ends = [worker.connection for worker in self.workers]
        self.process = context.Process(target=run_tests, args=(self.session, self.number, other, ends))
        self.process.start()
        other.close()
        self.given.clear()
        for _ in range(2):
            self.give()

    def give(self) -> None:
        """Send the number of the next test, or None if there is no other."""
        if not self.part:
            slowest = max(self.workers, key=lambda other: len(other.part))
            stolen = [slowest.part.pop() for _ in range((len(slowest.part) + 1) // 2)]
            self.part.extend(reversed(stolen))
        number = self.part.popleft() if self.part else None
        self.connection.send(number)
        if number is not None:
            self.given.append(number)

    def take(self) -> None:
        """Report the test that has run, or that ended the process, which is then started again."""
        item, hook = self.session.items[self.given[0]], self.session.config.hook
        try:
            reports, caught = self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            self.connection.close()
            what = f"the process of {item.nodeid} ended with {self.process.exitcode}"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", what, "call")
            hook.pytest_runtest_logreport(report=report)
            self.given.popleft()
            self.part.extendleft(self.given)
            if self.part:
                self.start()
            else:
                self.given.clear()
            return
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for data in reports:
            report = hook.pytest_report_from_serializable(config=self.session.config, data=data)
            hook.pytest_runtest_logreport(report=report)
        for (message, kind, *place), rest in caught:
            warning = warnings.WarningMessage(message, type(kind, (Warning,), {}), *place)
            hook.pytest_warning_recorded.call_historic(kwargs={"warning_message": warning, **rest})
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        self.given.popleft()
        self.give()


class Notes:
    """Plugin of a process that runs tests: what is sent of each."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.reports, self.caught = config, [], []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.reports.append(data)

    def pytest_warning_recorded(self, warning_message: Any, when: str, nodeid: str, location: Any) -> None:
        """Keep what is printed of it: its message and class may be ones that only this process has."""
        kind = warning_message.category.__name__
        printed = str(warning_message.message), kind, warning_message.filename, warning_message.lineno
        self.caught.append((printed, {"when": when, "nodeid": nodeid, "location": location}))

    def take(self) -> tuple[list[Any], list[Any]]:
        noted, self.reports, self.caught = (self.reports, self.caught), [], []
        return noted


def run_tests(session: pytest.Session, number: int, connection: Connection, ends: list[Connection]) -> None:
    """Run the tests whose numbers come through a connection, and send back their reports."""
    for end in ends:  # so that each process notices the end of the one that forked it
        end.close()
    try:
        prepare(session.config, number)
        notes = Notes(session.config)
        session.config.pluginmanager.register(notes)
        notes.take()  # the warnings of the collection
        for item, following in with_next(session.items, connection):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            connection.send(notes.take())
        multiprocessing.util._exit_function()
        os._exit(0)
    except KeyboardInterrupt:
        os._exit(1)


def with_next(items: list[pytest.Item], connection: Connection) -> Iterator[tuple[Any, Any]]:
    try:
        number = connection.recv()
        while number is not None:
            following = connection.recv()
            yield items[number], None if following is None else items[following]
            number = following
    except EOFError:  # as after Ctrl-C
        return


def prepare(config: pytest.Config, number: int) -> None:
    """Replace what this process shares with others: pytest's files of captured output, its terminal, and its
    temporary folder.
    """
    capture = config.pluginmanager.get_plugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    config.get_terminal_writer()._file = io.StringIO()
    factory = config._tmp_path_factory
    factory._basetemp = factory.getbasetemp() / f"process{number}"
    factory._basetemp.mkdir(mode=0o700, exist_ok=True)
