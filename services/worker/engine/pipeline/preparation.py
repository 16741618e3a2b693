"""Gets an engine ready for groups that may be committed, while it serves on as it is.

To merge, the members only have to be connected. A member that is to run layers which it has dropped
makes room and fetches them first: KunServe §4.4. Room is made by lowering the group's capacity,
moving blocks below the limit and unmapping the KV tails; parameters come from a member that holds
them, else from the model folder, and are verified against their digest before they can run.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch

from services.core.planner.state import IterationState
from services.worker.engine.memory.slab_names import stage_slabs
from services.worker.engine.memory.stage_memory import StageMemory
from services.worker.engine.pipeline.configuration import Configuration
from services.worker.engine.pipeline.connections import Connections
from services.worker.engine.pipeline.frames import Capacity, FetchRefused, FetchSlab
from services.worker.engine.pipeline.links import Links
from services.worker.engine.pipeline.stage_runner import StageRunner
from services.worker.engine.transfer.errors import MoverFull
from services.worker.engine.transfer.frame import Bytes
from services.worker.engine.transfer.mover import Mover
from services.worker.engine.transfer.pieces import ParameterPiece, SlabCut, parameter_pieces
from services.worker.errors import SlabCorrupted, WorkerError
from services.worker.ipc import Prepare, Prepared

MOVES_PER_TURN = 64
HASH_BYTES_PER_TURN = 8 << 20
CONNECT_TIMEOUT_S = 10.0
FETCH_TIMEOUT_S = 60.0

log = logging.getLogger(__name__)


class Refused(WorkerError):
    """The member cannot be made ready; one sentence says why."""


@dataclass(slots=True)
class Fetching:
    """A slab on its way."""

    slab: str
    transfer_id: str
    until_s: float
    arrived: bool = False
    failed: bool = False


@dataclass(slots=True)
class Preparation:
    """One attempt. `advance` is called between iterations and never takes long."""

    command: Prepare
    links: Links
    connections: Connections
    stage: StageRunner
    state: IterationState
    mover: Mover
    now_s: Callable[[], float]
    configuration: Configuration | None  # the present one
    capacity_kept: bool = False
    fetching: Fetching | None = None
    restoring: bool = False
    over: bool = False
    _steps: Iterator[None] = field(init=False)

    def __post_init__(self) -> None:
        self._steps = self._run()

    @property
    def attempt(self) -> str:
        """The attempt's id."""
        return self.command.attempt

    def advance(self) -> Prepared | None:
        """Do a little; the answer once it is over."""
        try:
            next(self._steps)
        except StopIteration:
            self.over = True
            return Prepared(self.attempt)
        except WorkerError as error:
            self.over = True
            return Prepared(self.attempt, str(error))
        return None

    def note_kept(self, attempt: str) -> None:
        """The leader keeps the use of this stage below the limit, for that attempt."""
        if attempt == self.attempt:
            self.capacity_kept = True

    def undo(self) -> None:
        """Give back what was reserved; the layers that run now are as before."""
        self._steps = iter(())
        if self.fetching is not None:
            self.mover.cancel(self.fetching.transfer_id)
            self.fetching = None
        if not self.restoring:
            return
        self.restoring = False
        with self.stage.lock:
            blocks = self._memory.abandon_restore()
            self.state.pool.grow(blocks)
        if self.configuration is not None and not self.configuration.leads:
            self.links.send(self.configuration.leader, Capacity(blocks))

    @property
    def _memory(self) -> StageMemory:
        return self.stage.runner.stage_memory

    def _run(self) -> Iterator[None]:
        """The steps, in order; yields where the engine may serve."""
        new = Configuration.of(self.command.groups, self.links.worker_id)
        yield from self._connect(new)
        first, end = new.stage.first_layer, new.stage.end_layer
        missing = self._memory.missing_slabs(first, end)
        returning = set(range(first, end)) - set(self._memory.layers)
        if not missing and not returning:
            return
        self.restoring = True
        yield from self._make_room(first, end)
        for slab in missing:
            yield from self._fetch(slab, new)
        with self.stage.lock:
            self._memory.map_kv_of(returning)

    # --- connections

    def _connect(self, new: Configuration) -> Iterator[None]:
        """Have both lanes to every other member."""
        me = new.members[self.links.worker_id]
        peers = [member for name, member in new.members.items() if name != me.worker_id]
        until_s = self.now_s() + CONNECT_TIMEOUT_S
        while waiting := [member for member in peers if not self.connections.has(member)]:
            if self.now_s() > until_s:
                raise Refused(f"{waiting[0].worker_id} cannot be reached for transfers")
            for member in waiting:
                self.connections.open(me, member)
            yield

    # --- room

    def _make_room(self, first: int, end: int) -> Iterator[None]:
        limit = self._memory.blocks_beside(first, end)
        if limit < 1:
            raise Refused("the parameters of the returning layers leave no room for KV")
        pool = self.state.pool
        if limit < pool.num_blocks:
            yield from self._lower_capacity(limit)
            with self.stage.lock:
                pool.limit(limit)
            while self.state.table.highest_block(self.state.table.request_ids) >= limit:
                self._relocate(limit)
                yield
            with self.stage.lock:
                pool.shrink(limit)
        with self.stage.lock:
            self._memory.shrink_kv(limit, used_blocks=self._used())
        while not self._memory.finish_drop():
            yield

    def _used(self) -> int:
        table = self.state.table
        return table.highest_block(table.request_ids) + 1

    def _lower_capacity(self, limit: int) -> Iterator[None]:
        """Wait until no more than `limit` blocks of this stage are, or will be, in use."""
        pool = self.state.pool
        if self.configuration is not None and not self.configuration.leads:
            self.links.send(self.configuration.leader, Capacity(limit, self.attempt))
            while not self.capacity_kept:
                yield
            return
        with self.stage.lock:
            pool.limit(limit)
        while pool.taken_count > limit:
            yield

    def _relocate(self, limit: int) -> None:
        with self.stage.lock:
            moves = self.state.table.relocate(limit, MOVES_PER_TURN)
            self._memory.relocate([(move.source, move.target) for move in moves])

    # --- parameters

    def _fetch(self, slab: str, new: Configuration) -> Iterator[None]:
        """Restore one slab: from a member that runs it, else from the model folder."""
        with self.stage.lock:
            self._memory.map_layer_parameters(slab)
        holder = self._holder(slab, new)
        if holder is not None:
            yield from self._fetch_from(holder, slab)
        fetched = self.fetching is not None and not self.fetching.failed
        self.fetching = None
        if fetched:
            try:
                yield from self._verify(slab)
                return
            except SlabCorrupted as error:
                log.warning("%s, as %s sent it", error, holder)
        log.info("%s comes from the model folder", slab)
        self._memory.load_layer(slab)
        yield from self._verify(slab)

    def _verify(self, slab: str) -> Iterator[None]:
        """Hash it. Raises SlabCorrupted."""
        while not self._memory.finish_layer(slab, HASH_BYTES_PER_TURN):
            yield

    def _fetch_from(self, holder: str, slab: str) -> Iterator[None]:
        transfer_id = f"{self.attempt}/{self.links.worker_id}/{slab}"
        self.fetching = Fetching(slab, transfer_id, self.now_s() + FETCH_TIMEOUT_S)
        digest = self._memory.slab_digest(slab).hex()
        self.links.send(holder, FetchSlab(slab, transfer_id, digest))
        while not (self.fetching.arrived or self.fetching.failed):
            if self.now_s() > self.fetching.until_s:
                self.mover.cancel(transfer_id)
                self.fetching.failed = True
            yield

    def _holder(self, slab: str, new: Configuration) -> str | None:
        """A member of the present group that runs the slab."""
        if self.configuration is None:
            return None
        for stage in self.configuration.stages:
            slabs = stage_slabs(
                stage.first_layer,
                stage.end_layer,
                num_layers=self._memory.num_layers,
                tied_embeddings=self._memory.tied_embeddings,
            )
            if stage.worker_id != self.links.worker_id and slab in slabs:
                return stage.worker_id if stage.worker_id in new.members else None
        return None

    def note_ended(self, transfer_id: str, intact: bool) -> bool:
        """Hear of a transfer; whether it was this one's."""
        if self.fetching is None or self.fetching.transfer_id != transfer_id:
            return False
        if intact:
            self.fetching.arrived = True
        else:
            self.fetching.failed = True
        return True


