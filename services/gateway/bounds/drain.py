"""Limits concurrent requests and drains them on shutdown."""

import asyncio
import contextlib
from collections.abc import Iterator

from services.common.timeouts import timeout
from services.core.service import ServiceClass
from services.gateway.bounds.body_budget import RetryEstimator
from services.gateway.bounds.cancel_scope import CancelScope
from services.gateway.vocabulary.errors import QueueFull, ShuttingDown


class RequestSlot:
    """The slot of an in-flight request. Its service class is known once the body is read."""

    def __init__(self, drain: "Drain") -> None:
        self._drain = drain
        self.batch = False

    def set_class(self, service_class: ServiceClass) -> None:
        """Set the request's service class.

        Raises:
            QueueFull: if requests of class `batch` occupy all slots available to the class.
        """
        if service_class is ServiceClass.BATCH and not self.batch:
            self._drain.take_batch()
            self.batch = True


class Drain:
    """Admits requests until the gateway drains.

    Requests of class `batch` may wait for hours. They occupy at most `batch_inflight_max` of the
    `inflight_max` slots, so that they cannot block online requests.

    Shutdown has two steps. First the gateway reports that it is leaving, so that load balancers
    route requests elsewhere, and still accepts requests. Then it drains.
    """

    def __init__(self, inflight_max: int, batch_inflight_max: int | None = None) -> None:
        """`batch_inflight_max` None: no separate limit for `batch`."""
        self._inflight_max = inflight_max
        self._batch_max = inflight_max if batch_inflight_max is None else batch_inflight_max
        self._empty = asyncio.Event()
        self._empty.set()
        self._retry, self._batch_retry = RetryEstimator(), RetryEstimator()
        self.inflight = self.batch_inflight = 0
        # Whether readiness probes fail, so that load balancers send no more requests.
        self.leaving = False
        # Set when the gateway stops accepting requests.
        self.draining_started = asyncio.Event()
        # Requests to cancel at the drain deadline.
        self._running: set[CancelScope] = set()
        self._deadline_passed = False

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self.draining_started.is_set()

    @contextlib.contextmanager
    def enter(self) -> Iterator[RequestSlot]:
        """Occupy a slot while the block runs. Set the slot's class once it is known.

        Raises:
            ShuttingDown: if the gateway is shutting down.
            QueueFull: if all slots are occupied.
        """
        if self.draining:
            raise ShuttingDown("this gateway is shutting down; retry shortly")
        if self.inflight >= self._inflight_max:
            raise QueueFull(
                f"the gateway already serves {self.inflight} requests; retry later",
                retry_after_s=self._retry.count_refusal(),
            )
        self.inflight += 1
        self._empty.clear()
        slot = RequestSlot(self)
        try:
            yield slot
        finally:
            self.inflight -= 1
            self._retry.count_completion()
            if slot.batch:
                self.batch_inflight -= 1
                self._batch_retry.count_completion()
            if self.inflight == 0:
                self._empty.set()

    def take_batch(self) -> None:
        """Count a request of class `batch`; its slot releases the count. Raises QueueFull."""
        if self.batch_inflight >= self._batch_max:
            raise QueueFull(
                f"the gateway already serves {self.batch_inflight} requests of class 'batch';"
                " retry later",
                retry_after_s=self._batch_retry.count_refusal(),
            )
        self.batch_inflight += 1

    @contextlib.contextmanager
    def cancel_on_drain_timeout(self, cancel_scope: CancelScope) -> Iterator[None]:
        """Cancel the block at the drain deadline. Raises ShuttingDown if it has passed."""
        if self._deadline_passed:
            raise _shut_down()
        self._running.add(cancel_scope)
        try:
            yield
        finally:
            self._running.discard(cancel_scope)

    async def leave(self, delay_s: float) -> None:
        """Fail the readiness probes and accept requests for another `delay_s`."""
        self.leaving = True
        await asyncio.sleep(delay_s)

    async def drain(self, timeout_s: float, grace_s: float = 1.0) -> None:
        """Refuse new requests and wait for the running ones.

        Cancels the remaining requests after `timeout_s`; they have another `grace_s` to send the
        error to their clients.
        """
        self.leaving = True
        self.draining_started.set()
        with contextlib.suppress(TimeoutError):
            async with timeout(timeout_s):
                await self._empty.wait()
        self._deadline_passed = True
        for cancel_scope in tuple(self._running):
            cancel_scope.cancel(_shut_down())
        with contextlib.suppress(TimeoutError):
            async with timeout(grace_s):
                await self._empty.wait()


def _shut_down() -> ShuttingDown:
    return ShuttingDown("the gateway shut down before the request completed; retry")
