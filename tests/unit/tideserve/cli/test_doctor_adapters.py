"""What the doctor says of LoRA adapters: where they are, and which cannot be loaded."""

from pathlib import Path
from typing import Any

import pytest

from services.common.adapter_files import FILES, adapter_digest
from tests.support.control_plane import worker_record
from tideserve.cli.doctor.adapters import check_adapters
from tideserve.cli.doctor.finding import Finding, Level
from tideserve.common.v1 import adapter_pb2, record_pb2

MODEL = "m"


@pytest.fixture
def record(tmp_path: Path) -> adapter_pb2.AdapterRecord:
    for name in FILES:
        (tmp_path / name).write_text(name)
    return adapter_pb2.AdapterRecord(
        name="support", base=MODEL, source=str(tmp_path), digest=adapter_digest(tmp_path), rank=16
    )


def worker(slots: int = 4, rank_max: int = 16, model: str = MODEL) -> record_pb2.WorkerRecord:
    limits = adapter_pb2.AdapterLimits(slots=slots, rank_max=rank_max)
    return worker_record("w0", model=model, adapters=limits)


def row(name: str, digest: str, *, loading: bool = False) -> dict[str, Any]:
    adapter = {"digest": digest[:16], "loading": loading, "running": 1}
    return {"id": name, "adapters": [adapter]}


def check(
    record: adapter_pb2.AdapterRecord,
    status: dict[str, Any] | None = None,
    workers: list[record_pb2.WorkerRecord] | None = None,
    *,
    here: bool = True,
) -> Finding:
    own = [worker()] if workers is None else workers
    (finding,) = check_adapters([record], own, status, here=here)
    return finding


def test_where_an_adapter_is_loaded(record: adapter_pb2.AdapterRecord) -> None:
    digest = record.digest
    rows = [row("w0", digest), row("w1", "0" * 64), row("w2", digest, loading=True), {"id": "w3"}]
    finding = check(record, {"workers": [*rows, row("w4", digest)]})
    assert finding.level is Level.OK
    assert finding.sentence == "the adapter support of m is loaded by w0, w4"
    assert "by no worker" in check(record, {"workers": rows[1:]}).sentence
    assert check(record).sentence == "the adapter support of m fits its workers"
    assert check_adapters([], [worker()], None, here=True) == []


@pytest.mark.parametrize(
    ("workers", "sentence"),
    [
        ([], "of which no worker is registered; start one"),
        ([worker(model="other")], "of which no worker is registered"),
        ([worker(slots=0, rank_max=0)], "whose workers load no adapters; start workers with"),
        ([worker(rank_max=8)], "only ranks up to 8; set their 'adapter_rank_max' to 16 or more"),
    ],
)
def test_an_adapter_that_no_worker_can_load(
    record: adapter_pb2.AdapterRecord, workers: list[record_pb2.WorkerRecord], sentence: str
) -> None:
    finding = check(record, workers=workers)
    assert finding.level is Level.FAILURE and sentence in finding.sentence


def test_a_folder_that_workers_refuse(record: adapter_pb2.AdapterRecord) -> None:
    weights = Path(record.source, FILES[1])
    weights.write_text("other weights")
    changed = check(record)
    assert changed.level is Level.FAILURE and "has changed" in changed.sentence
    assert check(record, here=False).level is Level.OK, "its folder is on another machine"
    weights.unlink()
    assert f"cannot be loaded: {FILES[1]}" in check(record).sentence
