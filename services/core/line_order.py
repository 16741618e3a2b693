"""The order in which requests wait: a policy gives each a key, and the smallest key is first."""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from services.core.service import Service, ServiceClass
from services.core.setting import choice

LineKey = tuple[float, ...]
LineOrder = Callable[[Service, float], LineKey]
"""The key of a request, from what it is promised and from when it arrived (seconds)."""

UNTARGETED_S = 10.0
"""Seconds after its arrival in which the first token of a request without a target is due."""


class Scheduling(StrEnum):
    """Which requests go first, see `scheduling_setting`.

    The last five are there to be compared with: `round_robin`, `waiting_time` and `prefill_first`
    are baselines of BROS, `conserve` has the deadlines that ConServe prints (`slo.py`), and `bros`
    the packing that BROS prints (`bros.py`).
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
    def knows_classes(self) -> bool:
        """Whether the class of a request decides anything."""
        return self not in (Scheduling.FCFS, Scheduling.PREFILL_FIRST)

    @property
    def keeps_deadlines(self) -> bool:
        """Whether deadlines bound iterations."""
        return self in (Scheduling.SLO, Scheduling.CONSERVE, Scheduling.BROS)


def scheduling_setting() -> Any:
    """The setting on which a scheduler and its workers have to agree."""
    return choice(
        Scheduling.FCFS,
        Scheduling,
        "Which requests go first. fcfs: first come, first served; priority: interactive before"
        " standard before batch, and batch gives its KV and its places to the others, does not"
        " start while one of them waits, and never triggers a drop; slo: the same by deadline,"
        " and batch fills a part of the time that deadlines leave. For comparisons:"
        " prefill_first: as fcfs, but prompts run whole, and no answer goes on beside them;"
        " round_robin: iterations of batch and of the others alternate; waiting_time: whoever has"
        " waited longest since its last iteration runs; bros: whole prompts by the least time left;"
        " conserve: as slo, but nothing is corrected by what iterations take, and batch gets all of"
        " the time.",
    )


def by_arrival(_service: Service, arrival_s: float) -> LineKey:
    """First come, first served, whatever was promised."""
    return (arrival_s,)


def by_deadline(service: Service, arrival_s: float) -> LineKey:
    """Batch after all others, by arrival; of those, the first token that is due first is first.

    A smaller rank goes before all that. A request without a target sorts as if its first token were
    due `UNTARGETED_S` after its arrival, so that no stream of deadlines overtakes it for ever.
    """
    if not service.online:
        return 1.0, float(service.rank), arrival_s
    ttft_s = UNTARGETED_S if service.ttft_s is None else service.ttft_s
    return 0.0, float(service.rank), arrival_s + ttft_s


_PLACES = {kind: float(place) for place, kind in enumerate(ServiceClass)}


def by_class(service: Service, arrival_s: float) -> LineKey:
    """Interactive before standard before batch; within a class by rank, then by arrival."""
    return _PLACES[service.service_class], float(service.rank), arrival_s


LINES: Mapping[Scheduling, LineOrder] = {
    Scheduling.FCFS: by_arrival,
    Scheduling.PRIORITY: by_class,
    Scheduling.SLO: by_deadline,
    Scheduling.ROUND_ROBIN: by_class,
    Scheduling.CONSERVE: by_deadline,
    Scheduling.BROS: by_deadline,
    Scheduling.WAITING_TIME: by_arrival,
    Scheduling.PREFILL_FIRST: by_arrival,
}
