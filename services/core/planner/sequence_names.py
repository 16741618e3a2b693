"""Names of sequences: each start of a request gets one that no other has.

When a worker is lost before a request has its first token, its gateway asks for it again under the
same id, at any leader. Members may still hold KV of the first sequence then, and orders about that
are on their way. Tables, transfers and orders go by the name, so that a late one has no effect on
the sequence that runs now. Clients, and what they are told, go by the id.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from services.core.planner.events import Command, EmitToken, RefuseRequest

MARK = "#"


def request_of(name: str) -> str:
    """The id of the request that the sequence `name` answers; a name without a mark is its id."""
    return name.rpartition(MARK)[0] or name


class _Current(NamedTuple):
    name: str
    adopted: bool


@dataclass(slots=True)
class NameSource:
    """Makes names of sequences; `process` names the engine's process, no other has that name."""

    process: str
    _made: int = 0

    def __post_init__(self) -> None:
        if MARK in self.process:
            raise ValueError(f"{self.process!r} has a {MARK!r}, which ends the id in a name")

    def name(self, request_id: str) -> str:
        """A name for a new sequence, which is to answer the request."""
        self._made += 1
        return f"{request_id}{MARK}{self.process}.{self._made}"


@dataclass(slots=True)
class SequenceNames:
    """Which sequence answers which request at one engine; at most one does."""

    _current: dict[str, _Current] = field(default_factory=dict)
    _answering: set[str] = field(default_factory=set)  # the names in `_current`: asked each token

    def begin(self, name: str) -> None:
        """A sequence that begins here answers its request from now on."""
        self._set(_Current(name, adopted=False))

    def adopt(self, name: str) -> None:
        """A sequence that another engine began answers its request from now on."""
        self._set(_Current(name, adopted=True))

    def name_of(self, request_id: str) -> str:
        """The sequence that answers a request here, or did before it moved away; "" if none."""
        current = self._current.get(request_id)
        return current.name if current is not None else ""

    def was_adopted(self, name: str) -> bool:
        """Whether it answers its request, and another engine began it."""
        return self._current.get(request_of(name)) == _Current(name, adopted=True)

    def end(self, name: str) -> None:
        """A sequence is over, or nobody wants it: clients get nothing more of it."""
        if name in self._answering:
            self._answering.remove(name)
            del self._current[request_of(name)]

    def keep_only(self, names: Iterable[str]) -> None:
        """Forget the others: a change-over begins, and nobody asks for what has moved before."""
        for name in self._answering.difference(names):
            self.end(name)

    def keeps(self, command: Command) -> bool:
        """Whether a command is for the clients of a request that its sequence still answers.

        The final command of a sequence ends it. Commands for others than clients are kept.
        """
        if not isinstance(command, (EmitToken, RefuseRequest)):
            return True
        name = command.request_id
        if name not in self._answering:
            return False
        if isinstance(command, RefuseRequest) or command.finish_reason is not None:
            self.end(name)
        return True

    def _set(self, current: _Current) -> None:
        request_id = request_of(current.name)
        if (before := self._current.get(request_id)) is not None:
            self._answering.remove(before.name)
        self._current[request_id] = current
        self._answering.add(current.name)
