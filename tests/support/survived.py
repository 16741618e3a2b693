"""Successful results of a benchmark's deaths, outages and audits."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from benchmarks.audit_logs import INVARIANTS, Audited
from benchmarks.faults.memory import ResidentMemory
from benchmarks.faults.outcomes import StreamOutcome, Tally, Undisturbed
from benchmarks.faults.survival import Crowd, Loss, Outage
from services.core.audit.record import Findings
from tideserve.sim.replay import Replayed

TOKENS, MIB = 10, 1 << 20
FLAT = [100 * MIB] * 20
WANTED = Undisturbed(tuple(range(TOKENS)))
GROUP = {"id": "g0", "epoch": 4, "members": ["worker-0", "worker-1"]}


def stream(begins_s: float, lasts_s: float) -> StreamOutcome:
    """A stream whose tokens arrive at equal intervals, the last at its end."""
    times_s = tuple(begins_s + lasts_s * (number + 1) / TOKENS for number in range(TOKENS))
    return StreamOutcome(WANTED.token_ids, times_s, times_s[-1], True, TOKENS, sent_s=begins_s)


CUT = StreamOutcome(
    WANTED.token_ids[:3], (20.0, 20.5, 21.0), 21.5, False, 0, "the server hung up", sent_s=19.5
)
"""An unfinished stream."""


def loss(outcomes: Sequence[StreamOutcome] = (), **changes: Any) -> Loss:
    """A death at 12 s. Four streams run at a time; each lasts 4 s before the death, and 5 s after.

    That is 10 tokens a second before, and 8 after; the share of three of four workers is 7.5.
    """
    before = [stream(4.0 * turn, 4.0) for turn in range(3) for _ in range(4)]
    after = [stream(12.0 + 5.0 * turn, 5.0) for turn in range(3) for _ in range(4)]
    every = [*before, *after, *outcomes]
    seen = Loss(4, 4, 12.0, 12.5, 26.0, every, [WANTED] * len(every))
    return replace(seen, **changes)


def crowd(outcomes: Sequence[StreamOutcome] = (), **changes: Any) -> Crowd:
    """`loss`, with prompts of 90 tokens; at the death four requests hold 130 of 300 tokens."""
    seen = loss(outcomes)
    shared = {field.name: getattr(seen, field.name) for field in fields(seen)}
    seen_crowd = Crowd(
        **shared, prompts=[90] * len(seen.outcomes), demand_tokens=2400, survivors_tokens=300
    )
    return replace(seen_crowd, **changes)


def outage(layouts: Sequence[Sequence[dict[str, Any]]] = ([GROUP],), **changes: Any) -> Outage:
    """A minute in which the groups went through `layouts`."""
    tally = Tally(sent=10, completed=9, hung_up=1, tokens=80)
    seen = Outage(60.0, settled_s=0.5, tally=replace(tally, **changes.pop("tally", {})))
    for groups in layouts:
        seen.note(groups)
    return replace(seen, **changes)


def audited() -> Audited:
    """Audit of logs that replay equally and exercise every invariant."""
    findings = Findings()
    for name in INVARIANTS:
        findings.check(name, True, "")
    return Audited({"worker-0-1-2.jsonl": Replayed(10, 20)}, findings)


def memory(name: str, values: list[int]) -> ResidentMemory:
    """Samples of one process."""
    return ResidentMemory(10, 0.05, {name: values})
