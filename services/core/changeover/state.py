"""The state machine of a worker as a member of a group, with changes of groups (KunServe §4).

The driver (the engine, a simulator or a test) passes every event to `handle` and executes the
returned commands in order. It passes the answer to a memory command to `handle` before it executes
the next command. Between events the driver may request a microbatch with `plan`. Both methods
mutate the planner inside; callers may only read it.

Terms: a *change* replaces the groups of some workers by other groups in a single commit. A
*configuration* is the group of a member with its stages; its *epoch* is a number that increases
with each change. The *leader* is the first stage: it plans microbatches for the group. A *turn* is
the driver's call between iterations (`TurnTaken`). A sequence is *held* if it may not run yet,
because its KV or its hand-over is in transit. Batch sequences can be *parked*: see `ParkedBatch`.
The last change has *settled* here once every sequence has its leader and all KV is where it is
used.

Every change (merge, re-merge, split) has the same steps at every member:

1. DRAINING: the old leader launches no microbatch, waits until none is in flight, and notifies its
   stages (`Drained`). Microbatches that miss the timeout are discarded, and their work is repeated.
2. The switch: each member switches to its new layers and reports its blocks to its new leader
   (`Joined`). A leader that waits for these reports is JOINING and defers most other frames.
3. ADOPTING: old leaders hand their sequences to the new leaders (`Adopt`). MIGRATING: KV is in
   transit; a sequence resumes as soon as its KV is complete at the stages that run it. New requests
   run at once.
4. SERVING: the change has settled here, and another change may be prepared.

`TRANSITIONS` lists the allowed transitions; a change can be committed in any phase.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf
from typing import Any, get_args, get_origin

from services.core.changeover import frames, vocabulary
from services.core.changeover.adoption import Adoption
from services.core.changeover.capacity import MemberCapacity
from services.core.changeover.configuration import Configuration
from services.core.changeover.frame_handlers import FrameHandlers
from services.core.changeover.handover import Handover
from services.core.changeover.leader_moves import LeaderMoves
from services.core.changeover.lost_peers import LostPeers
from services.core.changeover.member_context import MemberContext
from services.core.changeover.move_window import LINK_BLOCKS_PER_S
from services.core.changeover.orphaned_kv import OrphanedKv
from services.core.changeover.preparation import Preparation
from services.core.changeover.stage_kv import StageKv
from services.core.changeover.transfer_outcome import TransferOutcome, TransferStatus
from services.core.groups.layer_map import serves
from services.core.host.vocabulary import BlocksRecalled, BlocksSaved, HostGrown, HostLooked
from services.core.planner.batch import Microbatch
from services.core.planner.config import IterationConfig
from services.core.planner.configuration_events import (
    ConfigurationEnded,
    FlightDiscarded,
    GroupDivided,
    PoolGrown,
    ReleasedTaken,
    SequencePreempted,
    StagesConfigured,
)
from services.core.planner.events import (
    BlocksBorrowed,
    CostModelLearned,
    DrainContinued,
    IterationDropped,
    IterationFinished,
    IterationSuspended,
    RequestAborted,
    RequestArrived,
    RequeueChecked,
)
from services.core.planner.refusal import duplicate_id
from services.core.planner.sequence_ids import AnsweringSequences, request_id_of
from services.core.planner.state import PlannerState
from services.core.shipments.shipping import Shipping
from services.core.shipments.vocabulary import ShipmentFrame, ShippingAsked, ShippingPeerLost

DRAIN_TIMEOUT_S = 5.0
"""After this time, a leader discards the microbatches in flight."""
DRAINED_TIMEOUT_S = 20.0
"""After this time, a stage stops waiting for `Drained`. A leader that learns of the change in time
drains sooner. If the leader is later, the stage misses its last `released` ids, and `OrphanedKv`
frees their blocks."""

HOLD_MAX_S = 2.0
"""Longest time for which iterations with only batch work are held back while a group changes:
frames and turns of the change would wait for the end of each iteration. A change that takes longer
than this waits for other workers or the network, so holding back would not help."""


class MemberPhase(StrEnum):
    """The progress of the newest change at this member; see the module's docstring."""

    SERVING = "serving"
    DRAINING = "draining"
    JOINING = "joining"
    ADOPTING = "adopting"
    MIGRATING = "migrating"


