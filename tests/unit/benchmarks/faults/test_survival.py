"""Cost of a worker death and of an etcd outage: windows, shares, failures."""

from dataclasses import replace

import pytest

from benchmarks.faults.judge import PROBLEMS_MAX
from benchmarks.faults.survival import Crowd, Loss, Outage
from tests.support.survived import CUT, GROUP, WANTED, crowd, loss, outage, stream


def test_throughput_is_compared_with_the_surviving_share() -> None:
    figures = loss().figures()
    assert figures["share_alive"] == 0.75
    assert figures["tokens_per_s"]["before"] == pytest.approx(10.0, rel=0.15)
    assert figures["tokens_per_s"]["after"] == pytest.approx(8.0, rel=0.15)
    ratio = figures["tokens_per_s"]["after"] / (0.75 * figures["tokens_per_s"]["before"])
    assert figures["throughput_ratio"] == pytest.approx(ratio)
    assert figures["alone_after_s"] == 0.5
    assert figures["whole_after_s"] == 14.0
    assert figures["longest_silence_s"] == pytest.approx(0.5)
    assert figures["requests"]["sent"] == figures["requests"]["completed"] == 24
    assert loss().problems() == []


def test_excess_requests_wait_for_earlier_ones_to_end() -> None:
    """Four requests hold 90 + 7 tokens each at the death, and end 1, 2, 3 and 4 s after it."""
    streams = [stream(5.0, 8.0 + number) for number in range(4)]
    seen = Crowd(4, 4, 12.0, 12.5, 26.0, streams, [WANTED] * 4, [90] * 4, 2400, 300)
    held = sum(90 + sum(at_s < 12.0 for at_s in stream.times_s) for stream in streams)
    assert held == 90 * 4 + 8 + 7 + 6 + 6
    for room, wait_s in ((held, 0.0), (held - 1, 1.0), (held - 100, 1.0), (held - 101, 2.0)):
        assert replace(seen, survivors_tokens=room).ideal_wait_s == pytest.approx(wait_s)
    assert replace(seen, survivors_tokens=300).figures()["ideal_wait_s"] == pytest.approx(1.0)


def test_excess_requests_may_wait_but_not_fail() -> None:
    assert crowd().problems() == []
    assert crowd([CUT]).problems() == [
        "request 24 is lost after 3 of 10 tokens: the server hung up"
    ]
    assert crowd(demand_tokens=299).problems() == ["the survivors have enough KV for all requests"]


def test_throughput_after_a_death_ends_with_the_last_request_or_the_return() -> None:
    """After that fewer requests run, or more workers serve."""
    assert loss().before == (4.0, 12.0)
    assert loss(whole_s=None).after == (12.5, 22.0)
    assert loss().after == (12.5, 22.0)
    assert loss(whole_s=18.0).after == (12.5, 18.0)
    assert loss(alone_s=30.0).after == (30.0, 30.0)
    assert loss(alone_s=None).after == (12.0, 12.0)


def test_tokens_count_in_the_window_of_their_arrival() -> None:
    survivor_loss = loss()
    assert survivor_loss.tokens_per_s((0.0, 4.0)) == pytest.approx(9.0)  # the last four come at 4.0
    assert survivor_loss.tokens_per_s((4.0, 8.0)) == pytest.approx(10.0)
    assert survivor_loss.tokens_per_s((0.0, 1.9)) is None


OTHER = replace(stream(12.0, 5.0), token_ids=(*WANTED.token_ids[:-1], 99))


@pytest.mark.parametrize(
    ("seen", "problem"),
    [
        (loss([CUT]), "request 24 is lost after 3 of 10 tokens: the server hung up"),
        (loss([OTHER]), "request 24 is different after 10 of 10 tokens: token 9 is 99, not 9"),
        (loss(whole_s=None), "not all workers serve again"),
        (
            loss(workers=2, alone_s=43.0, whole_s=50.0),
            "the survivors served without the killed worker after 31 s",
        ),
        (loss(alone_s=None), "the survivors do not serve without the killed worker"),
        (loss(whole_s=13.5), "too little time after the death for measuring throughput"),
        (loss(hit_s=5.0), "too little time before the death for measuring throughput"),
        (loss(workers=20), "throughput was 84% of the survivors' share of that before the death"),
    ],
)
def test_each_forbidden_effect_of_a_death_is_a_problem(seen: Loss, problem: str) -> None:
    assert problem in seen.problems()


def test_the_first_of_many_lost_requests_are_listed() -> None:
    problems = loss([CUT] * (PROBLEMS_MAX + 3)).problems()
    assert problems[PROBLEMS_MAX - 1].startswith(f"request {24 + PROBLEMS_MAX - 1} is lost")
    assert problems[PROBLEMS_MAX:] == ["and 3 more"]
    assert len(loss([CUT] * PROBLEMS_MAX).problems()) == PROBLEMS_MAX


def test_an_outage_without_an_effect_has_no_problem() -> None:
    """No groups are reported for a while, and then the former ones."""
    seen = outage([[GROUP], [GROUP], [], [GROUP]])
    assert seen.problems() == []
    figures = seen.figures()
    assert figures["changes_of_groups"] == 0
    assert figures["requests"]["completed"] == 9
    assert "errors" not in figures["requests"]


def test_a_new_epoch_is_a_change_and_a_new_order_is_not() -> None:
    other = {"id": "g1", "epoch": 5, "members": ["worker-2"]}
    assert outage([[GROUP, other], [other, GROUP]]).changes == 0
    assert outage([[GROUP], [GROUP | {"epoch": 5}], [GROUP]]).changes == 2
    assert outage([[GROUP], [GROUP, other]]).changes == 1


@pytest.mark.parametrize(
    ("seen", "problem"),
    [
        (outage([[GROUP], [GROUP | {"epoch": 5}]]), "the groups changed 1 times"),
        (outage([[]]), "the groups were never seen"),
        (outage(settled_s=None), "the cluster did not settle after the outage"),
        (outage(settled_s=16.0), "the cluster settled 16 s after the return of etcd"),
        (outage(tally={"completed": 8, "lost": 1}), "1 requests were lost"),
        (outage(tally={"completed": 8, "refused": 1}), "1 requests were refused"),
    ],
)
def test_each_forbidden_effect_of_an_outage_is_a_problem(seen: Outage, problem: str) -> None:
    assert seen.problems() == [problem]
