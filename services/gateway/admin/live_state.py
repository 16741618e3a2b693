"""Collects the state that the live page of the admin port shows.

A merge joins groups of workers, which drop duplicate layers to make room for KV cache; a restore
splits the group again.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from services.common.clock import monotonic_s, unix_s
from services.gateway.batches.rows import BatchRow
from services.gateway.cluster.cluster_client import ClusterClient
from services.gateway.cluster.readiness import GatewayReadiness
from services.gateway.http.batch_api import progress_of
from services.gateway.records.metrics import EndpointTotals, Metrics

# Texts for decisions of the memory manager, by action and cause, or by action alone. `wanted`:
# demand plus forecast.
SENTENCES = {
    "merge manual": "Manual merge: {names} merge into a single group.",
    "merge": (
        "Requests need {wanted:,} tokens of KV cache, the threshold is {threshold_tokens:,}."
        " Groups merge and drop duplicate layers."
    ),
    "merge of full groups": (
        "Requests at full groups need {stuck_tokens:,} more tokens of KV cache than these groups"
        " have. Groups merge and drop duplicate layers."
    ),
    "call_off": "Requests need {wanted:,} tokens of KV cache again: {names} does not split.",
    "restore manual": "Manual split: {names} splits and restores its parameters.",
    "restore draining": "A worker of {names} is draining, so the group splits.",
    "restore": (
        "Demand fell to {wanted:,} tokens of KV cache, below the threshold of"
        " {threshold_tokens:,}: {names} splits and restores its parameters."
    ),
    "move manual": "Manual move: requests move with their KV cache, {moves}.",
    "move full": "A worker is full, so requests move with their KV cache, {moves}.",
    "move large": (
        "A waiting request needs more KV cache than any worker has free. Running requests move with"
        " their KV cache, {moves}."
    ),
    "move uneven": "Load is uneven, so requests move with their KV cache, {moves}.",
    "move": "A worker is draining, so its requests move with their KV cache, {moves}.",
    "exhausted": (
        "Requests need {needed_tokens:,} more tokens of KV cache than any merge can provide."
        " Add workers."
    ),
}


def sentence(row: Mapping[str, Any]) -> str:
    """The text for a decision; `row` has the fields of Decision in memmgr.proto."""
    action, cause = row["action"], row["cause"]
    wanted = row["demand_tokens"] + row["forecast_tokens"]
    # A merge below the threshold serves requests that wait at full groups.
    if (action, cause) == ("merge", "overload") and wanted <= row["threshold_tokens"]:
        text = SENTENCES["merge of full groups"]
    else:
        text = SENTENCES.get(f"{action} {cause}") or SENTENCES.get(action) or f"{action} ({cause})"
    parts = dict(zip(row["group_ids"], row["parts"], strict=False))
    groups = [
        f"{name} (into {parts[name]})" if name in parts else name for name in row["group_ids"]
    ]
    names = ", ".join(groups) or "a group"
    moves = "from " + " to ".join(row["group_ids"])
    return text.format_map({**row, "wanted": wanted, "names": names, "moves": moves})


WINDOW_S = 2.0


class RateWindow:
    """Tokens per second and time to first token over a sliding window of `WINDOW_S`."""

    def __init__(self) -> None:
        # Bounded: the feed takes a few samples per second.
        self._samples: deque[tuple[float, EndpointTotals]] = deque(maxlen=64)

    def add(self, now_s: float, totals: EndpointTotals) -> None:
        """Add a sample of the counters."""
        self._samples.append((now_s, totals))
        while len(self._samples) > 2 and now_s - self._samples[1][0] >= WINDOW_S:
            self._samples.popleft()

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second; 0 before the second sample."""
        (began_s, first), (now_s, last) = self._ends()
        elapsed_s = now_s - began_s
        return (last.output_tokens - first.output_tokens) / elapsed_s if elapsed_s > 0 else 0.0

    @property
    def ttft_s(self) -> float | None:
        """Mean time to first token in the window, in seconds; None without first tokens."""
        (_, first), (_, last) = self._ends()
        count = last.first_tokens - first.first_tokens
        return (last.first_tokens_s - first.first_tokens_s) / count if count else None

    def _ends(self) -> tuple[tuple[float, EndpointTotals], tuple[float, EndpointTotals]]:
        empty = (0.0, EndpointTotals(0, 0, 0.0))
        if not self._samples:
            return empty, empty
        return self._samples[0], self._samples[-1]


