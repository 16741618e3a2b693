"""Which host copies the sequences of a planner use, so that needed ones are not evicted."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from services.core.host.host_cache import HostCache
from services.core.planner.sequence import Sequence


@dataclass(slots=True)
class HostUse:
    """Keeps the copies that preempted sequences need, and marks copies as used.

    The blocks of a prefix are marked from its end on, so that its end is evicted first: a copy is
    useless without those of the blocks before it.
    """

    cache: HostCache
    late: set[str] = field(default_factory=set)  # recall failed or timed out: not repeated
    _owed: dict[str, list[bytes]] = field(default_factory=dict)  # by sequence id
    _lost: int = 0  # `cache.lost_total` at the last `note_lost`

    def note_started(self, sequence: Sequence) -> None:
        """A sequence has started with its cached blocks."""
        self.note_left(sequence)
        self.late.discard(sequence.seq_id)
        self._touch(sequence)

    def note_freed(self, sequence: Sequence) -> None:
        """A sequence is about to lose its blocks."""
        self._touch(sequence)
        sequence.saved = 0

    def note_preempted(self, sequence: Sequence, registered: int) -> None:
        """A sequence waits again, without its first `registered` blocks: owe it their copies."""
        if registered and not sequence.request.logprobs.runs_prompt:
            owed = sequence.block_hashes[registered - 1 :: -1]
            self.cache.owe(owed)
            self._owed[sequence.seq_id] = owed

    def note_left(self, sequence: Sequence) -> None:
        """A sequence no longer needs copies of the blocks that it lost."""
        owed = self._owed.pop(sequence.seq_id, None)
        if owed is not None:
            self.cache.settle(owed)

    def note_lost(self, running: Iterable[Sequence]) -> None:
        """Let running sequences whose copies are gone be saved again; call before a preemption.

        At each loss it would be too often: in a small store, the sequences would evict the copies
        of each other all the time.
        """
        if self._lost == self.cache.lost_total:
            return
        self._lost = self.cache.lost_total
        for sequence in running:
            if sequence.saved:
                sequence.saved = min(sequence.saved, self._copied(sequence))

    def has_copies(self, sequence: Sequence) -> bool:
        """Whether a running sequence `is_saved` and no copy of its blocks is gone."""
        return sequence.is_saved and self._copied(sequence) == sequence.registered

    def is_owed(self, sequence: Sequence) -> bool:
        """Whether copies are kept for a waiting sequence."""
        return sequence.seq_id in self._owed

    def check_invariants(self, waiting: Iterable[Sequence]) -> None:
        """Copies are owed to waiting sequences only."""
        assert self._owed.keys() <= {sequence.seq_id for sequence in waiting}
        self.cache.check_invariants()

    def _copied(self, sequence: Sequence) -> int:
        """Number of its first cached blocks that have copies, complete or being filled."""
        hashes = sequence.block_hashes[: sequence.registered]
        missing = (place for place, key in enumerate(hashes) if key not in self.cache)
        return next(missing, len(hashes))

    def _touch(self, sequence: Sequence) -> None:
        if sequence.registered:
            self.cache.touch(sequence.block_hashes[sequence.registered - 1 :: -1])
