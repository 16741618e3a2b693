"""Grammars are checked in a separate process, and a bomb delays only its own owner."""

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.common.child import Child
from services.common.clock import monotonic_s
from services.common.message_pipes import MessagePipes
from services.common.messages import LENGTH, encode_message
from services.core.request import Grammar, GrammarKind
from services.gateway.structure import check_client as client_module
from services.gateway.structure import checker as checker_module
from services.gateway.structure.check_client import CheckClient
from services.gateway.structure.checker import (
    CLIENT_CHECKS_MAX,
    WAITING_MAX,
    GrammarChecker,
    _verdict_of_end,
)
from services.gateway.structure.schema import schema_text
from services.gateway.structure.structured_outputs import Structure
from services.gateway.vocabulary.errors import BadRequest, QueueFull, ServiceUnavailable
from tests.support.bad_inputs import BOMB, SLOW

OWNER = "alice"


@pytest.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    """A checker with two special tokens."""
    made = GrammarChecker(1000, {7: "<|end|>", 900: "<tool_call>"})
    yield made
    await made.close()


def of_schema(schema: dict[str, Any], lenient: bool = False) -> Structure:
    """A structure with that schema."""
    return Structure(
        Grammar(GrammarKind.JSON_SCHEMA, schema_text(schema, "p", lenient)), "response_format"
    )


def of_text(kind: GrammarKind, text: str) -> Structure:
    """A structure with that text."""
    return Structure(Grammar(kind, text), "guided_grammar")


async def running(checker: GrammarChecker) -> CheckClient:
    await checker.run(delay_s=0)
    assert checker._client is not None
    return checker._client


async def being_asked(checker: GrammarChecker) -> CheckClient:
    """Return once a check has started; only turns of the event loop are needed."""
    for _ in range(100):
        if checker._client is not None and checker._client._pending:
            return checker._client
        await asyncio.sleep(0)
    raise AssertionError("nothing is checked")


@pytest.mark.parametrize(
    "structure",
    [
        of_schema({"type": "object", "properties": {"next": {"$ref": "#"}}}),
        of_schema({"type": "array"}),
        of_schema({"type": "string", "pattern": "^(a+)+$"}),
        of_text(GrammarKind.REGEX, "(a+)+$"),
        of_text(GrammarKind.REGEX, "(a{1,1000}){1,1000}"),
        of_text(GrammarKind.LARK, 'start: "(" start ")" | "x"'),
        of_text(GrammarKind.LARK, "start: <tool_call> <[7]>"),
    ],
)
async def test_valid_grammars_are_unchanged(checker: GrammarChecker, structure: Structure) -> None:
    checked = await checker.check(structure, OWNER)

    assert checked.grammar == structure.grammar
    assert checked.ignored == ()


@pytest.mark.parametrize(
    ("structure", "reason"),
    [
        (of_schema({"type": "str"}), "Invalid type: str"),
        (of_schema({"not": {}}), r"enforced: \$\.not; correct"),
        (of_schema({"$ref": "#"}), r"enforced: \$\.\$ref refers to itself"),
        (of_schema({"enum": []}), "Unsatisfiable"),
        (of_text(GrammarKind.REGEX, "(a"), "unclosed group"),
        (of_text(GrammarKind.REGEX, "(" * 10_000 + ")" * 10_000), "cannot be enforced"),
        (of_text(GrammarKind.LARK, "start: b"), "unknown name"),
        (of_text(GrammarKind.LARK, "start: <nobody>"), "unknown special token"),
        (of_text(GrammarKind.LARK, "root ::= other"), "cannot be enforced"),
    ],
)
async def test_invalid_grammars_are_refused_with_a_reason(
    checker: GrammarChecker, structure: Structure, reason: str
) -> None:
    with pytest.raises(BadRequest, match=reason) as caught:
        await checker.check(structure, OWNER)

    assert caught.value.param == structure.param
    assert "\n" not in caught.value.message and len(caught.value.message) < 400


