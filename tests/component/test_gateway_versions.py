"""A gateway between services of the previous or the next release serves normally."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from google.protobuf.message import Message

from services.common import grpc_server, membership
from services.common.etcd import Store
from tests.support import control_plane, fake_cluster
from tests.support.gateway import Case, gateway_case
from tideserve.memmgr.v1 import memmgr_pb2

LAST_RELEASE = Path(__file__).parents[2] / "proto" / "last_release.binpb"
# Field 2047, which is unused.
UNKNOWN = b"\xf8\x7f\x01"


class LastRelease:
    """Messages in the format of the last release."""

    def __init__(self) -> None:
        self._pool = descriptor_pool.DescriptorPool()
        files = descriptor_pb2.FileDescriptorSet.FromString(LAST_RELEASE.read_bytes())
        for file in files.file:
            self._pool.Add(file)

    def known(self, name: str, data: bytes) -> Message:
        """A message as parsed by the last release."""
        kind = message_factory.GetMessageClass(self._pool.FindMessageTypeByName(name))
        message = kind.FromString(data)
        message.DiscardUnknownFields()
        return message

    def frame(self, name: str, data: bytes) -> bytes:
        return self.known(name, data).SerializeToString()

    def record(self, record: Message) -> bytes:
        known = self.known(record.DESCRIPTOR.full_name, record.SerializeToString())
        return json_format.MessageToJson(known, indent=None).encode()


class NextRelease:
    """Messages with a new field in each."""

    def frame(self, name: str, data: bytes) -> bytes:
        if name.endswith(".GetClusterResponse"):
            data += unheard_of().SerializeToString()
        return data + UNKNOWN

    def record(self, record: Message) -> bytes:
        text = json_format.MessageToJson(record, indent=None)
        return (text[:-1] + ', "ofTheNextRelease": {"a": [1]}}').encode()


def unheard_of() -> memmgr_pb2.GetClusterResponse:
    """A decision with a kind and a cause unknown to this release."""
    decision = memmgr_pb2.Decision()
    for name in ("action", "cause"):
        setattr(decision, name, 99)
    return memmgr_pb2.GetClusterResponse(decisions=[decision])


async def check_admin_port(case: Case, unheard: bool) -> None:
    """Check that status and live page show the known content beside an unknown decision."""
    expected = [("unknown", "unknown")] if unheard else []
    state = (await case.admin.get("/tideserve/v1/status")).json()
    assert [(row["action"], row["cause"]) for row in state["decisions"]] == expected
    assert len(state["workers"]) == 2
    async with case.admin.stream("GET", "/tideserve/v1/events") as events:
        async for line in events.aiter_lines():
            if line.startswith("data: "):
                break
    state = json.loads(line.removeprefix("data: "))
    assert [(row["action"], row["cause"]) for row in state["decisions"]] == expected
    assert (await case.chat(max_tokens=1)).status_code == 200


def skewed(handler: Any, frame: Callable[[str, bytes], bytes]) -> Any:
    """A method whose messages are converted to another release in both directions."""
    read, write = handler.request_deserializer, handler.response_serializer
    name = read.__self__.DESCRIPTOR.full_name
    return handler._replace(
        request_deserializer=lambda data: read(frame(name, data)),
        response_serializer=lambda answer: frame(answer.DESCRIPTOR.full_name, write(answer)),
    )


@pytest.mark.parametrize("release", [LastRelease, NextRelease])
async def test_a_gateway_serves_with_services_of_another_release(
    release: type[LastRelease] | type[NextRelease],
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = release()
    if release is LastRelease:
        monkeypatch.setattr(fake_cluster, "METADATA", ())
    add = grpc_server.LateServices.add_registered_method_handlers
    frames: list[str] = []

    def frame(name: str, data: bytes) -> bytes:
        frames.append(name)
        return other.frame(name, data)

    def add_skewed(self: Any, name: str, handlers: Mapping[str, Any]) -> None:
        add(self, name, {method: skewed(handler, frame) for method, handler in handlers.items()})

    monkeypatch.setattr(grpc_server.LateServices, "add_registered_method_handlers", add_skewed)
    monkeypatch.setattr(membership, "encode_record", other.record)
    monkeypatch.setattr(control_plane, "encode_record", other.record)
    async with gateway_case(store, tmp_path / "model", workers=2) as case:
        answer = await case.chat(max_tokens=20)
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 20
        stream = await case.openai.completions.create(
            model="m", prompt="hi", max_tokens=20, stream=True
        )
        reasons = [chunk.choices[0].finish_reason async for chunk in stream]
        assert reasons[-1] == "length"
        state = (await case.http.get("/ready")).json()
        assert (state["workers_registered"], state["groups_serving"]) == (2, 2)
        assert state["workers_without_drops"] == {}
        await check_admin_port(case, release is NextRelease)
    names = {name.rpartition(".")[2] for name in frames}
    assert {"AdmitResponse", "GenerateRequest", "GenerateResponse"} <= names
