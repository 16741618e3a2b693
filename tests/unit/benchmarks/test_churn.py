"""What `churn` makes of what it has seen, and how its load counts the ends of requests."""

from dataclasses import replace

import pytest

from benchmarks.audit_logs import INVARIANTS, Audited
from benchmarks.group_changes import MERGE_PATH, ChangeFailed, change_groups
from benchmarks.scenarios.churn import Churned, judge
from benchmarks.scenarios.scenario import find_scenarios, find_trials
from benchmarks.steady_load import ERRORS_MAX, Shape, SteadyLoad, Tally
from services.core.audit.findings import Findings
from tests.support.fake_openai import fake_openai
from tests.support.refusing_address import refusing_address
from tests.support.waiting import eventually
from tideserve.sim.replay import Replayed

MIB = 1 << 20
FLAT = [100 * MIB] * 20


def found() -> Audited:
    findings = Findings()
    for one in INVARIANTS:
        findings.check(one, True, "")
    return Audited({"worker-0-1-2.jsonl": Replayed(10, 20)}, findings)


def done() -> Churned:
    return Churned(20, 20, 20, rss_bytes={"worker-0": list(FLAT)}, blocks={"worker-0": (500, 500)})


def tally() -> Tally:
    return Tally(sent=10, completed=8, hung_up=1, refused=1, tokens=80)


def test_a_run_in_which_all_holds_has_no_problem() -> None:
    verdict = judge(done(), tally(), found())
    assert list(verdict.problems) == []
    assert verdict.figures["merges"] == verdict.figures["splits"] == 20
    assert verdict.figures["requests"]["completed"] == 8
    assert verdict.figures["invariants_checked"] == dict.fromkeys(INVARIANTS, 1)
    rows = dict(verdict.rows)
    assert rows["lost / duplicated / stuck"] == "0 / 0 / 0"
    assert rows["resident memory of worker-0, first and last tenth"] == "100.0 MiB → 100.0 MiB"


def test_whatever_does_not_hold_is_a_problem() -> None:
    lost = replace(tally(), completed=7, lost=1, errors=["request 3 (r): cut"])
    assert list(judge(done(), lost, found()).problems) == [
        "1 requests were lost",
        "request 3 (r): cut",
    ]
    forgotten = replace(tally(), sent=11)
    assert list(judge(done(), forgotten, found()).problems) == [
        "11 requests were sent, and 10 ended"
    ]
    grown = replace(done(), rss_bytes={"worker-0": [*FLAT[:10], *[106 * MIB] * 10]})
    assert list(judge(grown, tally(), found()).problems) == [
        "worker-0 grew from 100.0 MiB to 106.0 MiB"
    ]
    leaked = replace(done(), blocks={"worker-0": (498, 500)})
    assert "2 of 500 blocks" in judge(leaked, tally(), found()).problems[0]
    stopped = replace(done(), failure="change 3 failed: no")
    assert list(judge(stopped, tally(), found()).problems) == ["change 3 failed: no"]


def test_logs_that_break_or_miss_something_are_a_problem() -> None:
    audited = found()
    audited.findings.check("I2", False, "nobody holds layer 3")
    audited.replayed["worker-1"] = Replayed(4, 5, "after event 4: x instead of y")
    del audited.findings.checks["I9"]
    assert list(judge(done(), tally(), audited).problems) == [
        "worker-1 decides otherwise when replayed: after event 4: x instead of y",
        "I2: nobody holds layer 3",
        "nothing in the logs tells of I9",
    ]


def test_trials_are_found_beside_the_scenarios() -> None:
    assert list(find_trials()) == [
        "churn",
        "clients",
        "doors",
        "engine",
        "faults",
        "front",
        "planning",
        "preempt",
        "prefix",
        "soak",
        "survive",
        "tracing",
    ]
    assert not find_trials().keys() & find_scenarios().keys()


def test_requests_are_made_of_their_number() -> None:
    shape = Shape(prompt_tokens=(2, 5), output_tokens=(3, 4), token_ids=(7, 9))
    requests = [shape.request(number) for number in range(50)]
    assert requests == [shape.request(number) for number in range(50)]
    assert {len(one.prompt_ids) for one in requests} == {2, 3, 4, 5}
    assert {one.output_tokens for one in requests} == {3, 4}
    assert {token for one in requests for token in one.prompt_ids} == {7, 8, 9}


async def test_the_load_counts_how_requests_end() -> None:
    """Token 7: a stream that is cut; 8: an error event; 9: refused."""
    shape = Shape(4, (1, 1), (3, 3), (6, 9))
    with fake_openai() as server:
        server.behaviour = {7: "cut", 8: "error", 9: 503}
        with SteadyLoad(server.url, "fake", shape) as load:
            await eventually(lambda: load.tally.ended >= 40)
        assert not load.running
    tally = load.tally
    assert tally.ended == tally.sent >= 40
    assert min(tally.completed, tally.lost, tally.refused) > 0
    assert tally.stuck == tally.duplicated == 0
    assert len(tally.errors) == min(tally.lost, ERRORS_MAX)


def test_groups_that_do_not_change_are_told_with_the_last_word() -> None:
    with refusing_address() as address, pytest.raises(ChangeFailed, match="refused"):
        change_groups(f"http://{address}", MERGE_PATH, timeout_s=0.0)
