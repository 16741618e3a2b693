"""Executes the commands of a preparation: connections, memory, parameters (KunServe §4.4).

A preparation makes a member ready for a group change before it is committed: the member connects to
the other members, frees KV memory, and restores the slabs that it lacks for its new layers. A slab
is the memory with the parameters of a layer, or of the embeddings. The mover is the thread that
sends and receives slabs and KV.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial

import torch

from services.core.changeover.vocabulary import (
    KvMapped,
    KvShrunk,
    MapKv,
    MeasureRestore,
    MembersConnected,
    RestoreFailed,
    RestoreMeasured,
    RestoreSlab,
    RestoreUndone,
    ShrinkKv,
    SlabVerified,
    UndoRestore,
)
from services.worker.engine.memory.device_copies import PinnedSlot
from services.worker.engine.memory.layer_slab import SlabState
from services.worker.engine.pipeline.connections import ANSWER_SHARE, Connections
from services.worker.engine.pipeline.failpoints import ChangeFailpoints
from services.worker.engine.pipeline.frames import SlabRefused, SlabRequest
from services.worker.engine.pipeline.links import Links
from services.worker.engine.pipeline.piece_copies import Copy, PieceAhead, PieceCopies
from services.worker.engine.pipeline.plans import members_of
from services.worker.engine.pipeline.stage_runner import StageRunner
from services.worker.engine.transfer.errors import MoverFull
from services.worker.engine.transfer.frame import Bytes
from services.worker.engine.transfer.mover import Mover
from services.worker.engine.transfer.pieces import ParameterPiece, SlabCut, parameter_pieces
from services.worker.errors import WorkerError
from services.worker.ipc import MemberPlan, Prepare

CHECKED_BYTES_PER_TURN = 64 << 20  # of parameters whose digest is computed, per `step`
CONNECT_TIMEOUT_S = 10.0

PreparationEvent = MembersConnected | RestoreMeasured | KvShrunk | SlabVerified | RestoreFailed


class Pause(Enum):
    """Why slow work returns control to the engine before its end."""

    TURN = auto()  # other work is due
    TRANSFER = auto()  # a peer sends a slab; the mover wakes the engine


log = logging.getLogger(__name__)


@dataclass(slots=True)
class _SlabFetch:
    holder: str
    start_s: float
    until_s: float  # deadline
    arrived: bool = False
    failed: bool = False


@dataclass(slots=True)
class Restoring:
    """The work of a preparation. Slow work is a generator that `step` resumes between iterations.

    Several slabs are restored at the same time; other slow work is alone. A step is short beside an
    iteration, except for a slab that is read from the model folder.
    """

    links: Links
    connections: Connections
    stage: StageRunner
    mover: Mover
    now_s: Callable[[], float]
    failpoints: ChangeFailpoints
    restored: Counter[str] = field(default_factory=Counter)  # slabs since the start, by source
    _steps: list[Iterator[PreparationEvent | Pause]] = field(default_factory=list)  # in progress
    _waiting: int = 0  # of `_steps`, at the last `step`: those that wait for a transfer
    _fetches: dict[str, _SlabFetch] = field(default_factory=dict)  # in progress, by transfer
    _holders: dict[str, MemberPlan] = field(default_factory=dict)  # outside of the change
    _heard_s: dict[str, float] = field(default_factory=dict)  # arrival of a worker's last piece
    _silent: set[str] = field(default_factory=set)  # workers that did not answer in the attempt
    _silence_max_s: float = 0.0  # of a worker in the attempt

    @property
    def running(self) -> bool:
        """Whether slow work is in progress, so that `step` must be called."""
        return bool(self._steps)

    @property
    def awaits_transfers(self) -> bool:
        """Whether all slow work in progress waits for slabs of peers."""
        return 0 < len(self._steps) == self._waiting

    def step(self) -> list[PreparationEvent]:
        """Continue all slow work; returns the events of the work that has ended."""
        ends, going, waiting = [], [], 0
        for steps in self._steps:
            try:
                end = next(steps)
            except WorkerError as error:
                end = RestoreFailed(str(error))
            if isinstance(end, Pause):
                going.append(steps)
                waiting += end is Pause.TRANSFER
            else:
                ends.append(end)
        self._steps = going
        self._waiting = waiting
        return ends

    # --- slow work

    def connect(self, preparation: Prepare) -> None:
        """Start to connect both lanes to every other member.

        Also connects to the holders of layers in other groups, but nothing waits for them until a
        slab is fetched. Holders without a nonce send only if they are connected already.
        """
        members = members_of(preparation.groups)
        self.connections.end_introductions(members)
        self._holders = {holder.worker_id: holder for holder in preparation.holders}
        self._heard_s, self._silent = {}, set()
        self._silence_max_s = ANSWER_SHARE * preparation.timeout_s
        introduced = [holder for holder in preparation.holders if holder.bulk.nonce]
        own = members[self.links.worker_id]
        self.connections.introduce(own, introduced, preparation.timeout_s)
        self._steps = [self._connect(preparation.attempt, members)]

    def _connect(
        self, attempt: str, members: dict[str, MemberPlan]
    ) -> Iterator[PreparationEvent | Pause]:
        # Dial or expect again in each step: a peer refuses until it expects this worker.
        own = members[self.links.worker_id]
        peers = [member for worker_id, member in members.items() if worker_id != own.worker_id]
        until_s = self.now_s() + CONNECT_TIMEOUT_S
        while waiting := [member for member in peers if not self.connections.has(member)]:
            if self.now_s() > until_s:
                yield MembersConnected(attempt, waiting[0].worker_id)
            for member in waiting:
                self.connections.open(own, member)
            yield Pause.TURN
        yield MembersConnected(attempt)

    def shrink(self, command: ShrinkKv) -> None:
        """Start to unmap the KV blocks from `command.blocks` on; `step` frees them in slices."""
        self.failpoints.hit_preparation("room")
        self.stage.runner.stage_memory.shrink_kv(command.blocks, used_blocks=command.used)
        self._steps = [self._sweep(command.attempt)]

    def _sweep(self, attempt: str) -> Iterator[PreparationEvent | Pause]:
        while True:
            with self.stage.lock:
                swept = self.stage.runner.stage_memory.finish_drop()
            yield KvShrunk(attempt) if swept else Pause.TURN

    def restore(self, command: RestoreSlab) -> None:
        """Start to restore and verify a slab."""
        self._steps.append(self._restore(command))

    def _restore(self, command: RestoreSlab) -> Iterator[PreparationEvent | Pause]:
        memory, slab = self.stage.runner.stage_memory, command.slab
        self.failpoints.hit_preparation("fetch")
        source = command.holder or ("the copy in host memory" if command.from_copy else "")
        try:
            memory.arena.await_retired()
            with self.stage.lock:
                if memory.slabs[slab].state is SlabState.ABSENT:
                    memory.map_layer_parameters(slab)
            if command.holder:
                yield from self._fetch(command)
            elif command.from_copy:
                yield from self._copy_back(slab)
            else:
                log.info("%s comes from the model folder", slab)
                memory.load_layer(slab)
            # Verify the digest: a slab with any other byte must never run.
            while not memory.finish_layer(slab, CHECKED_BYTES_PER_TURN):
                yield Pause.TURN
            self.failpoints.hit_preparation("verify")
            self.restored[
                "peer" if command.holder else "host" if command.from_copy else "disk"
            ] += 1
            yield SlabVerified(command.attempt, slab, intact=True)
        except WorkerError as error:
            # The model folder is the last source. After any other one, the state machine chooses
            # the next.
            if not source:
                yield RestoreFailed(str(error))
            log.warning("%s was not restored from %s: %s", slab, source, error)
            if command.from_copy:
                memory.host_copies.remove(slab)
            yield SlabVerified(command.attempt, slab, intact=False)

    def _copy_back(self, slab: str) -> Iterator[Pause]:
        memory = self.stage.runner.stage_memory
        slices = memory.copy_back(slab)
        going = True
        while going:
            # On a GPU the copies share a stream with those of the mover's thread.
            with self.stage.lock if memory.copies is not None else nullcontext():
                going = next(slices, slices) is None
            if going:
                yield Pause.TURN

    def _fetch(self, command: RestoreSlab) -> Iterator[Pause]:
        """Fetch a slab from the holder, over several steps. Raises _NotFetched."""
        slab, holder = command.slab, self._holders.get(command.holder)
        if command.holder in self._silent:
            raise _NotFetched("the worker does not answer")
        while holder is not None and not self.connections.has(holder):
            if not self.connections.may_connect(holder):
                raise _NotFetched("the worker is not connected")
            yield Pause.TURN
        transfer_id = f"{command.attempt}/{self.links.worker_id}/{slab}/{command.holder}"
        memory = self.stage.runner.stage_memory
        size_bytes = memory.slabs[slab].layout.size_bytes
        fetching = self._fetches[transfer_id] = self._new_fetch(command.holder, size_bytes)
        digest = memory.slab_digest(slab).hex()
        self.links.send(command.holder, SlabRequest(slab, transfer_id, digest))
        while not (fetching.arrived or fetching.failed):
            is_lost = holder is not None and not self.connections.has(holder)
            if is_lost or self._is_silent(fetching) or self.now_s() > fetching.until_s:
                self.mover.cancel(transfer_id)
                fetching.failed = True
            yield Pause.TRANSFER
        del self._fetches[transfer_id]
        if fetching.failed:
            raise _NotFetched("it did not arrive")

    def _new_fetch(self, holder: str, size_bytes: int) -> _SlabFetch:
        now_s, patience_s = self.now_s(), self.mover.patience_s(size_bytes)
        # Slabs that arrive at the same time share the link, so each of them takes longer.
        for other in self._fetches.values():
            other.until_s += patience_s
        until_s = now_s + self._silence_max_s + patience_s * (1 + len(self._fetches))
        return _SlabFetch(holder, now_s, until_s)

    def _is_silent(self, fetching: _SlabFetch) -> bool:
        """Whether the holder has sent no piece for too long, now or earlier in the attempt."""
        heard_s = max(fetching.start_s, self._heard_s.get(fetching.holder, 0.0))
        if self.now_s() > heard_s + self._silence_max_s:
            self._silent.add(fetching.holder)  # other slabs do not wait for it
        return fetching.holder in self._silent

    def note_piece(self, transfer_id: str) -> None:
        """Note that a piece of a slab has arrived; called on the mover's thread."""
        fetching = self._fetches.get(transfer_id)
        if fetching is not None:
            self._heard_s[fetching.holder] = self.now_s()

    def note_transfer(self, transfer_id: str, intact: bool) -> bool:
        """Note the end of a transfer; returns whether it was of a slab that is being fetched."""
        fetching = self._fetches.get(transfer_id)
        if fetching is None:
            return False
        fetching.arrived, fetching.failed = intact, not intact
        return True

    # --- quick work, called with the stage's lock held

    def measure(self, command: MeasureRestore) -> RestoreMeasured | None:
        """Measure missing parameters and the room for KV of a stage with these layers.

        If the stage only loses layers, also prepares their drop. If that takes long, `step` returns
        the measurement.
        """
        memory = self.stage.runner.stage_memory
        # Prepare the KV memory that a drop of layers gains now, so that the switch does not wait
        # for it.
        memory.prepare_drop(command.first_layer, command.end_layer)
        if memory.drop_prepared:
            return self._measured(command)
        self._steps = [self._prepare_drop(command)]
        return None

    def _prepare_drop(self, command: MeasureRestore) -> Iterator[PreparationEvent | Pause]:
        prepared = False
        while not prepared:
            yield Pause.TURN
            with self.stage.lock:
                prepared = self.stage.runner.stage_memory.continue_drop()
        yield self._measured(command)

    def _measured(self, command: MeasureRestore) -> RestoreMeasured:
        memory = self.stage.runner.stage_memory
        first, end = command.first_layer, command.end_layer
        missing = tuple(memory.missing_slabs(first, end))
        return RestoreMeasured(
            memory.blocks_after_adding(first, end),
            missing,
            tuple(sorted(set(range(first, end)) - set(memory.layers))),
            tuple(slab for slab in missing if memory.host_copies.get(slab) is not None),
        )

    def map_kv(self, command: MapKv) -> KvMapped:
        """Map as many KV blocks for the returning layers as the other layers have."""
        self.failpoints.hit_preparation("map_kv")
        self.stage.runner.stage_memory.map_kv_of(command.layers)
        return KvMapped()

    def undo(self, command: UndoRestore) -> RestoreUndone:
        """Roll back the memory changes; slow work in progress ends without an event."""
        self.stop()
        memory = self.stage.runner.stage_memory
        return RestoreUndone(memory.abandon_restore(keep_verified=command.keep_verified))

    def stop(self) -> None:
        """Stop slow work in progress, without an event."""
        self._steps = []
        for transfer_id in self._fetches:
            self.mover.cancel(transfer_id)
        self._fetches = {}


