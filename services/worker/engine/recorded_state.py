"""A planner that logs its events, the changes made to it, and its decisions.

So the log can be replayed. Only what comes from outside is written: what a call does to the
planner's own table follows from it.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from services.common.event_log import EventLog
from services.core.audit.record import BATCH, CHANGE, COMMAND, EVENT
from services.core.planner.batch import Microbatch
from services.core.planner.block_ledger import Follower
from services.core.planner.block_pool import BlockPool
from services.core.planner.block_table import Move, StageTable
from services.core.planner.changes import (
    BlocksAdopted,
    BlocksReleased,
    BlocksRelocated,
    CapacitySet,
    Change,
    Configured,
    Credited,
    FlightDiscarded,
    PoolGrown,
    PoolLimited,
    PoolShrunk,
    ReleasedTaken,
    SequenceAdopted,
    SequenceForgotten,
    SequenceHeld,
    SequencePlaced,
    SequencePreempted,
    SequenceResumed,
    TableApplied,
)
from services.core.planner.config import IterationConfig
from services.core.planner.events import Command, Event
from services.core.planner.sequence import SequenceState
from services.core.planner.state import IterationState


class _Recorder:
    """Knows whether a call comes from outside."""

    def __init__(self, log: EventLog) -> None:
        self.log = log
        self._inside = False

    @contextmanager
    def inside(self) -> Iterator[None]:
        """What is called meanwhile is not written."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    @contextmanager
    def call(self, change: Change) -> Iterator[None]:
        """Write a call before it is done, if it comes from outside."""
        if not self._inside:
            self.log.append(CHANGE, [change])
        with self.inside():
            yield


class _RecordedPool(BlockPool):
    def __init__(self, num_blocks: int, recorder: _Recorder) -> None:
        self._recorder = recorder
        super().__init__(num_blocks)

    def grow(self, num_blocks: int) -> None:
        with self._recorder.call(PoolGrown(num_blocks)):
            super().grow(num_blocks)

    def limit(self, num_blocks: int) -> None:
        with self._recorder.call(PoolLimited(num_blocks)):
            super().limit(num_blocks)

    def shrink(self, num_blocks: int) -> None:
        with self._recorder.call(PoolShrunk(num_blocks)):
            super().shrink(num_blocks)


class _RecordedTable(StageTable):
    def __init__(self, pool: BlockPool, recorder: _Recorder) -> None:
        super().__init__(pool)
        self._recorder = recorder

    def apply(self, released: Iterable[str], chunks: Iterable[tuple[str, int]]) -> None:
        change = TableApplied(tuple(released), tuple(chunks))
        with self._recorder.call(change):
            super().apply(change.released, change.chunks)

    def adopt(self, request_id: str, count: int) -> tuple[int, ...]:
        with self._recorder.call(BlocksAdopted(request_id, count)):
            return super().adopt(request_id, count)

    def release(self, request_id: str) -> None:
        with self._recorder.call(BlocksReleased(request_id)):
            super().release(request_id)

    def relocate(self, limit: int, most: int | None = None) -> list[Move]:
        with self._recorder.call(BlocksRelocated(limit, most)):
            return super().relocate(limit, most)


class RecordedState(IterationState):
    """An `IterationState` with a log; see there for what the methods do."""

    def __init__(self, config: IterationConfig, log: EventLog) -> None:
        self._log = log
        self._recorder = _Recorder(log)
        super().__init__(config)

    def _new_table(self) -> StageTable:
        """Blocks whose changes are written, too."""
        pool = _RecordedPool(self.config.num_blocks, self._recorder)
        return _RecordedTable(pool, self._recorder)

    def handle(self, event: Event) -> list[Command]:
        """As there."""
        self._log.append(EVENT, [event])
        with self._recorder.inside():
            commands = super().handle(event)
        self._log.append(COMMAND, commands)
        return commands

    def plan(self) -> Microbatch | None:
        """As there."""
        with self._recorder.inside():
            microbatch = super().plan()
        self._log.append(BATCH, [microbatch])
        return microbatch

    def configure(self, followers: tuple[Follower, ...] = ()) -> None:
        """As there."""
        with self._recorder.call(Configured(followers)):
            super().configure(followers)

    def set_capacity(self, stage: int, blocks: int) -> None:
        """As there."""
        with self._recorder.call(CapacitySet(stage, blocks)):
            super().set_capacity(stage, blocks)

    def credit(self, stage: int, blocks: int) -> None:
        """As there."""
        with self._recorder.call(Credited(stage, blocks)):
            super().credit(stage, blocks)

    def take_released(self) -> tuple[str, ...]:
        """As there."""
        with self._recorder.call(ReleasedTaken()):
            return super().take_released()

    def discard_in_flight(self) -> None:
        """As there."""
        with self._recorder.call(FlightDiscarded()):
            super().discard_in_flight()

    def forget(self, request_id: str) -> None:
        """As there."""
        with self._recorder.call(SequenceForgotten(request_id)):
            super().forget(request_id)

    def adopt(
        self, state: SequenceState, absent: frozenset[int] = frozenset(), held: bool = True
    ) -> list[Command]:
        """As there."""
        with self._recorder.call(SequenceAdopted(state, absent, held)):
            commands = super().adopt(state, absent, held)
        self._log.append(COMMAND, commands)
        return commands

    def hold(self, request_id: str) -> None:
        """As there."""
        with self._recorder.call(SequenceHeld(request_id)):
            super().hold(request_id)

    def resume(self, request_id: str) -> None:
        """As there."""
        with self._recorder.call(SequenceResumed(request_id)):
            super().resume(request_id)

    def preempt(self, request_id: str) -> None:
        """As there."""
        with self._recorder.call(SequencePreempted(request_id)):
            super().preempt(request_id)

    def place(self, request_id: str, stage: int) -> bool:
        """As there."""
        with self._recorder.call(SequencePlaced(request_id, stage)):
            return super().place(request_id, stage)
