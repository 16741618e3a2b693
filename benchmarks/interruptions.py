"""Reads from an engine's event log what ran when: iterations, and parts of interrupted ones."""

from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.engine_log import TYPES
from services.common.event_log import EventLogError, read_entries
from services.core.audit.record import BATCH
from services.core.planner.batch import Microbatch
from services.core.planner.events import IterationDropped, IterationFinished, IterationSuspended
from services.core.planner.sequence_names import request_of
from tideserve.cli.errors import SystemUnavailable


class Part(NamedTuple):
    """An iteration, or a part of one, between its launch and its end on the monotonic clock.

    `whole`: it ran from its first layer to its last one without an interruption.
    """

    begin_s: float
    end_s: float
    request_ids: frozenset[str]
    whole: bool


def read_parts(path: Path) -> list[Part]:
    """What ran in a group of one, in order. Raises SystemUnavailable if the log is damaged."""
    parts: list[Part] = []
    running: tuple[float, Microbatch] | None = None
    try:
        for kind, value in read_entries(path, TYPES):
            if kind == BATCH:
                running = (value.now_s, value.microbatch) if value.microbatch else None
            elif running and isinstance(
                value, IterationFinished | IterationSuspended | IterationDropped
            ):
                begin_s, microbatch = running
                chunks = microbatch.batch.chunks
                names = frozenset(request_of(chunk.request_id) for chunk in chunks)
                finished = isinstance(value, IterationFinished)
                whole = finished and microbatch.resumes is None
                parts.append(Part(begin_s, value.now_s, names, whole))
                running = None
    except EventLogError as error:
        raise SystemUnavailable(str(error)) from error
    return parts


class Noticed(NamedTuple):
    """Seconds until the engine was free for what was sent, and what that iteration took in all."""

    after_s: float
    iteration_s: float


def noticed(parts: Sequence[Part], sent_s: float, batch: frozenset[str]) -> Noticed | None:
    """How what was sent at `sent_s` was noticed, during an iteration of requests of `batch` alone.

    None unless one ran at that moment. Each request of `batch` runs in one iteration.
    """
    found = bisect_right(parts, sent_s, key=lambda part: part.begin_s) - 1
    if found < 0:
        return None
    part = parts[found]
    if sent_s >= part.end_s or not part.request_ids <= batch:
        return None
    own = [one.end_s - one.begin_s for one in parts if one.request_ids == part.request_ids]
    return Noticed(part.end_s - sent_s, sum(own))