_SETTLING = (MemberPhase.ADOPTING, MemberPhase.MIGRATING, MemberPhase.SERVING)
TRANSITIONS = {
    *((phase, MemberPhase.DRAINING) for phase in MemberPhase if phase is not MemberPhase.DRAINING),
    *((MemberPhase.DRAINING, phase) for phase in (MemberPhase.JOINING, *_SETTLING)),
    *((MemberPhase.JOINING, phase) for phase in _SETTLING),
    *((before, after) for before in _SETTLING for after in _SETTLING if before is not after),
}
"""All allowed transitions. From SERVING or MIGRATING back to ADOPTING: a request that arrives at a
member that does not lead is handed over."""


@dataclass(frozen=True, slots=True)
class MemberConfig:
    """The parameters of a `Changeover`, as in the header of its event log."""

    worker_id: str
    num_layers: int  # of the model
    tied_embeddings: bool  # the LM head is the embedding
    planner: IterationConfig
    link_blocks_per_s: float = LINK_BLOCKS_PER_S  # minimum bandwidth, in KV blocks of a layer
    slabs_at_once: int = 1  # slabs that a preparation restores at the same time
    process: str = ""  # a unique name of the engine process
    kv_layout: str = ""  # model, code and format of its KV; "": it ships none


class Changeover:
    """The state machine of a member; only `handle` and `plan` mutate it."""

    def __init__(
        self,
        worker_id: str,
        num_layers: int,
        planner: PlannerState,
        *,
        tied_embeddings: bool = False,
        link_blocks_per_s: float = LINK_BLOCKS_PER_S,
        slabs_at_once: int = 1,
        process: str = "",
        kv_layout: str = "",
    ) -> None:
        answering = AnsweringSequences()
        self._context = MemberContext(worker_id, num_layers, tied_embeddings, planner, answering)
        self._kv = StageKv(self._context)
        self._moves = LeaderMoves(self._context, self._kv, link_blocks_per_s)
        self._orphaned_kv = OrphanedKv(self._context, self._kv)
        self._handover = Handover(self._context)
        self._adoption = Adoption(self._context, self._moves, self._handover)
        self._capacity = MemberCapacity(self._context, self._kv)
        self._preparation = Preparation(self._context, slabs_at_once)
        self._lost = LostPeers(
            self._context, self._handover, self._adoption, self._moves, self._orphaned_kv
        )
        self._frames = FrameHandlers(
            self._context,
            self._kv,
            self._moves,
            self._orphaned_kv,
            self._handover,
            self._adoption,
            self._capacity,
            self._preparation,
            self._lost,
            self._abort,
        )
        self._shipping = Shipping(
            *(self._context, self._context.emit, process, kv_layout),
            *(link_blocks_per_s, num_layers),
        )
        self._leaving = False  # this worker shuts down
        self._next: Configuration | None = None  # committed; this member has yet to switch to it
        self._leads_all_layers = True  # this worker leads a group that has all layers
        self._drain_until_s = 0.0  # deadline of DRAINING
        self._changing_since_s: float | None = None  # None while the group does not change
        self._aborted: list[str] = []  # sequences whose abort waits until all stages have joined

    @classmethod
    def of(cls, config: MemberConfig) -> "Changeover":
        """A member with a new planner."""
        return cls(
            config.worker_id,
            config.num_layers,
            PlannerState(config.planner),
            tied_embeddings=config.tied_embeddings,
            link_blocks_per_s=config.link_blocks_per_s,
            slabs_at_once=config.slabs_at_once,
            process=config.process,
            kv_layout=config.kv_layout,
        )

    # --- queries

    @property
    def planner(self) -> PlannerState:
        """The planner of this worker; read-only for callers."""
        return self._context.planner

    @property
    def configuration(self) -> Configuration | None:
        """The present configuration; None before the first."""
        return self._context.configuration

    @property
    def leads(self) -> bool:
        """Whether this worker leads its group; without a configuration it leads itself."""
        return self._context.leads

    @property
    def phase(self) -> MemberPhase:
        """The progress of the newest change here."""
        if self._next is not None:
            return MemberPhase.DRAINING
        if self._adoption.waiting:
            return MemberPhase.JOINING
        if not (self._adoption.settled and self._handover.settled):
            return MemberPhase.ADOPTING
        return MemberPhase.MIGRATING if self._moving else MemberPhase.SERVING

    @property
    def _moving(self) -> bool:
        """Whether sequences, KV or releases of KV of the newest change are still pending here."""
        return not (self._all_arrived and self._kv.settled and self._orphaned_kv.settled)

    @property
    def _all_arrived(self) -> bool:
        """Whether every sequence has its leader and, if this member leads, all its KV arrived."""
        return self._adoption.settled and self._handover.settled and self._moves.settled

    @property
    def _own_group_unsettled(self) -> bool:
        """Whether the last change is unsettled, apart from KV here that other groups still need."""
        if self._next is not None or self.settled:
            return False
        return not (self._all_arrived and self._orphaned_kv.leader_is_finished)

    @property
    def settled(self) -> bool:
        """Whether the last change has settled, so that another change may be prepared."""
        return self.phase is MemberPhase.SERVING

    @property
    def busy(self) -> bool:
        """Whether a change, a preparation, a waiting peer or a timeout needs turns."""
        waits = (
            self._preparation.running or self._capacity.is_awaited or self._lost.isolation.waiting
        )
        return waits or not self.settled

    @property
    def parked_due_s(self) -> float | None:
        """When parked batch sequences are handed to the leader; None if there are none."""
        return self._handover.parked.due_s

    def needs_turn(self, now_s: float) -> bool:
        """Whether a `TurnTaken` has work to do now."""
        due_s = self.parked_due_s
        return self.busy or self.shipping.active or (due_s is not None and due_s <= now_s)

    @property
    def shipping(self) -> Shipping:
        """The shipments of running requests from and to other groups; read-only for callers."""
        return self._shipping

    @property
    def draining(self) -> bool:
        """Whether this member has yet to switch to a committed configuration."""
        return self._next is not None

    @property
    def isolated(self) -> bool:
        """Whether the group continues without this member, which has aborted its requests."""
        return self._lost.isolation.expired

    @property
    def may_plan(self) -> bool:
        """Whether this worker may launch microbatches now."""
        if self._lost.isolation.lost_member:
            return False
        return self._leads_all_layers and self._next is None and not self._adoption.waiting

    def holds_batch_work(self, now_s: float) -> bool:
        """Whether to hold back the next iteration because it would contain only batch work.

        True only while the group of a single worker changes, for at most `HOLD_MAX_S`, and if batch
        work is preemptible.
        """
        since_s, planner = self._changing_since_s, self._context.planner
        if since_s is None or now_s - since_s >= HOLD_MAX_S or planner.stages > 1:
            return False
        yields = planner.sequence_table.precedence.batch_yields
        return yields and not planner.online_can_run

    @property
    def host_due_s(self) -> float:
        """When `HostLooked` is due next; `inf` without host copies to save or to recall."""
        host = self._context.planner.host
        return inf if host is None or not self._may_copy else host.due_s

    @property
    def _may_copy(self) -> bool:
        """Whether KV blocks here are those of this worker's planner, and have all layers."""
        return self.may_plan and self._context.planner.stages == 1

    @property
    def requeue_due_s(self) -> float | None:
        """When `RequeueChecked` next returns requests to the scheduler; None if it does not."""
        return self._context.planner.requeue_due(may_start=self.leads)

    def seq_id_of(self, request_id: str) -> str:
        """The id of the sequence that answers a request at this worker; "" if there is none."""
        return self._context.answering.seq_id_of(request_id)

    def kv_blocks_for(self, transfer_id: str, seq_id: str) -> tuple[int, ...]:
        """Block ids for the KV of an incoming transfer; () if the transfer is not expected."""
        return self._kv.blocks_for(transfer_id, seq_id)

    def landing_blocks(
        self, transfer_id: str, pin: str, first: int, blocks: int
    ) -> tuple[int, ...]:
        """Block ids for KV of a shipment, blocks `first` on; () if the KV is not expected."""
        return self._shipping.incoming.blocks_for(transfer_id, pin, first, blocks)

    def check_invariants(self) -> None:
        """Raise AssertionError on inconsistent state; tests call it after every event."""
        self._moves.check_invariants()
        if self.leads and self._next is None:
            self.planner.check_invariants()
        self.planner.table.check_invariants()
        if self.settled and self.leads:
            assert not self.planner.held, "a sequence is held although nothing moves"
        assert self._next is None or self._next.epoch > self._epoch
        if (configuration := self.configuration) is not None:
            leads_whole = configuration.leads and self._serves(configuration)
            assert self._leads_all_layers == (leads_whole and not self.isolated)

    # --- mutation

    def handle(self, event: vocabulary.Event) -> list[vocabulary.Command]:
        """Apply an event; returns the commands for the driver, in order."""
        context = self._context
        # The most frequent events bypass the table: they cannot change the phase.
        if isinstance(event, _PLANNER_EVENTS):
            context.apply(event)
        elif isinstance(event, RequestArrived) and self.may_plan:
            context.now_s = event.now_s
            self._arrive(event)
        elif isinstance(event, RequeueChecked):
            # A worker that does not lead also returns its parked batch requests.
            context.apply(replace(event, may_start=self.leads))
        elif isinstance(event, HostLooked):
            if self._may_copy:
                context.apply(event)
        else:
            before = self.phase
            context.now_s = getattr(event, "now_s", context.now_s)
            _EVENTS[type(event)](self, event)
            self._note_changing(getattr(event, "now_s", None))
            after = self.phase
            assert before is after or (before, after) in TRANSITIONS, f"{before} to {after}"
        commands, context.commands = context.commands, []
        return commands

    def _note_changing(self, now_s: float | None) -> None:
        """Update `_changing_since_s`: the time of the first event with a time in this change."""
        if not (self.busy or self._preparation.expected):
            self._changing_since_s = None
        elif self._changing_since_s is None:
            self._changing_since_s = now_s

    def plan(self, now_s: float) -> Microbatch | None:
        """Plan the leader's next microbatch; None without work or without a pipeline slot."""
        planner = self._context.planner
        if not self.may_plan or not planner.has_slot:
            return None
        microbatch = planner.plan(now_s)
        if microbatch is not None:
            # The microbatch may reuse released blocks already: no transfer may access them.
            if microbatch.released:
                self._kv.forget(microbatch.released)
            self._kv.claim(chunk.seq_id for chunk in microbatch.batch.chunks)
        return microbatch

    # --- requests

    def _arrive(self, event: RequestArrived) -> None:
        """Start a sequence for a request; refuse a duplicate.

        An adopted sequence of the same request is replaced instead: the gateway lost the worker
        that led the sequence before, and retries without knowing that it was adopted.
        """
        context = self._context
        seq_id = event.request.request_id
        current = context.answering.seq_id_of(request_id_of(seq_id))
        if current in context.planner.sequences:
            if not context.answering.was_adopted(current):
                context.commands.append(duplicate_id(seq_id))
                return
            self._abort(current)
        context.answering.begin(seq_id)
        context.apply(event)
        target, sequence = event.request.hand_to, context.planner.sequences.get(seq_id)
        if target is not None and sequence is not None:
            self._shipping.hand_over(sequence, target)
        # A worker that does not lead hands the request over. While DRAINING, the request waits and
        # is handed over with all other sequences after the switch.
        if self._next is None and not context.leads and seq_id in context.planner.sequences:
            self._handover.send(seq_id, context.leader)

    def _continue_drain(self, event: DrainContinued) -> None:
        self._leaving = True
        # During a change, sequences are on their way to their leaders, and KV is in transit.
        if self.settled and self.leads:
            shipped = self._shipping.outgoing.held_back(event.now_s)
            self._context.apply(replace(event, shipped=shipped))

    def _abort_request(self, event: RequestAborted) -> None:
        self._abort(self._context.answering.seq_id_of(event.request_id))

    def _abort(self, seq_id: str) -> None:
        """Abort a sequence, which may be at its new leader; unknown ids and "" are ignored."""
        self._context.answering.end(seq_id)
        if self._handover.abort(seq_id):
            return
        if self._adoption.waiting:
            # Its KV may be at stages of the last configuration, which free it only at the end of a
            # move. Moves start once all stages have joined.
            self._aborted.append(seq_id)
            return
        self._context.apply(RequestAborted(self._context.now_s, seq_id))

    # --- shipments to and from workers of other groups

    def _ask_shipping(self, event: ShippingAsked) -> None:
        self._shipping.ask(event, self._shipping_obstacle)

    def _receive(self, event: vocabulary.FrameReceived[Any]) -> None:
        peer, frame = event.peer, event.frame
        if type(frame) in _SHIPMENT_FRAMES:
            obstacle = self._shipping_obstacle
            if self._leaving:
                obstacle = obstacle or "it shuts down"
            self._shipping.receive(peer, frame, event.now_s, obstacle)
        else:
            self._frames.receive(peer, frame)

    def _note_outcome(self, outcome: TransferOutcome) -> None:
        intact = outcome.status is not TransferStatus.FAILED
        if not self._shipping.note_transfer(outcome.transfer_id, intact):
            self._kv.note_outcome(outcome)

    @property
    def _shipping_obstacle(self) -> str:
        """Why requests can neither leave nor arrive now with their KV; "" if they can."""
        if not (self.settled and self.may_plan) or self._preparation.running:
            return "its group changes"
        return "its group has several workers" if self.planner.stages > 1 else ""

    # --- changes

    def _commit(self, event: vocabulary.ConfigurationCommitted) -> None:
        """Begin to drain for a newer committed configuration; ignore an outdated event."""
        new = Configuration.of(self._context.worker_id, event.groups)
        newest = self._next or self._context.configuration
        if newest is not None and new.epoch <= newest.epoch:
            return
        # Other members may have entered a configuration that this member skips.
        skipped = self._next or self._preparation.ready_before(new)
        if skipped is not None:
            for peer in sorted(skipped.members - {new.worker_id}):
                self._context.commands.append(
                    vocabulary.SendFrame(peer, frames.EpochAbandoned(), skipped.own)
                )
        self._next = new
        self._preparation.drop_queued()
        timeout_s = DRAIN_TIMEOUT_S if self._context.leads else DRAINED_TIMEOUT_S
        self._drain_until_s = event.now_s + timeout_s

    def _take_turn(self, event: vocabulary.TurnTaken) -> None:
        if self._next is None and self._lost.isolation.expire(event.now_s):
            self._abort_all()
        if self._lost.isolation.cannot_settle(event.now_s) and self._own_group_unsettled:
            self._preparation.refuse_queued()
        self._preparation.advance(self.settled)
        if self._next is not None and self._is_drained(self._next, event.now_s):
            self._end_configuration(self._next)
            self._preparation.end(self._next)
            self._context.commands.append(vocabulary.SwitchStage(self._next))
            return  # the answer, `StageSwitched`, continues the change
        self._begin_when_joined()
        if self._next is None and not self._lost.isolation.lost_member:
            self._handover.hand_over_parked()
        if not self._adoption.waiting:
            self._moves.advance()
            if self._all_arrived:
                self._orphaned_kv.announce(self._lost.unreachable)
        self._capacity.answer_waiting()
        self._kv.sweep()
        if self._shipping.active:
            self._shipping.advance(event.now_s, self._shipping_obstacle)

    def _is_drained(self, new: Configuration, now_s: float) -> bool:
        """Whether this member may leave the present configuration.

        True if it expects no further frame of that configuration, after the timeout, and if the
        next configuration lacks layers, since its sequences must then be recomputed anyway.
        """
        if now_s > self._drain_until_s or not self._serves(new):
            return True
        # A lost leader will not send `Drained`, unless it is in the new group as well: such a
        # change has reconnected the members, so the leader's frames are still to come.
        if self._context.leader in self._lost.lost_workers - new.own.workers:
            return True
        if not self._context.leads and self._frames.drained:
            if not self._frames.leader_has_left:
                return self._handover.settled
            return self._handover.settled_except(self._context.leader)
        # After the loss of a member, microbatches in flight do not return to the leader.
        ended = self._lost.isolation.lost_member or not self.planner.in_flight
        return self._context.leads and self._handover.settled and ended

    def _end_configuration(self, new: Configuration) -> None:
        """Release the planner's state of this configuration, and notify members that it leaves.

        Called right before the switch, because `Joined` then reports the blocks in use here.
        """
        context, old = self._context, self._context.configuration
        # Members of the last change that are not in the new one must not wait for frames or KV.
        if old is not None and self._moving:
            for peer in sorted(old.members - old.own.workers - new.members):
                context.send(peer, frames.EpochAbandoned())
        if old is not None:
            for peer in sorted(old.own.workers - new.members):
                context.send(peer, frames.MemberRemoved())
        self._shipping.end_all("the groups of workers change")
        if context.planner.in_flight:
            context.apply(FlightDiscarded())  # microbatches that missed the timeout run again
        self._handover.end_aborted()
        released = context.take_freed(ConfigurationEnded())
        if context.leads:
            context.send_along(frames.Drained(released))
            for stage in context.stages[1:]:  # follows every `Adopted` on the same connection
                context.send(stage.worker_id, frames.AllAdopted())

    def _enter_configuration(self, answer: vocabulary.StageSwitched) -> None:
        """Enter the new configuration: the memory runs its layers now."""
        context, new = self._context, self._next
        assert new is not None
        old = context.configuration
        if not self._serves(new) or (old is not None and old.own.workers - new.members):
            self._recompute_all()
            self._note_division(old)
        if answer.blocks >= context.table.pool.num_blocks:
            context.apply(PoolGrown(answer.blocks))
        missed = old is not None and not old.leads and not self._frames.drained
        # `begin` saves the old stages, so it must precede the new configuration; then all parts
        # reset their state.
        self._handover.begin()
        context.configuration, self._next = new, None
        self._leads_all_layers = new.leads and self._serves(new)
        self._frames.enter()
        self._lost.enter()
        self._kv.enter(answer)
        self._orphaned_kv.enter()
        self._moves.enter()
        self._capacity.enter()
        context.answering.keep_only(context.planner.sequences)
        self._adoption.enter()
        if not new.leads:
            # Before the hand-over, because the leader must count blocks before it adopts sequences.
            table = context.table
            joined = frames.Joined(table.pool.usable, table.block_count, missed)
            context.send(new.leader, joined)
        self._handover.distribute(new)
        if not new.leads:
            # Only a leader keeps a ledger of other stages' blocks: clear this worker's.
            context.apply(StagesConfigured())
        for leader in sorted(new.leaders - {context.worker_id}):
            context.send(leader, frames.AllAdopted())
        self._begin_when_joined()

    def _recompute_all(self) -> None:
        """Preempt all sequences and free all KV: it is incomplete in the new configuration.

        The new stages lack layers, or a former member is not in the change: it has died, or this
        member missed a change that separated them. Sequences that this member leads are recomputed
        once its group has all layers. Gateways retry those that a lost member led.
        """
        context = self._context
        for seq_id in tuple(context.planner.sequences):
            context.apply(SequencePreempted(seq_id))
        self._kv.release_everything()
        context.take_freed(ReleasedTaken())  # no stage is left to notify

    def _note_division(self, old: Configuration | None) -> None:
        """Notify the planner how many living former members may serve this leader's requests.

        Gateways may retry its requests at any of them. Members count as alive unless reported lost.
        """
        if old is not None and old.leads:
            living = old.own.workers - self._lost.lost_workers
            self._context.apply(GroupDivided(len(living)))

    def _abort_all(self) -> None:
        """Abort all requests: the group continues without this member, and clients retry there."""
        self._leads_all_layers = False
        for seq_id in tuple(self._context.planner.sequences):
            self._abort(seq_id)

    def _begin_when_joined(self) -> None:
        """If all stages have joined, begin to lead, and handle deferred frames and aborts."""
        for peer, frame in self._adoption.begin_when_joined():
            self._frames.handle(peer, frame)
        self._lost.give_up_lost()
        if self._aborted and not self._adoption.waiting:
            aborted, self._aborted = self._aborted, []
            for seq_id in aborted:
                self._abort(seq_id)

    # --- helpers

    @property
    def _epoch(self) -> int:
        configuration = self._context.configuration
        return -1 if configuration is None else configuration.epoch

    def _serves(self, configuration: Configuration) -> bool:
        return serves(configuration.stages, self._context.num_layers)


