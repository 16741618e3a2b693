"""Errors of files and batches."""

from services.common.errors import ServiceError
from services.gateway.vocabulary.errors import BadRequest, ServiceUnavailable

RETRY_S = 5.0


class BatchStoreDown(ServiceUnavailable):
    """The database or the object storage of batches does not answer, or its disk is full."""

    code = "batch_store_unavailable"

    def __init__(self, message: str) -> None:
        super().__init__(message, retry_after_s=RETRY_S)


class NoSuchEntry(BadRequest):
    """The owner has no such file or batch."""

    status = 404
    code = "not_found"


class EntryInUse(BadRequest):
    """The state of the file or batch does not permit the request."""

    status = 409
    code = "conflict"


class ResultTooLarge(BadRequest):
    """The result of a line is larger than the leader can hold."""

    code = "result_too_large"

    def __init__(self, size_bytes: int) -> None:
        super().__init__(
            f"the result has {size_bytes} bytes, too many for a batch; ask for fewer choices,"
            " tokens or log probabilities"
        )


class Fenced(ServiceError):
    """Another gateway leads: stop all lines, and lead again only with a new election."""


def no_such_file(file_id: str) -> NoSuchEntry:
    """The error for a file that does not exist, or is not the owner's."""
    return NoSuchEntry(
        f"there is no file {file_id[:128]!a}; list them with GET /v1/files", param="file_id"
    )


def no_such_batch(batch_id: str) -> NoSuchEntry:
    """The error for a batch that does not exist, or is not the owner's."""
    return NoSuchEntry(
        f"there is no batch {batch_id[:128]!a}; list them with GET /v1/batches", param="batch_id"
    )
