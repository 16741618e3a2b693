"""Choice of a group by cached prefixes."""

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from services.core.cost.model import TOKEN_COSTS, CostModel
from services.core.prefix.block_hash import THIN_MAX, ThinHashes
from services.core.report import Load, LoadReport
from services.core.reporting import LoadReporting, ReportSchedule
from services.core.scheduler.group_index import DIRECT_MAX
from services.core.scheduler.prefix_ranking import CANDIDATES, WITHOUT_LOOKUP_MAX, predicted_ttft_s
from services.core.scheduler.state import SchedulerState
from services.core.scheduler.vocabulary import (
    Asked,
    Command,
    Event,
    GroupJoined,
    GroupLeft,
    LoadLost,
    LoadReported,
    SendAssignment,
    SendRefusal,
    ServingGroup,
    Ticked,
)
from tests.support.reports import load_reported

STRIDE = 8
HASHED = STRIDE * 16
"""Tokens for which one hash stands."""


class Dispatch:
    """Groups w0, w1, … of 1,000 blocks, and a scheduler that ranks them by cached prefixes."""

    def __init__(self, groups: int, cost: CostModel = TOKEN_COSTS) -> None:
        self.state = SchedulerState(10_000, 1000.0, ttft=cost)
        self.now_s = 0.0
        self._numbers = itertools.count(1)
        for number in range(groups):
            self.join(f"w{number}")

    def __call__(self, event: Event) -> list[Command]:
        commands = self.state.handle(event)
        self.state.check_invariants()
        return commands

    def join(self, name: str, epoch: int = 1, **settings: Any) -> None:
        known = {"capacity_blocks": 1000, "block_size": 16, "max_model_len": 16_000}
        group = ServingGroup(
            f"group-{name}", epoch, name, f"{name}-a", f"{name}:1", "m", **known | settings
        )
        self(GroupJoined(self.now_s, group))
        self.report(name, epoch=epoch)

    def report(self, name: str, **changes: Any) -> list[Command]:
        fields = {"free": 1000, "incarnation": f"{name}-a"} | changes
        return self(load_reported(self.now_s, name, next(self._numbers), **fields))

    def ask(
        self,
        hashes: tuple[int, ...],
        tokens: int = 0,
        max_tokens: int = 1,
        affinity: int = 0,
        **load: Any,
    ) -> str:
        """The worker that gets a prompt; it reports this with its arrival, after all others end."""
        request_id = f"r{next(self._numbers)}"
        tokens = tokens or len(hashes) * HASHED + 1
        (command,) = [
            command
            for command in self(
                Asked(
                    request_id,
                    "m",
                    tokens,
                    max_tokens,
                    now_s=self.now_s,
                    stream_id=1,
                    prefix=ThinHashes(STRIDE, hashes),
                    affinity=affinity,
                )
            )
            if isinstance(command, SendAssignment)
        ]
        self.report(command.worker_id, received=(request_id,), **load)
        return command.worker_id


def chat(number: int, turns: int) -> tuple[int, ...]:
    return tuple(range(1000 * number, 1000 * number + turns))


def test_a_chat_stays_at_its_group_and_others_spread() -> None:
    dispatch = Dispatch(4)
    homes = {number: dispatch.ask(chat(number, 2)) for number in range(3)}
    for turns in range(3, 9):
        for number, home in homes.items():
            assert dispatch.ask(chat(number, turns)) == home
    snapshot = dispatch.state.snapshot(0.0)
    assert 0 < snapshot.cached_tokens_total < snapshot.prompt_tokens_total
    assert snapshot.cached_tokens_total == 3 * HASHED * sum(range(2, 8))
    assert snapshot.wants_prefixes


def test_a_session_prefers_the_same_of_equal_groups() -> None:
    homes = {session: Dispatch(4).ask((), 10, affinity=session) for session in range(1, 60)}
    dispatch = Dispatch(4)

    assert set(homes.values()) == {"w0", "w1", "w2", "w3"}
    assert Dispatch(4).ask((), 10) == "w0"
    for session, home in homes.items():
        assert dispatch.ask((), 10, affinity=session) == home


def test_load_and_cached_prefixes_outweigh_a_session() -> None:
    home = Dispatch(2).ask((), 10, affinity=7)
    other = ({"w0", "w1"} - {home}).pop()
    dispatch = Dispatch(2)
    dispatch.report(home, free=500, running=1)

    assert dispatch.ask((), 10, affinity=7) == other
    dispatch.report(home)
    assert dispatch.ask((), 10, affinity=7) == home


