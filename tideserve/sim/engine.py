"""Discrete-event engine: a heap of scheduled actions, ordered by time, then by scheduling order."""

import heapq
from collections.abc import Callable
from typing import Any

Action = Callable[..., None]


class Simulation:
    """Runs scheduled actions; `now_s` is constant while an action runs."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events_total = 0
        self._heap: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._scheduled = 0
        self._stopped = False

    def at(self, time_s: float, action: Action, *arguments: Any) -> None:
        """Schedule `action(*arguments)`; a time in the past means now."""
        self._scheduled += 1
        # The counter makes the order of simultaneous actions deterministic.
        heapq.heappush(self._heap, (max(time_s, self.now_s), self._scheduled, action, arguments))

    def after(self, delay_s: float, action: Action, *arguments: Any) -> None:
        """Schedule `action(*arguments)` in `delay_s` seconds."""
        self.at(self.now_s + delay_s, action, *arguments)

    def stop(self) -> None:
        """Make `run` return after the current action."""
        self._stopped = True

    def run(self, until_s: float, check: Callable[[], None] | None = None) -> None:
        """Run actions until none is scheduled up to `until_s`, or until `stop`.

        `check` is called after every action.
        """
        heap = self._heap
        while heap and not self._stopped and heap[0][0] <= until_s:
            self.now_s, _, action, arguments = heapq.heappop(heap)
            self.events_total += 1
            action(*arguments)
            if check is not None:
                check()
