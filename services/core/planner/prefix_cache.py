"""Automatic prefix caching of a group of one: sequences that begin alike share full blocks.

A block gets its name when the iteration that filled it has finished. A sequence that starts, or
starts again after a preemption, takes the blocks of its longest known prefix and runs from there
on. Its last token runs in any case, since the next one is sampled from it. Shared blocks are full,
so nobody writes to them.

Larger groups share nothing new. Their members forget all prefixes when layers change hands.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from services.core.planner.block_table import StageTable
from services.core.planner.sequence import Sequence
from services.core.prefix.block_hash import block_hashes, root_hash
from services.core.prefix.cached_blocks import CachedBlocks


@dataclass(slots=True)
class PrefixCache:
    """Prefixes whose KV is in blocks of `table`; `on` says whether any are looked for and named.

    `queries_total` counts the prompt tokens of requests that have started since the beginning,
    `hits_total` those whose KV was there; what starts again after a preemption is not counted.
    """

    block_size: int
    table: StageTable
    enabled: bool = False
    queries_total: int = 0
    hits_total: int = 0
    on: bool = field(init=False)

    def __post_init__(self) -> None:
        self.on = self.enabled

    @property
    def _cache(self) -> CachedBlocks:
        return self.table.pool.cache

    def configure(self, stages: int) -> None:
        """The group has so many stages from now on."""
        self.on = self.enabled and stages == 1

    def find(self, sequence: Sequence) -> tuple[int, ...]:
        """The blocks with the KV of the first tokens of a sequence, of all but the last at most.

        None if log probabilities of its prompt were asked for: they come from running it.
        """
        if not self.on or sequence.request.logprobs.prompt is not None:
            return ()
        blocks = (len(sequence.token_ids) - 1) // self.block_size
        return tuple(self._cache.find(islice(self._hashes(sequence, blocks), blocks)))

    def shared(self, sequence: Sequence) -> int:
        """Blocks that a sequence would not need, since others that run have them."""
        cache = self._cache
        return sum(not cache.is_idle(block) for block in self.find(sequence))

    def begin(self, sequence: Sequence) -> None:
        """A sequence starts: it has the blocks of its known prefix, and runs from there on."""
        found = self.find(sequence)
        self.table.share(sequence.request_id, found)
        sequence.computed = len(found) * self.block_size
        sequence.named = len(found)
        if self.on and not sequence.begun:
            sequence.cached_tokens = sequence.computed
            self.queries_total += len(sequence.token_ids)
            self.hits_total += sequence.computed

    def publish(self, sequences: Iterable[Sequence]) -> None:
        """Name the full blocks of sequences that run; what was planned of them has finished."""
        if not self.on:
            return
        for sequence in sequences:
            if sequence.blocks and sequence.computed // self.block_size > sequence.named:
                self._name(sequence, sequence.computed // self.block_size)

    def drop(self, sequences: Iterable[Sequence]) -> None:
        """Forget all prefixes: these are all sequences."""
        self.table.pool.drop_cache()
        for sequence in sequences:
            sequence.named = 0

    def _name(self, sequence: Sequence, blocks: int) -> None:
        hashes, cache = self._hashes(sequence, blocks), self._cache
        table = self.table.block_ids(sequence.request_id)
        for place in range(sequence.named, blocks):
            cache.name(table[place], hashes[place])
        sequence.named = blocks

    def _hashes(self, sequence: Sequence, blocks: int) -> list[bytes]:
        """The hashes of at least the first `blocks` blocks of a sequence."""
        hashes, size = sequence.block_hashes, self.block_size
        have = len(hashes)
        if have < blocks:
            # All KV here is of one model and one type.
            parent = hashes[-1] if have else root_hash("", "", sequence.request.cache_salt)
            hashes += block_hashes(parent, sequence.token_ids[have * size : blocks * size], size)
        return hashes
