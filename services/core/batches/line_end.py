"""What follows a response to a line: the line ends with it, or runs again."""

from dataclasses import dataclass

ATTEMPTS_MAX = 5
"""Starts of a line that may fail by its own fault or its worker's."""
UNAVAILABLE_S = 5.0
"""Least delay of a line that no worker can serve."""
RETRY_S = 1.0
"""Delay if the refusal names none."""
NO_MODEL_S = 10.0
"""Delay of a line whose model is not served any more."""
UNAVAILABLE, WORKER_LOST = "unavailable", "worker_lost"
KILLERS = ("engine_killed", "server_lost")
"""Codes of a request under which several engines or upstream servers were lost."""
NO_MODEL, RATE_LIMITED = "model_not_found", "rate_limit_exceeded"


@dataclass(frozen=True, slots=True)
class RunAgain:
    """The line becomes pending for `delay_s`; `failure`: this start counts as an attempt."""

    delay_s: float
    failure: bool


def after_response(
    status: int, code: str | None, retry_after_s: float | None, attempts: int
) -> RunAgain | None:
    """Decide by the HTTP status and the error code of a response; None: the line ends with it.

    `attempts`: earlier starts that counted. A refusal by overload or a shutdown (429, 503), and the
    end of the deadline in a queue (504), are not the line's fault, so they never count. A line that
    killed several engines or servers ends at once, as does a line with a prompt beyond its owner's
    quota of a minute. A model that is not served was served at the validation, so its lines wait
    until the window ends.
    """
    if code == NO_MODEL:
        return RunAgain(NO_MODEL_S, failure=False)
    too_long = code == RATE_LIMITED and retry_after_s is None
    if code in KILLERS or too_long or (status < 500 and status != 429):
        return None
    delay_s = RETRY_S if retry_after_s is None else retry_after_s
    if status == 504:
        return RunAgain(delay_s, failure=False)
    if status in (429, 503) and code != WORKER_LOST:
        least_s = UNAVAILABLE_S if code == UNAVAILABLE else 0.0
        return RunAgain(max(delay_s, least_s), failure=False)
    if attempts + 1 >= ATTEMPTS_MAX:
        return None
    return RunAgain(delay_s, failure=True)