@dataclass(slots=True)
class ParameterSource:
    """Sends slabs to members that restore them, and stores those that arrive."""

    links: Links
    stage: StageRunner
    mover: Mover

    def send(self, peer: str, body: FetchSlab) -> None:
        """Begin the transfer of a slab, if these are the parameters that are wanted."""
        memory = self.stage.runner.stage_memory
        slab = memory.slabs.get(body.slab)
        if slab is None or not slab.resident or slab.digest.hex() != body.digest:
            self.links.send(peer, FetchRefused(body.slab, body.transfer_id))
            return
        cut = SlabCut(body.transfer_id, body.slab, slab.layout.size_bytes)
        pieces = parameter_pieces(
            cut,
            lambda: self.mover.chunk_bytes,
            partial(self._pack, body.slab),
        )
        try:
            self.mover.send(body.transfer_id, peer, "", 0, pieces)
        except MoverFull:
            self.links.send(peer, FetchRefused(body.slab, body.transfer_id))

    def take(self, piece: ParameterPiece, payload: Bytes) -> None:
        """Store a piece; on the mover's thread. Raises InvalidStage if it is not wanted."""
        with self.stage.lock:
            memory = self.stage.runner.stage_memory
            memory.unpack_slab(piece.slab, piece.offset_bytes, torch.from_numpy(payload))

    def _pack(self, slab: str, offset_bytes: int, size_bytes: int) -> torch.Tensor:
        with self.stage.lock:
            return self.stage.runner.stage_memory.pack_slab(slab, offset_bytes, size_bytes)
