"""Which asks are refused, and when a retry is sensible."""

import math
import zlib
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from services.core.ask import RefusalReason
from services.core.scheduler.vocabulary import Asked

RETRY_AFTER_MIN_S = 1.0
RETRY_AFTER_MAX_S = 60.0
TOKENS_MAX = 2**31 - 1
NAME_LENGTH_MAX = 256
# About what the restart of a worker takes.
AWAY_RETRY_S = 10.0

RATE_WINDOW_S = 10.0
STARTS_MIN = 20
"""Fewer dispatches tell too little about how fast a line moves."""
WAVE_MARGIN = 2
"""Requests that started together end together: up to half of a rate may be still to come."""
_JITTER = 0.25


@dataclass(frozen=True, slots=True)
class Refused:
    """A refusal without its address: the reason and one sentence of cause and remedy.

    `retry_after_s` is 0 if a retry is pointless, or if the queue says when it is sensible.
    """

    reason: RefusalReason
    message: str
    retry_after_s: float = 0.0


def check_fields(ask: Asked) -> Refused | None:
    """Refuses an ask whose fields no correct gateway sends."""
    if not 1 <= len(ask.request_id) <= NAME_LENGTH_MAX:
        cause = f"request_id must have 1 to {NAME_LENGTH_MAX} characters"
    elif not 1 <= len(ask.model) <= NAME_LENGTH_MAX:
        cause = f"model must have 1 to {NAME_LENGTH_MAX} characters"
    elif not 1 <= ask.prompt_tokens <= TOKENS_MAX:
        cause = f"prompt_tokens is {ask.prompt_tokens}, but must be at least 1"
    elif not 1 <= ask.max_tokens <= TOKENS_MAX:
        cause = f"max_tokens is {ask.max_tokens}, but must be at least 1"
    elif not (math.isfinite(ask.waited_s) and ask.waited_s >= 0):
        cause = f"waited_s is {ask.waited_s}, but must be 0 or more"
    elif ask.refused_epoch < 0:
        cause = f"refused_epoch is {ask.refused_epoch}, but must be 0 or more"
    elif (fault := ask.service.fault()) is not None:
        cause = fault
    else:
        return None
    return Refused(RefusalReason.INVALID, f"invalid request: {cause}")


def check_model(
    model: str, known_models: Collection[str], served_before: Collection[str]
) -> Refused | None:
    """Refuses a model that no group serves, unless no group serves any model yet.

    A model that was `served_before` may come back: a retry is then sensible.
    """
    if not known_models or model in known_models:
        return None
    if model in served_before:
        return Refused(
            RefusalReason.UNKNOWN_MODEL,
            "the workers that serve this model are away; send the request again shortly",
            AWAY_RETRY_S,
        )
    return Refused(
        RefusalReason.UNKNOWN_MODEL,
        f"no worker serves this model; choose one of: {', '.join(sorted(known_models))}",
    )


def check_size(prompt_tokens: int, max_tokens: int, longest: int | None) -> Refused | None:
    """Refuses more than `longest`, the most tokens that some group of the model holds.

    None says that no group is known, and refuses nothing.
    """
    if longest is None or prompt_tokens + max_tokens <= longest:
        return None
    return Refused(
        RefusalReason.TOO_LARGE,
        f"the prompt has {prompt_tokens} tokens and up to {max_tokens} more were asked for, "
        f"but the longest sequence that a worker can hold is {longest} tokens; "
        "shorten the prompt or ask for fewer tokens",
    )


def check_wait(queued: int, rate_per_s: float, left_s: float) -> Refused | None:
    """Refuses a request whose place would come too late, of a model that all merges leave short.

    `queued` requests are before it, `rate_per_s` is the line's pace, and its deadline is in
    `left_s`. A rate of 0 says nothing: all that run may be long.
    """
    if rate_per_s <= 0 or queued <= WAVE_MARGIN * rate_per_s * left_s:
        return None
    return Refused(
        RefusalReason.QUEUE_FULL,
        f"{queued} requests wait already, more than twice what all workers together start within"
        f" {left_s:g} s at their recent pace; retry later",
    )


@dataclass(slots=True)
class DispatchRate:
    """How many requests left the queue for a group lately."""

    _times_s: deque[float] = field(default_factory=lambda: deque(maxlen=1024))

    def note(self, now_s: float) -> None:
        """Count one dispatch."""
        self._times_s.append(now_s)

    def per_s(self, now_s: float) -> float:
        """Dispatches per second over the last 10 s, or over the last 1,024 if those were faster."""
        while self._times_s and self._times_s[0] < now_s - RATE_WINDOW_S:
            self._times_s.popleft()
        if len(self._times_s) == self._times_s.maxlen:
            return len(self._times_s) / max(now_s - self._times_s[0], 1e-3)
        return len(self._times_s) / RATE_WINDOW_S


@dataclass(slots=True)
class LinePace:
    """How fast a line moves while requests wait in it.

    Dispatches from before the line was last empty do not count: light load tells nothing of what
    the workers can do.
    """

    _since_s: float = math.inf
    _times_s: deque[float] = field(default_factory=lambda: deque(maxlen=1024))

    def begin(self, now_s: float) -> None:
        """Somebody comes to the empty line."""
        self._since_s = now_s
        self._times_s.clear()

    def note(self, now_s: float) -> None:
        """Count one dispatch from the line."""
        self._since_s = min(self._since_s, now_s)
        self._times_s.append(now_s)

    def per_s(self, now_s: float, window_s: float) -> float:
        """Dispatches per second over `window_s`, or over the time of the last `STARTS_MIN`.

        The longer time counts, but none from before the line was empty. 0 if there were fewer.
        """
        times_s = self._times_s
        if len(times_s) < STARTS_MIN:
            return 0.0
        first_s = min(now_s - window_s, times_s[-STARTS_MIN])
        known_s = times_s[0] if len(times_s) == times_s.maxlen else self._since_s
        first_s = max(first_s, known_s)
        return sum(one >= first_s for one in times_s) / max(now_s - first_s, 1e-3)


def retry_after_s(request_id: str, queued: int, rate_per_s: float) -> float:
    """Seconds in which `queued` requests leave at the recent rate, within [1, 60].

    Up to a quarter longer, depending on the id, so that refused clients do not return together.
    """
    if rate_per_s <= 0:
        return RETRY_AFTER_MAX_S
    jitter = 1 + _JITTER * (zlib.crc32(request_id.encode()) % 1024) / 1024
    return min(max(jitter * queued / rate_per_s, RETRY_AFTER_MIN_S), RETRY_AFTER_MAX_S)
