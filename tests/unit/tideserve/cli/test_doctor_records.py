"""What the doctor says of `scheduling` in the records of etcd."""

import pytest

from tests.support.control_plane import worker_record
from tideserve.cli.doctor.records import RegisteredRecords, check_records
from tideserve.common.v1 import record_pb2


def service(name: str, scheduling: str = "", incarnation: str = "a") -> record_pb2.ServiceRecord:
    return record_pb2.ServiceRecord(
        name=name, incarnation=incarnation, address="127.0.0.1:1", scheduling=scheduling
    )


@pytest.mark.parametrize(
    ("schedulers", "workers", "told"),
    [
        (["slo"], ["slo", ""], None),
        (["slo"], ["slo", "fcfs"], "runs with scheduling slo, but workers with fcfs (w1)"),
        (["slo", "fcfs"], ["slo"], "schedulers run with scheduling fcfs and slo"),
        (["", "slo"], ["slo"], None),
    ],
)
def test_scheduler_and_workers_are_to_agree(
    schedulers: list[str], workers: list[str], told: str | None
) -> None:
    records = RegisteredRecords(
        services=[
            *(service(name) for name in ("gateway", "memmgr")),
            *(service("scheduler", one, one) for one in schedulers),
        ],
        workers=[worker_record(f"w{number}", scheduling=one) for number, one in enumerate(workers)],
        leaders=["memmgr"],
    )
    found = [one.sentence for one in check_records(records, "/tideserve/", etcd_is_local=True)]
    about = [text for text in found if "scheduling" in text]
    assert [told in text for text in about] == ([True] if told is not None else [])
