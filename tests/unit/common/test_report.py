"""Reports of workers on the wire."""

import math
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import count
from typing import Any

import pytest
from google.protobuf.message import Message

from services.common.report import (
    Codec,
    InvalidReport,
    load_message,
    memory_message,
    memory_values,
    to_load_report,
    to_memory_report,
    unchecked_memory_report,
)
from services.core.adapter import AdapterUse, LoadedAdapter
from services.core.report import ClassTokens, EngineReport, Load, LoadReport
from services.core.reporting import LoadReporting, ReportSchedule, ReportUrgency
from tests.support.reports import memory_report
from tideserve.common.v1 import adapter_pb2, load_pb2, process_pb2
from tideserve.memmgr.v1 import memmgr_pb2


def filled(message: Message) -> Any:
    """The message with a different value in each field."""
    for field, number in zip(message.DESCRIPTOR.fields, count(1)):
        if field.message_type is not None:
            getattr(message, field.name).extend([filled(adapter_pb2.LoadedAdapter())] * 2)
        elif field.is_repeated:
            value: Any = ["a", "b"] if field.type == field.TYPE_STRING else [number, number + 1]
            getattr(message, field.name).extend(value)
        elif field.type == field.TYPE_BOOL:
            setattr(message, field.name, True)
        else:
            kind = {field.TYPE_STRING: str, field.TYPE_DOUBLE: float}.get(field.type, int)
            setattr(message, field.name, kind(number))
    if isinstance(message, adapter_pb2.LoadedAdapter):
        return message
    for name, blocks in (("kv_blocks_free", 3), ("kv_blocks_total", 4)):
        setattr(message, name, blocks)
    return message


def test_every_field_round_trips() -> None:
    load = filled(load_pb2.WorkerLoad())
    assert load_message(to_load_report(load)) == load
    memory = filled(memmgr_pb2.WorkerMemory())
    report = to_memory_report(memory)
    assert memory_message(report) == memory
    values = memory_values(report)
    assert values.keys() == {field.name for field in memory.DESCRIPTOR.fields}
    assert all(tuple(values[n]) == (12, 13) if n == "pids" else values[n] for n in values)


def test_absent_fields_have_their_default() -> None:
    load = Load(1, 2, 3, 4, preemptions_total=5, kv_blocks_total=6, prompt_tokens_total=7)
    there = to_load_report(load_message(LoadReport("w", "i", 8, 9, load, ("r",))))
    assert there == LoadReport("w", "i", 8, 9, Load(1, 2, 3, 4, kv_blocks_total=6), ("r",))


def test_a_message_with_an_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match=r"LoadReport has no name, pids, "):
        Codec(LoadReport, process_pb2.GetProcessResponse)


@pytest.mark.parametrize(
    ("made", "read"),
    [
        (load_pb2.WorkerLoad, to_load_report),
        (memmgr_pb2.WorkerMemory, to_memory_report),
    ],
)
def test_impossible_reports_are_refused(made: type[Message], read: Callable[[Any], object]) -> None:
    unnamed = "worker_id and incarnation must be set"
    wrong: list[tuple[str, Any, str]] = [("worker_id", "", unnamed), ("incarnation", "", unnamed)]
    for field in made.DESCRIPTOR.fields:
        if field.type == field.TYPE_DOUBLE:
            wrong += [(field.name, number, field.name) for number in (-0.1, math.nan, math.inf)]
        elif field.type in (field.TYPE_INT32, field.TYPE_INT64) and not field.is_repeated:
            wrong.append((field.name, -1, f"{field.name} is -1, but must be 0 or more"))
    wrong.append(("kv_blocks_free", 5, "kv_blocks_free is 5, but kv_blocks_total is 4"))
    for name, value, expected in wrong:
        message = filled(made())
        setattr(message, name, value)
        with pytest.raises(InvalidReport, match=expected):
            read(message)


def test_a_report_of_an_old_worker_has_no_total_blocks() -> None:
    untold = load_pb2.WorkerLoad(worker_id="w", incarnation="i", kv_blocks_free=5)
    assert to_load_report(untold).load == Load(0, 0, 5, 0)
    memory = memmgr_pb2.WorkerMemory(worker_id="w", incarnation="i", kv_blocks_free=5)
    with pytest.raises(InvalidReport, match="kv_blocks_total is 0"):
        to_memory_report(memory)


def test_shown_reports_were_validated_by_the_memory_manager() -> None:
    engine = EngineReport(Load(0, 0, 0, 0), epoch=4)
    assert unchecked_memory_report(memory_message(memory_report("", engine, ""))).engine == engine


def test_only_scheduler_fields_are_news_and_blocks_alone_are_minor() -> None:
    sent = {field.name for field in load_pb2.WorkerLoad.DESCRIPTOR.fields}
    loads, known = LoadReporting("w", "i", ReportSchedule(0.5, 4.0)), Load(3, 3, 9, 3, 3, 10)
    assert loads.urgency(7, known) is ReportUrgency.MAJOR
    loads.create_next(7, known, 0.0)
    assert (loads.urgency(7, known), loads.urgency(8, known)) == (
        ReportUrgency.NONE,
        ReportUrgency.MAJOR,
    )
    for load_field in fields(Load):
        if load_field.name == "tokens":
            other: Any = ClassTokens(online_processed_tokens_total=1)
        elif load_field.name == "adapter_use":
            other, sent = AdapterUse((LoadedAdapter(7, running=1),)), sent | {load_field.name}
        else:
            other = not known.batch_yields if load_field.name == "batch_yields" else 7
        expected = ReportUrgency.MAJOR if load_field.name in sent else ReportUrgency.NONE
        if load_field.name in ("kv_blocks_free", "kv_blocks_batch"):
            expected = ReportUrgency.MINOR
        assert loads.urgency(7, replace(known, **{load_field.name: other})) is expected, (
            load_field.name
        )
    scarce = replace(known, kv_blocks_free=2)
    assert loads.urgency(7, scarce) is ReportUrgency.MAJOR, "one more request may not fit"
    assert loads.urgency(7, replace(known, kv_blocks_free=10)) is ReportUrgency.MAJOR
    loads.note_evicted([1])
    assert loads.urgency(7, known) is ReportUrgency.MINOR
    loads.note_received("a")
    assert loads.urgency(7, known) is ReportUrgency.MAJOR


def test_each_adapter_of_a_load_is_validated() -> None:
    use = AdapterUse((LoadedAdapter(2**64 - 1, True, 3), LoadedAdapter(1, load_s=0.5)), 2)
    report = LoadReport("w", "i", 1, 1, Load(1, 1, 1, 1, kv_blocks_total=1, adapter_use=use))
    message = load_message(report)
    assert to_load_report(message) == report
    message.adapters[1].load_s = math.nan
    with pytest.raises(InvalidReport, match="load_s is nan"):
        to_load_report(message)
