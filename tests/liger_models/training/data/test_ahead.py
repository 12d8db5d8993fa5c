"""Items are prepared in a thread while the previous one is in use."""

import itertools
import threading
from types import SimpleNamespace

import pytest
import torch

from liger_models.training.data.ahead import ahead
from liger_models.training.data.steps import read_steps


def test_items_come_in_order_and_the_next_is_prepared_in_advance():
    made = threading.Semaphore(0)

    def count():
        for i in range(5):
            made.release()
            yield i

    items = ahead(count(), 2)
    assert next(items) == 0
    for _ in range(3):  # the first, and two in the queue
        assert made.acquire(timeout=60)
    assert list(items) == [1, 2, 3, 4]


def test_an_error_is_raised_in_place_of_its_item():
    def fail():
        yield from (1, 2)
        raise KeyError("third")

    items = ahead(fail(), 3)
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(KeyError, match="third"):
        next(items)


def test_an_early_exit_leaves_no_thread():
    items = ahead(iter(range(10**9)))
    assert next(items) == 0
    items.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ahead")]


def test_reading_for_a_gpu_does_not_change_any_threads_device(monkeypatch):
    """Data are read in one thread and closed in another, which may be using a different GPU."""
    chosen = []

    class Choice:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            chosen.append(self.device)

        def __exit__(self, *_):
            chosen.pop()

    monkeypatch.setattr(torch.cuda, "device", Choice)
    second = torch.device("cuda", 1)
    documents = SimpleNamespace(
        batch=lambda rows: SimpleNamespace(pinned=lambda: list(chosen)),
        count=lambda rows: None,
        have_images=lambda rows: False,
    )
    stream = SimpleNamespace(documents=documents, take=lambda count: [0] * count, position=None)
    for step in itertools.islice(read_steps(stream, 1, 2, 0, 1, second), 2):
        assert step.batches == [[second], [second]]
        assert not chosen
