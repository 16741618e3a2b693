"""Host copies of a planner: which KV blocks are saved to host memory, and which are recalled.

Host memory is a second level of the prefix cache. Blocks are *saved* before the device loses them:
first those that only the prefix cache holds, in the order of their eviction, then those of running
sequences in the order of their preemption. A waiting sequence is *recalled* if the host has blocks
of its prefix that the device lacks, and copying them is faster than computing them: a pin gets the
blocks, and once they are filled the sequence starts with hits of the prefix cache.

Only single workers copy, since a copy has all layers of a block. Copies outlive changes of groups.
While `wants_a_look`, the driver passes `HostLooked` between iterations (a *look*), in which saves
and recalls begin; see `core/host/vocabulary.py`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import Any

from services.core.host.host_cache import HostCache, Lost
from services.core.host.recalling import RECALL_MIN, recall_pays
from services.core.host.vocabulary import (
    BlocksRecalled,
    BlocksSaved,
    CancelHostJob,
    HostCommand,
    HostCounts,
    HostEvent,
    HostGrown,
    HostLooked,
    HostSettings,
    RecallBlocks,
    RecalledBlock,
    SaveBlocks,
)
from services.core.planner.config import IterationConfig
from services.core.planner.harvester import GROWTH_RESERVE, RESERVING
from services.core.planner.host_saver import HostSaver, SaveJob
from services.core.planner.host_use import HostUse
from services.core.planner.sequence import Sequence
from services.core.planner.sequence_table import SequenceTable
from services.core.prefix.cached_blocks import CachedBlocks

SAVES_MAX = 4
"""Maximum number of saves under way."""
RECALLS_MAX = 4
"""Maximum number of recalls under way."""
LOOK_S = 0.01
"""Least seconds between two looks, unless the queue has changed."""
RECALL_S = 2.0
"""Least time limit of a recall, in seconds; then its sequence starts without it."""
RECALL_FACTOR = 4.0
"""Time limit of a recall over its predicted time, including the jobs before it."""
CLAIM_S = 2.0
"""Seconds for which recalled blocks stay pinned for a sequence that does not start."""
SCAN_MAX = 8
"""Number of waiting sequences that a look considers for recalls."""


@dataclass(slots=True)
class _RecallJob:
    """A recall under way.

    `chain` has the hashes of all blocks of the pin. The device has the first `have` blocks; the
    others are copied.
    """

    pin: str
    seq_id: str
    chain: tuple[bytes, ...]
    have: int
    cancelled: bool = False

    @property
    def hashes(self) -> tuple[bytes, ...]:
        """Hashes of the blocks that are copied."""
        return self.chain[self.have :]


@dataclass(slots=True)
class HostTier:
    """Saves and recalls of a planner; `cache` is the index of the copies."""

    config: IterationConfig
    settings: HostSettings
    sequence_table: SequenceTable
    cache: HostCache = field(default_factory=HostCache)
    counts: HostCounts = field(default_factory=HostCounts)
    _use: HostUse = field(init=False)
    _saver: HostSaver = field(init=False)
    _saves: dict[int, SaveJob] = field(default_factory=dict)
    _recalls: dict[int, _RecallJob] = field(default_factory=dict)
    _pins: dict[str, float] = field(default_factory=dict)  # pin → time until which it is held
    _jobs: int = 0  # number of the newest job
    _looked_s: float = 0.0
    _queue: tuple[int, int] = (0, 0)  # `_queue_now` at the last look

    def __post_init__(self) -> None:
        table = self.sequence_table
        self._use = table.host_use = HostUse(self.cache)
        self._saver = HostSaver(self.settings, table, self.cache, self._use, self._note_lost)

    # --- queries

    @property
    def active(self) -> bool:
        """Whether jobs are under way, or blocks pinned."""
        return bool(self._saves or self._recalls or self._pins)

    def wants_a_look(self, now_s: float) -> bool:
        """Whether `HostLooked` has work to do now."""
        return self.due_s <= now_s

    @property
    def due_s(self) -> float:
        """When `HostLooked` is due next; `inf` while there is nothing to save or to recall."""
        table = self.sequence_table
        if not self.cache.slots or table.ledger.stages > 1:
            return inf
        if table.waiting and self._queue_now != self._queue:
            return self._looked_s
        if self._pins or table.waiting:
            return self._looked_s + LOOK_S
        if not self._saver.waits:
            return inf
        # An idle worker looks no more often than it may save.
        return self._looked_s + (LOOK_S if table.sequences else max(LOOK_S, self._saver.idle_s))

    @property
    def _queue_now(self) -> tuple[int, int]:
        """Changes when a sequence is queued or ends, after which another may be recalled."""
        table = self.sequence_table
        return table.queued_total, len(table.sequences)

    @property
    def stalls(self) -> bool:
        """Whether nothing may be planned before the current recall ends (`prefetch` is off)."""
        return not self.settings.prefetch and bool(self._awaited)

    @property
    def _awaited(self) -> list[_RecallJob]:
        """Recalls for which a sequence waits."""
        pins = self.sequence_table.pins
        return [job for job in self._recalls.values() if pins.get(job.pin) is not None]

    def block_of(self, job: int, index: int) -> int | None:
        """Device block of the `index`-th block of a job; None if it must not be copied now.

        Valid until the planner's next event or plan, so the driver asks for each piece, under the
        planner's lock.
        """
        save = self._saves.get(job)
        if save is not None:
            # After a change of layers, a device block with this hash may lack some layers.
            return None if save.cancelled else self._device.block_of(save.hashes[index])
        recall = self._recalls.get(job)
        pin = None if recall is None else self.sequence_table.pins.get(recall.pin)
        if recall is None or pin is None:
            return None
        return self.sequence_table.table.block_ids(recall.pin)[recall.have + index]

    def check_invariants(self) -> None:
        """Jobs, pins and copies agree."""
        self.cache.check_invariants()
        assert len(self._saves) <= SAVES_MAX and len(self._recalls) <= RECALLS_MAX
        filling = sum(len(job.hashes) for job in self._saves.values())
        assert self.cache.filling == filling, "a copy is filled by no save, or by two"
        assert self.cache.held + filling + self.cache.empty == self.cache.slots
        pins, table = self.sequence_table.pins, self.sequence_table.table
        for job in self._recalls.values():
            assert all(key in self.cache for key in job.hashes), "a copy went while it was read"
            if pins.get(job.pin) is not None:
                assert job.pin in self._pins and len(table.block_ids(job.pin)) == len(job.chain)

    # --- events

    def handle(self, event: HostEvent, iteration_runs: bool) -> list[HostCommand]:
        """Apply an event. `iteration_runs`: an iteration in flight may write to freed blocks."""
        if isinstance(event, HostLooked):
            return self._look(event, iteration_runs)
        return _HANDLERS[type(event)](self, event)

    def end_configuration(self) -> list[HostCommand]:
        """Release all pins and cancel all jobs, because the layers of this worker change."""
        for name in tuple(self._pins):
            self.sequence_table.release_pin(name)
        self._pins.clear()
        for sequence in self.sequence_table.sequences.values():
            sequence.saved = 0
        cancelled = [(number, job) for number, job in self._saves.items() if not job.cancelled]
        for _, job in cancelled:
            job.cancelled = True
        return [*(CancelHostJob(number) for number, _ in cancelled), *self._cancel_unneeded()]

    def _cancel_unneeded(self) -> list[HostCommand]:
        """Cancel the recalls whose pins were released."""
        pins, commands = self.sequence_table.pins, list[HostCommand]()
        for number, job in self._recalls.items():
            if not job.cancelled and pins.get(job.pin) is None:
                job.cancelled = True
                commands.append(CancelHostJob(number))
        return commands

    def _grow(self, event: HostGrown) -> list[HostCommand]:
        if event.slots:
            self.cache.grow(event.slots)
            return []
        for name in tuple(self._pins):
            self.sequence_table.release_pin(name)
        self._saves.clear()
        self._recalls.clear()
        self._pins.clear()
        self._note_lost(self.cache.clear())
        self.counts.failures_total += 1
        return []

    def _note_saved(self, event: BlocksSaved) -> list[HostCommand]:
        job = self._saves.pop(event.job, None)
        if job is None:
            return []
        intact = list(zip(job.hashes, event.intact, strict=True))
        # Hold the last block of a prefix first, so that it is evicted first. Cached blocks are in
        # that order already, blocks of running sequences are not.
        for block_hash, whole in (*intact[: job.idle], *reversed(intact[job.idle :])):
            if whole:
                self.cache.hold(block_hash)
                self.counts.saved_blocks_total += 1
            else:
                self._note_lost([self.cache.drop(block_hash)])
        if not all(event.intact):
            for seq_id in job.seq_ids & self.sequence_table.sequences.keys():
                self.sequence_table.sequences[seq_id].saved = 0
        return []

    def _note_recalled(self, event: BlocksRecalled) -> list[HostCommand]:
        job = self._recalls.pop(event.job, None)
        if job is None:
            return []
        table, hashes = self.sequence_table, job.hashes
        if table.pins.get(job.pin) is not None:
            ends = event.intact  # of the first blocks
            intact = next((i for i, whole in enumerate(ends) if not whole), len(ends))
            damaged = [key for key, whole in zip(hashes, ends, strict=False) if not whole]
            if len(ends) < len(hashes):
                self._note_late([job.seq_id])  # another attempt would fail, too
            for block_hash in damaged:
                self.cache.drop(block_hash)
            self.counts.failures_total += len(damaged)
            self._count_recalled(job, intact)
            table.fill_pin(job.pin, job.chain[: job.have + intact])
            self._pins[job.pin] = event.now_s + CLAIM_S
        self._note_lost(self.cache.end_read(reversed(hashes)))
        return []

    def _count_recalled(self, job: _RecallJob, blocks: int) -> None:
        tokens = blocks * self.config.block_size
        self.counts.recalled_tokens_total += tokens
        sequence = self.sequence_table.sequences.get(job.seq_id)
        if sequence is not None and not sequence.begun:
            self.counts.hit_tokens_total += tokens

    def _look(self, event: HostLooked, iteration_runs: bool) -> list[HostCommand]:
        now_s, table = event.now_s, self.sequence_table
        self._looked_s = now_s
        if not self.cache.slots or table.ledger.stages > 1:
            return []
        self._unblock()
        commands = self._expire(now_s)
        lane_s = max(0.0, event.lane_free_s - now_s)  # time until the lane is free
        # The running iteration may still write to blocks that were freed since it was planned.
        if not iteration_runs:
            self._queue = self._queue_now
            for recall in self._due_recalls(now_s, lane_s):
                lane_s += self._link_s(len(recall.blocks))
                commands.append(recall)
        self._saver.advance(now_s)
        # The next look may be a long iteration away: take all saves that are due.
        while len(self._saves) < SAVES_MAX and (save := self._saver.take(lane_s)) is not None:
            self._jobs += 1
            self._saves[self._jobs], blocks = save
            lane_s += self._link_s(len(blocks))
            commands.append(SaveBlocks(self._jobs, blocks))
        return commands

    def _unblock(self) -> None:
        """Release the pins if nothing runs and the first waiting sequence needs their blocks."""
        table = self.sequence_table
        if not (self._pins and table.waiting) or table.running_count:
            return
        first = table.waiting[0]
        if not first.pin and not table.may_start(first, self.config.max_running):
            for name in self._pins:
                table.release_pin(name)

    def _expire(self, now_s: float) -> list[HostCommand]:
        """Release the pins whose time is over, and cancel the recalls that no sequence awaits."""
        table = self.sequence_table
        filling = {job.pin: job.seq_id for job in self._recalls.values()}
        for name, until_s in tuple(self._pins.items()):
            if table.pins.get(name) is None:
                del self._pins[name]
            elif until_s < now_s:
                del self._pins[name]
                table.release_pin(name)
                self._note_late([filling[name]] if name in filling else [])
        return self._cancel_unneeded()

    # --- recalls

    def _due_recalls(self, now_s: float, lane_s: float) -> Iterator[RecallBlocks]:
        """Begin recalls of waiting sequences, in queue order, after `lane_s` of earlier jobs."""
        table, prefetch = self.sequence_table, self.settings.prefetch
        if not prefetch and self._awaited:
            return
        # Blocks to leave free: those that earlier sequences need, from the first on that may not be
        # overtaken.
        ahead = 0
        for sequence in list(islice(table.waiting, SCAN_MAX if prefetch else 1)):
            if len(self._recalls) >= RECALLS_MAX:
                return
            missing = table.blocks_wanted(sequence)
            fits = not ahead or table.ledger.free >= ahead + missing
            if ahead or sequence.overtaken >= self.config.overtaken_max:
                ahead += missing
            late = sequence.seq_id in self._use.late
            if not fits or sequence.sample_due or sequence.pin or late:
                continue
            hashes = tuple(table.prefixes.chain(sequence))
            have = len(list(self._device.find(hashes)))
            slots = list(self.cache.find(hashes[have:]))
            pays = len(slots) >= RECALL_MIN and recall_pays(
                *(self.settings, self.config.cost_model, self.config.block_size),
                *(have, len(slots), lane_s),
            )
            if pays and self._may_start(sequence):
                table.make_way(sequence)
                command = self._recall(sequence, hashes[: have + len(slots)])
                ahead = max(0, ahead - have - len(slots))
                lane_s += self._link_s(len(command.blocks))
                self._pins[command.pin] = now_s + max(RECALL_S, RECALL_FACTOR * lane_s)
                yield command

    def _may_start(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence could start now."""
        table, config = self.sequence_table, self.config
        if not sequence.online and table.precedence.batch_yields:
            if table.waiting[0].online:
                return False
            # The same reserve as at admission: with a larger one, a sequence could start before its
            # recall begins.
            reserves = config.scheduling in RESERVING and table.online_running
            reserve = int(GROWTH_RESERVE * table.ledger.least_capacity) if reserves else 0
            if table.ledger.free - sequence.blocks_to_admit(config.block_size) < reserve:
                return False
        return table.may_start(sequence, config.max_running - len(self._recalls))

    def _recall(self, sequence: Sequence, hashes: tuple[bytes, ...]) -> RecallBlocks:
        self._jobs += 1
        name = f"@recall.{self._jobs}"
        have = self.sequence_table.recall(sequence, name, hashes)
        job = _RecallJob(name, sequence.seq_id, hashes, have)
        slots = list(self.cache.find(job.hashes))
        self.cache.begin_read(job.hashes)
        self._recalls[self._jobs] = job
        self.counts.recalls_total += 1
        blocks = [
            RecalledBlock(block_hash, slot, have + place)
            for place, (block_hash, slot) in enumerate(zip(job.hashes, slots, strict=True))
        ]
        return RecallBlocks(self._jobs, name, tuple(blocks))

    # --- helpers

    def _note_late(self, seq_ids: Iterable[str]) -> None:
        """Begin no more recalls of these sequences before they have started."""
        late = self._use.late
        late.update(seq_ids)
        late.intersection_update(self.sequence_table.sequences)

    @property
    def _device(self) -> CachedBlocks:
        return self.sequence_table.table.pool.cache

    def _link_s(self, blocks: int) -> float:
        return blocks * self.settings.block_bytes / self.settings.link_bytes_per_s

    def _note_lost(self, lost: Iterable[Lost | None]) -> None:
        """Report lost copies to the scheduler as evicted prefixes, unless the device has them."""
        for copy in lost:
            if copy is not None and copy.reported:
                self._device.note_absent(copy.block_hash)


_HANDLERS: dict[type[Any], Callable[[HostTier, Any], list[HostCommand]]] = {
    HostGrown: HostTier._grow,
    BlocksSaved: HostTier._note_saved,
    BlocksRecalled: HostTier._note_recalled,
}
