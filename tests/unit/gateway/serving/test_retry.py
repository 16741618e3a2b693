"""Conditions under which a request that failed at a worker is restarted."""

from dataclasses import replace

import pytest

from services.core.ask import Ask, Assignment
from services.core.request import (
    SERVER_LOSSES_MAX,
    Limits,
    LogprobOptions,
    Request,
    Sampling,
)
from services.gateway.cluster.token_stream import KvLost, Returned, StaleEpoch, WorkerLeaving
from services.gateway.serving.retry import (
    DEATHS_FORGOTTEN_AFTER,
    FRUITLESS_MAX,
    LOST_MAX,
    RetryState,
    resumed,
    retry_ask,
)
from services.gateway.vocabulary.errors import (
    EngineFailed,
    EngineKilled,
    QueueFull,
    ServerLost,
    ServiceUnavailable,
    WorkerLost,
)

LOST = WorkerLost("lost")
DIED = WorkerLost("died", engine_died=True)
PLACE = Assignment("r", "g", 3, "w", "host:1")
REQUEST = Request("r", (5, 6, 7), Sampling(seed=8), Limits(9, 2), 0.0)


def test_a_request_without_tokens_survives_two_lost_workers() -> None:
    attempts = RetryState(resumes=False)
    for _ in range(LOST_MAX - 1):
        attempts.fail(LOST, 0, 9)
    attempts.fail(StaleEpoch(), 0, 9)
    with pytest.raises(WorkerLost):
        attempts.fail(LOST, 0, 9)


def test_a_full_worker_ends_only_a_request_that_has_not_run() -> None:
    with pytest.raises(QueueFull):
        RetryState(resumes=True).fail(QueueFull("full"), 0, 9)
    RetryState(resumes=True).fail(QueueFull("full"), 2, 9)


def test_consecutive_losses_without_a_token_are_bounded() -> None:
    attempts = RetryState(resumes=True)
    for output in (1, 2, 3):
        for _ in range(LOST_MAX):
            attempts.fail(LOST, output, 9)
    with pytest.raises(WorkerLost):
        attempts.fail(LOST, 3, 9)


@pytest.mark.parametrize("output", [0, 4])
def test_a_request_ends_after_too_many_group_changes(output: int) -> None:
    attempts = RetryState(resumes=True)
    for _ in range(FRUITLESS_MAX - (output == 0)):
        attempts.fail(StaleEpoch(), output, 9)
    with pytest.raises(ServiceUnavailable):
        attempts.fail(Returned(), output, 9)


def test_engine_deaths_are_bounded_in_total() -> None:
    attempts = RetryState(resumes=True)
    for output in (3, 5):
        assert not attempts.alone
        attempts.fail(DIED, output, 9)
        attempts.fail(LOST, output + 1, 9)
    assert attempts.alone
    with pytest.raises(EngineKilled):
        attempts.fail(DIED, 8, 9)


def test_deaths_are_forgotten_after_further_tokens() -> None:
    attempts = RetryState(resumes=True)
    for number in range(9):
        attempts.fail(DIED, 1 + number * DEATHS_FORGOTTEN_AFTER, 99 * DEATHS_FORGOTTEN_AFTER)
        assert not attempts.alone
    attempts.fail(DIED, 8 * DEATHS_FORGOTTEN_AFTER + 2, 99 * DEATHS_FORGOTTEN_AFTER)
    assert attempts.alone


def test_worker_deaths_are_bounded() -> None:
    """A worker that dies with its servicer does not report its engine's death."""
    attempts = RetryState(resumes=True)
    with pytest.raises(EngineKilled):
        for output in range(1, 20):
            attempts.fail(LOST, output, 99)


@pytest.mark.parametrize("failure", [KvLost(), QueueFull("failed")])
def test_upstream_losses_are_bounded_in_total(failure: Returned | QueueFull) -> None:
    attempts = RetryState(resumes=True)
    attempts.fail(failure, 5, 99, 1)
    assert not attempts.alone
    attempts.fail(failure, 6, 99, SERVER_LOSSES_MAX - 1)
    assert attempts.alone
    with pytest.raises(ServerLost, match="lost 3 times"):
        attempts.fail(failure, 7, 99, SERVER_LOSSES_MAX)


