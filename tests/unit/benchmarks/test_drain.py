"""Figures and verdict of `drain`."""

from dataclasses import replace

import pytest

from benchmarks.faults.outcomes import StreamOutcome, Undisturbed
from benchmarks.scenarios.drain import GONE_MAX_S, STREAMS, Rollout, judge
from tests.support.survived import audited

WANTED = [Undisturbed((1, 2, 3), "abc", "length", 5, (1.0, 1.25, 1.5))]
WHOLE = StreamOutcome(
    (1, 2, 3), (1.0, 1.5, 3.5), 3.5, True, 3, text="abc", finish_reason="length", prompt_tokens=5
)
CUT = replace(WHOLE, token_ids=(1, 2), times_s=(1.0, 1.5), finished=False, failure="hung up")


def rollout(gone_s: float = 2.0, resumed: int = 5, outcome: StreamOutcome = WHOLE) -> Rollout:
    seen = Rollout([30, 60], [1.0, gone_s], [3, resumed], replacing_s=(2.0, 4.0))
    seen.note_streams({0: WHOLE, 1: outcome}, WANTED)
    return seen


def test_the_figures_compare_both_ways() -> None:
    rollouts = {"move": rollout(), "wait": rollout(gone_s=40.0, resumed=0)}
    verdict = judge(rollouts, WANTED, [audited()], GONE_MAX_S)
    figures = verdict.figures
    assert figures["gone_s"] == {"move": 2.0, "wait": 40.0} and figures["streams"] == STREAMS
    assert figures["longest_silence_s"] == {"move": 2.0, "wait": 2.0}
    # The first gap of each stream is before the replacement.
    assert figures["move"]["replaced_in_s"] == figures["move"]["inter_token_s"]["p50"] == 2.0
    assert figures["undisturbed_inter_token_s"]["max"] == 0.25
    rows = dict(verdict.rows)
    assert rows["move: P99 between two tokens meanwhile"] == "2000 ms"
    assert rows["P99 between two tokens of undisturbed streams"] == "250 ms"
    assert figures["tokens_identical"] and figures["lost"] == figures["duplicated"] == 0
    assert verdict.problems == []


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (rollout(gone_s=GONE_MAX_S + 1), "move: a worker took"),
        (rollout(resumed=0), "move: a worker ended without returning a stream"),
        (rollout(outcome=CUT), "move: 1 requests were lost"),
        (rollout(outcome=replace(WHOLE, token_ids=(1, 2, 4))), "move: 1 requests were different"),
    ],
)
def test_each_missed_property_is_a_problem(bad: Rollout, problem: str) -> None:
    verdict = judge({"move": bad, "wait": rollout()}, WANTED, [audited()], GONE_MAX_S)
    assert verdict.problems[0].startswith(problem)
