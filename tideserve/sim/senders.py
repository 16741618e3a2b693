"""Clients of a simulated cluster, which send the requests of an open or closed loop."""

from collections.abc import Callable, Iterator

from tideserve.sim.engine import Simulation
from tideserve.sim.workload import Arrival, ClosedLoop, CoServed, OpenLoop, Workload

Send = Callable[[Arrival, bool], None]
"""Takes a request, and whether it belongs to a closed loop."""


class Senders:
    """Sends the requests of a workload.

    An open loop sends at fixed times; each client of a closed loop sends when its last request has
    ended. `over` is called, possibly several times, when the workload has no more requests that
    count.
    """

    def __init__(
        self, simulation: Simulation, workload: Workload, send: Send, over: Callable[[], None]
    ) -> None:
        self._simulation = simulation
        self._send = send
        self._over = over
        self._open: OpenLoop | None = None
        self._closed: ClosedLoop | None = None
        self._running = 0
        match workload:
            case OpenLoop():
                self._open = workload
            case ClosedLoop():
                self._closed = workload
            case CoServed():
                self._open, self._closed = workload.online, workload.batch

    def start(self) -> None:
        """Schedule the first requests."""
        if self._open is not None:
            self._plan_arrival(iter(self._open.arrivals))
        if self._closed is not None:
            self._send_all(self._closed, 0.0)

    def note_end(self, end_s: float) -> None:
        """Take the end of a closed loop's request, of which the client is notified at `end_s`."""
        loop = self._closed
        assert loop is not None
        if not loop.in_batches:
            self._simulation.at(end_s, self._send_next)
            return
        # The next batch starts when the whole batch has ended.
        self._running -= 1
        if not self._running:
            self._send_all(loop, end_s)

    def _send_all(self, loop: ClosedLoop, time_s: float) -> None:
        """Schedule the next request of every client of the loop."""
        self._running = loop.concurrency
        for _ in range(loop.concurrency):
            self._simulation.at(time_s, self._send_next)

    def _plan_arrival(self, arrivals: Iterator[Arrival]) -> None:
        arrival = next(arrivals, None)
        if arrival is None:
            self._over()
        else:
            self._simulation.at(arrival.arrival_s, self._arrive, arrival, arrivals)

    def _arrive(self, arrival: Arrival, later: Iterator[Arrival]) -> None:
        self._send(arrival, False)
        self._plan_arrival(later)

    def _send_next(self) -> None:
        """Send the next request of the closed loop, if any is left."""
        loop = self._closed
        assert loop is not None
        # Requests in flight may end after the duration, but none is sent.
        late = self._simulation.now_s > loop.duration_s
        arrival = None if late else next(loop.requests, None)
        if arrival is not None:
            self._send(arrival, True)
        # Beside an open loop, the open loop's end decides.
        elif self._open is None:
            self._over()
