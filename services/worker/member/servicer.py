"""MemberService: a worker's gRPC service for the preparation of changes of groups.

The memory manager tries a change in an *attempt*: it calls Prepare at every member, then commits
the new groups in etcd, or calls Abort. The *fence* (`MemberState`) decides whether this worker
accepts a call or a record; the *participant* executes accepted changes at the engine. The worker
learns of commits only from the group records in etcd, and of aborts also from them if a call was
lost.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable

import grpc
import grpc.aio

from services.common import failpoint
from services.common.clock import monotonic_s
from services.common.etcd import RELIST_S
from services.common.records import to_group
from services.common.timeouts import timeout
from services.core.destination import Destination
from services.core.groups.fence import (
    AbortCall,
    AbortPreparation,
    Apply,
    MemberState,
    PrepareCall,
    Verdict,
)
from services.core.groups.vocabulary import StoredGroup
from services.worker.ipc import PREPARE_TIMEOUT_S, ShipRequests
from services.worker.member.participant import (
    Participant,
    PrepareRefused,
    ProposedChange,
    SourceMember,
)
from tideserve.worker.v1 import worker_pb2 as pb
from tideserve.worker.v1 import worker_pb2_grpc

log = logging.getLogger(__name__)


class InvalidPrepare(ValueError):
    """A field of a Prepare is missing or invalid; the message is a sentence."""


def to_prepare_call(request: pb.PrepareRequest) -> PrepareCall:
    """The part of a Prepare that the fence decides on.

    Raises:
        InvalidPrepare: if a field is missing or a layer is out of range.
    """
    target = to_group(request.target)
    if not request.attempt or not request.incarnation or target is None or not target.members:
        raise InvalidPrepare("attempt, incarnation and target with its phase must be set")
    if any(not 0 <= member.first_layer <= member.end_layer for member in target.members):
        raise InvalidPrepare(
            "a member's first layer must be at least 0, and its end must not be below the first"
        )
    return PrepareCall(
        request.token,
        request.attempt,
        request.incarnation,
        request.group_id,
        request.epoch,
        request.mod_revision,
        target,
    )


def to_preparation(
    call: PrepareCall, request: pb.PrepareRequest, timeout_s: float | None = None
) -> ProposedChange:
    """The part of a Prepare that the participant executes within `timeout_s`.

    Raises:
        InvalidPrepare: if another group is invalid.
    """
    others = tuple(group for record in request.others if (group := to_group(record)) is not None)
    if len(others) < len(request.others):
        raise InvalidPrepare("every other group must have an id, an epoch and a phase")
    return ProposedChange(
        call.attempt,
        call.group_id,
        call.epoch,
        call.target,
        to_members(request.peers),
        others,
        to_members(request.holders),
        min(timeout_s or PREPARE_TIMEOUT_S, PREPARE_TIMEOUT_S),
    )


def to_members(peers: Iterable[pb.Peer]) -> tuple[SourceMember, ...]:
    """The workers of a Prepare or an Introduce."""
    return tuple(
        SourceMember(
            peer.worker_id,
            peer.incarnation,
            peer.address,
            peer.activation_address,
            peer.bulk_address,
            peer.activation_nonce,
            peer.bulk_nonce,
            peer.draining,
            peer.first_layer,
            peer.end_layer,
        )
        for peer in peers
    )


def to_abort_call(request: pb.AbortRequest) -> AbortCall:
    """The part of an Abort that the fence decides on: all of it."""
    return AbortCall(request.token, request.attempt, request.incarnation)


# How long a Prepare waits for the records that it names: for a listing even if the watch is silent.
FUTURE_WAIT_S = RELIST_S + 1.0

IntroduceContext = grpc.aio.ServicerContext[pb.IntroduceRequest, pb.IntroduceResponse]
PrepareContext = grpc.aio.ServicerContext[pb.PrepareRequest, pb.PrepareResponse]
ShipContext = grpc.aio.ServicerContext[pb.ShipRequestsRequest, pb.ShipRequestsResponse]
AbortContext = grpc.aio.ServicerContext[pb.AbortRequest, pb.AbortResponse]


class MemberServicer(worker_pb2_grpc.MemberServiceServicer):
    """Serves the memory manager's calls to this worker, while `run` runs."""

    def __init__(
        self,
        state: MemberState,
        participant: Participant,
        records: Callable[[], Iterable[StoredGroup]],
    ) -> None:
        """`records` returns the latest group records; call `note_records` when they change."""
        self._state = state
        self._participant = participant
        self._records = records
        # Held from a verdict of the fence until its execution. Preparations run outside the lock,
        # so that an abort or a commit can interrupt them.
        self._lock = asyncio.Lock()
        self._preparing: tuple[str, asyncio.Task[PrepareRefused | None]] | None = None
        self._refuses_all = False
        self._rollbacks = 0  # of etcd, before the records were read
        self._changed = asyncio.Event()
        self._observed = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None

    def note_records(self, rollbacks: int = 0) -> None:
        """Wake up `run`, since the group records have changed.

        `rollbacks`: how often etcd had lost writes before they were read.
        """
        self._rollbacks = rollbacks
        self._changed.set()

    @property
    def preparing(self) -> bool:
        """Whether an accepted change is neither committed nor aborted yet."""
        return self._state.preparing is not None

    def refuse_all(self) -> None:
        """Refuse all further attempts, since the worker stops."""
        self._refuses_all = True

    async def run(self) -> None:
        """Apply each change of the group records, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            while True:
                await self._changed.wait()
                self._changed.clear()
                async with self._lock:
                    for action in self._state.observe(self._records(), self._rollbacks):
                        await self._execute(action)
                self._observed.set()
                self._observed = asyncio.Event()

    async def Prepare(
        self, request: pb.PrepareRequest, context: PrepareContext
    ) -> pb.PrepareResponse:
        try:
            call = to_prepare_call(request)
            preparation = to_preparation(call, request, context.time_remaining())
        except InvalidPrepare as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if self._tasks is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the worker is starting; retry")
        task = await self._judge(call, preparation, context)
        # A cancelled call does not cancel the preparation: a repeated Prepare waits for the same
        # task, and the attempt may still be committed.
        refused = await asyncio.shield(task)
        if refused is not None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(refused))
        return pb.PrepareResponse(attempt=call.attempt, incarnation=self._state.incarnation)

    async def Abort(self, request: pb.AbortRequest, context: AbortContext) -> pb.AbortResponse:
        call = to_abort_call(request)
        state = self._state
        if call.incarnation != state.incarnation or call.token < state.token:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                "a stale Abort, or an Abort for another incarnation",
            )
        async with self._lock:
            action = state.abort(call)
            if action is not None:
                await self._execute(action)
        return pb.AbortResponse()

    async def Introduce(
        self, request: pb.IntroduceRequest, context: IntroduceContext
    ) -> pb.IntroduceResponse:
        peers = to_members(request.peers)
        # A worker that shuts down still ships its requests.
        if not self._state.accepts_order(request.token, request.incarnation):
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                "a stale Introduce, or an Introduce for another incarnation",
            )
        if self._state.worker_id not in {peer.worker_id for peer in peers}:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "peers must include the receiver")
        try:
            timeout_s = min(request.timeout_s or PREPARE_TIMEOUT_S, PREPARE_TIMEOUT_S)
            await self._participant.introduce(peers, timeout_s)
        except PrepareRefused as refused:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(refused))
        return pb.IntroduceResponse()

    async def ShipRequests(
        self, request: pb.ShipRequestsRequest, context: ShipContext
    ) -> pb.ShipRequestsResponse:
        if not self._state.accepts_order(request.token, request.incarnation):
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                "a stale ShipRequests, or a ShipRequests for another incarnation",
            )
        if (refusal := self._ship_refusal(request)) is not None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, refusal)
        target = request.target
        place = Destination(target.worker_id, target.address, target.group_id, target.epoch)
        failpoint.hit("worker.ship.asked")
        try:
            shipped = await self._participant.ship(
                ShipRequests(
                    *(request.order, place, max(0, request.requests_max), request.if_cheaper),
                    max(0, request.blocks_max),
                )
            )
        except PrepareRefused as refused:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(refused))
        return pb.ShipRequestsResponse(
            moved=shipped.moved, kept=shipped.kept, reason=shipped.reason
        )

    def _ship_refusal(self, request: pb.ShipRequestsRequest) -> str | None:
        """Why requests cannot be shipped for this order; None if they can."""
        if not request.order or not request.target.worker_id:
            return "order and target must be set"
        served = [
            stored.group
            for stored in self._records()
            if (stored.group.group_id, stored.group.epoch) == (request.group_id, request.epoch)
        ]
        alone = any([m.worker_id for m in g.members] == [self._state.worker_id] for g in served)
        if alone:
            return None
        return f"{self._state.worker_id} is not alone in {request.group_id} at {request.epoch}"

    async def _judge(
        self,
        call: PrepareCall,
        preparation: ProposedChange,
        context: PrepareContext,
    ) -> "asyncio.Task[PrepareRefused | None]":
        """Return the task of the preparation, new or running; abort a call that is refused."""
        deadline_s = monotonic_s() + min(FUTURE_WAIT_S, preparation.timeout_s / 2)
        while True:
            observed = self._observed
            async with self._lock:
                if self._refuses_all:
                    await context.abort(
                        grpc.StatusCode.FAILED_PRECONDITION, "the worker is stopping; leave it out"
                    )
                answer = self._state.judge(call)
                if answer.verdict is Verdict.ACCEPTED:
                    return self._begin(preparation)
                if answer.verdict is Verdict.REPLAYED and self._preparing is not None:
                    return self._preparing[1]
            # FUTURE: the records here lag behind the memory manager's. Wait for them, and judge
            # again.
            if answer.verdict is not Verdict.FUTURE or monotonic_s() > deadline_s:
                break
            try:
                async with timeout(max(0.0, deadline_s - monotonic_s())):
                    await observed.wait()
            except TimeoutError:
                break
        is_future = answer.verdict is Verdict.FUTURE
        code = grpc.StatusCode.ABORTED if is_future else grpc.StatusCode.FAILED_PRECONDITION
        log.info("attempt %s refused: %s", call.attempt, answer.reason)
        await context.abort(code, answer.reason)

    def _begin(self, preparation: ProposedChange) -> "asyncio.Task[PrepareRefused | None]":
        assert self._tasks is not None
        failpoint.hit("worker.prepare.accepted")
        task = self._tasks.create_task(self._prepare(preparation))
        self._preparing = (preparation.attempt, task)
        return task

    async def _prepare(self, preparation: ProposedChange) -> PrepareRefused | None:
        """Prepare, and undo the preparation on failure; returns the failure, or None."""
        try:
            refused = await self._run_prepare(preparation)
            if refused is not None:
                async with self._lock:
                    if self._state.abort_own(preparation.attempt) is not None:
                        self._preparing = None
                        await self._participant.abort(preparation.attempt)
            return refused
        except asyncio.CancelledError:
            # `_execute` cancelled this task, and undoes or applies the preparation itself.
            return PrepareRefused("the attempt was aborted")

    async def _run_prepare(self, preparation: ProposedChange) -> PrepareRefused | None:
        try:
            async with timeout(preparation.timeout_s):
                await self._participant.prepare(preparation)
                failpoint.hit("worker.prepare.engine_ready")
        except PrepareRefused as refused:
            return refused
        except TimeoutError:
            return PrepareRefused(f"not ready within {preparation.timeout_s:.0f} s")
        return None

    async def _execute(self, action: AbortPreparation | Apply) -> None:
        """Execute an action of the fence; the caller holds the lock."""
        if self._preparing is not None:
            _, task = self._preparing
            self._preparing = None
            task.cancel()
            await asyncio.wait([task])
        match action:
            case AbortPreparation():
                log.info("attempt %s aborted", action.attempt)
                await self._participant.abort(action.attempt)
            case Apply():
                group = action.group
                log.info("member of %s at epoch %d, %s", group.group_id, group.epoch, group.phase)
                failpoint.hit("worker.commit.seen")
                await self._participant.commit(group, action.attempt, action.superseded)
                failpoint.hit("worker.apply.sent")
