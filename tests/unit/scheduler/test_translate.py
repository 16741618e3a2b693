"""Records of serving groups, and a frame for every command."""

from dataclasses import fields, replace

import pytest

from services.common.records import to_cost_record
from services.common.report import InvalidReport
from services.core.adapter import Adapter
from services.core.ask import NO_PREFIX, Ask, Assignment, FailedAssignment, RefusalReason
from services.core.cost.model import TOKEN_COSTS, Coefficients, CostModel
from services.core.destination import Destination
from services.core.prefix.block_hash import ThinHashes
from services.core.report import Load, LoadReport
from services.core.role import Role
from services.core.scheduler.buckets import BucketStats
from services.core.scheduler.state import SchedulerState
from services.core.scheduler.vocabulary import (
    Asked,
    Command,
    LoadReported,
    SendAssignment,
    SendRefusal,
    SendTicket,
    ServingGroup,
    Withdrawn,
)
from services.core.service import Service
from services.gateway.cluster.translate import ask_frame, scheduler_message
from services.gateway.vocabulary.message import Heartbeat, WaitingBuckets
from services.scheduler.translate import (
    to_admit_event,
    to_frame,
    to_group,
    to_heartbeat,
    to_load_event,
)
from tests.support.control_plane import group_record, worker_record
from tideserve.common.v1 import adapter_pb2, load_pb2, record_pb2
from tideserve.scheduler.v1 import scheduler_pb2


def test_a_stable_group_of_a_registered_worker_serves() -> None:
    worker = worker_record(address="h:1")
    assert to_group(group_record(worker, epoch=3), {"w0": worker}) == ServingGroup(
        "group-w0", 3, "w0", "w0-a", "h:1", "m", 100, 16, 1024
    )


@pytest.mark.parametrize(
    "worker",
    [
        worker_record(incarnation="another"),
        worker_record(block_size=0),
        worker_record(kv_blocks_total=0),
        worker_record(max_model_len=-1),
    ],
)
def test_a_worker_that_cannot_serve_has_no_group(worker: record_pb2.WorkerRecord) -> None:
    assert to_group(group_record(worker_record()), {"w0": worker}) is None


def test_a_group_has_the_costs_of_its_leader() -> None:
    model = CostModel(1e-8, 1e-4, 0.02, 0.01, Coefficients(1e-7, 1e-5, 0.01), 1e-9, 64, 1e-5)
    worker = worker_record(cost_model=to_cost_record(model))
    group = to_group(group_record(worker), {"w0": worker})
    assert group is not None and group.cost_model == model


def test_a_group_loads_the_adapters_of_its_leader() -> None:
    limits = adapter_pb2.AdapterLimits(slots=2, rank_max=32)
    for adapters, rank_max in ((limits, 32), (None, 0), (adapter_pb2.AdapterLimits(), 0)):
        worker = worker_record(adapters=adapters)
        group = to_group(group_record(worker), {"w0": worker})
        assert group is not None and group.adapter_rank_max == rank_max


def test_groups_that_do_not_serve_are_left_out() -> None:
    worker = worker_record()
    workers = {"w0": worker}
    assert to_group(group_record(worker), {}) is None
    assert to_group(group_record(worker), {"w0": worker_record(draining=True)}) is None
    assert to_group(group_record(worker, epoch=0), workers) is None
    dissolved = group_record(worker)
    dissolved.phase = record_pb2.GROUP_PHASE_DISSOLVED
    assert to_group(dissolved, workers) is None
    empty = group_record(worker)
    del empty.members[:]
    assert to_group(empty, workers) is None


def test_a_merged_group_is_its_leader_with_the_shortest_model_length() -> None:
    leader = worker_record("w1", address="h:1")
    follower = worker_record("w0", max_model_len=512, kv_blocks_total=50)
    merged = group_record(leader, epoch=3)
    merged.members.add(worker_id="w0", incarnation="w0-a")
    assert to_group(merged, {"w0": follower, "w1": leader}) == ServingGroup(
        "group-w1", 3, "w1", "w1-a", "h:1", "m", 100, 16, 512, members=2
    )
    leader.max_batch_tokens = 300
    group = to_group(merged, {"w0": follower, "w1": leader})
    assert group is not None and group.max_batch_tokens == 300
    assert to_group(merged, {"w1": leader}) is None
    follower.incarnation = "w0-b"
    assert to_group(merged, {"w0": follower, "w1": leader}) is None


def test_a_single_worker_has_its_role_and_a_merged_group_is_mixed() -> None:
    leader, follower = worker_record("w1"), worker_record("w0")
    roles = {"w1": Role.PREFILL, "w0": Role.DECODE}
    workers = {"w0": follower, "w1": leader}
    alone = group_record(leader)
    for known, role in ((roles, Role.PREFILL), ({"w0": Role.DECODE}, Role.MIXED)):
        group = to_group(alone, workers, known)
        assert group is not None and group.role is role
    alone.members.add(worker_id="w0", incarnation="w0-a")
    merged = to_group(alone, workers, roles)
    assert merged is not None and merged.role is Role.MIXED


