"""Checks of etcd records by the doctor: `scheduling`, and workers that cannot merge."""

import pytest

from tests.support.control_plane import worker_record
from tideserve.cli.doctor.records import RegisteredRecords, check_records
from tideserve.common.v1 import record_pb2


def service(name: str, scheduling: str = "", incarnation: str = "a") -> record_pb2.ServiceRecord:
    return record_pb2.ServiceRecord(
        name=name, incarnation=incarnation, address="127.0.0.1:1", scheduling=scheduling
    )


@pytest.mark.parametrize(
    ("schedulers", "workers", "expected"),
    [
        (["slo"], ["slo", ""], None),
        (["slo"], ["slo", "fcfs"], "runs with scheduling slo, but workers with fcfs (w1)"),
        (["slo", "fcfs"], ["slo"], "schedulers run with scheduling fcfs and slo"),
        (["", "slo"], ["slo"], None),
    ],
)
def test_different_scheduling_settings_are_reported(
    schedulers: list[str], workers: list[str], expected: str | None
) -> None:
    records = RegisteredRecords(
        services=[
            *(service(name) for name in ("gateway", "memmgr")),
            *(service("scheduler", scheduler, scheduler) for scheduler in schedulers),
        ],
        workers=[
            worker_record(f"w{number}", scheduling=worker) for number, worker in enumerate(workers)
        ],
        leaders=["memmgr"],
    )
    sentences = [
        finding.sentence for finding in check_records(records, "/tideserve/", etcd_is_local=True)
    ]
    about = [text for text in sentences if "scheduling" in text]
    assert [expected in text for text in about] == ([True] if expected is not None else [])


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"no_drops": "UCX cannot be loaded"}, "cannot drop layers: UCX cannot be loaded"),
        ({}, "cannot drop layers: it has no lanes to other workers"),
    ],
)
def test_a_worker_that_cannot_drop_layers_has_a_reason(
    fields: dict[str, str], sentence: str
) -> None:
    worker = worker_record("w0", capabilities=["generate"], **fields)
    findings = check_records(RegisteredRecords(workers=[worker]), "/tideserve/", etcd_is_local=True)
    assert any(f"the worker w0 {sentence}" in finding.sentence for finding in findings)
