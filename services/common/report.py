"""Reports on the wire: one codec, and one notion of what a valid report is.

A field has the same name in core and in its message; so a new one needs nothing here. What a
message does not have keeps its default.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any, Generic, TypeVar, cast

from google.protobuf.message import Message

from services.core.demand import ModelDemand
from services.core.report import Load, LoadReport, MemoryReport
from tideserve.common.v1 import load_pb2
from tideserve.memmgr.v1 import memmgr_pb2

R = TypeVar("R")
M = TypeVar("M", bound=Message)


class InvalidReport(ValueError):
    """A report with a name that is missing or a number that cannot be."""


class Codec(Generic[R, M]):
    """Between a report, with the reports within it, and the message that has its fields.

    Any other dataclass can stand for a report.
    """

    def __init__(self, report: type[R], message: type[M]) -> None:
        """Raises TypeError if the message has a field that the report lacks."""
        told = frozenset(one.name for one in message.DESCRIPTOR.fields)
        leaves = list(_leaves(report, told))
        lacking = sorted(told - {name for name, _, _ in leaves})
        if lacking:
            raise TypeError(f"{report.__name__} has no {', '.join(lacking)}")
        self._message = message
        self._names = tuple(name for name, _, _ in leaves)
        self._values = attrgetter(*(path for _, path, _ in leaves))
        self._numbers = attrgetter(*(path for _, path, kind in leaves if kind in (int, float)))
        self._made = _maker(report, told)

    def values(self, report: R) -> dict[str, Any]:
        """The fields of the report that the message has, by name."""
        return dict(zip(self._names, self._values(report), strict=True))

    def message(self, report: R) -> M:
        """The report on the wire."""
        return self._message(**self.values(report))

    def report(self, message: M) -> R:
        """What the message says, whether that can be or not."""
        return cast(R, self._made(message))

    def valid(self, message: M) -> R:
        """A valid report.

        Raises:
            InvalidReport: if a number is negative or not finite.
        """
        report = self.report(message)
        for number in self._numbers(report):
            if not 0 <= number < math.inf:
                names = [name for name, value in self.values(report).items() if value is number]
                raise InvalidReport(f"{names[0]} is {number}, but must be 0 or more")
        return report


def _leaves(
    report: type[Any], told: frozenset[str], within: str = ""
) -> Iterator[tuple[str, str, Any]]:
    """Each field that is told, where it is in the report ("a" or "b.a"), and its type."""
    for one in fields(report):
        if is_dataclass(one.type):
            yield from _leaves(cast(type[Any], one.type), told, f"{within}{one.name}.")
        elif one.name in told:
            yield one.name, f"{within}{one.name}", one.type


def _maker(report: type[Any], told: frozenset[str]) -> Callable[[Message], Any]:
    """What makes a report of a message; a report within it of which nothing is told is left out."""
    own = [one.name for one in fields(report) if one.name in told]
    rows = [one.name for one in fields(report) if one.name in told and "tuple" in str(one.type)]
    within = [
        (one.name, _maker(cast(type[Any], one.type), told))
        for one in fields(report)
        if is_dataclass(one.type) and any(_leaves(cast(type[Any], one.type), told))
    ]

    def made(message: Message) -> Any:
        values = {name: getattr(message, name) for name in own}
        for name in rows:
            values[name] = tuple(values[name])
        for name, part in within:
            values[name] = part(message)
        return report(**values)

    return made


_LOAD = Codec(LoadReport, load_pb2.WorkerLoad)
_MEMORY = Codec(MemoryReport, memmgr_pb2.WorkerMemory)
_DEMAND = Codec(ModelDemand, memmgr_pb2.ModelDemand)


def load_message(report: LoadReport) -> load_pb2.WorkerLoad:
    """A worker's load on the wire."""
    return _LOAD.message(report)


def to_load_report(message: load_pb2.WorkerLoad) -> LoadReport:
    """A worker's load.

    Raises:
        InvalidReport: if it cannot be.
    """
    report = _LOAD.valid(message)
    _check_names(report)
    if report.load.kv_blocks_total:  # 0 if not told
        _check_blocks(report.load)
    return report


def memory_message(report: MemoryReport) -> memmgr_pb2.WorkerMemory:
    """A worker's memory on the wire."""
    return _MEMORY.message(report)


def to_memory_report(message: memmgr_pb2.WorkerMemory) -> MemoryReport:
    """A worker's memory.

    Raises:
        InvalidReport: if it cannot be.
    """
    report = _MEMORY.valid(message)
    _check_names(report)
    _check_blocks(report.engine.load)
    return report


def shown_memory(message: memmgr_pb2.WorkerMemory) -> MemoryReport:
    """A worker's memory as the memory manager passes it on, which has checked it."""
    return _MEMORY.report(message)


def memory_values(report: MemoryReport) -> dict[str, Any]:
    """All that is told of a worker's memory, by the names in memmgr.proto."""
    return _MEMORY.values(report)


def demand_message(demand: ModelDemand) -> memmgr_pb2.ModelDemand:
    """A model's demand on the wire."""
    return _DEMAND.message(demand)


def to_model_demand(message: memmgr_pb2.ModelDemand) -> ModelDemand:
    """A model's demand.

    Raises:
        InvalidReport: if a number cannot be, or no model is named.
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
