"""Cluster state of the memory manager as plain values for the status page."""

import json

from services.core.adapter import AdapterUse, LoadedAdapter
from services.core.groups.vocabulary import Group, GroupPhase, Member
from services.core.report import EngineReport, Load
from services.core.role import Role
from services.gateway.cluster.cluster_client import cluster_rows
from services.gateway.cluster.translate import cluster_state, worker_facts
from services.gateway.vocabulary.message import ClusterStatus
from tests.support.control_plane import worker_record
from tests.support.reports import memory_report
from tideserve.common.v1 import record_pb2
from tideserve.memmgr.v1 import memmgr_pb2


def test_decisions_and_layers_are_translated() -> None:
    answer = memmgr_pb2.GetClusterResponse()
    answer.decisions.add(
        model="m",
        action=memmgr_pb2.DECISION_ACTION_RESTORE,
        cause=memmgr_pb2.DECISION_CAUSE_RELIEF,
        group_ids=["g"],
        demand_tokens=2**40,
        held_s=5.5,
    )
    group = answer.groups.add(group_id="g", epoch=3, model="m", phase=record_pb2.GROUP_PHASE_STABLE)
    group.members.add(worker_id="w0", first_layer=0, end_layer=20)
    group.members.add(worker_id="w1", first_layer=20, end_layer=30)
    state = cluster_state(answer)
    (decision,) = json.loads(json.dumps(state.decisions))
    assert (decision["action"], decision["cause"]) == ("restore", "relief")
    assert (decision["group_ids"], decision["demand_tokens"]) == (["g"], 2**40)
    assert (decision["held_s"], decision["needed_tokens"]) == (5.5, 0)
    members = Member("w0", "", 0, 20), Member("w1", "", 20, 30)
    assert state.groups == (Group("g", 3, GroupPhase.STABLE, members, "m"),)


def test_the_losses_of_groups() -> None:
    answer = memmgr_pb2.GetClusterResponse()
    answer.losses.add(group_id="g", epoch=3, lost_unix_s=99, reason="w1 is gone")
    row = {"group_id": "g", "epoch": 3, "lost_unix_s": 99, "reason": "w1 is gone"}
    assert cluster_rows(cluster_state(answer), {})["losses"] == [row]


def test_workers_without_a_role_record_are_mixed() -> None:
    workers = tuple(memory_report(name, EngineReport(Load(0, 0, 2, 0))) for name in ("a", "b"))
    rows = cluster_rows(ClusterStatus(workers, ()), {}, {"b": Role.DECODE})["workers"]
    assert [row["role"] for row in rows] == ["mixed", "decode"]


def test_the_adapters_of_a_worker() -> None:
    use = AdapterUse((LoadedAdapter(2**63 + 1, running=2, load_s=1.5),), adapter_slots=4)
    worker = memory_report("a", EngineReport(Load(0, 0, 2, 0, adapter_use=use)))
    (row,) = cluster_rows(ClusterStatus((worker,), ()), {})["workers"]
    row = json.loads(json.dumps(row))
    assert row["adapters"] == [{"digest": "8000000000000001", "loading": False, "running": 2}]


def test_registration_fields_are_shown() -> None:
    shape = record_pb2.ModelShape(num_layers=3, layer_cost=1.5)
    facts = worker_facts(worker_record(shape=shape, arena_bytes=9, capabilities=["paced:A100"]))
    assert (facts["host"], facts["arena_bytes"], facts["paced"]) == ("127.0.0.1", 9, "A100")
    assert (facts["shape"]["num_layers"], facts["shape"]["layer_cost"]) == (3, 1.5)
    assert worker_facts(worker_record())["shape"] is None
    assert (facts["engine"], facts["can_merge"]) == ("tideserve", False)
    assert worker_facts(worker_record())["can_merge"] is True
    assert worker_facts(worker_record(no_drops="no UCX"))["no_drops"] == "no UCX"
    assert worker_facts(worker_record(capabilities=["engine:vllm"]))["engine"] == "vllm"
    assert worker_facts(None) == {"model": None, "paced": None, "engine": None}
