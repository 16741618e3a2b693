"""A randomised cluster of change-over state machines without a model.

Real: `Changeover` and the planner. Modelled: memory (`FakeMemory`), the lanes with their fence,
transfers piece by piece, clients, and a coordinator that prepares and commits changes.
Members may be lost, transfers fail, time pass. The oracle is the tokens: every stage checks that
the KV it reads is that of this very sequence, or, if prefixes are cached, that of the same tokens
of the same tenant. In the end every request has the tokens of an
undisturbed run, no block is taken, and all members have settled.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from services.core.changeover import vocabulary
from services.core.changeover.configuration import GroupStages
from services.core.changeover.transfer_outcome import TransferOutcome, TransferStatus
from services.core.groups.layer_map import Stage
from services.core.planner.config import IterationConfig
from services.core.queue_order import Scheduling
from services.core.service import DEFAULT_SERVICE, Service, ServiceClass
from tests.support.changeover_clients import Clients, Stream
from tests.support.changeover_member import Packet, Sending, WorldMember
from tests.support.fake_stage import BLOCK_SIZE, FakeMemory, Violated, require
from tests.support.interleaved import interleaved

LAYERS = 4
SLAB_UNITS = 5
TURNS_MAX = 6_000
TURN_S = 0.001
UNEQUAL = 2
"""Share of worlds in which each worker has more memory than the previous worker."""
JUMP_S = 5.2
"""After it a leader has discarded what is in flight; see `DRAIN_TIMEOUT_S`."""
PATIENCE_S = 19.0
"""Longest time that a follower waits for a live leader."""


@dataclass
class Attempt:
    """A change in preparation, with the answers of its members."""

    name: str
    old: list[tuple[Stage, ...]]
    groups: tuple[GroupStages, ...]
    answers: dict[str, str | None] = field(default_factory=dict)

    @property
    def members(self) -> set[str]:
        return {name for group in self.groups for name in group.workers}

    @property
    def ready(self) -> bool:
        """Whether all members are ready."""
        return self.answers.keys() == self.members and not any(self.answers.values())


class World:
    """`workers` members, each a group of its own; every choice comes from the seed.

    With `prefixes`, members cache prefixes, and prompts go on from earlier ones. With `classes`,
    half of the requests are batch work, which yields. With `divides`, groups of three or more
    split into smaller groups, each of which keeps its members' layers. With `holders`, workers
    outside of a change may send slabs to its members, several at once.
    """

    blocks_of_a_worker: tuple[int, ...] = (5, 6, 8, 12)

    def __init__(
        self,
        seed: int,
        workers: int | None = None,
        losses: int | None = None,
        prefixes: bool = False,
        classes: bool = False,
        divides: bool = False,
        holders: bool = False,
    ) -> None:
        self.rng = rng = random.Random(seed)
        self._holders = random.Random(seed) if holders else None
        self._prompts = random.Random(seed) if prefixes else None
        self._classes = random.Random(seed) if classes else None
        self._divisions = random.Random(seed) if divides else None
        self.divided = 0
        self.now_s = 0.0
        self.clients = Clients()
        self.faults = True
        self.disturbed = False  # commit may be late: a worker was lost, or time has passed
        self.losses_left = rng.choice([0, 1, 1, 2]) if losses is None else losses
        self.epoch = 1
        self.groups: list[tuple[Stage, ...]] = []
        self.attempts: dict[str, Attempt] = {}
        self.members: dict[str, WorldMember] = {}
        self.queues: dict[tuple[str, str], deque[Packet]] = {}
        self.committed = 0
        self._made = 0
        blocks, batch = rng.choice(self.blocks_of_a_worker), rng.choice([4, 8])
        config = IterationConfig(
            *(BLOCK_SIZE, blocks, batch, rng.choice([2, 4]), 50),
            prefix_caching=prefixes,
            scheduling=Scheduling.FCFS,
        )
        if self._classes is not None:
            rests_s = self._classes.choice((0.0, 0.1, 1.0, 60.0))
            config = replace(config, scheduling=Scheduling.PRIORITY, shelf_max_s=rests_s)
        self.tokens_max = blocks * BLOCK_SIZE
        more = 3 if seed % 5 == UNEQUAL else 0
        self._workers = workers or rng.choice([2, 2, 3, 4])
        for number in range(self._workers):
            name, blocks = f"w{number}", blocks + more * min(number, 1)
            memory = FakeMemory(LAYERS, blocks, SLAB_UNITS)
            own = replace(config, num_blocks=blocks)
            self.members[name] = member = self._new_member(name, memory, own)
            self.groups.append((member.alone(),))
            member.control.append(
                vocabulary.ConfigurationCommitted(0.0, self._plans([self.groups[-1]]))
            )

    def _new_member(self, name: str, memory: FakeMemory, config: IterationConfig) -> WorldMember:
        return WorldMember(self, name, memory, config, *self._slabs())

    # --- operations

    def start(self) -> None:
        """Submit a request to the leader of a random serving group."""
        leaders = [group[0].worker_id for group in self.groups if self._serves(group)]
        if not leaders:
            return
        leader = self.rng.choice(leaders)
        count = self.rng.randint(1, self.tokens_max - 2)
        prompt = tuple(self.rng.randrange(100) for _ in range(min(count, self.rng.randint(1, 9))))
        most = self.rng.randint(1, self.tokens_max - len(prompt))
        name, salt = f"r{len(self.clients.streams)}", ""
        if self._prompts is not None:
            salt = self._prompts.choice(("", "", "tenant"))
            prompt = self._go_on_from_another(self._prompts, prompt)
        batch = self._classes is not None and self._classes.random() < 0.5
        service = Service(ServiceClass.BATCH) if batch else DEFAULT_SERVICE
        stream = self.clients.start(name, prompt, most, leader, salt, service)
        self.members[leader].start(stream.request)

    def _go_on_from_another(self, rng: random.Random, prompt: tuple[int, ...]) -> tuple[int, ...]:
        """A prompt of the same length that shares a prefix with another request."""
        streams = list(self.clients.streams.values())
        if not streams or rng.random() < 0.2:
            return prompt
        other = rng.choice(streams[-4:]).truth[: rng.randint(1, 9)]
        return (*other, *prompt)[: len(prompt)]

    def abort(self) -> None:
        """Abort a random request."""
        if open_requests := self.clients.open():
            name = self.rng.choice(open_requests)
            stream = self.clients.streams[name]
            stream.aborted, stream.lost = True, False
            if stream.owner in self.members:
                self.members[stream.owner].abort(name)

    def prepare(self) -> None:
        """Begin to prepare other groups."""
        busy = {
            stage.worker_id for other in self.attempts.values() for g in other.old for stage in g
        }
        free = [group for group in self.groups if group[0].worker_id not in busy]
        if not free:
            return
        old, new = self._choose(free)
        self._made += 1
        self.epoch += 1
        names = sorted({stage.worker_id for group in new for stage in group})
        draining = (
            set(self.rng.sample(names, 1)) if len(new) > 1 and self.rng.random() < 0.3 else set()
        )
        attempt = Attempt(f"attempt-{self._made}", old, self._plans(new, draining))
        self.attempts[attempt.name] = attempt
        holders = self._holders_beside(names)
        for name in names:
            asked = vocabulary.PreparationAsked(attempt.name, attempt.groups, holders)
            self.members[name].control.append(asked)

    def _slabs(self) -> tuple[int, int]:
        """How many slabs a member restores concurrently, and which weights it has."""
        rng = self._holders
        return (1, 0) if rng is None else (rng.choice((1, 2, 4)), int(rng.random() < 0.1))

    def _holders_beside(self, names: list[str]) -> tuple[Stage, ...]:
        """Workers outside of a change with their layers; some change or die meanwhile."""
        if self._holders is None:
            return ()
        others = [s for group in self.groups for s in group if s.worker_id not in names]
        self._holders.shuffle(others)
        return tuple(others[: self._holders.randint(0, 4)])

    def abandon(self) -> None:
        """Abort an attempt."""
        if self.attempts:
            self._abandon(self.rng.choice(list(self.attempts)))

    def commit(self) -> None:
        """Commit a change whose members are ready; each receives it at a different moment."""
        for name in [name for name, pending in self.attempts.items() if pending.ready]:
            attempt = self.attempts.pop(name)
            self.groups = [group for group in self.groups if group not in attempt.old]
            self.groups += [group.stages for group in attempt.groups]
            self.committed += 1
            stages = [len(group.stages) for group in attempt.groups]
            self.divided += len(stages) > 1 and max(stages) > 1
            for member in attempt.members:
                committed = vocabulary.ConfigurationCommitted(self.now_s, attempt.groups)
                self.members[member].control.append(committed)

    def lose(self) -> None:
        """Kill a worker; the rest of its group serves nothing, and its requests end."""
        if not self.losses_left or len(self.members) < 2:
            return
        self.losses_left -= 1
        self.disturbed = True
        lost = self.rng.choice(sorted(self.members))
        group = next(
            candidate for candidate in self.groups if any(s.worker_id == lost for s in candidate)
        )
        for name in [n for n, pending in self.attempts.items() if group in pending.old]:
            self._abandon(name)
        del self.members[lost]
        self._cut(lost)
        self.clients.lose(lost, {stage.worker_id for stage in group}, self.rng.random() < 0.7)
        self.groups.remove(group)
        self.epoch += 1
        for stage in group:
            if stage.worker_id != lost:
                self.groups.append((stage,))
                left = vocabulary.ConfigurationCommitted(self.now_s, self._plans([(stage,)]))
                self.members[stage.worker_id].supersede(left)

    def jump(self) -> None:
        """Advance the clock, within the time in which a live member would act."""
        waiting = [member for member in self.members.values() if member.machine.phase == "draining"]
        if all(self.now_s + JUMP_S - member.heard_s < PATIENCE_S for member in waiting):
            self.now_s += JUMP_S
            self.disturbed = True

    def turns(self, most: int = 25) -> None:
        """Take up to `most` random steps."""
        for _ in range(self.rng.randint(1, most)):
            self.turn()

    def step(self) -> None:
        """Run a random operation."""
        operations = (self.start, self.abort, self.prepare, self.abandon, self.commit, self.lose)
        weights = (6, 1, 4, 0.4, 6, 0.8)
        self.rng.choices((*operations, self.jump, self.turns), (*weights, 0.6, 12))[0]()

    # --- single steps

    def turn(self, launches: bool = True) -> bool:
        """Run a random possible step; False if there is none."""
        self.now_s += TURN_S
        actions = self._arrivals()
        for member in self.members.values():
            if member.machine.needs_turn(self.now_s) or member.has_lost:
                actions.append(member.take_turn)
            if launches and member.may_launch:
                actions.append(member.launch)
        actions += [
            partial(self._ask_again, stream)
            for stream in self.clients.streams.values()
            if stream.lost
        ]
        if actions:
            self.rng.choice(actions)()
        return bool(actions)

    def _arrivals(self) -> list[Callable[[], None]]:
        """Deliveries of frames in flight."""
        actions: list[Callable[[], None]] = [
            partial(self._deliver, *way) for way, queue in self.queues.items() if queue
        ]
        for member in self.members.values():
            if member.ripe:
                actions.append(partial(self._take_ripe, member))
            if member.control:
                actions.append(member.take_control)
            if member.events:
                actions.append(partial(self._take_event, member))
            if member.restoring:
                actions.append(member.end_restoring)
            if not self._dead <= member.noticed:
                actions.append(partial(member.noticed.update, self._dead))
            for sending in member.sending.values():
                if self._may_move(sending):
                    actions.append(partial(self._move_piece, member, sending))
        return actions

    def post(self, peer: str, packet: Packet) -> None:
        """Send a frame; dropped if the peer is lost."""
        if peer in self.members:
            self.queues.setdefault((packet.peer, peer), deque()).append(packet)

    def _deliver(self, source: str, peer: str) -> None:
        member = self.members[peer]
        if member.ripe:
            self._take_ripe(member)
        else:
            member.take(self.queues[source, peer].popleft())

    def _take_ripe(self, member: WorldMember) -> None:
        member.take(member.ripe.popleft())

    def _take_event(self, member: WorldMember) -> None:
        member.handle(member.events.popleft())

    # --- transfers

    def _may_move(self, sending: Sending) -> bool:
        """Whether a piece may be delivered; pieces of a newer epoch wait."""
        peer = self.members.get(sending.command.transfer.destination)
        return peer is None or peer.epoch >= sending.epoch

    def _move_piece(self, source: WorldMember, sending: Sending) -> None:
        command = sending.command
        peer = self.members.get(command.transfer.destination)
        fails = peer is None or (self.faults and self.rng.random() < 0.01)
        if not fails and sending.packed is None:
            fails = not source.pack(sending)
        elif peer is not None and not fails:
            fails = not peer.unpack(sending)
        if fails:
            self.fail(source, command.transfer_id)
        elif peer is not None and not sending.pieces:
            del source.sending[command.transfer_id]
            source.events.append(TransferOutcome(command.transfer_id, TransferStatus.SENT))
            peer.events.append(TransferOutcome(command.transfer_id, TransferStatus.RECEIVED))

    def fail(self, source: WorldMember, transfer_id: str) -> None:
        """Fail or cancel a transfer; both ends are notified."""
        sending = source.sending.pop(transfer_id, None)
        if sending is None:
            return
        for name in (source.worker_id, sending.command.transfer.destination):
            if name in self.members:
                failed = TransferOutcome(transfer_id, TransferStatus.FAILED)
                self.members[name].events.append(failed)

    # --- the coordinator

    def note_answer(self, attempt: str, worker_id: str, refusal: str | None) -> None:
        """Record that a member is ready or refuses."""
        if attempt in self.attempts:
            self.attempts[attempt].answers[worker_id] = refusal
            if refusal is not None:
                self._abandon(attempt)

    def members_of(self, attempt: str) -> set[str]:
        """The live members that an attempt needs."""
        return self.attempts[attempt].members if attempt in self.attempts else set()

    def _abandon(self, name: str) -> None:
        for member in self.attempts.pop(name).members:
            self.members[member].control.append(vocabulary.PreparationAborted(name))

    def _plans(
        self, groups: Sequence[Sequence[Stage]], draining: set[str] | None = None
    ) -> tuple[GroupStages, ...]:
        leaving = frozenset(draining or ())
        return tuple(
            GroupStages(
                f"g-{group[0].worker_id}",
                self.epoch,
                tuple(group),
                leaving & {stage.worker_id for stage in group},
            )
            for group in groups
        )

    def _choose(
        self, free: list[tuple[Stage, ...]]
    ) -> tuple[list[tuple[Stage, ...]], list[tuple[Stage, ...]]]:
        """Choose which groups to change, and into what."""
        rng = self.rng
        old = [rng.choice(free)]
        names = [stage.worker_id for stage in old[0]]
        if not self._serves(old[0]):
            return old, [(self.members[name].alone(),) for name in names]
        if self._divisions is not None and self._divisions.random() < 0.8:
            return self._divide(self._divisions, [group for group in free if self._serves(group)])
        if len(free) > 1 and (len(old[0]) == 1 or rng.random() < 0.4):
            other = rng.choice(
                [group for group in free if group != old[0] and self._serves(group)] or old
            )
            if other not in old:
                old.append(other)
                return old, [self._cut_among(names + [stage.worker_id for stage in other])]
        if len(names) == 1 or rng.random() < 0.3:
            rng.shuffle(names)
            return old, [self._cut_among(names)]
        if len(names) > 2 and rng.random() < 0.5:
            rng.shuffle(names)
            rest = [(self.members[name].alone(),) for name in names[2:]]
            return old, [self._cut_among(names[:2]), *rest]
        return old, [(self.members[name].alone(),) for name in names]

    def _divide(
        self, rng: random.Random, free: list[tuple[Stage, ...]]
    ) -> tuple[list[tuple[Stage, ...]], list[tuple[Stage, ...]]]:
        """Split the largest group into smaller groups; if none has three workers, merge all."""
        largest = max(free, key=len)
        if len(largest) < 3:
            return free, [self._cut_among([stage.worker_id for group in free for stage in group])]
        return [largest], interleaved(largest, rng.randrange(2, len(largest)), LAYERS)

    def _cut_among(self, names: list[str]) -> tuple[Stage, ...]:
        cuts = [0, *sorted(self.rng.sample(range(1, LAYERS), len(names) - 1)), LAYERS]
        return tuple(Stage(name, cuts[i], cuts[i + 1]) for i, name in enumerate(names))

    def _serves(self, group: Sequence[Stage]) -> bool:
        return (group[0].first_layer, group[-1].end_layer) == (0, LAYERS)

    # --- lost workers

    @property
    def _dead(self) -> set[str]:
        return {f"w{number}" for number in range(self._workers)} - self.members.keys()

    def _cut(self, lost: str) -> None:
        self.queues = {way: queue for way, queue in self.queues.items() if lost not in way}
        for member in self.members.values():
            for transfer_id in list(member.machine._kv._expected):
                member.events.append(TransferOutcome(transfer_id, TransferStatus.FAILED))

    def _ask_again(self, stream: Stream) -> None:
        """Submit a request without tokens to a random leader again, under the same id."""
        leaders = [group[0].worker_id for group in self.groups if self._serves(group)]
        name = stream.request.request_id
        stream.lost = False
        if not leaders:
            stream.aborted = True
            return
        stream.owner = self.rng.choice(leaders)
        member, source = self.members[stream.owner], self.clients.sources.get((stream.owner, name))
        if source is not None and (not source.adopted or self.rng.random() < 0.5):
            member.abort(name)
        self.clients.asked_again += 1
        member.start(stream.request)

    # --- the end

    def settle(self) -> None:
        """Run without faults until everything is idle. Raises Violated."""
        self.faults = False
        for name in list(self.attempts):
            self._abandon(name)
        for _ in range(TURNS_MAX):
            if not self.turn():
                due = [member.machine.parked_due_s for member in self.members.values()]
                if not (times := [time for time in due if time is not None]):
                    break
                self.now_s = max(self.now_s, min(times))
            if not self._arrivals():
                self.now_s += 0.1
        else:
            raise Violated(f"stuck: {self.describe()}")
        self.check_rest()

    def check_rest(self) -> None:
        """Check that every request has its tokens and left no state behind."""
        for name, stream in self.clients.streams.items():
            require(stream.over and not stream.refused, f"{name}: {stream}")
            require(stream.aborted or stream.tokens == stream.output, f"{name} has {stream.tokens}")
        for name, member in self.members.items():
            pool, table = member.planner.pool, member.planner.table
            require(member.machine.settled, f"{name} has not settled: {member.machine.phase}")
            require(not table.seq_ids, f"{name} keeps {table.seq_ids}")
            require(pool.free_count == pool.usable == member.memory.num_blocks, f"{name}: {pool}")
            require(not member.memory.departed_layers, f"{name} keeps departed KV")
            self._check_books(member)

    def _check_books(self, member: WorldMember) -> None:
        """Check that a leader counts the blocks that each stage has."""
        configuration = member.machine.configuration
        if configuration is None or not configuration.leads:
            return
        ledger = member.planner.sequence_table.ledger
        counted = zip(configuration.stages[1:], ledger.used, ledger.capacity, strict=True)
        for stage, used, capacity in counted:
            table = self.members[stage.worker_id].planner.table
            pool = table.pool
            require(
                (used, capacity) == (table.block_count, pool.usable),
                f"{member.worker_id} counts {used} of {capacity} at {stage.worker_id}, {pool}",
            )

    def describe(self) -> str:
        """A summary for failure messages."""
        phases = {name: member.machine.phase for name, member in self.members.items()}
        return f"open {self.clients.open()}, {phases}, groups {self.groups}"
