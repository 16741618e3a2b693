"""The load generator against a server: outcomes, arrival times, concurrency, deadlines."""

import asyncio
import socket
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from benchmarks.client_process import run_job
from tests.support.fake_openai import fake_openai
from tests.support.refusing_address import refusing_address
from tideserve.cli.errors import SystemUnavailable
from tideserve.load.client import LEAD_S, Job, LoadClient, Returns
from tideserve.load.event_stream import ClassFields, OpenAIServer
from tideserve.load.record import ClientAttempt, RequestOutcome, SentRequest
from tideserve.load.workload import Backlog, PlannedRequest

OUTPUT_TOKENS = 5


def job(urls: list[str], requests: list[PlannedRequest], **options: object) -> Job:
    """A job with a generous deadline."""
    return Job(
        **{  # type: ignore[arg-type]
            "urls": tuple(urls),
            "model": "fake",
            "requests": tuple(requests),
            "timeout_s": 30.0,
            **options,
        }
    )


def request(first: int = 300, arrival_s: float = 0.0) -> PlannedRequest:
    """A request whose prompt begins with `first`."""
    return PlannedRequest(arrival_s, (first, 301), OUTPUT_TOKENS, seed=1)


async def run(given: Job) -> list[SentRequest]:
    """The records in order of completion."""
    client = LoadClient(given)
    await client.run()
    return client.records


async def test_outcomes_are_distinguished() -> None:
    behaviour: dict[int, int | str] = {1: 429, 2: 503, 3: 500, 4: "cut", 5: "error"}
    with fake_openai(behaviour) as server:
        records = await run(
            job([server.url], [request(first) for first in (300, 1, 2, 3, 4, 5)], concurrency=1)
        )
    done, refused, failed = RequestOutcome.COMPLETED, RequestOutcome.REJECTED, RequestOutcome.FAILED
    assert [record.outcome for record in records] == [done, *[refused] * 2, *[failed] * 3]
    good = records[0]
    assert good.output_tokens == OUTPUT_TOKENS == len(good.token_times_s)
    assert good.request_id == "cmpl-1"
    assert good.due_s <= good.sent_s <= good.token_times_s[0] <= good.end_s
    assert "HTTP 500" in records[3].error
    assert "ended early" in records[4].error
    assert "the worker is gone" in records[5].error


async def test_an_output_shorter_than_requested_is_marked() -> None:
    with fake_openai({1: "short"}) as server:
        records = await run(job([server.url], [request(), request(1)], concurrency=1))
    assert [(record.output_tokens, record.short) for record in records] == [(5, False), (1, True)]
    assert {record.outcome for record in records} == {RequestOutcome.COMPLETED}


async def test_a_closed_loop_client_keeps_its_server() -> None:
    requests = [request(300 + index) for index in range(12)]
    with fake_openai() as first, fake_openai() as second:
        await run(job([first.url, second.url], requests, concurrency=1))
        assert (len(first.received), len(second.received)) == (12, 0)


async def test_only_failures_of_the_lead_in_are_recorded() -> None:
    with fake_openai({1: 500}) as server:
        requests = [request(), request(1), request(301), request(302)]
        records = await run(job([server.url], requests, concurrency=1, lead_in=2))
        assert len(server.received) == 4
    outcomes = [record.outcome for record in records]
    assert outcomes == [RequestOutcome.FAILED, *[RequestOutcome.COMPLETED] * 2]


async def test_generation_is_forced_to_the_planned_length() -> None:
    with fake_openai() as server:
        await run(job([server.url], [request()]))
        body = server.received[0]
    assert body["prompt"] == [300, 301]
    assert body["max_tokens"] == body["min_tokens"] == OUTPUT_TOKENS
    assert body["ignore_eos"] is True and body["stream"] is True
    assert "slo_class" not in body


