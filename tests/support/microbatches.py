"""Block counts of a microbatch, as a stage needs them."""

from services.core.planner.batch import Microbatch


def block_counts(microbatch: Microbatch) -> list[tuple[str, int]]:
    """The running requests, each with the blocks that its table must cover."""
    return [(chunk.seq_id, len(chunk.block_ids)) for chunk in microbatch.batch.chunks]
