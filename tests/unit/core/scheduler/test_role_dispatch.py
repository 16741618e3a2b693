"""Choice of the groups that compute a prompt and that decode, while workers have roles."""

from dataclasses import replace

import pytest

from services.core.cost.model import TOKEN_COSTS, CostModel
from services.core.destination import Destination
from services.core.prefix.block_hash import ThinHashes
from services.core.role import Role
from services.core.scheduler.group_load import RESERVATION_S
from services.core.scheduler.state import SchedulerState
from services.core.scheduler.vocabulary import (
    Asked,
    GroupJoined,
    GroupLeft,
    RequestPlaced,
    SendAssignment,
    Ticked,
    Withdrawn,
)
from tests.unit.core.scheduler.test_prefix_ranking import STRIDE, Dispatch, chat
from tests.unit.core.scheduler.test_state_properties import World

P, D, M = Role.PREFILL, Role.DECODE, Role.MIXED
LONG, SHORT = 3000, 100
# Seconds of a token of a prompt, and of each decode.
COSTS = CostModel(0.0, 1e-3, 0.02, 0.01)


class Roles(Dispatch):
    """Groups w0, w1, … with these roles, and an iteration of 1,000 tokens."""

    def __init__(self, *roles: Role, min_tokens: int | None = None) -> None:
        super().__init__(0, COSTS)
        self.state = SchedulerState(10_000, 1000.0, ttft=COSTS, hand_over_min_tokens=min_tokens)
        for number, role in enumerate(roles):
            self.join(f"w{number}", role=role, max_batch_tokens=1000)

    def assign(
        self, request_id: str, tokens: int, max_tokens: int = 50, **how: object
    ) -> SendAssignment:
        ask = Asked(request_id, "m", tokens, max_tokens, now_s=self.now_s, stream_id=1)
        commands = self(replace(ask, **how))  # type: ignore[arg-type]
        (assigned,) = [each for each in commands if isinstance(each, SendAssignment)]
        return assigned

    def reserved(self, name: str) -> int:
        load = self.state._groups.of_id(f"group-{name}")
        assert load is not None
        return load.reserved_blocks


def place(name: str, epoch: int = 1) -> Destination:
    return Destination(name, f"{name}:1", f"group-{name}", epoch)


def test_only_long_prompts_are_handed_over() -> None:
    dispatch = Roles(P, D)
    long = dispatch.assign("long", LONG)
    assert (long.worker_id, long.hand_to) == ("w0", place("w1"))
    short = dispatch.assign("short", SHORT)
    assert (short.worker_id, short.hand_to) == ("w1", None)


@pytest.mark.parametrize(
    ("least", "tokens", "handed"),
    [(None, 100, False), (None, 150, True), (500, 600, True), (700, 600, False)],
)
def test_minimum_prompt_length_of_a_hand_over(least: int | None, tokens: int, handed: bool) -> None:
    dispatch = Roles(P, D, min_tokens=least)
    assigned = dispatch.assign("r", tokens)
    assert (assigned.hand_to is not None) is handed
    assert assigned.worker_id == ("w0" if handed else "w1")


def test_a_request_without_further_tokens_ends_where_its_prompt_is_computed() -> None:
    dispatch = Roles(P, D)
    dispatch.report("w1", running=10)
    assigned = dispatch.assign("r", LONG, max_tokens=1)
    assert (assigned.worker_id, assigned.hand_to) == ("w0", None)


def test_resumed_requests_are_not_handed_over() -> None:
    dispatch = Roles(P, D)
    assigned = dispatch.assign("r", LONG, resumed=True)
    assert (assigned.worker_id, assigned.hand_to) == ("w1", None)


def test_the_decode_group_with_the_most_room_takes_over() -> None:
    dispatch = Roles(P, D, D)
    dispatch.report("w1", free=500, running=40)
    dispatch.report("w2", running=40)
    assert dispatch.assign("r0", LONG).hand_to == place("w2")
    # Its reservations count: at some time the other has more room.
    targets = {dispatch.assign(f"r{number}", LONG).hand_to for number in range(1, 5)}
    assert targets == {place("w1"), place("w2")}


def test_without_room_to_decode_a_prompt_is_not_handed_over() -> None:
    dispatch = Roles(P, D)
    dispatch.report("w1", free=100)
    assigned = dispatch.assign("r", LONG)
    assert (assigned.worker_id, assigned.hand_to) == ("w0", None)
    assert dispatch.assign("s", SHORT).worker_id == "w1"


