"""What the demo shows, read from a cluster's status and the client's records. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.record import Outcome, RequestRecord
from bench.stats import percentile
from cli.status import decision_text


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """How a worker's device memory is divided; what is left over is changing its purpose."""

    worker_id: str
    arena_bytes: int
    parameter_bytes: int
    kv_used_bytes: int
    kv_free_bytes: int


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers `first_layer` to `end_layer` (exclusive) run on a worker."""

    worker_id: str
    first_layer: int
    end_layer: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A cluster at one moment: its workers, the stages of each group, what it decided last."""

    workers: tuple[WorkerMemory, ...] = ()
    groups: tuple[tuple[Stage, ...], ...] = ()
    decision: str = ""
    preemptions: int = 0
    merged_epochs: frozenset[int] = frozenset()

    @property
    def merged(self) -> bool:
        """Whether some group has several workers."""
        return bool(self.merged_epochs)


@dataclass(slots=True)
class Score:
    """How the requests fared under one policy so far. Times are None before a request has ended.

    One that ended without a token counts with the time that it waited in vain: else the policy that
    answers the fewest would look the fastest.
    """

    policy: str
    planned: int
    completed: int = 0
    failed: int = 0
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    preemptions: int = 0
    merged_epochs: set[int] = field(default_factory=set)

    @property
    def merges(self) -> int:
        """Merged groups that were seen."""
        return len(self.merged_epochs)

    def note(self, snapshot: Snapshot, records: Sequence[RequestRecord]) -> None:
        """Take over what is known now; `records` are those of the requests that have ended."""
        ttft_s = [_first_token_s(record) for record in records]
        self.completed = sum(record.outcome is Outcome.COMPLETED for record in records)
        self.failed = len(records) - self.completed
        self.ttft_p50_s, self.ttft_p99_s = percentile(ttft_s, 0.5), percentile(ttft_s, 0.99)
        self.preemptions = max(self.preemptions, snapshot.preemptions)
        self.merged_epochs |= snapshot.merged_epochs


def snapshot_of(status: Mapping[str, Any]) -> Snapshot:
    """What a gateway's status shows; workers that do not tell their sizes yet are left out."""
    rows = list(status.get("workers", []))
    known = {row["id"]: row for row in rows if row.get("shape") and row.get("arena_bytes")}
    groups: list[tuple[Stage, ...]] = []
    merged: set[int] = set()
    layers = {name: int(row["shape"]["num_layers"]) for name, row in known.items()}
    for row in status.get("groups", []):
        runs = row.get("layers") or []
        if len(runs) != len(row["members"]):
            continue
        stages = tuple(Stage(name, *run) for name, run in zip(row["members"], runs, strict=True))
        layers |= {stage.worker_id: stage.end_layer - stage.first_layer for stage in stages}
        groups.append(stages)
        if len(stages) > 1:
            merged.add(int(row["epoch"]))
    decisions = status.get("decisions") or []
    return Snapshot(
        workers=tuple(_memory(row, layers[name]) for name, row in known.items()),
        groups=tuple(groups),
        decision=_decision(decisions[-1]) if decisions else "",
        preemptions=sum(row["preemptions_total"] for row in rows),
        merged_epochs=frozenset(merged),
    )


def _first_token_s(record: RequestRecord) -> float:
    return record.ttft_s if record.token_times_s else record.end_s - record.due_s


def _memory(row: Mapping[str, Any], layers: int) -> WorkerMemory:
    block_bytes = layers * row["shape"]["kv_bytes"] * row["block_size"]
    free = row["kv_blocks_free"]
    return WorkerMemory(
        worker_id=row["id"],
        arena_bytes=row["arena_bytes"],
        parameter_bytes=row["parameter_bytes"],
        kv_used_bytes=(row["kv_blocks_total"] - free) * block_bytes,
        kv_free_bytes=free * block_bytes,
    )


def _decision(row: Mapping[str, Any]) -> str:
    demand, threshold = row["demand_tokens"], row["threshold_tokens"]
    sign = "<" if row["cause"] == "relief" else ">"
    return f"{decision_text(row)}: demand {demand:,} {sign} {threshold:,} tokens of KV"
