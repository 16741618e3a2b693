"""What a stage needs to know of a microbatch."""

from services.core.planner.batch import Microbatch


def block_counts(microbatch: Microbatch) -> list[tuple[str, int]]:
    """Each request that runs, with the blocks that its table must cover."""
    return [(chunk.seq_id, len(chunk.block_ids)) for chunk in microbatch.batch.chunks]