def test_both_groups_reserve_blocks_until_the_request_arrives() -> None:
    blocks = LONG // 16 + 2
    dispatch = Roles(P, D)
    dispatch.assign("r", LONG)
    assert dispatch.reserved("w0") == dispatch.reserved("w1") == blocks
    dispatch.report("w0", received=("r",))
    assert (dispatch.reserved("w0"), dispatch.reserved("w1")) == (0, blocks)
    dispatch(RequestPlaced(dispatch.now_s, "r", "group-w1", 1))
    assert dispatch.reserved("w1") == 0

    dispatch.assign("s", LONG)
    dispatch(Withdrawn(dispatch.now_s, "s"))
    assert dispatch.reserved("w0") == dispatch.reserved("w1") == 0

    dispatch.assign("t", LONG)
    dispatch.now_s += RESERVATION_S
    dispatch(Ticked(dispatch.now_s))
    assert dispatch.reserved("w0") == dispatch.reserved("w1") == 0


def test_a_repeated_ask_gets_the_same_target() -> None:
    dispatch = Roles(P, D, D)
    first = dispatch.assign("r", LONG)
    dispatch.report("w1" if first.hand_to == place("w2") else "w2", free=1000)
    assert dispatch.assign("r", LONG) == first


def test_a_request_that_failed_after_its_move_is_not_sent_back() -> None:
    dispatch = Roles(P, D)
    assert dispatch.assign("r", LONG).worker_id == "w0"
    dispatch(RequestPlaced(dispatch.now_s, "r", "group-w1", 1))
    again = dispatch.assign("r", LONG)
    assert (again.worker_id, again.hand_to) == ("w1", None)


def turn(dispatch: Roles, request_id: str, turns: int) -> SendAssignment:
    hashes = chat(1, turns)
    tokens = turns * STRIDE * 16 + 200
    return dispatch.assign(request_id, tokens, prefix=ThinHashes(STRIDE, hashes))


def test_the_next_turn_of_a_chat_goes_where_its_answer_was_computed() -> None:
    dispatch = Roles(P, D, D)
    first = turn(dispatch, "r0", 20)
    assert first.worker_id == "w0" and first.hand_to is not None
    home = first.hand_to
    dispatch(RequestPlaced(dispatch.now_s, "r0", home.group_id, home.epoch))
    for name in ("w0", "w1", "w2"):
        dispatch.report(name, received=("r0",), running=10)
    second = turn(dispatch, "r1", 22)
    # Both have the first prompt cached; only the decode worker has the answer, too.
    assert (second.worker_id, second.hand_to) == (home.worker_id, None)
    # Much that is new is no burden for it.
    third = dispatch.assign("r2", 8000, prefix=ThinHashes(STRIDE, chat(1, 20)))
    assert third.worker_id == "w0" and third.hand_to is not None
    # Another chat is not bound to it.
    other = dispatch.assign("r3", LONG, prefix=ThinHashes(STRIDE, chat(2, 20)))
    assert other.worker_id == "w0" and other.hand_to is not None


def test_a_prompt_waits_at_a_prefill_group_rather_than_stall_many_answers() -> None:
    dispatch = Roles(P, D)
    dispatch.report("w0", prefill=2 * LONG)
    dispatch.report("w1", running=20)
    assert dispatch.assign("r", LONG).worker_id == "w0"
    # The penalty bounds the wait.
    dispatch.report("w0", prefill=50 * LONG)
    assigned = dispatch.assign("s", LONG)
    assert (assigned.worker_id, assigned.hand_to) == ("w1", None)


def test_an_idle_decode_group_computes_prompts_while_prefill_groups_are_busy() -> None:
    dispatch = Roles(P, D)
    dispatch.report("w0", prefill=LONG)
    assert dispatch.assign("r", LONG).worker_id == "w1"


def test_short_prompts_go_to_prefill_groups_if_no_other_has_room() -> None:
    dispatch = Roles(P, D)
    dispatch.report("w1", free=0)
    assert dispatch.assign("r", SHORT).worker_id == "w0"


def test_a_merged_group_takes_no_hand_overs() -> None:
    dispatch = Roles(P, D)
    dispatch.join("w1", epoch=2, role=D, members=2)
    assert dispatch.assign("r", LONG).hand_to is None