def test_upstream_losses_unknown_to_the_worker_are_not_counted() -> None:
    attempts = RetryState(resumes=True)
    for losses in (1, 2, 1, 2):
        attempts.fail(KvLost(), 1000, 9999, losses)
    attempts.fail(KvLost(), 2000, 9999, 1)
    assert not attempts.alone


@pytest.mark.parametrize("returned", [Returned(), WorkerLeaving()])
def test_a_worker_that_returns_a_request_is_not_lost(returned: Returned) -> None:
    attempts = RetryState(resumes=True)
    for _ in range(LOST_MAX - 1):
        attempts.fail(LOST, 3, 9)
    for _ in range(LOST_MAX + 1):
        attempts.fail(returned, 3, 9)
    assert not attempts.alone
    attempts.fail(DIED, 4, 9)
    assert not attempts.alone, "one engine died, and two workers were lost"


@pytest.mark.parametrize(
    ("failure", "error"),
    [(LOST, WorkerLost), (StaleEpoch(), EngineFailed), (Returned(), EngineFailed)],
)
def test_a_started_request_ends_if_resuming_is_off(
    failure: WorkerLost | StaleEpoch | Returned, error: type[Exception]
) -> None:
    with pytest.raises(error):
        RetryState(resumes=False).fail(failure, 1, 9)


def test_a_request_with_all_its_tokens_is_complete() -> None:
    with pytest.raises(WorkerLost):
        RetryState(resumes=True).fail(LOST, 9, 9)


def test_a_retry_resumes_the_request_with_the_remaining_tokens() -> None:
    options = LogprobOptions(output=2, prompt=1)
    request = replace(REQUEST, logprobs=options)
    assert resumed(request, ()) is request
    later = resumed(request, (1, 2))
    assert (later.prompt_ids, later.output_ids, later.limits) == ((5, 6, 7), (1, 2), Limits(9, 2))
    assert later.sampling == request.sampling
    assert later.logprobs == LogprobOptions(output=2, prompt=None)

    ask = Ask("r", "m", 3, 9)
    again = retry_ask(ask, request, 2, PLACE, LOST, 4.0)
    assert (again.prompt_tokens, again.max_tokens, again.resumed) == (5, 7, True)
    assert again.failed is not None and not again.failed.returned
    unbegun = retry_ask(ask, request, 0, PLACE, Returned(), 4.0)
    assert (unbegun.prompt_tokens, unbegun.max_tokens, unbegun.resumed) == (3, 9, False)
    assert unbegun.failed is not None and unbegun.failed.returned
    assert unbegun.excused_s == 0.0, "it had no room, so it still waits in the line"


@pytest.mark.parametrize("loss", [LOST, KvLost(), WorkerLeaving()])
def test_the_deadline_of_a_failed_request_counts_from_the_failure(
    loss: WorkerLost | Returned,
) -> None:
    """Even without a token: it had a place, and its time in the queue had ended."""
    ask = retry_ask(Ask("r", "m", 3, 9), REQUEST, 0, PLACE, loss, 4.0)
    assert (ask.prompt_tokens, ask.max_tokens, ask.resumed) == (3, 9, False)
    assert ask.failed is not None and ask.failed.returned == isinstance(loss, Returned)
    assert ask.excused_s == 4.0
    assert retry_ask(ask, REQUEST, 0, PLACE, StaleEpoch(), 7.0).excused_s == 4.0
    assert retry_ask(ask, REQUEST, 0, PLACE, loss, 9.0).excused_s == 9.0
    attempts = RetryState(resumes=True)
    attempts.fail(loss, 0, 9)
    attempts.fail(QueueFull("full"), 0, 9)  # elsewhere there may be room
    with pytest.raises(QueueFull):
        for _ in range(LOST_MAX):
            attempts.fail(QueueFull("full"), 0, 9)


def test_a_worker_that_was_never_reached_has_not_failed_a_request() -> None:
    unreached = WorkerLost("refused", reached=False)
    assert retry_ask(Ask("r", "m", 3, 9), REQUEST, 0, PLACE, unreached, 4.0).excused_s == 0.0
    attempts = RetryState(resumes=True)
    attempts.fail(unreached, 0, 9)
    with pytest.raises(QueueFull):
        attempts.fail(QueueFull("full"), 0, 9)
