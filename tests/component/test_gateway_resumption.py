"""A request whose worker is lost after its first token continues at another worker."""

import asyncio
import json
from typing import Any

import pytest

from tests.support.gateway import TEXT, Case, text_ids
from tests.support.waiting import eventually
from tideserve.scheduler.v1 import scheduler_pb2
from tideserve.worker.v1 import worker_pb2

TOKENS = 20


pytestmark = pytest.mark.gateway(workers=2)


async def chunks_of(case: Case, **fields: Any) -> list[dict[str, Any]]:
    """The chunks of a complete stream."""
    async with case.stream(**{"max_tokens": TOKENS} | fields) as answer:
        lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def metric(case: Case, name: str) -> float:
    text = (await case.http.get("/metrics")).text
    return float(next(line.split()[1] for line in text.splitlines() if line.startswith(name + " ")))


async def lose(case: Case, worker: int, at: int) -> None:
    """Lose a worker once the gateway has received its tokens before `at`."""
    dying = case.cluster.workers[worker]
    await eventually(lambda: dying.emitted >= at)

    async def has_come() -> bool:
        return await metric(case, 'tideserve_gateway_output_tokens_total{model_name="m"}') >= at

    await eventually(has_come)  # frames in flight are lost with the connection
    dying.pause_at = None  # for requests that return
    dying.hang_up()


@pytest.mark.parametrize("at", [1, 2, 7, TOKENS - 1])
async def test_a_client_does_not_notice_that_its_worker_is_lost(case: Case, at: int) -> None:
    # The fake scheduler takes turns, and begins with the second one.
    alive, dying = case.cluster.workers
    dying.pause_at = at
    asking = asyncio.create_task(
        chunks_of(case, seed=7, min_tokens=3, stream_options={"include_usage": True})
    )
    await lose(case, 1, at)
    *chunks, last = await asking
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == TEXT[:TOKENS]
    finishes = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert finishes == ["length"]
    prompt = len(dying.starts[0].prompt_ids)
    assert last["usage"]["prompt_tokens"] == prompt
    assert last["usage"]["completion_tokens"] == TOKENS

    (first,), (second,) = dying.starts, alive.starts
    assert list(second.output_ids) == text_ids(TEXT)[:at] and not first.output_ids
    second.ClearField("output_ids")
    for start in (first, second):
        start.ClearField("group_id")
        start.ClearField("waited_s")
    assert first == second, "prompt, limits and sampling are as at the first worker"
    asked, again = case.cluster.scheduler.asks
    assert (again.prompt_tokens, again.max_tokens) == (prompt + at, TOKENS - at)
    assert (asked.resumed, again.resumed) == (False, True)
    assert (again.refused_group_id, again.refused_epoch) == ("group-w1", 1)
    assert asked.request_id == again.request_id
    assert await metric(case, "tideserve_gateway_resumed_streams_total") == 1


@pytest.mark.gateway(workers=2, admit_timeout_s=3.0)
async def test_losing_worker_and_scheduler_only_delays_a_stream(case: Case) -> None:
    case.cluster.workers[1].pause_at = 3
    asking = asyncio.create_task(chunks_of(case))
    await eventually(lambda: case.cluster.workers[1].emitted >= 3)
    await case.cluster.stop_scheduler()
    await lose(case, 1, 3)
    assert (await case.complete()).status_code == 503, "a new request fails soon"
    await case.cluster.start_scheduler()
    chunks = await asking
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])
    assert text == TEXT[:TOKENS]


async def test_a_random_seed_is_kept(case: Case) -> None:
    alive, dying = case.cluster.workers
    dying.pause_at = 3
    asking = asyncio.create_task(chunks_of(case))
    await lose(case, 1, 3)
    await asking
    assert dying.starts[0].sampling.seed == alive.starts[0].sampling.seed != 0


async def test_a_whole_response_is_complete(case: Case) -> None:
    _, dying = case.cluster.workers
    dying.pause_at = 5
    asking = asyncio.create_task(case.complete(max_tokens=TOKENS, logprobs=2))
    await lose(case, 1, 5)
    answer = (await asking).json()
    choice = answer["choices"][0]
    assert choice["text"] == TEXT[:TOKENS] and choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == TOKENS
    assert answer["usage"]["completion_tokens"] == TOKENS


@pytest.mark.parametrize("at", [23, 24, 26])
async def test_a_stop_string_may_span_two_workers(case: Case, at: int) -> None:
    _, dying = case.cluster.workers
    dying.pause_at = at
    asking = asyncio.create_task(case.complete(max_tokens=60, stop=["and the"]))
    await lose(case, 1, at)
    choice = (await asking).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("The tide comes in, ", "stop")


