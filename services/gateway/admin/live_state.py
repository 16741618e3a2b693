"""What the live page shows at one moment."""

from collections.abc import Mapping
from typing import Any

from services.common.clock import monotonic_s
from services.gateway.admin.pulse import Pulse
from services.gateway.admin.sentence import sentence
from services.gateway.cluster.cluster_client import ClusterClient
from services.gateway.cluster.readiness import ReadinessProbe
from services.gateway.records.metrics import Metrics

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
        self._pulse = Pulse()
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
