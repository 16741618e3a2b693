"""Why a worker does not take a request."""

from services.core.planner.config import IterationConfig
from services.core.planner.events import RefuseRequest
from services.core.planner.sequence import Sequence


def known_already(request_id: str) -> RefuseRequest:
    """A request with this id runs already."""
    return RefuseRequest(request_id, "a request with this id is running already")


def queue_full(request_id: str) -> RefuseRequest:
    """Too many requests wait."""
    return RefuseRequest(request_id, "the worker's queue is full; retry later", retryable=True)


def returned(request_id: str) -> RefuseRequest:
    """It could not begin here, and gets another place."""
    message = "the worker has had no room for it; ask for another place under the same id"
    return RefuseRequest(request_id, message, retryable=True, returned=True)


def returned_after_loss(request_id: str) -> RefuseRequest:
    """It has lost its KV here, and another worker shall go on with it."""
    message = "the worker's group has lost a member; go on with it at another place"
    return RefuseRequest(request_id, message, retryable=True, returned=True, kv_lost=True)


def too_large(sequence: Sequence, config: IterationConfig) -> RefuseRequest | None:
    """It could never run to its end; None if it can."""
    capacity = config.num_blocks * config.block_size
    if sequence.tokens_max <= capacity:
        return None
    message = (
        f"prompt and max_tokens make {sequence.tokens_max} tokens, but this worker holds "
        f"{capacity}; shorten them or give the worker more memory"
    )
    return RefuseRequest(sequence.request_id, message)
