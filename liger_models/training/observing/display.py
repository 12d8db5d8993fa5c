"""Progress of a run on stderr: bars in a terminal, lines with a timestamp elsewhere."""

from __future__ import annotations

import contextlib
import datetime
import sys
import time
from collections.abc import Callable, Iterator

from liger_models.convert.progress import ProgressBar

INTERVAL = 30.0  # seconds between the lines of an evaluation


def timestamp() -> str:
    """The time as in records and lines: 2026-11-24T12:00:00Z."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Display:
    """A context manager that shows steps and evaluations.

    Args:
        shown: False shows nothing: one process of several reports.
        total, done: steps of the run, and steps taken before.
        every: steps between lines, where stderr is not a terminal. The first and the last step have one, too.
    """

    def __init__(self, shown: bool, total: int, done: int = 0, every: int = 10) -> None:
        self.shown, self.terminal = shown, sys.stderr.isatty()
        self.total, self.first, self.every = total, done + 1, every
        self.started = 0.0  # when the first step ended

    def __enter__(self) -> Display:
        # The text next to the bar says more than the bar, and the terminal's width limits both.
        layout = "{n_fmt}/{total_fmt} |{bar:10}| {elapsed}<{remaining}{postfix}"
        self._bar = ProgressBar(
            total=self.total,
            initial=self.first - 1,
            disable=not (self.shown and self.terminal),
            bar_format=layout,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def step(self, number: int, text: str) -> None:
        """Show that a step was taken."""
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update()
        if number == self.first:
            self.started = time.monotonic()
        if number % self.every and number not in (self.first, self.total):
            return
        left = ""
        if self.first < number < self.total:
            each = (time.monotonic() - self.started) / (number - self.first)
            left = f", {datetime.timedelta(seconds=round(each * (self.total - number)))} left"
        self._line(f"step {number:,} of {self.total:,}{left}: {text}")

    @contextlib.contextmanager
    def evaluation(self, batches: int) -> Iterator[Callable[[], None]]:
        """Show the progress of an evaluation; yields a function to call after each batch."""
        count, said = 0, time.monotonic()
        shown = self.shown and self.terminal
        with ProgressBar(
            total=batches, desc="evaluation", unit="batch", leave=False, disable=not shown
        ) as bar:

            def advance() -> None:
                nonlocal count, said
                count += 1
                bar.update()
                if time.monotonic() - said >= INTERVAL:
                    said = time.monotonic()
                    self._line(f"evaluation: {count:,} of {batches:,} batches")

            yield advance

    def _line(self, text: str) -> None:
        if self.shown and not self.terminal:
            print(f"{timestamp()} {text}", file=sys.stderr, flush=True)
