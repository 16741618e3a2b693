"""The latest refusals for lateness of a model, which `tideserve status --why` explains."""

from dataclasses import dataclass, field

from services.core.scheduler.rate import RecentSum
from services.core.scheduler.vocabulary import Late, LateRefusals
from services.core.service import ServiceClass

MINUTE_S = 60
"""Window in which refusals are counted."""


@dataclass(slots=True)
class _OfClass:
    """Refusals of a class: those of the last minute, and the latest with its Retry-After."""

    recent: RecentSum
    last: Late
    last_s: float
    retry_after_s: float


@dataclass(slots=True)
class RecentRefusals:
    """Counts refusals for lateness by class, and keeps the latest of each."""

    _by_class: dict[ServiceClass, _OfClass] = field(default_factory=dict)

    def note(
        self, service_class: ServiceClass, late: Late, retry_after_s: float, now_s: float
    ) -> None:
        """Count a refusal."""
        known = self._by_class.get(service_class)
        recent = known.recent if known is not None else RecentSum(MINUTE_S)
        recent.add(0, now_s)
        self._by_class[service_class] = _OfClass(recent, late, now_s, retry_after_s)

    def by_class(self, model: str, now_s: float) -> list[LateRefusals]:
        """The refusals of each class that has had any since the start of the scheduler."""
        return [
            LateRefusals(
                *(model, cls, of_class.recent.at(now_s)[0], now_s - of_class.last_s),
                *(of_class.last, of_class.retry_after_s),
            )
            for cls, of_class in self._by_class.items()
        ]
