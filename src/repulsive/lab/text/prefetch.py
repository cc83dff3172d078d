"""Make the batches of the next epoch in the background while the current one is trained on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T]):
    """Call `make(number)`, and start `make(number + 1)` in the background, as it is likely to be needed next.

    Args:
        make: a function that depends on the number alone.
    """

    def __init__(self, make: Callable[[int], T]) -> None:
        self._make = make
        self._pool: ThreadPoolExecutor | None = None
        self._futures: dict[int, Future[T]] = {}

    def __call__(self, number: int) -> T:
        self._futures = {wanted: self._get(wanted) for wanted in (number, number + 1)}
        return self._futures[number].result()

    def _get(self, number: int) -> Future[T]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "batches")
        return self._futures.get(number) or self._pool.submit(self._make, number)
