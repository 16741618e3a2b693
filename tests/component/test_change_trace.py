"""The trace of a change of groups, from a real memory manager with fake engines."""

import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import pytest

from services.common.etcd import Store
from services.common.grpc_client import open_channel
from services.memmgr import app as memmgr_app
from services.memmgr.config import MemmgrConfig
from tests.support.control_plane import LEASE_TTL_S, service_address, serving
from tests.support.member import FakeMember, all_serve, member, reporting
from tests.support.otlp_receiver import OtlpReceiver, attributes_of
from tests.support.waiting import eventually
from tideserve.memmgr.v1 import memmgr_pb2, memmgr_pb2_grpc

ROOT = "change of groups"


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@dataclass
class Bench:
    """A memory manager that leads two members."""

    stub: "memmgr_pb2_grpc.MemmgrServiceAsyncStub"
    members: tuple[FakeMember, FakeMember]
    receiver: OtlpReceiver

    async def merge(self) -> list[memmgr_pb2.ReconfigurationStep]:
        call = self.stub.MergeGroups(memmgr_pb2.MergeGroupsRequest(), timeout=60)
        return [answer.step async for answer in call]

    async def roots(self, count: int) -> list[str]:
        """Wait for `count` traces of changes; returns their ids in order of arrival."""

        def trace_ids() -> list[str]:
            return [span.trace_id.hex() for span in self.receiver.all_spans if span.name == ROOT]

        await eventually(lambda: len(trace_ids()) >= count)
        assert len(trace_ids()) == count
        return trace_ids()


@pytest.fixture
async def bench(store: Store, receiver: OtlpReceiver) -> AsyncIterator[Bench]:
    # The ratio applies to requests; changes are always traced.
    config = MemmgrConfig(
        etcd_url=store.url,
        lease_ttl_s=LEASE_TTL_S,
        change_over_timeout_s=20,
        otlp_endpoint=receiver.endpoint,
        trace_sample_ratio=0.0,
    )
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(serving(memmgr_app.serve, config))
        first = await stack.enter_async_context(member(store, "w0"))
        second = await stack.enter_async_context(member(store, "w1"))
        address = await service_address(store, "memmgr")
        await stack.enter_async_context(reporting(address, first, second))
        await all_serve(address, first, second)
        channel = await stack.enter_async_context(open_channel(address))
        yield Bench(memmgr_pb2_grpc.MemmgrServiceStub(channel), (first, second), receiver)


async def test_a_change_is_one_trace_with_a_span_for_every_step_of_every_member(
    bench: Bench,
) -> None:
    second = bench.members[1]
    second.engine.settled = False
    steps = await bench.merge()
    assert steps[-1].phase == memmgr_pb2.RECONFIGURATION_PHASE_STABLE
    assert bench.receiver.all_spans == [], "it goes on until the last member has settled"
    second.engine.settled = True
    (trace_id,) = await bench.roots(1)
    spans = bench.receiver.trace(trace_id)
    assert {name: len(named) for name, named in spans.items()} == {
        ROOT: 1,
        "decide": 1,
        "prepare": 2,
        "commit": 1,
        "apply": 2,
        "exchange": 1,
    }
    (root,) = spans[ROOT]
    children = [span for named in spans.values() for span in named if span is not root]
    assert {span.parent_span_id for span in children} == {root.span_id}
    for name in ("prepare", "apply"):
        workers = {attributes_of(span)["tideserve.worker"] for span in spans[name]}
        assert workers == {"w0", "w1"}
    order = ["decide", "prepare", "commit", "apply", "exchange"]
    ends = [max(span.end_time_unix_nano for span in spans[name]) for name in order]
    assert ends == sorted(ends) and ends[-1] <= root.end_time_unix_nano
    attributes = attributes_of(root)
    assert attributes["tideserve.change.cause"] == "manual"
    assert attributes["tideserve.change.epoch"] == steps[-1].epoch
    assert "merge: room for" in attributes["tideserve.change.text"]
    assert root.status.code == 0


async def test_group_records_name_the_trace_of_their_change(bench: Bench) -> None:
    await bench.merge()
    (trace_id,) = await bench.roots(1)
    (root,) = bench.receiver.spans(ROOT)
    records = bench.members[1].directory.records.values()
    (made,) = [record for record in records if len(record.members) == 2]
    assert made.traceparent == f"00-{trace_id}-{root.span_id.hex()}-01"


async def test_a_refused_change_is_a_failed_trace(bench: Bench) -> None:
    bench.members[1].engine.refuse = "it has no room"
    steps = await bench.merge()
    assert steps[-1].phase == memmgr_pb2.RECONFIGURATION_PHASE_FAILED
    (trace_id,) = await bench.roots(1)
    spans = bench.receiver.trace(trace_id)
    assert not {"commit", "apply", "exchange"} & set(spans)
    assert spans[ROOT][0].status.message == "w1 refused: it has no room"
    refused = [span for span in spans["prepare"] if span.status.message]
    assert [attributes_of(span)["tideserve.worker"] for span in refused] == ["w1"]


async def test_survivors_of_a_lost_member_restore_in_a_new_trace(
    store: Store, receiver: OtlpReceiver
) -> None:
    config = MemmgrConfig(
        etcd_url=store.url, lease_ttl_s=LEASE_TTL_S, otlp_endpoint=receiver.endpoint
    )
    async with (
        serving(memmgr_app.serve, config),
        member(store, "w0") as first,
    ):
        address = await service_address(store, "memmgr")
        async with reporting(address, first):
            async with (
                member(store, "w1") as second,
                reporting(address, second),
                open_channel(address) as channel,
            ):
                await all_serve(address, first, second)
                bench = Bench(memmgr_pb2_grpc.MemmgrServiceStub(channel), (first, second), receiver)
                await bench.merge()
                await bench.roots(1)
            _, trace_id = await bench.roots(2)
    spans = receiver.trace(trace_id)
    assert set(spans) == {ROOT, "decide", "prepare", "commit", "apply", "exchange"}
    assert attributes_of(spans[ROOT][0])["tideserve.change.cause"] == "member_lost"
