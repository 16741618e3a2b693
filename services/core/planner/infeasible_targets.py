"""Finds latency targets shorter than an iteration with a single decode, to warn operators."""

from dataclasses import dataclass, field

from services.core.cost.model import CostModel
from services.core.service import Service

REPORTED_MAX = 64
"""Maximum number of distinct targets reported, since each request may have its own."""


@dataclass(frozen=True, slots=True)
class InfeasibleTarget:
    """A target shorter than `lone_s`, the time of a lone decode; `name` is its API field."""

    name: str
    service_class: str
    target_s: float
    lone_s: float

    def __str__(self) -> str:
        return (
            f"{self.name} is {_ms(self.target_s)} for a request of the class {self.service_class},"
            f" but a decode iteration of a single request takes {_ms(self.lone_s)} here: it is"
            " always missed and has no effect. Set a higher target for the class (`classes` of the"
            " gateway) or in the request"
        )


@dataclass(slots=True)
class InfeasibleTargets:
    """Detects infeasible targets by the cost model; returns each class and value once."""

    _reported: set[tuple[str, str, float]] = field(default_factory=set)  # (name, class, target)

    def unreported(self, service: Service, cost_model: CostModel | None) -> list[InfeasibleTarget]:
        """Infeasible targets of a request that were not reported before."""
        if cost_model is None:
            return []
        lone_s = cost_model.chunk_s(0, 1)
        infeasible = []
        for name, target_s in (("ttft_ms", service.ttft_s), ("tpot_ms", service.tpot_s)):
            if target_s is None or target_s >= lone_s or len(self._reported) >= REPORTED_MAX:
                continue
            key = (name, str(service.service_class), target_s)
            if key not in self._reported:
                self._reported.add(key)
                infeasible.append(InfeasibleTarget(*key, lone_s))
        return infeasible


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
