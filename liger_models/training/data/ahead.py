"""Prefetching of an iterator in a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
_END = object()


def ahead(items: Iterable[T], count: int = 1) -> Generator[T, None, None]:
    """Yield the items in order, computing up to `count` ahead.

    One thread computes them all; it ends with the last item or when the generator is closed. Its exceptions
    are raised here, at their position.
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
