"""Errors that are sent to clients, with their HTTP status; all are `GatewayError`s."""

import math
import random
from typing import Any

from services.common.errors import ServiceError
from services.core.quota.limits import Limit

RETRY_JITTER = 0.25
"""Most jitter of a retry delay, as a fraction of it."""
RETRY_JITTER_MIN_S = 2.0
"""The same in seconds, as HTTP has whole seconds; at most twice the delay."""
RETRY_DELAY_MAX_S = 60.0
"""Jitter does not extend a delay beyond it: OpenAI's clients ignore a longer Retry-After."""


class GatewayError(ServiceError):
    """Base of errors that are sent to clients; the message states cause and remedy.

    `retry_after_s`: when a retry may succeed. `retry_delay_s` is sent to the client: later by a
    random time, so that refused clients do not retry together, unless the scheduler has `booked`
    the retry. Without `automatic_retry`, client libraries are asked not to retry on their own.
    """

    status = 500
    kind = "server_error"
    code: str | None = None
    automatic_retry = True

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        booked: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.code
        self.retry_after_s = retry_after_s
        self.retry_delay_s = retry_after_s
        if retry_after_s is not None and not booked:
            self.retry_delay_s = _jittered(retry_after_s)

    @property
    def retry_s(self) -> int | None:
        """`retry_delay_s` in whole seconds, at least 1: 0 would invite an immediate retry."""
        return None if self.retry_delay_s is None else max(1, math.ceil(self.retry_delay_s))

    def body(self) -> dict[str, Any]:
        """Return the error body in the form of the OpenAI API."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


def _jittered(wait_s: float) -> float:
    jitter_s = max(RETRY_JITTER * wait_s, min(RETRY_JITTER_MIN_S, 2 * wait_s))
    if wait_s <= RETRY_DELAY_MAX_S:
        jitter_s = min(jitter_s, RETRY_DELAY_MAX_S - wait_s)
    return wait_s + random.random() * jitter_s


class BadRequest(GatewayError):
    """The request is invalid."""

    status = 400
    kind = "invalid_request_error"


class ContextExceeded(BadRequest):
    """Prompt and output exceed the model's context."""

    code = "context_length_exceeded"


class NotSupported(BadRequest):
    """The request uses a parameter of the OpenAI API that is not supported yet."""

    code = "unsupported_parameter"


class Unauthorized(BadRequest):
    """The API key is missing or invalid."""

    status = 401
    code = "invalid_api_key"


class Forbidden(BadRequest):
    """The key does not permit the request, or the admin port refuses its host name or origin."""

    status = 403
    code = "forbidden"


class NoSuchRoute(BadRequest):
    """No such route."""

    status = 404
    code = "not_found"


class NoSuchModel(BadRequest):
    """No such model."""

    status = 404
    code = "model_not_found"


class MethodNotAllowed(BadRequest):
    """The route exists, but not with this method."""

    status = 405
    code = "method_not_allowed"


class BodyTimeout(BadRequest):
    """The body did not arrive in time."""

    status = 408
    code = "request_timeout"


class DuplicateRequest(BadRequest):
    """The client has recently used the same request id."""

    status = 409
    code = "duplicate_request"


class IdempotencyKeyReused(BadRequest):
    """The client has used the same Idempotency-Key with a different request."""

    status = 409
    code = "idempotency_key_reused"


class BodyTooLarge(BadRequest):
    """The body exceeds the limit."""

    status = 413
    code = "body_too_large"


class UriTooLong(BadRequest):
    """The path exceeds the limit."""

    status = 414
    code = "uri_too_long"


class UnsupportedMediaType(BadRequest):
    """The body is not plain JSON."""

    status = 415
    code = "unsupported_media_type"


class OverQuota(GatewayError):
    """The owner of the key has reached a limit per minute or of concurrent requests.

    `kind` names the limit: "requests" or "tokens" as in OpenAI's API, or "concurrent". The message
    ends with the delay that is sent to the client, if any.
    """

    status = 429
    code = "rate_limit_exceeded"

    def __init__(
        self,
        message: str,
        *,
        owner: str = "",
        limit: Limit = Limit.REQUESTS,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        if self.retry_s is not None:
            self.message = f"{message} retry in {self.retry_s} s"
            self.args = (self.message,)
        self.owner = owner
        # OpenAI's API puts the exceeded limit into the error's type.
        self.kind = str(limit)


class HeadersTooLarge(BadRequest):
    """The headers exceed the limit."""

    status = 431
    code = "headers_too_large"


class CancelledByClient(BadRequest):
    """The client cancelled the request."""

    status = 499
    code = "cancelled"


class EngineFailed(GatewayError):
    """A worker violated the protocol, or its group changed during a request that had begun."""

    code = "engine_failed"


class EngineKilled(GatewayError):
    """Several engines in a row died while they ran the request."""

    code = "engine_killed"
    automatic_retry = False


class ServerLost(GatewayError):
    """Upstream servers were lost several times in a row under the request."""

    status = 502
    code = "server_lost"
    automatic_retry = False


class ServiceUnavailable(GatewayError):
    """The request cannot be served now; the client should retry.

    `unserved`: because no worker serves the model, or none can load the adapter.
    """

    status = 503
    kind = "service_unavailable"
    code = "unavailable"
    unserved = False

    def __init__(self, message: str, *, retry_after_s: float = 1.0, booked: bool = False) -> None:
        super().__init__(message, retry_after_s=retry_after_s, booked=booked)


class QueueFull(ServiceUnavailable):
    """The queue of the scheduler or of this gateway is full."""

    code = "queue_full"


class TooLate(ServiceUnavailable):
    """The request would not get its first token in time."""

    code = "too_late"


class WorkerLost(ServiceUnavailable):
    """The worker that ran the request is gone.

    `engine_died`: its engine certainly died. `reached` False: the worker never replied on the
    connection, so it may not have received the request.
    """

    code = "worker_lost"

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float = 1.0,
        engine_died: bool = False,
        reached: bool = True,
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.engine_died = engine_died
        self.reached = reached


class ShuttingDown(ServiceUnavailable):
    """This gateway is shutting down."""

    code = "shutting_down"


class Expired(GatewayError):
    """The request exceeded its time limit in the queue or while it ran."""

    status = 504
    kind = "timeout"
    code = "expired"


class ClientDeadline(Expired):
    """The request exceeded the deadline that its client set."""

    code = "deadline_exceeded"


MODELS_NAMED = 8
"""Maximum number of models that an error names."""


def no_such_model(requested: str, *served: str) -> NoSuchModel:
    """Return the error for a request that names a model other than those `served` to the key."""
    names = [f"'{name}'" for name in served[:MODELS_NAMED]]
    if len(served) > MODELS_NAMED:
        names.append("others, see /v1/models")
    *most, last = names or ["no model that this key may use"]
    listed = f"{', '.join(most)} and {last}" if most else last
    return NoSuchModel(
        f"the model {requested[:128]!a} does not exist; this server has {listed}", param="model"
    )


def first_gateway_error(group: BaseExceptionGroup[BaseException]) -> GatewayError | None:
    """Return the first `GatewayError` of a group; None if the group has any other error."""
    # With any other error in the group, the failure is internal and not for the client.
    matched, rest = group.split(GatewayError)
    if matched is None or rest is not None:
        return None
    error: BaseException = matched
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, GatewayError)
    return error