_SHIPMENT_FRAMES = frozenset(get_args(ShipmentFrame))
_PLANNER_EVENTS = (
    *(IterationFinished, IterationDropped, IterationSuspended),
    *(CostModelLearned, BlocksBorrowed),
    *(HostGrown, BlocksSaved, BlocksRecalled),
)
_EVENTS: dict[type[Any], Callable[[Changeover, Any], None]] = {
    RequestArrived: Changeover._arrive,
    RequestAborted: Changeover._abort_request,
    DrainContinued: Changeover._continue_drain,
    vocabulary.ConfigurationCommitted: Changeover._commit,
    vocabulary.TurnTaken: Changeover._take_turn,
    vocabulary.FrameReceived: Changeover._receive,
    vocabulary.PeersLost: lambda self, event: self._lost.note_lost(event),
    vocabulary.StageSwitched: Changeover._enter_configuration,
    vocabulary.DepartedReleased: lambda self, event: self._kv.note_released(event),
    TransferOutcome: Changeover._note_outcome,
    ShippingAsked: Changeover._ask_shipping,
    ShippingPeerLost: lambda self, event: self._shipping.note_lost(event.worker_id),
    vocabulary.PreparationAsked: lambda self, event: self._preparation.queue(event, self.draining),
    vocabulary.PreparationAborted: lambda self, event: self._preparation.abort(event.attempt),
    vocabulary.MembersConnected: lambda self, event: self._preparation.note_connected(event),
    vocabulary.RestoreMeasured: lambda self, event: self._preparation.note_measured(event),
    vocabulary.KvShrunk: lambda self, event: self._preparation.note_shrunk(event),
    vocabulary.SlabVerified: lambda self, event: self._preparation.note_verified(event),
    vocabulary.KvMapped: lambda self, _event: self._preparation.note_mapped(),
    vocabulary.RestoreFailed: lambda self, event: self._preparation.note_failed(event),
    vocabulary.RestoreUndone: lambda self, event: self._preparation.note_undone(event),
}
_known = {get_origin(kind) or kind for kind in get_args(vocabulary.Event)}
assert _EVENTS.keys() | {*_PLANNER_EVENTS, RequeueChecked, HostLooked} == _known, (
    "each event has a handler"
)
