"""gRPC client of the workers' MemberService, which prepares them for changes of groups.

Every call has a deadline. A change is an *attempt*: Prepare at every member of the *source* groups,
then a commit of the *target* groups, or Abort.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable

import grpc.aio

from services.common.grpc_client import Dial
from services.core.groups.fence import prepare_calls
from services.core.groups.vocabulary import AbortMember, Member, PrepareMembers
from services.core.overload.role_peers import WorkerPeers
from services.core.overload.shipping_pair import ShippingPair
from services.memmgr.translate import (
    to_abort_request,
    to_peer,
    to_prepare_request,
    to_ship_request,
)
from services.memmgr.translate_record import WorkerEndpoint
from tideserve.worker.v1 import worker_pb2, worker_pb2_grpc

ABORT_TIMEOUT_S = 5.0
NONCE_BYTES = 16
ORDER_BYTES = 8
INTRODUCED_S = 60.0
"""Time for which workers stay connected to move requests."""
SHIP_TIMEOUT_S = 330.0
"""Longer than the workers' own limit."""
CONNECTING = "last error:"
"""Appears in gRPC's error message if no connection could be established."""
UNREACHABLE = WorkerEndpoint("", "", "")

log = logging.getLogger(__name__)
Answered = Callable[[str, str, bool, str], None]
"""Callback: worker id, incarnation, whether it is ready, and the reason if not."""


class ShippingFailed(Exception):
    """Requests could not be moved; the message is a sentence."""


class MemberClient:
    """Sends Prepare, Abort, Introduce and ShipRequests to workers."""

    def __init__(self, dial: Dial) -> None:
        self._dial = dial

    async def prepare(
        self, command: PrepareMembers, endpoints: dict[str, WorkerEndpoint], answered: Answered
    ) -> None:
        """Send Prepare to all members concurrently; calls `answered` for each.

        Also introduces the members to the holders, whose answers do not matter: members have other
        sources.
        """
        requests, introductions = requests_for(command, endpoints)
        async with asyncio.TaskGroup() as tasks:
            for worker_id, introduction in introductions.items():
                tasks.create_task(self._introduce(worker_id, introduction, endpoints))
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

    async def ship(
        self,
        pair: ShippingPair,
        token: int,
        endpoints: dict[str, WorkerEndpoint],
        requests_max: int,
        if_cheaper: bool,
        blocks_max: int,
    ) -> worker_pb2.ShipRequestsResponse:
        """Move requests of a worker to another; returns when no further request moves.

        `if_cheaper`: only requests whose KV is sent in less time than it is computed. `blocks_max`:
        their KV blocks in total; 0: no limit.

        Raises:
            ShippingFailed: if the source refuses, or does not answer.
        """
        source, target = pair.source.members[0], pair.target.members[0]
        both = [WorkerPeers(source, (target,)), WorkerPeers(target, (source,))]
        await self.introduce(both, token, endpoints)
        order = secrets.token_hex(ORDER_BYTES)
        request = to_ship_request(
            *(pair, token, order, endpoints, requests_max, if_cheaper, blocks_max)
        )
        address = endpoints.get(source.worker_id, UNREACHABLE).address
        async with self._dial(address, "worker") as channel:
            stub = worker_pb2_grpc.MemberServiceStub(channel)
            try:
                return await stub.ShipRequests(request, timeout=SHIP_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                raise ShippingFailed(f"{source.worker_id}: {reason_of(error)}") from error

    async def introduce(
        self, workers: Iterable[WorkerPeers], token: int, endpoints: dict[str, WorkerEndpoint]
    ) -> None:
        """Connect workers to their peers for `INTRODUCED_S`; each is a peer of its peers."""
        entries = list(workers)
        known = {entry.member.worker_id: _peer(entry.member, endpoints) for entry in entries}
        async with asyncio.TaskGroup() as tasks:
            for entry in entries:
                names = sorted(member.worker_id for member in (entry.member, *entry.peers))
                introduction = worker_pb2.IntroduceRequest(
                    token=token,
                    incarnation=entry.member.incarnation,
                    peers=[known[name] for name in names],
                    timeout_s=INTRODUCED_S,
                )
                tasks.create_task(self._introduce(entry.member.worker_id, introduction, endpoints))

    async def _introduce(
        self,
        worker_id: str,
        request: worker_pb2.IntroduceRequest,
        endpoints: dict[str, WorkerEndpoint],
    ) -> None:
        endpoint = endpoints.get(worker_id)
        if endpoint is None:
            return
        async with self._dial(endpoint.address, "worker") as channel:
            stub = worker_pb2_grpc.MemberServiceStub(channel)
            try:
                # Members wait for the holder, so this may take as long as the change.
                await stub.Introduce(request, timeout=request.timeout_s)
            except grpc.aio.AioRpcError as error:
                # A worker of an earlier release answers UNIMPLEMENTED.
                log.info("%s did not accept Introduce: %s", worker_id, error.code().name)

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


def requests_for(
    command: PrepareMembers, endpoints: dict[str, WorkerEndpoint]
) -> tuple[dict[str, worker_pb2.PrepareRequest], dict[str, worker_pb2.IntroduceRequest]]:
    """The Prepare for each member and the Introduce for each holder, by worker id.

    All list the same peers with the same new nonces. Survivors have none: they are connected to the
    members already, or send nothing.
    """
    peers = [_peer(m, endpoints) for source in command.sources for m in source.group.members]
    holders = [_peer(holder, endpoints) for holder in command.holders]
    survivors = [
        to_peer(survivor, endpoints.get(survivor.worker_id, UNREACHABLE), (b"", b""))
        for survivor in command.survivors
    ]
    formed = [target for target in command.targets if target.members]
    prepares = {
        worker_id: to_prepare_request(
            call,
            peers,
            [group for group in formed if group != call.target],
            [*holders, *survivors],
        )
        for worker_id, call in prepare_calls(command).items()
    }
    introductions = {
        holder.worker_id: worker_pb2.IntroduceRequest(
            token=command.token,
            incarnation=holder.incarnation,
            peers=[*peers, holder],
            timeout_s=command.timeout_s,
        )
        for holder in holders
    }
    return prepares, introductions


def _peer(member: Member, endpoints: dict[str, WorkerEndpoint]) -> worker_pb2.Peer:
    nonces = secrets.token_bytes(NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
    return to_peer(member, endpoints.get(member.worker_id, UNREACHABLE), nonces)