async def test_unenforced_keywords_are_reported(checker: GrammarChecker) -> None:
    checked = await checker.check(
        of_schema({"type": "array", "uniqueItems": True}, lenient=True), OWNER
    )

    assert checked.ignored == ("$.uniqueItems",)


async def test_a_strict_schema_is_refused_with_all_unenforced_keywords(
    checker: GrammarChecker,
) -> None:
    items = {"type": "string", "pattern": "(?=a)b"}
    schema = {"type": "array", "items": items, "uniqueItems": True, "contains": {"const": "b"}}
    with pytest.raises(BadRequest) as strict:
        await checker.check(of_schema(schema), OWNER)
    lenient = await checker.check(of_schema(schema, lenient=True), OWNER)

    assert len(lenient.ignored) == 3
    assert f"cannot be enforced: {'; '.join(lenient.ignored)}; correct" in strict.value.message


async def test_ebnf_is_converted_to_lark(checker: GrammarChecker) -> None:
    checked = await checker.check(of_text(GrammarKind.LARK, 'root ::= ("a" | "b")+'), OWNER)
    again = await checker.check(Structure(checked.grammar, "guided_grammar"), OWNER)

    assert "::=" not in checked.grammar.text
    assert again.grammar == checked.grammar


async def test_a_bomb_is_refused_without_delaying_other_checks(checker: GrammarChecker) -> None:
    async def refused(structure: Structure) -> str:
        with pytest.raises(BadRequest) as caught:
            await checker.check(structure, OWNER)
        return caught.value.message

    good = of_schema({"type": "integer"})
    bombs = [of_schema(SLOW | {"title": str(n)}) for n in range(3)]
    messages, checked = await asyncio.gather(
        asyncio.gather(*map(refused, bombs)), checker.check(good, OWNER)
    )

    assert all("takes too long to compile" in message for message in messages)
    assert checked.grammar == good.grammar


def of_tool(number: int, properties: dict[str, Any]) -> Structure:
    """The argument grammar of a tool."""
    text = schema_text({"type": "object", "properties": properties}, "tools", lenient=True)
    return Structure(Grammar(GrammarKind.JSON_SCHEMA, text), "tools", f"tool {number}")


async def test_each_tool_has_its_own_time_limit(checker: GrammarChecker) -> None:
    tools = [
        of_tool(
            number,
            {
                "tags": {"type": "array", "uniqueItems": True},
                "code": {"type": "string", "pattern": f"^{number}[a-z]+$"},
                "link": {"type": "string", "format": "uri"},
                f"either{number}": {"oneOf": [{"type": "integer"}, {"type": "object"}]},
            },
        )
        for number in range(128)
    ]
    checked = await checker.check_all(tools, OWNER)
    assert [grammar.ignored for grammar in checked] == [
        (f"tool {number}, $.properties.tags.uniqueItems",) for number in range(128)
    ]


async def test_an_error_names_the_tool_that_takes_too_long(checker: GrammarChecker) -> None:
    tools = [of_tool(number, {}) for number in range(4)]
    tools[2] = of_tool(2, {"a": SLOW})
    with pytest.raises(BadRequest, match="enforced: tool 2, it takes too long to compile; "):
        await checker.check_all(tools, OWNER)


@pytest.mark.parametrize(
    ("ended_by", "reason"),
    [
        (signal.SIGPROF, "too long to compile"),
        (signal.SIGXCPU, "too long to compile together"),
        (signal.SIGABRT, "too much memory to compile"),
        (signal.SIGSEGV, "too much memory to compile"),
    ],
)
def test_exit_of_the_process_determines_the_error(ended_by: int, reason: str) -> None:
    error = _verdict_of_end(-ended_by).error
    assert error is not None and reason in error


def test_failures_of_the_process_are_not_cached() -> None:
    with pytest.raises(ServiceUnavailable, match="ended with code -9; try again"):
        _verdict_of_end(-signal.SIGKILL)


async def test_bombs_do_not_change_the_process(checker: GrammarChecker) -> None:
    await checker.run(delay_s=0)
    client = checker._client
    for bomb in (BOMB, BOMB | {"title": "another"}):
        with pytest.raises(BadRequest):
            await checker.check(of_schema(bomb), OWNER)
    await checker.check(of_schema({"type": "integer"}), OWNER)

    assert client is not None and checker._client is client and client.usable


