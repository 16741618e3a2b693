"""Shapes of iterations on engines that pad, which exist for comparisons (BucketServe §II-B).

Such an engine runs the prompts of an iteration as a matrix of rows times the longest chunk, after
the longest prefix. With static batching, its decodes read as much KV as the longest sequence has;
with paged attention, each reads its own.
"""

from collections.abc import Sequence
from enum import StrEnum


class Execution(StrEnum):
    """How an engine runs the sequences of an iteration; all but `ragged` are for comparisons."""

    RAGGED = "ragged"
    PADDED = "padded"
    STATIC = "static"

    def prefixes(self, decodes: Sequence[int]) -> list[int]:
        """The prefix tokens that decodes with these prefixes read."""
        if self is not Execution.STATIC or not decodes:
            return list(decodes)
        return [max(decodes)] * len(decodes)

    def prompts(self, chunks: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """(prefix, new) tokens that prompt chunks of these sizes cost."""
        if self is Execution.RAGGED or not chunks:
            return list(chunks)
        longest = max(prefix for prefix, _ in chunks), max(new for _, new in chunks)
        return [longest] * len(chunks)

    def chunks(self, chunks: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """(prefix, new) tokens that the chunks of an iteration cost: decodes, then prompts."""
        decodes = self.prefixes([prefix for prefix, new in chunks if new == 1])
        prompts = self.prompts([chunk for chunk in chunks if chunk[1] > 1])
        return [*((prefix, 1) for prefix in decodes), *prompts]
