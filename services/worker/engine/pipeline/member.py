"""The group member of a worker's engine: drives the `core.changeover` state machine and the model.

`Changeover` decides; this module executes. Each event goes to the state machine, and its commands
are executed in order; the answer to a memory command is handled before the next command. All this
happens under the stage's lock, which the mover's thread takes for each piece of a KV or parameter
transfer. A stage runs without the lock, because that takes long, and before the next event.

Terms: a group runs the model's layers as a pipeline of stages, one per member. Its leader runs the
first stage and plans microbatches. The epoch numbers a group's configurations. A preparation makes
a member ready for a configuration that may be committed. A change is settled when all requests and
KV have reached their new members. Parked batch requests wait at a follower before they move.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from services.common import failpoint
from services.core.audit.record import BATCH, COMMAND, EVENT
from services.core.changeover import vocabulary
from services.core.changeover.configuration import Configuration
from services.core.changeover.epoch_fence import EpochStatus
from services.core.changeover.frames import Samples
from services.core.changeover.state import Changeover, MemberPhase
from services.core.changeover.transfer_outcome import TransferOutcome, TransferStatus
from services.core.cost.bubble import StageTime
from services.core.cost.iteration_time import IterationTime
from services.core.cost.model import CostModel
from services.core.cost.refinement import CostRefiner
from services.core.histogram import Histogram
from services.core.host.vocabulary import (
    BlocksRecalled,
    CancelHostJob,
    RecallBlocks,
    SaveBlocks,
)
from services.core.planner.batch import Microbatch
from services.core.planner.events import (
    BlocksBorrowed,
    CostModelLearned,
    DrainContinued,
    EmitToken,
    IterationSuspended,
    LendBlocks,
    MoveBlocks,
    Planned,
    RefuseRequest,
    RequestAborted,
    RequestArrived,
    RequeueChecked,
)
from services.core.planner.sequence_ids import SequenceIdSource
from services.core.report import HostReport, ShipmentCounts
from services.core.shipments.vocabulary import (
    CancelShipping,
    ShipBlocks,
    ShippingAsked,
    ShippingOver,
    ShippingPeerLost,
    part_of,
)
from services.worker.engine.host.driver import ARRIVED_FAILPOINT, HostDriver, wait_ms
from services.worker.engine.pipeline.connections import Connections
from services.worker.engine.pipeline.fact_log import FactLog
from services.worker.engine.pipeline.failpoints import ChangeFailpoints
from services.worker.engine.pipeline.frames import SlabRefused, SlabRequest
from services.worker.engine.pipeline.group_health import GroupHealth
from services.worker.engine.pipeline.kv_transfers import KvTransfers
from services.worker.engine.pipeline.links import Links, Received
from services.worker.engine.pipeline.plans import members_of, stage_of, stages_of
from services.worker.engine.pipeline.restoring import ParameterSource, Restoring
from services.worker.engine.pipeline.serving import EngineOutbox, Interrupts, Serving
from services.worker.engine.pipeline.stage_runner import Meanwhile, StageRunner
from services.worker.engine.transfer.frame import Bytes
from services.worker.engine.transfer.lane import (
    Identity,
    Lane,
    LaneEvent,
    PeerConnected,
    PeerLost,
)
from services.worker.engine.transfer.mover import Mover
from services.worker.engine.transfer.pieces import BulkPiece, KvPiece
from services.worker.engine.transfer.receiver import EpochStatusOf, Unpack
from services.worker.errors import InvalidBlocks, WorkerError
from services.worker.ipc import (
    ApplyConfiguration,
    GroupPlan,
    MemberPlan,
    Prepare,
    Prepared,
    Shipped,
    ShipRequests,
)

log = logging.getLogger(__name__)

FROM_LOAD = "load"
"""Origin of a cost model that was refined by the worker's iterations."""

_MAY_FAIL = (vocabulary.MeasureRestore, vocabulary.ShrinkKv, vocabulary.MapKv)
"""Commands of a preparation that may fail: the memory is unchanged then, and only the preparation
ends. The failure of any other command stops the engine."""