# Longer than the period of the feed: this polls every process, not only the memory manager.
SERVICES_PERIOD_S = 2.0
DECISIONS_SHOWN = 12
BATCHES_SHOWN = 20


async def no_batches() -> Sequence[BatchRow]:
    """No batches."""
    return ()


class LiveState:
    """Collects workers and groups on each call, and the state of all processes less often."""

    def __init__(
        self,
        models: Sequence[str],
        cluster: ClusterClient,
        probe: GatewayReadiness,
        metrics: Metrics,
        open_batches: Callable[[], Awaitable[Sequence[BatchRow]]] = no_batches,
    ) -> None:
        """`open_batches` returns the batches that have not ended."""
        self._open_batches = open_batches
        self._batches: list[dict[str, Any]] = []
        self._models = models
        self._cluster = cluster
        self._probe = probe
        self._metrics = metrics
        self._rates = {model: RateWindow() for model in models}
        self._all_rates = RateWindow()
        self._services: list[dict[str, Any]] = []
        self._services_s = -SERVICES_PERIOD_S

    async def poll(self) -> dict[str, Any]:
        """The current state; takes some seconds if services do not respond."""
        rows = self._cluster.rows(await self._cluster.cluster())
        now_s = monotonic_s()
        if now_s - self._services_s >= SERVICES_PERIOD_S:
            self._services_s = now_s
            self._services = await self._cluster.services()
            self._batches = [_batch(row) for row in (await self._open_batches())[:BATCHES_SHOWN]]
        self._add_rates(monotonic_s())
        decisions = [_decision(row) for row in rows["decisions"][-DECISIONS_SHOWN:]]
        return rows | {
            "model": ", ".join(self._models),
            "models": self._model_rows(),
            "services": self._services,
            "batches": self._batches,
            "decisions": decisions,
            "missing": list(self._probe.evaluate().missing),
            "queued": self._probe.queued(),
            "lengths": self._probe.buckets(self._models[0]) if len(self._models) == 1 else None,
            "tokens_per_s": round(self._all_rates.tokens_per_s, 1),
            "ttft_s": self._all_rates.ttft_s,
        }

    def _add_rates(self, now_s: float) -> None:
        totals = self._metrics.totals()
        for model, rates in self._rates.items():
            rates.add(now_s, totals[model])
        self._all_rates.add(now_s, sum(totals.values(), EndpointTotals(0, 0, 0.0)))

    def _model_rows(self) -> list[dict[str, Any]]:
        """A row per model, for the page's table of several models."""
        states = self._probe.by_model()
        return [
            {
                "name": model,
                "ready": states[model].ready,
                "missing": list(states[model].missing),
                "workers": states[model].workers_registered,
                "groups": states[model].groups_serving,
                "queued": self._probe.queued(model),
                "lengths": self._probe.buckets(model),
                "tokens_per_s": round(rates.tokens_per_s, 1),
                "ttft_s": rates.ttft_s,
            }
            for model, rates in self._rates.items()
        ]


def _batch(batch: BatchRow) -> dict[str, Any]:
    return {
        "id": batch.batch_id,
        "owner": batch.owner,
        "state": batch.state.value,
        "total": batch.total,
        "ended": batch.total - batch.open,
        "failed": batch.failed,
        "progress": progress_of(batch, unix_s()),
    }


def _decision(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "unix_s": row["decided_unix_s"],
        "action": row["action"],
        "cause": row["cause"],
        "sentence": sentence(row),
        "outcome": row["outcome"],
    }