class _NotFetched(WorkerError):
    """A member refused to send a slab, or did not send it in time."""


@dataclass(slots=True)
class ParameterSource:
    """Sends slabs to members that restore them, and stores received pieces of slabs."""

    links: Links
    stage: StageRunner
    mover: Mover
    failpoints: ChangeFailpoints

    def send(self, peer: str, wanted: SlabRequest) -> None:
        """Start the transfer of a slab; refuse if this member lacks the parameters or is busy."""
        memory = self.stage.runner.stage_memory
        slab = memory.slabs.get(wanted.slab)
        if slab is None or not slab.resident or slab.digest.hex() != wanted.digest:
            self.links.send(peer, SlabRefused(wanted.slab, wanted.transfer_id))
            return
        cut = SlabCut(wanted.transfer_id, wanted.slab, slab.layout.size_bytes)
        piece_bytes = partial(self.mover.piece_bytes, peer)
        read = partial(self._read_ahead, wanted.slab) if self._copies.reads_ahead else None
        pieces = parameter_pieces(cut, piece_bytes, partial(self._pack, wanted.slab), read)
        try:
            self.mover.send(wanted.transfer_id, peer, "", 0, pieces)
        except MoverFull:
            self.links.send(peer, SlabRefused(wanted.slab, wanted.transfer_id))

    def store(self, piece: ParameterPiece, payload: Bytes) -> None:
        """Store a received piece; called on the mover's thread.

        Raises:
            InvalidStage: if the slab is not being restored.
        """

        hashes: list[Callable[[], None]] = []

        def write(source: torch.Tensor | PinnedSlot) -> None:
            memory = self.stage.runner.stage_memory
            update = memory.unpack_slab(piece.slab, piece.offset_bytes, source)
            if update is not None:
                hashes.append(update)

        self._copies.unpack(payload, write)
        for update in hashes:
            update()  # without the lock, while the device copies the piece

    def _pack(self, slab: str, offset_bytes: int, target: Bytes) -> None:
        self._copies.pack(target, self._reader(slab, offset_bytes))

    def _read_ahead(self, slab: str, offset_bytes: int, size_bytes: int) -> PieceAhead | None:
        return self._copies.read_ahead(size_bytes, self._reader(slab, offset_bytes))

    def _reader(self, slab: str, offset_bytes: int) -> Copy:
        """Return a function that copies a piece of a slab; called with the stage's lock held."""
        self.failpoints.hit_preparation("slab_piece")

        def read(target: torch.Tensor | PinnedSlot) -> None:
            self.stage.runner.stage_memory.pack_slab(slab, offset_bytes, target)

        return read

    @property
    def _copies(self) -> PieceCopies:
        return PieceCopies(self.stage)
