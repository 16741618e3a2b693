"""Automatic prefix caching: sequences with a common prefix share full KV blocks.

In a pipeline of several workers (*stages*), only the planner of the first, the *leader*, uses it.

A block is registered under its hash when the iteration that filled it has finished. A sequence that
starts, or restarts after a preemption, takes the blocks of its longest cached prefix and runs from
there. Its last token always runs, since the next token is sampled from its logits. Shared blocks
are full, so they are never written.

In a pipeline the leader decides for all stages which blocks are registered, evicted and shared.
Stages apply these updates (`PrefixCacheUpdate`) in the order of microbatches, so all of them cache
the same prefixes, each in its own blocks. For another stage the leader counts a block once per
sequence that uses it, plus the cached blocks: never fewer than the stage really uses, so its plans
always fit. The cache is off while KV moves between stages or a stage shrinks, since the stage then
evicts the cached prefixes of the affected blocks by itself. A change of layers evicts all prefixes.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from services.core.planner.block_ledger import BlockLedger
from services.core.planner.block_table import StageTable
from services.core.planner.sequence import Sequence
from services.core.prefix.block_hash import THIN_STRIDE, block_hashes, prompt_root
from services.core.prefix.cache_update import (
    NamedBlock,
    PendingPrefixUpdate,
    PrefixCacheUpdate,
    SharedPrefix,
)
from services.core.prefix.cached_blocks import CachedBlocks


@dataclass(slots=True)
class PrefixCache:
    """Prefix cache of a leader, over the blocks of its own stage's `table`.

    The totals exclude restarts after a preemption, and requests that must run their whole prompt.
    """

    block_size: int
    table: StageTable
    ledger: BlockLedger
    enabled: bool = False  # the setting `prefix_caching`
    queries_total: int = 0  # prompt tokens of started requests
    hits_total: int = 0  # those of them that had cached KV
    shrinking: set[int] = field(default_factory=set)  # stages ≥ 1 that announced fewer blocks
    # Updates for the stages, sent with the next microbatch.
    _pending: PendingPrefixUpdate = field(default_factory=PendingPrefixUpdate)

    @property
    def on(self) -> bool:
        """Whether lookups and registrations are possible now."""
        return self.enabled and not (self.ledger.capacity and self._blocks_move)

    @property
    def _blocks_move(self) -> bool:
        """Whether KV moves between stages, or a stage is shrinking."""
        pool = self.table.pool
        return any(self.ledger.reserved) or bool(self.shrinking) or pool.usable < pool.num_blocks

    @property
    def _single(self) -> bool:
        return self.ledger.stages == 1

    @property
    def _cache(self) -> CachedBlocks:
        return self.table.pool.cache

    def configure(self) -> None:
        """Reset for new stages, which have cleared their caches by themselves."""
        self._pending = PendingPrefixUpdate()
        self.shrinking.clear()

    def find(self, sequence: Sequence) -> tuple[int, ...]:
        """Block ids of the longest cached prefix of a sequence, excluding its last token."""
        return tuple(self._cache.find(self.chain(sequence)))

    def chain(self, sequence: Sequence) -> Iterable[bytes]:
        """Hashes of the blocks that a starting sequence may share; none if it looks none up."""
        if not self._looks_up(sequence):
            return ()
        blocks = self._blocks_max(sequence)
        return islice(self._hashes(sequence, blocks), blocks)

    def shares_blocks(self, sequence: Sequence, blocks: int) -> bool:
        """Whether the first `blocks` blocks of a sequence are cached, and in use by others."""
        if not (self._single and self._looks_up(sequence)) or blocks > self._blocks_max(sequence):
            return False
        # This runs in every iteration while the sequence waits. Test first the last block, and the
        # block that was not in use last time: a negative result then takes two lookups.
        hashes, in_use = self._hashes(sequence, blocks), self._cache.in_use
        if not in_use(hashes[blocks - 1]):
            return False
        if sequence.first_unshared < blocks and not in_use(hashes[sequence.first_unshared]):
            return False
        for place in range(blocks):
            if not in_use(hashes[place]):
                sequence.first_unshared = place
                return False
        return True

    def begin(self, sequence: Sequence) -> None:
        """Start a waiting sequence with the blocks of its cached prefix."""
        if not self.enabled:
            return
        blocks = self.find(sequence)
        self.table.share(sequence.seq_id, blocks)
        sequence.computed = len(blocks) * self.block_size
        sequence.registered = len(blocks)
        sequence.hit_blocks = 0 if self._single else len(blocks)
        sequence.hits_sent = False
        if self._looks_up(sequence) and not sequence.begun:
            sequence.cached_tokens = sequence.computed
            self.queries_total += len(sequence.token_ids)
            self.hits_total += sequence.computed

    def make_room(self, blocks: int, have: int = 0) -> None:
        """Evict prefixes until each stage has `blocks` empty blocks (this stage: `have` fewer)."""
        # The pool of a single worker evicts on allocation; stages must all evict the same prefixes.
        if self._single:
            return
        pool, cache, ledger = self.table.pool, self._cache, self.ledger
        others = min([ledger.room(stage) for stage in range(1, ledger.stages)])
        while cache.idle_count and (
            pool.empty_count < blocks - have or others - cache.idle_count < blocks
        ):
            self._pending.evicted.add(pool.evict())

    def publish(self, sequences: Iterable[Sequence]) -> None:
        """Register the full blocks of sequences in a microbatch that has finished."""
        if not self.on:
            return
        # `computed` includes chunks in flight: their blocks may be registered, too, because stages
        # run them before any microbatch that is planned from now on.
        block_size = self.block_size
        for sequence in sequences:
            blocks = sequence.computed // block_size
            if blocks > sequence.registered and sequence.blocks:
                self._register(sequence, blocks)

    def clear(self, sequences: Iterable[Sequence]) -> None:
        """Clear the cache at every stage; `sequences` are all sequences."""
        self.table.pool.clear_cache()
        self._pending = PendingPrefixUpdate(forget=not self._single)
        for sequence in sequences:
            sequence.registered = 0

    def resend_hits(self, sequences: Iterable[Sequence]) -> None:
        """Send the shared prefixes of sequences again, after microbatches were discarded."""
        for sequence in sequences:
            if sequence.computed <= sequence.hit_blocks * self.block_size:
                sequence.hits_sent = False

    def take_update(self, sequences: Iterable[Sequence]) -> PrefixCacheUpdate | None:
        """Return and clear the updates for stages, including shared prefixes of these sequences."""
        for sequence in sequences:
            if sequence.has_unsent_hits:
                hashes = tuple(sequence.block_hashes[: sequence.hit_blocks])
                self._pending.shared.append(SharedPrefix(sequence.seq_id, hashes))
                sequence.hits_sent = True
        return self._pending.take()

    def _looks_up(self, sequence: Sequence) -> bool:
        """Whether a starting sequence looks up its prefix (not if its whole prompt must run)."""
        return self.on and not sequence.request.logprobs.runs_prompt

    def _blocks_max(self, sequence: Sequence) -> int:
        """Maximum number of shared blocks: the last token must run."""
        return (len(sequence.token_ids) - 1) // self.block_size

    def _register(self, sequence: Sequence, blocks: int) -> None:
        hashes, table = self._hashes(sequence, blocks), self.table
        ids = table.block_ids(sequence.seq_id)
        for place in range(sequence.registered, blocks):
            reported = (place + 1) % THIN_STRIDE == 0
            if self._single:
                self._cache.register(ids[place], hashes[place], reported)
            else:
                self._register_everywhere(
                    sequence.seq_id, place, ids[place], hashes[place], reported
                )
        sequence.registered = blocks

    def _register_everywhere(
        self, seq_id: str, place: int, block: int, block_hash: bytes, reported: bool
    ) -> None:
        """Register a block at every stage."""
        # A block shared here may be several blocks at another stage. And stages apply evictions
        # after registrations: a hash evicted in the same update would be lost there.
        if self.table.pool.users[block] > 1 or block_hash in self._pending.evicted:
            return
        if self._cache.register(block, block_hash, reported):
            self._pending.named.append(NamedBlock(seq_id, place, block_hash))

    def _hashes(self, sequence: Sequence, blocks: int) -> list[bytes]:
        """Hashes of at least the first `blocks` blocks of a sequence, computed incrementally."""
        hashes, size = sequence.block_hashes, self.block_size
        have = len(hashes)
        if have < blocks:
            parent = hashes[-1] if have else prompt_root(sequence.request.cache_salt)
            hashes += block_hashes(parent, sequence.token_ids[have * size : blocks * size], size)
        return hashes
