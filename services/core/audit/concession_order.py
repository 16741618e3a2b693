"""I11 on a planner that is replayed: no concession while a cheaper one would have done.

What a planner did shows in the state before and after a call of `plan`; nothing has to be noted in
a log for it. Steps of other processes are in their own logs: see `GroupHistory`.
"""

from dataclasses import dataclass, field
from enum import IntEnum, auto

from services.core.audit.record import Findings
from services.core.planner.sequence import Phase, Sequence
from services.core.planner.state import PlannerState


class Concession(IntEnum):
    """What gives way when online requests need memory; the cheapest first (I11).

    The order holds within a process, which cannot see what others could still do. A worker has the
    first three steps and `RECOMPUTE`, a memory manager `DROP`, a scheduler `HOLD_BACK` and
    `REFUSE`. Memory managers count online demand alone, so batch work gives way before parameters.
    Where `scheduling` is `fcfs`, no class is known: then there is no `HOLD_BACK` and no `YIELD`.
    """

    CACHED = auto()
    """Take empty blocks, then cached ones that nobody uses (`BlockPool.allocate`)."""
    HOLD_BACK = auto()
    """Start no batch request while an online one waits (`next_to_admit` of a worker, `harvest`)."""
    YIELD = auto()
    """Take the KV of batch sequences (`victims.batch_first`). Its full blocks stay cached, and are
    taken from the tail, block by block: what is left in the end does not run again."""
    DROP = auto()
    """Merge groups, and drop parameters (`OverloadMonitor`)."""
    RECOMPUTE = auto()
    """Take the KV of an online sequence that runs (`victims.newest`)."""
    REFUSE = auto()
    """503, with a time to come back (`SchedulerState`)."""


@dataclass(slots=True)
class ConcessionOrder:
    """Looks at the planner of the worker `name` around each call of `plan`."""

    findings: Findings
    name: str
    _blocks: dict[str, int] = field(default_factory=dict)
    _room: int = 0
    _places: int = 0

    def before(self, planner: PlannerState) -> None:
        """`plan` is about to be called."""
        table = planner.sequence_table
        self._blocks = {name: one.blocks for name, one in planner.sequences.items()}
        self._room = min(table.ledger.least_room, table.ledger.free)  # growth may use more
        self._places = planner.config.max_running * planner.stages - table.running_count

    def after(self, planner: PlannerState) -> None:
        """`plan` has returned."""
        lost = [one for one in planner.waiting if self._blocks[one.request_id]]
        started = [one for one in planner.running if not self._blocks[one.request_id]]
        if lost or started or planner.in_flight:
            self._check_need(planner, lost, started)
        if planner.sequence_table.precedence.batch_yields:
            self._check_classes(planner, lost, started)

    def _check_need(
        self, planner: PlannerState, lost: list[Sequence], started: list[Sequence]
    ) -> None:
        """A sequence loses its blocks only if those that were free do not suffice.

        What the losers took first is not known: each may have grown by a block.
        """
        size = planner.config.block_size
        wanted = sum(max(one.blocks, one.blocks_to_admit(size)) for one in started) + len(lost)
        running = [one for one in planner.running if self._blocks[one.request_id]]
        wanted += sum(one.blocks - self._blocks[one.request_id] for one in running)
        self.findings.check(
            "I11",
            not lost or wanted > self._room or len(started) > self._places,
            "{} took the KV of {} ({}), though {} blocks were free for {} (" + _CACHED + ")",
            *(self.name, _names(lost), _step(lost), self._room, wanted),
        )

    def _check_classes(
        self, planner: PlannerState, lost: list[Sequence], started: list[Sequence]
    ) -> None:
        online = [one for one in lost if one.request.service.online]
        left = [one for one in planner.sequence_table.batch.values() if _gives(planner, one)]
        self.findings.check(
            "I11",
            not (online and left),
            "{} took the KV of {} (RECOMPUTE), though batch work had some (YIELD): {}",
            *(self.name, _names(online), _names(left)),
        )
        waiting = [one for one in planner.waiting if one.request.service.online]
        batch = [one for one in started if not one.request.service.online]
        self.findings.check(
            "I11",
            not (waiting and batch),
            "{} started batch work, {}, though {} waited (HOLD_BACK)",
            *(self.name, _names(batch), _names(waiting)),
        )


_CACHED = Concession.CACHED.name


def _step(lost: list[Sequence]) -> str:
    online = any(one.request.service.online for one in lost)
    return (Concession.RECOMPUTE if online else Concession.YIELD).name


def _names(sequences: list[Sequence]) -> str:
    return ", ".join(one.request_id for one in sequences[:5])


def _gives(planner: PlannerState, sequence: Sequence) -> bool:
    """Whether a batch sequence runs, and has a block that is free without it."""
    if sequence.phase is not Phase.RUNNING:
        return False
    users = planner.pool.users
    return any(users[block] == 1 for block in planner.table.block_ids(sequence.request_id))
