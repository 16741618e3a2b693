"""Order of the waiting queue under each scheduling policy, for the scheduler and the workers.

A policy maps each request to a sort key; the request with the smallest key is first. *Online*
requests are those of all classes except `batch`. A *drop* is KunServe's reaction to overload: it
merges groups to free memory of duplicate parameters for KV cache.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from services.core.service import Service, ServiceClass
from services.core.setting import choice

QueueKey = tuple[float, ...]
QueueOrder = Callable[[Service, float], QueueKey]
"""Maps a request's class, targets and rank, and its arrival time in seconds, to its sort key."""

UNTARGETED_S = 10.0
"""TTFT in seconds by which requests without a target are sorted among those with targets."""


class Scheduling(StrEnum):
    """Scheduling policies, see `scheduling_setting`.

    The last five exist for comparisons: `round_robin`, `waiting_time` and `prefill_first` are
    baselines of BROS, `conserve` resembles ConServe's scheduling (`slo.py` lists the differences),
    and `bros` has the packing of BROS as published (`bros_planner.py`).
    """

    FCFS = "fcfs"
    PRIORITY = "priority"
    SLO = "slo"
    ROUND_ROBIN = "round_robin"
    CONSERVE = "conserve"
    BROS = "bros"
    WAITING_TIME = "waiting_time"
    PREFILL_FIRST = "prefill_first"

    @property
    def uses_classes(self) -> bool:
        """Whether the scheduler and vLLM treat service classes differently under this policy."""
        return self not in (Scheduling.FCFS, Scheduling.PREFILL_FIRST)

    @property
    def deadlines_bound_iterations(self) -> bool:
        """Whether the targets of running requests bound the duration of iterations."""
        return self in (Scheduling.SLO, Scheduling.CONSERVE, Scheduling.BROS)


def scheduling_setting() -> Any:
    """The setting `scheduling`; a scheduler and its workers must use the same value."""
    return choice(
        Scheduling.SLO,
        Scheduling,
        "Scheduling policy. fcfs: first come, first served; priority: interactive before standard"
        " before batch; batch requests yield KV blocks and slots to the others, do not start while"
        " any other request waits, and never trigger a drop; slo: like priority, but online"
        " requests are ordered by deadline, and batch requests use part of the slack that deadlines"
        " leave. Within a class, priority orders requests by the field priority, and slo those of"
        " batch. For comparisons: prefill_first: like fcfs, but prompts run unchunked and pause all"
        " decodes; round_robin: iterations of batch and of other requests alternate; waiting_time:"
        " the request with the longest wait since its last iteration runs first; bros: unchunked"
        " prompts, least residual time first; conserve: like slo, but without corrections by"
        " measured iteration times, and batch requests use all of the slack.",
    )


def by_arrival(_service: Service, arrival_s: float) -> QueueKey:
    """First come, first served."""
    return (arrival_s,)


def by_deadline(service: Service, arrival_s: float) -> QueueKey:
    """Online requests by deadline of the first token; then batch requests by rank, then arrival."""
    if not service.online:
        return 1.0, float(service.rank), arrival_s
    # Rank does not count: a client could choose one that lets other tenants miss their deadlines.
    # An implied deadline prevents starvation of requests without a target by those with targets.
    ttft_s = UNTARGETED_S if service.ttft_s is None else service.ttft_s
    return 0.0, arrival_s + ttft_s


_CLASS_POSITIONS = {kind: float(position) for position, kind in enumerate(ServiceClass)}


def by_class(service: Service, arrival_s: float) -> QueueKey:
    """Interactive before standard before batch; within a class by rank, then by arrival."""
    return _CLASS_POSITIONS[service.service_class], float(service.rank), arrival_s


def by_class_and_deadline(service: Service, arrival_s: float) -> QueueKey:
    """Interactive before standard before batch; within a class as `by_deadline`."""
    return _CLASS_POSITIONS[service.service_class], *by_deadline(service, arrival_s)[1:]


QUEUE_ORDERS: Mapping[Scheduling, QueueOrder] = {
    Scheduling.FCFS: by_arrival,
    Scheduling.PRIORITY: by_class,
    Scheduling.SLO: by_deadline,
    Scheduling.ROUND_ROBIN: by_class,
    Scheduling.CONSERVE: by_deadline,
    Scheduling.BROS: by_deadline,
    Scheduling.WAITING_TIME: by_arrival,
    Scheduling.PREFILL_FIRST: by_arrival,
}
