"""Checks I11 for planners: no step of the memory escalation while a cheaper step suffices.

The check runs while a worker's event log is replayed. It compares the planner's state before and
after each call of `plan`, which shows the steps, so the log needs no entries for them.
`GroupHistory` checks I11 for memory managers.
"""

from dataclasses import dataclass, field
from enum import IntEnum, auto

from services.core.audit.record import Findings
from services.core.planner.sequence import Phase, Sequence
from services.core.planner.state import PlannerState
from services.core.planner.victims import most_slack


class EscalationStep(IntEnum):
    """Steps of the escalation when online requests need memory, cheapest first (I11).

    *Online* requests are those of the classes with users that wait; the others are *batch* work.
    The order applies within a process, which does not know the options of other processes. A worker
    takes the first three steps, `SWAP` and `RECOMPUTE`, a memory manager `MOVE` and `DROP`, and a
    scheduler `HOLD_BACK` and `REFUSE`. Memory managers count only online demand, so batch work
    yields before parameters are dropped. With the setting `scheduling=fcfs`, requests have no
    classes, so `HOLD_BACK` and `YIELD` do not occur.
    """

    CACHED = auto()
    """Allocate empty blocks, then evict unreferenced cached blocks (`BlockPool.allocate`)."""
    HOLD_BACK = auto()
    """Start no batch request while an online request waits (`next_to_admit`, `harvest`)."""
    YIELD = auto()
    """Preempt batch sequences (`victims.batch_first`). Their full blocks stay cached and are
    evicted one by one, last block first; blocks that stay need no recomputation."""
    MOVE = auto()
    """Move running requests to groups with room, with `rebalance` (`Rebalancer`)."""
    DROP = auto()
    """Merge groups and drop parameters (`OverloadMonitor`)."""
    SWAP = auto()
    """Preempt a running online sequence whose KV has copies in host memory, with `save: all`."""
    RECOMPUTE = auto()
    """Preempt a running online sequence (`victims.newest`)."""
    REFUSE = auto()
    """Refuse requests with 503 and Retry-After (`SchedulerState`)."""


@dataclass(slots=True)
class EscalationOrder:
    """Compares the state of a worker's planner before and after each call of `plan`."""

    findings: Findings
    name: str  # the worker's id
    _blocks: dict[str, int] = field(default_factory=dict)  # of each sequence, before the call
    _oldest: str = ""  # the oldest running sequence before the call, which always advances
    _saved: frozenset[str] = frozenset()  # online sequences with copies, before the call
    _free: int = 0  # free blocks before the call
    _running_slots: int = 0  # sequences that could start running, before the call

    def before(self, planner: PlannerState) -> None:
        """Record the state before a call of `plan`."""
        table = planner.sequence_table
        self._blocks = {name: seq.blocks for name, seq in planner.sequences.items()}
        self._oldest = planner.running[0].seq_id if planner.running else ""
        use = table.host_use
        online = [seq for seq in planner.running if seq.online]
        self._saved = frozenset(
            seq.seq_id for seq in online if use is not None and use.has_copies(seq)
        )
        # Admission may not use reserved blocks, but growth may: compare with the smaller limit.
        self._free = min(table.ledger.least_room, table.ledger.free)
        self._running_slots = planner.config.max_running * planner.stages - table.running_count

    def after(self, planner: PlannerState) -> None:
        """Check the state after the call of `plan`."""
        preempted = [seq for seq in planner.waiting if self._blocks[seq.seq_id]]
        started = [seq for seq in planner.running if not self._blocks[seq.seq_id]]
        if preempted or started or planner.in_flight:
            self._check_need(planner, preempted, started)
        if planner.sequence_table.precedence.batch_yields:
            self._check_classes(planner, preempted, started)
        if planner.sequence_table.precedence.victims is not most_slack:
            self._check_copies(planner, preempted)

    def _check_need(
        self, planner: PlannerState, preempted: list[Sequence], started: list[Sequence]
    ) -> None:
        """A sequence is preempted only if the free blocks do not suffice."""
        size = planner.config.block_size
        # Count a block for each preempted sequence: it may have grown before its preemption, which
        # the state does not show.
        wanted = sum(max(s.blocks, s.blocks_to_admit(size)) for s in started) + len(preempted)
        running = [seq for seq in planner.running if self._blocks[seq.seq_id]]
        wanted += sum(seq.blocks - self._blocks[seq.seq_id] for seq in running)
        self.findings.check(
            "I11",
            not preempted or wanted > self._free or len(started) > self._running_slots,
            "{} preempted {} ({}), though {} blocks were free for {} (" + _CACHED + ")",
            *(self.name, _names(preempted), _step(preempted), self._free, wanted),
        )

    def _check_classes(
        self, planner: PlannerState, preempted: list[Sequence], started: list[Sequence]
    ) -> None:
        """Online sequences are preempted last, and started first."""
        online = [seq for seq in preempted if seq.request.service.online]
        victims = [seq for seq in planner.sequence_table.batch.values() if _frees(planner, seq)]
        self.findings.check(
            "I11",
            not (online and victims),
            "{} preempted {} (RECOMPUTE), though batch work had blocks (YIELD): {}",
            *(self.name, _names(online), _names(victims)),
        )
        waiting = [seq for seq in planner.waiting if seq.request.service.online]
        batch = [seq for seq in started if not seq.request.service.online]
        self.findings.check(
            "I11",
            not (waiting and batch),
            "{} started batch work, {}, though {} waited (HOLD_BACK)",
            *(self.name, _names(batch), _names(waiting)),
        )

    def _check_copies(self, planner: PlannerState, preempted: list[Sequence]) -> None:
        """An online sequence without copies is preempted after those that have them."""
        unsaved = [seq for seq in preempted if seq.online and seq.seq_id not in self._saved]
        saved = [seq for seq in planner.running if seq.online and seq.seq_id in self._saved]
        others = [seq for seq in saved if seq.seq_id != self._oldest]
        self.findings.check(
            "I11",
            not (unsaved and others),
            "{} preempted {} (RECOMPUTE), though others have copies in host memory (SWAP): {}",
            *(self.name, _names(unsaved), _names(others)),
        )


_CACHED = EscalationStep.CACHED.name


def _step(preempted: list[Sequence]) -> str:
    online = any(seq.request.service.online for seq in preempted)
    return (EscalationStep.RECOMPUTE if online else EscalationStep.YIELD).name


def _names(sequences: list[Sequence]) -> str:
    return ", ".join(seq.seq_id for seq in sequences[:5])


def _frees(planner: PlannerState, sequence: Sequence) -> bool:
    """Whether a running batch sequence has a block that a preemption would free."""
    if sequence.phase is not Phase.RUNNING:
        return False
    users = planner.pool.users
    return any(users[block] == 1 for block in planner.table.block_ids(sequence.seq_id))
