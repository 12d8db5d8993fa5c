"""What comes next is made in a thread, while the last is used."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
_END = object()


def ahead(items: Iterable[T], count: int = 1) -> Generator[T, None, None]:
    """The items, in their order, of which up to `count` are made before they are asked for.

    All are made by one thread, one after another, which ends with the last, or when this is closed. What it
    raises is raised here, in its place.
    """
    iterator = iter(items)
    waiting: deque[Future] = deque()
    with ThreadPoolExecutor(1, "ahead") as pool:
        try:
            for _ in range(count):
                waiting.append(pool.submit(next, iterator, _END))
            while (item := waiting.popleft().result()) is not _END:
                waiting.append(pool.submit(next, iterator, _END))
                yield item
        finally:
            for future in waiting:
                future.cancel()
