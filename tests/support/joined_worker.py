"""A worker process within the test's process: fence, servicer and engine, without asyncio.

Real: the fence (`MemberState`), the participant, the servicer's requests, the engine. This module
only drives them, as `services.worker.member.servicer`, `services.worker.serving` and
`services.worker.engine.loop` do with tasks and sockets.
"""

from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from services.core.groups.fence import (
    AbortCall,
    AbortPreparation,
    Apply,
    MemberState,
    PrepareCall,
    Verdict,
)
from services.core.groups.vocabulary import StoredGroup
from services.core.planner.events import RequestAborted, RequestArrived, RequeueChecked
from services.core.report import EngineReport, Load
from services.worker.engine.model.catalog import shape_of
from services.worker.engine_participant import EngineParticipant
from services.worker.gateway_stream import GatewayStream
from services.worker.group_view import Place, place_of
from services.worker.ipc import (
    AbortAttempt,
    AbortRequest,
    ApplyConfiguration,
    EngineReady,
    Introduce,
    Prepare,
    Prepared,
    Progress,
    StartRequest,
    ToEngine,
    encode,
    from_engine_decoder,
    to_engine_decoder,
)
from services.worker.member.participant import PrepareRefused, ProposedChange
from services.worker.member.servicer import FUTURE_WAIT_S, to_members
from services.worker.servicer import SWEEP_S, WorkerServicer
from tests.support.engines import Engine
from tests.support.group_store import Violated
from tideserve.common.v1 import load_pb2
from tideserve.worker.v1 import worker_pb2

HEARTBEAT_S = 0.25
"""Half of the engine's maximum silence, as in its loop."""

T = TypeVar("T")
Answered = Callable[[bool, str], None]


def run_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("it waits")


async def same(address: str) -> str:
    """Resolve host names, which are addresses here."""
    return address


class Pause:
    """An awaitable that yields once."""

    def __await__(self) -> Generator[None, None, None]:
        yield


class EnginePipe:
    """The servicer's connection to the engine; frames are encoded as on the socket."""

    heartbeat_age_s = 0.0

    def __init__(self) -> None:
        self.inbox: deque[bytes] = deque()
        self.prepared: dict[str, Prepared] = {}

    def send(self, frame: ToEngine) -> None:
        self.inbox.append(encode(frame))

    async def start_request(self, request: Any) -> None:
        self.send(StartRequest(request))

    async def abort_request(self, request_id: str) -> None:
        self.send(AbortRequest(request_id))

    async def apply(self, configuration: ApplyConfiguration) -> None:
        self.send(configuration)

    async def prepare(self, preparation: Prepare, timeout_s: float) -> Prepared:
        self.send(preparation)
        while preparation.attempt not in self.prepared:
            await Pause()
        return self.prepared.pop(preparation.attempt)

    async def abort_preparation(self, attempt: str) -> None:
        self.send(AbortAttempt(attempt))

    async def introduce(self, introduction: Introduce) -> None:
        self.send(introduction)


@dataclass
class Call:
    """A coordinator's call to prepare, which accepts an answer until `deadline_s`."""

    asked: PrepareCall
    change: ProposedChange
    deadline_s: float
    answer: Answered
    waits_until_s: float = 0.0


@dataclass
class Preparation:
    """A preparation, its waiting calls, and its outcome: `refusal`, None while in progress."""

    attempt: str
    deadline_s: float
    task: Coroutine[Any, Any, None]
    callers: list[Answered] = field(default_factory=list)
    refusal: str | None = None

    def end(self, refusal: str) -> None:
        """Answer the waiting calls."""
        self.refusal = refusal
        callers, self.callers = self.callers, []
        for answer in callers:
            answer(not refusal, refusal)


