"""MemberService: the fence judges each request, and the participant carries out accepted ones.

The worker watches the group records. Commits come only from them; aborts come from them, too, if
the memory manager's call was lost.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable

import grpc
import grpc.aio

from services.common import failpoint
from services.common.clock import monotonic_s
from services.common.records import to_group
from services.common.timeouts import timeout
from services.core.groups.fence import (
    AbortAsked,
    AbortPreparation,
    Apply,
    MemberState,
    PrepareAsked,
    Verdict,
)
from services.core.groups.vocabulary import StoredGroup
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
    """A malformed request to prepare; the message is one sentence."""


def to_prepare_asked(request: pb.PrepareRequest) -> PrepareAsked:
    """What the fence judges.

    Raises:
        InvalidPrepare: if a field is missing or a layer cannot be.
    """
    target = to_group(request.target)
    if not request.attempt or not request.incarnation or target is None or not target.members:
        raise InvalidPrepare("attempt, incarnation and target with its phase must be set")
    if any(not 0 <= one.first_layer <= one.end_layer for one in target.members):
        raise InvalidPrepare("a member's layers must begin at 0 or above and not end before that")
    return PrepareAsked(
        request.token,
        request.attempt,
        request.incarnation,
        request.group_id,
        request.epoch,
        request.mod_revision,
        target,
    )


def to_preparation(asked: PrepareAsked, request: pb.PrepareRequest) -> ProposedChange:
    """What the engine side prepares. Raises InvalidPrepare."""
    others = tuple(one for record in request.others if (one := to_group(record)) is not None)
    if len(others) < len(request.others):
        raise InvalidPrepare("every other group must have an id, an epoch and a phase")
    return ProposedChange(
        asked.attempt,
        asked.group_id,
        asked.epoch,
        asked.target,
        tuple(
            SourceMember(
                peer.worker_id,
                peer.incarnation,
                peer.address,
                peer.activation_address,
                peer.bulk_address,
                peer.activation_nonce,
                peer.bulk_nonce,
                peer.draining,
            )
            for peer in request.peers
        ),
        others,
    )


def to_abort_asked(request: pb.AbortRequest) -> AbortAsked:
    """What the fence judges."""
    return AbortAsked(request.token, request.attempt, request.incarnation)


# How long a request of a later epoch waits for the group records of that epoch.
FUTURE_WAIT_S = 3.0
# The deadline of a preparation whose caller set none.
PREPARE_TIMEOUT_S = 600.0

PrepareContext = grpc.aio.ServicerContext[pb.PrepareRequest, pb.PrepareResponse]
AbortContext = grpc.aio.ServicerContext[pb.AbortRequest, pb.AbortResponse]


class MemberServicer(worker_pb2_grpc.MemberServiceServicer):
    """Answers the memory manager for this worker. Requests are served while `run` runs."""

    def __init__(
        self,
        state: MemberState,
        participant: Participant,
        records: Callable[[], Iterable[StoredGroup]],
    ) -> None:
        """`records` are the group records as last read; call `note_records` when they change."""
        self._state = state
        self._participant = participant
        self._records = records
        # Held while the fence judges and its decision is carried out. Preparations run outside it.
        self._turn = asyncio.Lock()
        self._preparing: tuple[str, asyncio.Task[PrepareRefused | None]] | None = None
        self._refuses_all = False
        self._changed = asyncio.Event()
        self._observed = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None

    def note_records(self) -> None:
        """The group records have changed."""
        self._changed.set()

    @property
    def preparing(self) -> bool:
        """Whether a change that this worker agreed to is neither committed nor aborted."""
        return self._state.preparing is not None

    @property
    def epoch(self) -> int:
        """Epoch of the newest configuration that this process had a place in; 0 before any."""
        return self._state.epoch

    def refuse_all(self) -> None:
        """Refuse every change from now on."""
        self._refuses_all = True

    async def run(self) -> None:
        """Follow the group records until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            while True:
                await self._changed.wait()
                self._changed.clear()
                async with self._turn:
                    for action in self._state.observe(self._records()):
                        await self._carry_out(action)
                self._observed.set()
                self._observed = asyncio.Event()

    async def Prepare(
        self, request: pb.PrepareRequest, context: PrepareContext
    ) -> pb.PrepareResponse:
        try:
            asked = to_prepare_asked(request)
            preparation = to_preparation(asked, request)
        except InvalidPrepare as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if self._tasks is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the worker starts; try again")
        timeout_s = min(context.time_remaining() or PREPARE_TIMEOUT_S, PREPARE_TIMEOUT_S)
        task = await self._judge(asked, preparation, timeout_s, context)
        # The preparation outlives a caller that hangs up; it ends with the attempt.
        refused = await asyncio.shield(task)
        if refused is not None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(refused))
        return pb.PrepareResponse(attempt=asked.attempt, incarnation=self._state.incarnation)

    async def Abort(self, request: pb.AbortRequest, context: AbortContext) -> pb.AbortResponse:
        asked = to_abort_asked(request)
        if asked.incarnation != self._state.incarnation or asked.token < self._state.token:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, "stale, or meant for another process"
            )
        async with self._turn:
            action = self._state.abort(asked)
            if action is not None:
                await self._carry_out(action)
        return pb.AbortResponse()

    async def _judge(
        self,
        asked: PrepareAsked,
        preparation: ProposedChange,
        timeout_s: float,
        context: PrepareContext,
    ) -> "asyncio.Task[PrepareRefused | None]":
        """The task of the preparation, new or running; ends the call if the fence refuses it."""
        deadline_s = monotonic_s() + min(FUTURE_WAIT_S, timeout_s / 2)
        while True:
            observed = self._observed
            async with self._turn:
                if self._refuses_all:
                    await context.abort(
                        grpc.StatusCode.FAILED_PRECONDITION, "the worker stops; leave it out"
                    )
                answer = self._state.ask(asked)
                if answer.aborted is not None:
                    await self._carry_out(answer.aborted)
                if answer.verdict is Verdict.ACCEPTED:
                    return self._begin(preparation, timeout_s)
                if answer.verdict is Verdict.REPLAYED and self._preparing is not None:
                    return self._preparing[1]
            if answer.verdict is not Verdict.FUTURE or monotonic_s() > deadline_s:
                break
            try:
                async with timeout(max(0.0, deadline_s - monotonic_s())):
                    await observed.wait()
            except TimeoutError:
                break
        late = answer.verdict is Verdict.FUTURE
        code = grpc.StatusCode.ABORTED if late else grpc.StatusCode.FAILED_PRECONDITION
        log.info("attempt %s refused: %s", asked.attempt, answer.reason)
        await context.abort(code, answer.reason)

    def _begin(
        self, preparation: ProposedChange, timeout_s: float
    ) -> "asyncio.Task[PrepareRefused | None]":
        assert self._tasks is not None
        failpoint.hit("worker.prepare.accepted")
        task = self._tasks.create_task(self._prepare(preparation, timeout_s))
        self._preparing = (preparation.attempt, task)
        return task

    async def _prepare(
        self, preparation: ProposedChange, timeout_s: float
    ) -> PrepareRefused | None:
        """Prepare, and abort the preparation if that fails; returns why it failed."""
        try:
            refused = await self._try(preparation, timeout_s)
            if refused is not None:
                async with self._turn:
                    if self._state.abort_own(preparation.attempt) is not None:
                        self._preparing = None
                        await self._participant.abort(preparation.attempt)
            return refused
        except asyncio.CancelledError:
            # The task that cancels this one aborts the preparation, too.
            return PrepareRefused("the attempt was aborted")

    async def _try(self, preparation: ProposedChange, timeout_s: float) -> PrepareRefused | None:
        try:
            async with timeout(timeout_s):
                await self._participant.prepare(preparation)
                failpoint.hit("worker.prepare.engine_ready")
        except PrepareRefused as refused:
            return refused
        except TimeoutError:
            return PrepareRefused(f"not ready within {timeout_s:.0f} s")
        return None

    async def _carry_out(self, action: AbortPreparation | Apply) -> None:
        """Carry out a decision of the fence. The caller holds the turn."""
        if self._preparing is not None:
            _, task = self._preparing
            self._preparing = None
            task.cancel()
            await asyncio.wait([task])
        match action:
            case AbortPreparation():
                log.info("attempt %s is aborted", action.attempt)
                await self._participant.abort(action.attempt)
            case Apply():
                group = action.group
                log.info("is in %s at epoch %d, %s", group.group_id, group.epoch, group.phase)
                failpoint.hit("worker.commit.seen")
                await self._participant.commit(group, action.attempt, action.superseded)
                failpoint.hit("worker.apply.sent")
