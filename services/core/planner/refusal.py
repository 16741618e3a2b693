"""Creates the planner's refusals; ids are sequence ids, see `sequence_ids.py`."""

from services.core.destination import Destination
from services.core.planner.config import IterationConfig
from services.core.planner.events import RefuseRequest
from services.core.planner.sequence import Sequence


def duplicate_id(request_id: str) -> RefuseRequest:
    """Refuse a request whose id exists already."""
    return RefuseRequest(request_id, "a request with this id is running already")


def queue_full(request_id: str) -> RefuseRequest:
    """Refuse a request because the waiting queue is full."""
    return RefuseRequest(request_id, "the worker's queue is full; retry later", retryable=True)


def returned(request_id: str) -> RefuseRequest:
    """Return a request that could not start here to the scheduler, which queues it again."""
    message = "the worker had no capacity for this request; retry under the same id"
    return RefuseRequest(request_id, message, retryable=True, returned=True)


def returned_after_loss(request_id: str) -> RefuseRequest:
    """Return a request that lost its KV to the scheduler, so that another worker resumes it."""
    message = "the worker's group lost a member; resume the request on another worker"
    return RefuseRequest(request_id, message, retryable=True, returned=True, kv_lost=True)


def returned_by_drain(request_id: str) -> RefuseRequest:
    """Return a request to the scheduler because this worker shuts down."""
    message = "the worker shuts down; resume the request on another worker"
    return RefuseRequest(request_id, message, retryable=True, returned=True, leaving=True)


def returned_by_outage(request_id: str) -> RefuseRequest:
    """Return a request to the scheduler because the worker's upstream server is gone."""
    message = "the server behind the worker is gone; resume the request on another worker"
    return RefuseRequest(request_id, message, retryable=True, returned=True, kv_lost=True)


def shipped(request_id: str, go_to: Destination) -> RefuseRequest:
    """Return a request to its gateway, which resumes it where its KV was shipped."""
    message = f"the request moves to {go_to.worker_id}; resume it there"
    return RefuseRequest(request_id, message, retryable=True, returned=True, go_to=go_to)


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
