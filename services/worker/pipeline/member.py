"""A worker's engine as a member of its group: serves its stage and changes configuration.

A change, whichever it is (merge, re-merge, split), has the same steps at every member:

1. The old leader launches nothing more, waits until nothing is in flight, and tells its stages
   (`Drained`). Results that do not come in time are given up: those positions run again.
2. Each member switches its layers and tells its new leader how many blocks it has (`Joined`).
3. Old leaders hand their sequences to the new one (`Adopt`); a sequence goes on as soon as its KV
   is where it runs (`kv_exchange`). New requests run at once.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from services.common.event_log import EventLog
from services.core.iteration.events import (
    Event,
    RequestAborted,
    RequestArrived,
)
from services.core.iteration.ledger import Follower
from services.core.iteration.sequence import Phase
from services.core.iteration.state import IterationState
from services.worker.ipc import (
    AdoptedRequest,
    ApplyConfiguration,
    Prepare,
    Prepared,
)
from services.worker.pipeline.configuration import Configuration, stages_of
from services.worker.pipeline.connections import Connections
from services.worker.pipeline.frames import (
    Activations,
    Adopt,
    Adopted,
    AllAdopted,
    Capacity,
    CapacityKept,
    Credit,
    Drained,
    FetchRefused,
    FetchSlab,
    FreeKv,
    Joined,
    KvEnded,
    KvFreed,
    Reserve,
    Reserved,
    Samples,
    SendKv,
)
from services.worker.pipeline.handover import Handover
from services.worker.pipeline.kv_exchange import LeaderExchange, MemberExchange
from services.worker.pipeline.links import Links, Received
from services.worker.pipeline.news import News
from services.worker.pipeline.preparation import ParameterSource, Preparation
from services.worker.pipeline.serving import Interrupts, Serving
from services.worker.pipeline.stage_runner import StageRunner
from services.worker.transfer.frame import Bytes
from services.worker.transfer.lane import Lane, PeerConnected, PeerLost
from services.worker.transfer.mover import Mover
from services.worker.transfer.pieces import BulkPiece, KvPiece
from services.worker.transfer.receiver import IsCurrent, Unpack
from services.worker.transfer.transfer_event import (
    Standing,
    TransferFailed,
    TransferReceived,
    TransferSent,
)

DRAIN_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)


class Member:
    """One engine. `step` never blocks longer than an iteration; all methods are its thread's."""

    def __init__(
        self,
        worker_id: str,
        state: IterationState,
        stage: StageRunner,
        links: Links,
        bulk: Lane,
        mover_of: Callable[[IsCurrent, Unpack], Mover],
        now_s: Callable[[], float],
        event_log: EventLog | None = None,
    ) -> None:
        """`bulk` is the lane of the mover that `mover_of` makes."""
        mover = mover_of(self._standing_of, self._unpack)
        self.state = state
        self.stage = stage
        self.links = links
        self.mover = mover
        self.configuration: Configuration | None = None
        self._worker_id = worker_id
        self._now_s = now_s
        self._swept = True
        self._exchange = LeaderExchange(links, state)
        self._kv = MemberExchange(links, stage, mover)
        self._serving = Serving(state, stage, links, self._kv, now_s, event_log)
        self._handover = Handover(worker_id, state, links, now_s)
        self._parameters = ParameterSource(links, stage, mover)
        self._connections = Connections(links.lane, bulk, now_s)
        self._preparation: Preparation | None = None
        self._next: Configuration | None = None
        self._drain_until_s = 0.0
        self._drained = False
        self._joined: dict[str, Joined] | None = None
        self._deferred: list[Received] = []  # until the group's stages are known
        self._not_done: set[str] = set()  # who may still hand us sequences
        self._capacity_asked: dict[str, Capacity] = {}
        self._about_memory: dict[type, Callable[[str, Any], None]] = {
            Reserve: self._reserve,
            Reserved: self._exchange.note_reserved,
            SendKv: self._kv.send,
            KvEnded: self._exchange.note_ended,
            FreeKv: self._kv.free,
            KvFreed: self._exchange.note_freed,
            Capacity: self._set_capacity,
            CapacityKept: self._note_kept,
            Credit: self._take_credit,
            FetchSlab: self._parameters.send,
            FetchRefused: self._note_refused,
        }

    # --- what the servicer says

    def handle(self, event: Event) -> None:
        """Apply an event of a request."""
        if isinstance(event, RequestAborted) and event.request_id in self._handover.pending:
            # Its new leader has it: the gateway's abort goes there, or nobody attaches to it.
            return
        self._serving.handle(event)
        if not isinstance(event, RequestArrived) or self._next is not None:
            return  # before a switch it waits for that, as all others do
        configuration, request_id = self.configuration, event.request.request_id
        if configuration is None or configuration.leads or request_id not in self.state.sequences:
            return
        # It came after this engine had stopped leading.
        self._handover.send(request_id, configuration.leader)

    def apply(self, command: ApplyConfiguration) -> None:
        """Change to a committed configuration, unless it is not newer."""
        configuration = Configuration.of(command.groups, self._worker_id)
        newest = self._next or self.configuration
        if newest is None or configuration.epoch > newest.epoch:
            self._next = configuration
            self._drain_until_s = self._now_s() + DRAIN_TIMEOUT_S

    def prepare(self, command: Prepare) -> None:
        """Get ready for groups that may be committed; `News.prepared` has the answer."""
        if not self.settled or self._preparation is not None:
            busy = "the last change is not over here yet; try again"
            self._serving.news.prepared.append(Prepared(command.attempt, busy))
            return
        self._preparation = Preparation(
            command,
            self.links,
            self._connections,
            self.stage,
            self.state,
            self.mover,
            self._now_s,
            self.configuration,
        )

    def abandon(self, attempt: str) -> None:
        """Undo a preparation; unknown ones are ignored."""
        if self._preparation is not None and self._preparation.attempt == attempt:
            self._preparation.undo()
            self._preparation = None

    @property
    def settled(self) -> bool:
        """Whether the last change is wholly over, so that another one may be prepared."""
        return (
            self._next is None
            and self._joined is None
            and not self._not_done
            and not self._handover.pending
            and self._exchange.settled
            and self._kv.settled
        )

    @property
    def alone(self) -> bool:
        """Whether this is a group of one in which nothing changes."""
        stages = self.configuration.stages if self.configuration is not None else ()
        return len(stages) <= 1 and not self.busy_changing

    @property
    def busy_changing(self) -> bool:
        """Whether a change or a preparation needs turns even when nothing arrives."""
        preparing = self._preparation is not None and not self._preparation.over
        return preparing or not self.settled or not self._swept

    def take_news(self) -> News:
        """What happened since the last call."""
        news, self._serving.news = self._serving.news, News()
        return news

    # --- one turn

    def step(self, interrupts: Interrupts | None = None) -> bool:
        """Take what has come, go on with a change, run at most one microbatch; False if idle.

        `interrupts` gives, for the requests of an iteration of a group of one, what is asked
        before each layer: whether to give the iteration up.
        """
        received = self.links.receive()
        for one in received:
            self._take(one)
        moved = self._take_events()
        self._advance_preparation()
        self._advance_change()
        if not self.settled:
            self._exchange.advance()
            self._kv.sweep()
        self._keep_capacity()
        with self.stage.lock:
            self._swept = self.stage.runner.stage_memory.finish_drop()
        ran = self._may_launch and self._serving.launch(self.configuration, interrupts)
        return bool(received) or moved or ran

    def _take(self, received: Received) -> None:
        peer, body = received.peer, received.body
        if self._joined is not None and not isinstance(body, Joined | AllAdopted):
            self._deferred.append(received)
            return
        match body:
            case Activations():
                assert self.configuration is not None
                self._serving.follow(self.configuration, body, received.payload)
            case Samples():
                self._serving.finish(body)
            case Drained():
                with self.stage.lock:
                    self.state.table.apply(body.released, ())
                self._drained = True
            case Joined():
                if self._joined is not None:
                    self._joined[peer] = body
            case Adopt():
                self._adopt(peer, body)
            case Adopted():
                assert self.configuration is not None
                self._handover.note_adopted(peer, body, self.configuration, self._serving.news)
            case AllAdopted():
                self._not_done.discard(peer)
            case _:
                self._about_memory[type(body)](peer, body)

    def _reserve(self, _peer: str, body: Reserve) -> None:
        assert self.configuration is not None
        self._pass_on(body)
        if body.worker_id == self._worker_id:
            self._kv.reserve(self.configuration.leader, body)

    def _pass_on(self, body: Reserve | CapacityKept) -> None:
        """Release what it says, and let the stages behind this one do so, too."""
        configuration = self.configuration
        assert configuration is not None
        if body.released:
            with self.stage.lock:
                self.state.table.apply(body.released, ())
                self._kv.forget(body.released)
        if not (configuration.leads or configuration.is_last):
            self.links.send(configuration.next_worker, body)

    def _note_kept(self, _peer: str, body: CapacityKept) -> None:
        self._pass_on(body)
        if body.worker_id == self._worker_id and self._preparation is not None:
            self._preparation.note_kept(body.attempt)

    def _take_credit(self, peer: str, body: Credit) -> None:
        self.state.credit(self._stage_of(peer), body.blocks)

    def _note_refused(self, _peer: str, body: FetchRefused) -> None:
        self._note_failed(body.transfer_id)

    def _take_events(self) -> bool:
        for lane_event in self.links.events():
            self._connections.note_activations(lane_event)
        events = self.mover.events()
        for event in events:
            match event:
                case PeerConnected() | PeerLost():
                    self._connections.note_bulk(event)
                case TransferReceived(transfer_id=transfer_id):
                    if self._preparation is None or not self._preparation.note_ended(
                        transfer_id, intact=True
                    ):
                        self._kv.note_received(transfer_id)
                case TransferSent(transfer_id=transfer_id):
                    self._kv.note_sent(transfer_id)
                case TransferFailed(transfer_id=transfer_id, reason=reason):
                    log.warning("transfer %s failed: %s", transfer_id, reason)
                    self._note_failed(transfer_id)
        return bool(events)

    def _note_failed(self, transfer_id: str) -> None:
        preparation = self._preparation
        if preparation is None or not preparation.note_ended(transfer_id, intact=False):
            self._kv.note_failed(transfer_id)

    def _standing_of(self, group_id: str, epoch: int) -> Standing:
        """What a piece of this epoch is worth now; on the mover's thread."""
        if not group_id or epoch == self.links.epoch:
            return Standing.CURRENT
        return Standing.FUTURE if epoch > self.links.epoch else Standing.STALE

    def _unpack(self, piece: BulkPiece, payload: Bytes) -> None:
        """Store a piece; on the mover's thread."""
        if isinstance(piece, KvPiece):
            self._kv.take(piece, payload)
        else:
            self._parameters.take(piece, payload)

    def _advance_preparation(self) -> None:
        if self._preparation is None or self._preparation.over:
            return
        answer = self._preparation.advance()
        if answer is not None:
            self._serving.news.prepared.append(answer)
            if answer.error:
                self._preparation.undo()
                self._preparation = None

    # --- serving

    @property
    def _may_launch(self) -> bool:
        """Whether this engine plans now; one that has no configuration yet serves alone."""
        if self._next is not None or self._joined is not None:
            return False
        configuration = self.configuration
        return configuration is None or (configuration.leads and self._serves(configuration))

    # --- changing

    def _advance_change(self) -> None:
        if self._next is not None and self._is_drained(self._next):
            self._switch(self._next)
        if self._joined is not None and self._all_joined():
            self._begin_leading()
            deferred, self._deferred = self._deferred, []
            for received in deferred:
                self._take(received)

    def _is_drained(self, new: Configuration) -> bool:
        """Whether nothing of the present configuration is in flight here, or will come back."""
        late = self._now_s() > self._drain_until_s or not self._serves(new)
        if self._handover.pending and not late:
            return False
        if self.configuration is None or len(self.configuration.stages) == 1:
            return True
        if not self.configuration.leads:
            return self._drained or late
        if self.state.in_flight and not late:
            return False
        if self.state.in_flight:
            log.warning("microbatches in flight did not come back in time; they run again")
            self.state.discard_in_flight()
        released = self.state.take_released()
        for stage in self.configuration.stages[1:]:
            self.links.send(stage.worker_id, Drained(released))
        return True

    def _serves(self, configuration: Configuration) -> bool:
        return configuration.serves(self.stage.runner.stage_memory.num_layers)

    def _end_everything(self) -> None:
        """A member was lost, and with it KV of every request: who asked has been told."""
        now_s = self._now_s()
        for request_id in tuple(self.state.sequences):
            self._serving.handle(RequestAborted(now_s, request_id))
        with self.stage.lock:
            for request_id in self.state.table.request_ids:
                self.state.table.release(request_id)

    def _switch(self, new: Configuration) -> None:
        """Run other layers from here on; the only pause that a change makes."""
        if not self._serves(new):
            self._end_everything()
        old, self.configuration, self._next = self.configuration, new, None
        self._drained = False
        self._end_preparation(new)
        memory = self.stage.runner.stage_memory
        with self.stage.lock:
            stage = new.stage
            if len(memory.layers) > stage.num_layers:
                report = memory.drop_to(stage.first_layer, stage.end_layer)
                log.info("dropped %d bytes in %.0f us", report.dropped_bytes, report.paused_us)
            else:
                memory.set_stage(stage.first_layer, stage.end_layer)
            pool = self.state.pool
            if memory.num_blocks >= pool.num_blocks:
                pool.grow(memory.num_blocks)
        self.links.enter(new.group_id, new.epoch)
        self._kv.enter(new.leader)
        self._capacity_asked.clear()
        self._deferred.clear()
        self._handover.begin(old, memory.num_layers)
        self._not_done = set(new.members) - {self._worker_id} if new.leads else set()
        if new.leads:
            self._joined = {}
        else:
            self.links.send(new.leader, Joined(pool.usable, pool.taken_count))
        self._handover.deal(new)
        leaders = {stages_of(group)[0].worker_id for group in new.groups}
        for worker_id in leaders - {self._worker_id}:
            self.links.send(worker_id, AllAdopted())

    def _end_preparation(self, new: Configuration) -> None:
        """Use what was prepared, or undo it if it was for other groups than these."""
        preparation, self._preparation = self._preparation, None
        if preparation is not None and tuple(preparation.command.groups) != new.groups:
            preparation.undo()

    # --- leading

    def _all_joined(self) -> bool:
        assert self.configuration is not None and self._joined is not None
        return all(stage.worker_id in self._joined for stage in self.configuration.stages[1:])

    def _begin_leading(self) -> None:
        configuration, joined = self.configuration, self._joined
        assert configuration is not None and joined is not None
        self._joined = None
        handover = self._handover
        before = [stage.worker_id for stage in handover.old_stages]
        if before[:1] != [self._worker_id]:
            before = []  # only who led them has counted their blocks
        own = [s for s in self.state.sequences.values() if s.request_id not in handover.pending]
        self.state.configure(
            tuple(
                Follower(
                    joined[stage.worker_id].capacity,
                    joined[stage.worker_id].used,
                    before.index(stage.worker_id) if stage.worker_id in before else None,
                )
                for stage in configuration.stages[1:]
            )
        )
        self._exchange.enter(configuration)
        for sequence in own:
            if sequence.phase is Phase.HELD:
                highest = self.state.table.highest_block((sequence.request_id,))
                self._exchange.add(
                    sequence.request_id, handover.old_group, handover.old_stages, highest
                )

    def _adopt(self, peer: str, adopt: Adopt) -> None:
        """Take a sequence over; a repetition is only acknowledged."""
        configuration = self.configuration
        assert configuration is not None
        if not configuration.leads:
            # The sender saw this member lead; the group has changed again since.
            log.warning("%s handed a request to a member that does not lead", peer)
            return
        request_id = adopt.sequence.request.request_id
        fresh = request_id not in self.state.sequences
        if fresh:
            arrival_s = self._now_s() - adopt.age_s
            state = replace(adopt.sequence, arrival_s=arrival_s)
            held_by = {stage.worker_id for stage in adopt.stages}
            absent = frozenset(
                index
                for index, stage in enumerate(configuration.stages)
                if stage.worker_id not in held_by
            )
            self._serving.news.add(self.state.adopt(state, absent))
            self._serving.news.adopted.append(
                AdoptedRequest(
                    request_id, configuration.group_id, configuration.epoch, list(state.output_ids)
                )
            )
        self.links.send(peer, Adopted(request_id, len(adopt.sequence.output_ids)))
        if fresh and adopt.sequence.blocks:
            self._exchange.add(request_id, adopt.origin, adopt.stages, adopt.highest_block)

    def _stage_of(self, worker_id: str) -> int:
        assert self.configuration is not None
        return [stage.worker_id for stage in self.configuration.stages].index(worker_id)

    # --- capacity

    def _set_capacity(self, peer: str, body: Capacity) -> None:
        index = self._stage_of(peer)
        if index and self._joined is None:
            self.state.set_capacity(index, body.blocks)
            self._capacity_asked.pop(peer, None)
            if body.attempt:
                self._capacity_asked[peer] = body

    def _keep_capacity(self) -> None:
        """Answer members that wait until few enough of their blocks are in use."""
        for peer, asked in list(self._capacity_asked.items()):
            if self.state.roster.ledger.used[self._stage_of(peer) - 1] <= asked.blocks:
                del self._capacity_asked[peer]
                assert self.configuration is not None
                body = CapacityKept(peer, asked.attempt, self.state.take_released())
                self.links.send(self.configuration.next_worker, body)
