"""What the live page shows at one moment."""

from collections import deque
from collections.abc import Mapping
from typing import Any

from services.common.clock import monotonic_s
from services.gateway.cluster.cluster_client import ClusterClient
from services.gateway.cluster.readiness import ReadinessProbe
from services.gateway.records.metrics import EndpointTotals, Metrics

# By action and cause, or by action alone; `wanted` is what the threshold is compared with.
SENTENCES = {
    "merge manual": "Somebody asked for it: {names} merge into one group.",
    "merge": (
        "Requests need {wanted:,} tokens of KV; there is room for {threshold_tokens:,}."
        " Groups merge and drop layers that both hold."
    ),
    "merge of full groups": (
        "Requests at full groups need {stuck_tokens:,} tokens of KV more than these hold."
        " Groups merge and drop layers that both hold."
    ),
    "restore manual": "Somebody asked for it: {names} splits, and its parameters come back.",
    "restore draining": "A worker of {names} is leaving, so the group splits.",
    "restore": (
        "Demand fell to {wanted:,} tokens of KV, below {threshold_tokens:,}: {names} splits, and"
        " its parameters come back."
    ),
    "exhausted": (
        "Requests need {needed_tokens:,} tokens of KV more than there is, whatever groups merge."
        " Add workers."
    ),
}


def sentence(row: Mapping[str, Any]) -> str:
    """What was decided and why; `row` has the names of Decision in memmgr.proto."""
    action, cause = row["action"], row["cause"]
    wanted = row["demand_tokens"] + row["forecast_tokens"]
    if (action, cause) == ("merge", "overload") and wanted <= row["threshold_tokens"]:
        text = SENTENCES["merge of full groups"]
    else:
        text = SENTENCES.get(f"{action} {cause}") or SENTENCES.get(action) or f"{action} ({cause})"
    names = ", ".join(row["group_ids"]) or "a group"
    return text.format_map({**row, "wanted": wanted, "names": names})


WINDOW_S = 2.0


class RateWindow:
    """Tokens a second and time to first token over the last `WINDOW_S`.

    It is told at most some times a second, so that it keeps few looks.
    """

    def __init__(self) -> None:
        self._looks: deque[tuple[float, EndpointTotals]] = deque(maxlen=64)

    def note(self, now_s: float, totals: EndpointTotals) -> None:
        """What the counters show at `now_s`."""
        self._looks.append((now_s, totals))
        while len(self._looks) > 2 and now_s - self._looks[1][0] >= WINDOW_S:
            self._looks.popleft()

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second; 0 before the second look."""
        (began_s, first), (now_s, last) = self._ends()
        elapsed_s = now_s - began_s
        return (last.output_tokens - first.output_tokens) / elapsed_s if elapsed_s > 0 else 0.0

    @property
    def ttft_s(self) -> float | None:
        """Mean time to first token of the requests that got theirs; None if none did."""
        (_, first), (_, last) = self._ends()
        count = last.first_tokens - first.first_tokens
        return (last.first_tokens_s - first.first_tokens_s) / count if count else None

    def _ends(self) -> tuple[tuple[float, EndpointTotals], tuple[float, EndpointTotals]]:
        nothing = (0.0, EndpointTotals(0, 0, 0.0))
        if not self._looks:
            return nothing, nothing
        return self._looks[0], self._looks[-1]


# Asking every process costs more than asking the memory manager.
SERVICES_PERIOD_S = 2.0
DECISIONS_SHOWN = 12


class LiveState:
    """Gathers the cluster's memory at each look, and the services' state less often."""

    def __init__(
        self, model: str, cluster: ClusterClient, probe: ReadinessProbe, metrics: Metrics
    ) -> None:
        self._model = model
        self._cluster = cluster
        self._probe = probe
        self._metrics = metrics
        self._pulse = RateWindow()
        self._services: list[dict[str, Any]] = []
        self._services_s = -SERVICES_PERIOD_S

    async def look(self) -> dict[str, Any]:
        """The state of this moment; takes up to some seconds where services are silent."""
        rows = self._cluster.rows(await self._cluster.cluster())
        now_s = monotonic_s()
        if now_s - self._services_s >= SERVICES_PERIOD_S:
            self._services_s = now_s
            self._services = await self._cluster.services()
        self._pulse.note(monotonic_s(), self._metrics.totals())
        decisions = [_decision(row) for row in rows["decisions"][-DECISIONS_SHOWN:]]
        return rows | {
            "model": self._model,
            "services": self._services,
            "decisions": decisions,
            "missing": list(self._probe.look().missing),
            "queued": self._probe.queued(),
            "tokens_per_s": round(self._pulse.tokens_per_s, 1),
            "ttft_s": self._pulse.ttft_s,
        }


def _decision(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "unix_s": row["decided_unix_s"],
        "action": row["action"],
        "cause": row["cause"],
        "sentence": sentence(row),
        "outcome": row["outcome"],
    }
