"""Demand is what open streams last reported."""

import asyncio

from services.core.demand import ModelDemand
from services.memmgr.demand_view import DemandView

ONE = ModelDemand("a", 1, 10, 2, 20, 3.0)


def test_the_latest_report_counts_until_its_stream_ends() -> None:
    news = asyncio.Event()
    view = DemandView(news)
    assert view.demands() == () and not news.is_set()
    with view.stream() as stream:
        stream.report((ONE, ModelDemand("b", 5)))
        stream.report((ONE,))
        assert view.demands() == (ONE,)
        assert news.is_set()
        news.clear()
    assert view.demands() == () and news.is_set()


def test_queues_of_two_schedulers_are_summed() -> None:
    view = DemandView(asyncio.Event())
    with view.stream() as old, view.stream() as new:
        old.report((ONE,))
        new.report((ONE, ModelDemand("b", 5)))
        both = {demand.model: demand for demand in view.demands()}
        assert both == {"a": ModelDemand("a", 2, 20, 4, 40, 6.0), "b": ModelDemand("b", 5)}