class WorkerProcess:
    """A worker process. `turn` is a turn of its engine, `serve` a turn of its servicer."""

    def __init__(self, engine: Engine, now_s: Callable[[], float]) -> None:
        identity, runner = engine.identity, engine.runner
        self.name, self.incarnation = identity.worker_id, identity.incarnation
        self.engine = engine
        self.now_s = now_s
        self.stands_until_s = 0.0
        self.blind_until_s = 0.0  # partitioned from the store
        self.revision = 0  # of the newest records it has read
        self.link = GatewayStream()
        self.fence = MemberState(self.name, self.incarnation)
        self.report = EngineReport(Load(0, 0, runner.num_blocks, 0))
        self.standing_changed = False
        self._pipe = EnginePipe()
        facts = EngineReady(
            max_model_len=min(runner.geometry.max_model_len, runner.num_blocks * runner.block_size),
            vocab_size=runner.geometry.vocab_size,
            block_size=runner.block_size,
            kv_blocks_total=runner.num_blocks,
            kv_block_bytes=runner.kv_bytes_per_token * runner.block_size,
            budget_bytes=0,
            parameter_bytes=runner.parameter_bytes,
            staging_bytes=runner.staging_bytes,
            shape=shape_of(runner.geometry, runner.slab_bytes),
            activation_address=engine.member.links.lane.address,
            bulk_address=engine.bulk.address,
        )
        self.requests = WorkerServicer(
            self._pipe,  # type: ignore[arg-type]
            facts,
            lambda: self.place,
            lambda _request_id: None,
            load_pb2.WorkerLoad,
            lambda _group_id, _epoch: "",
            now_s,
        )
        self.requests._open.add(self.link)
        self._participant = EngineParticipant(
            self.name,
            self._pipe,
            facts,
            self.name,
            lambda: None,
            self.requests.abort_all,
            same,
        )
        self._preparing: Preparation | None = None
        self._early: list[Call] = []
        self._recorded: Place | None = None
        self._left_out = False
        self._received: list[str] = []
        self._standing = (0, False, "", False)
        self._published_s = self._swept_s = now_s()

    @property
    def stands(self) -> bool:
        """Whether the process is suspended."""
        return self.now_s() < self.stands_until_s

    @property
    def place(self) -> Place | None:
        """The configuration it serves, as `EngineServing.place`."""
        recorded, served = self._recorded, self._participant.place
        if self._left_out or recorded is None or served is None:
            return None
        return served if recorded.epoch > served.epoch else recorded

    # --- the group protocol

    def see(self, groups: Iterable[StoredGroup]) -> None:
        """Receive group records, possibly outdated."""
        groups = tuple(groups)
        self._recorded = place_of((group.group for group in groups), self.name, self.incarnation)
        before = self.fence.epoch
        for action in self.fence.observe(groups):
            self._carry_out(action)
        if self.fence.epoch < before:
            raise Violated(f"I3: {self.name} went back to epoch {self.fence.epoch}")
        early, self._early = self._early, []
        for call in early:
            self.ask(call)

    def ask(self, call: Call) -> None:
        """Handle a call to prepare; a call for a later epoch waits for the records."""
        now_s = self.now_s()
        answer = self.fence.judge(call.asked)
        match answer.verdict:
            case Verdict.ACCEPTED:
                task = self._participant.prepare(call.change)
                self._preparing = Preparation(
                    call.asked.attempt, call.deadline_s, task, [call.answer]
                )
            case Verdict.REPLAYED if self._preparing is not None:
                self._preparing.callers.append(call.answer)
                if self._preparing.refusal is not None:
                    self._preparing.end(self._preparing.refusal)
            case Verdict.FUTURE if not call.waits_until_s:
                call.waits_until_s = min(now_s + FUTURE_WAIT_S, (now_s + call.deadline_s) / 2)
                self._early.append(call)
            case Verdict.FUTURE if now_s <= call.waits_until_s:
                self._early.append(call)
            case _:
                call.answer(False, answer.reason)

    def abort(self, asked: AbortCall) -> None:
        """Handle a coordinator's abort of an attempt."""
        action = self.fence.abort(asked)
        if action is not None:
            self._carry_out(action)

    def introduce(self, request: worker_pb2.IntroduceRequest) -> None:
        """Handle a coordinator's introduction of workers that want to fetch layers."""
        if request.incarnation == self.incarnation and request.token >= self.fence.token:
            peers = to_members(request.peers)
            run_now(self._participant.introduce(peers, request.timeout_s))

    def serve(self) -> bool:
        """A turn of the servicer; False if there was nothing to do."""
        now_s = self.now_s()
        for call in [call for call in self._early if now_s > call.waits_until_s]:
            self._early.remove(call)
            call.answer(False, "the records of that epoch did not come")
        if now_s - self._swept_s >= SWEEP_S or self.requests._wake.is_set():
            self._swept_s = now_s
            self.requests._wake.clear()
            run_now(self.requests.sweep())
        return self._go_on_preparing(now_s)

    def _go_on_preparing(self, now_s: float) -> bool:
        preparing = self._preparing
        if preparing is None or preparing.refusal is not None:
            return False
        refusal = ""
        try:
            preparing.task.send(None)
            if now_s <= preparing.deadline_s:
                return False
            preparing.task.close()
            refusal = "not ready in time"
        except StopIteration:
            pass
        except PrepareRefused as refused:
            refusal = str(refused)
        if refusal and self.fence.abort_own(preparing.attempt) is not None:
            self._preparing = None
            run_now(self._participant.abort(preparing.attempt))
        preparing.end(refusal)
        return True

    def _carry_out(self, action: AbortPreparation | Apply) -> None:
        preparing, self._preparing = self._preparing, None
        if preparing is not None and preparing.refusal is None:
            preparing.task.close()
            preparing.end("the attempt was aborted")
        match action:
            case AbortPreparation(attempt=attempt):
                run_now(self._participant.abort(attempt))
            case Apply(group=group, attempt=prepared, superseded=superseded):
                run_now(self._participant.commit(group, prepared, superseded))

    # --- the engine

    def turn(self) -> bool:
        """A turn of the engine's loop; False if it was idle."""
        self._drain_inbox()
        member = self.engine.member
        took = member.take()
        due_s, now_s = member.state.requeue_due_s, self.now_s()
        if due_s is not None and due_s <= now_s:
            member.handle(RequeueChecked(now_s))
        published = self._publish()
        ran = member.launch()
        return self._publish() or published or took or ran

    def move_piece(self) -> bool:
        """The mover's thread takes a step; False if it was idle."""
        return self.engine.mover.step(self.now_s()) <= self.now_s()

    def _drain_inbox(self) -> None:
        member, now_s = self.engine.member, self.now_s()
        while self._pipe.inbox:
            frame = to_engine_decoder.decode(self._pipe.inbox.popleft())
            match frame:
                case StartRequest(request=request):
                    self._received.append(request.request_id)
                    member.handle(RequestArrived(now_s, request))
                case AbortRequest(request_id=request_id):
                    member.handle(RequestAborted(now_s, request_id))
                case ApplyConfiguration():
                    member.apply(frame)
                case Prepare():
                    member.prepare(frame)
                case AbortAttempt(attempt=attempt):
                    member.abort(attempt)
                case Introduce(peers=peers, timeout_s=timeout_s):
                    member.introduce(peers, timeout_s)

    def _publish(self) -> bool:
        """Publish the results to the servicer, as the engine's loop does."""
        member = self.engine.member
        news, now_s = member.take_outbox(), self.now_s()
        configuration = member.configuration
        epoch = configuration.epoch if configuration else 0
        standing = (epoch, not member.settled, member.trouble, member.changeover.isolated)
        happened = bool(news or self._received or standing != self._standing)
        if not happened and now_s - self._published_s < HEARTBEAT_S:
            return False
        self.standing_changed = self.standing_changed or standing != self._standing
        self._standing, self._published_s = standing, now_s
        for answer in news.prepared:
            self._pipe.prepared[answer.attempt] = answer
        received, self._received = self._received, []
        report = EngineReport(
            member.state.load(),
            epoch,
            standing[1],
            member.stage.runner.parameter_bytes,
            trouble=standing[2],
            left=standing[3],
        )
        progress = Progress(
            received, news.tokens, news.refusals, report, news.adopted, news.moved, news.times
        )
        frame = from_engine_decoder.decode(encode(progress))
        assert isinstance(frame, Progress)
        self._deliver(frame)
        return happened

    def _deliver(self, progress: Progress) -> None:
        """Deliver progress to the servicer, as `EngineServing` does."""
        self.report = progress.report
        self.requests.deliver(progress)
        left_out, self._left_out = self._left_out, progress.report.left
        if self._left_out and not left_out:
            self.requests.abort_all("the group continues without this worker; retry")

    def end(self) -> None:
        """End the process; callers get no more answers."""
        if self._preparing is not None and self._preparing.refusal is None:
            self._preparing.task.close()
