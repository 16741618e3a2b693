"""The exposition shows the snapshot."""

import urllib.request

import pytest
from prometheus_client import generate_latest

from services.common.errors import ConfigError
from services.common.metrics_server import metrics_exposed
from services.core.scheduler.state import SchedulerState
from services.core.scheduler.vocabulary import Asked
from services.scheduler.metrics import registry


def test_metrics_of_a_state() -> None:
    state = SchedulerState(8, 120.0)
    state.handle(Asked(1.0, 1, "secret-id", "m", 1, 1))
    state.handle(Asked(1.0, 1, "bad", "m", 0, 1))
    text = generate_latest(registry(lambda: state.snapshot(3.0))).decode()
    assert "tideserve_scheduler_queued_requests 1.0" in text
    assert "tideserve_scheduler_oldest_wait_seconds 2.0" in text
    assert 'tideserve_scheduler_refused_requests_total{reason="invalid"} 1.0' in text
    assert "secret-id" not in text


def test_they_are_served_over_http() -> None:
    made = registry(lambda: SchedulerState(8, 120.0).snapshot(0.0))
    with metrics_exposed(made, "127.0.0.1", 0) as port:
        url = f"http://127.0.0.1:{port}/metrics"
        with urllib.request.urlopen(url, timeout=30) as answer:
            assert b"tideserve_scheduler_queued_requests 0.0" in answer.read()
        with (
            pytest.raises(ConfigError, match="choose another metrics_port"),
            metrics_exposed(made, "127.0.0.1", port),
        ):
            pass
    with metrics_exposed(made, "127.0.0.1", None) as none:
        assert none == 0
