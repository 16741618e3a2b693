"""A planner with host copies, a KV cache that records its tokens, and a piecewise copier.

A seeded random order decides the next step, also during an iteration, so that tests explore
interleavings reproducibly. KV has two layers, copied one after the other. Every
token that runs checks the KV before it: KV of other tokens, or of another salt, fails the test.
"""

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from services.core.cost.model import CostModel
from services.core.host.vocabulary import (
    BlocksRecalled,
    BlocksSaved,
    CancelHostJob,
    HostGrown,
    HostLooked,
    HostSettings,
    RecallBlocks,
    Save,
    SaveBlocks,
)
from services.core.planner.batch import Chunk, Microbatch
from services.core.planner.config import IterationConfig
from services.core.planner.configuration_events import (
    BlocksRelocated,
    ConfigurationEnded,
    PoolGrown,
    PoolLimited,
    StagesConfigured,
)
from services.core.planner.events import (
    BlocksFreed,
    EmitToken,
    IterationFinished,
    IterationSuspended,
    MoveBlocks,
    RefuseRequest,
    RequestAborted,
    RequestArrived,
)
from services.core.planner.state import PlannerState
from services.core.queue_order import Scheduling
from services.core.request import Limits, Request, Sampling
from services.core.service import Service, ServiceClass
from tests.support.shipping_world import next_token, output_of

BLOCK_SIZE = 4
LAYERS = 2
TURN_S = 0.005
TURNS_MAX = 20_000
SLOW = CostModel(alpha=0.0, beta=0.01, gamma=0.001, lam=0.0)
"""A device that computes a token in 10 ms, so that recalls pay."""
BLOCK_BYTES = 1000
LINK = 1e6
"""Bytes per second: a block takes a millisecond."""

Content = tuple[str, tuple[int, ...]]


@dataclass
class Job:
    """A save or recall in progress."""

    command: SaveBlocks | RecallBlocks
    piece: int = 0
    intact: list[bool] = field(default_factory=list)


def host_settings(**changes: Any) -> HostSettings:
    return HostSettings(**{"block_bytes": BLOCK_BYTES, "link_bytes_per_s": LINK, **changes})


