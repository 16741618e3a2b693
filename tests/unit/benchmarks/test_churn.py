"""Verdict and figures of `churn`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.audit_logs import INVARIANTS, Audited
from benchmarks.faults.outcomes import Tally
from benchmarks.group_changes import MERGE_PATH, ChangeFailed, change_groups
from benchmarks.scenarios.churn import Churned, judge
from tests.support.refusing_address import refusing_address
from tests.support.survived import FLAT, MIB, audited, memory
from tideserve.sim.replay import Replayed

TALLY = Tally(sent=10, completed=8, hung_up=1, refused=1, tokens=80)


DONE = Churned(20, 20, 20, memory=memory("worker-0", FLAT), blocks={"worker-0": (500, 500)})


def test_a_valid_run_has_no_problem() -> None:
    verdict = judge(DONE, TALLY, audited())
    assert list(verdict.problems) == []
    assert verdict.figures["merges"] == verdict.figures["splits"] == 20
    assert verdict.figures["requests"]["completed"] == 8
    assert verdict.figures["invariants_checked"] == dict.fromkeys(INVARIANTS, 1)


@pytest.mark.parametrize(
    ("done", "tally", "problems"),
    [
        (
            {},
            {"completed": 7, "lost": 1, "errors": ["request 3 (r): cut"]},
            ["1 requests were lost", "request 3 (r): cut"],
        ),
        ({}, {"sent": 11}, ["11 requests were sent, and 10 ended"]),
        (
            {"memory": memory("worker-0", [*FLAT[:10], *[106 * MIB] * 10])},
            {},
            ["worker-0 grew from 100.0 MiB to 106.0 MiB"],
        ),
        (
            {"blocks": {"worker-0": (498, 500)}},
            {},
            ["worker-0 has 2 of 500 blocks in use when idle"],
        ),
        ({"failure": "change 3 failed: no"}, {}, ["change 3 failed: no"]),
    ],
)
def test_each_violated_property_is_a_problem(done: Any, tally: Any, problems: list[str]) -> None:
    assert judge(replace(DONE, **done), replace(TALLY, **tally), audited()).problems == problems


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda logs: logs.findings.check("I2", False, "nobody holds layer 3"),
            "I2: nobody holds layer 3",
        ),
        (
            lambda logs: logs.replayed.update(w=Replayed(4, 5, "after event 4: x instead of y")),
            "w diverges when replayed: after event 4: x instead of y",
        ),
        (lambda logs: logs.findings.checks.pop("I9"), "no log entry checks I9"),
    ],
)
def test_invalid_or_missing_logs_are_a_problem(
    change: Callable[[Audited], object], problem: str
) -> None:
    logs = audited()
    change(logs)
    assert list(judge(DONE, TALLY, logs).problems) == [problem]
    assert logs.violations == 1


def test_groups_that_do_not_change_are_an_error_with_the_last_answer() -> None:
    with refusing_address() as address, pytest.raises(ChangeFailed, match="refused"):
        change_groups(f"http://{address}", MERGE_PATH, timeout_s=0.0)
