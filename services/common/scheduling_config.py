"""Configuration that scheduler and workers share."""

from dataclasses import dataclass

from services.common.config import choice
from services.common.service_config import ServiceConfig
from services.core.line_order import Scheduling


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingConfig(ServiceConfig):
    """Which requests go first; scheduler and workers are to agree."""

    scheduling: str = choice(
        "fcfs",
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
