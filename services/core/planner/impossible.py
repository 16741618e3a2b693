"""Targets that no request can keep: below the time of one decode iteration of a lone request."""

from dataclasses import dataclass, field

from services.core.cost.model import CostModel
from services.core.service import Service

REPORTED_MAX = 64
"""So many different targets are told: each request may have its own."""


@dataclass(frozen=True, slots=True)
class ImpossibleTarget:
    """A target of `target_s` seconds, where a lone iteration takes `lone_s`; `name` is clients'."""

    name: str
    service_class: str
    target_s: float
    lone_s: float

    def __str__(self) -> str:
        return (
            f"{self.name} is {_ms(self.target_s)} for a request of the class {self.service_class},"
            f" but a decode iteration of one request alone takes {_ms(self.lone_s)} here: it is"
            " always missed, and bounds nothing. Set a higher one for the class (`classes` of the"
            " gateway) or in the request"
        )


@dataclass(slots=True)
class ImpossibleTargets:
    """Finds such targets by the cost model, and tells each class and value once."""

    cost_model: CostModel | None = None
    _told: set[tuple[str, str, float]] = field(default_factory=set)

    def news(self, service: Service) -> list[ImpossibleTarget]:
        """What is impossible of this promise, and has not been told yet."""
        if self.cost_model is None:
            return []
        lone_s = self.cost_model.chunk_s(0, 1)
        found = []
        for name, target_s in (("ttft_ms", service.ttft_s), ("tpot_ms", service.tpot_s)):
            if target_s is None or target_s >= lone_s or len(self._told) >= REPORTED_MAX:
                continue
            key = (name, str(service.service_class), target_s)
            if key not in self._told:
                self._told.add(key)
                found.append(ImpossibleTarget(*key, lone_s))
        return found


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
