"""Drains a configuration that ends: waits until no microbatch of it is in flight."""

import logging
from collections.abc import Callable

from services.core.planner.state import IterationState
from services.worker.engine.pipeline.configuration import Configuration
from services.worker.engine.pipeline.frames import Drained
from services.worker.engine.pipeline.handover import Handover
from services.worker.engine.pipeline.links import Links
from services.worker.engine.pipeline.stage_runner import StageRunner

DRAIN_TIMEOUT_S = 5.0
"""After it, a leader gives up what is in flight."""
DRAINED_TIMEOUT_S = 20.0
"""After it, a stage gives its leader up: longer than a leader that lives can take, even one that
hears of the change late, since only the leader knows which requests' blocks are to be freed."""

log = logging.getLogger(__name__)


class Draining:
    """One engine's part; `over` once the leader has said that all is drained."""

    def __init__(
        self,
        state: IterationState,
        stage: StageRunner,
        links: Links,
        handover: Handover,
        now_s: Callable[[], float],
    ) -> None:
        self.over = False
        self._state = state
        self._stage = stage
        self._links = links
        self._handover = handover
        self._now_s = now_s
        self._until_s = 0.0

    def begin(self, present: Configuration | None) -> None:
        """The present configuration ends."""
        leads = present is None or present.leads
        self._until_s = self._now_s() + (DRAIN_TIMEOUT_S if leads else DRAINED_TIMEOUT_S)

    def enter(self) -> None:
        """Another configuration has begun."""
        self.over = False

    def note(self, present: Configuration, body: Drained) -> None:
        """The leader says so: what it has released is free, and what still comes is given up.

        From stage to stage, as microbatches go: none is behind it, so that every stage has the
        blocks of all that were ever launched.
        """
        with self._stage.lock:
            self._state.table.apply(body.released, ())
        self.over = True
        if not present.is_last:
            self._links.send(present.next_worker, body)

    def is_done(self, present: Configuration | None, at_once: bool) -> bool:
        """Whether the present configuration can be left; its leader tells its stages then.

        `at_once`: a member was lost, and nothing comes back.
        """
        late = at_once or self._now_s() > self._until_s
        if not late and self._expects(present):
            return False
        self._end(present)
        return True

    def _expects(self, present: Configuration | None) -> bool:
        """Whether something has yet to come."""
        if not self._handover.settled:
            return True
        if present is None or present.leads:
            return bool(self._state.in_flight)
        return not self.over

    def _end(self, present: Configuration | None) -> None:
        """Free all that this configuration does not pass on, and tell its other stages.

        Only now: the next configuration has other stages, whose leader is told how many blocks
        this one uses.
        """
        leads = present is None or present.leads
        if present is not None and not leads and not self.over:
            log.warning("%s did not say that all is drained", present.leader)
        if self._state.in_flight:
            log.warning("microbatches in flight did not come back in time; they run again")
            self._state.discard_in_flight()
        with self._stage.lock:
            self._handover.end_given_up()
            released = self._state.end_configuration()
        if present is not None and leads and len(present.stages) > 1:
            self._links.send(present.next_worker, Drained(released))
