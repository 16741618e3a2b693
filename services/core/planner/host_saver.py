"""Chooses which KV blocks of a planner are saved to host memory next, see `host_tier.py`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from services.core.host.host_cache import HostCache, Lost
from services.core.host.saving import WINDOW_S, Pressure, SaveRate
from services.core.host.vocabulary import HostSettings, Save, SavedBlock
from services.core.planner.host_use import HostUse
from services.core.planner.sequence import Sequence
from services.core.planner.sequence_table import SequenceTable
from services.core.prefix.cached_blocks import CachedBlocks

JOB_BLOCKS = 32
"""Maximum number of blocks of a save."""
LANE_AHEAD_S = 0.05
"""A save begins only if earlier jobs keep the lane busy for less than this many seconds, so that
recalls wait little."""
IDLE_MAX_S = 0.5
"""Maximum seconds between two looks of an idle worker that has blocks to save."""
ONLINE_FROM = 0.5
"""Pressure (`SaveRate.ramp`, 0 to 1) from which `save: all` saves blocks of online sequences."""


@dataclass(slots=True)
class SaveJob:
    """Hashes of the blocks to copy, in this order.

    The first `idle` blocks are those that only the prefix cache holds, least recently used first;
    the others are of the running sequences `seq_ids`.
    """

    hashes: tuple[bytes, ...]
    idle: int
    seq_ids: frozenset[str]
    cancelled: bool = False


@dataclass(slots=True)
class HostSaver:
    """Chooses blocks in the order in which the device would lose them, and reserves host slots.

    `note_lost` is called with the copies that are evicted to empty slots.
    """

    settings: HostSettings
    sequence_table: SequenceTable
    cache: HostCache
    use: HostUse
    note_lost: Callable[[list[Lost | None]], None]
    _rate: SaveRate = field(init=False)

    def __post_init__(self) -> None:
        self._rate = SaveRate(self.settings)
        if self.settings.save is not Save.OFF:
            self._device.copies = self.cache

    @property
    def waits(self) -> bool:
        """Whether blocks may wait to be saved under the present pressure."""
        table, save = self.sequence_table, self.settings.save
        if save is Save.OFF:
            return False
        running = table.batch if save is Save.BATCH else table.running
        return bool(self._device.unsaved or (running and self._rate.ramp(self._used) > 0))

    @property
    def idle_s(self) -> float:
        """Seconds between looks of an idle worker: few looks, but no budget of saves is lost."""
        block_s = self._rate.trickle_block_s
        return min(IDLE_MAX_S, max(block_s, min(JOB_BLOCKS * block_s, WINDOW_S / 2)))

    def advance(self, now_s: float) -> None:
        """Add the budget of the time since the last call."""
        table = self.sequence_table
        pressure = Pressure(
            self._used,
            table.table.pool.empty_count,
            table.blocks_taken_total,
            table.online_blocks_taken_total,
            bool(self._device.unsaved),
        )
        self._rate.advance(now_s, pressure)

    def take(self, lane_s: float) -> tuple[SaveJob, tuple[SavedBlock, ...]] | None:
        """The next save, None if none is due; the lane to the host is busy for `lane_s` seconds."""
        if self.settings.save is Save.OFF or lane_s >= LANE_AHEAD_S:
            return None
        block_s = self.settings.block_bytes / self.settings.link_bytes_per_s
        ahead = int((LANE_AHEAD_S - lane_s) / block_s) + 1
        most = min(JOB_BLOCKS, self._rate.blocks, ahead)
        blocks: list[SavedBlock] = []
        self._add_cached(blocks, most)
        idle, seq_ids = len(blocks), set[str]()
        for sequence in self._running() if len(blocks) < most else ():
            before = len(blocks)
            self._add_sequence(sequence, blocks, most)
            if len(blocks) > before:
                seq_ids.add(sequence.seq_id)
            if len(blocks) >= most:
                break
        if not blocks:
            return None
        self._rate.spend(len(blocks))
        hashes = tuple(block.block_hash for block in blocks)
        return SaveJob(hashes, idle, frozenset(seq_ids)), tuple(blocks)

    def _add_cached(self, blocks: list[SavedBlock], most: int) -> None:
        """Add idle cached blocks, least recently used first."""
        device = self._device
        while len(blocks) < most and device.unsaved:
            block = next(iter(device.unsaved))
            block_hash = device.hash_of(block)
            if block_hash not in self.cache:
                if not self._has_slot():
                    return
                slot = self.cache.reserve(block_hash, device.is_reported(block))
                blocks.append(SavedBlock(block_hash, slot))
            del device.unsaved[block]

    def _running(self) -> Iterator[Sequence]:
        """Running sequences in the order in which they are preempted."""
        table = self.sequence_table
        pressure = self._rate.ramp(self._used)
        suspended = () if table.suspended is None else table.suspended.sequences()
        if pressure > 0:
            yield from (seq for seq in chain(suspended, reversed(table.running)) if not seq.online)
        if pressure >= ONLINE_FROM and self.settings.save is Save.ALL:
            yield from (seq for seq in reversed(table.running) if seq.online)

    def _add_sequence(self, sequence: Sequence, blocks: list[SavedBlock], most: int) -> None:
        """Add the cached blocks of a running sequence, from its first on."""
        device = self._device
        while sequence.saved < sequence.registered and len(blocks) < most:
            block_hash = sequence.block_hashes[sequence.saved]
            block = device.block_of(block_hash)
            if block_hash not in self.cache and block is not None:
                if not self._has_slot(sequence):
                    return
                slot = self.cache.reserve(block_hash, device.is_reported(block))
                blocks.append(SavedBlock(block_hash, slot))
            sequence.saved += 1

    def _has_slot(self, sequence: Sequence | None = None) -> bool:
        """Empty a slot if all are full; returns whether a slot is empty.

        For a running `sequence`, copies of a preempted sequence may be evicted, too.
        """
        cache, use = self.cache, self.use
        if not (cache.empty or cache.evictable) and sequence is not None:
            waiting = (seq for seq in reversed(self.sequence_table.waiting) if use.is_owed(seq))
            last = next(waiting, None)
            # Give up the copies of the sequence that will run last, unless `sequence` itself would
            # run after it once preempted.
            if last is not None and (last.online, last.age) > (sequence.online, sequence.age):
                use.note_left(last)
        if not cache.empty:
            self.note_lost([cache.evict()])
        return cache.empty > 0

    @property
    def _device(self) -> CachedBlocks:
        return self.sequence_table.table.pool.cache

    @property
    def _used(self) -> float:
        pool = self.sequence_table.table.pool
        return pool.taken_count / max(1, pool.usable)