def test_a_new_role_keeps_load_and_reservations() -> None:
    dispatch = Roles(M, M)
    first = dispatch.assign("r", LONG)
    assert first.hand_to is None
    held = dispatch.reserved(first.worker_id)
    for name, role in (("w0", P), ("w1", D)):
        group = dispatch.state._groups.of_id(f"group-{name}")
        assert group is not None
        dispatch(GroupJoined(dispatch.now_s, replace(group.group, role=role)))
    assert dispatch.reserved(first.worker_id) == held > 0
    dispatch.report("w1", running=40)
    assert dispatch.assign("s", LONG).hand_to == place("w1")
    for name in ("w0", "w1"):
        group = dispatch.state._groups.of_id(f"group-{name}")
        assert group is not None
        dispatch(GroupJoined(dispatch.now_s, replace(group.group, role=M)))
    assert dispatch.assign("t", LONG).hand_to is None


def test_groups_that_leave_are_forgotten() -> None:
    dispatch = Roles(P, D)
    dispatch.assign("r", LONG)
    dispatch(GroupLeft(dispatch.now_s, "group-w1"))
    dispatch(RequestPlaced(dispatch.now_s, "r", "group-w1", 1))
    assert dispatch.assign("s", LONG).hand_to is None


class RoleWorld(World):
    """A `World` whose groups get roles, and whose requests may be handed over."""

    def __init__(self, seed: int, least: int | None, mixed: bool = False) -> None:
        super().__init__(seed, 8, TOKEN_COSTS)
        self.state = SchedulerState(
            12, 20.0, overtaken_max=8, ttft=TOKEN_COSTS, hand_over_min_tokens=least
        )
        self.mixed = mixed
        self.handed = self.moved = 0

    def step(self) -> None:
        super().step()
        if not self.mixed:
            # Frequent reports, as a hand-over needs two workers that have just reported.
            actions = [self.change_role, self.place, *[self.report] * 4]
            self.rng.choice(actions)()

    def change_role(self) -> None:
        if self.groups:
            group_id = self.rng.choice(sorted(self.groups))
            changed = replace(self.groups[group_id], role=self.rng.choice([P, P, D, D, M]))
            self.groups[group_id] = changed
            assert self.feed(GroupJoined(self.now_s, changed)) == []

    def place(self) -> None:
        """A request has moved to its target."""
        assigned = [(name, self.state._assignments.get(name)) for name in self.asks]
        handed = [(name, place) for name, place in assigned if place is not None and place.hand_to]
        if handed:
            name, place = self.rng.choice(handed)
            assert place.hand_to is not None
            target = place.hand_to
            self.moved += 1
            for held in self.reserved.values():
                held.pop(name, None)
            assert self.feed(RequestPlaced(self.now_s, name, target.group_id, target.epoch)) == []

    def book(self, command: SendAssignment) -> None:
        super().book(command)
        target = command.hand_to
        if target is None:
            return
        self.handed += 1
        group, ask = self.groups[target.group_id], self.asks[command.request_id]
        assert (group.role, group.epoch) == (D, target.epoch)
        assert self.groups[command.group_id].role is P
        needed = self.needed(ask, group)
        assert needed <= self.left(target.group_id)
        held = self.reserved.setdefault(target.group_id, {})
        held[command.request_id] = (needed, self.now_s + RESERVATION_S)


@pytest.mark.parametrize("least", [1, 50, None])
def test_every_ask_ends_exactly_once_and_no_group_is_overbooked(least: int | None) -> None:
    handed = moved = 0
    for seed in range(33):
        world = RoleWorld(seed, least)
        for _ in range(400):
            world.step()
        world.now_s += 60.0
        world.tick()
        assert not world.waiting and set(world.ended) == set(world.asks), seed
        world.now_s += 60.0
        world.tick()
        assert all(load.reserved_blocks == 0 for load in world.state._groups.loads), seed
        handed += world.handed
        moved += world.moved
    # By default, no prompt of this world is long enough.
    assert (handed > 30 and moved > 10) == (least is not None), (handed, moved)


@pytest.mark.parametrize("seed", range(30))
def test_dispatch_is_unchanged_without_roles(seed: int) -> None:
    """The setting `mixed` is off: decisions equal those without hand-overs."""
    plain, other = World(seed, 8, TOKEN_COSTS), RoleWorld(seed, 1, mixed=True)
    for _ in range(400):
        plain.step()
        other.step()
    # Some steps have nothing to do, such as the withdrawal of a request before the first.
    assert plain.log == other.log and len(plain.log) >= 300
    assert "assigned" in other.ended.values()
