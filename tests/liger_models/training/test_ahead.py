"""Making the next while the last is used."""

import threading

import pytest

from liger_models.training.data.ahead import ahead


def test_items_come_in_order_and_the_next_is_made_before_it_is_asked_for():
    made = threading.Semaphore(0)

    def count():
        for i in range(5):
            made.release()
            yield i

    items = ahead(count(), 2)
    assert next(items) == 0
    for _ in range(3):  # the first, and two that wait
        assert made.acquire(timeout=60)
    assert list(items) == [1, 2, 3, 4]


def test_an_error_comes_in_the_place_of_its_item():
    def fail():
        yield from (1, 2)
        raise KeyError("third")

    items = ahead(fail(), 3)
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(KeyError, match="third"):
        next(items)


def test_who_leaves_early_leaves_no_thread():
    items = ahead(iter(range(10**9)))
    assert next(items) == 0
    items.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ahead")]
