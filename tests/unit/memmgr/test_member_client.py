"""Requests to members and holders of a change: peers and secrets."""

import logging
from dataclasses import replace

import grpc.aio
import pytest

from services.common.grpc_client import open_channel
from services.core.groups.vocabulary import Group, GroupPhase, Member, PrepareMembers, Source
from services.memmgr.member_client import MemberClient, requests_for
from services.memmgr.translate_record import WorkerEndpoint
from tideserve.worker.v1 import worker_pb2

ENDPOINTS = {name: WorkerEndpoint(f"{name}:0", f"{name}:1", f"{name}:2") for name in "abc"}
LOWER, UPPER = Member("a", "a-1", 0, 2), Member("b", "b-1", 2, 4)


def command(attempt: str, survivor: Member, *holders: Member) -> PrepareMembers:
    source = Group(f"g-{survivor.worker_id}", 3, GroupPhase.DEGRADED, (survivor,), "m", attempt)
    whole = Member(survivor.worker_id, survivor.incarnation, 0, 4)
    target = Group(source.group_id, 4, GroupPhase.STABLE, (whole,), "m")
    return PrepareMembers(attempt, 7, (Source(source, 9),), (target,), 60.0, holders)


def test_a_member_and_its_holder_have_the_same_secrets() -> None:
    prepares, introductions = requests_for(command("7-1", LOWER, UPPER), ENDPOINTS)
    prepare, introduction = prepares["a"], introductions["b"]
    assert (introduction.token, introduction.incarnation) == (7, "b-1")
    assert introduction.timeout_s == 60.0, "the limit of the attempt"
    assert [*prepare.peers, *prepare.holders] == list(introduction.peers)
    (holder,) = prepare.holders
    assert (holder.worker_id, holder.first_layer, holder.end_layer) == ("b", 2, 4)
    assert (holder.activation_address, holder.bulk_address) == ("b:1", "b:2")


def test_each_attempt_has_new_secrets() -> None:
    peers = [requests_for(command(name, LOWER), ENDPOINTS)[0]["a"].peers[0] for name in "tu"]
    assert peers[0].activation_nonce != peers[1].activation_nonce
    assert peers[0].bulk_nonce not in (peers[1].bulk_nonce, peers[0].activation_nonce)


def test_without_holders_there_is_no_introduction() -> None:
    assert not requests_for(command("t", LOWER), ENDPOINTS)[1]


def test_survivors_have_no_secrets_and_no_introduction() -> None:
    whole = command("t", LOWER)
    prepares, introductions = requests_for(replace(whole, survivors=(UPPER,)), ENDPOINTS)
    (survivor,) = prepares["a"].holders
    assert (survivor.worker_id, survivor.first_layer, survivor.end_layer) == ("b", 2, 4)
    assert not (survivor.activation_nonce or survivor.bulk_nonce or introductions)


async def test_a_worker_without_introduce_does_not_stop_a_change(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Workers of an earlier release have only Prepare and Abort."""

    async def prepare(request: worker_pb2.PrepareRequest, _context: object) -> object:
        return worker_pb2.PrepareResponse(attempt=request.attempt, incarnation=request.incarnation)

    handler = grpc.unary_unary_rpc_method_handler(
        prepare,
        worker_pb2.PrepareRequest.FromString,
        worker_pb2.PrepareResponse.SerializeToString,
    )
    service = "tideserve.worker.v1.MemberService"
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(service, {"Prepare": handler})]
    )
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    caplog.set_level(logging.INFO)
    answers: list[tuple[str, str, bool, str]] = []
    try:
        await MemberClient(lambda to, _role: open_channel(to)).prepare(
            command("t", LOWER, UPPER),
            dict.fromkeys("ab", WorkerEndpoint(address, address, address)),
            lambda *answer: answers.append(answer),
        )
    finally:
        await server.stop(None)
    assert answers == [("a", "a-1", True, "")]
    assert "b did not accept Introduce: UNIMPLEMENTED" in caplog.text
