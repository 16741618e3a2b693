"""Capacities of the members of a group: their messages to the leader, and its answers.

Names of released requests travel with them: the leader counts on those blocks.
"""

from services.core.planner.state import IterationState
from services.worker.engine.pipeline.configuration import Configuration
from services.worker.engine.pipeline.frames import Capacity, CapacityKept, Credit, Reserve
from services.worker.engine.pipeline.kv_exchange import MemberExchange
from services.worker.engine.pipeline.links import Links
from services.worker.engine.pipeline.stage_runner import StageRunner


class MemberCapacity:
    """One engine's part, as a leader and as a stage."""

    def __init__(
        self, state: IterationState, stage: StageRunner, links: Links, kv: MemberExchange
    ) -> None:
        self._state = state
        self._stage = stage
        self._links = links
        self._kv = kv
        self._configuration: Configuration | None = None
        self._asked: dict[str, Capacity] = {}

    def enter(self, configuration: Configuration) -> None:
        """Begin a configuration."""
        self._configuration = configuration
        self._asked.clear()

    def set(self, peer: str, body: Capacity) -> None:
        """A member reports its blocks; it may ask for an answer when no more are in use."""
        index = self._stage_of(peer)
        if index:
            self._state.set_capacity(index, body.blocks)
            self._asked.pop(peer, None)
            if body.attempt:
                self._asked[peer] = body

    def credit(self, peer: str, body: Credit) -> None:
        """A member has freed blocks of other leaders' requests."""
        self._state.credit(self._stage_of(peer), body.blocks)

    def keep(self) -> None:
        """Answer members that wait until few enough of their blocks are in use."""
        for peer, asked in list(self._asked.items()):
            if self._state.roster.ledger.used[self._stage_of(peer) - 1] <= asked.blocks:
                del self._asked[peer]
                assert self._configuration is not None
                body = CapacityKept(peer, asked.attempt, self._kv.take_released(self._state))
                self._links.send(self._configuration.next_worker, body)

    def pass_on(self, body: Reserve | CapacityKept) -> None:
        """Release the named requests, and pass the names on to the next stages."""
        configuration = self._configuration
        assert configuration is not None
        if body.released:
            with self._stage.lock:
                self._state.table.apply(body.released, ())
                self._kv.forget(body.released)
        if not (configuration.leads or configuration.is_last):
            self._links.send(configuration.next_worker, body)

    def _stage_of(self, worker_id: str) -> int:
        assert self._configuration is not None
        return [stage.worker_id for stage in self._configuration.stages].index(worker_id)
