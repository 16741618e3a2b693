"""The group protocol and real engines in one process, while everything goes wrong.

Real: coordinators, fences, participants, servicers' requests, engines with a tiny model, the
gateway's attempts and journals. Modelled: a store with compare and swap, mail, lanes, elections,
leases, reports. One seed decides all of it, on a virtual clock. After each step the invariants of
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
from services.core.groups.state import GroupState
from services.core.groups.vocabulary import GroupPhase, Targets
from services.core.request import Request
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.compute.runner_config import RunnerConfig
from services.worker.engine.transfer.lane import Identity
from tests.support.engine_networks import QueueNetwork
from tests.support.engines import (
    Engine,
    at_rest,
    check_at_rest,
    check_engines,
    make_engine,
    wrong_books,
)
from tests.support.group_store import Violated
from tests.support.joined_control import LEASE_S, REPORT_S, ControlPlane
from tests.support.joined_gateway import Client, JoinedGateway
from tests.support.joined_worker import WorkerProcess
from tests.support.undisturbed import CHUNK_BYTES

TURN_S = 0.002
IDLE_S = 0.1
"""How far time goes at most when nobody has anything to do."""
SILENCE_S = 10.0
"""After it, a peer or a worker that says nothing counts as lost."""
STEPS = 30
REQUESTS_MAX = 16
CRASHES_MAX = 2
SETTLE_S = 240.0
STANDS_MAX_S = 90.0
"""No request stands still for longer, while a worker serves."""


@dataclass(frozen=True)
class Rules:
    """What a world runs; a test takes a rule out here.

    Without `troubles` nobody hears that a group is stuck, without `resumes` a request that has lost
    its worker after a token is over.
    """

    machine: type[Changeover] = Changeover
    groups: type[GroupState] = GroupState
    troubles: bool = True
    resumes: bool = True


class JoinedWorld:
    """Call `run`, then `close`; `run` raises Violated."""

    def __init__(
        self, config: RunnerConfig, requests: Sequence[Request], seed: int, rules: Rules = Rules()
    ) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.faulty = True
        self.now_s = 0.0
        self.processes: dict[str, WorkerProcess] = {}
        self.resent = 0
        self._rules = rules
        self._requests = requests
        self._network = QueueNetwork(TURN_S)
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._planned = 0
        self._events: deque[str] = deque(maxlen=40)
        self._ghosts: list[Engine] = []  # of processes whose peers do not know that they are gone
        self._starts = 0
        self._crashes_left = CRASHES_MAX
        self._idle_turns = 0
        kv_bytes = 0
        names = [f"w{index}" for index in range(self.rng.choice([2, 2, 3, 3, 4]))]
        self._max_batch_tokens = self.rng.choice([16, 64])
        kv_chunks = self.rng.choice([5, 6, 8, 16])
        self._prefix_caching = self.rng.random() < 0.5
        runner = ModelRunner.load(replace(config, budget_bytes=config.budget_bytes + (1 << 20)))
        self.layers = runner.stage_memory.num_layers
        runner.close()
        kv_bytes = kv_chunks * self.layers * CHUNK_BYTES
        self._config = replace(config, budget_bytes=config.budget_bytes + kv_bytes)
        self.gateway = JoinedGateway(self, rules.resumes)
        self.control = ControlPlane(self, rules.groups, rules.troubles)
        for name in names:
            self._start(name)
        self._names = names
        self._likings = [self.rng.choice([0, 1, 1, 3]) for _ in self._faults()]
        self._watch()

    # --- time and mail

    def later(self, delay_s: float, what: Callable[[], None]) -> None:
        """Do something in a while."""
        self._planned += 1
        heapq.heappush(self._agenda, (self.now_s + delay_s, self._planned, what))

    def delay_s(self) -> float:
        """How long a message takes; some are late."""
        late = self.faulty and self.rng.random() < 0.1
        return self.rng.uniform(0.1, 2.0) if late else self.rng.uniform(0.001, 0.05)

    def mail(self, what: Callable[[], None], lost: Callable[[], None] | None = None) -> None:
        """Deliver a message, or not: then `lost` happens."""
        if self.faulty and self.rng.random() < 0.05:
            if lost is not None:
                self.later(self.delay_s(), lost)
            return
        self.later(self.delay_s(), what)

    def note(self, event: str) -> None:
        """Note what happens, for the message of a failure."""
        self._events.append(f"{self.now_s:8.3f} {event}")

    def turn(self) -> None:
        """Time passes, and somebody takes a turn."""
        self._tell_time()
        awake = [one for one in self.processes.values() if not one.stands]
        actions: list[Callable[[], bool | None]] = [*self._network.deliveries()]
        actions += self.gateway.actions()
        for one in awake:
            actions += [one.turn, one.move_piece, one.serve]
        if actions and self._idle_turns <= 2 * len(actions):
            worked = self.rng.choice(actions)()
            self._idle_turns = self._idle_turns + 1 if worked is False else 0
        elif any([action() is not False for action in self._round()]):
            self._idle_turns = 0
        else:
            self._rest()

    def _round(self) -> list[Callable[[], bool | None]]:
        """A turn of everybody, if nothing else can happen."""
        if self._network.deliveries() or self.gateway.actions():
            return [lambda: True]
        awake = [one for one in self.processes.values() if not one.stands]
        return [turn for one in awake for turn in (one.turn, one.move_piece, one.serve)]

    def _rest(self) -> None:
        """Nobody has anything to do until the next entry of the agenda, or a while."""
        self._network.skip(min(IDLE_S, max(0.0, self._agenda[0][0] - self.now_s)))
        self._tell_time()

    def _tell_time(self) -> None:
        self.now_s = self._network.now_s()
        while self._agenda and self._agenda[0][0] <= self.now_s:
            heapq.heappop(self._agenda)[2]()
        for process in self.processes.values():
            if process.standing_changed and not process.stands:
                process.standing_changed = False
                self.later(0.1, partial(self._report, process))

    def _watch(self) -> None:
        """What happens all the time: reports, readers that attach again, a look at streams."""
        self.gateway.pass_time()
        for client in self.gateway.open:
            if not any(one.place for one in self.processes.values()):
                client.progressed_s = max(client.progressed_s, self.now_s - STANDS_MAX_S / 2)
            if self.now_s - client.progressed_s > STANDS_MAX_S:
                raise Violated(f"{client.request_id} stands still: {self.describe()}")
        self.later(0.2, self._watch)

    def _report_often(self, process: WorkerProcess) -> None:
        if self.processes.get(process.name) is process:
            self._report(process)
            self.later(REPORT_S, partial(self._report_often, process))

    def _report(self, process: WorkerProcess) -> None:
        if self.processes.get(process.name) is process and not process.stands:
            self.control.report(process)

    # --- all of it

    def run(self) -> None:
        """Do everything, and let everything end. Raises Violated."""
        try:
            self._begin()
            for _ in range(STEPS):
                self.step()
            self.settle()
        except Exception as error:
            events = "\n".join(self._events)
            raise Violated(f"seed {self.seed}: {error!r}; the last events:\n{events}") from error

    def _begin(self) -> None:
        """In most worlds the workers form a group, and have requests, before anything fails."""
        self.faulty = False
        while not all(one.place for one in self.processes.values()):
            self.turn()
        for _ in range(self.rng.randint(0, 3)):
            self._arrive()
        if self.rng.random() < 0.8:
            self._merge([one.name for one in self.processes.values()][: self.layers])
            until_s = self.now_s + self.rng.choice([0.2, 1.0, 3.0])
            while self.now_s < until_s:
                self.turn()
        self.faulty = True
        self._arrive()

    def step(self) -> None:
        """Something happens to the cluster, and time passes."""
        events, weights = zip(*self._possible(), strict=True)
        self.rng.choices(events, weights)[0]()
        for _ in range(self.rng.choice([0, 5, 20, 60])):
            self.turn()
        self.check()

    def _possible(self) -> list[tuple[Callable[[], None], int]]:
        wanted = [(self._arrive, 8), (self._abort, 1), (self._change, 6), (self._wait, 4)]
        return [*wanted, (self._start_again, 2), *zip(self._faults(), self._likings, strict=True)]

    def _faults(self) -> list[Callable[[], None]]:
        """What may go wrong; each world has its own likings."""
        return [
            self._cut_lanes,
            self._crash,
            self._stand_still,
            self._blind,
            self._silence_store,
            self._take_over,
        ]

    def check(self) -> None:
        """All parts agree."""
        engines = {name: one.engine for name, one in self.processes.items()}
        check_engines(engines)
        for process in self.processes.values():
            process.fence.check_invariants()
            process.requests._arrivals.check_invariants()
            process.engine.member.state.table.check_invariants()
            self._check_layers(process)

    def _check_layers(self, process: WorkerProcess) -> None:
        """I1: an engine holds what its configuration gives it."""
        configuration = process.engine.member.configuration
        if configuration is not None:
            stage, held = configuration.stage, process.engine.runner.stage_memory.layers
            if list(held) != list(range(stage.first_layer, stage.end_layer)):
                raise Violated(f"I1: {process.name} runs {stage} with layers {list(held)}")

    def settle(self) -> None:
        """No more faults: everything becomes as it should be, in bounded time."""
        self.note("no more faults")
        self.faulty = False
        self.control.silent_until_s = 0.0
        for process in self.processes.values():
            self._wake(process)
            process.blind_until_s = 0.0
        for name in self._names:
            if name not in self.processes and self.rng.random() < 0.7:
                self._start(name)
        until_s = self.now_s + SETTLE_S
        while (unsettled := self._unsettled()) is not None:
            if self.now_s > until_s:
                raise Violated(f"I9: {unsettled}; {self.describe()}")
            for _ in range(30):
                self.turn()
            self.check()
        check_at_rest({name: one.engine for name, one in self.processes.items()})

    def _unsettled(self) -> str | None:
        """What has not come to rest yet; None if everything has."""
        if self.gateway.open:
            return f"{len(self.gateway.open)} requests are open"
        store = self.control.store
        for group in [stored.group for stored in store.groups.values()]:
            if group.attempt or group.phase is GroupPhase.DEGRADED:
                return f"{group} is not at rest"
        if store.workers.keys() != self.processes.keys():
            return f"registered are {sorted(store.workers)}"
        for name, process in self.processes.items():
            member, stored = process.engine.member, store.assignments.get(name)
            place = stored.assignment if stored is not None else None
            if place is None or place.incarnation != process.incarnation or not place.group_id:
                return f"{name} has no place"
            epochs = {place.epoch, process.fence.epoch, member.links.epoch}
            if len(epochs) > 1 or not member.settled or member.trouble or not process.place:
                return f"{name} has not followed to {place}: {epochs}, {member.trouble!r}"
            if not at_rest(process.engine) or process.requests.active:
                return f"{name} is not at rest"
        return next(iter(wrong_books({n: p.engine for n, p in self.processes.items()})), None)

    def describe(self) -> str:
        """For a failure's message."""
        left = {
            one.request_id: (one.address, len(one.stream.tokens), one.tokens is not None)
            for one in self.gateway.open
        }
        members = {
            name: (
                one.place,
                one.engine.member.links.epoch,
                one.engine.member.changeover.phase,
                one.engine.member.trouble,
            )
            for name, one in self.processes.items()
        }
        return f"open {left}, members {members}"

    def close(self) -> None:
        """Give all memory back."""
        for process in self.processes.values():
            process.end()
            process.engine.close()
        for engine in self._ghosts:
            engine.close()

    # --- clients and operators

    def _arrive(self) -> None:
        for _ in range(self.rng.randint(1, 3)):
            number = len(self.gateway.clients)
            if number >= REQUESTS_MAX:
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

    def _change(self) -> None:
        """An operator merges, splits or orders anew some of the groups."""
        groups = [one.group.members for one in self.control.store.groups.values()]
        live = [members for members in groups if members]
        if not live:
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

    def _merge(self, names: Sequence[str]) -> None:
        cuts = sorted(self.rng.sample(range(1, self.layers), len(names) - 1))
        bounds = [0, *cuts, self.layers]
        self._ask((tuple(map(Stage, names, bounds, bounds[1:])),))

    def _ask(self, targets: Targets) -> None:
        self.note(f"asked for {targets}")
        self.control.ask(targets)

    def _wait(self) -> None:
        until_s = self.now_s + self.rng.choice([0.1, 0.5, 2.0, 2.0, 8.0])
        while self.now_s < until_s:
            self.turn()

    # --- faults

    def _cut_lanes(self) -> None:
        """The lanes between two break; one of them may notice it late."""
        if len(self.processes) < 2:
            return
        one, other = self.rng.sample(sorted(self.processes), 2)
        tell = self.rng.choice([(one,), (one, other)])
        self.note(f"the lanes of {one} and {other} break, {tell} notice")
        self._network.part(one, other, tell)
        notice = partial(self._network.tell_untold, one, other)
        self.later(self.rng.uniform(0.0, SILENCE_S), notice)

    def _crash(self) -> None:
        """A process dies, or its engine does: then the process ends and says so."""
        if not self._crashes_left or len(self.processes) < 2:
            return
        self._crashes_left -= 1
        process = self.processes[self.rng.choice(sorted(self.processes))]
        if self.rng.random() < 0.3:
            self.note(f"the engine of {process.name} dies")
            self._end(process, engine_died=True)
            return
        silent = self.rng.random() < 0.5
        self.note(f"{process.name} dies, {'silently' if silent else 'at once'}")
        del self.processes[process.name]
        process.end()
        self.later(LEASE_S, partial(self._expire, process))
        if silent:
            self._ghosts.append(process.engine)
            self.later(self.rng.uniform(1.0, SILENCE_S), partial(self._lay, process))
            self.later(self.rng.uniform(1.0, SILENCE_S), partial(self.gateway.lose, process))
        else:
            process.engine.close()
            self.gateway.lose(process)

    def _lay(self, process: WorkerProcess) -> None:
        """The peers of a process that is gone notice it."""
        if process.engine in self._ghosts:
            self._ghosts.remove(process.engine)
            process.engine.close()

    def _end(self, process: WorkerProcess, engine_died: bool) -> None:
        """A process ends in order; another one is started soon."""
        del self.processes[process.name]
        process.end()
        process.requests.fail_all("the engine of the worker stopped", engine_died)
        self.gateway.drain(process)
        self.gateway.lose(process)
        process.engine.close()
        self._expire(process)
        self.later(self.rng.uniform(0.5, 5.0), partial(self._start, process.name))

    def _expire(self, process: WorkerProcess) -> None:
        """The lease of a process ends."""
        registered = self.control.store.workers.get(process.name)
        if registered is not None and registered.incarnation == process.incarnation:
            self.note(f"the lease of {process.incarnation} ends")
            self.control.write(partial(self.control.store.expire, process.name))

    def _start_again(self) -> None:
        gone = [name for name in self._names if name not in self.processes]
        if gone:
            self._start(self.rng.choice(gone))

    def _start(self, name: str) -> None:
        """Start a process; it registers once the lease of the one before it has ended."""
        if name in self.processes:
            return
        for engine in [one for one in self._ghosts if one.identity.worker_id == name]:
            self._ghosts.remove(engine)
            engine.close()
        self._starts += 1
        engine = make_engine(
            Identity(name, f"{name}-{self._starts}"),
            ModelRunner.load(self._config),
            self._network,
            lambda: self.now_s,
            max_batch_tokens=self._max_batch_tokens,
            max_running=8,
            prefix_caching=self._prefix_caching,
            machine=self._rules.machine,
        )
        process = self.processes[name] = WorkerProcess(engine, lambda: self.now_s)
        self.note(f"{process.incarnation} starts")
        self._register(process)
        self.later(self.rng.uniform(0.0, REPORT_S), partial(self._report_often, process))

    def _register(self, process: WorkerProcess) -> None:
        """Register, now or later; a process that is forgotten ends, and is started anew."""
        store, name = self.control.store, process.name
        if self.processes.get(name) is not process:
            return
        unseen_s = max(process.blind_until_s, process.stands_until_s, self.control.silent_until_s)
        registered = store.workers.get(name)
        if registered is not None and registered.incarnation == process.incarnation:
            return
        if registered is not None or self.now_s < unseen_s:
            self.later(max(0.5, unseen_s - self.now_s), partial(self._register, process))
            return
        if process.fence.epoch and not store.knows(name, process.incarnation):
            self.note(f"{process.incarnation} is forgotten")
            self._end(process, engine_died=False)
            return
        self.control.write(partial(store.register, name, process.incarnation))

    def _stand_still(self) -> None:
        """A process takes no turns for a while: others may think that it is gone."""
        if not (awake := sorted(name for name, one in self.processes.items() if not one.stands)):
            return
        process = self.processes[self.rng.choice(awake)]
        lasts_s = self.rng.choice([0.5, 3.0, 7.0, 15.0])
        self.note(f"{process.name} stands still for {lasts_s} s")
        process.stands_until_s = self.now_s + lasts_s
        if lasts_s > SILENCE_S:
            self.later(SILENCE_S, partial(self._give_up, process))
        self._lease_ends(process, lasts_s)

    def _give_up(self, process: WorkerProcess) -> None:
        """The peers and the gateway have not heard of a process for long."""
        if self.processes.get(process.name) is process and process.stands:
            self._network.cut(process.name)
            self.gateway.lose(process)

    def _lease_ends(self, process: WorkerProcess, lasts_s: float) -> None:
        """A process that cannot renew its lease loses it, and registers again afterwards."""
        if lasts_s > LEASE_S:
            self.later(LEASE_S, partial(self._expire_unless_awake, process))
            self.later(lasts_s + 0.1, partial(self._register, process))

    def _expire_unless_awake(self, process: WorkerProcess) -> None:
        if process.stands or self.now_s < process.blind_until_s:
            self._expire(process)
            self._register(process)

    def _wake(self, process: WorkerProcess) -> None:
        process.stands_until_s = 0.0

    def _blind(self) -> None:
        """A process is cut off from the store; everything else reaches it."""
        if not self.processes:
            return
        process = self.processes[self.rng.choice(sorted(self.processes))]
        lasts_s = self.rng.choice([2.0, 8.0, 30.0])
        self.note(f"{process.name} is cut off from the store for {lasts_s} s")
        process.blind_until_s = self.now_s + lasts_s
        self._lease_ends(process, lasts_s)

    def _silence_store(self) -> None:
        lasts_s = self.rng.uniform(0.5, 8.0)
        self.note(f"the store is silent for {lasts_s:.1f} s")
        self.control.silent_until_s = self.now_s + lasts_s

    def _take_over(self) -> None:
        zombie = self.rng.random() < 0.5
        self.note(f"another coordinator takes over, zombie: {zombie}")
        self.control.take_over(zombie)
