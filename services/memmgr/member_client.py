"""gRPC client of the workers' MemberService, which prepares them for changes of groups.

Every call has a deadline. A change is an *attempt*: Prepare at every member of the *source* groups,
then a commit of the *target* groups, or Abort.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable

import grpc.aio

from services.common.grpc_client import Dial
from services.core.groups.fence import prepare_calls
from services.core.groups.vocabulary import AbortMember, PrepareMembers
from services.memmgr.translate import to_abort_request, to_peer, to_prepare_request
from services.memmgr.translate_record import WorkerEndpoint
from tideserve.worker.v1 import worker_pb2, worker_pb2_grpc

ABORT_TIMEOUT_S = 5.0
NONCE_BYTES = 16
CONNECTING = "last error:"
"""Appears in gRPC's error message if no connection could be established."""

log = logging.getLogger(__name__)
Answered = Callable[[str, str, bool, str], None]
"""Callback: worker id, incarnation, whether it is ready, and the reason if not."""


class MemberClient:
    """Sends Prepare and Abort to members."""

    def __init__(self, dial: Dial) -> None:
        self._dial = dial

    async def prepare(
        self, command: PrepareMembers, endpoints: dict[str, WorkerEndpoint], answered: Answered
    ) -> None:
        """Send Prepare to all members concurrently; calls `answered` for each."""
        requests = prepare_requests(command, endpoints)
        async with asyncio.TaskGroup() as tasks:
            for worker_id, request in requests.items():
                address = endpoints[worker_id].address if worker_id in endpoints else ""
                tasks.create_task(
                    self._prepare(worker_id, address, request, command.timeout_s, answered)
                )

    async def abort(self, command: AbortMember, endpoints: dict[str, WorkerEndpoint]) -> None:
        """Send Abort to a member, without retry: the group's record shows the abort as well."""
        endpoint = endpoints.get(command.worker_id)
        if endpoint is None:
            return
        async with self._dial(endpoint.address, "worker") as channel:
            stub = worker_pb2_grpc.MemberServiceStub(channel)
            try:
                await stub.Abort(to_abort_request(command), timeout=ABORT_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                log.info("%s did not accept Abort: %s", command.worker_id, error.code().name)

    async def _prepare(
        self,
        worker_id: str,
        address: str,
        request: worker_pb2.PrepareRequest,
        timeout_s: float,
        answered: Answered,
    ) -> None:
        async with self._dial(address, "worker") as channel:
            stub = worker_pb2_grpc.MemberServiceStub(channel)
            try:
                answer = await stub.Prepare(request, timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                answered(worker_id, request.incarnation, False, reason_of(error))
                return
        ready = answer.attempt == request.attempt
        answered(
            worker_id, answer.incarnation, ready, "" if ready else "it answered for another attempt"
        )


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """Why a member is not ready, for operators; replaces gRPC's texts of connection errors."""
    details = error.details() or ""
    if error.code() is grpc.StatusCode.UNAVAILABLE and CONNECTING in details:
        return "it is unreachable"
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "it did not answer in time"
    return details or str(error.code().name)


def prepare_requests(
    command: PrepareMembers, endpoints: dict[str, WorkerEndpoint]
) -> dict[str, worker_pb2.PrepareRequest]:
    """The Prepare for each member, by worker id; all list the same peers with new nonces."""
    peers = [
        to_peer(
            member,
            endpoints.get(member.worker_id, WorkerEndpoint("", "", "")),
            (secrets.token_bytes(NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)),
        )
        for source in command.sources
        for member in source.group.members
    ]
    formed = [target for target in command.targets if target.members]
    return {
        worker_id: to_prepare_request(
            call, peers, [group for group in formed if group != call.target]
        )
        for worker_id, call in prepare_calls(command).items()
    }
