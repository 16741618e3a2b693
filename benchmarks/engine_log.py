"""Read arrival times at the engine and planning times from the workers' event logs.

The decisions are replayed through the planner of core and timed: the time covers planning alone,
without the rest of an iteration.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from services.common.clock import monotonic_s
from services.common.event_log import EventLogError, read_config, read_entries
from services.core.audit.facts import FACTS
from services.core.audit.record import BATCH, EVENT
from services.core.changeover.state import Changeover, MemberConfig
from services.core.changeover.vocabulary import LOGGED
from services.core.planner.events import EmitToken, IterationFinished, Planned, RequestArrived
from services.core.planner.sequence_ids import request_id_of
from tideserve.cli.errors import SystemUnavailable

TYPES = LOGGED | {kind.__name__: kind for kind in FACTS}


@dataclass(frozen=True, slots=True)
class Iteration:
    """An iteration that ended at `end_s` on the monotonic clock and took `duration_s`."""

    end_s: float
    duration_s: float
    planning_s: float


@dataclass(slots=True)
class EngineTimes:
    """Times on the monotonic clock, by request id, and the iterations of all workers."""

    arrived_s: dict[str, float] = field(default_factory=dict)
    first_token_s: dict[str, float] = field(default_factory=dict)
    iterations: list[Iteration] = field(default_factory=list)

    def planning_share(self, from_s: float, to_s: float) -> float | None:
        """Planning time over iteration time, for iterations that ended in [from_s, to_s]."""
        kept = [iteration for iteration in self.iterations if from_s <= iteration.end_s <= to_s]
        total_s = sum(iteration.duration_s for iteration in kept)
        return sum(iteration.planning_s for iteration in kept) / total_s if total_s else None


def read_engine_logs(folder: Path) -> EngineTimes:
    """Read the event logs of all workers. Raises SystemUnavailable if there are none."""
    paths = sorted(folder.glob("*.jsonl"))
    if not paths:
        raise SystemUnavailable(f"the workers wrote no event log to {folder}")
    times = EngineTimes()
    try:
        for path in paths:
            _replay(path, times)
    except EventLogError as error:
        raise SystemUnavailable(str(error)) from error
    return times


def _replay(path: Path, times: EngineTimes) -> None:
    state = Changeover.of(read_config(path, MemberConfig))
    planning_s, idle_until_s = 0.0, 0.0
    for entry in read_entries(path, TYPES):
        started_s = monotonic_s()
        if entry.kind == BATCH:
            state.plan(entry.value.now_s)
        elif entry.kind == EVENT:
            _note_first_tokens(state.handle(entry.value), entry.value, times)
        else:
            continue
        planning_s += monotonic_s() - started_s
        match entry.value:
            case RequestArrived(now_s=now_s, request=request):
                times.arrived_s[request_id_of(request.request_id)] = now_s
                if len(state.planner.sequences) == 1:
                    idle_until_s = now_s
            case IterationFinished(now_s=now_s):
                times.iterations.append(Iteration(now_s, now_s - idle_until_s, planning_s))
                planning_s, idle_until_s = 0.0, now_s
            case Planned(microbatch=None):
                # Planning for an empty queue is not part of an iteration.
                planning_s = 0.0


def _note_first_tokens(commands: Iterable[object], event: object, times: EngineTimes) -> None:
    if not isinstance(event, IterationFinished):
        return
    for command in commands:
        if isinstance(command, EmitToken) and command.index == 0:
            times.first_token_s[request_id_of(command.request_id)] = event.now_s
