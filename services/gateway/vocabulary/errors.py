"""Errors of clients' requests, and their HTTP status; each is a `GatewayError`."""

from typing import Any

from services.common.errors import ServiceError
from services.core.quota.limits import Limit


class GatewayError(ServiceError):
    """Base of errors that a client sees; the message is one sentence with cause and remedy."""

    status = 500
    kind = "server_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The error body of the OpenAI API."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


class BadRequest(GatewayError):
    """The request itself is wrong."""

    status = 400
    kind = "invalid_request_error"


class ContextExceeded(BadRequest):
    """Prompt and output do not fit into the model's context."""

    code = "context_length_exceeded"


class NotSupported(BadRequest):
    """A known OpenAI parameter that is not served yet."""

    code = "unsupported_parameter"


class Unauthorized(BadRequest):
    """No API key, or a wrong one."""

    status = 401
    code = "invalid_api_key"


class Forbidden(BadRequest):
    """Not with this key, or the admin port does not take it from where it comes."""

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
    """The route exists, the method does not."""

    status = 405
    code = "method_not_allowed"


class BodyTimeout(BadRequest):
    """The body did not arrive in time."""

    status = 408
    code = "request_timeout"


class DuplicateRequest(BadRequest):
    """The client chose an id for its request that it has used a short time ago."""

    status = 409
    code = "duplicate_request"


class KeyReused(BadRequest):
    """The client sent the Idempotency-Key of another request."""

    status = 409
    code = "idempotency_key_reused"


class BodyTooLarge(BadRequest):
    """The body is over the limit."""

    status = 413
    code = "body_too_large"


class UriTooLong(BadRequest):
    """The path is over the limit."""

    status = 414
    code = "uri_too_long"


class UnsupportedMediaType(BadRequest):
    """The body is not plain JSON."""

    status = 415
    code = "unsupported_media_type"


class OverQuota(GatewayError):
    """The owner of the key has used what it may, in a minute or at once.

    `kind` says which limit it is, as in OpenAI's API: requests, tokens; or concurrent.
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
        self.owner = owner
        self.kind = str(limit)


class HeadersTooLarge(BadRequest):
    """The headers are over the limit."""

    status = 431
    code = "headers_too_large"


class CancelledByClient(BadRequest):
    """Its client cancelled the request."""

    status = 499
    code = "cancelled"


class EngineFailed(GatewayError):
    """A worker broke the protocol, or its group changed under a request that had begun."""

    code = "engine_failed"


class EngineKilled(GatewayError):
    """Engine after engine died with the request in it."""

    code = "engine_killed"


class ServiceUnavailable(GatewayError):
    """Nobody can serve the request now; a retry is sensible."""

    status = 503
    kind = "service_unavailable"
    code = "unavailable"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s=retry_after_s)


class QueueFull(ServiceUnavailable):
    """The scheduler's queue, or this gateway, is full."""

    code = "queue_full"


class WorkerLost(ServiceUnavailable):
    """The worker went away with the request; `engine_died`: its engine did, for certain.

    Unless it was `reached`, it may never have had the request.
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
    """The request waited too long in the queue, or ran too long."""

    status = 504
    kind = "timeout"
    code = "expired"


class ClientDeadline(Expired):
    """The request took longer than its client wanted to wait."""

    code = "deadline_exceeded"


def no_such_model(asked: str, served: str) -> NoSuchModel:
    """The error for a model that is not here."""
    return NoSuchModel(
        f"the model {asked[:128]!a} does not exist; '{served}' is served here", param="model"
    )


def first_gateway_error(group: BaseExceptionGroup[BaseException]) -> GatewayError | None:
    """The first client-visible error in a group, or None if it holds anything else."""
    matched, rest = group.split(GatewayError)
    if matched is None or rest is not None:
        return None
    error: BaseException = matched
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, GatewayError)
    return error
