"""Whether a request that has failed at a worker is started once more, and with what. Pure."""

from dataclasses import dataclass, replace

from services.core.ask import Ask, Assignment, FailedAssignment
from services.core.request import Request
from services.gateway.cluster.token_stream import KvLost, Returned, StaleEpoch
from services.gateway.records.request_record import WorkerSegment
from services.gateway.vocabulary.errors import (
    EngineFailed,
    EngineKilled,
    QueueFull,
    ServiceUnavailable,
    WorkerLost,
)

# Groups change seldom: more assignments in a row that come to nothing mean that something is wrong.
FRUITLESS_MAX = 10
# Workers that a request may lose in a row without a new token.
LOST_MAX = 3
# Engines that may die with a request in them; before the last of them it runs alone. A worker that
# is lost counts as a part of one: its engine may have died, or its network.
DIED_MAX = 3
LOST_SHARE = 0.25
# After so many more tokens, deaths before them were none of the request's doing.
DEATHS_FORGOTTEN_AFTER = 1000

Failure = StaleEpoch | Returned | WorkerLost | QueueFull


@dataclass(slots=True)
class RetryState:
    """The starts of one request; `resumes`: it goes on elsewhere even after its first token."""

    resumes: bool
    _output: int = 0
    _fruitless: int = 0  # starts in a row without a new token
    _lost: int = 0  # of these, workers that were lost, or were full for a request that had run
    _engine_deaths: float = 0.0  # engines that have died with it lately
    _died_at_token: int = 0  # its output then
    _lost_worker: bool = False  # whether a worker has failed under it

    @property
    def alone(self) -> bool:
        """Whether it is to run where no other request does: it may be what engines die of."""
        return self._engine_deaths >= DIED_MAX - 1

    def fail(self, failure: Failure, output: int, tokens_max: int) -> None:
        """A start has failed when the request had `output` of at most `tokens_max` tokens.

        Returns if the request is to be started again.

        Raises:
            GatewayError: if it has failed.
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
                "engines died again and again while they ran this request, which may be the cause;"
                " do not send it again, and tell the operator its id"
            )
        if not output:
            self._check_no_output(failure)
        elif not self.resumes or output >= tokens_max or self._lost >= LOST_MAX:
            raise _resume_error(failure)
        if self._fruitless >= FRUITLESS_MAX:
            raise ServiceUnavailable(
                "the workers' groups keep changing; send the request again shortly"
            )

    def _note_loss(self, engine_died: bool, output: int) -> None:
        if output - self._died_at_token >= DEATHS_FORGOTTEN_AFTER:
            self._engine_deaths = 0.0
        self._died_at_token = output
        self._engine_deaths += 1.0 if engine_died else LOST_SHARE

    def _check_no_output(self, failure: Failure) -> None:
        full = isinstance(failure, QueueFull) and not self._lost_worker
        if full or self._lost >= LOST_MAX:
            raise failure


def _is_loss(failure: Failure) -> bool:
    """Whether a request was at a worker that has failed, or that has lost its KV."""
    return isinstance(failure, KvLost) or (isinstance(failure, WorkerLost) and failure.reached)


def _resume_error(failure: Failure) -> Exception:
    """The error of a request that had begun."""
    match failure:
        case StaleEpoch():
            return EngineFailed("the worker's group changed under the request; try again")
        case Returned():
            return EngineFailed("the worker gave up a request that had begun; try again")
        case _:
            return failure


def retry_ask(
    ask: Ask,
    request: Request,
    output: int,
    place: Assignment | WorkerSegment,
    failure: Failure,
    since_s: float,
    alone: bool = False,
) -> Ask:
    """What the scheduler is asked once a start has failed at `place`, after `output` tokens.

    Under the same id, so that the request keeps its place in the line. It came `since_s` ago; what
    of that has passed until a worker fails under it is no wait in the line, whose deadline begins
    anew.
    """
    returned = isinstance(failure, Returned)
    return replace(
        ask,
        prompt_tokens=len(request.prompt_ids) + output,
        max_tokens=request.limits.max_tokens - output,
        failed=FailedAssignment(place.group_id, place.epoch, returned),
        resumed=output > 0,
        excused_s=since_s if _is_loss(failure) else ask.excused_s,
        alone=alone,
    )


def resumed(request: Request, token_ids: tuple[int, ...]) -> Request:
    """The request as it goes on after these tokens of output, at another worker.

    Log probabilities of its prompt came with the first of them.
    """
    if not token_ids:
        return request
    logprobs = replace(request.logprobs, prompt=None)
    return replace(request, output_ids=token_ids, logprobs=logprobs)
