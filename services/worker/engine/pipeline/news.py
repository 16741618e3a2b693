"""Results of an engine for its servicer."""

from dataclasses import dataclass, field

from services.core.planner.events import EmitToken, RefuseRequest
from services.worker.ipc import AdoptedRequest, MovedRequest, Prepared, RequestTimes


@dataclass(slots=True)
class News:
    """Results since the last frame to the servicer; see `ipc.Progress`."""

    tokens: list[EmitToken] = field(default_factory=list)
    refusals: list[RefuseRequest] = field(default_factory=list)
    adopted: list[AdoptedRequest] = field(default_factory=list)
    moved: list[MovedRequest] = field(default_factory=list)
    prepared: list[Prepared] = field(default_factory=list)
    times: dict[str, RequestTimes] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.tokens or self.refusals or self.adopted or self.moved or self.prepared)
