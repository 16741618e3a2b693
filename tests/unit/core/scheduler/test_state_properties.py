"""Random sequences of events: every ask ends once, nothing is overbooked, order is kept."""

from random import Random

import pytest

from services.core.cost.model import TOKEN_COSTS, CostModel
from services.core.prefix.block_hash import ThinHashes
from services.core.request import admission_blocks
from services.core.scheduler.group_load import GROWTH_BLOCKS, REPORT_FRESH_S
from services.core.scheduler.state import SchedulerState
from services.core.scheduler.vocabulary import (
    Asked,
    Command,
    Event,
    GatewayGone,
    GroupJoined,
    GroupLeft,
    LoadLost,
    SendAssignment,
    SendRefusal,
    SendTicket,
    ServingGroup,
    ShortfallsReported,
    Ticked,
    Withdrawn,
)
from tests.support.reports import load_reported

QUEUE_LIMIT = 12
DEADLINE_S = 20.0


class World:
    """Two gateways and three workers with random events. Events and decisions are in `log`, for a
    replay.
    """

    def __init__(self, seed: int, overtaken_max: int, ttft: CostModel | None) -> None:
        self.rng = Random(seed)
        self.overtaken_max = overtaken_max
        self.state = SchedulerState(QUEUE_LIMIT, DEADLINE_S, overtaken_max=overtaken_max, ttft=ttft)
        self.log: list[tuple[Event, list[Command]]] = []
        self.overtaken: dict[str, int] = {}
        self.overtook = 0
        self.now_s = 100.0
        self.asks: dict[str, Asked] = {}
        self.stream_of: dict[str, int] = {}
        self.waiting: dict[str, float] = {}  # arrival
        self.ended: dict[str, str] = {}
        self.groups: dict[str, ServingGroup] = {}
        self.epochs = [0, 0, 0]
        self.room: dict[str, int] = {}  # per group: what its last valid report left
        self.reserved: dict[str, dict[str, tuple[int, float]]] = {}
        self.reports_sent = 0
        self.queries = 0
        self.newest: dict[str, int] = {}  # per group: the largest number that it heard
        self.running: dict[str, int] = {}  # per group, of the same report
        self.heard: dict[str, float] = {}  # per group: when its worker last reported

    def step(self) -> None:
        self.now_s += self.rng.choice([0.0, 0.0, 0.1, 0.5, 2.0])
        actions = [self.ask, self.ask, self.report, self.report, self.report, self.repeat]
        actions += [self.withdraw, self.tick, self.join, self.leave, self.gateway_goes, self.lose]
        actions += [self.tell_shortfall]
        weights = [4, 4, 3, 3, 3, 3, 2, 3, 1, 0.3, 0.3, 0.5, 0.5]
        self.rng.choices(actions, weights)[0]()

    def feed(self, event: Event) -> list[Command]:
        commands = self.state.handle(event)
        self.log.append((event, commands))
        self.state.check_invariants()
        for command in commands:
            self.check(command)
        assert set(self.waiting) == {
            request_id for request_id in self.asks if self.state._queue.get(request_id)
        }
        return commands

    def check(self, command: Command) -> None:
        request_id = command.request_id
        assert command.stream_id == self.stream_of[request_id]
        if isinstance(command, SendTicket):
            assert request_id not in self.ended
            return
        ending = "refused" if isinstance(command, SendRefusal) else "assigned"
        if isinstance(command, SendAssignment) and self.ended.get(request_id) == "assigned":
            return  # the same answer again
        assert request_id not in self.ended
        self.ended[request_id] = ending
        arrival_s = self.waiting.pop(request_id, None)
        if isinstance(command, SendAssignment):
            assert arrival_s is not None
            assert self.now_s - arrival_s - self.asks[request_id].excused_s < DEADLINE_S
            for request_id, other_s in self.waiting.items():
                if other_s < arrival_s:
                    assert not self.could_start(request_id), "it is older, and would fit"
                    self.overtook += 1
                    self.overtaken[request_id] = self.overtaken.get(request_id, 0) + 1
                    assert self.overtaken[request_id] <= self.overtaken_max
            self.book(command)

    def could_start(self, request_id: str) -> bool:
        ask = self.asks[request_id]
        tokens = ask.prompt_tokens + ask.max_tokens
        return any(
            self.needed(ask, group) <= self.left(group_id)
            and self.now_s - self.heard[group_id] <= REPORT_FRESH_S
            and tokens <= min(group.max_model_len, group.capacity_blocks * group.block_size)
            for group_id, group in self.groups.items()
            if group_id in self.heard and group_id in self.room
        )

    def left(self, group_id: str) -> int:
        growth = GROWTH_BLOCKS * self.running[group_id]
        return self.room[group_id] - self.booked(group_id) - growth

    def needed(self, ask: Asked, group: ServingGroup) -> int:
        tokens_max = ask.prompt_tokens + ask.max_tokens
        return admission_blocks(ask.prompt_tokens, tokens_max, group.block_size)

    def booked(self, group_id: str) -> int:
        held = self.reserved.get(group_id, {})
        return sum(blocks for blocks, lapse_s in held.values() if lapse_s > self.now_s)

    def book(self, command: SendAssignment) -> None:
        group = self.groups[command.group_id]
        assert (group.epoch, group.worker_id) == (command.epoch, command.worker_id)
        needed = self.needed(self.asks[command.request_id], group)
        held = self.reserved.setdefault(command.group_id, {})
        assert needed <= self.left(command.group_id)
        assert self.now_s - self.heard[command.group_id] <= REPORT_FRESH_S
        held[command.request_id] = (needed, self.now_s + 5.0)

    def ask(self) -> None:
        request_id = f"r{len(self.asks)}"
        waited_s, excused_s = self.rng.choice([(0.0, 0.0), (0.0, 0.0), (3.0, 0.0), (3.0, 2.0)])
        ask = Asked(
            stream_id=self.rng.randrange(2),
            request_id=request_id,
            model="m",
            prompt_tokens=self.rng.randrange(1, 200),
            max_tokens=self.rng.randrange(1, 80),
            waited_s=waited_s,
            excused_s=excused_s,
            now_s=self.now_s,
            prefix=self.some_prefix(),
        )
        self.asks[request_id] = ask
        self.stream_of[request_id] = ask.stream_id
        self.waiting[request_id] = self.now_s - ask.waited_s
        self.feed(ask)

    def some_prefix(self) -> ThinHashes:
        """A random part of one of a few chats."""
        chat, length = self.rng.randrange(4), self.rng.randrange(5)
        hashes = tuple(100 * chat + place for place in range(length))
        return ThinHashes(self.rng.choice([8, 8, 16]), hashes)

    def repeat(self) -> None:
        candidates = [
            request_id
            for request_id in self.asks
            if request_id in self.waiting or self.ended.get(request_id) == "assigned"
        ]
        if not candidates:
            return
        request_id = self.rng.choice(candidates)
        first = self.asks[request_id]
        stream_id = self.rng.randrange(2)
        waited_s = self.now_s - (first.now_s - first.waited_s)
        event = Asked(
            request_id,
            "m",
            first.prompt_tokens,
            first.max_tokens,
            now_s=self.now_s,
            stream_id=stream_id,
            waited_s=waited_s,
            excused_s=first.excused_s,
            prefix=first.prefix,
        )
        self.stream_of[request_id] = stream_id
        remembered = self.state._assignments.get(request_id)
        if request_id not in self.waiting and not self.holds(remembered):
            # Forgotten by now: it is a new decision.
            del self.ended[request_id]
            self.overtaken.pop(request_id, None)
            self.waiting[request_id] = min(
                first.now_s - first.waited_s,
                remembered.arrival_s if remembered is not None else self.now_s,
            )
            for held in self.reserved.values():
                held.pop(request_id, None)
        commands = self.feed(event)
        assert len(commands) >= 1

    def holds(self, remembered: object) -> bool:
        if remembered is None:
            return False
        group = self.groups.get(remembered.group_id)  # type: ignore[attr-defined]
        return group is not None and group.epoch == remembered.epoch  # type: ignore[attr-defined]

    def withdraw(self) -> None:
        if not self.asks:
            return
        request_id = self.rng.choice(sorted(self.asks))
        if self.waiting.pop(request_id, None) is not None:
            self.ended[request_id] = "withdrawn"
        for held in self.reserved.values():
            held.pop(request_id, None)
        if self.ended.get(request_id) == "assigned":
            self.ended[request_id] = "withdrawn"
        assert self.feed(Withdrawn(self.now_s, request_id)) == []

    def gateway_goes(self) -> None:
        stream_id = self.rng.randrange(2)
        for request_id in list(self.waiting):
            if self.stream_of[request_id] == stream_id:
                del self.waiting[request_id]
                self.ended[request_id] = "withdrawn"
        assert self.feed(GatewayGone(self.now_s, stream_id)) == []

    def tick(self) -> None:
        self.feed(Ticked(self.now_s))

    def tell_shortfall(self) -> None:
        short = self.rng.choice([{}, {"m": 5}, {"other": 5}])
        assert self.feed(ShortfallsReported(self.now_s, short)) == []

    def join(self) -> None:
        number = self.rng.randrange(3)
        self.epochs[number] += 1
        group = ServingGroup(
            f"group-w{number}",
            self.epochs[number],
            f"w{number}",
            f"inc{self.epochs[number] // 3}",
            f"w{number}:1",
            "m",
            40,
            16,
            300,
        )
        self.groups[group.group_id] = group
        self.forget(group.group_id)
        assert self.feed(GroupJoined(self.now_s, group)) == []

    def leave(self) -> None:
        group_id = f"group-w{self.rng.randrange(3)}"
        self.groups.pop(group_id, None)
        self.forget(group_id)
        assert self.feed(GroupLeft(self.now_s, group_id)) == []

    def forget(self, group_id: str) -> None:
        for known in (self.room, self.reserved, self.newest, self.heard):
            known.pop(group_id, None)

    def lose(self) -> None:
        if not self.groups:
            return
        group = self.groups[self.rng.choice(sorted(self.groups))]
        # Without an entry, the next assignment to it fails in `book`.
        self.room.pop(group.group_id, None)
        assert self.feed(LoadLost(self.now_s, group.worker_id, group.incarnation)) == []

    def report(self) -> None:
        if not self.groups:
            return
        group = self.groups[self.rng.choice(sorted(self.groups))]
        stale = self.rng.random() < 0.1
        incarnation = "another" if stale else group.incarnation
        held = self.reserved.get(group.group_id, {})
        received = tuple(request_id for request_id in sorted(held) if self.rng.random() < 0.5)
        free, wanted = self.rng.randrange(41), self.rng.choice([0, 0, 5])
        running = self.rng.randrange(5)
        passed_on = self.rng.random() < 0.3
        self.queries += self.rng.choice([0, 0, 300])
        self.reports_sent += 1
        number = self.reports_sent - self.rng.choice([0, 0, 0, 4])
        known = group.group_id in self.room
        if not stale and (known or not passed_on):
            if number > self.newest.get(group.group_id, 0):
                self.room[group.group_id] = free - wanted
                self.running[group.group_id] = running
                self.newest[group.group_id] = number
            if not passed_on:
                self.heard[group.group_id] = self.now_s
            for request_id in received:
                del held[request_id]
        self.feed(
            load_reported(
                self.now_s,
                group.worker_id,
                number,
                incarnation=incarnation,
                epoch=group.epoch,
                running=running,
                waiting=self.rng.randrange(2),
                free=free,
                wanted=wanted,
                received=received,
                passed_on=passed_on,
                prefill=self.rng.randrange(100),
                queries=self.queries,
                hits=self.queries // 3,
                dropped=self.some_prefix().hashes,
                dropped_total=self.rng.randrange(100),
            )
        )


@pytest.mark.parametrize("seed", range(150))
def test_every_ask_ends_exactly_once(seed: int) -> None:
    overtaken_max = (0, 1, 8)[seed % 3]
    world = World(seed, overtaken_max, (None, TOKEN_COSTS)[seed % 2])
    for _ in range(400):
        world.step()
    world.now_s += DEADLINE_S
    world.tick()
    assert not world.waiting
    assert (world.overtook > 0) == (overtaken_max > 0)
    assert set(world.ended) == set(world.asks)


@pytest.mark.parametrize("seed", range(20))
def test_a_replay_with_prefixes_repeats_the_decisions(seed: int) -> None:
    world = World(seed, 8, TOKEN_COSTS)
    for _ in range(400):
        world.step()
    again = SchedulerState(QUEUE_LIMIT, DEADLINE_S, overtaken_max=8, ttft=TOKEN_COSTS)
    assert [again.handle(event) for event, _ in world.log] == [made for _, made in world.log]
    assert again.snapshot(world.now_s) == world.state.snapshot(world.now_s)
