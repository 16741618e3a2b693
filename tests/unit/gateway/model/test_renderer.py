"""Templates are rendered in a separate process that no template can crash or block."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest

from services.common.child import Child
from services.gateway.model import renderer as renderer_module
from services.gateway.model.renderer import (
    SENT_MAX,
    PromptTooLong,
    TemplateRenderer,
    render_request,
)
from services.gateway.vocabulary.errors import BadRequest, QueueFull, ServiceUnavailable
from tests.support.waiting import eventually

OWNER = "alice"
# Harmless except for a message that names a harm.
SOURCE = """{{ bos_token }}{% set text = messages[0].content %}
{% set ns = namespace(x='aaaaaaaa') %}
{% if text == 'loop' %}
{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}
{% elif text == 'double' %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}
{% elif text == 'pad' %}{{ 'x'.ljust(4000000000) }}
{% elif text == 'shout' %}{{ raise_exception(text[0] * 90000000) }}
{% elif text == 'refuse' %}{{ raise_exception('never') }}
{% endif %}
{{ text }}"""


def fields(content: str, **more: Any) -> dict[str, Any]:
    """Arguments of `ChatTemplate.render`."""
    return {"messages": [{"role": "user", "content": content}], **more}


def request(content: str, bytes_max: int = 1000) -> bytes:
    """A request to render a message."""
    return render_request(fields(content), bytes_max)


@pytest.fixture
async def renderer(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TemplateRenderer]:
    """A renderer of `SOURCE`; its time limit is long, as test machines are busy."""
    monkeypatch.setattr(renderer_module, "RENDER_TIMEOUT_S", 120)
    made = TemplateRenderer(SOURCE, {"bos_token": "<s>"})
    yield made
    await made.close()


async def started(renderer: TemplateRenderer) -> Child:
    """The process, after it has rendered a chat."""
    await renderer.render(request(""), OWNER)
    assert renderer._short._process is not None
    return renderer._short._process._pipes.process


@pytest.mark.parametrize("text", ["hi", "日本語 \U0001f30a\n", "", "lone \ud800"])
async def test_rendered_texts_arrive_unchanged(renderer: TemplateRenderer, text: str) -> None:
    assert await renderer.render(request(text), OWNER) == f"<s>{text}"


async def test_a_refusal_is_the_clients_error(renderer: TemplateRenderer) -> None:
    with pytest.raises(BadRequest, match="refuses these messages: never") as caught:
        await renderer.render(request("refuse"), OWNER)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("harm", "reason"),
    [("loop", "too long"), ("double", "memory"), ("pad", "memory")],
)
async def test_a_harmful_chat_is_refused_and_the_next_is_rendered(
    renderer: TemplateRenderer, harm: str, reason: str
) -> None:
    harmful = asyncio.create_task(renderer.render(request(harm), "mallory"))
    await asyncio.sleep(0)
    following = asyncio.create_task(renderer.render(request("hi"), OWNER))

    with pytest.raises(BadRequest, match=reason) as caught:
        await harmful
    assert caught.value.param == "messages"
    assert await following == "<s>hi"
    assert renderer._short._process is not None and renderer._short._process.usable


async def test_a_long_prompt_stays_in_the_process(renderer: TemplateRenderer) -> None:
    assert len(await renderer.render(request("é" * 498), OWNER)) == 501
    with pytest.raises(PromptTooLong) as caught:
        await renderer.render(request("é" * 499), OWNER)
    assert caught.value.size_bytes == 1001
    large = "x" * 2**21
    assert (await renderer.render(request(large, 2**22), OWNER)).endswith(large)


async def test_waiting_ends_at_the_time_limit(
    renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await renderer.render(request(""), OWNER)
    monkeypatch.setattr(renderer_module, "RENDER_TIMEOUT_S", 0.2)
    harmful = [asyncio.create_task(renderer.render(request("loop"), OWNER)) for _ in range(2)]

    for task in harmful:
        with pytest.raises(QueueFull, match="try again"):
            await task


async def test_an_owner_with_many_slow_chats_delays_its_own(renderer: TemplateRenderer) -> None:
    slow = [asyncio.create_task(renderer.render(request("loop"), "mallory")) for _ in range(9)]
    await asyncio.sleep(0)

    assert await renderer.render(request("hi"), OWNER) == "<s>hi"

    assert sum(task.done() for task in slow) <= 2
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


async def test_a_cancelled_caller_leaves_the_responses_in_order(renderer: TemplateRenderer) -> None:
    await renderer.render(request(""), OWNER)
    leaving = asyncio.create_task(renderer.render(request("left"), OWNER))
    await asyncio.sleep(0)
    assert renderer._short._semaphore.taken == 1
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving

    assert await renderer.render(request("hi"), OWNER) == "<s>hi"


async def test_a_process_that_ended_is_replaced(renderer: TemplateRenderer) -> None:
    await renderer.render(request(""), OWNER)
    assert renderer._short._process is not None
    os.kill(renderer._short._process._pipes.process.pid, signal.SIGKILL)
    await renderer._short._process._pipes.process.wait()

    assert await renderer.render(request("hi"), OWNER) == "<s>hi"


async def test_a_chat_is_retried_in_the_next_process(
    renderer: TemplateRenderer,
) -> None:
    process = await started(renderer)
    os.killpg(process.pid, signal.SIGSTOP)
    chats = [asyncio.create_task(renderer.render(request(text), OWNER)) for text in "abc"]
    await eventually(lambda: renderer._short._semaphore.taken == 3)
    os.killpg(process.pid, signal.SIGKILL)

    assert await asyncio.gather(*chats) == ["<s>a", "<s>b", "<s>c"]


async def test_a_process_that_does_not_respond_is_replaced(renderer: TemplateRenderer) -> None:
    process = await started(renderer)
    assert renderer._short._process is not None
    renderer._short._process._response_s = 0.2
    os.killpg(process.pid, signal.SIGSTOP)

    assert await renderer.render(request("hi"), OWNER) == "<s>hi"


async def test_the_end_of_a_killed_renderer_is_logged_with_its_signal(
    renderer: TemplateRenderer, caplog: pytest.LogCaptureFixture
) -> None:
    process = await started(renderer)
    (fork,) = psutil.Process(process.pid).children()
    fork.kill()

    await process.wait()
    assert await renderer.render(request("hi"), OWNER) == "<s>hi"
    assert "ended with code 137" in caplog.text


async def test_a_chat_fails_if_every_process_ends(
    renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renderer_module, "_MODULE", "services.gateway.missing")
    with pytest.raises(ServiceUnavailable, match="ended with code 1; try again"):
        await renderer.render(request("hi"), OWNER)


async def test_chats_are_sent_ahead_of_responses(renderer: TemplateRenderer) -> None:
    process = await started(renderer)
    os.killpg(process.pid, signal.SIGSTOP)
    texts = [f"{number}" for number in range(80)]
    chats = [
        asyncio.create_task(renderer.render(request(text), f"client {number % 4}"))
        for number, text in enumerate(texts)
    ]
    await eventually(lambda: renderer._short._semaphore.taken == SENT_MAX)
    os.killpg(process.pid, signal.SIGCONT)

    assert await asyncio.gather(*chats) == [f"<s>{text}" for text in texts]


async def test_slow_chats_of_many_clients_delay_no_other(renderer: TemplateRenderer) -> None:
    slow = [
        asyncio.create_task(renderer.render(request("loop"), f"mallory {number}"))
        for number in range(12)
    ]
    await asyncio.sleep(0)

    assert await renderer.render(request("hi"), OWNER) == "<s>hi"

    # Each takes a second of processor time.
    assert sum(task.done() for task in slow) < 6
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


async def test_a_long_refusal_is_cut(renderer: TemplateRenderer) -> None:
    with pytest.raises(BadRequest, match="refuses these messages: sss") as caught:
        await renderer.render(request("shout"), OWNER)
    assert len(caught.value.message) < 400


async def test_the_process_has_no_keys_in_its_environment(
    renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDESERVE__API_KEYS", "secret")
    process = await started(renderer)
    environment = psutil.Process(process.pid).environ()
    assert "PATH" in environment
    assert "TIDESERVE__API_KEYS" not in environment


def test_too_deeply_nested_arguments_are_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"a": deep}
    with pytest.raises(BadRequest, match="nested too deeply"):
        render_request({"messages": [deep]}, 1)


async def test_the_process_starts_ahead_of_requests_and_ends_with_the_gateway(
    renderer: TemplateRenderer,
) -> None:
    running = asyncio.create_task(renderer.run(delay_s=0))
    process = await eventually(lambda: renderer._short._process)
    assert process is not None and process.usable
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not process.usable