def test_waiting_prompts_may_outweigh_cached_prefixes() -> None:
    dispatch = Dispatch(2)
    home = dispatch.ask(chat(1, 10))
    other = ({"w0", "w1"} - {home}).pop()
    dispatch.report(home, prefill=9 * HASHED)
    assert dispatch.ask(chat(1, 10)) == home
    dispatch.report(home, prefill=11 * HASHED)
    assert dispatch.ask(chat(1, 10)) == other


def test_prompts_of_yielding_batch_requests_do_not_count_as_waiting() -> None:
    dispatch = Dispatch(2)
    home = dispatch.ask(chat(1, 10))
    other = ({"w0", "w1"} - {home}).pop()
    batch = {"prefill": 20 * HASHED, "running": 1, "batch_running": 1, "batch_blocks": 100}
    dispatch.report(home, batch_yields=True, free=900, **batch)
    assert dispatch.ask(chat(1, 10)) == home
    dispatch.report(home, batch_yields=False, free=900, **batch)
    assert dispatch.ask(chat(1, 10)) == other
    # Three sequences in four are online: they are taken to have so much of the prompts.
    dispatch.report(home, batch_yields=True, free=900, **batch | {"running": 4})
    assert dispatch.ask(chat(1, 10)) == other


def test_requests_in_flight_count_as_waiting() -> None:
    dispatch = Dispatch(2)
    home = dispatch.ask(chat(1, 4))
    first = Asked("a", "m", 20 * HASHED, 1, now_s=0.0, stream_id=1, prefix=_prefix(chat(1, 4)))
    (_, to_home) = dispatch(first)
    second = Asked("b", "m", 8 * HASHED, 1, now_s=0.0, stream_id=1, prefix=_prefix(chat(1, 4)))
    (_, elsewhere) = dispatch(second)
    assert isinstance(to_home, SendAssignment) and isinstance(elsewhere, SendAssignment)
    assert to_home.worker_id == home != elsewhere.worker_id


def test_a_merged_group_divides_waiting_work_by_its_members() -> None:
    dispatch = Dispatch(0)
    dispatch.join("w0", members=4)
    dispatch.join("w1")
    home = dispatch.ask(chat(1, 10))
    assert home == "w0"
    dispatch.report(home, prefill=30 * HASHED)
    assert dispatch.ask(chat(1, 10)) == home
    dispatch.report(home, prefill=50 * HASHED)
    assert dispatch.ask(chat(1, 10)) == "w1"


def test_groups_without_room_are_left_out() -> None:
    dispatch = Dispatch(6)
    home = dispatch.ask(chat(1, 10))
    dispatch.report(home, free=10 * STRIDE)
    assert dispatch.ask(chat(1, 10)) != home
    dispatch.report(home, free=1000)
    assert dispatch.ask(chat(1, 11)) == home


def test_the_share_of_kv_breaks_ties() -> None:
    dispatch = Dispatch(3)
    for name, free in (("w0", 300), ("w1", 900), ("w2", 600)):
        dispatch.report(name, free=free)
    assert dispatch.ask((), tokens=100) == "w1"
    # A hit of few tokens of a long prompt is no reason to go to a fuller group.
    for name in ("w0", "w1"):
        dispatch.report(name, free=900)
    dispatch.report("w2", free=1000)
    assert dispatch.ask(chat(7, 1)) == "w2"
    dispatch.report("w2", free=600)
    assert dispatch.ask(chat(7, 1)) == "w2"
    dispatch.report("w2", free=600)
    assert dispatch.ask(chat(7, 1), tokens=40 * HASHED) == "w0"


def test_each_group_is_predicted_with_its_own_costs() -> None:
    """The slow group has half of the prefill backlog, and takes four times as long for it."""
    dispatch = Dispatch(0)
    dispatch.join("w0", cost_model=TOKEN_COSTS.slowed(4))
    dispatch.join("w1", cost_model=TOKEN_COSTS)
    backlogs = {"w0": 1000, "w1": 2000}
    for name, prefill in backlogs.items():
        dispatch.report(name, prefill=prefill)
    assert dispatch.ask((), tokens=100) == "w1"
    alike = Dispatch(2)
    for name, prefill in backlogs.items():
        alike.report(name, prefill=prefill)
    assert alike.ask((), tokens=100) == "w0"


def test_noise_in_learned_costs_does_not_decide_between_equal_groups() -> None:
    """The group with the smaller backlog has learned longer times."""
    dispatch = Dispatch(0)
    dispatch.join("w0", cost_model=TOKEN_COSTS)
    dispatch.join("w1", cost_model=TOKEN_COSTS.slowed(1.25))
    for name, prefill in {"w0": 1100, "w1": 1000}.items():
        dispatch.report(name, prefill=prefill)
    assert dispatch.ask((), tokens=100) == "w1"