async def test_the_open_loop_keeps_arrival_times_and_alternates_servers() -> None:
    with fake_openai() as first, fake_openai() as second:
        requests = [request(arrival_s=0.05 * index) for index in range(10)]
        records = await run(job([first.url, second.url], requests))
        assert len(first.received) == len(second.received) == 5
    records.sort(key=lambda record: record.due_s)
    gaps = [b.due_s - a.due_s for a, b in pairwise(records)]
    assert gaps == pytest.approx([0.05] * 9, abs=1e-6)
    assert all(record.sent_s >= record.due_s for record in records)
    assert all(record.late == (record.sent_s - record.due_s > 0.01) for record in records)


async def refused(retry_after: str | None, returns: Returns) -> list[SentRequest]:
    """The attempts of five clients that are always refused, by client."""
    with fake_openai({first: 503 for first in range(5)}) as server:
        server.retry_after = retry_after
        return await run(job([server.url], [request(first) for first in range(5)], returns=returns))


async def test_refused_clients_retry_after_retry_after_or_at_once() -> None:
    records = await refused("1", Returns(30.0, at_once_every=5, most=1))
    assert [record.retry_after_s for record in records] == [1.0] * 10
    at_once = [record for record in records if record.attempt.at_once]
    assert [record.attempt.returns for record in at_once] == [0, 1]
    assert at_once[1].due_s == at_once[0].end_s
    ends_s = sorted(r.end_s for r in records if r.attempt == ClientAttempt())
    dues_s = sorted(r.due_s for r in records if r.attempt == ClientAttempt(1))
    assert dues_s == pytest.approx([end_s + 1 for end_s in ends_s])
    assert all(record.sent_s >= record.due_s for record in records)


async def test_retries_are_bounded_in_number_and_time() -> None:
    records = await refused("0", Returns(30.0, at_once_every=5, most=3))
    counts = Counter(record.attempt for record in records)
    assert counts == {
        ClientAttempt(n, late): 4 - 3 * late for n in range(4) for late in (False, True)
    }
    # Clients that obey do not retry without the header or after the end of the load.
    for retry_after, until_s in ((None, 30.0), ("29", 20.0)):
        records = await refused(retry_after, Returns(until_s, at_once_every=5, most=1))
        assert [r.attempt for r in records if r.attempt.returns] == [ClientAttempt(1, at_once=True)]


async def beside(backlog: Backlog, count: int) -> tuple[list[SentRequest], list[dict[str, Any]]]:
    """The records of at least `count` requests, one of them online, and the bodies sent."""
    with fake_openai({1: "silent"}) as server:
        client = LoadClient(job([server.url], [request(1)], backlog=backlog))
        running = asyncio.create_task(client.run())
        while len(client.records) < count and not running.done():
            await asyncio.wait((running,), timeout=0.01)
        server.ending.set()  # the silent request is answered, and the open loop has ended
        await running
        bodies = list(server.received)
    assert {record.outcome for record in client.records} == {RequestOutcome.COMPLETED}
    batch = [record for record in client.records if record.slo_class == "batch"]
    assert len(batch) == len(client.records) - 1 >= count
    return sorted(batch, key=lambda record: record.due_s), bodies


async def test_a_backlog_runs_beside_the_open_loop_and_ends_with_it() -> None:
    backlog = Backlog(clients=3, prompt_tokens=(4, 4), output_tokens=(2, 2), seed=1)
    batch, bodies = await beside(backlog, 6)
    for number, record in enumerate(batch):
        # A request is due once a client is free, so it is not late because others take long.
        ended = sum(other.end_s <= record.due_s for other in batch)
        assert ended > number - backlog.clients
    assert not all(record.late for record in batch), "requests are sent when they are due"
    prompts = [tuple(body["prompt"]) for body in bodies if body.get("slo_class") == "batch"]
    assert len(set(prompts)) == len(prompts) >= len(batch)
    for moment in [record.sent_s for record in batch]:
        assert sum(r.sent_s <= moment < r.end_s for r in batch) <= backlog.clients


async def test_a_backlog_sends_its_batches_one_at_a_time() -> None:
    batch, _ = await beside(Backlog(3, (4, 4), (2, 2), seed=1, in_batches=True), 9)
    for number in range(3, 9):
        begin = number // 3 * 3
        assert batch[number].due_s >= max(each.end_s for each in batch[begin - 3 : begin])


