"""Only ramps are reported as rising: no flat or falling demand, steps or short teeth."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from math import exp, sqrt
from random import Random

import pytest

from services.core.overload.demand_trend import DemandTrend
from services.core.overload.events import (
    Action,
    GroupsSeen,
    GroupUse,
    MemberUse,
    ModelLoad,
    OverloadConfig,
    ReportStatus,
)
from services.core.overload.monitor import OverloadMonitor

CONFIG = OverloadConfig()
UNDROPPED = 10_000
TICK_S = 0.1
WHOLE_S = CONFIG.trend_period_s * (CONFIG.trend_periods + 1)
"""A ramp is reported after this many seconds, and a period more if it begins within a period."""
Demand = Callable[[float], float]


def load(demand: float) -> ModelLoad:
    tokens = round(max(0.0, demand))
    return ModelLoad(tokens, 0, 5 * UNDROPPED, UNDROPPED, tokens, 0, 0, 0, 0)


def raised(demand: Demand, seconds: float) -> list[float]:
    """The times at which the demand of a model with merged groups is reported as rising."""
    trend, times_s = DemandTrend(), []
    for tick in range(round(seconds / TICK_S)):
        now_s = tick * TICK_S
        trend.sample(load(demand(now_s)), CONFIG, now_s)
        if trend.is_rising(CONFIG):
            times_s.append(now_s)
    return times_s


def noisy(demand: Demand, seed: int, share: float = 0.05) -> Demand:
    rng = Random(seed)
    return lambda now_s: demand(now_s) + rng.uniform(-share, share) * UNDROPPED


def correlated(demand: Demand, rng: Random, share: float, time_s: float) -> Demand:
    """Adds noise of standard deviation `share`, with correlations that last for `time_s`."""
    kept = exp(-TICK_S / time_s)
    value = rng.gauss(0, share)

    def disturbed(now_s: float) -> float:
        nonlocal value
        value = kept * value + sqrt(1 - kept**2) * rng.gauss(0, share)
        return demand(now_s) + value * UNDROPPED

    return disturbed


@pytest.mark.parametrize(
    ("share", "time_s", "missed_max"), [(0.02, 1, 0), (0.02, 5, 0), (0.05, 20, 1), (0.05, 5, 6)]
)
def test_noise_hides_few_ramps_and_is_not_reported(
    share: float, time_s: float, missed_max: int
) -> None:
    """Noise of batches of requests that start and end together."""
    missed = 0
    for seed in range(30):
        ramp = correlated(lambda t: UNDROPPED * (1.01 + 0.02 * t), Random(seed), share, time_s)
        missed += not raised(ramp, 60)
        flat = correlated(lambda _: 1.2 * UNDROPPED, Random(seed), share, time_s)
        assert raised(flat, 300) == []
    assert missed <= missed_max


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("share_per_s", [0.01, 0.02, 0.05])
def test_a_ramp_is_reported_within_seconds(share_per_s: float, seed: int) -> None:
    begins_s = Random(seed).uniform(0, 30)

    def ramp(now_s: float) -> float:
        return UNDROPPED * (1.01 + share_per_s * max(0.0, now_s - begins_s))

    plain = raised(ramp, begins_s + 60)
    assert begins_s <= plain[0] <= begins_s + WHOLE_S + CONFIG.trend_period_s
    assert plain[-1] >= begins_s + 59, "it lasts as long as the ramp"
    if share_per_s > 0.01:
        disturbed = raised(noisy(ramp, seed, 0.02), begins_s + 60)
        assert disturbed[0] <= begins_s + WHOLE_S + 2 * CONFIG.trend_period_s


def test_a_ramp_below_the_share_is_not_reported() -> None:
    per_s = 0.9 * CONFIG.trend_share / CONFIG.trend_period_s
    assert raised(lambda now_s: UNDROPPED * (1.1 + per_s * now_s), 300) == []


def test_demand_that_single_workers_hold_is_not_reported() -> None:
    times_s = raised(lambda now_s: UNDROPPED * (0.4 + 0.01 * now_s), 90)
    assert times_s[0] >= 60, "only once demand exceeds the undropped capacity"


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("level", [0.6, 1.0, 1.5, 4.0])
def test_flat_demand_is_never_reported(level: float, seed: int) -> None:
    assert raised(noisy(lambda _: level * UNDROPPED, seed), 600) == []


@pytest.mark.parametrize("seed", range(5))
def test_the_noise_of_random_arrivals_is_not_reported(seed: int) -> None:
    """Poisson arrivals, exponential durations: 300 requests at a time on average, for an hour."""
    rng, requests, mean_s = Random(seed), 300, 20.0
    ends_s = [rng.expovariate(1 / mean_s) for _ in range(requests)]
    heapify(ends_s)
    next_s, trend = 0.0, DemandTrend()
    for now_s in range(3600):
        while next_s <= now_s:
            heappush(ends_s, next_s + rng.expovariate(1 / mean_s))
            next_s += rng.expovariate(requests / mean_s)
        while ends_s[0] <= now_s:
            heappop(ends_s)
        trend.sample(load(1.2 * UNDROPPED * len(ends_s) / requests), CONFIG, float(now_s))
        assert not trend.is_rising(CONFIG)


@pytest.mark.parametrize("seed", range(20))
def test_falling_demand_is_never_reported(seed: int) -> None:
    share_per_s = Random(seed).uniform(0.0, 0.05)
    start = 1.0 + 120 * share_per_s

    def fall(now_s: float) -> float:
        return UNDROPPED * (start - share_per_s * now_s)

    assert raised(fall, 120) == []
    assert raised(noisy(fall, seed), 120) == []


@pytest.mark.parametrize("seed", range(20))
def test_steps_are_not_reported_unless_they_follow_each_other(seed: int) -> None:
    rng = Random(seed)
    at_s, height = rng.uniform(5, 30), rng.uniform(0.1, 3.0)
    assert raised(lambda t: UNDROPPED * (1.05 + height * (t >= at_s)), 120) == []
    # Demand that approaches its new level exponentially within some seconds is a step, too.
    tau_s = rng.uniform(0.1, 5.0)
    smooth = raised(
        lambda t: UNDROPPED * (1.05 + 0.5 * (1 - exp(-max(0.0, t - at_s) / tau_s))), 120
    )
    assert smooth == []
    every_s = 3 * CONFIG.trend_period_s + rng.uniform(0, 5)
    assert raised(lambda t: UNDROPPED * (1.05 + 0.2 * (t // every_s)), 120) == []
    assert raised(lambda t: UNDROPPED * (1.05 + 0.1 * (t // CONFIG.trend_period_s)), 60) != []


@pytest.mark.parametrize("seed", range(20))
def test_short_teeth_are_not_reported_and_long_teeth_until_they_fall(seed: int) -> None:
    rng = Random(seed)

    def teeth(seconds: float) -> Demand:
        return lambda t: UNDROPPED * (1.1 + 0.6 * ((t % seconds) / seconds))

    short_s = rng.uniform(2.0, CONFIG.trend_period_s * CONFIG.trend_periods - 0.1)
    assert raised(teeth(short_s), 300) == []
    long_s = rng.uniform(2 * WHOLE_S, 3 * WHOLE_S - 10)
    times_s = raised(teeth(long_s), 4 * long_s)
    assert times_s
    for at_s in times_s:
        into_s = at_s % long_s
        assert into_s <= 2 * CONFIG.trend_period_s or into_s >= WHOLE_S - CONFIG.trend_period_s


class Merged:
    """A merged group in a monitor; its members report `used` tokens."""

    def __init__(self) -> None:
        self.monitor = OverloadMonitor(CONFIG)
        self.now_s = 100.0
        self.decided: list[Action] = []

    def see(
        self,
        used: float,
        waiting: int = 0,
        status: ReportStatus = ReportStatus.CURRENT,
        members: int = 2,
        capacity: int = 16_000,
    ) -> bool:
        """Whether demand is reported as rising after the reports of a tick."""
        self.now_s += TICK_S
        names = [f"w{n}" for n in range(members)]
        uses = tuple(MemberUse(n, capacity, round(used), UNDROPPED // members) for n in names)
        group = GroupUse("g0", "m", uses, waiting, 100 * waiting)
        if status is not ReportStatus.CURRENT:
            group = GroupUse("g0", "m", (), report_status=status, silent_ids=tuple(names))
        decisions = self.monitor.handle(GroupsSeen(self.now_s, (group,)))
        self.decided += [decision.action for decision in decisions]
        self.monitor.check_invariants()
        return self.monitor.rising["m"]


def test_the_trend_is_reported_before_merges_are_exhausted() -> None:
    group, first_s = Merged(), dict[str, float]()
    for tick in range(600):
        demand = 1.1 * UNDROPPED + 0.015 * UNDROPPED * tick * TICK_S
        waiting = round(max(0.0, demand - 16_000) / 100)
        if group.see(min(demand, 16_000), waiting):
            first_s.setdefault("rising", group.now_s)
        if Action.EXHAUSTED in group.decided:
            first_s.setdefault("exhausted", group.now_s)
    assert first_s["rising"] + 5 < first_s["exhausted"]


def test_single_groups_have_no_trend() -> None:
    group = Merged()
    assert not any(group.see(9_000 + 300 * n * TICK_S, members=1) for n in range(600))


def test_the_trend_goes_on_over_a_change_of_groups() -> None:
    group = Merged()

    def see(tick: int) -> bool:
        status = ReportStatus.CHANGING if 80 < tick < 100 else ReportStatus.CURRENT
        members = 2 if tick <= 90 else 4
        return group.see(11_000 + 20 * tick, status=status, members=members, capacity=40_000)

    seen = [see(tick) for tick in range(320)]
    assert seen[-1], "reports of a change-over are left out"


def test_the_trend_ends_when_groups_split_or_fall_silent() -> None:
    for end in ({"members": 1}, {"status": ReportStatus.SILENT}):
        group = Merged()
        rising = [group.see(11_000 + 20 * tick, capacity=40_000) for tick in range(300)]
        assert rising[-1]
        assert not group.see(17_000, capacity=40_000, **end)  # type: ignore[arg-type]
