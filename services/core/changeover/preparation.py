"""Prepares a member for a change of groups that may be committed, while it continues to serve.

A merge only requires connections between the members. A member that will run layers that it has
dropped first makes room for them and restores them (KunServe §4.4): it lowers the group's block
capacity, moves used blocks below the new limit, unmaps the memory above it, and restores the
parameters from the best of its sources (`slab_sources`).

Terms: an *attempt* is a change that the coordinator tries; it ends with a commit or an abort. A
*slab* is the parameters of a layer, the embedding or the head. *Returning* layers are layers that
this member will run again.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from services.core.changeover.configuration import Configuration
from services.core.changeover.frames import Capacity
from services.core.changeover.member_context import MemberContext
from services.core.changeover.slab_sources import SlabSources
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
from services.core.groups.layer_map import Stage, serves
from services.core.groups.slab_names import stage_slabs
from services.core.planner.configuration_events import (
    BatchYielded,
    BlocksRelocated,
    PoolGrown,
    PoolLimited,
    PoolShrunk,
)

MOVES_PER_TURN = 64  # limit of block copies, so that a turn stays short
BUSY = "another change is being prepared here; try again"
UNFINISHED = "the last change cannot be finished: the connection to a member is lost"
NO_ROOM = "the parameters of the returning layers leave no room for KV"


class PreparationStep(Enum):
    """The condition that an attempt waits for; the steps follow each other in this order."""

    LAST_CHANGE = auto()  # the last change settles here
    CONNECTIONS = auto()  # both lanes to every other member are connected
    MEASUREMENT = auto()  # missing parameters and remaining room for KV are known
    CAPACITY = auto()  # at most `limit` blocks are in use
    RELOCATION = auto()  # all used block ids are below `limit`
    MEMORY = auto()  # the memory of block ids from `limit` on is unmapped
    PARAMETERS = auto()  # all missing slabs are fetched and verified
    KV = auto()  # the returning layers have memory for KV
    COMMIT = auto()  # the member is ready, and the coordinator commits or aborts


@dataclass(slots=True)
class _Attempt:
    """The progress of an attempt at this member."""

    attempt: str  # its id
    new: Configuration  # takes effect if the attempt is committed
    holders: tuple[Stage, ...]  # workers outside the change that may send slabs
    step: PreparationStep = PreparationStep.LAST_CHANGE
    limit: int = 0  # KV blocks that fit into memory beside the restored parameters
    restoring: bool = False  # capacity or memory may have changed: an abort must undo that
    slabs: SlabSources = field(default_factory=SlabSources)  # to restore
    returning: tuple[int, ...] = ()  # layers that need memory for KV again


class Preparation:
    """The preparation of a member: a single attempt at a time, after the last change settled."""

    def __init__(self, context: MemberContext, slabs_at_once: int = 1) -> None:
        self._context = context
        self._slabs_at_once = slabs_at_once
        self._current: _Attempt | None = None  # running, or ready for its commit
        self._queued: _Attempt | None = None  # waits for the last change to settle

    @property
    def expected(self) -> bool:
        """Whether an attempt is queued, being prepared, or ready and may be committed."""
        return self._queued is not None or self._current is not None

    @property
    def running(self) -> bool:
        """Whether an attempt needs turns."""
        waits = self._current is not None and self._current.step is not PreparationStep.COMMIT
        return self._queued is not None or waits

    def queue(self, request: PreparationAsked, draining: bool) -> None:
        """Queue an attempt, or refuse it while another attempt is in progress.

        `draining`: this member is about to switch to a committed change, which ends the current
        attempt, so another attempt may be queued.
        """
        if self._queued is not None or (self._current is not None and not draining):
            self._context.commands.append(EndPreparation(request.attempt, BUSY))
        else:
            new = Configuration.of(self._context.worker_id, request.groups)
            self._queued = _Attempt(request.attempt, new, request.holders)

    def advance(self, settled: bool) -> None:
        """Advance the attempt by a turn; `settled`: the last change has settled here."""
        if self._queued is not None and settled:
            self._current, self._queued = self._queued, None
            self._current.step = PreparationStep.CONNECTIONS
            self._context.commands.append(ConnectMembers(self._current.attempt))
        elif self._current is not None:
            self._advance(self._current)

    def abort(self, attempt: str) -> None:
        """Abort an attempt that will never be committed; unknown attempts are ignored."""
        if self._queued is not None and self._queued.attempt == attempt:
            self._queued = None
        if self._current is not None and self._current.attempt == attempt:
            self._undo()

    def drop_queued(self) -> None:
        """Remove the queued attempt, because a commit has replaced the groups that it would change.

        A comparison of epochs would not show this: an attempt's epoch exceeds those of all groups
        that it would change, but a committed epoch need only exceed that of this worker's group.
        """
        self._queued = None

    def refuse_queued(self) -> None:
        """Refuse the queued attempt: the last change can no longer settle here."""
        if self._queued is not None:
            self._context.commands.append(EndPreparation(self._queued.attempt, UNFINISHED))
            self._queued = None

    def ready_before(self, new: Configuration) -> Configuration | None:
        """The prepared configuration with a lower epoch than `new`; None if there is none.

        It may have been committed although this member never saw its record.
        """
        current = self._current
        if (
            current is None
            or current.step is not PreparationStep.COMMIT
            or current.new.epoch >= new.epoch
        ):
            return None
        return current.new

    def end(self, new: Configuration) -> None:
        """End the attempt as `new` takes effect; undo it unless it prepared this stage."""
        current = self._current
        if current is not None:
            # Compare layers, not attempts: `new` may be a later change that gives this worker the
            # same stage, after a member of the prepared groups was lost.
            ready = current.step is PreparationStep.COMMIT and current.new.stage == new.stage
            if not ready:
                self._undo()
        self._current = None

    # --- answers

    def note_connected(self, event: MembersConnected) -> None:
        """Continue if all members are connected; refuse if a member is unreachable."""
        current = self._current_at(PreparationStep.CONNECTIONS, event.attempt)
        if current is None:
            return
        if event.unreachable:
            self._refuse(f"{event.unreachable} cannot be reached for transfers")
            return
        current.step = PreparationStep.MEASUREMENT
        stage = current.new.stage
        self._context.commands.append(MeasureRestore(stage.first_layer, stage.end_layer))

    def note_measured(self, event: RestoreMeasured) -> None:
        """Lower the capacity to the blocks that remain beside the missing slabs."""
        current = self._current
        if current is None or current.step is not PreparationStep.MEASUREMENT:
            return
        if not event.missing and not event.returning:
            self._ready()  # a merge: nothing to restore
            return
        current.restoring = True
        if event.blocks < 1:
            self._refuse(NO_ROOM)
            return
        current.limit, current.returning = event.blocks, event.returning
        current.slabs = SlabSources(
            list(event.missing),
            frozenset(event.copied),
            self._holders(current),
            self._slabs_at_once,
        )
        current.step = PreparationStep.CAPACITY
        # Lower the capacity first, so that new requests do not take the blocks whose memory the
        # parameters need. The leader of the group enforces the limit.
        pool = self._context.table.pool
        if current.limit >= pool.num_blocks:
            self._shrink(current)
        elif self._context.leads:
            self._context.apply(PoolLimited(current.limit))
            self._advance(current)
        else:
            self._context.announced_blocks = current.limit
            self._context.send(self._context.leader, Capacity(current.limit, current.attempt))

    def note_capacity_kept(self, attempt: str) -> None:
        """Continue: the leader keeps the block use of this stage within the limit."""
        current = self._current_at(PreparationStep.CAPACITY, attempt)
        if current is not None:
            self._context.apply(PoolLimited(current.limit))
            self._context.announced_blocks = None
            current.step = PreparationStep.RELOCATION

    def note_shrunk(self, event: KvShrunk) -> None:
        """Continue: there is memory for the parameters."""
        current = self._current_at(PreparationStep.MEMORY, event.attempt)
        if current is not None:
            current.step = PreparationStep.PARAMETERS
            self._restore_more(current)

    def note_verified(self, event: SlabVerified) -> None:
        """Continue with the next slab, or with the next source of a slab that failed."""
        current = self._current_at(PreparationStep.PARAMETERS, event.attempt)
        if current is not None and current.slabs.end(event.slab, event.intact):
            self._restore_more(current)

    def note_mapped(self) -> None:
        """Finish: parameters and KV of the returning layers are in place."""
        if self._current is not None and self._current.step is PreparationStep.KV:
            self._ready()

    def note_failed(self, event: RestoreFailed) -> None:
        """Refuse the attempt: the layers cannot be restored."""
        if self._current is not None and self._current.step is not PreparationStep.COMMIT:
            self._refuse(event.reason)

    def note_undone(self, event: RestoreUndone) -> None:
        """Restore the capacity: the memory is as it was before the preparation."""
        self._context.apply(PoolGrown(event.blocks))
        if not self._context.leads:
            self._context.send(self._context.leader, Capacity(event.blocks))

    # --- steps

    def _current_at(self, step: PreparationStep, attempt: str) -> _Attempt | None:
        """The current attempt if it has this id and waits at `step`, else None."""
        current = self._current
        return (
            current
            if current is not None and current.attempt == attempt and current.step is step
            else None
        )

    def _advance(self, current: _Attempt) -> None:
        table = self._context.table
        if current.step is PreparationStep.CAPACITY and self._context.leads:
            # Preempt batch work: otherwise block use might not fall to the limit for a long time.
            self._context.apply(BatchYielded(0, current.limit))
            if table.pool.taken_count > current.limit:
                return
            current.step = PreparationStep.RELOCATION
        if current.step is PreparationStep.RELOCATION:
            # Memory can only be unmapped from its end, so used blocks move to lower ids.
            if self._context.highest_block(table.seq_ids) >= current.limit:
                self._context.apply(BlocksRelocated(current.limit, MOVES_PER_TURN))
                return
            self._context.apply(PoolShrunk(current.limit))
            self._shrink(current)

    def _shrink(self, current: _Attempt) -> None:
        current.step = PreparationStep.MEMORY
        used = self._context.highest_block(self._context.table.seq_ids) + 1
        self._context.commands.append(ShrinkKv(current.attempt, current.limit, used))

    def _restore_more(self, current: _Attempt) -> None:
        if current.slabs.all_restored:
            current.step = PreparationStep.KV
            self._context.commands.append(MapKv(current.returning))
            return
        for slab, source in current.slabs.start():
            restore = RestoreSlab(current.attempt, slab, source.holder, source.from_copy)
            self._context.commands.append(restore)

    def _holders(self, current: _Attempt) -> dict[str, frozenset[str]]:
        """The slabs of each worker that may send some: members of the present group first.

        Members that are not part of the change may drop their slabs.
        """
        context = self._context
        members = [stage for stage in context.stages if stage.worker_id in current.new.members]
        return {
            stage.worker_id: frozenset(
                stage_slabs(
                    stage.first_layer,
                    stage.end_layer,
                    num_layers=context.num_layers,
                    tied_embeddings=context.tied_embeddings,
                )
            )
            for stage in (*members, *current.holders)
            if stage.worker_id != context.worker_id
        }

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
            # A member without all layers cannot serve, so it needs no memory for KV, and may keep
            # the slabs for the next attempt.
            keep_verified = not serves(self._context.stages, self._context.num_layers)
            self._context.commands.append(UndoRestore(current.attempt, keep_verified))
