"""The batches of the next epoch, made while this one is learned."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """Calls `make(number)`, and in the background `make(number + 1)`, which is likely to be asked for next.

    Args:
        make: a function of the number alone.
    """

    def __init__(self, make: Callable[[int], T]) -> None:
        self._make = make
        self._pool: ThreadPoolExecutor | None = None
        self._known: dict[int, Future[T]] = {}

    def __call__(self, number: int) -> T:
        self._known = {wanted: self._get(wanted) for wanted in (number, number + 1)}
        return self._known[number].result()

    def _get(self, number: int) -> Future[T]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "batches")
        return self._known.get(number) or self._pool.submit(self._make, number)
