"""Gets a simulated worker ready for layers that come back, while it serves on as it is.

KunServe §4.4, in the steps of services/worker/engine/pipeline/preparation.py: lower the capacity,
move blocks below the limit, pull what is missing from members that run it, verify. Moving blocks
within a device takes no time here.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from services.core.planner.state import PlannerState
from tideserve.sim.change_spec import ChangeCosts
from tideserve.sim.engine import Simulation
from tideserve.sim.post import Post
from tideserve.sim.stage_memory import StageMemory


@dataclass(slots=True)
class Preparation:
    """An attempt to have `layers`; `advance` is called between iterations until it is `over`.

    `wake` has that happen soon.
    """

    attempt: str
    layers: range
    post: Post
    state: PlannerState
    memory: StageMemory
    costs: ChangeCosts
    simulation: Simulation
    wake: Callable[[], None]
    over: bool = False
    _restoring: bool = False
    _capacity_kept: bool = False
    _fetched: bool = False
    _refusal: str = ""
    _steps: Iterator[None] = field(init=False)

    def __post_init__(self) -> None:
        self._steps = self._run()

    def advance(self) -> str:
        """Go on as far as it is possible; once it is over, why this worker cannot be ready."""
        for _ in self._steps:
            return ""
        self.over = True
        return self._refusal

    def note_kept(self, attempt: str) -> None:
        """The leader keeps the use of this stage below the limit, for that attempt."""
        self._capacity_kept = self._capacity_kept or attempt == self.attempt

    def note_fetched(self, attempt: str) -> None:
        """The parameters that the attempt asked for have arrived."""
        self._fetched = self._fetched or attempt == self.attempt

    def undo(self) -> None:
        """Give back what was reserved; the layers that run now are as before."""
        self._steps, self.over = iter(()), True
        if not self._restoring:
            return
        self.memory.abandon_restore()
        self.state.pool.grow(self.memory.blocks)
        if not self._leads:
            self._tell_capacity(self.memory.blocks, "")

    @property
    def _leads(self) -> bool:
        return self.post.stages[0].worker_id == self.post.name

    def _tell_capacity(self, blocks: int, attempt: str) -> None:
        leader, name = self.post.stages[0].worker_id, self.post.name
        self.post.send(leader, lambda peer: peer.capacity.set, name, blocks, attempt)

    def _run(self) -> Iterator[None]:
        """The steps, in order; yields where it has to wait."""
        yield from self._wait(self.costs.connect_s)
        memory = self.memory
        both = {*memory.layers, *self.layers}
        missing_bytes = memory.parameter_bytes(both) - memory.parameter_bytes(memory.layers)
        if not missing_bytes:
            return
        limit = memory.blocks_beside(self.layers)
        if limit < 1:
            self._refusal = "the parameters of the returning layers leave no room for KV"
            return
        self._restoring = True
        yield from self._make_room(limit)
        for holder, size_bytes in self._sources():
            yield from self._fetch(holder, size_bytes)
        yield from self._wait(missing_bytes / self.costs.verify_bytes_per_s)

    def _make_room(self, limit: int) -> Iterator[None]:
        pool, table = self.state.pool, self.state.table
        if limit >= pool.num_blocks:
            return
        if self._leads:
            pool.limit(limit)
            while pool.taken_count > limit:
                yield
        else:
            self._tell_capacity(limit, self.attempt)
            while not self._capacity_kept:
                yield
            pool.limit(limit)
        table.relocate(limit)
        pool.shrink(limit)
        self.memory.shrink(limit)

    def _sources(self) -> Iterator[tuple[str, int]]:
        """Members that run what is missing, and how much of it."""
        held = set(self.memory.layers)
        for stage in self.post.stages:
            theirs = held | (set(range(stage.first_layer, stage.end_layer)) & set(self.layers))
            size_bytes = self.memory.parameter_bytes(theirs) - self.memory.parameter_bytes(held)
            held = theirs
            if size_bytes:
                yield stage.worker_id, size_bytes

    def _fetch(self, holder: str, size_bytes: int) -> Iterator[None]:
        self._fetched = False
        self.post.send(
            holder,
            lambda peer: peer.capacity.send_parameters,
            self.post.name,
            self.attempt,
            size_bytes,
        )
        while not self._fetched:
            yield

    def _wait(self, seconds: float) -> Iterator[None]:
        until_s = self.simulation.now_s + seconds
        self.simulation.at(until_s, self.wake)
        while self.simulation.now_s < until_s:
            yield
