"""Requests of a simulation that move between workers with their KV: the part of their gateways."""

from dataclasses import dataclass, field, replace

from services.core.planner.events import RefuseRequest
from services.core.request import Request
from tideserve.sim.instance import PLACEHOLDER_TOKEN


@dataclass(slots=True)
class MovedRequests:
    """The output tokens that gateways have of requests that moved, by request id."""

    _outputs: dict[str, int] = field(default_factory=dict)

    def note(self, refusal: RefuseRequest, output_tokens: int) -> None:
        """Record the output of a request at its return."""
        self._outputs[refusal.request_id] = output_tokens

    def end(self, request_id: str) -> None:
        """Forget a request."""
        self._outputs.pop(request_id, None)

    def output_of(self, request_id: str) -> int:
        """Output tokens of a request before its present run."""
        return self._outputs.get(request_id, 0)

    def resumed(self, request: Request) -> Request:
        """The request as it starts again; every gateway here resumes."""
        output = self.output_of(request.request_id)
        return replace(request, output_ids=(PLACEHOLDER_TOKEN,) * output, resumable=True)
