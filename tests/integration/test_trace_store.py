"""Traces of a real cluster, read back from a third-party trace store."""

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.common.tracing import TraceContext
from tests.support.client import prompt_of
from tests.support.cluster import Cluster
from tests.support.tiny_models import make_tiny_model
from tests.support.trace_store import TraceStore, trace_store
from tests.support.waiting import eventually
from tideserve.cli.groups import drop, restore

# The store alone may take two minutes to start on a busy machine.
pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(600)]
STREAMS = 6
CHANGE = "change of groups"
REQUEST_SPANS = {"parse", "tokenise", "queue", "wait", "prefill", "decode"}
CHANGE_SPANS = {CHANGE: 1, "decide": 1, "prepare": 2, "commit": 1, "apply": 2, "exchange": 1}


@pytest.fixture(scope="module")
def store() -> Iterator[TraceStore]:
    program = trace_store(fetch="FETCH_TRACE_STORE" in os.environ)
    if program is None:
        pytest.skip("no trace store is installed; `make trace-store-test` fetches one")
    with TraceStore(program) as running:
        yield running


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, store: TraceStore) -> Iterator[Cluster]:
    folder: Path = make_tiny_model(tmp_path_factory.mktemp("model"), seed=3, layers=4)
    # By OpenTelemetry's standard environment variable.
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": store.endpoint}
    with Cluster(
        model_dir=folder,
        memory="16MiB",
        chunk_size="64KiB",
        overload_policy="recompute",
        environment=environment,
    ) as running:
        yield running


def new_caller() -> TraceContext:
    return TraceContext(os.urandom(16).hex(), os.urandom(8).hex(), sampled=True)


async def stream(
    http: httpx.AsyncClient, model: str, number: int, going: asyncio.Event, max_tokens: int
) -> tuple[TraceContext, str]:
    """A streamed completion in a new trace; `going` is set at its tenth event."""
    caller, events = new_caller(), 0
    body = {
        "model": model,
        "prompt": prompt_of(number, 16),
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    headers = {"traceparent": caller.traceparent, "x-request-id": f"mine-{number}"}
    async with http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["x-request-id"] == f"mine-{number}"
        async for line in answer.aiter_lines():
            events += line.startswith("data:")
            if events == 10:
                going.set()
    going.set()
    return caller, f"mine-{number}"


def root_of(spans: list[dict[str, Any]], parent: str | None) -> dict[str, Any]:
    (root,) = [span for span in spans if span["parent_id"] == parent]
    assert {span["parent_id"] for span in spans if span is not root} <= {root["context"]["span_id"]}
    return root


async def test_traces_of_requests_and_changes_are_complete(
    cluster: Cluster, store: TraceStore
) -> None:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=240) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        begun = [asyncio.Event() for _ in range(STREAMS)]
        streams = [
            asyncio.create_task(stream(http, model, number, begun[number], 400))
            for number in range(STREAMS)
        ]
        await asyncio.gather(*(process.wait() for process in begun))
        await asyncio.to_thread(drop, cluster.admin_url, None, [])
        asked = await asyncio.gather(*streams)
        await asyncio.to_thread(restore, cluster.admin_url, None, None)

    def changes() -> list[dict[str, Any]]:
        return [span for span in store.spans() if span["name"] == CHANGE]

    def requests() -> list[dict[str, Any]]:
        return [span for span in store.spans() if span["name"] == f"text_completion {model}"]

    await eventually(lambda: len(changes()) == 2, interval_s=1.0)
    await eventually(lambda: len(requests()) == STREAMS, interval_s=1.0)

    epochs = set()
    for change in changes():
        spans = store.trace(change["context"]["trace_id"])
        assert Counter(span["name"] for span in spans) == CHANGE_SPANS
        root = root_of(spans, None)
        epochs.add(root["attributes"]["tideserve.change.epoch"])
        assert root["attributes"]["tideserve.change.cause"] == "manual"
        assert all(span["status_code"] == "UNSET" for span in spans)

    moved_to = []
    for caller, request_id in asked:
        spans = store.trace(caller.trace_id)
        root = root_of(spans, caller.span_id)
        assert {span["name"] for span in spans if span is not root} == REQUEST_SPANS
        attributes = root["attributes"]
        assert attributes["tideserve.request.id"] == request_id
        assert attributes["gen_ai.usage.output_tokens"] == 400
        sources = {span["attributes"].get("tideserve.times_from") for span in spans}
        assert "gateway" not in sources, "every worker has reported its times"
        moved_to += [
            event["attributes"]["tideserve.epoch"]
            for event in root["events"]
            if event["name"] == "moved"
        ]
        # Where the store displays prompts.
        assert "input.value" not in attributes
    assert moved_to, "nothing has moved"
    assert set(moved_to) <= epochs, "each move names the change that made it"
