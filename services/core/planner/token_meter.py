"""Counts processed and recomputed tokens of a planner's iterations by class, for load reports."""

from collections.abc import Iterable
from dataclasses import dataclass

from services.core.planner.plan import Prefill
from services.core.planner.sequence import Sequence
from services.core.report import ClassTokens


@dataclass(slots=True)
class TokenMeter:
    """Tokens of microbatches with results; discarded microbatches do not count.

    A prompt token is processed when it has run for the first time, an output token when it has been
    sampled. A token that ran again because its KV was lost is recomputed. Prefix cache hits are
    neither. The outputs of live sequences are derived from their lengths on demand, so that a
    decode step costs nothing here: the length is subtracted when a sequence enters, and added when
    it leaves.
    """

    online_processed: int = 0
    online_recomputed: int = 0
    batch_processed: int = 0
    batch_recomputed: int = 0

    def note_prefills(self, prefills: Iterable[Prefill]) -> None:
        """Count chunks that have run; call before their samples are appended."""
        for sequence, start, tokens, _ in prefills:
            end, known = start + tokens, max(start, sequence.computed_before)
            again = min(end, known) - start
            first = max(0, min(end, sequence.prompt_tokens) - known)
            if end > sequence.reached:
                sequence.reached = end
            self._add(sequence, first, again)

    def note_first_output(self, sequence: Sequence) -> None:
        """Count the rest of a prompt that has run completely."""
        # The last prompt token may have run as a decode, which `note_prefills` does not see.
        if sequence.reached < sequence.prompt_tokens:
            self._add(sequence, sequence.prompt_tokens - sequence.reached, 0)
            sequence.reached = sequence.prompt_tokens

    def note_entered(self, sequence: Sequence) -> None:
        """Note a new live sequence; the tokens that it has already do not count here."""
        self._add(sequence, -len(sequence.token_ids), 0)

    def note_left(self, sequence: Sequence) -> None:
        """Note the end of a live sequence: add its outputs to the totals."""
        self._add(sequence, len(sequence.token_ids), 0)

    def counts(self, live: Iterable[Sequence], batch: Iterable[Sequence]) -> ClassTokens:
        """Totals including the outputs of `live` sequences, of which `batch` are of that class."""
        lengths = sum([len(sequence.token_ids) for sequence in live])
        of_batch = sum([len(sequence.token_ids) for sequence in batch])
        return ClassTokens(
            online_processed_tokens_total=self.online_processed + lengths - of_batch,
            online_recomputed_tokens_total=self.online_recomputed,
            batch_processed_tokens_total=self.batch_processed + of_batch,
            batch_recomputed_tokens_total=self.batch_recomputed,
        )

    def _add(self, sequence: Sequence, processed: int, recomputed: int) -> None:
        if sequence.request.service.online:
            self.online_processed += processed
            self.online_recomputed += recomputed
        else:
            self.batch_processed += processed
            self.batch_recomputed += recomputed
