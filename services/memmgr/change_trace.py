"""OpenTelemetry trace of a change of groups: its cause, and the time of each step.

Spans: decide → prepare (per member) → commit → apply (per member) → exchange of KV, until the last
member has *settled*: all its sequences and KV have moved.
"""

from dataclasses import dataclass, field

from services.common import genai
from services.common.clock import monotonic_s
from services.common.tracing import Span, TraceContext, Tracer, Value
from services.core.groups.vocabulary import PrepareMembers
from services.core.overload.action_plan import Change
from services.core.overload.events import Decision
from services.memmgr.worker_memory import MemoryView


@dataclass(frozen=True, slots=True)
class ChangeCause:
    """The cause of a change, as attributes of its root span."""

    decided_s: float  # time of the decision on the monotonic clock
    attributes: dict[str, Value]


def decision_cause(decision: Decision, change: Change) -> ChangeCause:
    """The cause of a change that executes a decision of the overload monitor, made now."""
    reason, load = decision.reason, decision.reason.load
    values: dict[str, Value] = {
        "model": decision.model,
        "needed_tokens": decision.needed_tokens,
        "gained_tokens": change.gain_tokens,
        "threshold_tokens": reason.threshold_tokens,
        "held_s": reason.held_s,
        "dwell_s": reason.dwell_s,
        "demand_tokens": load.demand_tokens,
        "forecast_tokens": load.forecast_tokens,
        "capacity_tokens": load.capacity_tokens,
        "undropped_tokens": load.undropped_tokens,
        "used_tokens": load.used_tokens,
        "waiting_tokens": load.waiting_tokens,
        "queued_tokens": load.queued_tokens,
        "refused_tokens": load.refused_tokens,
        "stuck_tokens": load.stuck_tokens,
        "waiting_requests": load.waiting,
    }
    named = {genai.CHANGE_NUMBER + name: value for name, value in values.items()}
    return ChangeCause(
        monotonic_s(), named | _attributes(str(reason.cause), str(decision.action), change)
    )


def manual_cause(action: str, change: Change) -> ChangeCause:
    """The cause of a change that an operator requests now."""
    return ChangeCause(monotonic_s(), _attributes("manual", action, change))


def restore_cause(command: PrepareMembers) -> ChangeCause:
    """The cause of a restore that starts now: survivors of a lost member fetch their layers."""
    groups = [source.group.group_id for source in command.sources]
    text = f"{', '.join(groups)} restores the layers of a lost member"
    return ChangeCause(
        monotonic_s(), _attributes("member_lost", "restore", Change(tuple(groups), (), text))
    )


def _attributes(cause: str, action: str, change: Change) -> dict[str, Value]:
    return {
        genai.CHANGE_CAUSE: cause,
        genai.CHANGE_ACTION: action,
        genai.CHANGE_TEXT: change.text,
        genai.CHANGE_GROUPS: tuple(change.group_ids),
    }


@dataclass(slots=True)
class ChangeTrace:
    """Records the times of the steps of a change; `end` exports them as spans."""

    tracer: Tracer
    cause: ChangeCause
    context: TraceContext = field(init=False)
    prepare_s: float | None = None  # time when Prepare was sent
    # Answers to Prepare by worker: time, and the reason of a refusal, or "" if ready.
    ready: dict[str, tuple[float, str]] = field(default_factory=dict)
    committed_s: float | None = None
    epoch: int | None = None  # of the commit

    def __post_init__(self) -> None:
        # Sample every change: changes are few, and traces of moved requests link to them.
        self.context = self.tracer.begin(always=True)

    def preparing(self) -> None:
        """Record the time of Prepare: now."""
        self.prepare_s = monotonic_s()

    def answered(self, worker_id: str, reason: str) -> None:
        """Record that a member is ready, or refused for `reason`; later answers are ignored."""
        self.ready.setdefault(worker_id, (monotonic_s(), reason))

    def committed(self, epoch: int) -> None:
        """Record the epoch and time of the commit: now."""
        self.committed_s, self.epoch = monotonic_s(), epoch

    def end(self, error: str = "", memory: MemoryView | None = None) -> None:
        """End and export the trace; `memory` provides the members' times after a commit."""
        now_s = monotonic_s()
        attributes = dict(self.cause.attributes)
        if self.epoch is not None:
            attributes[genai.CHANGE_EPOCH] = self.epoch
        root = Span("change of groups", self.cause.decided_s, now_s, attributes, error=error)
        begun_s = self.prepare_s if self.prepare_s is not None else now_s
        root.children.append(Span("decide", self.cause.decided_s, begun_s))
        for worker_id, (ready_s, reason) in self.ready.items():
            root.children.append(
                Span("prepare", begun_s, ready_s, {genai.WORKER: worker_id}, error=reason)
            )
        if self.epoch is not None and self.committed_s is not None:
            last_s = max((ready_s for ready_s, _ in self.ready.values()), default=begun_s)
            root.children.append(Span("commit", last_s, self.committed_s))
            if memory is not None:
                root.children += self._changing_over(memory, self.epoch, self.committed_s, now_s)
        self.tracer.end(self.context, root)

    def _changing_over(
        self, memory: MemoryView, epoch: int, from_s: float, now_s: float
    ) -> list[Span]:
        spans, served_s, settled_s = [], [from_s], [from_s]
        for worker_id in self.ready:
            latest = memory.latest(worker_id, epoch)
            # A member's report can arrive before etcd's answer to the commit.
            ended_s = max(from_s, latest.served_s) if latest is not None else now_s
            error = "" if latest is not None else f"{worker_id} did not change over"
            attributes: dict[str, Value] = {genai.WORKER: worker_id, genai.EPOCH: epoch}
            spans.append(Span("apply", from_s, ended_s, attributes, error=error))
            served_s.append(ended_s)
            over_s = latest.settled_s if latest is not None else None
            settled_s.append(over_s if over_s is not None else now_s)
        began_s = max(served_s)
        spans.append(Span("exchange", began_s, max(began_s, *settled_s)))
        return spans