async def test_log_probabilities_of_a_prompt_are_returned_once(case: Case) -> None:
    alive, dying = case.cluster.workers
    dying.pause_at = 3
    asking = asyncio.create_task(
        case.complete(max_tokens=8, echo=True, logprobs=1, prompt="The tide")
    )
    await lose(case, 1, 3)
    choice = (await asking).json()["choices"][0]
    assert choice["text"] == "The tide" + TEXT[:8]
    assert len(choice["logprobs"]["tokens"]) == len(dying.starts[0].prompt_ids) + 8
    assert dying.starts[0].logprobs.HasField("prompt_top")
    assert not alive.starts[0].logprobs.HasField("prompt_top")


async def test_choices_are_resumed_independently(case: Case) -> None:
    _, dying = case.cluster.workers
    dying.pause_at = 4
    asking = asyncio.create_task(case.complete(max_tokens=TOKENS, n=4))
    await lose(case, 1, 4)
    texts = [choice["text"] for choice in (await asking).json()["choices"]]
    assert texts == [TEXT[:TOKENS]] * 4


@pytest.mark.parametrize(
    "reason", [worker_pb2.FINISH_REASON_ERROR, worker_pb2.FINISH_REASON_STALE_EPOCH]
)
async def test_an_engine_that_fails_and_a_group_that_changes_are_losses(
    case: Case, reason: "worker_pb2.FinishReason"
) -> None:
    _, failing = case.cluster.workers
    failing.script, failing.finish = lambda _: text_ids(TEXT)[:6], reason
    answer = await case.complete(max_tokens=TOKENS)
    assert answer.json()["choices"][0]["text"] == TEXT[:TOKENS]


@pytest.mark.parametrize(
    ("reason", "kv_lost", "is_loss"),
    [
        (worker_pb2.FINISH_REASON_RETURNED, True, True),
        (worker_pb2.FINISH_REASON_RETURNED, False, False),
        (worker_pb2.FINISH_REASON_ENGINE_DIED, False, True),
    ],
)
async def test_the_deadline_of_a_request_without_a_token_counts_from_the_loss_of_its_worker(
    case: Case, reason: "worker_pb2.FinishReason.ValueType", kv_lost: bool, is_loss: bool
) -> None:
    """The request may have waited longer than the queue's limit."""
    alive, failing = case.cluster.workers
    failing.fails_after, failing.failure, failing.kv_lost = 0, reason, kv_lost
    answer = await case.complete(max_tokens=TOKENS)
    assert answer.json()["choices"][0]["text"] == TEXT[:TOKENS]
    assert not alive.starts[0].output_ids
    asked, again = case.cluster.scheduler.asks
    assert not (asked.resumed or again.resumed)
    assert again.returned == (reason == worker_pb2.FINISH_REASON_RETURNED)
    assert asked.excused_s == 0 and (again.excused_s > 0) == is_loss
    assert again.excused_s <= again.waited_s
    assert (again.prompt_tokens, again.max_tokens) == (asked.prompt_tokens, asked.max_tokens)


@pytest.mark.parametrize("kv_lost", [True, False])
async def test_a_request_returned_after_tokens_continues_at_another_worker(
    case: Case, kv_lost: bool
) -> None:
    """Six returns with a token between them. Earlier versions do not report lost KV."""
    for worker in case.cluster.workers:
        worker.fails_after, worker.failure = 1, worker_pb2.FINISH_REASON_RETURNED
        worker.kv_lost = kv_lost
    *chunks, last = await chunks_of(case, max_tokens=7, stream_options={"include_usage": True})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT[:7]
    assert last["usage"]["completion_tokens"] == 7
    first, *others = case.cluster.scheduler.asks
    assert not first.resumed and len(others) == 6
    assert all(ask.resumed and ask.returned and not ask.alone for ask in others)
    starts = [start for worker in case.cluster.workers for start in worker.starts]
    assert sorted(len(start.output_ids) for start in starts) == [*range(7)]
    assert all(start.resumable for start in starts)


async def test_three_resumptions_without_a_new_token_end_a_request(case: Case) -> None:
    for worker in case.cluster.workers:
        worker.script, worker.finish = (
            lambda _: text_ids(TEXT)[:6],
            worker_pb2.FINISH_REASON_ERROR,
        )
    async with case.stream(max_tokens=TOKENS) as answer:
        lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
    *chunks, error = map(json.loads, lines)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT[:6]
    assert error["error"]["code"] == "worker_lost"
    assert len(case.cluster.scheduler.asks) == 4
    assert await metric(case, "tideserve_gateway_resumed_streams_total") == 3


