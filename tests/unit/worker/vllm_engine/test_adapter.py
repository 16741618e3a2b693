"""The frames of a servicer, answered by way of vLLM."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from services.core.planner.events import EmitToken, RefuseRequest
from services.core.report import OtherRoom
from services.core.request import (
    FinishReason,
    Grammar,
    GrammarKind,
    Limits,
    LogprobOptions,
    Request,
    Sampling,
)
from services.core.service import Service, ServiceClass
from services.worker.ipc import (
    AbortRequest,
    ApplyConfiguration,
    GroupPlan,
    Lane,
    MemberPlan,
    Prepare,
    Prepared,
    RequestTimes,
    ReturnRequests,
    StartRequest,
)
from services.worker.vllm_engine.adapter import CANNOT_MERGE, SILENT_AFTER_S
from services.worker.vllm_engine.arguments import priority_of
from services.worker.vllm_engine.running import STEPS_TO_START
from tests.support.fake_async_llm import (
    AdapterOnTest,
    Dead,
    FakeCompletion,
    FakeLogprob,
    FakeMetrics,
    FakeOutput,
    Invalid,
    Transient,
    output,
)
from tests.support.waiting import eventually


@pytest.fixture
async def adapter() -> AsyncIterator[AdapterOnTest]:
    running = AdapterOnTest(max_waiting=2)
    yield running
    await running.close()


def start(name: str = "r", **changes: Any) -> StartRequest:
    fields: dict[str, Any] = {"sampling": Sampling(temperature=0), "limits": Limits(8)}
    return StartRequest(Request(name, (1, 2, 3), arrival_s=0.0, **(fields | changes)))


def tokens(adapter: AdapterOnTest) -> list[EmitToken]:
    return [token for frame in adapter.progress for token in frame.tokens]


def refusals(adapter: AdapterOnTest) -> list[RefuseRequest]:
    return [refusal for frame in adapter.progress for refusal in frame.refusals]


async def test_a_request_runs_to_its_end(adapter: AdapterOnTest) -> None:
    adapter.send(start(cache_salt="of a"))
    progress = await adapter.until_received("r")
    assert (progress.report.load.waiting, progress.report.load.running) == (1, 0)
    assert progress.report.parameter_bytes == 500
    prompt, parameters = adapter.llm.given["r"]
    assert prompt == {"type": "token", "prompt_token_ids": [1, 2, 3], "cache_salt": "of a"}
    assert parameters["max_tokens"] == 8
    adapter.stats.running = 1
    adapter.llm.emit("r", output(5), output(6, ended="stop"))
    await eventually(lambda: len(tokens(adapter)) == 2)
    assert tokens(adapter)[-1] == EmitToken("r", 1, 6, FinishReason.STOP)
    (last,) = [frame for frame in adapter.progress if frame.times]
    assert last.times == {"r": RequestTimes(2.0, 4.0, 8.0)}
    assert (last.report.load.running, last.report.load.kv_blocks_free) == (0, 40)


async def test_a_worker_that_shuts_down_returns_requests_that_fit_elsewhere(
    adapter: AdapterOnTest,
) -> None:
    grammar = Sampling(grammar=Grammar(GrammarKind.REGEX, "a*"))
    adapter.send(start("plain", resumable=True))
    adapter.send(start("grammar", resumable=True, sampling=grammar))
    await adapter.until_received("plain", "grammar")
    adapter.stats.running = 2
    for name in ("plain", "grammar"):
        adapter.llm.emit(name, output(5))
    await eventually(lambda: len(tokens(adapter)) == 2)
    adapter.send(ReturnRequests(OtherRoom(100, (100,))))
    await eventually(lambda: refusals(adapter))
    (refusal,) = refusals(adapter)
    assert (refusal.request_id, refusal.returned, refusal.leaving) == ("plain", True, True)
    await eventually(lambda: adapter.llm.aborted == ["plain"])


async def test_the_priority_of_a_request_reaches_vllm(adapter: AdapterOnTest) -> None:
    services = {"b": Service(ServiceClass.BATCH), "i": Service(ServiceClass.INTERACTIVE, rank=7)}
    for name, service in services.items():
        adapter.send(start(name, service=service))
        await adapter.until_received(name)
    await eventually(lambda: len(adapter.llm.priorities) == 2)
    wanted = {name: priority_of(service) for name, service in services.items()}
    assert adapter.llm.priorities == wanted and wanted["i"] < wanted["b"]


async def test_a_request_goes_on_after_the_output_of_another_worker(
    adapter: AdapterOnTest,
) -> None:
    adapter.send(start(output_ids=(7, 8)))
    await adapter.until_received("r")
    prompt, parameters = adapter.llm.given["r"]
    assert prompt["prompt_token_ids"] == [1, 2, 3, 7, 8]
    assert parameters["max_tokens"] == 6
    adapter.llm.emit("r", output(5))
    await eventually(lambda: tokens(adapter))
    assert tokens(adapter) == [EmitToken("r", 2, 5, None)]


async def test_tokens_of_a_step_are_sent_in_a_single_frame(adapter: AdapterOnTest) -> None:
    for name in ("a", "b"):
        adapter.send(start(name))
    await adapter.until_received("a", "b")
    for number in range(3):
        before = len(tokens(adapter))
        for name in ("a", "b"):
            adapter.llm.emit(name, output(number))
        await eventually(lambda count=before: len(tokens(adapter)) == count + 2)
    assert all(len(frame.tokens) in (0, 2) for frame in adapter.progress)


async def test_an_abort_reaches_vllm_and_the_id_may_come_again(adapter: AdapterOnTest) -> None:
    adapter.send(start())
    await adapter.until_received("r")
    adapter.send(AbortRequest("r"))
    await eventually(lambda: adapter.llm.aborted == ["r"])
    assert (await adapter.settled()).report.load.waiting == 0
    del adapter.socket.received[:]
    adapter.send(start())
    await adapter.until_received("r")
    adapter.llm.emit("r", output(9, ended="length"))
    await eventually(lambda: tokens(adapter) == [EmitToken("r", 0, 9, FinishReason.LENGTH)])


async def test_an_abort_at_once_leaves_nothing(adapter: AdapterOnTest) -> None:
    """Before its task has run."""
    adapter.send(start())
    adapter.send(AbortRequest("r"))
    await adapter.until_received("r")
    assert (await adapter.settled()).report.load.waiting == 0


async def test_a_validation_error_of_vllm_is_a_client_error(adapter: AdapterOnTest) -> None:
    adapter.send(start("words", sampling=Sampling(bad_words=((4,),))))
    adapter.send(start("schema"))
    await adapter.until_received("words", "schema")
    adapter.llm.emit("schema", Invalid("the grammar has no start"))
    await eventually(lambda: len(refusals(adapter)) == 2)
    message, schema = refusals(adapter)
    assert "logit_bias" in message.message and not message.retryable
    assert schema == RefuseRequest("schema", "the grammar has no start")
    assert (await adapter.settled()).report.load.waiting == 0


async def test_an_internal_error_of_vllm_is_retryable(adapter: AdapterOnTest) -> None:
    for name in ("a", "b"):
        adapter.send(start(name))
    await adapter.until_received("a", "b")
    # As `EngineGenerateError`, which has no text of its own.
    adapter.llm.emit("a", output(5), Transient())
    adapter.llm.emit("b", output(5, ended="error"))
    await eventually(lambda: len(refusals(adapter)) == 2)
    assert all(refusal.retryable and not refusal.returned for refusal in refusals(adapter))
    assert {refusal.request_id: refusal.message for refusal in refusals(adapter)} == {
        "a": "the request failed in vLLM; retry",
        "b": "the request failed in vLLM (finish reason 'error'); retry",
    }
    assert [token.request_id for token in tokens(adapter)] == ["a"]


@pytest.mark.parametrize("broken", ["prompt rows", "no completion", "times", "in vLLM"])
async def test_an_unexpected_error_ends_a_single_request(
    adapter: AdapterOnTest, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    short: Any = [None, {2: FakeLogprob(-1.0, 1)}]
    outcomes: dict[str, FakeOutput | Exception] = {
        "prompt rows": FakeOutput([FakeCompletion([5])], short),
        "no completion": FakeOutput([]),
        "times": FakeOutput([FakeCompletion([5], "length")], metrics=cast(FakeMetrics, object())),
        "in vLLM": IndexError("list index out of range"),
    }
    adapter.send(start("a", logprobs=LogprobOptions(prompt=1)))
    adapter.send(start("b"))
    await adapter.until_received("a", "b")
    adapter.llm.emit("a", outcomes[broken])
    await eventually(lambda: refusals(adapter))
    (refusal,) = refusals(adapter)
    assert (refusal.request_id, refusal.retryable, refusal.returned) == ("a", True, False)
    assert adapter.llm.aborted == ([] if broken == "in vLLM" else ["a"])
    (logged,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "request a " in logged.getMessage() and logged.exc_info is not None
    adapter.llm.emit("b", output(7, ended="length"))
    await eventually(lambda: tokens(adapter) == [EmitToken("b", 0, 7, FinishReason.LENGTH)])
    assert (await adapter.settled()).report.load.waiting == 0


async def test_a_failed_request_is_aborted_in_vllm(adapter: AdapterOnTest) -> None:
    adapter.send(start())
    await adapter.until_received("r")
    adapter.llm.emit("r", output(5, ended="error"))
    await eventually(lambda: adapter.llm.aborted == ["r"])


async def test_a_full_queue_and_a_known_id_are_refused(adapter: AdapterOnTest) -> None:
    for name in ("a", "a", "b", "c"):
        adapter.send(start(name))
    await adapter.until_received("a", "b", "c")
    assert [(refusal.request_id, refusal.retryable) for refusal in refusals(adapter)] == [
        ("a", False),
        ("c", True),
    ]


async def test_a_request_without_room_is_returned(adapter: AdapterOnTest) -> None:
    adapter.send(start("a", returnable=True))
    adapter.send(start("b", returnable=True))
    await adapter.until_received("a", "b")
    adapter.stats.steps = STEPS_TO_START
    adapter.stats.running, adapter.stats.waiting = 1, 1
    adapter.now_s = 1.0
    await eventually(lambda: refusals(adapter))
    (refusal,) = refusals(adapter)
    assert (refusal.request_id, refusal.returned) == ("b", True)
    assert adapter.llm.aborted == ["b"]


async def test_vllm_serves_the_newest_epoch_and_refuses_merges(adapter: AdapterOnTest) -> None:
    def plan(worker_id: str, epoch: int) -> GroupPlan:
        member = MemberPlan(worker_id, "i", 0, 0, Lane("", ""), Lane("", ""), "h:1")
        return GroupPlan(f"group-{worker_id}", epoch, [member])

    adapter.send(ApplyConfiguration([plan("w0", 3)]))
    adapter.send(ApplyConfiguration([plan("w1", 9)]))
    adapter.send(Prepare("attempt", [plan("w0", 4)]))
    await eventually(
        lambda: Prepared("attempt", CANNOT_MERGE.format(name="vLLM")) in adapter.socket.received
    )
    report = (await adapter.settled()).report
    assert (report.epoch, report.unsettled) == (3, False)


async def test_it_says_nothing_while_vllm_does_not_answer(adapter: AdapterOnTest) -> None:
    await eventually(lambda: adapter.progress)
    adapter.llm.answers.clear()
    await eventually(lambda: adapter.llm.asked > 1)
    adapter.now_s += SILENT_AFTER_S + 1
    adapter.send(start())
    await eventually(lambda: "r" in adapter.llm.given)
    assert not any(frame.received for frame in adapter.progress), "the servicer shall notice"
    adapter.llm.answers.set()
    await adapter.until_received("r")


async def test_the_adapter_ends_with_vllm(adapter: AdapterOnTest) -> None:
    adapter.send(start())
    await adapter.until_received("r")
    adapter.llm.dead = True
    adapter.llm.emit("r", Dead())
    await asyncio.wait([adapter.running])
    failure = adapter.running.exception()
    assert isinstance(failure, ExceptionGroup) and failure.subgroup(Dead) is not None
