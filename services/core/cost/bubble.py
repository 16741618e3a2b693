"""Measures pipeline bubbles: the time that the stages of a group lose to waiting.

A stage's bubble is its idle time while some microbatch is in the pipeline (KunServe §4.3: the share
of idle cycles during pipelined execution). Waiting while the pipeline is empty is no bubble. The
*leader* of a group runs the first stage, plans the microbatches and receives their results.
"""

from collections.abc import Sequence as Row
from dataclasses import dataclass, field

Interval = tuple[float, float]
"""Start and end in seconds."""


@dataclass(frozen=True, slots=True)
class StageTime:
    """Accumulated time of a stage in pipelines: running microbatches, and in bubbles."""

    pipeline_busy_s: float = 0.0
    pipeline_bubble_s: float = 0.0


@dataclass(slots=True)
class BubbleMeter:
    """Accumulates the busy and bubble time of a stage, by that stage's own clock.

    The leader measures how long the pipeline was empty, and sends that duration to the other stages
    with each microbatch, so that times of different clocks are never compared. A stage's wait for
    the first microbatch of a configuration is not counted.
    """

    busy_s: float = 0.0
    bubble_s: float = 0.0
    # At the leader: numbers of the microbatches in the pipeline, and when the last of them left it.
    _in_flight: set[int] = field(default_factory=set)
    _vacant_since_s: float | None = None
    # Start of the wait for the next microbatch; None if the wait does not count.
    _idle_since_s: float | None = None

    @property
    def total(self) -> StageTime:
        """Busy and bubble time over all configurations."""
        return StageTime(self.busy_s, self.bubble_s)

    def start_configuration(self) -> None:
        """Start a configuration: the wait for its first microbatch does not count."""
        self._in_flight.clear()
        self._vacant_since_s = self._idle_since_s = None

    def note_launch(self, number: int, now_s: float) -> float:
        """Note at the leader that a microbatch enters; returns how long the pipeline was empty."""
        vacant_s = 0.0
        if not self._in_flight:
            if self._vacant_since_s is not None:
                vacant_s = now_s - self._vacant_since_s
            self._idle_since_s = now_s
        self._in_flight.add(number)
        return vacant_s

    def note_run(self, start_s: float, end_s: float, vacant_s: float = 0.0) -> None:
        """Note that the stage ran a microbatch; the leader sent `vacant_s` with it."""
        if self._idle_since_s is not None:
            self.bubble_s += max(0.0, start_s - self._idle_since_s - vacant_s)
        self.busy_s += end_s - start_s
        self._idle_since_s = end_s

    def note_result(self, number: int, now_s: float) -> None:
        """Note at the leader that a microbatch left the pipeline; unknown numbers are ignored."""
        if number not in self._in_flight:
            return
        self._in_flight.remove(number)
        if not self._in_flight:
            assert self._idle_since_s is not None, "a microbatch in flight was launched"
            # Since its last run this stage idled while later stages ran the microbatch.
            self.bubble_s += now_s - self._idle_since_s
            self._vacant_since_s, self._idle_since_s = now_s, None


def bubble_share(stages: Row[Row[Interval]]) -> float:
    """Mean share of time that a stage idles while microbatches are in the pipeline; 0 without any.

    `stages[s][k]` is the interval in which stage s ran microbatch k. A microbatch is in the
    pipeline from its start at the first stage to its end at the last stage.
    """
    occupied_s, until_s = 0.0, float("-inf")
    for (start_s, _), (_, end_s) in zip(stages[0], stages[-1], strict=True):
        occupied_s += max(0.0, end_s - max(start_s, until_s))
        until_s = max(until_s, end_s)
    busy_s = sum(end_s - start_s for stage in stages for start_s, end_s in stage)
    return 1.0 - busy_s / (len(stages) * occupied_s) if occupied_s else 0.0