class Member:
    """The group member of an engine. Public methods are called from the engine's thread.

    Only a failpoint may call `cut_off` from the mover's thread, too. `take` and `launch` return
    within the time of an iteration.
    """

    def __init__(
        self,
        identity: Identity,
        changeover: Changeover,
        stage: StageRunner,
        links: Links,
        bulk: Lane,
        create_mover: Callable[[EpochStatusOf, Unpack], Mover],
        now_s: Callable[[], float],
        facts: FactLog | None = None,
        refiner: CostRefiner | None = None,
        cost_origin: str = "",
        host: HostDriver | None = None,
    ) -> None:
        """`bulk` is the lane of the mover that `create_mover` returns.

        `host` keeps copies of KV in host memory. `refiner` corrects the cost model under load;
        `cost_origin` names the origin of the present one.
        """
        self.changeover = changeover
        self.state = state = changeover.planner
        self.stage = stage
        self.links = links
        self.mover = mover = create_mover(self._epoch_status_of, self._unpack)
        self._now_s = now_s
        self._seq_id_source = SequenceIdSource(identity.incarnation)
        self._facts = facts or FactLog(None, state, stage.runner.stage_memory, now_s)
        self._health = GroupHealth()
        self._failpoints = ChangeFailpoints(identity.worker_id)
        self._serving = Serving(state, stage, links, now_s, refiner)
        self.cost_origin = cost_origin
        self._lent: LendBlocks | None = None  # the last answer to `BlocksBorrowed`
        self._connections = Connections(links.lane, bulk, now_s)
        self._restoring = Restoring(links, self._connections, stage, mover, now_s, self._failpoints)
        self._transfers = KvTransfers(self.changeover, links, stage, mover, self._failpoints)
        self._parameters = ParameterSource(links, stage, mover, self._failpoints)
        self._host = host
        if host is not None and self._facts.log is not None:
            host.keep_sums()
        self._plans: dict[int, list[GroupPlan]] = {}  # committed, by epoch: present and future
        self._preparations: dict[str, Prepare] = {}  # in progress, by attempt
        self._orders: list[ShipRequests] = []  # to move requests to workers not connected yet
        self._reported_lost: frozenset[str] = frozenset()  # members, in this configuration
        self._payload: Any = b""  # of the frame that is being handled
        self._due_stages: list[vocabulary.RunStage] = []  # commanded, not run yet
        self._swept = True  # all memory of dropped layers is unmapped
        self._handlers: dict[type, Callable[[Any], vocabulary.Event | None]] = {
            vocabulary.SendFrame: self._send,
            vocabulary.RunStage: self._due_stages.append,
            vocabulary.SendBlocks: self._transfers.send,
            vocabulary.CancelTransfer: lambda command: self.mover.cancel(command.transfer_id),
            vocabulary.SwitchStage: self._switch,
            vocabulary.ReleaseDeparted: self._release_departed,
            vocabulary.MeasureRestore: self._restoring.measure,
            vocabulary.ShrinkKv: self._restoring.shrink,
            vocabulary.MapKv: self._restoring.map_kv,
            vocabulary.UndoRestore: self._restoring.undo,
            MoveBlocks: self._move_blocks,
            vocabulary.ConnectMembers: self._connect,
            vocabulary.RestoreSlab: self._restoring.restore,
            vocabulary.EndPreparation: self._end_preparation,
            vocabulary.NoteAborted: self._note_aborted,
            vocabulary.NoteAdopted: self._serving.note_adopted,
            vocabulary.NoteMoved: self._note_moved,
            ShipBlocks: self._transfers.ship,
            CancelShipping: lambda command: self.mover.cancel(command.transfer_id),
            ShippingOver: self._note_shipped,
            SaveBlocks: self._copy,
            RecallBlocks: self._copy,
            CancelHostJob: self._cancel_copy,
            LendBlocks: self._note_lent,
            EmitToken: self._serving.deliver,
            RefuseRequest: self._serving.deliver,
        }

    def start(self) -> None:
        """Start the threads of transfers and host copies."""
        self.mover.start()
        if self._host is not None:
            self._host.start()

    def filenos(self) -> tuple[int, ...]:
        """Descriptors that are readable while a thread has results for `take`."""
        own = () if self._host is None else (self._host.fileno(),)
        return (self.mover.fileno(), *own)

    # --- commands of the servicer

    def handle(
        self, event: RequestArrived | RequestAborted | RequeueChecked | DrainContinued
    ) -> None:
        """Apply an event of requests; a request's id is the gateway's id."""
        # Each start of a request gets its own sequence id: a retry is another sequence.
        if isinstance(event, RequestArrived):
            seq_id = self._seq_id_source.new_id(event.request.request_id)
            event = replace(event, request=replace(event.request, request_id=seq_id))
            self._serving.begin(seq_id, event.request)
        elif isinstance(event, RequestAborted):
            self._serving.abort(self.changeover.seq_id_of(event.request_id))
        self._apply(event)
        target = event.request.hand_to if isinstance(event, RequestArrived) else None
        if target is not None and not self._connections.reaches(target.worker_id):
            self._apply(ShippingPeerLost(target.worker_id))

    def refuse(self, refusal: RefuseRequest) -> None:
        """Refuse a request before it reaches the planner."""
        self._serving.outbox.refusals.append(refusal)

    def apply(self, command: ApplyConfiguration) -> None:
        """Change to a committed configuration; a configuration of an older epoch is ignored."""
        self._plans.setdefault(command.groups[0].epoch, command.groups)
        groups = stages_of(command.groups)
        self._failpoints.hit_requested(groups, "commit")
        self._apply(vocabulary.ConfigurationCommitted(self._now_s(), groups))

    def prepare(self, command: Prepare) -> None:
        """Prepare for groups that may be committed; the answer comes in `EngineOutbox.prepared`."""
        if command.attempt not in self._preparations:  # a repeated command has no effect
            self._preparations[command.attempt] = command
            groups = stages_of(command.groups)
            self._failpoints.hit_requested(groups, "prepare")
            holders = tuple(stage_of(holder) for holder in command.holders)
            self._apply(vocabulary.PreparationAsked(command.attempt, groups, holders))

    def introduce(self, peers: Iterable[MemberPlan], timeout_s: float) -> None:
        """Connect to workers of other groups that want to fetch layers; `peers` has this one.

        The connections end after `timeout_s`, the time limit of their change.
        """
        plans = {peer.worker_id: peer for peer in peers}
        own = plans.pop(self.links.worker_id, None)
        if own is not None:
            self._connections.introduce(own, plans.values(), timeout_s)

    def ship(self, command: ShipRequests) -> None:
        """Move running requests to another worker; the answer comes in `EngineOutbox.shipped`."""
        self._orders.append(command)
        self._begin_orders()

    def _begin_orders(self) -> None:
        """Begin to move requests to the workers that are connected by now."""
        orders, self._orders = self._orders, []
        for order in orders:
            target = order.target
            reached = self._connections.reaches(target.worker_id)
            if reached is None:
                self._orders.append(order)
            elif reached:
                limits = order.requests_max, order.if_cheaper, order.blocks_max
                self._apply(ShippingAsked(self._now_s(), order.order, target, *limits))
            else:
                reason = f"{target.worker_id} is not connected"
                self._note_shipped(ShippingOver(order.order, 0, 0, reason))

    def abort(self, attempt: str) -> None:
        """Abort a preparation; unknown attempts are ignored."""
        self._preparations.pop(attempt, None)
        self._apply(vocabulary.PreparationAborted(attempt))

    def cut_off(self, activations: bool = True, bulk: bool = True) -> None:
        """End all connections of these lanes, for fault injection; only the peers get events."""
        self._connections.end_all(activations, bulk)

    # --- measurements

    def learn(self, model: CostModel, origin: str) -> None:
        """Plan and predict with a newly measured cost model; a refinement begins again from it."""
        self._adopt_costs(model, origin)
        if self._serving.refiner is not None:
            self._serving.refiner.restart(model)

    def borrow_blocks(self, counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Free KV blocks to overwrite before the next event; only while there is no sequence."""
        self._apply(BlocksBorrowed(tuple(counts)))
        assert self._lent is not None
        return self._lent.tables

    def _note_lent(self, command: LendBlocks) -> None:
        self._lent = command

    def _adopt_costs(self, model: CostModel, origin: str) -> None:
        self._apply(CostModelLearned(model))
        self._serving.iterations.cost_model = model
        self.cost_origin = origin

    def _refine_costs(self) -> None:
        refiner = self._serving.refiner
        if refiner is not None and refiner.due and (model := refiner.refit()) is not None:
            self._adopt_costs(model, FROM_LOAD)

    # --- state

    @property
    def configuration(self) -> Configuration | None:
        """The present configuration; None before the first one."""
        return self.changeover.configuration

    @property
    def settled(self) -> bool:
        """Whether the last change is settled, so that another change may be prepared."""
        return self.changeover.settled

    @property
    def alone(self) -> bool:
        """Whether this worker serves with all layers, without a change or preparation."""
        configuration = self.configuration
        stages = configuration.stages if configuration is not None else ()
        # The last survivor of a merged group is its only stage, but may not plan: it lacks layers.
        idle = not (self.busy_changing or self.shipping or self.copying)
        return len(stages) <= 1 and self.changeover.may_plan and idle

    @property
    def shipping(self) -> bool:
        """Whether KV of running requests is on its way from or to another group."""
        return self.changeover.shipping.active

    @property
    def copying(self) -> bool:
        """Whether KV is being copied to or from host memory."""
        return self.state.host is not None and self.state.host.active

    @property
    def host_report(self) -> HostReport:
        """KV in host memory."""
        return HostReport() if self._host is None else self._host.report

    def host_wait_ms(self, idle_ms: int) -> int:
        """The longest wait, at most `idle_ms`, until host copies need a call of `take`."""
        return wait_ms(self.changeover.host_due_s, self._now_s(), idle_ms)

    @property
    def shipments(self) -> ShipmentCounts:
        """Requests that changed workers with their KV."""
        return replace(self.changeover.shipping.counts, shipping_s=self.mover.shipping_s)

    @property
    def busy_changing(self) -> bool:
        """Whether a change or a preparation needs further calls of `take` without new frames."""
        changing = self.changeover.busy or self._restoring.running or not self._swept
        return changing or self._connections.introducing

    @property
    def awaits_transfers(self) -> bool:
        """Whether a preparation only waits for slabs of peers, which wake the engine."""
        quiet = self._swept and not self._connections.introducing
        return quiet and self._restoring.awaits_transfers

    @property
    def trouble(self) -> str:
        """A human-readable reason why this member's group cannot continue; "" while it can."""
        joining = self.changeover.phase is MemberPhase.JOINING
        return self._health.trouble(self._now_s(), joining)

    @property
    def pipeline_time(self) -> StageTime:
        """Total time of this engine as a pipeline stage."""
        return self._serving.meter.total

    @property
    def iteration_time(self) -> IterationTime:
        """Total time of this engine's iterations, measured and predicted by the cost model."""
        return self._serving.iterations.total

    @property
    def restored_slabs(self) -> dict[str, int]:
        """Number of slabs that were restored since the start, by source: host, peer or disk."""
        return dict(self._restoring.restored)

    @property
    def slowest_iteration_s(self) -> float:
        """Time of this engine's slowest recent iteration."""
        return self._serving.iterations.slowest_s

    @property
    def iteration_tokens(self) -> Histogram:
        """Token counts of all iterations that this engine has planned."""
        return self._serving.iteration_tokens.histogram

    def take_outbox(self) -> EngineOutbox:
        """Return the results for the servicer since the last call."""
        outbox, self._serving.outbox = self._serving.outbox, EngineOutbox()
        return outbox

    # --- a turn

    def take(self) -> bool:
        """Handle received frames and events, and continue a change.

        Runs this worker's stage of received microbatches. Returns False if nothing was received.
        """
        received = self.links.receive()
        for message in received:
            self._handle_message(message)
        moved = self._handle_events()
        if self._host is not None:
            moved = self._advance_host(self._host) or moved
        # A connection that ended without an event matters only during a change: at other times the
        # memory manager learns of the loss from the peer.
        if self.changeover.busy:
            self._connections.detect_lost()
        if self.configuration is not None and self._connections.any_lost:
            self._handle_lost_peers(self.configuration)
        self._connections.advance()
        if self._orders:
            self._begin_orders()
        for end in self._restoring.step():
            self._apply(end)
        if self.changeover.needs_turn(now_s := self._now_s()):
            self._apply(vocabulary.TurnTaken(now_s))
        with self.stage.lock:
            self._swept = self.stage.runner.stage_memory.finish_drop()
        return bool(received) or moved

    def continue_drop(self) -> bool:
        """Map or unmap a slice of the memory of a drop; False if nothing is left to do."""
        memory = self.stage.runner.stage_memory
        if self._swept and memory.drop_prepared:
            return False
        with self.stage.lock:
            if memory.drop_prepared:
                self._swept = memory.finish_drop()
                return not self._swept
            try:
                return not memory.continue_drop()
            except WorkerError:
                return False  # the next turn tries again, and fails the preparation

    def launch(
        self, interrupts: Interrupts | None = None, meanwhile: Meanwhile | None = None
    ) -> bool:
        """Plan at most one microbatch and run the leader's stage of it; False if none was planned.

        Both arguments are used in a single-worker group. For a microbatch, `interrupts` returns a
        predicate that is called before layers and is True if the iteration must stop there.
        `meanwhile` is called while a GPU runs the layers.
        """
        self._refine_costs()
        microbatch = self._plan()
        if microbatch is None:
            self._serving.pause()
        else:
            if self.settled:
                self._failpoints.hit_microbatch()
            configuration = self.configuration
            ended = self._serving.run_first(microbatch, configuration, interrupts, meanwhile)
            if ended is not None:
                self._apply(ended)
            if isinstance(ended, IterationSuspended):
                self._failpoints.hit_suspended()
        self._facts.note_memory(self.links.epoch, self.settled)
        return microbatch is not None

    def _plan(self) -> Microbatch | None:
        if not self.changeover.may_plan or not self.state.has_slot:
            return None
        now_s = self._now_s()
        if self.changeover.holds_batch_work(now_s):
            return None
        with self.stage.lock:
            microbatch = self.changeover.plan(now_s)
        self._facts.record(BATCH, Planned(now_s, microbatch))
        if microbatch is not None and self.state.stages > 1:
            self._health.note_launched(now_s)  # a single worker has its result before the next turn
        self._serving.note_planned(microbatch, now_s)
        return microbatch

    def _handle_message(self, received: Received) -> None:
        frame = received.frame
        if isinstance(frame, SlabRequest):
            self._parameters.send(received.peer, frame)
        elif isinstance(frame, SlabRefused):
            self._restoring.note_transfer(frame.transfer_id, intact=False)
        else:
            if isinstance(frame, Samples):
                self._serving.meter.note_result(frame.number, self._now_s())
                self._health.note_returned(self._now_s())
            self._payload = received.payload
            self._failpoints.hit_received(frame)
            self._apply(vocabulary.FrameReceived(self._now_s(), received.peer, frame))

    def _handle_events(self) -> bool:
        for lane_event in self.links.events():
            self._connections.note_activations(lane_event)
            self._note_lost(lane_event)
        events = self.mover.events()
        for event in events:
            match event:
                case PeerConnected() | PeerLost():
                    self._connections.note_bulk(event)
                    self._note_lost(event)
                case TransferOutcome():
                    self._note_outcome(event)
        return bool(events)

    def _advance_host(self, host: HostDriver) -> bool:
        """Pass on the results of host copies, and begin those that are due."""
        events = host.events(self._now_s())
        self._facts.note_copied(host.take_facts())
        for event in events:
            if isinstance(event, BlocksRecalled):
                failpoint.hit(ARRIVED_FAILPOINT)
            self._apply(event)
        if self.changeover.host_due_s <= (now_s := self._now_s()):
            self._apply(host.look(now_s))
        return bool(events)

    def _note_lost(self, event: LaneEvent) -> None:
        """End the shipments with a lost worker."""
        if isinstance(event, PeerLost) and self.shipping:
            self._apply(ShippingPeerLost(event.peer.worker_id))

    def _note_outcome(self, outcome: TransferOutcome) -> None:
        """Pass the end of a transfer to the preparation (parameters) or the state machine (KV)."""
        transfer_id, status = outcome.transfer_id, outcome.status
        # Requests that are moved end and are aborted at any time, with parts on their way.
        if status is TransferStatus.FAILED and part_of(transfer_id) is None:
            peer, reason = outcome.peer or "no peer", outcome.reason
            log.warning("transfer %s with %s failed: %s", transfer_id, peer, reason)
        if status is not TransferStatus.SENT:
            intact = status is TransferStatus.RECEIVED
            if self._restoring.note_transfer(transfer_id, intact=intact):
                return
        self._apply(outcome)

    def _handle_lost_peers(self, configuration: Configuration) -> None:
        """Report newly lost members to the state machine and to the group's health."""
        members = members_of(self._plans[configuration.epoch])
        lost = frozenset(self._connections.lost(members.values()))
        if lost != self._reported_lost:
            if new := sorted(lost - self._reported_lost):
                group_id, epoch = configuration.own.group_id, configuration.epoch
                log.warning("%s at epoch %d has lost %s", group_id, epoch, ", ".join(new))
            self._reported_lost = lost
            self._health.note_lost(lost & configuration.own.workers)
            self._apply(vocabulary.PeersLost(self._now_s(), lost))

    # --- events and commands

    def _apply(self, event: vocabulary.Event) -> None:
        """Pass an event to the state machine and execute its commands; then run due stages."""
        # Memory commands may map memory over retired chunks: wait for their users without the lock.
        self.stage.runner.stage_memory.arena.await_retired()
        with self.stage.lock:
            self._handle(event)
        # Without the lock: transfers proceed while the model runs.
        while self._due_stages:
            assert self.configuration is not None
            if self.settled:
                self._failpoints.hit_microbatch()
            if self.changeover.parked_due_s is not None:
                self._failpoints.hit_parked()
            frame = self._due_stages.pop().frame
            self._serving.run_later_stage(self.configuration, frame, self._payload)

    def _handle(self, event: vocabulary.Event) -> None:
        self._facts.record(EVENT, event)
        commands = self.changeover.handle(event)
        for command in commands:
            self._facts.record(COMMAND, command)
        for command in commands:
            try:
                answer = self._handlers[type(command)](command)
            except WorkerError as error:
                if not isinstance(command, _MAY_FAIL):
                    raise
                answer = vocabulary.RestoreFailed(str(error))
            # Handle the answer now: the next command may rely on its effects.
            if answer is not None:
                self._handle(answer)

    def _send(self, command: vocabulary.SendFrame[Any]) -> None:
        self._failpoints.hit_frame(command.frame)
        self.links.send(command.peer, command.frame, group=command.group)

    def _switch(self, command: vocabulary.SwitchStage) -> vocabulary.StageSwitched:
        new, memory = command.configuration, self.stage.runner.stage_memory
        self._failpoints.hit_switch(new)
        report = memory.set_stage(new.stage.first_layer, new.stage.end_layer)
        if report.dropped_bytes:
            place = (new.own.group_id, new.epoch)
            dropped = (report.dropped_bytes, report.paused_us)
            log.info("%s at epoch %d: layers dropped, %d bytes in %.0f us", *place, *dropped)
        self._restoring.stop()
        self.links.enter(new.own.group_id, new.epoch)
        self._plans = {epoch: plan for epoch, plan in self._plans.items() if epoch >= new.epoch}
        self._preparations = {
            name: preparation
            for name, preparation in self._preparations.items()
            if preparation.groups[0].epoch > new.epoch
        }
        self._connections.enter(members_of(self._plans[new.epoch]).values())
        self._reported_lost = frozenset()
        self._health.enter(self._now_s())
        self._serving.meter.start_configuration()
        self._facts.switch(new)
        self._failpoints.hit_change("mapped")
        return vocabulary.StageSwitched(memory.num_blocks, bool(memory.departed_layers))

    def _release_departed(self, command: vocabulary.ReleaseDeparted) -> vocabulary.DepartedReleased:
        memory = self.stage.runner.stage_memory
        blocks = memory.release_departed(command.blocks)
        return vocabulary.DepartedReleased(blocks, bool(memory.departed_layers))

    def _move_blocks(self, command: MoveBlocks) -> None:
        """Copy KV to relocated blocks.

        Raises:
            InvalidBlocks: if the memory refuses. The block table has changed already, so the engine
                must be restarted.
        """
        moves = [(move.source, move.target) for move in command.moves]
        try:
            self.stage.runner.stage_memory.relocate(moves)
        except InvalidBlocks as error:
            raise InvalidBlocks(
                f"KV cannot be moved as the block table requires: {error}. This engine stops, or"
                " requests would read each other's KV; report it, with the event log if any"
            ) from error

    def _copy(self, command: SaveBlocks | RecallBlocks) -> vocabulary.Event | None:
        assert self._host is not None, "the planner has no host copies"
        return self._host.copy(command, self._now_s())

    def _cancel_copy(self, command: CancelHostJob) -> None:
        assert self._host is not None, "the planner has no host copies"
        self._host.cancel(command)

    def _connect(self, command: vocabulary.ConnectMembers) -> None:
        preparation = self._preparations[command.attempt]
        self._restoring.connect(preparation)

    def _end_preparation(self, command: vocabulary.EndPreparation) -> None:
        self._failpoints.hit_preparation("ready")
        self._preparations.pop(command.attempt, None)
        answer = Prepared(command.attempt, command.refusal or "")
        self._serving.outbox.prepared.append(answer)

    def _note_shipped(self, command: ShippingOver) -> None:
        log.info(
            "order %s: %d requests moved, %d stay%s",
            *(command.order, command.moved, command.kept),
            f" ({command.reason})" if command.reason else "",
        )
        self._serving.outbox.shipped.append(
            Shipped(command.order, command.moved, command.kept, command.reason)
        )

    def _note_aborted(self, command: vocabulary.NoteAborted) -> None:
        self._preparations.pop(command.attempt, None)
        self._restoring.stop()
        self.stage.runner.stage_memory.cancel_drop()
        log.info("the preparation %s was aborted", command.attempt)

    def _note_moved(self, command: vocabulary.NoteMoved) -> None:
        members = members_of(self._plans[command.group.epoch])
        self._serving.note_moved(command, members[command.worker_id].grpc_address)

    # --- on the mover's thread

    def _epoch_status_of(self, group_id: str, epoch: int) -> EpochStatus:
        """Return the status of a piece's epoch; parameters have no group and are always current."""
        return EpochStatus.of(epoch, self.links.epoch) if group_id else EpochStatus.CURRENT

    def _unpack(self, piece: BulkPiece, payload: Bytes) -> None:
        """Store a received piece of KV or parameters. Raises WorkerError to refuse it."""
        if isinstance(piece, KvPiece):
            self._transfers.store(piece, payload)
        else:
            self._parameters.store(piece, payload)
            self._restoring.note_piece(piece.transfer_id)
