"""The group protocol and real engines in one process, under random faults.

Real: coordinators, fences, participants, servicers' requests, engines with a tiny model, the
gateway's attempts and journals. Modelled: a store with compare and swap, messages, lanes,
elections, leases, reports. One seed decides all of it, on a virtual clock. After each step the
invariants of
all parts hold; once the faults stop, all requests get the tokens of an undisturbed run, all groups
become stable, and nothing is left.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from services.core.changeover.state import Changeover
from services.core.groups.layer_map import Stage
from services.core.groups.reconfiguration import split_up
from services.core.groups.state import GroupState
from services.core.groups.vocabulary import GroupPhase, Member, StoredGroup, Targets
from services.core.request import Request
from services.gateway.serving.retry import LOST_MAX
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.compute.runner_config import RunnerConfig
from tests.support.engine_group import Stream
from tests.support.engine_networks import QueueNetwork
from tests.support.engines import (
    Engine,
    at_rest,
    check_at_rest,
    check_engines,
    wrong_books,
)
from tests.support.group_store import Violated
from tests.support.interleaved import interleaved
from tests.support.joined_control import REPORT_S, ControlPlane
from tests.support.joined_gateway import Client, JoinedGateway
from tests.support.joined_lanes import LaneFaults
from tests.support.joined_lives import Lives
from tests.support.joined_worker import WorkerProcess
from tests.support.undisturbed import CHUNK_BYTES

TURN_S = 0.002
IDLE_S = 0.1
"""Largest step of the clock while all are idle."""
STEPS = 30
REQUESTS_MAX, OPEN_MAX = 24, 5
SETTLE_S = 150.0
CALM_S = 40.0
TURNS_MAX = 40_000
STANDS_MAX_S = 90.0
"""Longest stall of a request while a worker serves."""


@dataclass(frozen=True)
class Rules:
    """The product's rules in a world; tests remove some.

    Without `troubles`, reports of stuck groups are lost. Without `resumes`, requests with tokens
    end when they lose their worker. `take_out` is applied to each engine before its first turn.
    With `divides`, there are four workers, and operators also split groups into smaller groups.
    """

    machine: type[Changeover] = Changeover
    groups: type[GroupState] = GroupState
    troubles: bool = True
    resumes: bool = True
    take_out: Callable[[Engine], None] = lambda _engine: None
    divides: bool = False


class JoinedWorld:
    """Call `run`, then `close`; `run` raises Violated."""

    def __init__(
        self, config: RunnerConfig, requests: Sequence[Request], seed: int, rules: Rules = Rules()
    ) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.faulty = True
        self.changes = True  # whether operators may request changes
        self.now_s = 0.0
        self.requests_max = REQUESTS_MAX
        self.processes: dict[str, WorkerProcess] = {}
        self.network = QueueNetwork(TURN_S)
        self._requests = requests
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._planned = 0
        self._events: deque[str] = deque(maxlen=40)
        self._turns = 0
        self._idle_turns = 0
        runner = ModelRunner.load(replace(config, budget_bytes=config.budget_bytes + (1 << 20)))
        self.layers = runner.stage_memory.num_layers
        runner.close()
        number = self.rng.choice([2, 2, 3, 3, 4])
        names = [f"w{index}" for index in range(4 if rules.divides else number)]
        self._divisions = random.Random(seed) if rules.divides else None
        self.divided = 0
        kv_bytes = self.rng.choice([5, 6, 8, 16]) * self.layers * CHUNK_BYTES
        roomy = replace(config, budget_bytes=config.budget_bytes + kv_bytes)
        self.gateway = JoinedGateway(self, rules.resumes)
        self.control = ControlPlane(self, rules.groups, rules.troubles)
        self.lives = Lives(self, names, roomy, rules)
        self.lanes = LaneFaults(self)
        for name in names:
            self.lives.start(name)
        self._likings = [self.rng.choice([0, 1, 1, 3]) for _ in self._faults()]
        apart = random.Random(f"lanes of {seed}")
        self._lane_likings = [apart.choice([0, 0, 1, 3]) for _ in self._lane_faults()]
        lasts: list[Callable[[], None] | None] = [None, None, self.lanes.isolate]
        lasts += [self.lanes.hang_up_amid, self.lanes.separate]
        self._last_fault = apart.choice(lasts)
        self._watch()

    # --- time and messages

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Schedule a call."""
        self._planned += 1
        due_s = self.now_s + max(delay_s, TURN_S)
        heapq.heappush(self._agenda, (due_s, self._planned, action))

    def delay_s(self) -> float:
        """A random latency of a message; some are late."""
        late = self.faulty and self.rng.random() < 0.1
        return self.rng.uniform(0.1, 2.0) if late else self.rng.uniform(0.001, 0.05)

    def mail(self, delivered: Callable[[], None], lost: Callable[[], None] | None = None) -> None:
        """Deliver a message, or lose it and call `lost`."""
        if self.faulty and self.rng.random() < 0.05:
            if lost is not None:
                self.later(self.delay_s(), lost)
            return
        self.later(self.delay_s(), delivered)

    def note(self, event: str) -> None:
        """Record an event for failure messages."""
        self._events.append(f"{self.now_s:8.3f} {event}")

    def turn(self) -> None:
        """Advance the clock, and let a random part take a turn."""
        self._turns += 1
        if self._turns > TURNS_MAX:
            raise Violated(f"it never ends: {self.describe()}")
        self._tell_time()
        awake = [process for process in self.processes.values() if not process.stands]
        actions: list[Callable[[], bool | None]] = [*self.network.deliveries()]
        actions += self.gateway.actions()
        for process in awake:
            actions += [process.turn, process.move_piece, process.serve]
        if actions and self._idle_turns <= 2 * len(actions):
            worked = self.rng.choice(actions)()
            self._idle_turns = self._idle_turns + 1 if worked is False else 0
        elif any([action() is not False for action in self._round()]):
            self._idle_turns = 0
        else:
            self._rest()

    def _round(self) -> list[Callable[[], bool | None]]:
        """A turn of every running process."""
        if self.network.deliveries() or self.gateway.actions():
            return [lambda: True]
        awake = [process for process in self.processes.values() if not process.stands]
        return [
            turn for process in awake for turn in (process.turn, process.move_piece, process.serve)
        ]

    def _rest(self) -> None:
        """Advance the clock to the next entry of the agenda, at most by a limit."""
        self.network.skip(min(IDLE_S, max(0.0, self._agenda[0][0] - self.now_s)))
        self._tell_time()

    def _tell_time(self) -> None:
        self.now_s = self.network.now_s()
        while self._agenda and self._agenda[0][0] <= self.now_s:
            heapq.heappop(self._agenda)[2]()
        for process in self.processes.values():
            if process.standing_changed and not process.stands:
                process.standing_changed = False
                self.later(0.1, partial(self._report, process))
        self.lanes.look()

    def _watch(self) -> None:
        """Periodic work: reports, retries of attaching, checks of streams."""
        self.gateway.pass_time()
        serves = bool(self.gateway.places())
        for client in self.gateway.open:
            if not serves:
                client.progressed_s = max(client.progressed_s, self.now_s - STANDS_MAX_S / 2)
            if self.now_s - client.progressed_s > STANDS_MAX_S:
                raise Violated(f"{client.request_id} stands still: {self.describe()}")
        self.later(0.2, self._watch)

    def report_often(self, process: WorkerProcess) -> None:
        """Schedule reports of a process for as long as it runs."""
        if self.processes.get(process.name) is process:
            self._report(process)
            self.later(REPORT_S, partial(self.report_often, process))

    def _report(self, process: WorkerProcess) -> None:
        if self.processes.get(process.name) is process and not process.stands:
            self.control.report(process)

    def _judge(self, client: Client, check: Callable[[Stream], None]) -> None:
        """Check an ended request: complete, unless it lost `LOST_MAX` workers without a token."""
        if client.stream.refused:
            assert client.lost >= LOST_MAX, client.stream.refused
            client.stream.aborted = True
        check(client.stream)

    # --- the run

    def run(self, check: Callable[[Stream], None]) -> None:
        """Run random events, then let all requests end; `check` compares a request's output.

        Raises Violated.
        """
        try:
            self._begin()
            for _ in range(STEPS):
                self.step()
            self._fail_last()
            self.settle()
            for client in self.gateway.clients.values():
                self._judge(client, check)
        except Exception as error:
            events = "\n".join(self._events)
            raise Violated(f"seed {self.seed}: {error!r}; the last events:\n{events}") from error

    def _begin(self) -> None:
        """In most worlds, form a group with requests before the first fault."""
        self.faulty = False
        while not all(process.place for process in self.processes.values()):
            self.turn()
        for _ in range(self.rng.randint(0, 3)):
            self.arrive()
        if self.rng.random() < 0.8:
            self._merge([process.name for process in self.processes.values()][: self.layers])
            self.pass_until(self.now_s + self.rng.choice([0.2, 1.0, 3.0]))
        self.faulty = True
        self.arrive()

    def step(self) -> None:
        """Run a random event, and advance the clock."""
        events, weights = zip(*self._possible(), strict=True)
        self.rng.choices(events, weights)[0]()
        for _ in range(self.rng.choice([0, 5, 20, 60])):
            self.turn()
        self.check()

    def _possible(self) -> list[tuple[Callable[[], None], int]]:
        wanted = [(self.arrive, 8), (self._abort, 1), (self.change, 6), (self._wait, 4)]
        return [
            *wanted,
            (self.lives.start_again, 2),
            *zip(self._faults(), self._likings, strict=True),
            *zip(self._lane_faults(), self._lane_likings, strict=True),
        ]

    def _faults(self) -> list[Callable[[], None]]:
        """Possible faults, with probabilities that depend on the seed."""
        return [
            self.lanes.cut_lanes,
            self.lives.crash,
            self.lives.stand_still,
            self.lives.blind,
            self.lives.silence_store,
            self.lives.take_over,
        ]

    def _lane_faults(self) -> list[Callable[[], None]]:
        """Possible lane faults; seeds without them run as if these did not exist."""
        return [self.lanes.hang_up, self.lanes.separate]

    def _fail_last(self) -> None:
        """In some worlds, inject a last fault into an idle group, without further events."""
        if self._last_fault is None:
            return
        self._calm()
        names = list(self.processes)[: self.layers]
        if len(names) > 1 and not any(len(g.group.members) > 1 for g in self._groups()):
            self._merge(names)
            self._calm()
        self.arrive()
        self._last_fault()
        self.pass_until(self.now_s + self.rng.choice([0.1, 1.0, 5.0]))

    def _groups(self) -> list[StoredGroup]:
        return list(self.control.store.groups.values())

    def _calm(self) -> None:
        """Run until no group is changing, up to a limit."""
        until_s = self.now_s + CALM_S
        self.pass_until(self.now_s + 1.0)
        while not self.control.rests and self.now_s < until_s:
            self.turn()

    def check(self) -> None:
        """Check that all parts are consistent."""
        engines = {name: running.engine for name, running in self.processes.items()}
        check_engines(engines)
        for process in self.processes.values():
            process.fence.check_invariants()
            process.requests._handovers.check_invariants()
            process.engine.member.state.table.check_invariants()
            self._check_layers(process)

    def _check_layers(self, process: WorkerProcess) -> None:
        """I1: an engine holds the layers of its configuration."""
        configuration = process.engine.member.configuration
        if configuration is not None:
            stage, held = configuration.stage, process.engine.runner.stage_memory.layers
            if list(held) != list(range(stage.first_layer, stage.end_layer)):
                raise Violated(f"I1: {process.name} runs {stage} with layers {list(held)}")

    def settle(self) -> None:
        """Run without faults until everything is idle, in bounded time.

        Requests end even while a process is partitioned from the store.
        """
        self.note("no more faults")
        self.faulty = False
        self.control.silent_until_s = 0.0
        for process in self.processes.values():
            process.stands_until_s = 0.0
        for name in self.lives.names:
            if name not in self.processes and self.rng.random() < 0.7:
                self.lives.start(name)
        until_s = self.now_s + SETTLE_S
        while self.gateway.open and self.now_s < until_s:
            self.turn()
        for process in self.processes.values():
            process.blind_until_s = 0.0
        until_s = self.now_s + SETTLE_S
        while (unsettled := self._unsettled()) is not None:
            if self.now_s > until_s:
                raise Violated(f"I9: {unsettled}; {self.describe()}")
            for _ in range(30):
                self.turn()
            self.check()
        check_at_rest({name: running.engine for name, running in self.processes.items()})

    def _unsettled(self) -> str | None:
        """A description of what is not idle yet; None if everything is."""
        if self.gateway.open:
            return f"{len(self.gateway.open)} requests are open"
        store = self.control.store
        if store.workers.keys() != self.processes.keys():
            return f"registered are {sorted(store.workers)}"
        groups = [stored.group for stored in store.groups.values()]
        changing = [
            group for group in groups if group.attempt or group.phase is GroupPhase.DEGRADED
        ]
        if changing:
            return f"{changing} are not at rest"
        late = [
            process.name for process in self.processes.values() if not self._has_followed(process)
        ]
        if late:
            return f"{late} have not followed to their places, or are not at rest"
        return next(iter(wrong_books({n: p.engine for n, p in self.processes.items()})), None)

    def _has_followed(self, process: WorkerProcess) -> bool:
        """Whether a process serves its assignment and is idle."""
        member, stored = process.engine.member, self.control.store.assignments.get(process.name)
        if stored is None or stored.assignment.incarnation != process.incarnation:
            return False
        epochs = {stored.assignment.epoch, process.fence.epoch, member.links.epoch}
        if len(epochs) > 1 or not stored.assignment.group_id or not process.place:
            return False
        quiet = member.settled and not member.trouble and not process.requests.active
        return quiet and at_rest(process.engine)

    def describe(self) -> str:
        """A summary for failure messages."""
        left = {
            client.request_id: (
                client.address,
                len(client.stream.tokens),
                client.tokens is not None,
            )
            for client in self.gateway.open
        }
        members = {
            name: (
                process.place,
                process.engine.member.links.epoch,
                process.engine.member.changeover.phase,
                process.engine.member.trouble,
            )
            for name, process in self.processes.items()
        }
        return f"open {left}, members {members}"

    def close(self) -> None:
        """Release all memory."""
        self.lives.close()

    # --- clients and operators

    def arrive(self) -> None:
        """Submit some requests, unless enough are running."""
        for _ in range(self.rng.randint(1, 3)):
            number = len(self.gateway.clients)
            if number >= self.requests_max or len(self.gateway.open) >= OPEN_MAX:
                return
            request = self.rng.choice(self._requests)
            name = f"{number}-{request.request_id.split('-')[1]}"
            self.note(f"{name} arrives")
            self.gateway.start(replace(request, request_id=name))

    def _abort(self) -> None:
        if self.gateway.open:
            client: Client = self.rng.choice(self.gateway.open)
            self.note(f"{client.request_id} is aborted")
            self.gateway.abort(client)

    def change(self) -> None:
        """Request a merge, a split or a reordering of some groups."""
        groups = [group.group.members for group in self.control.store.groups.values()]
        live = [members for members in groups if members]
        if not live or not self.changes or self._divide(live):
            return
        chosen = self.rng.sample(live, self.rng.choice([1, 2, 2]) if len(live) > 1 else 1)
        names = [member.worker_id for members in chosen for member in members]
        alone = len(names) > self.layers or (len(chosen) == 1 and self.rng.random() < 0.7)
        if self.rng.random() < 0.3:
            self.rng.shuffle(names)
        if alone:
            self._ask(tuple((Stage(name, 0, self.layers),) for name in names))
        else:
            self._merge(names)

    def _divide(self, groups: Sequence[Sequence[Member]]) -> bool:
        """Split a group into smaller groups at random; returns whether it did."""
        large = [members for members in groups if len(members) > 2]
        if not self._divisions or not large or self._divisions.random() < 0.3:
            return False
        members = self._divisions.choice(large)
        stages = [
            Stage(member.worker_id, member.first_layer, member.end_layer) for member in members
        ]
        parts = self._divisions.randrange(2, len(stages))
        self._ask(tuple(interleaved(stages, parts, self.layers)))
        self.divided += 1
        return True

    def split(self) -> None:
        """Request splits of all groups with several workers."""
        for stored in self._groups():
            if len(stored.group.members) > 1:
                self._ask(split_up(stored.group, self.layers))

    def _merge(self, names: Sequence[str]) -> None:
        cuts = sorted(self.rng.sample(range(1, self.layers), len(names) - 1))
        bounds = [0, *cuts, self.layers]
        self._ask((tuple(map(Stage, names, bounds, bounds[1:])),))

    def _ask(self, targets: Targets) -> None:
        self.note(f"asked for {targets}")
        self.control.ask(targets)

    def _wait(self) -> None:
        self.pass_until(self.now_s + self.rng.choice([0.1, 0.5, 1.0, 2.0, 8.0]))

    def pass_until(self, until_s: float) -> None:
        """Run until a time."""
        while self.now_s < until_s:
            self.turn()
