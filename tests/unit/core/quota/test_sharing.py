"""A quota holds across several gateways for any distribution of traffic."""

from collections.abc import Sequence
from random import Random

import pytest

from services.core.quota.limits import Exceeded, QuotaLimits
from services.core.quota.owner_use import OwnerUse, Reservation
from services.core.quota.state import QuotaReport, QuotaState
from tests.support.quota_fleet import OWNER, Fleet, Rates, parts

REQUESTS = QuotaLimits(requests_per_minute=600)
TOKENS = QuotaLimits(tokens_per_minute=200_000)
END_S = 240.0
SEEDS = range(3)

Parts = dict[str, Sequence[tuple[float, float]]]
HALVES: Parts = {"a": [(0, 0.5)], "b": [(0, 0.5)]}
ALL_AT_ONE: Parts = {"a": [(0, 1)], "b": [(0, 0)]}
SWITCHED: Parts = {"a": [(0, 1), (101.3, 0)], "b": [(0, 0), (101.3, 1)]}
BACK_AND_FORTH: Parts = {
    name: [(20.0 * n, float(n % 2 == first)) for n in range(12)] for first, name in enumerate("ab")
}
ONE_THEN_BOTH: Parts = {"a": [(0, 1), (101.3, 0.5)], "b": [(0, 0), (101.3, 0.5)]}
A_FEW_ELSEWHERE: Parts = {"a": [(0, 0.9)], "b": [(0, 0.1)]}
ONE_AFTER_THE_OTHER: Parts = {
    name: [(20.0 * n, float(n % 4 == index)) for n in range(12)]
    for index, name in enumerate("abcd")
}
WAYS = {
    "50:50": HALVES,
    "100:0": ALL_AT_ONE,
    "switched": SWITCHED,
    "back and forth": BACK_AND_FORTH,
    "one, then both": ONE_THEN_BOTH,
    "90:10": A_FEW_ELSEWHERE,
    "one of four after the other": ONE_AFTER_THE_OTHER,
}


def size(rng: Random) -> int:
    return rng.randint(50, 800)


def fleet(limits: QuotaLimits, way: Parts, overload: float, seed: int) -> tuple[Fleet, Rates]:
    """The gateways, and request rates of `overload` times the limit."""
    made = Fleet(limits, Random(seed), size if limits is TOKENS else None)
    per_s = 600 / 60 if limits is REQUESTS else 200_000 / 60 / 425
    rates = parts(way, per_s * overload)
    # They know of each other before the first request comes.
    made.now_s = -3.0
    for name in way:
        made.join(name, lambda name, now_s: rates(name, now_s) if now_s >= 0 else 0.0)
    made.run(0)
    return made, rates


def limit_of(limits: QuotaLimits) -> int:
    return limits.requests_per_minute or limits.tokens_per_minute or 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("limits", [REQUESTS, TOKENS], ids=["requests", "tokens"])
@pytest.mark.parametrize("overload", [1.6, 5])
def test_use_in_any_minute_stays_within_the_quota(
    way: str, limits: QuotaLimits, overload: float
) -> None:
    for seed in SEEDS:
        made, _ = fleet(limits, WAYS[way], overload, seed)
        made.run(END_S)
        least, most = made.minutes(END_S)
        limit = limit_of(limits)
        assert 0.9 * limit <= least and most <= 1.1 * limit, (seed, least / limit, most / limit)


@pytest.mark.parametrize("limits", [REQUESTS, TOKENS], ids=["requests", "tokens"])
def test_quota_holds_while_gateways_die_and_join(limits: QuotaLimits) -> None:
    """A dead gateway's share is missing until its silence is noticed; it is never given twice."""
    for seed in SEEDS:
        way: Parts = {name: [(0, 1 / 3)] for name in "abc"}
        made, rates = fleet(limits, way, 5, seed)
        made.at(80.0, lambda made=made: made.die("a"))
        made.at(160.0, lambda made=made, rates=rates: made.join("a", rates))
        made.run(300)
        limit = limit_of(limits)
        least, most = made.minutes(300)
        assert 0.85 * limit <= least and most <= 1.1 * limit, (seed, least / limit, most / limit)
        least, _ = made.minutes(160, 92)
        assert least >= 0.9 * limit, "two have the whole quota"


