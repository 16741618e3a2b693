"""State of the demo, from a cluster's status and the client's records. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tideserve.cli.status import decision_text
from tideserve.load.record import RequestOutcome, SentRequest, duration_s
from tideserve.sim.report import percentile


@dataclass(frozen=True, slots=True)
class ShownMemory:
    """Partition of a worker's device memory; the rest is in transition."""

    worker_id: str
    arena_bytes: int
    parameter_bytes: int
    kv_used_bytes: int
    kv_free_bytes: int


@dataclass(frozen=True, slots=True)
class ShownStage:
    """Layers `first_layer` to `end_layer` (exclusive) run on a worker."""

    worker_id: str
    first_layer: int
    end_layer: int


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """A cluster at a point in time: its workers, the stages of each group, the last decision.

    `kv_tokens`: KV capacity of all groups in tokens. `running`: number of requests with KV cache.
    """

    workers: tuple[ShownMemory, ...] = ()
    groups: tuple[tuple[ShownStage, ...], ...] = ()
    decision: str = ""
    preemptions: int = 0
    merged_epochs: frozenset[int] = frozenset()
    kv_tokens: int = 0
    running: int = 0

    @property
    def merged(self) -> bool:
        """Whether some group has several workers."""
        return bool(self.merged_epochs)


@dataclass(frozen=True, slots=True)
class FloodProgress:
    """Progress of the burst: requests `due`, and of these `running`, `waiting` and `ended`."""

    elapsed_s: float
    due: int
    running: int
    ended: int

    @property
    def waiting(self) -> int:
        """Due requests without KV cache; clamped, because client and cluster report separately."""
        return max(0, self.due - self.running - self.ended)


@dataclass(slots=True)
class Score:
    """Figures of a policy so far. Times are None before a request has ended.

    A request that ended without a token counts with its waiting time; otherwise the policy that
    completes the fewest requests would look the fastest. `changes`: observed changes of groups.
    """

    policy: str
    planned: int
    completed: int = 0
    failed: int = 0
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    tpot_p50_s: float | None = None
    took_s: float | None = None
    preemptions: int = 0
    kv_tokens_max: int = 0
    merged_epochs: set[int] = field(default_factory=set)
    changes: list[str] = field(default_factory=list)
    _groups: int = 0

    @property
    def merges(self) -> int:
        """Number of observed merged groups."""
        return len(self.merged_epochs)

    def note(
        self, snapshot: ClusterSnapshot, records: Sequence[SentRequest], elapsed_s: float = 0.0
    ) -> None:
        """Update the figures; `records` are those of ended requests."""
        ttft_s = [_first_token_s(record) for record in records]
        answered = [record for record in records if record.outcome is RequestOutcome.COMPLETED]
        self.completed = len(answered)
        self.failed = len(records) - self.completed
        self.ttft_p50_s, self.ttft_p99_s = percentile(ttft_s, 0.5), percentile(ttft_s, 0.99)
        tpot_s = [record.tpot_s for record in answered if record.tpot_s is not None]
        self.tpot_p50_s = percentile(tpot_s, 0.5)
        self.took_s = duration_s(records) if records else None
        self.preemptions = max(self.preemptions, snapshot.preemptions)
        self.kv_tokens_max = max(self.kv_tokens_max, snapshot.kv_tokens)
        self.merged_epochs |= snapshot.merged_epochs
        groups, before = len(snapshot.groups), self._groups
        self._groups = groups or before
        if before and groups and groups != before:
            how = "merge into" if groups < before else "split into"
            name = "group" if before == 1 else "groups"
            self.changes.append(f"{elapsed_s:.0f} s: {before} {name} {how} {groups}")


def snapshot_of(status: Mapping[str, Any]) -> ClusterSnapshot:
    """A snapshot from a gateway's status; omits workers that do not report their sizes yet."""
    rows = list(status.get("workers", []))
    known = {row["id"]: row for row in rows if row.get("shape") and row.get("arena_bytes")}
    groups: list[tuple[ShownStage, ...]] = []
    merged: set[int] = set()
    kv_tokens = 0
    for row in status.get("groups", []):
        runs = row.get("layers") or []
        if len(runs) != len(row["members"]):
            continue
        stages = tuple(
            ShownStage(name, *run) for name, run in zip(row["members"], runs, strict=True)
        )
        groups.append(stages)
        members = [known[stage.worker_id] for stage in stages if stage.worker_id in known]
        capacities = (worker["kv_blocks_total"] * worker["block_size"] for worker in members)
        kv_tokens += min(capacities, default=0)
        if len(stages) > 1:
            merged.add(int(row["epoch"]))
    decisions = status.get("decisions") or []
    return ClusterSnapshot(
        workers=tuple(map(_memory, known.values())),
        groups=tuple(groups),
        decision=_decision(decisions[-1]) if decisions else "",
        preemptions=sum(row["preemptions_total"] for row in rows),
        merged_epochs=frozenset(merged),
        kv_tokens=kv_tokens,
        running=sum(row["running"] for row in rows),
    )


def _first_token_s(record: SentRequest) -> float:
    return record.ttft_s if record.token_times_s else record.end_s - record.due_s


def _memory(row: Mapping[str, Any]) -> ShownMemory:
    return ShownMemory(
        worker_id=row["id"],
        arena_bytes=row["arena_bytes"],
        parameter_bytes=row["parameter_bytes"],
        kv_used_bytes=row["kv_used_bytes"],
        kv_free_bytes=row["kv_free_bytes"],
    )


def _decision(row: Mapping[str, Any]) -> str:
    sign = "<" if row["cause"] == "relief" else ">"
    return (
        f"{decision_text(row)}: demand {row['demand_tokens']:,} + {row['forecast_tokens']:,}"
        f" forecast {sign} {row['threshold_tokens']:,} tokens of KV"
    )
