"""The memory of a stage: parameters and KV cache of the layers that a worker runs.

A worker starts with all layers. Under memory pressure it drops the parameters of layers that a peer
runs, and their chunks extend the KV ranges of the remaining layers (KunServe §4.1), without copies.
`prepare_drop` maps the extensions while the leaving layers still run, so that the pause only
transfers the ownership of chunks. `finish_drop` does the remaining work in background slices.

A chunk is the granularity of memory mappings. A slab is the memory with the parameters of a layer,
of the embeddings or of the head. A layer has *departed* when it has left the stage and its KV is
still needed, until its sequences have moved. A layer *arrives* while a restore maps its memory.

Drop:     prepare_drop → set_stage → (serve, finish_drop in slices) → release_departed as KV moves
          away, until 0. Without a prepared drop, `set_stage` maps the KV extensions itself.
Restore:  relocate → shrink_kv → map_layer_parameters → slab_bytes, copy_back or load_layer →
          finish_layer → map_kv_of → set_stage. All steps but the last leave the serving stage
          unchanged; `abandon_restore` undoes them.

A method takes microseconds to a few milliseconds unless its docstring says otherwise.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from services.common.clock import monotonic_s
from services.core.groups.slab_names import layer_name, stage_slabs
from services.worker.engine.memory.arena import Arena
from services.worker.engine.memory.budget import MemoryPlan
from services.worker.engine.memory.device_copies import DeviceCopies, PinnedSlot
from services.worker.engine.memory.host_copies import HostCopies
from services.worker.engine.memory.kv_range import KvBlockShape, KvRange, grow_tails, prepare_tails
from services.worker.engine.memory.layer_slab import (
    LayerSlab,
    SlabLayout,
    SlabState,
    WeightSource,
)
from services.worker.errors import InvalidBlocks, InvalidStage

SLICE_BYTES = 8 << 20
"""Memory handled per call of `finish_drop`, which takes about a millisecond on a CPU."""


DEVICE_SLICE_BYTES = 64 << 20
"""Host memory that is copied to a GPU at once; takes about a millisecond."""
HASHING_MAX = 8
"""Slabs whose hashes are computed while further slabs are loaded."""


@dataclass(frozen=True, slots=True)
class DropReport:
    """The result of a drop. `paused_us`: duration of `set_stage`.

    `map_calls`: number of mapping calls, 0 if all mappings were prepared.
    """

    dropped_bytes: int
    mapped_bytes: int
    map_calls: int
    num_blocks: int
    paused_us: float


@dataclass(frozen=True, slots=True)
class _PreparedDrop:
    """A prepared stage: its layers, the slabs to drop, and the growth of KV ranges in chunks."""

    layers: range
    leaving: list[LayerSlab]
    growth: list[tuple[KvRange, int]]


class StageMemory:
    """Owns the slabs and KV ranges of all layers of the model in `arena`.

    `layouts` are by slab name (see `slab_names`); `open_source` opens the model's weight files.
    """

    def __init__(
        self,
        arena: Arena,
        plan: MemoryPlan,
        layouts: dict[str, SlabLayout],
        block_shape: KvBlockShape,
        *,
        num_layers: int,
        tied_embeddings: bool,
        open_source: Callable[[], WeightSource],
        host_copies: HostCopies | None = None,
        copies: DeviceCopies | None = None,
        hashers: Executor | None = None,
    ) -> None:
        """`copies`: the copies of the mover's thread beside iterations; None on a CPU.

        `hashers` hash slabs while others are loaded; None: the caller's thread does.
        """
        self.arena = arena
        self.copies = copies
        self.host_copies = host_copies or HostCopies()
        self.plan = plan
        self.slabs = {name: LayerSlab(arena, name, layout) for name, layout in layouts.items()}
        self.kv_ranges = [
            KvRange(arena, f"kv of {layer_name(index)}", block_shape) for index in range(num_layers)
        ]
        self.tied_embeddings = tied_embeddings
        self._open_source = open_source
        self._hashers = hashers
        self._layers = range(num_layers)
        # Layers of a restore with mapped KV that are not part of the stage yet.
        self._arriving: set[int] = set()
        # Maximum chunks of each KV range while a restore needs the other chunks; None otherwise.
        self._kv_chunks_max: int | None = None
        self._prepared: _PreparedDrop | None = None

    def work(self) -> AbstractContextManager[None]:
        """Order kernels that the engine's thread launches in the block with the mover's copies."""
        return nullcontext() if self.copies is None else self.copies.work()

    # --- state

    @property
    def layers(self) -> range:
        """The layers of the stage."""
        return self._layers

    @property
    def num_layers(self) -> int:
        """Number of layers of the model."""
        return len(self.kv_ranges)

    @property
    def num_blocks(self) -> int:
        """Number of KV blocks in every layer of the stage: ids 0 .. num_blocks - 1."""
        return min(self.kv_ranges[layer].num_blocks for layer in self._layers)

    @property
    def parameter_bytes(self) -> int:
        """Device memory mapped for parameters."""
        return self._slab_chunks() * self.arena.chunk_bytes

    @property
    def departed_layers(self) -> list[int]:
        """Layers that have left the stage and whose KV is not released yet."""
        return [
            layer
            for layer, kv_range in enumerate(self.kv_ranges)
            if kv_range.mapped_chunks and layer not in self._layers and layer not in self._arriving
        ]

    @property
    def departed_blocks(self) -> int:
        """Maximum number of blocks of a departed layer; 0 without departed layers."""
        return max((self.kv_ranges[layer].num_blocks for layer in self.departed_layers), default=0)

    def slabs_of(self, first_layer: int, end_layer: int) -> list[str]:
        """Return the names of the slabs that a stage of these layers needs. Raises InvalidStage."""
        if not 0 <= first_layer < end_layer <= self.num_layers:
            raise InvalidStage(
                f"layers {first_layer} to {end_layer} (exclusive) are no stage of a model with "
                f"{self.num_layers} layers"
            )
        return stage_slabs(
            first_layer,
            end_layer,
            num_layers=self.num_layers,
            tied_embeddings=self.tied_embeddings,
        )

    def missing_slabs(self, first_layer: int, end_layer: int) -> list[str]:
        """Return the slabs in `slabs_of` that are not resident. Raises InvalidStage."""
        return [n for n in self.slabs_of(first_layer, end_layer) if not self.slabs[n].resident]

    def blocks_after_adding(self, first_layer: int, end_layer: int) -> int:
        """Return the number of KV blocks that remain after adding these layers to the stage.

        `shrink_kv` takes it before a restore. It is less than 1 if memory does not suffice. Raises
        InvalidStage.
        """
        present = self.slabs_of(self._layers.start, self._layers.stop)
        slabs = {*present, *self.slabs_of(first_layer, end_layer)}
        layers = {*self._layers, *range(first_layer, end_layer)}
        parameter_chunks = sum(self.slabs[name].chunks for name in slabs)
        chunks = (self.arena.total_chunks - parameter_chunks) // len(layers)
        return chunks * self.arena.chunk_bytes // self.kv_ranges[0].shape.size_bytes

    # --- start

    def load(self) -> None:
        """Load all slabs at start, and map all other chunks to KV. Slow. Raises ModelError."""
        source = self._open_source()
        hashing: deque[LayerSlab] = deque()
        try:
            with self.work():
                for slab in self.slabs.values():
                    slab.map()
                    slab.fill_from(source, self._hashers)
                    hashing.append(slab)
                    # Bounds the copies in host memory.
                    if self._hashers is None or len(hashing) > HASHING_MAX:
                        self._finish_loading(hashing.popleft())
                while hashing:
                    self._finish_loading(hashing.popleft())
        finally:
            source.close()
        self.host_copies.log_size()
        self._grow(cold=False)

    def _finish_loading(self, slab: LayerSlab) -> None:
        slab.finish()
        self.host_copies.keep(slab.name, slab.bytes_to_read())

    # --- drop

    def prepare_drop(self, first_layer: int, end_layer: int) -> None:
        """Map the KV extensions of a stage that runs only these layers, before the switch to it.

        On a GPU, `continue_drop` makes the mappings, until `drop_prepared`. `finish_drop` prefaults
        them, and `set_stage` of the same layers uses them.
        `cancel_drop`, or any method that moves memory, undoes them. No effect unless layers leave
        the stage and none arrives. Raises InvalidStage.
        """
        self.cancel_drop()
        kept = self.slabs_of(first_layer, end_layer)
        layers = range(first_layer, end_layer)
        leaving = [slab for name, slab in self.slabs.items() if slab.resident and name not in kept]
        arrives = not set(layers) <= set(self._layers) or self.missing_slabs(first_layer, end_layer)
        if arrives or not leaving or self._kv_chunks_max is not None:
            return
        # The leaving slabs still own these handles; the arena maps them a second time.
        leaving_handles = np.concatenate([slab.reserved.handles for slab in leaving])
        ranges = [self.kv_ranges[layer] for layer in layers]
        self._prepared = _PreparedDrop(
            layers, leaving, prepare_tails(self.arena, ranges, leaving_handles)
        )

    @property
    def drop_prepared(self) -> bool:
        """Whether `set_stage` has nothing to map any more after `prepare_drop`."""
        return not self.arena.unmapped_chunks

    def continue_drop(self, slice_bytes: int | None = SLICE_BYTES) -> bool:
        """Make a slice (None: all) of the mappings of `prepare_drop`; returns `drop_prepared`."""
        return self.arena.map_prepared(self._slice_chunks(slice_bytes))

    def cancel_drop(self) -> None:
        """Undo `prepare_drop`. No effect without a prepared drop."""
        self.arena.cancel_prepared()
        self._prepared = None

    def set_stage(self, first_layer: int, end_layer: int) -> DropReport:
        """Run only these layers from now on: drop other parameters, and map free chunks to KV.

        No iteration may run meanwhile. The KV of layers that leave stays until `release_departed`.
        Raises InvalidStage, LayerNotResident, without any effect.
        """
        started_s = monotonic_s()
        prepared = self._prepared
        # The fast path: all mappings exist, so only the ownership of chunks changes.
        if prepared is not None and prepared.layers == range(first_layer, end_layer):
            dropped, map_calls = prepared.leaving, self.arena.unmapped_chunks
            mapped_chunks = self._adopt(prepared)
        else:
            kept = self._check_ready(first_layer, end_layer)
            self.cancel_drop()
            dropped = [
                slab for name, slab in self.slabs.items() if slab.resident and name not in kept
            ]
            self._switch(first_layer, end_layer)
            for slab in dropped:
                slab.drop()
            mapped_chunks, map_calls = self._grow()
        chunk_bytes = self.arena.chunk_bytes
        return DropReport(
            dropped_bytes=sum(slab.chunks for slab in dropped) * chunk_bytes,
            mapped_bytes=mapped_chunks * chunk_bytes,
            map_calls=map_calls,
            num_blocks=self.num_blocks,
            paused_us=(monotonic_s() - started_s) * 1e6,
        )

    def finish_drop(self, slice_bytes: int | None = SLICE_BYTES) -> bool:
        """Prefault and unmap a slice (None: all) of moved memory; returns True when all is done.

        Call it between iterations after every method that moves memory, until it returns True.
        """
        chunks = self._slice_chunks(slice_bytes)
        # Prefault before sweeping, because iterations are slowed down by first touches.
        if not self.arena.prefault(chunks):
            return False
        return self.arena.sweep(chunks)

    def _slice_chunks(self, slice_bytes: int | None) -> int | None:
        if slice_bytes is None:
            return None
        return max(self.arena.slice_chunks_min, slice_bytes // self.arena.chunk_bytes)

    def release_departed(self, blocks_needed: int) -> int:
        """Free the KV of departed layers from block id `blocks_needed` on; returns `num_blocks`.

        `blocks_needed` is 0 when all sequences have moved their KV.
        """
        self.cancel_drop()
        for layer in self.departed_layers:
            kv_range = self.kv_ranges[layer]
            kv_range.retire_tail(kv_range.chunks_for(blocks_needed))
        self._grow()
        return self.num_blocks

    # --- restore

    def relocate(self, moves: Sequence[tuple[int, int]]) -> None:
        """Compact KV: copy blocks (source, target) of all layers to free lower ids.

        Takes as long as the copies. Raises InvalidBlocks, without any effect.
        """
        sources = {source for source, _ in moves}
        targets = {target for _, target in moves}
        distinct = len(sources) == len(targets) == len(moves) and not sources & targets
        if not distinct or any(not 0 <= target < source for source, target in moves):
            raise InvalidBlocks("blocks must move to distinct free blocks with lower ids")
        if max(sources, default=-1) >= self.num_blocks:
            raise InvalidBlocks(f"block {max(sources)} moves, but there are {self.num_blocks}")
        with self.work():
            for layer in (*self._layers, *self.departed_layers):
                kv_range = self.kv_ranges[layer]
                # A departed layer may have released its blocks with higher ids.
                held = [move for move in moves if move[0] < kv_range.num_blocks]
                kv_range.relocate([source for source, _ in held], [target for _, target in held])

    def turn_tails(self, turns: Iterable[tuple[int, int]]) -> None:
        """Turn blocks (block, filled slots) in all layers, see `KvRange.turn`.

        Raises InvalidBlocks.
        """
        with self.work():
            for block, filled in turns:
                for layer in self._layers:
                    self.kv_ranges[layer].turn(block, filled)

    def shrink_kv(self, num_blocks: int, *, used_blocks: int) -> None:
        """Limit KV to blocks 0 .. num_blocks - 1 until `set_stage` or `abandon_restore`.

        `used_blocks`: 1 + the highest block id in use. Raises InvalidBlocks.
        """
        if not used_blocks <= num_blocks or num_blocks < 1:
            raise InvalidBlocks(
                f"KV cannot shrink to {num_blocks} blocks while ids below {used_blocks} are owned; "
                "relocate them first"
            )
        self.cancel_drop()
        self._kv_chunks_max = self.kv_ranges[0].chunks_for(num_blocks)
        for layer in self._layers:
            self.kv_ranges[layer].retire_tail(self._kv_chunks_max)

    def map_layer_parameters(self, name: str) -> None:
        """Map memory for a slab; its layer cannot run before `finish_layer`.

        Raises InvalidStage if the slab is mapped, ArenaExhausted if KV did not shrink enough.
        """
        self.cancel_drop()
        self.slabs[name].map(cold=True)

    def slab_bytes(self, name: str) -> torch.Tensor:
        """Return a writable view, uint8 [size], of a slab being restored. Raises InvalidStage."""
        return self.slabs[name].bytes_to_fill()

    def pack_slab(
        self, name: str, offset_bytes: int, target: torch.Tensor | PinnedSlot
    ) -> torch.Tensor:
        """Copy a piece of a resident slab, to send to a peer, to `target`, uint8 [n]; returns it.

        To a slot, the copy is only started. Raises LayerNotResident.
        """
        piece = target.piece if isinstance(target, PinnedSlot) else target
        source = self.slabs[name].bytes_to_read()[offset_bytes : offset_bytes + piece.numel()]
        if isinstance(target, PinnedSlot):
            target.read(source)
            return piece
        return piece.copy_(source)

    def unpack_slab(
        self, name: str, offset_bytes: int, payload: torch.Tensor | PinnedSlot
    ) -> Callable[[], None] | None:
        """Write a piece of a slab received from a peer; from a slot, the copy is only started.

        Returns the update of the slab's hash, if it is not done yet. Raises InvalidStage.
        """
        piece = payload.piece if isinstance(payload, PinnedSlot) else payload
        end_bytes = offset_bytes + piece.numel()
        slab = self.slabs[name]
        inside = 0 <= offset_bytes <= end_bytes <= slab.layout.size_bytes
        if piece.dtype != torch.uint8 or not inside:
            raise InvalidStage(f"{name} has no bytes {offset_bytes} to {end_bytes}")
        if isinstance(payload, PinnedSlot):
            return slab.fill(offset_bytes, piece, payload.write)
        return slab.fill(offset_bytes, piece.view(-1))

    def slab_digest(self, name: str) -> bytes:
        """Return the SHA-256 of the bytes that a slab had after its first load."""
        return self.slabs[name].digest

    @property
    def parameters_digest(self) -> bytes:
        """SHA-256 over the digests of all slabs."""
        digests = b"".join(self.slab_digest(name) for name in sorted(self.slabs))
        return hashlib.sha256(digests).digest()

    def load_layer(self, name: str) -> None:
        """Fill a mapped slab from the model folder. Takes as long as reading the files.

        Raises InvalidStage, ModelError.
        """
        source = self._open_source()
        try:
            with self.work():
                self.slabs[name].fill_from(source, self._hashers)
        finally:
            source.close()

    def copy_back(self, name: str) -> Iterator[None]:
        """Fill a mapped slab from its copy in host memory, in slices.

        On a GPU the slices are copied beside iterations; hold the stage's lock. Raises
        InvalidStage.
        """
        copy = self.host_copies.get(name)
        if copy is None:
            raise InvalidStage(f"{name} has no copy in host memory")
        if self.copies is not None:
            yield from self._copy_beside_work(self.slabs[name], copy, self.copies)
            return
        for offset_bytes in range(0, copy.numel(), SLICE_BYTES):
            piece = copy[offset_bytes : offset_bytes + SLICE_BYTES]
            self.unpack_slab(name, offset_bytes, piece)
            yield

    def _copy_beside_work(
        self, slab: LayerSlab, copy: torch.Tensor, copies: DeviceCopies
    ) -> Iterator[None]:
        target = slab.bytes_to_fill()
        if self._hashers is not None:
            slab.hash_copy(copy, self._hashers)
        for offset_bytes in range(0, copy.numel(), DEVICE_SLICE_BYTES):
            part = slice(offset_bytes, offset_bytes + DEVICE_SLICE_BYTES)
            ended = copies.write(target[part], copy[part])
            # Pieces of the mover's thread pass between two slices.
            while not ended.query():
                yield

    def finish_layer(self, name: str, max_bytes: int | None = None) -> bool:
        """Verify a filled slab, `max_bytes` (None: all) per call; returns whether it is resident.

        The first time this takes about a second per GiB (SHA-256), later a tenth of that (XXH3).
        Raises InvalidStage, and SlabCorrupted: fill the slab again.
        """
        with self.work():
            return self.slabs[name].finish(max_bytes)

    def map_kv_of(self, layers: Iterable[int]) -> None:
        """Map KV for layers to restore, with as many blocks as the stage's layers have.

        Raises ArenaExhausted, and InvalidStage if the old KV of a layer is not released.
        """
        self.cancel_drop()
        arriving = set(layers).difference(self._layers, self._arriving)
        if arriving.intersection(self.departed_layers):
            raise InvalidStage("a layer to restore still holds its old KV; release it first")
        # A block needs memory in every layer, so the shortest KV range is the size to map.
        common_chunks = min(self.kv_ranges[layer].mapped_chunks for layer in self._layers)
        handles = self.arena.free_handles(common_chunks * len(arriving))
        for layer, part in zip(sorted(arriving), handles.reshape(-1, common_chunks), strict=True):
            self.kv_ranges[layer].map_tail(part, cold=True)
        self._arriving |= arriving

    def abandon_restore(self, *, keep_verified: bool = False) -> int:
        """Undo all steps of a restore before `set_stage`; returns the new `num_blocks`.

        `keep_verified`: keep slabs that are already resident.
        """
        self.cancel_drop()
        present = self.slabs_of(self._layers.start, self._layers.stop)
        for name, slab in self.slabs.items():
            if name not in present and not (keep_verified and slab.resident):
                slab.drop()
        for layer in self._arriving:
            self.kv_ranges[layer].retire_tail(0)
        self._arriving.clear()
        self._kv_chunks_max = None
        self._grow()
        return self.num_blocks

    # --- pieces of KV

    def pack_kv(
        self, layer: int, block_ids: Sequence[int], target: torch.Tensor | PinnedSlot | None = None
    ) -> torch.Tensor:
        """Copy blocks of a layer to a flat uint8 tensor, or `target`.

        To a slot, the copy is only started. Raises InvalidBlocks.
        """
        return self.kv_ranges[layer].pack(block_ids, target)

    def unpack_kv(
        self, layer: int, block_ids: Sequence[int], payload: torch.Tensor | PinnedSlot
    ) -> None:
        """Overwrite blocks of a layer with the result of `pack_kv`.

        From a slot, the copy is only started. Raises InvalidBlocks.
        """
        self.kv_ranges[layer].unpack(block_ids, payload)

    # --- invariants

    def check_invariants(self) -> None:
        """Assert the arena's invariants, the accounting of chunks, and that the stage can run."""
        self.arena.check_invariants()
        slab_chunks = self._slab_chunks()
        kv_chunks = sum(kv_range.mapped_chunks for kv_range in self.kv_ranges)
        mapped = self.arena.total_chunks - self.arena.free_chunks
        assert slab_chunks + kv_chunks == mapped, "mapped memory belongs to no owner"
        assert self.num_blocks > 0, "the stage has no KV"
        missing = self.missing_slabs(self._layers.start, self._layers.stop)
        assert not missing, f"the stage runs {missing}, which are not resident"
        assert self._arriving.isdisjoint(self._layers), "a layer arrives that is here"
        if self._kv_chunks_max is not None:
            largest = max(self.kv_ranges[layer].mapped_chunks for layer in self._layers)
            assert largest <= self._kv_chunks_max, "KV grew while a restore needs the memory"

    # --- internal

    def _check_ready(self, first_layer: int, end_layer: int) -> list[str]:
        """Raise InvalidStage or LayerNotResident unless the stage can run; returns its slabs."""
        names = self.slabs_of(first_layer, end_layer)
        for name in names:
            self.slabs[name].check_resident()
        filling = [name for name, slab in self.slabs.items() if slab.state is SlabState.FILLING]
        if filling:
            raise InvalidStage(f"{filling[0]} is being restored; finish or abandon that first")
        blocks = min(self.kv_ranges[layer].num_blocks for layer in range(first_layer, end_layer))
        if blocks < self.num_blocks:
            raise InvalidStage(
                f"the new stage would have {blocks} KV blocks, the current stage has "
                f"{self.num_blocks}; shrink its KV (shrink_kv) and map the KV of the layers to "
                "restore (map_kv_of)"
            )
        return names

    def _switch(self, first_layer: int, end_layer: int) -> None:
        self._layers = range(first_layer, end_layer)
        # KV mapped for layers outside the new stage becomes departed KV (`release_departed`).
        self._arriving.clear()
        self._kv_chunks_max = None

    def _adopt(self, prepared: _PreparedDrop) -> int:
        """Switch to the prepared stage; returns the number of chunks added to KV."""
        self._prepared = None
        self.arena.adopt([slab.reserved for slab in prepared.leaving])
        for slab in prepared.leaving:
            slab.note_retired()
        for kv_range, chunks in prepared.growth:
            kv_range.extend(chunks)
        self._switch(prepared.layers.start, prepared.layers.stop)
        return sum(chunks for _, chunks in prepared.growth)

    def _grow(self, *, cold: bool = True) -> tuple[int, int]:
        """Extend the stage's KV ranges by the free chunks; returns (chunks, mapping calls)."""
        ranges = [self.kv_ranges[layer] for layer in self._layers]
        return grow_tails(self.arena, ranges, self._kv_chunks_max, cold=cold)

    def _slab_chunks(self) -> int:
        """Number of chunks that slabs occupy."""
        present = [slab for slab in self.slabs.values() if slab.state is not SlabState.ABSENT]
        return sum(slab.chunks for slab in present)