class HostWorld:
    """A worker with `num_blocks` KV blocks and `slots` slots of host memory."""

    def __init__(self, seed: int = 0, slots: int = 64, **changes: Any) -> None:
        self.rng = random.Random(seed)
        bounds = {
            "block_size": BLOCK_SIZE,
            "num_blocks": 24,
            "max_batch_tokens": 32,
            "max_running": 6,
            "max_waiting": 100,
            "prefix_caching": True,
            "scheduling": Scheduling.SLO,
            "cost_model": SLOW,
            "host": host_settings(),
        }
        self.state = PlannerState(IterationConfig(**{**bounds, **changes}))
        self.now_s = 0.0
        self.kv: dict[tuple[int, int, int], Content] = {}
        self.store: dict[tuple[int, int, int], Content] = {}
        self.jobs: deque[Job] = deque()
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.over: set[str] = set()
        self.cached: dict[str, int] = {}
        self.ran = 0  # tokens
        self.copies_damaged = 0
        if slots:
            self.handle(HostGrown(0.0, slots))

    @property
    def host(self) -> Any:
        return self.state.host

    # --- requests

    def ask(
        self, prompt: tuple[int, ...], output: int = 1, salt: str = "", online: bool = True
    ) -> str:
        name = f"r{len(self.requests)}"
        kind = ServiceClass.STANDARD if online else ServiceClass.BATCH
        request = Request(
            *(name, prompt, Sampling(temperature=0.0), Limits(output), self.now_s),
            cache_salt=salt,
            service=Service(kind),
        )
        self.requests[name], self.tokens[name] = request, []
        self.handle(RequestArrived(self.now_s, request))
        return name

    def abort(self, name: str) -> None:
        self.over.add(name)
        self.handle(RequestAborted(self.now_s, name))

    @property
    def open(self) -> list[str]:
        return [name for name in self.requests if name not in self.over]

    # --- the driver

    def handle(self, event: Any) -> None:
        for command in self.state.handle(event):
            self._carry_out(command)
        self.state.check_invariants()

    def _carry_out(self, command: Any) -> None:
        match command:
            case EmitToken():
                self._take_token(command)
            case SaveBlocks() | RecallBlocks():
                self.jobs.append(Job(command))
            case CancelHostJob():
                # The copier may notice at once, or only after it has finished the job.
                if self.rng.random() < 0.5:
                    self._cancel(command.job)
            case MoveBlocks():
                self._move(command)
            case RefuseRequest():
                raise AssertionError(command.message)
            case _:
                assert isinstance(command, BlocksFreed)

    def _take_token(self, command: EmitToken) -> None:
        tokens = self.tokens[command.request_id]
        assert command.index == len(tokens)
        tokens.append(command.token_id)
        if not command.index:
            self.cached[command.request_id] = command.cached_tokens
        if command.finish_reason is not None:
            self.over.add(command.request_id)

    def _cancel(self, number: int) -> None:
        for job in [candidate for candidate in self.jobs if candidate.command.job == number]:
            count = len(job.command.blocks)
            if job.piece < LAYERS * count and job.piece % LAYERS:
                job.intact[-1] = False  # only some of its layers were copied
            job.intact += [False] * (count - len(job.intact))
            job.piece = LAYERS * count

    def _move(self, command: MoveBlocks) -> None:
        for move in command.moves:
            for layer in range(LAYERS):
                for slot in range(BLOCK_SIZE):
                    content = self.kv.get((move.source, layer, slot))
                    if content is not None:
                        self.kv[move.target, layer, slot] = content

    def look(self) -> None:
        if self.host.wants_a_look(self.now_s):
            waiting = sum(len(job.command.blocks) for job in self.jobs)
            lane_s = waiting * BLOCK_BYTES / LINK
            self.handle(HostLooked(self.now_s, self.now_s + lane_s))

    def copy(self, pieces: int = 1) -> None:
        """Copy some pieces in order; a piece is a layer of a block."""
        for _ in range(pieces):
            if not self.jobs:
                return
            job = self.jobs[0]
            index, layer = divmod(job.piece, LAYERS)
            if index < len(job.command.blocks):
                self._copy_piece(job, index, layer)
                job.piece += 1
            if job.piece >= LAYERS * len(job.command.blocks):
                self.jobs.popleft()
                kind = BlocksSaved if isinstance(job.command, SaveBlocks) else BlocksRecalled
                self.handle(kind(self.now_s, job.command.job, tuple(job.intact)))

    def _copy_piece(self, job: Job, index: int, layer: int) -> None:
        if not layer:
            job.intact.append(True)
        block, slot = self.host.block_of(job.command.job, index), job.command.blocks[index].slot
        if block is None:
            job.intact[index] = False
            return
        for place in range(BLOCK_SIZE):
            if isinstance(job.command, SaveBlocks):
                self.store[slot, layer, place] = self.kv[block, layer, place]
            elif (slot, layer, place) in self.store:
                self.kv[block, layer, place] = self.store[slot, layer, place]
            else:
                job.intact[index] = False  # damaged, and detected by the checksum

    def copy_all(self) -> None:
        while self.jobs:
            self.copy()

    def kill_copier(self) -> None:
        """Kill the copier, which loses its store."""
        self.jobs.clear()
        self.store.clear()
        self.handle(HostGrown(self.now_s, 0))

    def damage(self, slot: int) -> None:
        for layer in range(LAYERS):
            for place in range(BLOCK_SIZE):
                self.store.pop((slot, layer, place), None)
        self.copies_damaged += 1

    # --- iterations

    def plan(self) -> Microbatch | None:
        microbatch = self.state.plan(self.now_s)
        self.state.check_invariants()
        for block, filled in () if microbatch is None else microbatch.turns:
            for layer in range(LAYERS):
                entries = [self.kv[block, layer, slot] for slot in range(filled)]
                for slot, entry in enumerate(entries):
                    self.kv[block, layer, BLOCK_SIZE - 1 - slot] = entry
        return microbatch

    def run(self, microbatch: Microbatch) -> dict[str, int]:
        """Run the model, which reads and writes the KV of its sequences."""
        sampled = {}
        for chunk in microbatch.batch.chunks:
            request = self.requests[chunk.seq_id]
            tokens = (*request.prompt_ids, *self.tokens[chunk.seq_id])
            end = chunk.start + len(chunk.token_ids)
            assert chunk.token_ids == tokens[chunk.start : end]
            self.ran += len(chunk.token_ids)
            contents = [(request.cache_salt, tokens[: place + 1]) for place in range(end)]
            turned = chunk.seq_id in microbatch.batch.turned
            for layer in range(LAYERS):
                self._read(chunk, contents, layer, turned)
                for place in range(chunk.start, end):
                    self.kv[_slot(chunk, place, layer, turned)] = contents[place]
            if chunk.sample is not None:
                sampled[chunk.seq_id] = next_token(tokens[:end])
        return sampled

    def _read(self, chunk: Chunk, contents: list[Content], layer: int, turned: bool) -> None:
        """Check the KV before a chunk; order within full blocks is free, as for attention."""
        full = chunk.start // BLOCK_SIZE
        for block in range(full):
            places = range(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE)
            entries = {self.kv.get(_slot(chunk, place, layer, False)) for place in places}
            assert entries == {contents[place] for place in places}, "KV of other tokens"
        for place in range(full * BLOCK_SIZE, chunk.start):
            entry = self.kv.get(_slot(chunk, place, layer, turned))
            assert entry == contents[place], "KV of other tokens"

    def iterate(self) -> bool:
        """A turn: look, plan and run. False if there was nothing to run."""
        self.now_s += TURN_S
        self.look()
        microbatch = self.plan()
        if microbatch is None:
            return False
        sampled = self.run(microbatch)
        self.handle(IterationFinished(self.now_s, sampled, microbatch.number))
        return True

    def iterate_in_parallel(self) -> None:
        """A turn with concurrent copies and aborts; the iteration may be suspended."""
        self.now_s += TURN_S
        self.look()
        microbatch = self.plan()
        if microbatch is None:
            self.copy(self.rng.randint(0, 8))
            return
        rng = self.rng
        late = rng.random() < 0.5  # the model writes before or after the copier
        if late:
            self._meanwhile()
        if microbatch.preemptible and rng.random() < 0.3:
            # Some layers have written its tokens; all layers rewrite them.
            self.handle(IterationSuspended(self.now_s))
            return
        sampled = self.run(microbatch)
        if not late:
            self._meanwhile()
        self.handle(IterationFinished(self.now_s, sampled, microbatch.number))

    def _meanwhile(self) -> None:
        rng = self.rng
        self.copy(rng.randint(0, 8))
        if rng.random() < 0.1 and self.open:
            self.abort(rng.choice(self.open))
        if rng.random() < 0.3:
            self.now_s += TURN_S
            self.look()
        self.copy(rng.randint(0, 8))

    def end(self) -> None:
        """Run until all requests and copies have ended."""
        for _ in range(TURNS_MAX):
            ran = self.iterate()
            self.copy(4)
            if not self.open and not self.jobs:
                break
            if not ran and not self.jobs:
                self.now_s += TURN_S
        assert not self.open, "requests wait for ever"
        self.now_s += 10.0
        self.look()
        self.copy_all()
        self.check_tokens()
        assert not self.state.sequences and not self.state.table.tables, "blocks are held for ever"
        assert self.host.cache.owed == 0 and self.host.cache.filling == 0

    def check_tokens(self) -> None:
        for name, request in self.requests.items():
            wanted = output_of(request)
            got = self.tokens[name]
            assert got == wanted[: len(got)]
            assert name in self.over and (len(got) <= len(wanted))

    # --- changes

    def relocate(self) -> None:
        """Relocate blocks from the end of the pool as far as possible, then grow it again."""
        total = self.state.pool.num_blocks
        limit = self.rng.randint(total // 2, total)
        self.handle(PoolLimited(limit))
        for _ in range(self.rng.randint(0, 4)):
            self.handle(BlocksRelocated(limit, self.rng.randint(1, 6)))
            self.copy(self.rng.randint(0, 4))
        self.handle(PoolGrown(total))

    def change_configuration(self) -> None:
        """Switch to a new configuration of this worker alone."""
        self.handle(ConfigurationEnded())
        self.copy(self.rng.randint(0, 4))
        self.handle(StagesConfigured())


def _slot(chunk: Chunk, place: int, layer: int, turned: bool) -> tuple[int, int, int]:
    """The slot of a position's KV; a turned tail is filled from its end."""
    block, slot = divmod(place, BLOCK_SIZE)
    return chunk.block_ids[block], layer, BLOCK_SIZE - 1 - slot if turned else slot


class RandomWorld(HostWorld):
    """Random prompts with shared prefixes, of two owners, and random events of copies."""

    def __init__(self, seed: int, **changes: Any) -> None:
        rng = random.Random(seed)
        settings = host_settings(
            save=rng.choice([Save.BATCH, Save.ALL, Save.ALL]),
            save_from=rng.choice([0.0, 0.3, 0.5]),
            lane_share=rng.choice([0.5, 1.0]),
        )
        options = {
            "scheduling": rng.choice(list(Scheduling)),
            "num_blocks": rng.choice([16, 24, 40]),
            "cost_model": rng.choice([SLOW, SLOW, None]),
            "host": settings,
        }
        super().__init__(seed, slots=rng.choice([6, 20, 80]), **{**options, **changes})
        self.roots = [tuple(rng.randrange(50) for _ in range(24)) for _ in range(3)]

    def arrive(self) -> None:
        rng = self.rng
        head = rng.choice(self.roots)[: rng.choice([8, 16, 24])]
        tail = tuple(rng.randrange(50) for _ in range(rng.randint(1, 8)))
        salt, online = rng.choice(["", "", "other"]), rng.random() < 0.5
        self.ask(head + tail, rng.randint(1, 24), salt, online)

    def step(self) -> None:
        steps = {
            self.iterate_in_parallel: 60,
            self.arrive: 14,
            lambda: self.copy(self.rng.randint(1, 20)): 10,
            self.abort_any: 3,
            self.relocate: 3,
            self.change_configuration: 1,
            self.damage_any: 1,
            self.lose_store: 0.4,
        }
        (step,) = self.rng.choices(list(steps), list(steps.values()))
        step()

    def abort_any(self) -> None:
        if self.open:
            self.abort(self.rng.choice(self.open))

    def damage_any(self) -> None:
        if self.host.cache.slots:
            self.damage(self.rng.randrange(self.host.cache.slots))

    def lose_store(self) -> None:
        self.kill_copier()
        self.handle(HostGrown(self.now_s, self.rng.choice([6, 20, 80])))