async def test_backlog_requests_running_at_the_end_are_no_failures() -> None:
    backlog = Backlog(clients=2, prompt_tokens=(4, 4), output_tokens=(2, 2), seed=1)
    silent: dict[int, int | str] = {
        backlog.request(number).prompt_ids[0]: "silent" for number in (0, 1)
    }
    with fake_openai(silent) as server:
        records = await run(job([server.url], [request(299)], backlog=backlog))
    assert [record.outcome for record in records] == [RequestOutcome.COMPLETED]


async def test_the_class_is_sent_in_the_form_of_the_server() -> None:
    asked = replace(request(), slo_class="interactive", ttft_s=0.4, tpot_s=0.05)
    batch = replace(request(), slo_class="batch")
    bodies: list[dict[str, Any]] = []
    for class_fields in ClassFields:
        with fake_openai() as server:
            await run(job([server.url], [asked, batch], concurrency=1, class_fields=class_fields))
            names = ("slo_class", "slo", "priority")
            bodies += [{n: body[n] for n in names if n in body} for body in server.received]
    assert bodies == [
        {"slo_class": "interactive", "slo": {"ttft_ms": 400.0, "tpot_ms": 50.0}},
        {"slo_class": "batch"},
        {"priority": 0},
        {"priority": 1},
        {},
        {},
    ]


async def test_a_late_send_is_counted() -> None:
    with fake_openai() as server:
        client = LoadClient(job([server.url], [request(), request(arrival_s=0.3)]))
        running = asyncio.create_task(client.run())
        await asyncio.sleep(0)
        # Blocks the client's event loop during both arrivals.
        time.sleep(LEAD_S + 0.3 + 0.1)  # noqa: ASYNC251
        await running
    assert [record.late for record in client.records] == [True, True]
    assert min(record.ttft_s for record in client.records) > 0.05


async def test_the_closed_loop_bounds_concurrency() -> None:
    with fake_openai() as server:
        records = await run(job([server.url], [request() for _ in range(12)], concurrency=3))
    assert len(records) == 12
    assert not any(record.late for record in records)
    for moment in [record.sent_s for record in records]:
        assert sum(r.sent_s <= moment < r.end_s for r in records) <= 3


@pytest.mark.parametrize(("takes_s", "begun"), [(1.0, 9), (3.0, 3), (5.5, 1)])
async def test_requests_that_would_be_cut_off_are_not_sent(
    monkeypatch: pytest.MonkeyPatch, takes_s: float, begun: int
) -> None:
    now_s = 0.0
    complete = OpenAIServer.complete

    async def slowly(*arguments: Any) -> None:
        nonlocal now_s
        await complete(*arguments)
        now_s += takes_s

    monkeypatch.setattr(OpenAIServer, "complete", slowly)
    monkeypatch.setattr("tideserve.load.client.monotonic_s", lambda: now_s)
    with fake_openai() as server:
        requests = [request() for _ in range(12)]
        records = await run(job([server.url], requests, concurrency=1, timeout_s=10.0))
    assert [record.outcome for record in records] == [RequestOutcome.COMPLETED] * begun


async def test_a_frozen_server_ends_with_the_deadline_and_a_closed_port_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as frozen, refusing_address() as closed:
        url = f"http://127.0.0.1:{frozen.getsockname()[1]}"
        (late,) = await run(job([url], [request()], timeout_s=0.5))
        (refused,) = await run(job([f"http://{closed}"], [request()], timeout_s=60.0))
    assert late.outcome is refused.outcome is RequestOutcome.FAILED
    assert "not finished" in late.error and "not finished" not in refused.error


def test_requests_come_from_another_process() -> None:
    shown: list[str] = []
    with fake_openai() as server:
        requests = [request(arrival_s=0.1), request()]
        records = run_job(job([server.url], requests), shown.append)
    assert [record.outcome for record in records] == [RequestOutcome.COMPLETED] * 2
    assert records[0].due_s < records[1].due_s
    assert shown[0] == "0/2"


def test_the_death_of_a_load_generator_is_reported() -> None:
    with pytest.raises(SystemUnavailable, match="the load generator ended with 1"):
        run_job(job(["http://[broken"], [request()]), lambda line: None)