async def test_a_cancelled_caller_returns_at_once_and_frees_its_place(
    checker: GrammarChecker,
) -> None:
    await checker.run(delay_s=0)
    leaving = asyncio.create_task(checker.check(of_schema(BOMB), OWNER))
    client = await being_asked(checker)
    (answer,) = client._pending.values()
    leaving.cancel()
    await asyncio.sleep(0)
    assert leaving.done() and checker._semaphore.taken == 1
    assert (await answer)["ended"] == -signal.SIGKILL
    assert checker._semaphore.taken == 0 and not client._pending
    assert checker._client is client and client.usable


async def test_cancelling_at_a_stopped_process_ends_no_other_check(
    checker: GrammarChecker,
) -> None:
    client = await running(checker)
    os.kill(client._pipes.process.pid, signal.SIGSTOP)
    bombs = [of_schema(BOMB | {"title": str(number)}) for number in range(8)]
    leaving = [
        asyncio.create_task(checker.check(bomb, f"m{i % 4}")) for i, bomb in enumerate(bombs)
    ]
    staying = asyncio.create_task(checker.check(of_schema({"type": "integer"}), OWNER))
    await being_asked(checker)
    for task in leaving:
        task.cancel()
    await asyncio.wait(leaving)
    os.kill(client._pipes.process.pid, signal.SIGCONT)
    assert json.loads((await staying).grammar.text)["type"] == "integer"
    assert checker._client is client and client.usable


async def test_a_process_that_ignores_a_cancel_is_killed(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "STUCK_S", 0.01)
    client = await running(checker)
    os.kill(client._pipes.process.pid, signal.SIGSTOP)
    asked = client.submit([Grammar(GrammarKind.REGEX, "b")])
    client.cancel(asked)
    with pytest.raises(ServiceUnavailable, match="ended with code -9"):
        await asked.result
    assert not client.usable


async def test_an_abandoned_check_reports_no_unhandled_error(
    checker: GrammarChecker,
) -> None:
    errors = list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    await checker.run(delay_s=0)
    leaving = asyncio.create_task(checker.check(of_schema(BOMB), OWNER))
    client = await being_asked(checker)
    os.kill(client._pipes.process.pid, signal.SIGSTOP)
    leaving.cancel()
    await asyncio.wait([leaving])
    await client.close()
    checker._client = None
    del client, leaving
    gc.collect()
    await asyncio.sleep(0)
    assert not errors and checker._semaphore.taken == 0