def test_a_group_without_costs_is_like_the_mean_of_the_others() -> None:
    """Without the others, it is like the default, whose unit is a second per token."""
    for slowdown, chosen in ((1.0, "w2"), (100.0, "w0")):
        dispatch = Dispatch(0, TOKEN_COSTS)
        dispatch.join("w0", cost_model=TOKEN_COSTS.slowed(1e-3))
        dispatch.join("w1", cost_model=TOKEN_COSTS.slowed(1e-3 * slowdown))
        dispatch.join("w2")
        for name, prefill in {"w0": 3000, "w1": 9000, "w2": 1000}.items():
            dispatch.report(name, prefill=prefill)
        assert dispatch.ask((), tokens=100) == chosen


@pytest.mark.parametrize("slowed", [("alpha", 1e307), ("beta", 1e308)])
def test_infinite_costs_do_not_stop_dispatch(slowed: tuple[str, float]) -> None:
    """Without a finite prediction a group comes last; if all lack one, the score decides."""
    broken = replace(TOKEN_COSTS, **dict([slowed]))
    for costs, chosen in (((broken, TOKEN_COSTS), "w1"), ((broken, broken), "w0")):
        dispatch = Dispatch(0)
        for number, cost in enumerate(costs):
            dispatch.join(f"w{number}", cost_model=cost)
        assert dispatch.ask((), tokens=10_000) == chosen


def test_new_costs_of_a_group_keep_its_cache() -> None:
    dispatch = Dispatch(0)
    for name in ("w0", "w1", "w2"):
        dispatch.join(name, cost_model=TOKEN_COSTS)
    home = dispatch.ask(chat(1, 10))
    dispatch.join(home, cost_model=TOKEN_COSTS.slowed(1.01))
    cached = dispatch.state.snapshot(0.0).cached_tokens_total
    assert dispatch.ask(chat(1, 10)) == home
    assert dispatch.state.snapshot(0.0).cached_tokens_total > cached
    dispatch.join(home, cost_model=TOKEN_COSTS.slowed(10_000))
    assert dispatch.ask(chat(1, 10)) != home
    dispatch(GroupLeft(0.0, f"group-{home}"))
    assert dispatch.ask(chat(1, 10)) != home


def test_a_group_that_changes_has_lost_its_cache() -> None:
    dispatch = Dispatch(3)
    home = dispatch.ask(chat(1, 10))
    dispatch.join(home, epoch=2)
    cached = dispatch.state.snapshot(0.0).cached_tokens_total
    dispatch.ask(chat(1, 10))
    assert dispatch.state.snapshot(0.0).cached_tokens_total == cached


def test_blocks_that_a_worker_has_dropped_no_longer_count() -> None:
    dispatch = Dispatch(3)
    home = dispatch.ask(chat(1, 10))
    dispatch.report(home, dropped=chat(1, 10)[4:])
    cached = dispatch.state.snapshot(0.0).cached_tokens_total
    assert dispatch.ask(chat(1, 10)) == home
    assert dispatch.state.snapshot(0.0).cached_tokens_total == cached + 4 * HASHED


def test_a_repeated_eviction_does_not_drop_a_recached_prefix() -> None:
    dispatch, idle = Dispatch(1), Load(0, 0, 1000, 0)
    loads = LoadReporting("w0", "w0-a", ReportSchedule(0.005, 0.5))
    for _ in range(50):  # newer than what Dispatch reports
        loads.create_next(1, idle, 0.0)

    def hit_tokens(report: LoadReport, passed_on: bool = False) -> int:
        dispatch(LoadReported(0.0, report, passed_on))
        before = dispatch.state.snapshot(0.0).cached_tokens_total
        dispatch.ask(chat(1, 3))
        return dispatch.state.snapshot(0.0).cached_tokens_total - before

    dispatch.ask(chat(1, 3))
    loads.note_evicted(chat(1, 3)[1:])
    late = loads.create_out_of_band(1, idle)
    dropped = loads.create_next(1, idle, 0.0)
    assert hit_tokens(dropped) == HASHED
    beside = loads.create_out_of_band(1, idle)
    assert beside.dropped_prefixes == dropped.dropped_prefixes
    for report, passed_on in (
        (beside, True),
        (late, True),
        (loads.create_next(1, idle, 0.0), False),
    ):
        assert hit_tokens(report, passed_on) == 3 * HASHED
    loads.note_evicted(chat(1, 3)[2:])
    assert hit_tokens(loads.create_out_of_band(1, idle), passed_on=True) == 2 * HASHED
    assert hit_tokens(loads.create_next(1, idle, 0.0)) == 3 * HASHED


