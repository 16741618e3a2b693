"""The metrics that each service exports, from its collectors."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from services.common.etcd_calls import EtcdCalls
from services.common.process_metrics import service_registry
from services.common.service_config import ServiceConfig
from services.core.groups.vocabulary import Group, GroupPhase, Member
from services.core.overload.events import Action, Cause
from services.core.quota.limits import Limit
from services.core.report import EngineReport, Load
from services.core.scheduler.state import SchedulerState
from services.core.scheduler.vocabulary import GroupJoined
from services.core.scheduler.vocabulary import ServingGroup as ServingGroup
from services.gateway.batches.metrics import BatchMetrics
from services.gateway.bounds.concurrency_limit import ConcurrencyLimit
from services.gateway.records.metrics import Metrics
from services.memmgr.change_count import ChangeCount
from services.memmgr.metrics import MemmgrCollector
from services.memmgr.worker_memory import MemoryView
from services.scheduler.metrics import SchedulerCollector
from services.worker.ipc import EngineReady
from services.worker.metrics import WorkerCollector

# The exposition adds these labels to a histogram.
_OWN_LABELS = frozenset({"le"})


@dataclass(frozen=True, slots=True)
class Entry:
    """A metric as exposed: `name` includes the suffix of counters."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


def reference() -> dict[str, list[Entry]]:
    """The metrics of each service; metrics common to all are under "all"."""
    return {
        "all": _entries(service_registry("gateway", _with_certificate(), EtcdCalls()).collect()),
        "gateway": _entries(gateway().registry.collect()),
        "scheduler": _entries(_scheduler().collect()),
        "memmgr": _entries(_memmgr().collect()),
        "worker": _entries(_worker().collect()),
    }


def _entries(families: Iterable[Metric]) -> list[Entry]:
    entries = []
    for family in families:
        labels = {
            label: None
            for sample in family.samples
            for label in sample.labels
            if label not in _OWN_LABELS
        }
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        kind = "gauge" if family.type == "info" else family.type
        entries.append(Entry(family.name + suffix, kind, tuple(labels), family.documentation))
    return sorted(entries, key=lambda entry: entry.name)


def _with_certificate() -> ServiceConfig:
    nowhere = Path("/nonexistent")
    return ServiceConfig(
        etcd_url="h:1", tls_ca_file=nowhere, tls_cert_file=nowhere, tls_key_file=nowhere
    )


def gateway() -> Metrics:
    """The metrics of a gateway, with a sample of every kind."""
    metrics = Metrics(("m",), CollectorRegistry())
    metrics.count_request("/v1/completions", 200, 0.0)
    metrics.count_failed_stream("client_gone")
    metrics.export_calls({"waiting": ConcurrencyLimit(1, 1)})
    metrics.export_connections(lambda _port: 0)
    metrics.count_closed_connection("http", "idle")
    metrics.export_readiness("m", lambda: True, lambda: 1)
    metrics.quotas.set_limits({("owner", limit): 1 for limit in Limit})
    BatchMetrics(metrics.registry).observe_call("claim", 0.0, failed=False)
    return metrics


def _scheduler() -> SchedulerCollector:
    state = SchedulerState(1, 1.0, lateness=1.0, standard_wait_s=1.0)
    state.handle(GroupJoined(0.0, ServingGroup("g", 1, "w", "i", "h:1", "m", 1, 1, 1)))
    return SchedulerCollector(lambda: state.snapshot(0.0), lambda: True)


def _memmgr() -> MemmgrCollector:
    group = Group("g", 1, GroupPhase.STABLE, (Member("w", "i"),), "m")
    driver = SimpleNamespace(leads=True, groups=(group,), changes=ChangeCount())
    watch = SimpleNamespace(decided=dict.fromkeys(Action, 0), moved=dict.fromkeys(Cause, 0))
    watch.shortfalls, watch.rising = {"m": 0}, {"m": False}
    return MemmgrCollector(cast(Any, driver), MemoryView(asyncio.Event()), cast(Any, watch))


def _worker() -> WorkerCollector:
    facts = EngineReady(1, 1, 1, 1, 1, 1, 1, 1)
    engine = SimpleNamespace(
        report=EngineReport(Load(0, 0, 1, 0, kv_blocks_total=1), cost_model="none"),
        generated_tokens=0,
        responsive=True,
        silent_s=0.0,
    )
    return WorkerCollector("w", "m", cast(Any, engine), facts, lambda: None)
