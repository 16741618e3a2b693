"""Which requests go first at a worker, and which give way, for each setting of `scheduling`."""

from dataclasses import dataclass, replace

from services.core.line_order import LINES, LineOrder, Scheduling
from services.core.planner.victims import VictimRule, Victims, batch_first, most_slack, newest


@dataclass(frozen=True, slots=True)
class Precedence:
    """The order of the line, and of those that lose their blocks.

    With `batch_yields`, sequences of the class `batch` give their blocks and places to online
    requests, which wait for nothing else: in a larger group to those that start only if
    `yields_in_pipelines`, since a planner's rounds may hold them. `since_begin`: the line counts
    from when a request came to its gateway, not to this worker.
    """

    line: LineOrder
    victims: Victims
    batch_yields: bool
    yields_in_pipelines: bool = False
    since_begin: bool = False


PRECEDENCES = {
    Scheduling.FCFS: Precedence(LINES[Scheduling.FCFS], newest, batch_yields=False),
    Scheduling.PRIORITY: Precedence(LINES[Scheduling.PRIORITY], batch_first, batch_yields=True),
    Scheduling.SLO: Precedence(LINES[Scheduling.SLO], batch_first, True, True, True),
    Scheduling.ROUND_ROBIN: Precedence(LINES[Scheduling.ROUND_ROBIN], newest, batch_yields=False),
    Scheduling.CONSERVE: Precedence(LINES[Scheduling.CONSERVE], batch_first, True, True, True),
    Scheduling.BROS: Precedence(LINES[Scheduling.BROS], most_slack, True, True, True),
    Scheduling.WAITING_TIME: Precedence(LINES[Scheduling.WAITING_TIME], newest, batch_yields=False),
    Scheduling.PREFILL_FIRST: Precedence(
        LINES[Scheduling.PREFILL_FIRST], newest, batch_yields=False
    ),
}


def precedence_of(scheduling: Scheduling, victims: VictimRule) -> Precedence:
    """The precedence of a planner; with `slo`, `victims` says who gives blocks up after batch."""
    found = PRECEDENCES[scheduling]
    if scheduling is Scheduling.SLO and victims is VictimRule.SLACK:
        return replace(found, victims=most_slack)
    return found
