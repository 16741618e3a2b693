"""Bounds the small frames of clients, which cost the gateway more than their bytes."""

import asyncio
from collections.abc import Callable

from services.common.clock import monotonic_s

STEPS_PER_S = 20_000.0
"""See `HeaderBlocks.steps`; 512 KiB of them take about 10 ms of each second of the loop."""
BURST_STEPS = 4_000.0
READ_STEPS = 32
"""Steps of a read that cost no more than the read itself: they are not counted."""


class FrameBudget:
    """The steps of an address's connections, as a token bucket.

    Connections wait in their order; each reads nothing more while it waits.
    """

    def __init__(self) -> None:
        self._steps = BURST_STEPS
        self._updated_s = monotonic_s()
        self._waiting: dict[object, Callable[[], None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def available(self) -> bool:
        """Whether a connection may spend steps now."""
        return not self._waiting and self._refill() > 0

    def spend(self, steps: int) -> None:
        """Count steps; the budget may become negative."""
        self._steps -= steps

    def wait(self, connection: object, proceed: Callable[[], None]) -> None:
        """Call `proceed` once, when the connection may spend steps."""
        self._waiting[connection] = proceed
        self._start_timer()

    def forget(self, connection: object) -> None:
        """Remove a connection that has ended."""
        self._waiting.pop(connection, None)

    def _refill(self) -> float:
        now_s = monotonic_s()
        earned = (now_s - self._updated_s) * STEPS_PER_S
        self._steps, self._updated_s = min(BURST_STEPS, self._steps + earned), now_s
        return self._steps

    def _start_timer(self) -> None:
        if self._timer is None:
            delay_s = max(0.0, (1 - self._refill()) / STEPS_PER_S)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._proceed)

    def _proceed(self) -> None:
        """Let the first connections go on while there are steps."""
        self._timer = None
        # Each connection goes on once, at most: it may wait again, for another turn of the loop.
        for connection in list(self._waiting):
            if self._refill() <= 0:
                break
            self._waiting.pop(connection)()
        if self._waiting:
            self._start_timer()
