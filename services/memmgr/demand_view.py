"""The demand at the schedulers, as they last reported it."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from services.core.demand import ModelDemand

Demands = tuple[ModelDemand, ...]


class DemandView:
    """Keeps one report per open stream, so it is bounded by the number of schedulers.

    Each report is bounded by `translate`.
    """

    def __init__(self, news: asyncio.Event) -> None:
        """`news` is set by every report, and at the end of a stream."""
        self._latest: dict[object, Demands] = {}
        self._news = news

    @contextmanager
    def stream(self) -> Iterator["DemandStream"]:
        """A scheduler's stream; what it reported is forgotten at its end."""
        stream = DemandStream(self)
        try:
            yield stream
        finally:
            self._latest.pop(stream, None)
            self._news.set()

    def put(self, stream: object, demands: Demands) -> None:
        """Take a report in place of the stream's last one."""
        self._latest[stream] = demands
        self._news.set()

    def demands(self) -> Demands:
        """The demand of each model. A queue is at one scheduler only, so they add up."""
        found: dict[str, ModelDemand] = {}
        for demands in self._latest.values():
            for one in demands:
                other = found.get(one.model)
                found[one.model] = one if other is None else one.plus(other)
        return tuple(found.values())


class DemandStream:
    """Where the reports of one scheduler go."""

    def __init__(self, view: DemandView) -> None:
        self._view = view

    def report(self, demands: Demands) -> None:
        """Take a report."""
        self._view.put(self, demands)