def test_quota_is_restored_to_the_last_gateway() -> None:
    for seed in SEEDS:
        way: Parts = {"a": [(0, 0.5), (80, 1)], "b": [(0, 0.5)]}
        made, _ = fleet(REQUESTS, way, 5, seed)
        made.at(80.0, lambda made=made: made.die("b"))
        made.run(END_S)
        least, most = made.minutes(END_S)
        assert least >= 0.8 * 600 and most <= 1.1 * 600
        least, _ = made.minutes(END_S, 95)
        assert least >= 0.9 * 600


@pytest.mark.parametrize("way", ["50:50", "100:0", "90:10"])
def test_shares_stay_while_etcd_is_away(way: str) -> None:
    for seed in SEEDS:
        made, _ = fleet(REQUESTS, WAYS[way], 3, seed)
        for time_s, down in ((60, True), (180, False)):
            made.at(time_s, lambda made=made, down=down: setattr(made, "etcd_down", down))
        made.run(END_S)
        least, most = made.minutes(END_S)
        assert least >= 0.9 * 600 and most <= 1.1 * 600, (seed, least, most)


def test_a_newcomer_is_served_while_the_others_take_everything() -> None:
    way: Parts = {"a": [(0, 0.995)], "b": [(0, 0), (100, 0.005)]}
    made, _ = fleet(REQUESTS, way, 4, 0)
    made.run(100)
    before = len(made.used)
    served: list[float] = []

    def ask_b() -> None:
        use = made.states["b"].use(OWNER, REQUESTS, made.now_s)
        if use.enter(made.now_s) is None:
            use.leave(0.0)
            served.append(made.now_s)

    for n in range(40):
        made.at(100 + n, ask_b)
    made.run(140)
    assert len(served) >= 4 and served[0] < 105
    assert len(made.used) > before + 300, "and takes little from them"


def test_quotas_of_owners_are_independent() -> None:
    state = QuotaState()
    limits = QuotaLimits(requests_per_minute=6)
    outcomes = {
        owner: [state.use(owner, limits, 0.0).enter(0.0) is None for _ in range(10)]
        for owner in ("alice", "bob")
    }
    assert outcomes["alice"] == outcomes["bob"] == [True] * 5 + [False] * 5


class Pair:
    """Two gateways that count places and exchange reports every second."""

    def __init__(self, places: int) -> None:
        self.limits = QuotaLimits(concurrent=places)
        self.states = {name: QuotaState() for name in "ab"}
        self.running = dict.fromkeys("ab", 0)
        self.rng = Random(0)
        self.now_s = 0.0
        self._exchange()

    def second(self, asked: dict[str, float]) -> None:
        """Requests arrive with the probability `asked`, and others end."""
        for _ in range(20):
            self.now_s += 0.05
            for name in self.states:
                self._step(name, asked[name])
        self._exchange()

    def _step(self, name: str, asked: float) -> None:
        use = self.states[name].use(OWNER, self.limits, self.now_s)
        if self.running[name] and self.rng.random() < 0.3:
            use.leave(0.5)
            self.running[name] -= 1
        if self.rng.random() < asked and use.enter(self.now_s) is None:
            self.running[name] += 1

    def _exchange(self) -> None:
        for name, other in ("ab", "ba"):
            report = QuotaReport(int(self.now_s), self.states[other].report(self.now_s))
            self.states[name].receive({other: report}, self.now_s)


def test_concurrent_places_are_shared_between_gateways() -> None:
    """Requests at once exceed the limit only by those that gateways have not heard of yet; an owner
    that comes to one gateway has all places there.
    """
    pair = Pair(8)
    for _ in range(60):
        pair.second({"a": 0.9, "b": 0.9})
        assert sum(pair.running.values()) <= 8 + 2
    assert min(pair.running.values()) >= 2
    busy = []
    for _ in range(60):
        pair.second({"a": 0.9, "b": 0.0})
        busy.append(pair.running["a"])
    assert max(busy[30:]) == 8 and pair.running["b"] == 0