@pytest.mark.parametrize("lost", [False, True], ids=["a new group", "reports that ended"])
def test_a_forwarded_load_before_the_first_own_does_not_count_hits(lost: bool) -> None:
    dispatch = Dispatch(0)
    counters = {"queries": 50_000_000, "hits": 0}
    group = ServingGroup("group-w0", 1, "w0", "w0-a", "w0:1", "m", 1000, 16, 16_000)
    dispatch(GroupJoined(0.0, group))
    if lost:
        dispatch.report("w0", **counters)
        dispatch(LoadLost(0.0, "w0", "w0-a"))
    dispatch.report("w0", **counters, passed_on=True)
    dispatch.report("w0", **counters)
    queries = hits = 0
    for turn in range(10):
        before = dispatch.state.snapshot(0.0).cached_tokens_total
        queries += 4 * HASHED + 1
        hits += 4 * HASHED * (turn > 0)
        dispatch.ask(chat(1, 4), queries=50_000_000 + queries, hits=hits)
    assert dispatch.state.snapshot(0.0).cached_tokens_total == before + 4 * HASHED


def test_a_worker_without_lookups_is_not_preferred() -> None:
    dispatch = Dispatch(3)
    for _ in range(WITHOUT_LOOKUP_MAX + 3):
        dispatch.ask(chat(1, 10))
    cached = dispatch.state.snapshot(0.0).cached_tokens_total
    dispatch.ask(chat(1, 10))
    assert dispatch.state.snapshot(0.0).cached_tokens_total == cached


def test_flapping_workers_are_chosen_last_despite_cached_prefixes() -> None:
    dispatch = Dispatch(3)
    home = dispatch.ask(chat(1, 10))
    for _ in range(6):
        dispatch.now_s += 0.5
        for name in ("w0", "w1", "w2"):
            dispatch.report(name)
        dispatch(LoadLost(dispatch.now_s, home, f"{home}-a"))
        dispatch(Ticked(dispatch.now_s))
    dispatch.report(home)
    assert dispatch.ask(chat(1, 10)) != home


def test_a_prompt_with_too_many_hashes_is_refused() -> None:
    dispatch = Dispatch(1)
    hashes = tuple(range(THIN_MAX + 1))
    (refusal,) = dispatch(
        Asked("r", "m", 10**4, 1, now_s=0.0, stream_id=1, prefix=ThinHashes(8, hashes))
    )
    assert isinstance(refusal, SendRefusal) and "65 hashes" in refusal.message


def test_the_last_group_may_leave_and_another_come() -> None:
    dispatch = Dispatch(1)
    dispatch.ask(chat(1, 3))
    dispatch(GroupLeft(0.0, "group-w0"))
    dispatch.join("w1")
    assert dispatch.ask(chat(1, 3)) == "w1"
    assert dispatch.state.snapshot(0.0).cached_tokens_total == 0


@pytest.mark.parametrize("groups", [CANDIDATES, DIRECT_MAX // 2, 2 * DIRECT_MAX])
def test_a_chat_is_found_among_many_groups(groups: int) -> None:
    rng = random.Random(groups)
    dispatch = Dispatch(groups)
    homes = {number: dispatch.ask(chat(number, 3)) for number in range(groups)}
    for number in rng.sample(sorted(homes), min(groups, 20)):
        for name in {f"w{rng.randrange(groups)}" for _ in range(3)} - {homes[number]}:
            dispatch.report(name, free=rng.randrange(900, 1000), running=rng.randrange(3))
        assert dispatch.ask(chat(number, 4)) == homes[number]


def test_the_prediction_equals_that_of_the_cost_model() -> None:
    cost = CostModel(alpha=1e-8, beta=1e-4, gamma=0.02, lam=0.015)
    dispatch = Dispatch(1, cost)
    dispatch.report("w0", running=10, free=900, prefill=4000)
    (load,) = dispatch.state._groups.loads
    waiting_s = 4000 * (cost.chunk_s(0, 1000) - cost.lam) / 1000
    decodes_s = 3 * cost.decodes_alone_s(10, 100 * 16)
    assert predicted_ttft_s(cost, load, 1000, 400) == pytest.approx(
        cost.chunk_s(400, 600) + waiting_s + decodes_s
    )


def _prefix(hashes: tuple[int, ...]) -> ThinHashes:
    return ThinHashes(STRIDE, hashes)
