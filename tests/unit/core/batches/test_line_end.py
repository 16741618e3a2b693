"""A line fails on its own errors and is retried after errors of the system."""

import pytest

from services.core.batches.line_end import ATTEMPTS_MAX, RunAgain, after_response


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (200, None),
        (400, "context_length_exceeded"),
        (401, "invalid_api_key"),
        (500, "engine_killed"),
        (502, "server_lost"),
        (429, "rate_limit_exceeded"),
    ],
)
def test_a_line_ends_with_its_own_response(status: int, code: str | None) -> None:
    assert after_response(status, code, None, 0) is None


@pytest.mark.parametrize(
    ("status", "code", "retry_after_s", "delay_s"),
    [
        (503, "queue_full", 7.5, 7.5),
        (503, "too_late", 30.0, 30.0),
        (503, "shutting_down", None, 1.0),
        (503, "unavailable", 1.0, 5.0),
        (503, "unavailable", 20.0, 20.0),
        (429, "rate_limit_exceeded", 12.0, 12.0),
        (504, "expired", None, 1.0),
        (404, "model_not_found", None, 10.0),
    ],
)
def test_refusals_and_full_queues_never_count(
    status: int, code: str, retry_after_s: float | None, delay_s: float
) -> None:
    for attempts in (0, ATTEMPTS_MAX - 1):
        again = after_response(status, code, retry_after_s, attempts)
        assert again == RunAgain(delay_s, failure=False)


@pytest.mark.parametrize(("status", "code"), [(503, "worker_lost"), (500, "engine_failed")])
def test_failures_count_up_to_a_limit(status: int, code: str) -> None:
    attempts = 0
    while (again := after_response(status, code, 2.0, attempts)) is not None:
        assert again == RunAgain(2.0, failure=True)
        attempts += 1
    assert attempts == ATTEMPTS_MAX - 1
