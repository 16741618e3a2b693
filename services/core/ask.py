"""Messages with which a gateway obtains a worker group for a request from the scheduler.

The gateway sends an `Ask`; the scheduler answers with an `Assignment` or a `Refusal`. Thin hashes
are hashes of every n-th block of a prompt, see `block_hash.py`.
"""

from dataclasses import dataclass
from enum import StrEnum

from services.core.adapter import Adapter
from services.core.destination import Destination
from services.core.prefix.block_hash import THIN_STRIDE, ThinHashes
from services.core.service import DEFAULT_SERVICE, Service

NO_PREFIX = ThinHashes(THIN_STRIDE, ())
"""Prefix hashes of a prompt without any, such as a prompt shorter than a stride of blocks."""
AVOIDED_MAX = 64
"""Maximum number of worker addresses in `Ask.avoided`."""


@dataclass(frozen=True, slots=True)
class FailedAssignment:
    """An assignment under which the request did not run to its end, so that it needs another.

    `returned`: the worker returned the request to the queue. Otherwise the worker refused it,
    could not be reached or was lost.
    """

    group_id: str
    epoch: int
    returned: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """Asks the scheduler for a worker group; a gateway may repeat an ask at any time.

    `failed` is the latest assignment if it failed. `traceparent` follows W3C Trace Context; "" if
    the request is not traced. `prefix` holds hashes of the prompt prefixes that a group may have
    cached. `resumed`: the request has run before; `prompt_tokens` then include its output so far.
    `alone`: engines crashed while they ran this request, so the scheduler prefers a group without
    other requests. The gateway cannot reach the workers at the addresses `avoided`; for `avoided_s`
    seconds the scheduler uses them only if no other worker is available. `excused_s` is the age of
    the request, in seconds, at the latest loss of its worker, 0 without a loss: the scheduler does
    not count this time towards the request's queueing deadline. `estimated`: the prompt is not
    tokenized, `prompt_tokens` is an estimate, and the answer is a `Proceed` or a `Refusal`.
    `expected_tokens` is the client's estimate of its output tokens, 0 without. `fingerprint` is a
    hash of the client's request, by which its retries are recognised, 0 if unknown; `choice` is the
    index among the choices of that request. `affinity` is a hash of the client's session, 0
    without one: its requests prefer the same group among groups that are equal otherwise.
    `adapter`: only workers that can load this adapter may run the request.
    """

    request_id: str
    model: str
    prompt_tokens: int
    max_tokens: int
    failed: FailedAssignment | None = None
    service: Service = DEFAULT_SERVICE
    traceparent: str = ""
    prefix: ThinHashes = NO_PREFIX
    resumed: bool = False
    alone: bool = False
    avoided: tuple[str, ...] = ()
    avoided_s: float = 0.0
    excused_s: float = 0.0
    estimated: bool = False
    expected_tokens: int = 0
    fingerprint: int = 0
    choice: int = 0
    affinity: int = 0
    adapter: Adapter | None = None

    def adapter_fault(self) -> str | None:
        """Why a field of the adapter is invalid; None if none is, or without an adapter."""
        return None if self.adapter is None else self.adapter.fault()


@dataclass(frozen=True, slots=True)
class Assignment:
    """The group that runs a request, its configuration (`epoch`), and its leader (host:port).

    `returnable`: the worker may return the request to the scheduler before it starts. `hand_to`:
    the worker that decodes the request after this one has computed its prompt; None: this one.
    """

    request_id: str
    group_id: str
    epoch: int
    worker_id: str
    address: str
    returnable: bool = False
    hand_to: Destination | None = None


@dataclass(frozen=True, slots=True)
class Proceed:
    """Answers an estimated ask: the gateway tokenizes the prompt and asks again."""

    request_id: str


class RefusalReason(StrEnum):
    """Reason for which the scheduler refuses a request."""

    INVALID = "invalid"
    TOO_LARGE = "too_large"
    QUEUE_FULL = "queue_full"
    EXPIRED = "expired"
    UNKNOWN_MODEL = "unknown_model"
    TOO_LATE = "too_late"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Final rejection of a request.

    `retry_after_s` is None if a retry is pointless. `reason` is None if a newer scheduler sent a
    reason that this version does not know. `booked`: `retry_after_s` is a whole number of seconds
    after which the scheduler has room for the retry. `estimated`: it answers an estimated ask.
    """

    request_id: str
    reason: RefusalReason | None
    message: str
    retry_after_s: float | None = None
    booked: bool = False
    estimated: bool = False
