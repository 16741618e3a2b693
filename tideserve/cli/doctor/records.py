"""Checks the records of the cluster in etcd. Pure, except for reading them."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import Message

from services.common.address import host_of, is_loopback, is_wildcard
from services.common.etcd import Store
from services.common.membership import ADAPTERS, GROUPS, LEADERS, SERVICES, WORKERS
from services.common.records import CAN_DROP, engine_of, read_record, scheduling_fault
from services.core.engine_kind import EngineKind
from tideserve.cli.doctor.finding import Check, Finding
from tideserve.common.v1 import adapter_pb2, record_pb2

CHECK = Check("registered")
M = TypeVar("M", bound=Message)
NO_LANES = "it has no lanes to other workers and never merges; set its 'advertise'"
NEEDED = ("gateway", "scheduler", "memmgr")


@dataclass(frozen=True, slots=True)
class RegisteredRecords:
    """The registered services, workers, groups and leaders, and the adapters."""

    services: Sequence[record_pb2.ServiceRecord] = ()
    workers: Sequence[record_pb2.WorkerRecord] = ()
    groups: Sequence[record_pb2.GroupRecord] = ()
    leaders: Sequence[str] = ()
    adapters: Sequence[adapter_pb2.AdapterRecord] = ()
    # Keys of malformed records, which every service ignores.
    invalid: Sequence[str] = ()


async def read_records(store: Store) -> RegisteredRecords:
    """Read all records. Raises StoreError."""
    invalid: list[str] = []
    return RegisteredRecords(
        services=await _read(store, SERVICES, record_pb2.ServiceRecord, invalid),
        workers=await _read(store, WORKERS, record_pb2.WorkerRecord, invalid),
        groups=await _read(store, GROUPS, record_pb2.GroupRecord, invalid),
        leaders=[key.removeprefix(LEADERS) for key in await store.list_prefix(LEADERS)],
        adapters=await _read(store, ADAPTERS, adapter_pb2.AdapterRecord, invalid),
        invalid=invalid,
    )


async def _read(store: Store, prefix: str, kind: type[M], invalid: list[str]) -> list[M]:
    """The valid records; appends the keys of other records to `invalid`."""
    records = []
    for key, entry in (await store.list_prefix(prefix)).items():
        record = read_record(kind, key, entry.value)
        if record is None:
            invalid.append(key)
        else:
            records.append(record)
    return records


def check_records(records: RegisteredRecords, prefix: str, etcd_is_local: bool) -> list[Finding]:
    """Check the records; `etcd_is_local`: etcd listens on loopback, so all run on one machine."""
    faults = [
        *(*_missing(records, prefix), *_invalid(records, prefix)),
        *(*_addresses(records, etcd_is_local), *_differing(records.workers), *_idle(records)),
        *_scheduling(records),
    ]
    count = len(records.workers)
    summary = f"{count} worker{'s' * (count != 1)} and {len(records.services)} services"
    return faults or [CHECK.fine(f"{summary} are registered and consistent")]


def _missing(records: RegisteredRecords, prefix: str) -> Iterator[Finding]:
    names = {record.name for record in records.services}
    if not names and not records.workers:
        yield CHECK.failure(
            f"no services are registered under {prefix}; start them with this etcd, or correct the"
            " prefix"
        )
        return
    for name in NEEDED:
        if name not in names:
            yield CHECK.failure(f"no {name} is registered under {prefix}; start it, or see its log")
    if not records.workers:
        yield CHECK.failure(
            f"no worker is registered under {prefix}; workers register after loading the model:"
            " wait, or see their logs"
        )
    if "memmgr" in names and "memmgr" not in records.leaders:
        yield CHECK.failure(
            "no memory manager is the leader, so groups cannot change; wait, or see its log"
        )


def _invalid(records: RegisteredRecords, prefix: str) -> list[Finding]:
    return [
        CHECK.failure(
            f"the record {key} under {prefix} is malformed, contradicts its key or lacks a"
            " required field, so every service ignores it; delete it, or fix the program that"
            " writes it"
        )
        for key in records.invalid
    ]


def places(records: RegisteredRecords) -> Iterable[tuple[str, str]]:
    """Name and address of all registered services, workers and lanes."""
    for service in records.services:
        yield f"the {service.name}", service.address
    for worker in records.workers:
        name = f"the worker {worker.worker_id}"
        yield name, worker.address
        for address in (worker.activation_address, worker.bulk_address):
            if address:
                yield f"a lane of {name}", address


def _addresses(records: RegisteredRecords, etcd_is_local: bool) -> Iterator[Finding]:
    """Addresses that other machines cannot reach; loopback is fine on a single machine."""
    registered = {host_of(address) for _, address in places(records)}
    hosts = {host for host in registered if not is_wildcard(host)}
    loopback = {host for host in hosts if is_loopback(host)}
    one_machine = etcd_is_local and loopback == hosts
    for name, address in places(records):
        host = host_of(address)
        if is_wildcard(host):
            yield CHECK.failure(
                f"{name} is registered at {address}, which cannot be dialled; set its"
                " 'advertise' to auto or to an address that other machines reach"
            )
        elif not one_machine and host in loopback:
            yield CHECK.failure(
                f"{name} is registered at {address}, which only its own machine can reach;"
                " set its 'advertise' to an address that other machines reach, and make it listen"
                " there"
            )


def _differing(workers: Sequence[record_pb2.WorkerRecord]) -> Iterator[Finding]:
    """Workers of the same model that can never join the same group."""
    differences: Mapping[str, Callable[[record_pb2.WorkerRecord], object]] = {
        "hold different parameters or configurations of {model} (digests {values}); give all the"
        " same model folder": lambda worker: worker.model_digest[:12],
        "speak different protocol versions ({values}) and never merge; finish the update of the"
        " workers": lambda worker: worker.protocol_version,
        "run different code ({values}) and never merge; finish the update of the workers": (
            lambda worker: worker.code_digest[:12]
        ),
    }
    by_model: dict[str, list[record_pb2.WorkerRecord]] = defaultdict(list)
    for worker in workers:
        by_model[worker.model].append(worker)
    for model, alike in by_model.items():
        for text, value in differences.items():
            names: dict[object, str] = {}
            for worker in alike:
                names.setdefault(value(worker), worker.worker_id)
            if len(names) > 1:
                values = ", ".join(f"{name}: {own or 'none'}" for own, name in names.items())
                sentence = text.format(model=model, values=values)
                yield CHECK.failure(f"the workers {sentence}")
                break


def _scheduling(records: RegisteredRecords) -> list[Finding]:
    """Workers whose `scheduling` differs from the scheduler's."""
    schedulers = (service for service in records.services if service.name == "scheduler")
    policies = sorted({scheduler.scheduling for scheduler in schedulers if scheduler.scheduling})
    if len(policies) > 1:
        return [
            CHECK.failure(
                f"schedulers run with scheduling {' and '.join(policies)}; configure them alike"
            )
        ]
    faults = (scheduling_fault(policy, records.workers) for policy in policies)
    return [CHECK.failure(fault) for fault in faults if fault is not None]


def _idle(records: RegisteredRecords) -> Iterator[Finding]:
    """Workers outside of serving groups, and workers that can never merge."""
    members = {
        (member.worker_id, member.incarnation)
        for group in records.groups
        if group.phase == record_pb2.GROUP_PHASE_STABLE
        for member in group.members
    }
    for worker in records.workers:
        if (worker.worker_id, worker.incarnation) not in members and not worker.draining:
            yield CHECK.warning(
                f"the worker {worker.worker_id} is in no serving group; wait, or see the memory"
                " manager's log"
            )
        if CAN_DROP not in worker.capabilities and engine_of(worker) == EngineKind.TIDESERVE:
            yield CHECK.warning(
                f"the worker {worker.worker_id} cannot drop layers: {worker.no_drops or NO_LANES}"
            )