async def test_a_process_that_has_ended_is_not_killed_again(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await running(checker)
    os.kill(client._pipes.process.pid, signal.SIGKILL)
    await client._ending
    killed = list[int]()
    monkeypatch.setattr(os, "killpg", lambda pid, _: killed.append(pid))
    await checker.close()
    assert not killed, "another process may have its id"


def message_about(grammars: int, patched: str) -> dict[str, Any]:
    """The first message of a process running `patched` about a check of this many grammars."""
    code = (
        "import time; from services.gateway.structure import check_process as tested;"
        f"{patched}; tested.main()"
    )
    command, pipe = (sys.executable, "-c", code), subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(encode_message({"vocab_size": 300, "special": {}}))
        texts = [(GrammarKind.REGEX, "a")] * grammars
        process.stdin.write(encode_message({"number": 5, "grammars": texts}))
        process.stdin.flush()
        (length,) = LENGTH.unpack(process.stdout.read(LENGTH.size))
        message: dict[str, Any] = json.loads(process.stdout.read(length))
        process.stdin.close()
    return message


def test_a_check_without_cpu_time_times_out() -> None:
    message = message_about(1, "tested.WALL_MAX_S = 0.01; tested.check = lambda *_: time.sleep(60)")
    assert message == {"number": 5, "results": [], "ended": -signal.SIGALRM}


def test_all_grammars_of_a_check_share_a_time_limit() -> None:
    # Each takes 0.1 s of processor time. The limit of a single grammar is out of reach, since the
    # kernel counts processor time in ticks.
    busy = "all(time.process_time() < end for _ in iter(int, 1))"
    patched = (
        "tested.CPU_MAX_S = 60;"
        f"tested.check = lambda *_: [{busy} for end in [time.process_time() + 0.1]]"
    )
    message = message_about(30, patched)
    assert message["ended"] == -signal.SIGXCPU
    assert 1 < len(message["results"]) < 30


async def test_a_process_that_dies_at_its_start_is_restarted(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = CheckClient.start, list[CheckClient]()

    async def dying_once(greeting: bytes) -> CheckClient:
        client = await start(greeting)
        if not started:
            os.killpg(client._pipes.process.pid, signal.SIGKILL)
        started.append(client)
        return client

    monkeypatch.setattr(CheckClient, "start", dying_once)
    await checker.run(delay_s=0)
    assert len(started) == 2
    assert checker._client is started[1] and started[1].usable


async def test_an_ended_process_is_replaced(checker: GrammarChecker) -> None:
    await checker.run(delay_s=0)
    asked = asyncio.create_task(checker.check(of_schema(BOMB), OWNER))
    client = await being_asked(checker)
    os.kill(client._pipes.process.pid, signal.SIGKILL)
    with pytest.raises(ServiceUnavailable, match="ended with code -9; try again"):
        await asked

    checked = await checker.check(of_schema({"type": "integer"}), OWNER)
    assert json.loads(checked.grammar.text)["type"] == "integer"


async def test_the_verdict_on_a_bomb_is_cached(checker: GrammarChecker) -> None:
    times = []
    for _ in range(2):
        began_s = monotonic_s()
        with pytest.raises(BadRequest):
            await checker.check(of_schema(BOMB), OWNER)
        times.append(monotonic_s() - began_s)

    assert times[1] < times[0] / 2


async def test_cached_verdicts_are_bounded(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker_module, "VERDICTS_MAX", 5)
    for count in range(9):
        await checker.check(of_text(GrammarKind.REGEX, f"a{{{count}}}"), OWNER)

    assert len(checker._verdicts) == 5


async def test_the_checker_works_after_a_cancelled_caller(checker: GrammarChecker) -> None:
    tasks = [asyncio.create_task(checker.check(of_schema(BOMB), OWNER)) for _ in range(4)]
    await asyncio.sleep(0.1)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

    checked = await checker.check(of_schema({"type": "integer"}), OWNER)

    assert json.loads(checked.grammar.text)["type"] == "integer"


async def test_an_owner_with_many_bombs_delays_only_itself(checker: GrammarChecker) -> None:
    bombs = [of_schema(BOMB | {"title": str(number)}) for number in range(WAITING_MAX + 10)]
    loud = [asyncio.create_task(checker.check(bomb, "mallory")) for bomb in bombs]
    await asyncio.sleep(0)
    checked = await checker.check(of_schema({"type": "integer"}), OWNER)
    assert json.loads(checked.grammar.text)["type"] == "integer"
    done = [task for task in loud if task.done()]
    assert len(done) < 20, "its owner did not wait behind them"
    refused = [task for task in done if isinstance(task.exception(), QueueFull)]
    assert len(refused) == 10 - CLIENT_CHECKS_MAX
    for task in loud:
        task.cancel()
    await asyncio.gather(*loud, return_exceptions=True)


class Broken(asyncio.WriteTransport):
    """A pipe whose other end is closed, as uvloop reports it."""

    def write(self, data: object) -> None:
        raise RuntimeError("the handler is closed")

    def close(self) -> None:
        pass


async def test_a_process_that_dies_at_its_start_fails_only_pending_checks() -> None:
    process = Child(("true",), new_session=True)
    pipes = MessagePipes(process)
    pipes._input = Broken()
    pipes.connection_lost(None)
    client = CheckClient(pipes, b"greeting")
    with pytest.raises(ServiceUnavailable, match="ended"):
        await client.submit([Grammar(GrammarKind.REGEX, "a")]).result
    assert not client.usable
    process.input.close()