def test_an_assignment_names_the_worker_that_decodes() -> None:
    place = Destination("w1", "h:2", "group-w1", 4)
    for hand_to in (place, None):
        sent = SendAssignment("r", "g", 1, "w", "h:1", True, hand_to, stream_id=1)
        received = scheduler_message(to_frame(sent))
        assert received == Assignment("r", "g", 1, "w", "h:1", True, hand_to)


@pytest.mark.parametrize("reason", RefusalReason)
def test_every_reason_has_a_number(reason: RefusalReason) -> None:
    frame = to_frame(SendRefusal("r", "why", 2.0, reason=reason, stream_id=1))
    assert frame.refusal.reason != scheduler_pb2.REFUSAL_REASON_UNSPECIFIED
    assert scheduler_pb2.RefusalReason.Name(frame.refusal.reason).lower().endswith(reason)


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (SendTicket(1, "r"), "ticket"),
        (SendAssignment("r", "g", 1, "w", "h:1", stream_id=1), "assignment"),
        (SendRefusal("r", "why", reason=RefusalReason.EXPIRED, stream_id=1), "refusal"),
    ],
)
def test_every_command_has_a_frame(command: Command, kind: str) -> None:
    frame = to_frame(command)
    assert frame.WhichOneof("body") == kind
    assert getattr(frame, kind).request_id == "r"


def test_gateway_frames_are_translated() -> None:
    withdraw = scheduler_pb2.AdmitRequest(withdraw=scheduler_pb2.Withdraw(request_id="r"))
    assert to_admit_event(withdraw, 1, 2.0) == Withdrawn(2.0, "r")
    assert to_admit_event(scheduler_pb2.AdmitRequest(), 1, 2.0) is None
    load = load_pb2.WorkerLoad(worker_id="w", incarnation="i", number=3, epoch=4, running=5)
    passed_on = to_admit_event(scheduler_pb2.AdmitRequest(load=load), 1, 2.0)
    report = LoadReport("w", "i", 3, 4, Load(5, 0, 0, 0))
    assert passed_on == LoadReported(2.0, report, passed_on=True)


@pytest.mark.parametrize("prefix", [NO_PREFIX, ThinHashes(16, (0, 2**64 - 1, 7))])
def test_an_ask_round_trips(prefix: ThinHashes) -> None:
    failed = FailedAssignment("g", 3, returned=True)
    ask = Ask("r", "m", 10, 20, failed, Service(tenant="anna"), "00-1-2-01", prefix)
    ask = replace(ask, adapter=Adapter("a", "0f" * 32, "/adapters/a", 8))
    event = to_admit_event(ask_frame(ask, 1.5), 4, 2.0)
    fields_of_ask = {field.name: getattr(ask, field.name) for field in fields(Ask)}
    assert event == Asked(**fields_of_ask, now_s=2.0, stream_id=4, waited_s=1.5)
    without = to_admit_event(ask_frame(replace(ask, adapter=None), 1.5), 4, 2.0)
    assert isinstance(without, Asked) and without.adapter is None


@pytest.mark.parametrize("ttft", [None, TOKEN_COSTS])
def test_a_heartbeat_states_whether_prefixes_are_wanted(ttft: CostModel | None) -> None:
    snapshot = SchedulerState(8, 120.0, ttft=ttft).snapshot(0.0)
    beat = scheduler_message(to_heartbeat(snapshot))
    assert beat == Heartbeat(0, 0, wants_prefixes=ttft is not None)


def test_reports_with_negative_numbers_are_refused() -> None:
    """Whichever way the report came; for all fields see `tests/unit/common/test_report.py`."""
    load = load_pb2.WorkerLoad(worker_id="w", incarnation="i", running=-1)
    with pytest.raises(InvalidReport, match="running"):
        to_load_event(load, 0.0)
    with pytest.raises(InvalidReport, match="running"):
        to_admit_event(scheduler_pb2.AdmitRequest(load=load), 1, 0.0)


def test_reports_with_more_free_than_total_blocks_are_refused() -> None:
    load = load_pb2.WorkerLoad(worker_id="w", incarnation="i", kv_blocks_total=9, kv_blocks_free=10)
    with pytest.raises(InvalidReport, match="kv_blocks_total is 9"):
        to_load_event(load, 0.0)
    load.kv_blocks_free = 9
    assert to_load_event(load, 0.0).report.load.kv_blocks_total == 9


def test_bucket_bounds_are_sent_by_model() -> None:
    stats = (BucketStats("m", ((80, 3), (900, 1)), 0.25, 1.0, 100.0),)
    snapshot = replace(SchedulerState(8, 120.0).snapshot(0.0), buckets=stats)
    beat = scheduler_message(to_heartbeat(snapshot))
    assert isinstance(beat, Heartbeat)
    assert beat.buckets == {"m": WaitingBuckets(((80, 3), (900, 1)), 0.25)}