async def test_each_new_token_resets_the_limit(case: Case) -> None:
    """Six losses with a token between them."""
    for worker in case.cluster.workers:
        worker.fails_after, worker.finish = 1, worker_pb2.FINISH_REASON_LENGTH
    answer = await case.complete(max_tokens=7)
    assert answer.json()["choices"][0]["text"] == TEXT[:7]
    assert [ask.resumed for ask in case.cluster.scheduler.asks] == [False, *[True] * 6]


async def test_a_refusal_after_a_token_reports_a_lost_worker(case: Case) -> None:
    _, dying = case.cluster.workers
    dying.pause_at = 3
    asking = asyncio.create_task(case.complete(max_tokens=TOKENS))
    await eventually(lambda: dying.emitted >= 3)
    case.cluster.scheduler.refusal = scheduler_pb2.Refusal(
        reason=scheduler_pb2.REFUSAL_REASON_TOO_LARGE, message="no worker is so large"
    )
    dying.hang_up()
    answer = await asking
    assert answer.status_code == 503
    error = answer.json()["error"]
    assert error["code"] == "worker_lost" and "no worker is so large" in error["message"]


async def test_a_request_that_kills_engines_runs_alone_and_then_ends(case: Case) -> None:
    for worker in case.cluster.workers:
        worker.fails_after, worker.failure = 2, worker_pb2.FINISH_REASON_ENGINE_DIED
    answer = await case.complete(max_tokens=TOKENS)
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "engine_killed"
    asks = case.cluster.scheduler.asks
    assert [ask.alone for ask in asks] == [False, False, True]
    assert [
        list(start.output_ids) for worker in case.cluster.workers for start in worker.starts
    ] == [
        text_ids(TEXT)[:2],
        [],
        text_ids(TEXT)[:4],
    ]


@pytest.mark.parametrize(
    "reason", [worker_pb2.FINISH_REASON_RETURNED, worker_pb2.FINISH_REASON_OVERLOADED]
)
async def test_a_request_that_loses_upstream_servers_runs_alone_and_then_ends(
    case: Case, reason: "worker_pb2.FinishReason"
) -> None:
    for worker in case.cluster.workers:
        worker.fails_after, worker.failure, worker.kv_lost = 2, reason, True
        worker.server_losses = 1
    answer = await case.complete(max_tokens=TOKENS)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "server_lost")
    assert answer.headers["x-should-retry"] == "false"
    assert [ask.alone for ask in case.cluster.scheduler.asks] == [False, False, True]
    first, another = case.cluster.workers
    assert [start.server_losses for start in another.starts] == [0, 2]
    assert [start.server_losses for start in first.starts] == [1]


async def test_other_losses_do_not_make_a_request_run_alone(case: Case) -> None:
    for worker in case.cluster.workers:
        worker.fails_after = 2
    assert (await case.complete(max_tokens=9)).status_code == 200
    assert not any(ask.alone for ask in case.cluster.scheduler.asks)


VLLM = {"workers": 2, "capabilities": ["generate", "engine:vllm"]}


@pytest.mark.gateway(**VLLM)
async def test_a_request_with_an_unresumable_grammar_restarts(case: Case) -> None:
    alive, dying = case.cluster.workers
    dying.pause_at = 5
    fields = {"guided_regex": "[a-z]*", "max_tokens": TOKENS, "logprobs": 1}
    asking = asyncio.create_task(case.complete(**fields))
    await lose(case, 1, 5)
    answer = (await asking).json()

    (start,), asks = alive.starts, case.cluster.scheduler.asks
    assert not start.output_ids and start.sampling.HasField("grammar")
    assert [ask.resumed for ask in asks] == [False, False]
    assert asks[0].request_id == asks[1].request_id
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (TEXT[:TOKENS], "length")
    assert len(choice["logprobs"]["tokens"]) == TOKENS == answer["usage"]["completion_tokens"]


@pytest.mark.gateway(**VLLM)
@pytest.mark.parametrize("fields", [{}, {"guided_regex": "[a-z]*", "stream": True}])
async def test_resumable_or_delivered_requests_do_not_restart(
    case: Case, fields: dict[str, Any]
) -> None:
    alive, dying = case.cluster.workers
    dying.pause_at = 5
    asking = asyncio.create_task(case.complete(max_tokens=TOKENS, **fields))
    await lose(case, 1, 5)
    await asking

    assert len(alive.starts[0].output_ids) == 5


@pytest.mark.gateway(workers=2)
async def test_a_grammar_resumes_if_engines_support_it(case: Case) -> None:
    alive, dying = case.cluster.workers
    dying.pause_at = 5
    asking = asyncio.create_task(case.complete(max_tokens=TOKENS, guided_regex="[a-z]*"))
    await lose(case, 1, 5)
    await asking

    assert len(alive.starts[0].output_ids) == 5
