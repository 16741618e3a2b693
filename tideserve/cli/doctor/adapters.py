"""Checks the LoRA adapters: whether workers can load them, where they are, and their folders."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from services.common.adapter_files import AdapterUnreadable, adapter_digest
from services.common.adapter_messages import adapter_of_record
from tideserve.cli.doctor.finding import Check, Finding
from tideserve.common.v1 import adapter_pb2, record_pb2

CHECK = Check("adapters")


def check_adapters(
    adapters: Sequence[adapter_pb2.AdapterRecord],
    workers: Sequence[record_pb2.WorkerRecord],
    status: Mapping[str, Any] | None,
    *,
    here: bool,
) -> list[Finding]:
    """Check all adapters; `here`: their folders are on this machine.

    `status` is that of the admin port, None if it is unknown. Reads the folders, so it may take
    seconds.
    """
    holders = None if status is None else _holders(status)
    findings = []
    for record in sorted(adapters, key=lambda record: record.name):
        fault = _unloadable(record, workers) or (_folder_fault(record) if here else None)
        if fault is not None:
            findings.append(CHECK.failure(f"the adapter {record.name} {fault}"))
            continue
        text = f"the adapter {record.name} of {record.base} "
        if holders is None:
            text += "fits its workers"
        elif names := holders.get(adapter_of_record(record).key):
            text += f"is loaded by {', '.join(names)}"
        else:
            text += "is loaded by no worker; its first request loads it"
        findings.append(CHECK.fine(text))
    return findings


def _holders(status: Mapping[str, Any]) -> dict[int, list[str]]:
    """Ids of the workers that have loaded an adapter, by its key."""
    holders: dict[int, list[str]] = defaultdict(list)
    for key, worker in _loaded(status):
        holders[key].append(worker)
    return holders


def _loaded(status: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    for row in status.get("workers", ()):
        # Memory managers of earlier versions report no adapters.
        for adapter in row.get("adapters", ()):
            if not adapter["loading"]:
                yield int(adapter["digest"], 16), row["id"]


def _unloadable(
    record: adapter_pb2.AdapterRecord, workers: Sequence[record_pb2.WorkerRecord]
) -> str | None:
    """Why no worker can load an adapter, with the remedy; else None."""
    own = [worker for worker in workers if worker.model == record.base]
    if not own:
        return f"belongs to {record.base}, of which no worker is registered; start one"
    ranks = [worker.adapters.rank_max for worker in own if worker.adapters.slots]
    if not ranks:
        return (
            f"belongs to {record.base}, whose workers load no adapters; start workers with"
            " `engine: vllm` and 'adapter_slots'"
        )
    if record.rank > max(ranks):
        return (
            f"has rank {record.rank}, but workers of {record.base} load only ranks up to"
            f" {max(ranks)}; set their 'adapter_rank_max' to {record.rank} or more"
        )
    return None


def _folder_fault(record: adapter_pb2.AdapterRecord) -> str | None:
    """Why workers refuse the folder of an adapter, with the remedy; else None."""
    try:
        digest = adapter_digest(Path(record.source))
    except AdapterUnreadable as error:
        return f"cannot be loaded: {error}"
    if digest != record.digest:
        return (
            f"has changed in {record.source} since it was loaded, so workers refuse it; load it"
            " again with `load_inplace`"
        )
    return None
