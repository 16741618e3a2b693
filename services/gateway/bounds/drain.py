"""Counting requests in and out, and ending them at shutdown."""

import asyncio
import contextlib
from collections.abc import Iterator

from services.common.timeouts import timeout
from services.core.service import ServiceClass
from services.gateway.bounds.body_budget import RetryEstimator
from services.gateway.bounds.interruption import Interruption
from services.gateway.vocabulary.errors import QueueFull, ShuttingDown


class RequestPlace:
    """One request in the gateway, of which the class is known only once its body is read."""

    def __init__(self, drain: "Drain") -> None:
        self._drain = drain
        self.batch = False

    def hold(self, service_class: ServiceClass) -> None:
        """Hold the place on as a request of this class.

        Raises:
            QueueFull: if requests of class `batch` have as many places as they may have.
        """
        if service_class is ServiceClass.BATCH and not self.batch:
            self._drain.take_batch()
            self.batch = True


class Drain:
    """Admits requests to the gateway until it drains.

    At most `batch_inflight_max` of the `inflight_max` places are for requests of class `batch`,
    which may wait for hours, so that they never keep online ones out.

    The gateway stops in two steps. First it says that it leaves, so that load balancers send
    requests elsewhere, and still takes requests; then it drains.
    """

    def __init__(self, inflight_max: int, batch_inflight_max: int | None = None) -> None:
        """Without `batch_inflight_max` there is no bound for `batch` alone."""
        self._inflight_max = inflight_max
        self._batch_max = inflight_max if batch_inflight_max is None else batch_inflight_max
        self._empty = asyncio.Event()
        self._empty.set()
        self._retry, self._batch_retry = RetryEstimator(), RetryEstimator()
        self.inflight = self.batch_inflight = 0
        # Load balancers are told to send nothing here any more.
        self.leaving = False
        # Set once no requests are taken any more.
        self.began = asyncio.Event()
        # These are interrupted when the time for draining is over; `_cut`: it is over.
        self._running: set[Interruption] = set()
        self._cut = False

    @property
    def draining(self) -> bool:
        """Whether no requests are taken any more."""
        return self.began.is_set()

    @contextlib.contextmanager
    def enter(self) -> Iterator[RequestPlace]:
        """Count one request in, and out at the end; its place is to be told its class.

        Raises:
            ShuttingDown: if the gateway is shutting down.
            QueueFull: if the gateway has as many requests as it takes.
        """
        if self.draining:
            raise ShuttingDown("this gateway is shutting down; send the request again shortly")
        if self.inflight >= self._inflight_max:
            raise QueueFull(
                f"the gateway has {self.inflight} requests already; try again later",
                retry_after_s=self._retry.refuse(),
            )
        self.inflight += 1
        self._empty.clear()
        place = RequestPlace(self)
        try:
            yield place
        finally:
            self.inflight -= 1
            self._retry.leave()
            if place.batch:
                self.batch_inflight -= 1
                self._batch_retry.leave()
            if self.inflight == 0:
                self._empty.set()

    def take_batch(self) -> None:
        """Count a request of class `batch`; its place counts it out. Raises QueueFull."""
        if self.batch_inflight >= self._batch_max:
            raise QueueFull(
                f"the gateway has {self.batch_inflight} requests of class 'batch' already; try"
                " again later",
                retry_after_s=self._batch_retry.refuse(),
            )
        self.batch_inflight += 1

    @contextlib.contextmanager
    def cuts(self, interruption: Interruption) -> Iterator[None]:
        """Interrupt the block when the time for draining is over; raises if it is over already."""
        if self._cut:
            raise _shut_down()
        self._running.add(interruption)
        try:
            yield
        finally:
            self._running.discard(interruption)

    async def leave(self, delay_s: float) -> None:
        """Say that this gateway leaves, and take requests for another `delay_s`."""
        self.leaving = True
        await asyncio.sleep(delay_s)

    async def drain(self, timeout_s: float, grace_s: float = 1.0) -> None:
        """Refuse new requests; return when none is left, at the latest after both times.

        After `timeout_s` the rest is told to end, and has `grace_s` to tell its clients.
        """
        self.leaving = True
        self.began.set()
        with contextlib.suppress(TimeoutError):
            async with timeout(timeout_s):
                await self._empty.wait()
        self._cut = True
        for interruption in tuple(self._running):
            interruption.interrupt(_shut_down())
        with contextlib.suppress(TimeoutError):
            async with timeout(grace_s):
                await self._empty.wait()


def _shut_down() -> ShuttingDown:
    return ShuttingDown("the gateway was shut down before the request ended; send it again")
