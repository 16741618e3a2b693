"""Counts what a planner's iterations have computed, by class: new tokens, and tokens run again."""

from collections.abc import Iterable
from dataclasses import dataclass

from services.core.planner.plan import Prefill
from services.core.planner.sequence import Sequence
from services.core.report import ClassTokens


@dataclass(slots=True)
class TokenMeter:
    """Tokens of the microbatches whose results came; those of discarded ones do not count.

    A token of a prompt is processed when it has run for the first time, an output token when it has
    been sampled. A token whose KV was lost and that ran again is recomputed. Tokens that were found
    in the prefix cache are neither. Outputs of live sequences are read from their lengths when
    asked, so that a decode step costs nothing: each enters with its length taken off, and leaves
    with its length added.
    """

    online_processed: int = 0
    online_recomputed: int = 0
    batch_processed: int = 0
    batch_recomputed: int = 0

    def note_prefills(self, prefills: Iterable[Prefill]) -> None:
        """These chunks have run; to be called before their samples are appended."""
        for sequence, start, tokens, _ in prefills:
            end, known = start + tokens, max(start, sequence.computed_before)
            again = min(end, known) - start
            first = max(0, min(end, sequence.prompt_tokens) - known)
            if end > sequence.reached:
                sequence.reached = end
            self._add(sequence, first, again)

    def note_first_output(self, sequence: Sequence) -> None:
        """Its whole prompt has run: the last token of it perhaps as a decode, as no chunk."""
        if sequence.reached < sequence.prompt_tokens:
            self._add(sequence, sequence.prompt_tokens - sequence.reached, 0)
            sequence.reached = sequence.prompt_tokens

    def note_entered(self, sequence: Sequence) -> None:
        """It is live from now on; the tokens that it comes with are not of this leader."""
        self._add(sequence, -len(sequence.token_ids), 0)

    def note_left(self, sequence: Sequence) -> None:
        """It is no longer among the live ones: its outputs from here are added for good."""
        self._add(sequence, len(sequence.token_ids), 0)

    def counts(self, live: Iterable[Sequence], batch: Iterable[Sequence]) -> ClassTokens:
        """All so far, with the outputs of all that are `live`; `batch` are those of that class."""
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
