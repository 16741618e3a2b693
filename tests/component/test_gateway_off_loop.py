"""Log probabilities of long prompts do not block the gateway's event loop."""

import threading
from typing import Any

import pytest

from services.core.request import PROMPT_LOGPROBS_MAX
from services.gateway.cluster import translate_worker
from services.gateway.grpc import translate
from services.gateway.http.logprobs import LogprobFormat
from tests.support.gateway import Case

PROMPT = "x" * 1500
MANY = 100


pytestmark = pytest.mark.gateway(max_model_len=2000)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[bool]]:
    """By operation on many log probabilities: whether it ran on the event loop."""
    on_loop: dict[str, set[bool]] = {}

    def noted(place: Any, name: str) -> None:
        original = getattr(place, name)

        def note(*arguments: Any) -> Any:
            if any(len(argument) > MANY for argument in arguments if hasattr(argument, "__len__")):
                here = threading.current_thread() is threading.main_thread()
                on_loop.setdefault(name, set()).add(here)
            return original(*arguments)

        monkeypatch.setattr(place, name, note)

    noted(translate_worker._Logprobs, "__iter__")
    noted(LogprobFormat, "prompt")
    noted(LogprobFormat, "completion")
    noted(translate, "logprobs")
    return on_loop


async def test_prompt_logprobs_over_http_are_read_and_written_off_the_loop(
    case: Case, threads: dict[str, set[bool]]
) -> None:
    await case.complete(prompt=PROMPT, prompt_logprobs=20, max_tokens=2)
    assert threads == {"__iter__": {False}, "prompt": {False}}
    threads.clear()
    echo = {"prompt": PROMPT, "echo": True, "logprobs": 5, "max_tokens": 2}
    await case.complete(**echo)
    assert threads == {"__iter__": {False}, "completion": {False}}
    threads.clear()
    answer = await case.complete(**echo, stream=True)
    assert "[DONE]" in answer.text
    assert threads == {"__iter__": {False}, "completion": {False}}
    threads.clear()
    chat = await case.chat(
        messages=[{"role": "user", "content": PROMPT}], prompt_logprobs=20, max_tokens=2
    )
    assert len(chat.json()["prompt_logprobs"]) > len(PROMPT)
    assert threads == {"__iter__": {False}, "prompt": {False}}


async def test_prompt_logprobs_over_grpc_are_read_and_written_off_the_loop(
    case: Case, threads: dict[str, set[bool]]
) -> None:
    options = {"model": "m", "max_tokens": 2}
    whole = await case.grpc.complete(PROMPT, prompt_logprobs=20, **options)
    assert len(whole.choices[0].prompt_logprobs) == len(PROMPT) - 1
    assert threads == {"__iter__": {False}, "logprobs": {False}}
    threads.clear()
    await case.grpc.chat(PROMPT, prompt_logprobs=20, **options)
    assert threads == {"__iter__": {False}, "logprobs": {False}}
    threads.clear()
    async with case.grpc.stream_complete(PROMPT, echo=True, logprobs=5, **options) as stream:
        pieces = [piece async for piece in stream]
    assert len(pieces[0].prompt_logprobs) == len(PROMPT) - 1
    assert threads == {"__iter__": {False}, "logprobs": {False}}


async def test_the_total_of_prompt_logprobs_is_bounded(case: Case) -> None:
    few = {"prompt": ["x" * 1900] * 3, "prompt_logprobs": 20, "max_tokens": 1}
    assert (await case.complete(**few)).status_code == 200
    # 119,700 numbers, below the limit of 131,072, which two choices exceed.
    many = few | {"n": 2}
    answer = await case.complete(**many)
    assert answer.status_code == 400
    assert str(PROMPT_LOGPROBS_MAX) in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "prompt_logprobs"
