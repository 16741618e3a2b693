"""What `soak` makes of what it has seen."""

import os
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.audit_logs import INVARIANTS, Audited
from benchmarks.scenarios import soak
from benchmarks.scenarios.soak import Soaked, judge
from benchmarks.steady_load import Shape, SteadyLoad, Tally
from benchmarks.undisturbed import Undisturbed
from services.core.audit.findings import Findings
from tests.support.fake_openai import fake_openai
from tests.support.waiting import eventually
from tideserve.load.event_stream import StreamedAnswer
from tideserve.sim.replay import Replayed

MIB = 1 << 20
FLAT = [100 * MIB] * 10
DONE = Soaked(
    3,
    Counter({"kill-worker": 4}),
    floods=2,
    rss_bytes={"gateway": FLAT},
    groups_seen=Counter({1: 2, 3: 5}),
)
GOOD = Tally(sent=10, completed=9, hung_up=1, tokens=80)


def audited() -> Audited:
    findings = Findings()
    for one in INVARIANTS:
        findings.check(one, True, "")
    return Audited({"worker-0-1-2.jsonl": Replayed(10, 20)}, findings)


def test_a_run_in_which_all_holds_has_no_problem() -> None:
    verdict = judge(DONE, GOOD, audited())
    assert list(verdict.problems) == []
    assert verdict.figures["faults"] == {"kill-worker": 4}
    assert verdict.figures["rss_bytes"] == {"gateway": {"first": 100 * MIB, "last": 100 * MIB}}


@pytest.mark.parametrize(
    ("done", "tally", "problem"),
    [
        ({}, {"completed": 8, "lost": 1}, "1 requests were lost"),
        ({}, {"completed": 8, "refused": 1}, "1 requests were refused"),
        ({}, {"completed": 8, "different": 1}, "1 requests were different"),
        ({}, {"completed": 8}, "10 requests were sent, and 9 ended"),
        ({"groups_seen": Counter({3: 5})}, {}, "no groups were seen merged"),
        ({"groups_seen": Counter({1: 5})}, {}, "the groups were never seen apart"),
        (
            {"rss_bytes": {"gateway": [*FLAT, *[111 * MIB] * 10]}},
            {},
            "gateway grew from 100 to 111 MiB",
        ),
        ({"problems": ["not whole"]}, {}, "not whole"),
    ],
)
def test_whatever_does_not_hold_is_a_problem(done: Any, tally: Any, problem: str) -> None:
    assert judge(replace(DONE, **done), replace(GOOD, **tally), audited()).problems == [problem]


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "completed"),
        ({"token_ids": (0, 1, 2, 4)}, "different"),
        ({"text": "0 1 2 4 "}, "different"),
        ({"text": "0 1 2 3 4 "}, "different"),
        ({"finish_reason": "stop"}, "different"),
        ({"prompt_tokens": 2}, "different"),
    ],
)
async def test_another_answer_than_undisturbed_is_different(
    changes: dict[str, Any], kind: str
) -> None:
    wanted = replace(Undisturbed((0, 1, 2, 3), "0 1 2 3 ", "length", 1), **changes)
    shape = Shape(concurrency=1, output_tokens=(4, 4), distinct=2)
    with fake_openai() as server, SteadyLoad(server.url, "fake", shape, [wanted] * 2) as load:
        await eventually(lambda: load.tally.ended > 2)
    tally = load.tally
    assert getattr(tally, kind) == tally.sent - tally.hung_up > 0


async def test_an_answer_whose_last_tokens_never_came_is_lost_whatever_its_usage_says() -> None:
    shape = Shape(concurrency=1, output_tokens=(4, 4), distinct=1)
    load = SteadyLoad("", "fake", shape, [Undisturbed((0, 1, 2, 3))])
    answer = StreamedAnswer()
    answer.status, answer.finished = 200, True
    answer.output_tokens, answer.output_ids = 4, [0, 1, 2]
    await load._judge(0, 4, answer, None)
    assert (load.tally.completed, load.tally.lost) == (0, 1)


def test_a_killed_process_that_is_still_there_does_not_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the next fault follows before the first one has any effect, and hits what is gone."""
    me = os.getpid()
    status = {
        "workers": [{"id": "worker-0", "pids": [me], "epoch": 3, "unsettled": False}],
        "groups": [{"members": ["worker-0"], "epoch": 3, "changing": False, "degraded": False}],
    }
    monkeypatch.setattr(soak, "_status", lambda _system: status)
    system = SimpleNamespace(state={"pids": {"worker-0": me}})
    done = Soaked(1)
    assert not soak._is_whole(system, done, {me})
    assert not done.groups_seen
    assert soak._is_whole(system, done, {me + 1})
