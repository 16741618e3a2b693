"""The latest demand reports of the schedulers."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from services.core.demand import ModelDemand

Demands = tuple[ModelDemand, ...]


class DemandView:
    """Keeps a report per open stream, so the number of schedulers bounds its size.

    `translate` bounds the size of a report.
    """

    def __init__(self, updated: asyncio.Event) -> None:
        """`updated` is set by every report, and at the end of a stream."""
        self._latest: dict[object, Demands] = {}
        self._updated = updated

    @contextmanager
    def stream(self) -> Iterator["DemandStream"]:
        """A scheduler's stream; its last report is removed at the end."""
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
    """The sink of a scheduler's reports."""

    def __init__(self, view: DemandView) -> None:
        self._view = view

    def report(self, demands: Demands) -> None:
        """Replace this scheduler's last report."""
        self._view.put(self, demands)
