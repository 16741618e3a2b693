"""Refusals of requests by a worker."""

from services.core.planner.config import IterationConfig
from services.core.planner.events import RefuseRequest
from services.core.planner.sequence import Sequence


def duplicate_id(request_id: str) -> RefuseRequest:
    """A request with this id exists already."""
    return RefuseRequest(request_id, "a request with this id is running already")


def queue_full(request_id: str) -> RefuseRequest:
    """The waiting queue is full."""
    return RefuseRequest(request_id, "the worker's queue is full; retry later", retryable=True)


def returned(request_id: str) -> RefuseRequest:
    """The request could not start here and is requeued by the scheduler."""
    message = "the worker had no capacity for this request; retry under the same id"
    return RefuseRequest(request_id, message, retryable=True, returned=True)


def returned_after_loss(request_id: str) -> RefuseRequest:
    """The request lost its KV here, and another worker shall resume it."""
    message = "the worker's group lost a member; resume the request on another worker"
    return RefuseRequest(request_id, message, retryable=True, returned=True, kv_lost=True)


def too_large(sequence: Sequence, config: IterationConfig) -> RefuseRequest | None:
    """Refusal of a sequence that exceeds the worker's capacity; None if it fits."""
    capacity = config.num_blocks * config.block_size
    if sequence.tokens_max <= capacity:
        return None
    message = (
        f"prompt and max_tokens make {sequence.tokens_max} tokens, but this worker holds "
        f"{capacity}; shorten them or give the worker more memory"
    )
    return RefuseRequest(sequence.seq_id, message)
