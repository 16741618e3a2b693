"""Decides whether a request that failed at a worker is retried, and builds the retry. No I/O.

A retry sends a further `Ask` to the scheduler, which assigns a worker. Output that has arrived is
kept: the next worker resumes after it. A start is an attempt to run the request at a worker.
"""

from dataclasses import dataclass, replace

from services.core.ask import Ask, Assignment, FailedAssignment
from services.core.request import SERVER_LOSSES_MAX, Request
from services.gateway.cluster.token_stream import KvLost, Returned, StaleEpoch, WorkerLeaving
from services.gateway.records.request_record import WorkerSegment
from services.gateway.vocabulary.errors import (
    EngineFailed,
    EngineKilled,
    QueueFull,
    ServerLost,
    ServiceUnavailable,
    WorkerLost,
)

# Starts in a row without a new token, after which a request fails. Worker groups change rarely, so
# more starts indicate a fault.
FRUITLESS_MAX = 10
# Lost or full workers in a row without a new token, after which a request fails.
LOST_MAX = 3
# Engine crashes after which a request fails, since it may cause them; the last attempt runs alone
# in its group. A lost worker counts as a part of a crash, as perhaps only its network failed.
DIED_MAX = 3
LOST_SHARE = 0.25
# Output tokens without a failure after which earlier crashes no longer count.
DEATHS_FORGOTTEN_AFTER = 1000

Failure = StaleEpoch | Returned | WorkerLost | QueueFull


@dataclass(slots=True)
class RetryState:
    """Failed starts of a request; `resumes`: retry after the first token too, not only before."""

    resumes: bool
    _output: int = 0
    _fruitless: int = 0  # starts in a row without a new token
    _lost: int = 0  # of these, the starts that ended with a lost or full worker
    _engine_deaths: float = 0.0  # recent deaths of engines that ran the request
    _died_at_token: int = 0  # output tokens at the last death
    _lost_worker: bool = False  # a worker has failed, or lost the request's KV
    _server_losses: int = 0  # recent losses of upstream servers under the request

    @property
    def alone(self) -> bool:
        """Whether the request must run alone in its group, because it may crash engines."""
        if self._server_losses >= SERVER_LOSSES_MAX - 1:
            return True
        return self._engine_deaths >= DIED_MAX - 1

    def fail(self, failure: Failure, output: int, tokens_max: int, server_losses: int = 0) -> None:
        """Record a failed start after `output` of at most `tokens_max` tokens.

        Returns normally if the request may be retried. `server_losses`: recent losses of upstream
        servers under the request.

        Raises:
            GatewayError: if the request has failed for good.
        """
        if output > self._output:
            self._output, self._fruitless, self._lost = output, 0, 0
        else:
            self._fruitless += 1
            self._lost += isinstance(failure, (WorkerLost, QueueFull))
        self._lost_worker = self._lost_worker or _is_loss(failure)
        if isinstance(failure, WorkerLost):
            self._note_loss(failure.engine_died, output)
        if self._engine_deaths >= DIED_MAX:
            raise EngineKilled(
                "several engines crashed while running this request, which may be the cause; do not"
                " retry it, and report its id to the operator"
            )
        self._server_losses = server_losses
        if server_losses >= SERVER_LOSSES_MAX:
            raise ServerLost(
                f"the server behind the worker was lost {server_losses} times while running this"
                " request, which may be the cause; do not retry it, and report its id to the"
                " operator"
            )
        if not output:
            # No output was sent, so the request may restart even if it cannot be resumed.
            self._check_no_output(failure)
        elif not self.resumes or output >= tokens_max or self._lost >= LOST_MAX:
            raise _resume_error(failure)
        if self._fruitless >= FRUITLESS_MAX:
            raise ServiceUnavailable("the worker groups keep changing; retry shortly")

    def _note_loss(self, engine_died: bool, output: int) -> None:
        # The request has run for long since the earlier deaths, so it hardly caused them.
        if output - self._died_at_token >= DEATHS_FORGOTTEN_AFTER:
            self._engine_deaths = 0.0
        self._died_at_token = output
        self._engine_deaths += 1.0 if engine_died else LOST_SHARE

    def _check_no_output(self, failure: Failure) -> None:
        # A full worker means overload: report it to the client. A request that has lost a worker
        # was admitted before, so it may try further workers.
        full = isinstance(failure, QueueFull) and not self._lost_worker
        if full or self._lost >= LOST_MAX:
            raise failure


def _is_loss(failure: Failure) -> bool:
    """Whether the worker that ran the request has failed, shuts down or has lost its KV."""
    if isinstance(failure, KvLost | WorkerLeaving):
        return True
    return isinstance(failure, WorkerLost) and failure.reached


def _resume_error(failure: Failure) -> Exception:
    """The error for a request that has output and cannot be resumed."""
    match failure:
        case StaleEpoch():
            return EngineFailed("the worker's group changed while the request ran; retry")
        case Returned():
            return EngineFailed("the worker dropped the request after its first token; retry")
        case _:
            return failure


def retry_ask(
    ask: Ask,
    request: Request,
    output: int,
    failed: Assignment | WorkerSegment,
    failure: Failure,
    age_s: float,
    alone: bool = False,
) -> Ask:
    """The Ask that retries a request whose start at `failed` failed after `output` tokens.

    The request id stays, and with it the request's position in the queue. `age_s`: the request's
    age. After the loss of a worker, the age so far does not count towards the queueing deadline.
    """
    returned = isinstance(failure, Returned)
    return replace(
        resumed_ask(ask, request, output),
        failed=FailedAssignment(failed.group_id, failed.epoch, returned),
        excused_s=age_s if _is_loss(failure) else ask.excused_s,
        alone=alone,
    )


def resumed_ask(ask: Ask, request: Request, output: int) -> Ask:
    """The Ask that resumes a request after `output` tokens."""
    return replace(
        ask,
        prompt_tokens=len(request.prompt_ids) + output,
        max_tokens=request.limits.max_tokens - output,
        resumed=output > 0,
    )


def resumed(request: Request, token_ids: tuple[int, ...], server_losses: int = 0) -> Request:
    """The request that resumes on another worker after the output `token_ids`.

    `server_losses`: recent losses of upstream servers under the request.
    """
    if server_losses:
        request = replace(request, server_losses=server_losses)
    if not token_ids:
        return request
    # The prompt's log probabilities arrived with the first output token: do not compute them again.
    logprobs = replace(request.logprobs, prompt=None)
    return replace(request, output_ids=token_ids, logprobs=logprobs)
