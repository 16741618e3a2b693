"""Messages between gateway and scheduler about a place for a request to run."""

from dataclasses import dataclass
from enum import StrEnum

from services.core.prefix.block_hash import THIN_STRIDE, ThinHashes
from services.core.service import NO_PROMISE, Service

NO_PREFIX = ThinHashes(THIN_STRIDE, ())
"""A prompt of which no beginning is known."""
AVOIDED_MAX = 64
"""Most workers that an ask may avoid."""


@dataclass(frozen=True, slots=True)
class FailedAssignment:
    """An assignment by which a request has not run: its worker refused the epoch, or was lost
    before the first token, or has given the request back before it began (`returned`).
    """

    group_id: str
    epoch: int
    returned: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that needs a place to run; the same id may be asked again at any time.

    `failed` is the latest assignment if that has failed. `traceparent` is W3C's, "" if the request
    is not traced. `prefix` stands for the beginnings of the prompt that a group may have cached.
    `resumed`: the request has run, and goes on with `prompt_tokens` that hold its output so far.
    `alone`: engines have died with it, so it gets a group without other requests if it can.
    Its gateway cannot reach the workers whose addresses are `avoided`, and does not want them for
    `avoided_s` unless there are no others. `excused_s` of its wait were over when a worker failed
    under it last.
    """

    request_id: str
    model: str
    prompt_tokens: int
    max_tokens: int
    failed: FailedAssignment | None = None
    service: Service = NO_PROMISE
    traceparent: str = ""
    prefix: ThinHashes = NO_PREFIX
    resumed: bool = False
    alone: bool = False
    avoided: tuple[str, ...] = ()
    avoided_s: float = 0.0
    excused_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Assignment:
    """A group at an epoch, and the worker that leads it with its address (host:port).

    `returnable`: the worker may give the request back, for another place.
    """

    request_id: str
    group_id: str
    epoch: int
    worker_id: str
    address: str
    returnable: bool = False


class RefusalReason(StrEnum):
    """Why a request is refused."""

    INVALID = "invalid"
    TOO_LARGE = "too_large"
    QUEUE_FULL = "queue_full"
    EXPIRED = "expired"
    UNKNOWN_MODEL = "unknown_model"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A final "no".

    `retry_after_s` None: a retry is pointless. `reason` None: one that this version does not know.
    """

    request_id: str
    reason: RefusalReason | None
    message: str
    retry_after_s: float | None = None
