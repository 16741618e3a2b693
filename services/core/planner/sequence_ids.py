"""Sequence ids: each start of a request gets an id of its own.

A request id identifies a request between gateway, scheduler and worker. When a worker is lost, the
gateway may start the request again under the same request id, at any worker. Members of the group
may still hold KV of the first sequence then, and messages about it may be in flight. Block tables,
KV transfers and messages between engines therefore use sequence ids, so that late messages have no
effect on the sequence that runs now. During a change of a group, another engine may *adopt* a
sequence and continue it under its sequence id.

An engine creates a sequence id for each arriving request, and translates back when tokens and
refusals leave it. So inside an engine the field `request_id` of its copy of a `Request`, of
`EmitToken`, `RefuseRequest` and `RequestAborted` is a sequence id. All other fields with a sequence
id, also in frames between engines, are named `seq_id`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from services.core.planner.events import Command, EmitToken, RefuseRequest

MARK = "#"  # separates the request id from the rest of a sequence id


def request_id_of(seq_id: str) -> str:
    """Request id of a sequence; an id without a mark is a request id already."""
    return seq_id.rpartition(MARK)[0] or seq_id


class _Current(NamedTuple):
    seq_id: str
    adopted: bool  # another engine started the sequence


@dataclass(slots=True)
class SequenceIdSource:
    """Creates sequence ids; `process` is a unique name of the engine process."""

    process: str
    _made: int = 0

    def __post_init__(self) -> None:
        if MARK in self.process:
            raise ValueError(
                f"{self.process!r} contains {MARK!r}, which separates the parts of a sequence id"
            )

    def new_id(self, request_id: str) -> str:
        """New sequence id for a start of the request."""
        self._made += 1
        return f"{request_id}{MARK}{self.process}.{self._made}"


@dataclass(slots=True)
class AnsweringSequences:
    """Maps each request at an engine to the sequence that answers it; at most one does."""

    _current: dict[str, _Current] = field(default_factory=dict)  # by request id
    _answering: set[str] = field(default_factory=set)  # sequence ids in `_current`, for fast lookup

    def begin(self, seq_id: str) -> None:
        """A sequence that starts here answers its request from now on."""
        self._set(_Current(seq_id, adopted=False))

    def adopt(self, seq_id: str) -> None:
        """A sequence that another engine started answers its request from now on."""
        self._set(_Current(seq_id, adopted=True))

    def seq_id_of(self, request_id: str) -> str:
        """Id of the sequence that answers a request here; "" if none."""
        current = self._current.get(request_id)
        return current.seq_id if current is not None else ""

    def was_adopted(self, seq_id: str) -> bool:
        """Whether the sequence answers its request, and another engine started it."""
        return self._current.get(request_id_of(seq_id)) == _Current(seq_id, adopted=True)

    def end(self, seq_id: str) -> None:
        """Stop the output of a sequence that has ended or moved away. Idempotent."""
        if seq_id in self._answering:
            self._answering.remove(seq_id)
            del self._current[request_id_of(seq_id)]

    def keep_only(self, seq_ids: Iterable[str]) -> None:
        """Stop the output of all other sequences, which moved away before this change-over."""
        for seq_id in self._answering.difference(seq_ids):
            self.end(seq_id)

    def filter_command(self, command: Command) -> bool:
        """Whether to pass on a command; False for client commands of sequences that do not answer.

        Ends the sequence with its last client command.
        """
        if not isinstance(command, (EmitToken, RefuseRequest)):
            return True
        seq_id = command.request_id
        if seq_id not in self._answering:
            return False
        if isinstance(command, RefuseRequest) or command.finish_reason is not None:
            self.end(seq_id)
        return True

    def _set(self, current: _Current) -> None:
        request_id = request_id_of(current.seq_id)
        if (before := self._current.get(request_id)) is not None:
            self._answering.remove(before.seq_id)
        self._current[request_id] = current
        self._answering.add(current.seq_id)
