"""Converts reports between dataclasses of `services.core` and protobuf messages, with validation.

Fields have the same name in both, so a new field needs no code here. Fields that a message type
lacks keep their defaults.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any, Generic, TypeVar, cast, get_args, get_origin

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from services.core.demand import ModelDemand
from services.core.report import Load, LoadReport, MemoryReport
from tideserve.common.v1 import load_pb2
from tideserve.memmgr.v1 import memmgr_pb2

R = TypeVar("R")
M = TypeVar("M", bound=Message)


class InvalidReport(ValueError):
    """A report with a missing name or an invalid number."""


class Codec(Generic[R, M]):
    """Converts between a report (a dataclass, possibly nested) and a flat protobuf message."""

    def __init__(self, report: type[R], message: type[M]) -> None:
        """Raises TypeError if the message type has a field that the report lacks."""
        on_wire = frozenset(field.name for field in message.DESCRIPTOR.fields)
        leaves = list(_leaves(report, on_wire))
        lacking = sorted(on_wire - {name for name, _, _ in leaves})
        if lacking:
            raise TypeError(f"{report.__name__} has no {', '.join(lacking)}")
        self._message = message
        self._names = tuple(name for name, _, _ in leaves)
        # Create the attrgetters once, because reports are converted many times per second.
        self._values = attrgetter(*(path for _, path, _ in leaves))
        self._numbers = attrgetter(*(path for _, path, kind in leaves if kind in (int, float)))
        self._build = _builder(report, on_wire)
        # Rows: repeated messages, each of which is a dataclass in the report.
        self._rows = {
            name: Codec(row, _message_type(message, name))
            for name, _, kind in leaves
            if (row := _row_of(kind)) is not None
        }

    def values(self, report: R) -> dict[str, Any]:
        """The report's values by the message's field names."""
        values = dict(zip(self._names, self._values(report), strict=True))
        for name, codec in self._rows.items():
            values[name] = [codec.message(row) for row in values[name]]
        return values

    def message(self, report: R) -> M:
        """The message of a report."""
        return self._message(**self.values(report))

    def report(self, message: M) -> R:
        """The report of a message, not validated."""
        return cast(R, self._build(message, self._rows))

    def valid(self, message: M) -> R:
        """The report of a message, validated.

        Raises:
            InvalidReport: if a number is negative or not finite.
        """
        report = self.report(message)
        for number in self._numbers(report):
            if not 0 <= number < math.inf:
                names = [name for name, value in self.values(report).items() if value is number]
                raise InvalidReport(f"{names[0]} is {number}, but must be 0 or more")
        for name, codec in self._rows.items():
            for row in getattr(message, name):
                codec.valid(row)
        return report


def _leaves(
    report: type[Any], on_wire: frozenset[str], within: str = ""
) -> Iterator[tuple[str, str, Any]]:
    """Name, path in the report ("a" or "b.a") and type of each field that the message has."""
    for field in fields(report):
        if is_dataclass(field.type):
            yield from _leaves(cast(type[Any], field.type), on_wire, f"{within}{field.name}.")
        elif field.name in on_wire:
            yield field.name, f"{within}{field.name}", field.type


def _row_of(kind: Any) -> type[Any] | None:
    """The dataclass of the entries of a tuple type, or None."""
    entry = get_args(kind)[0] if get_origin(kind) is tuple else None
    return cast(type[Any], entry) if is_dataclass(entry) else None


def _message_type(message: type[Message], name: str) -> type[Message]:
    descriptor = message.DESCRIPTOR.fields_by_name[name].message_type
    return GetMessageClass(cast(Descriptor, descriptor))


def _builder(report: type[Any], on_wire: frozenset[str]) -> Callable[..., Any]:
    """A function that creates a report from a message, given the codecs of its rows by name."""
    own = [field.name for field in fields(report) if field.name in on_wire]
    tuples = [
        field.name
        for field in fields(report)
        if field.name in on_wire and "tuple" in str(field.type)
    ]
    # Nested reports without any field on the wire keep their defaults.
    within = [
        (field.name, _builder(cast(type[Any], field.type), on_wire))
        for field in fields(report)
        if is_dataclass(field.type) and any(_leaves(cast(type[Any], field.type), on_wire))
    ]

    def build(message: Message, rows: Mapping[str, Codec[Any, Any]]) -> Any:
        values = {name: getattr(message, name) for name in own}
        for name in tuples:
            codec = rows.get(name)
            values[name] = tuple(values[name] if codec is None else map(codec.report, values[name]))
        for name, part in within:
            values[name] = part(message, rows)
        return report(**values)

    return build


_LOAD = Codec(LoadReport, load_pb2.WorkerLoad)
_MEMORY = Codec(MemoryReport, memmgr_pb2.WorkerMemory)
_DEMAND = Codec(ModelDemand, memmgr_pb2.ModelDemand)


def load_message(report: LoadReport) -> load_pb2.WorkerLoad:
    """The message of a worker's load."""
    return _LOAD.message(report)


def to_load_report(message: load_pb2.WorkerLoad) -> LoadReport:
    """A worker's load.

    Raises:
        InvalidReport: if a name is missing or a number is invalid.
    """
    report = _LOAD.valid(message)
    _check_names(report)
    if report.load.kv_blocks_total:  # 0: not reported
        _check_blocks(report.load)
    return report


def memory_message(report: MemoryReport) -> memmgr_pb2.WorkerMemory:
    """The message of a worker's memory."""
    return _MEMORY.message(report)


def to_memory_report(message: memmgr_pb2.WorkerMemory) -> MemoryReport:
    """A worker's memory.

    Raises:
        InvalidReport: if a name is missing or a number is invalid.
    """
    report = _MEMORY.valid(message)
    _check_names(report)
    _check_blocks(report.engine.load)
    return report


def unchecked_memory_report(message: memmgr_pb2.WorkerMemory) -> MemoryReport:
    """A worker's memory from the memory manager, which has validated it already."""
    return _MEMORY.report(message)


def memory_values(report: MemoryReport) -> dict[str, Any]:
    """The values of a worker's memory report, by the field names of memmgr.proto."""
    return _MEMORY.values(report)


def demand_message(demand: ModelDemand) -> memmgr_pb2.ModelDemand:
    """The message of a model's demand."""
    return _DEMAND.message(demand)


def to_model_demand(message: memmgr_pb2.ModelDemand) -> ModelDemand:
    """A model's demand.

    Raises:
        InvalidReport: if the model is missing or a number is invalid.
    """
    if not message.model:
        raise InvalidReport("every demand must name its model")
    return _DEMAND.valid(message)


def _check_names(report: LoadReport | MemoryReport) -> None:
    if not report.worker_id or not report.incarnation:
        raise InvalidReport("worker_id and incarnation must be set")


def _check_blocks(load: Load) -> None:
    if load.kv_blocks_free > load.kv_blocks_total:
        raise InvalidReport(
            f"kv_blocks_free is {load.kv_blocks_free}, but kv_blocks_total is "
            f"{load.kv_blocks_total}"
        )
