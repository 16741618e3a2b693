"""Converts adapters of requests between protobuf messages and core."""

from services.common.report import Codec
from services.core.adapter import Adapter
from tideserve.common.v1 import adapter_pb2

_ADAPTER = Codec(Adapter, adapter_pb2.Adapter)


def adapter_message(adapter: Adapter | None) -> adapter_pb2.Adapter | None:
    """The message of an adapter; None without one."""
    return None if adapter is None else _ADAPTER.message(adapter)


def to_adapter(message: adapter_pb2.Adapter) -> Adapter:
    """The adapter of a message, not validated; see `Adapter.fault`."""
    return _ADAPTER.report(message)


def adapter_of_record(record: adapter_pb2.AdapterRecord) -> Adapter:
    """The adapter of a record, as requests carry it."""
    return Adapter(record.name, record.digest, record.source, record.rank)
