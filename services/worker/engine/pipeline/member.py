"""A worker's engine as a member of its group: serves its stage and changes configuration.

Every change-over (merge, re-merge, split) has the same steps at every member:

1. Drain: the old leader launches nothing more, waits until nothing is in flight, and tells its
   stages (`Drained`). It gives up results that do not come in time: those positions run again.
2. Switch: each member switches its layers and tells its new leader how many blocks it has
   (`Joined`).
3. Adopt and exchange: old leaders hand their sequences to the new ones (`Adopt`). A sequence goes
   on as soon as its KV is where it runs (`kv_exchange`). New requests run at once.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from services.core.cost.bubble import StageTime
from services.core.cost.iteration_time import IterationTime
from services.core.cost.iteration_tokens import IterationTokens
from services.core.planner.events import (
    RefuseRequest,
    RequestAborted,
    RequestArrived,
    WaitLooked,
)
from services.core.planner.refusal import known_already
from services.core.planner.sequence_names import SequenceNames
from services.core.planner.state import IterationState
from services.worker.engine.pipeline.capacity import MemberCapacity
from services.worker.engine.pipeline.configuration import Configuration, stages_of
from services.worker.engine.pipeline.connections import Connections
from services.worker.engine.pipeline.draining import Draining
from services.worker.engine.pipeline.fact_log import FactLog
from services.worker.engine.pipeline.frames import (
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
    GivenUp,
    Joined,
    KvEnded,
    KvFreed,
    Reserve,
    Reserved,
    Samples,
    SendKv,
)
from services.worker.engine.pipeline.handover import Handover
from services.worker.engine.pipeline.kv_exchange import LeaderExchange, MemberExchange
from services.worker.engine.pipeline.links import Links, Received
from services.worker.engine.pipeline.news import News
from services.worker.engine.pipeline.preparation import ParameterSource, Preparation
from services.worker.engine.pipeline.preparing import Preparing
from services.worker.engine.pipeline.serving import Interrupts, Serving
from services.worker.engine.pipeline.stage_runner import StageRunner
from services.worker.engine.pipeline.takeover import Takeover
from services.worker.engine.transfer.frame import Bytes
from services.worker.engine.transfer.lane import Identity, Lane, PeerConnected, PeerLost
from services.worker.engine.transfer.mover import Mover
from services.worker.engine.transfer.pieces import BulkPiece, KvPiece
from services.worker.engine.transfer.receiver import IsCurrent, Unpack
from services.worker.engine.transfer.transfer_event import (
    Standing,
    TransferFailed,
    TransferReceived,
    TransferSent,
)
from services.worker.ipc import (
    ApplyConfiguration,
    Prepare,
)

log = logging.getLogger(__name__)


class Member:
    """One engine. `step` never blocks longer than an iteration; all methods are its thread's."""

    def __init__(
        self,
        identity: Identity,
        state: IterationState,
        stage: StageRunner,
        links: Links,
        bulk: Lane,
        mover_of: Callable[[IsCurrent, Unpack], Mover],
        now_s: Callable[[], float],
        facts: FactLog | None = None,
    ) -> None:
        """`bulk` is the lane of the mover that `mover_of` makes."""
        mover = mover_of(self._standing_of, self._unpack)
        self.state = state
        self.stage = stage
        self.links = links
        self.mover = mover
        self.configuration: Configuration | None = None
        self._worker_id = worker_id = identity.worker_id
        self._now_s = now_s
        self._swept = True
        self._kv = MemberExchange(links, stage, mover)
        self._exchange = LeaderExchange(links, state, self._kv)
        self._names = SequenceNames(identity.incarnation)
        self._serving = Serving(state, stage, links, self._kv, self._names, now_s)
        self._facts = facts or FactLog(None, state, stage.runner.stage_memory, now_s)
        self._handover = Handover(worker_id, state, links, now_s)
        self._takeover = Takeover(
            state, links, self._exchange, self._handover, self._serving, now_s
        )
        self._parameters = ParameterSource(links, stage, mover)
        self._connections = Connections(links.lane, bulk, now_s)
        self._preparing = Preparing(self._preparation_of, self._serving, self._facts)
        self._capacity = MemberCapacity(state, stage, links, self._kv)
        self._next: Configuration | None = None
        self._draining = Draining(state, stage, links, self._handover, now_s)
        self._left: set[str] = set()  # lost in this configuration, outside the own group
        self._aborted: list[str] = []  # sequences, while a new leader waits for its stages
        self._handlers: dict[type, Callable[[str, Any], None]] = {
            Reserve: self._reserve,
            Reserved: self._exchange.note_reserved,
            SendKv: self._kv.send,
            KvEnded: self._exchange.note_ended,
            FreeKv: self._kv.free,
            KvFreed: self._note_freed,
            Capacity: self._capacity.set,
            CapacityKept: self._note_kept,
            Credit: self._capacity.credit,
            FetchSlab: self._parameters.send,
            FetchRefused: self._note_refused,
            GivenUp: self._give_up,
        }

    # --- what the servicer says

    def handle(self, event: RequestArrived | RequestAborted | WaitLooked) -> None:
        """Apply an event of a request; one that another sequence answers here goes on as it is.

        Unless that was adopted: its gateway, which has lost its worker, does not know of it.
        """
        if isinstance(event, RequestAborted):
            self._abort(self._names.name_of(event.request_id))
            return
        if isinstance(event, WaitLooked):
            self._serving.handle(event)
            return
        current = self._names.name_of(event.request.request_id)
        if current in self.state.sequences:
            if not self._names.was_adopted(current):
                self.refuse(known_already(event.request.request_id))
                return
            self._abort(current)
        self._begin(event)

    def _begin(self, event: RequestArrived) -> None:
        """Begin a sequence for a request."""
        name = self._names.begin(event.request.request_id)
        self._serving.handle(replace(event, request=replace(event.request, request_id=name)))
        if self._next is not None:
            return  # before a switch it waits for that, as all others do
        configuration = self.configuration
        if configuration is None or configuration.leads or name not in self.state.sequences:
            return
        # It came after this engine had stopped leading.
        self._handover.send(name, configuration.leader)

    def _abort(self, name: str) -> None:
        """Nobody wants a sequence any more, wherever it is; "" and unknown ones are ignored."""
        self._names.end(name)
        if self._handover.give_up(name):
            return
        if self._takeover.waiting:
            # Its KV may be at stages of the last configuration, which only a move tells to free it.
            self._aborted.append(name)
            return
        self._serving.handle(RequestAborted(self._now_s(), name))

    def refuse(self, refusal: RefuseRequest) -> None:
        """Refuse a request that the planner never saw."""
        self._serving.news.add((refusal,))

    def apply(self, command: ApplyConfiguration) -> None:
        """Change to a committed configuration, unless it is not newer."""
        configuration = Configuration.of(command.groups, self._worker_id)
        newest = self._next or self.configuration
        if newest is None or configuration.epoch > newest.epoch:
            self._next = configuration
            self._draining.begin(self.configuration)

    def prepare(self, command: Prepare) -> None:
        """Get ready for groups that may be committed; `News.prepared` has the answer."""
        self._preparing.ask(command)

    def abandon(self, attempt: str) -> None:
        """Abort a preparation; unknown ones are ignored."""
        self._preparing.abandon(attempt)

    def _preparation_of(self, command: Prepare, present: Configuration | None) -> Preparation:
        return Preparation(
            command,
            self.links,
            self._connections,
            self.stage,
            self.state,
            self.mover,
            self._now_s,
            present,
        )

    @property
    def settled(self) -> bool:
        """Whether the last change is wholly over, so that another one may be prepared."""
        return (
            self._next is None
            and self._takeover.settled
            and self._handover.settled
            and self._exchange.settled
            and self._kv.settled
            and not self._kv.unclaimed_by(self.state.sequences)
        )

    @property
    def alone(self) -> bool:
        """Whether this is a group of one in which nothing changes."""
        stages = self.configuration.stages if self.configuration is not None else ()
        return len(stages) <= 1 and not self.busy_changing

    @property
    def busy_changing(self) -> bool:
        """Whether a change or a preparation needs turns even when nothing arrives."""
        return self._preparing.running or not self.settled or not self._swept

    @property
    def pipeline_time(self) -> StageTime:
        """Time that this engine has spent as a stage of pipelines."""
        return self._serving.meter.total

    @property
    def iteration_time(self) -> IterationTime:
        """Time of its iterations, measured and as the cost model predicts."""
        return self._serving.iterations.total

    @property
    def iteration_tokens(self) -> IterationTokens:
        """The tokens of all iterations that it has planned."""
        return self._serving.iteration_tokens.total

    def take_news(self) -> News:
        """Everything to report since the last call."""
        news, self._serving.news = self._serving.news, News()
        return news

    # --- one turn

    def take(self) -> bool:
        """Take frames of other members, and go on with a change; False if idle.

        A microbatch of which this is a later stage runs here. Raises MemberUnreachable, after which
        nothing but a new engine helps.
        """
        received = self.links.receive()
        for one in received:
            self._take(one)
        moved = self._take_events()
        if self.configuration is not None and self._connections.any_lost:
            self._look_after_lost(self.configuration)
        self._preparing.advance(self.configuration, self.settled)
        self._advance_change()
        if not self.settled:
            self._exchange.advance()
            self._kv.sweep()
        self._capacity.keep()
        with self.stage.lock:
            self._swept = self.stage.runner.stage_memory.finish_drop()
        return bool(received) or moved

    def launch(self, interrupts: Interrupts | None = None) -> bool:
        """Run at most one microbatch as its first stage; False if there is none to run now.

        `interrupts` gives, for the requests of an iteration of a group of one, what is asked
        before each layer: whether to give the iteration up.
        """
        if self._may_launch:
            ran = self._serving.launch(self.configuration, interrupts)
        else:
            ran = False
            self._serving.pause()
        self._facts.look(self.links.epoch, self.settled)
        return ran

    def _look_after_lost(self, configuration: Configuration) -> None:
        """Give up work that only lost peers could do. Raises MemberUnreachable."""
        group = {stage.worker_id for stage in configuration.stages}
        members = configuration.members.values()
        lost = set(self._connections.lost(members))
        if not self._takeover.waiting and (unheard := lost - group - self._left):
            self._left |= unheard
            for worker_id in unheard:
                self._leave(worker_id)
            leaders = {stages_of(one)[0].worker_id for one in configuration.groups}
            if configuration.leads and leaders <= {self._worker_id, *lost}:
                self._kv.release_unclaimed(self.state.sequences)
        # A worker in another group matters only for as long as requests move.
        settled = self.settled
        self._connections.check_reachable(
            one for one in members if one.worker_id in group or not settled
        )

    def _leave(self, worker_id: str) -> None:
        """A worker outside the own group is gone, to or from which requests may move.

        KV that it had is computed again, and requests that it leads now are over.
        """
        for request_id in self._handover.lose(worker_id, self._left):
            if self._handover.was_given_up(request_id):
                self._serving.handle(RequestAborted(self._now_s(), request_id))
        for request_id in self._handover.forget_stage(worker_id):
            self._go_on(request_id)
        self._takeover.note_all_adopted(worker_id)
        self._exchange.lose(worker_id)

    def _note_freed(self, peer: str, body: KvFreed) -> None:
        assert self.configuration is not None
        if self.configuration.leads:
            self._exchange.note_freed(peer, body)
        if self._handover.note_freed(peer, body.request_id):
            self._go_on(body.request_id)

    def _go_on(self, request_id: str) -> None:
        """Run a request that has come back, or hand it to the leader of now."""
        assert self.configuration is not None
        if self.configuration.leads:
            self.state.resume(request_id)
        else:
            self._handover.send(request_id, self.configuration.leader)

    def _take(self, received: Received) -> None:
        peer, body = received.peer, received.body
        if self._takeover.defers(received):
            return
        match body:
            case Activations():
                assert self.configuration is not None
                if not self._draining.over:
                    self._serving.follow(self.configuration, body, received.payload)
            case Samples():
                self._serving.finish(body)
            case Drained():
                assert self.configuration is not None
                self._draining.note(self.configuration, body)
            case Joined():
                self._takeover.note_joined(peer, body)
            case Adopt():
                self._takeover.adopt(peer, body)
            case Adopted():
                assert self.configuration is not None
                self._handover.note_adopted(peer, body, self.configuration, self._serving)
            case AllAdopted():
                self._takeover.note_all_adopted(peer)
            case _:
                self._handlers[type(body)](peer, body)

    def _reserve(self, _peer: str, body: Reserve) -> None:
        assert self.configuration is not None
        self._capacity.pass_on(body)
        if body.worker_id == self._worker_id:
            self._kv.reserve(self.configuration.leader, body)

    def _note_kept(self, _peer: str, body: CapacityKept) -> None:
        self._capacity.pass_on(body)
        if body.worker_id == self._worker_id:
            self._preparing.note_kept(body.attempt)

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
                    if not self._preparing.note_ended(transfer_id, intact=True):
                        self._kv.note_received(transfer_id)
                case TransferSent(transfer_id=transfer_id):
                    self._kv.note_sent(transfer_id)
                case TransferFailed(transfer_id=transfer_id, reason=reason):
                    log.warning("transfer %s failed: %s", transfer_id, reason)
                    self._note_failed(transfer_id)
        return bool(events)

    def _note_failed(self, transfer_id: str) -> None:
        if not self._preparing.note_ended(transfer_id, intact=False):
            self._kv.note_failed(transfer_id)

    def _standing_of(self, group_id: str, epoch: int) -> Standing:
        """Whether a piece of this epoch is current; on the mover's thread."""
        if not group_id or epoch == self.links.epoch:
            return Standing.CURRENT
        return Standing.FUTURE if epoch > self.links.epoch else Standing.STALE

    def _unpack(self, piece: BulkPiece, payload: Bytes) -> None:
        """Store a piece; on the mover's thread."""
        if isinstance(piece, KvPiece):
            self._kv.take(piece, payload)
        else:
            self._parameters.take(piece, payload)

    # --- serving

    @property
    def _may_launch(self) -> bool:
        """Whether this engine plans now; one that has no configuration yet serves alone."""
        if self._next is not None or self._takeover.waiting:
            return False
        configuration = self.configuration
        return configuration is None or (configuration.leads and self._serves(configuration))

    # --- changing

    def _advance_change(self) -> None:
        new = self._next
        if new is not None and self._draining.is_done(self.configuration, not self._serves(new)):
            self._switch(new)
        for received in self._takeover.advance():
            self._take(received)
        if self._aborted and not self._takeover.waiting:
            aborted, self._aborted = self._aborted, []
            for name in aborted:
                self._abort(name)

    def _serves(self, configuration: Configuration) -> bool:
        return configuration.serves(self.stage.runner.stage_memory.num_layers)

    def _end_everything(self) -> None:
        """A member was lost, and with it KV of every request. The gateways have been told."""
        now_s = self._now_s()
        for request_id in tuple(self.state.sequences):
            self._serving.handle(RequestAborted(now_s, request_id))
        with self.stage.lock:
            for request_id in self.state.table.request_ids:
                self.state.table.release(request_id)
            self.state.take_released()  # nobody is left to hear of them

    def _switch(self, new: Configuration) -> None:
        """Run other layers from here on; the only pause that a change makes."""
        if not self._serves(new):
            self._end_everything()
        old, self.configuration, self._next = self.configuration, new, None
        self._draining.enter()
        self._preparing.end(new)
        memory, pool = self.stage.runner.stage_memory, self.state.pool
        with self.stage.lock:
            report = memory.set_stage(new.stage.first_layer, new.stage.end_layer)
            if report.dropped_bytes:
                log.info("dropped %d bytes in %.0f us", report.dropped_bytes, report.paused_us)
            if memory.num_blocks >= pool.num_blocks:
                pool.grow(memory.num_blocks)
        self.links.enter(new.group_id, new.epoch)
        self._connections.enter(new.members.values())
        self._left.clear()
        self._serving.meter.enter()
        self._facts.switch(new)
        self._kv.enter(new.leader)
        self._capacity.enter(new)
        self._handover.begin(old, memory.num_layers)
        self._names.keep_only(self.state.sequences)
        self._takeover.enter(new)
        if not new.leads:
            self.links.send(new.leader, Joined(pool.usable, pool.taken_count))
        self._handover.deal(new)
        if not new.leads:
            self.state.configure()  # what other stages have is the new leader's to count
        leaders = {stages_of(group)[0].worker_id for group in new.groups}
        for worker_id in leaders - {self._worker_id}:
            self.links.send(worker_id, AllAdopted())

    def _give_up(self, _peer: str, body: GivenUp) -> None:
        self._abort(body.request_id)