def test_idle_owners_are_forgotten() -> None:
    state = QuotaState()
    for n in range(100):
        state.use(f"owner-{n}", REQUESTS, 0.0).enter(0.0)
    assert len(state.report(0.0)) == 100
    for n in range(100):
        state.use(f"owner-{n}", REQUESTS, 0.0).leave(0.0)
    assert state.report(100.0) == {}
    state.use("owner-7", REQUESTS, 500.0).enter(500.0)
    assert set(state.report(700.0)) == {"owner-7"} and len(state._uses) == 1


class Gateways:
    """Gateways that stream outputs of one owner, and exchange reports each second."""

    def __init__(self, names: str, per_minute: int) -> None:
        self.limits = QuotaLimits(tokens_per_minute=per_minute)
        self.states = {name: QuotaState() for name in names}
        self.running: list[tuple[OwnerUse, Reservation]] = []
        self.ended_early = 0
        self.used: list[tuple[float, int]] = []
        self.now_s = 0.0
        self.table: dict[str, QuotaReport] = {}
        for _ in range(3):
            self.exchange()

    def exchange(self) -> None:
        """Each gateway writes its report and reads the others', one after the other."""
        for name, state in self.states.items():
            self.table[name] = QuotaReport(int(self.now_s), state.report(self.now_s))
            others = {key: report for key, report in self.table.items() if key != name}
            state.receive(others, self.now_s)
        self.now_s += 1

    def send(self, name: str, most: int = 10_000) -> bool:
        use = self.states[name].use(OWNER, self.limits, self.now_s)
        if use.enter(self.now_s) is not None:
            return False
        reserved = use.reserve(1, (most,), self.now_s)
        if isinstance(reserved, Exceeded):
            use.leave(0.0)
            return False
        self.used.append((self.now_s, 1))
        self.running.append((use, reserved))
        return True

    def generate(self, tokens: int, length: int) -> None:
        """Each output generates tokens, one after the other, and ends at its length."""
        for use, reserved in list(self.running):
            new, count = 0, reserved.counted
            while new < tokens and count < length and not use.grow(reserved, count + 1, self.now_s):
                new, count = new + 1, count + 1
            self.used.append((self.now_s, new))
            refused = new < tokens and count < length
            self.ended_early += refused
            if refused or count == length:
                use.settle(reserved, count, True, self.now_s)
                use.leave(1.0)
                self.running.remove((use, reserved))

    def most(self) -> int:
        """The maximum number of tokens in a minute."""
        return max(
            sum(tokens for other_s, tokens in self.used if time_s - 60 < other_s <= time_s)
            for time_s in range(int(self.now_s) + 1)
        )


@pytest.mark.parametrize("places", ["a", "ab", "abcd"])
@pytest.mark.parametrize("turn_s", [1, 10])
@pytest.mark.parametrize("speed", [100, 5000])
def test_floods_of_long_outputs_stay_within_the_quota(places: str, turn_s: int, speed: int) -> None:
    """At some gateways first, then at others."""
    gateways, length = Gateways("abcd", 60_000), 5000
    for second in range(60):
        gateways.exchange()
        for place in places:
            name = "abcd"[("abcd".index(place) + second // turn_s) % 4]
            gateways.states[name].use(OWNER, gateways.limits, gateways.now_s)._output_mean = 1
            for _ in range(30):
                gateways.send(name)
        gateways.generate(speed, length)
    # Beyond a request at each gateway that started alone on a full bucket.
    assert 0.5 * 60_000 < gateways.most() <= 1.1 * 60_000 + 4 * (length + 1)


def test_outputs_continue_when_traffic_moves_to_another_gateway() -> None:
    """At 80 % of the limit; each output takes 20 s."""
    gateways, sent, served = Gateways("ab", 60_000), 0, 0
    for second in range(240):
        gateways.exchange()
        sent += 1
        served += gateways.send("ab"[second // 80 % 2])
        gateways.generate(40, 800)
    assert gateways.ended_early == 0
    assert served > 0.9 * sent
