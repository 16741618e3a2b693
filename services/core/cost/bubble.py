"""How much of the time of a pipeline's stages is lost to waiting.

A stage's bubble is its idle time while a microbatch is anywhere in the pipeline (KunServe §4.3: the
share of idle cycles during pipelined execution). Without a microbatch there is no work, and waiting
for work is no bubble.
"""

from collections.abc import Sequence as Row
from dataclasses import dataclass, field

Interval = tuple[float, float]
"""Start and end in seconds."""


@dataclass(frozen=True, slots=True)
class StageTime:
    """What a stage has spent in pipelines so far: running microbatches, and in bubbles."""

    pipeline_busy_s: float = 0.0
    pipeline_bubble_s: float = 0.0


@dataclass(slots=True)
class BubbleMeter:
    """Adds up one stage's time from what that stage sees with its own clock.

    The leader knows when the pipeline is vacant: nothing is in flight. It tells the others with
    each microbatch how long that was, so no clocks are compared. Their wait for the first
    microbatch of a configuration, before which they know nothing, is left out.
    """

    busy_s: float = 0.0
    bubble_s: float = 0.0
    _in_flight: set[int] = field(default_factory=set)
    _vacant_since_s: float | None = None
    _idle_since_s: float | None = None

    @property
    def total(self) -> StageTime:
        """The sum over all configurations."""
        return StageTime(self.busy_s, self.bubble_s)

    def enter(self) -> None:
        """A configuration begins: waiting before it belongs to no pipeline."""
        self._in_flight.clear()
        self._vacant_since_s = self._idle_since_s = None

    def launched(self, number: int, now_s: float) -> float:
        """At the leader, a microbatch enters; returns for how long before it there was none."""
        vacant_s = 0.0
        if not self._in_flight:
            if self._vacant_since_s is not None:
                vacant_s = now_s - self._vacant_since_s
            self._idle_since_s = now_s
        self._in_flight.add(number)
        return vacant_s

    def ran(self, start_s: float, end_s: float, vacant_s: float = 0.0) -> None:
        """The stage has run a microbatch; a later stage was told `vacant_s` with it."""
        if self._idle_since_s is not None:
            self.bubble_s += max(0.0, start_s - self._idle_since_s - vacant_s)
        self.busy_s += end_s - start_s
        self._idle_since_s = end_s

    def finished(self, number: int, now_s: float) -> None:
        """At the leader, the result of a microbatch is here; unknown numbers are ignored."""
        if number not in self._in_flight:
            return
        self._in_flight.remove(number)
        if not self._in_flight:
            assert self._idle_since_s is not None, "it was launched"
            self.bubble_s += now_s - self._idle_since_s
            self._vacant_since_s, self._idle_since_s = now_s, None


def bubble_share(stages: Row[Row[Interval]]) -> float:
    """Idle time of the stages over their time while a microbatch is anywhere between them.

    `stages[s][k]` is when stage s ran microbatch k. A microbatch is in the pipeline from its start
    at the first stage to its end at the last. Time without a microbatch is no bubble. 0 without
    any.
    """
    occupied_s, until_s = 0.0, float("-inf")
    for (start_s, _), (_, end_s) in zip(stages[0], stages[-1], strict=True):
        occupied_s += max(0.0, end_s - max(start_s, until_s))
        until_s = max(until_s, end_s)
    busy_s = sum(end_s - start_s for stage in stages for start_s, end_s in stage)
    return 1.0 - busy_s / (len(stages) * occupied_s) if occupied_s else 0.0
