"""The latest demand reports of the schedulers: KV that their queued requests need, by model."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from services.core.demand import ModelDemand

Demands = tuple[ModelDemand, ...]


class DemandView:
    """Keeps the latest report of each open stream; each scheduler has a stream.

    Its size is bounded by the number of schedulers, and that of a report by `translate`.
    """

    def __init__(self, updated: asyncio.Event) -> None:
        """`updated` is set by every report, and at the end of a stream."""
        self._latest: dict[object, Demands] = {}
        self._updated = updated

    @contextmanager
    def stream(self) -> Iterator["DemandStream"]:
        """A context for a scheduler's stream; its end removes the stream's last report."""
        stream = DemandStream(self)
        try:
            yield stream
        finally:
            self._latest.pop(stream, None)
            self._updated.set()

    def put(self, stream: object, demands: Demands) -> None:
        """Replace the stream's last report."""
        self._latest[stream] = demands
        self._updated.set()

    def demands(self) -> Demands:
        """The demand of each model, summed over schedulers, since their queues are disjoint."""
        by_model: dict[str, ModelDemand] = {}
        for demands in self._latest.values():
            for demand in demands:
                other = by_model.get(demand.model)
                by_model[demand.model] = demand if other is None else demand.plus(other)
        return tuple(by_model.values())


class DemandStream:
    """A scheduler's stream of reports."""

    def __init__(self, view: DemandView) -> None:
        self._view = view

    def report(self, demands: Demands) -> None:
        """Replace this scheduler's last report."""
        self._view.put(self, demands)
