"""The clock of a simulation: a heap of what is to happen, in order of time, then of planning."""

import heapq
from collections.abc import Callable
from typing import Any

Action = Callable[..., None]


class Simulation:
    """Runs actions at their times; `now_s` stands still while one runs."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events_total = 0
        self._heap: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._planned = 0
        self._stopped = False

    def at(self, time_s: float, action: Action, *arguments: Any) -> None:
        """Plan `action(*arguments)`; a time that has passed means now."""
        self._planned += 1
        heapq.heappush(self._heap, (max(time_s, self.now_s), self._planned, action, arguments))

    def after(self, delay_s: float, action: Action, *arguments: Any) -> None:
        """Plan `action(*arguments)` in `delay_s` seconds."""
        self.at(self.now_s + delay_s, action, *arguments)

    def stop(self) -> None:
        """Let `run` return after the present action."""
        self._stopped = True

    def run(self, until_s: float, check: Callable[[], None] | None = None) -> None:
        """Let time pass until nothing is planned, `stop`, or the next action is after `until_s`.

        `check` is called after every action.
        """
        heap = self._heap
        while heap and not self._stopped and heap[0][0] <= until_s:
            self.now_s, _, action, arguments = heapq.heappop(heap)
            self.events_total += 1
            action(*arguments)
            if check is not None:
                check()
