"""Gets a member ready for groups that may be committed, while it serves on as it is.

To merge, the members only have to be connected. A member that is to run layers which it has dropped
makes room and restores them first (KunServe §4.4): the group's capacity is lowered, blocks move
below the limit, KV tails are unmapped; parameters come from a member that holds them, else from the
model folder, and are verified before they can run.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, auto

from services.core.changeover.configuration import Configuration
from services.core.changeover.frames import Capacity
from services.core.changeover.member_context import MemberContext
from services.core.changeover.vocabulary import (
    ConnectMembers,
    EndPreparation,
    KvShrunk,
    MapKv,
    MeasureRestore,
    MembersConnected,
    NoteAborted,
    PreparationAsked,
    RestoreFailed,
    RestoreMeasured,
    RestoreSlab,
    RestoreUndone,
    ShrinkKv,
    SlabVerified,
    UndoRestore,
)
from services.core.groups.layer_map import serves
from services.core.groups.slab_names import stage_slabs
from services.core.planner.configuration_events import (
    BatchYielded,
    BlocksRelocated,
    PoolGrown,
    PoolLimited,
    PoolShrunk,
)

MOVES_PER_TURN = 64
FAILURES_MAX = 3
BUSY = "another change is being prepared here; try again"
UNFINISHED = "the last change cannot be finished: the connection to a member is lost"
NO_ROOM = "the parameters of the returning layers leave no room for KV"


class PreparationStep(Enum):
    """What an attempt waits for."""

    LAST_CHANGE = auto()
    CONNECTIONS = auto()
    MEASUREMENT = auto()
    CAPACITY = auto()
    RELOCATION = auto()
    MEMORY = auto()
    PARAMETERS = auto()
    KV = auto()
    COMMIT = auto()


@dataclass(slots=True)
class _Attempt:
    attempt: str
    new: Configuration
    step: PreparationStep = PreparationStep.LAST_CHANGE
    limit: int = 0
    restoring: bool = False
    missing: list[str] = field(default_factory=list)
    returning: tuple[int, ...] = ()
    from_folder: bool = False
    failures: Counter[str] = field(default_factory=Counter)  # by holder


class Preparation:
    """One attempt at a time. It begins once the last change is over."""

    def __init__(self, context: MemberContext) -> None:
        self._context = context
        self._current: _Attempt | None = None
        self._queued: _Attempt | None = None

    @property
    def expected(self) -> bool:
        """Whether a change is being prepared, or is ready and may be committed."""
        return self._queued is not None or self._current is not None

    @property
    def running(self) -> bool:
        """Whether it needs turns."""
        waits = self._current is not None and self._current.step is not PreparationStep.COMMIT
        return self._queued is not None or waits

    def ask(self, asked: PreparationAsked, draining: bool) -> None:
        """Get ready, unless that is being done for something else.

        While a committed change is `draining`, what was prepared before it is about to end.
        """
        if self._queued is not None or (self._current is not None and not draining):
            self._context.commands.append(EndPreparation(asked.attempt, BUSY))
        else:
            new = Configuration.of(self._context.worker_id, asked.groups)
            self._queued = _Attempt(asked.attempt, new)

    def advance(self, settled: bool) -> None:
        """Go on as far as this turn allows; `settled`: the last change is over here."""
        if self._queued is not None and settled:
            self._current, self._queued = self._queued, None
            self._current.step = PreparationStep.CONNECTIONS
            self._context.commands.append(ConnectMembers(self._current.attempt))
        elif self._current is not None:
            self._advance(self._current)

    def abort(self, attempt: str) -> None:
        """The attempt will never be committed."""
        if self._queued is not None and self._queued.attempt == attempt:
            self._queued = None
        if self._current is not None and self._current.attempt == attempt:
            self._undo()

    def drop_queued(self) -> None:
        """A configuration is committed: an attempt that waits for the last change is over.

        It starts from an older configuration, whatever its epoch: that is above those of all groups
        that it would change, and the committed one above that of this worker's group alone.
        """
        self._queued = None

    def refuse_queued(self) -> None:
        """The last change is never over here, so no attempt can wait for its end."""
        if self._queued is not None:
            self._context.commands.append(EndPreparation(self._queued.attempt, UNFINISHED))
            self._queued = None

    def ready_before(self, new: Configuration) -> Configuration | None:
        """What is ready here and older than `new`: it may have been committed unheard."""
        current = self._current
        if (
            current is None
            or current.step is not PreparationStep.COMMIT
            or current.new.epoch >= new.epoch
        ):
            return None
        return current.new

    def end(self, new: Configuration) -> None:
        """A change is carried out: keep what was prepared if it fits, or else abort it.

        It fits if this worker runs the prepared layers in `new`. `new` may be a later change: a
        member of the prepared groups was lost before this worker entered them.
        """
        current = self._current
        if current is not None:
            ready = current.step is PreparationStep.COMMIT and current.new.stage == new.stage
            if not ready:
                self._undo()
        self._current = None

    # --- answers

    def note_connected(self, event: MembersConnected) -> None:
        """The lanes are there, or one cannot be had."""
        current = self._at(PreparationStep.CONNECTIONS, event.attempt)
        if current is None:
            return
        if event.unreachable:
            self._refuse(f"{event.unreachable} cannot be reached for transfers")
            return
        current.step = PreparationStep.MEASUREMENT
        stage = current.new.stage
        self._context.commands.append(MeasureRestore(stage.first_layer, stage.end_layer))

    def note_measured(self, event: RestoreMeasured) -> None:
        """Go on with what is missing, and with the blocks that remain beside it."""
        current = self._current
        if current is None or current.step is not PreparationStep.MEASUREMENT:
            return
        if not event.missing and not event.returning:
            self._ready()
            return
        current.restoring = True
        if event.blocks < 1:
            self._refuse(NO_ROOM)
            return
        current.limit, current.missing = event.blocks, list(event.missing)
        current.returning, current.step = event.returning, PreparationStep.CAPACITY
        pool = self._context.table.pool
        if current.limit >= pool.num_blocks:
            self._shrink(current)
        elif self._context.leads:
            self._context.change(PoolLimited(current.limit))
            self._advance(current)
        else:
            self._context.announced_blocks = current.limit
            self._context.send(self._context.leader, Capacity(current.limit, current.attempt))

    def note_kept(self, attempt: str) -> None:
        """The leader keeps the use of this stage below the limit, for that attempt."""
        current = self._at(PreparationStep.CAPACITY, attempt)
        if current is not None:
            self._context.change(PoolLimited(current.limit))
            self._context.announced_blocks = None
            current.step = PreparationStep.RELOCATION

    def note_shrunk(self, event: KvShrunk) -> None:
        """There is memory for parameters."""
        current = self._at(PreparationStep.MEMORY, event.attempt)
        if current is not None:
            current.step = PreparationStep.PARAMETERS
            self._restore_next(current)

    def note_verified(self, event: SlabVerified) -> None:
        """A slab may run, or has to come from elsewhere."""
        current = self._at(PreparationStep.PARAMETERS, event.attempt)
        if current is None or not current.missing or current.missing[0] != event.slab:
            return
        if event.intact:
            current.missing.pop(0)
            current.from_folder = False
        else:
            current.failures[self._holder(event.slab, current)] += 1
            current.from_folder = True
        self._restore_next(current)

    def note_mapped(self) -> None:
        """All is here."""
        if self._current is not None and self._current.step is PreparationStep.KV:
            self._ready()

    def note_failed(self, event: RestoreFailed) -> None:
        """The layers cannot be had."""
        if self._current is not None and self._current.step is not PreparationStep.COMMIT:
            self._refuse(event.reason)

    def note_undone(self, event: RestoreUndone) -> None:
        """The memory is as it was before the preparation."""
        self._context.change(PoolGrown(event.blocks))
        if not self._context.leads:
            self._context.send(self._context.leader, Capacity(event.blocks))

    # --- steps

    def _at(self, step: PreparationStep, attempt: str) -> _Attempt | None:
        current = self._current
        return (
            current
            if current is not None and current.attempt == attempt and current.step is step
            else None
        )

    def _advance(self, current: _Attempt) -> None:
        table = self._context.table
        if current.step is PreparationStep.CAPACITY and self._context.leads:
            self._context.change(BatchYielded(0, current.limit))
            if table.pool.taken_count > current.limit:
                return
            current.step = PreparationStep.RELOCATION
        if current.step is PreparationStep.RELOCATION:
            if self._context.highest_block(table.request_ids) >= current.limit:
                self._context.change(BlocksRelocated(current.limit, MOVES_PER_TURN))
                return
            self._context.change(PoolShrunk(current.limit))
            self._shrink(current)

    def _shrink(self, current: _Attempt) -> None:
        current.step = PreparationStep.MEMORY
        used = self._context.highest_block(self._context.table.request_ids) + 1
        self._context.commands.append(ShrinkKv(current.attempt, current.limit, used))

    def _restore_next(self, current: _Attempt) -> None:
        if not current.missing:
            current.step = PreparationStep.KV
            self._context.commands.append(MapKv(current.returning))
            return
        slab = current.missing[0]
        holder = "" if current.from_folder else self._holder(slab, current)
        current.from_folder = not holder
        self._context.commands.append(RestoreSlab(current.attempt, slab, holder))

    def _holder(self, slab: str, current: _Attempt) -> str:
        """A member of the present group that runs the slab and stays connected; "" if none.

        One that has failed to send `FAILURES_MAX` slabs is not asked again in this attempt.
        """
        context = self._context
        for stage in context.stages:
            slabs = stage_slabs(
                stage.first_layer,
                stage.end_layer,
                num_layers=context.num_layers,
                tied_embeddings=context.tied_embeddings,
            )
            if stage.worker_id != context.worker_id and slab in slabs:
                is_asked = current.failures[stage.worker_id] < FAILURES_MAX
                return (
                    stage.worker_id if is_asked and stage.worker_id in current.new.members else ""
                )
        return ""

    # --- ends

    def _ready(self) -> None:
        assert self._current is not None
        self._current.step = PreparationStep.COMMIT
        self._context.commands.append(EndPreparation(self._current.attempt))

    def _refuse(self, reason: str) -> None:
        assert self._current is not None
        self._context.commands.append(EndPreparation(self._current.attempt, reason))
        self._undo()

    def _undo(self) -> None:
        current = self._current
        assert current is not None
        self._current = None
        self._context.announced_blocks = None
        self._context.commands.append(NoteAborted(current.attempt))
        if current.restoring:
            # A member that cannot serve until it has its layers needs no memory for KV.
            keep_verified = not serves(self._context.stages, self._context.num_layers)
            self._context.commands.append(UndoRestore(current.attempt, keep_verified))
