"""Automatic prefix caching: sequences that begin alike share full blocks.

A block gets its name when the iteration that filled it has finished. A sequence that starts, or
starts again after a preemption, takes the blocks of its longest known prefix and runs from there
on. Its last token runs in any case, since the next one is sampled from it. Shared blocks are full,
so nobody writes to them.

In a larger group the leader decides for all stages: which blocks get names, which names are
forgotten, and which a sequence begins with. Every stage follows in the order of microbatches
(`PrefixNews`), so that each has the KV of the same prefixes, in blocks of its own. A leader counts
blocks at other stages once for each request, and cached ones beside them, so they have room for
what it plans however they share. Nothing is named or looked for while KV moves between stages or a
stage has announced fewer blocks: then it forgets what was in those by itself. All names are
forgotten when layers change hands.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from services.core.planner.block_ledger import BlockLedger
from services.core.planner.block_table import StageTable
from services.core.planner.sequence import Sequence
from services.core.prefix.block_hash import THIN_STRIDE, block_hashes, prompt_root
from services.core.prefix.cached_blocks import CachedBlocks
from services.core.prefix.news import NamedBlock, PendingPrefixUpdate, PrefixNews, SharedPrefix


@dataclass(slots=True)
class PrefixCache:
    """Prefixes whose KV is in blocks of `table`, which is that of the leader's own stage.

    `queries_total` counts the prompt tokens of requests that have started since the beginning,
    `hits_total` those whose KV was there. Not counted are requests that start again after a
    preemption, and those that must run their whole prompt. `shrinking` are the stages ≥ 1 that have
    announced fewer blocks.
    """

    block_size: int
    table: StageTable
    ledger: BlockLedger
    enabled: bool = False
    queries_total: int = 0
    hits_total: int = 0
    shrinking: set[int] = field(default_factory=set)
    _draft: PendingPrefixUpdate = field(default_factory=PendingPrefixUpdate)

    @property
    def on(self) -> bool:
        """Whether prefixes are looked for and named now."""
        return self.enabled and not (self.ledger.capacity and self._blocks_move)

    @property
    def _blocks_move(self) -> bool:
        """Whether KV moves between stages, or a stage empties blocks that it will not have."""
        pool = self.table.pool
        return any(self.ledger.reserved) or bool(self.shrinking) or pool.usable < pool.num_blocks

    @property
    def _single(self) -> bool:
        return self.ledger.stages == 1

    @property
    def _cache(self) -> CachedBlocks:
        return self.table.pool.cache

    def configure(self) -> None:
        """Other stages follow: they have forgotten all names by themselves."""
        self._draft = PendingPrefixUpdate()
        self.shrinking.clear()

    def find(self, sequence: Sequence) -> tuple[int, ...]:
        """The blocks with the KV of the first tokens of a sequence, of all but the last at most.

        Empty if log probabilities of its prompt were asked for: they come from running it.
        """
        if not self._looks_up(sequence):
            return ()
        blocks = self._blocks_max(sequence)
        return tuple(self._cache.find(islice(self._hashes(sequence, blocks), blocks)))

    def shares_blocks(self, sequence: Sequence, blocks: int) -> bool:
        """Whether a sequence can begin with so many blocks that others use now.

        It is asked in every iteration while the sequence waits: a look at two blocks answers "no",
        except when one of them has come into use since the last time. Only "yes" takes longer.
        """
        if not (self._single and self._looks_up(sequence)) or blocks > self._blocks_max(sequence):
            return False
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
        """A waiting sequence starts: it has the blocks of its known prefix, and runs from there."""
        if not self.enabled:
            return
        found = self.find(sequence)
        self.table.share(sequence.request_id, found)
        sequence.computed = len(found) * self.block_size
        sequence.registered = len(found)
        sequence.hit_blocks = 0 if self._single else len(found)
        sequence.hits_sent = False
        if self._looks_up(sequence) and not sequence.begun:
            sequence.cached_tokens = sequence.computed
            self.queries_total += len(sequence.token_ids)
            self.hits_total += sequence.computed

    def make_room(self, blocks: int, have: int = 0) -> None:
        """Forget prefixes until every stage has so many empty blocks; here `have` fewer suffice.

        A group of one does so by itself when it takes blocks.
        """
        if self._single:
            return
        pool, cache, ledger = self.table.pool, self._cache, self.ledger
        others = min([ledger.room(stage) for stage in range(1, ledger.stages)])
        while cache.idle_count and (
            pool.empty_count < blocks - have or others - cache.idle_count < blocks
        ):
            self._draft.evicted.add(pool.evict())

    def publish(self, sequences: Iterable[Sequence]) -> None:
        """Name the full blocks of sequences in a microbatch that has finished.

        Later chunks may be in flight. No stage runs a microbatch that is planned from now on before
        them, so their blocks get names, too.
        """
        if not self.on:
            return
        block_size = self.block_size
        for sequence in sequences:
            blocks = sequence.computed // block_size
            if blocks > sequence.registered and sequence.blocks:
                self._name(sequence, blocks)

    def drop(self, sequences: Iterable[Sequence]) -> None:
        """Forget all prefixes, at every stage; these are all sequences."""
        self.table.pool.drop_cache()
        self._draft = PendingPrefixUpdate(forget=not self._single)
        for sequence in sequences:
            sequence.registered = 0

    def resend_hits(self, sequences: Iterable[Sequence]) -> None:
        """Microbatches were discarded: the stages may have to learn again with what these begin."""
        for sequence in sequences:
            if sequence.computed <= sequence.hit_blocks * self.block_size:
                sequence.hits_sent = False

    def take_update(self, sequences: Iterable[Sequence]) -> PrefixNews | None:
        """What the stages have to know before they run a microbatch of these sequences."""
        for sequence in sequences:
            if sequence.has_unsent_hits:
                hashes = tuple(sequence.block_hashes[: sequence.hit_blocks])
                self._draft.shared.append(SharedPrefix(sequence.request_id, hashes))
                sequence.hits_sent = True
        return self._draft.take()

    def _looks_up(self, sequence: Sequence) -> bool:
        """Whether a sequence that starts looks for its prefix."""
        return self.on and not sequence.request.logprobs.runs_prompt

    def _blocks_max(self, sequence: Sequence) -> int:
        """Blocks that a sequence can begin with at most: its last token runs."""
        return (len(sequence.token_ids) - 1) // self.block_size

    def _name(self, sequence: Sequence, blocks: int) -> None:
        hashes, table = self._hashes(sequence, blocks), self.table
        ids = table.block_ids(sequence.request_id)
        for place in range(sequence.registered, blocks):
            reported = (place + 1) % THIN_STRIDE == 0
            if self._single:
                self._cache.name(ids[place], hashes[place], reported)
            else:
                self._name_everywhere(
                    sequence.request_id, place, ids[place], hashes[place], reported
                )
        sequence.registered = blocks

    def _name_everywhere(
        self, request_id: str, place: int, block: int, block_hash: bytes, reported: bool
    ) -> None:
        """Name a block at every stage, unless requests share it here and perhaps not elsewhere."""
        if self.table.pool.users[block] > 1 or block_hash in self._draft.evicted:
            return
        if self._cache.name(block, block_hash, reported):
            self._draft.named.append(NamedBlock(request_id, place, block_hash))

    def _hashes(self, sequence: Sequence, blocks: int) -> list[bytes]:
        """The hashes of at least the first `blocks` blocks of a sequence."""
        hashes, size = sequence.block_hashes, self.block_size
        have = len(hashes)
        if have < blocks:
            parent = hashes[-1] if have else prompt_root(sequence.request.cache_salt)
            hashes += block_hashes(parent, sequence.token_ids[have * size : blocks * size], size)
        return hashes
