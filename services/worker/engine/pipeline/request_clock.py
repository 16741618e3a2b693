"""Where the time of each request goes at this engine, in plain numbers for its last event."""

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from services.worker.ipc import RequestTimes

PREEMPTIONS_TOLD = 32
# Requests that never ended are forgotten once so many more are known than run.
SLACK = 64


class _Doing(Enum):
    WAIT = auto()
    PREFILL = auto()
    DECODE = auto()


@dataclass(slots=True)
class _Entry:
    began_s: float
    since_s: float
    doing: _Doing = _Doing.WAIT
    decodes: bool = False  # its first token is out, here or elsewhere
    spent_s: dict[_Doing, float] = field(default_factory=lambda: dict.fromkeys(_Doing, 0.0))
    preempted_s: list[float] = field(default_factory=list)

    def turn(self, doing: _Doing, now_s: float) -> None:
        self.spent_s[self.doing] += max(0.0, now_s - self.since_s)
        self.doing, self.since_s = doing, now_s


class RequestClock:
    """Follows requests from the engine's taking them to their end here; reads no time itself."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        # Requests that wait to run (again): usually none, so that an iteration costs nothing.
        self._waiting: set[str] = set()

    def begin(self, request_id: str, now_s: float, decodes: bool = False) -> None:
        """The engine has the request from now on; `decodes`: with output from another engine."""
        self._entries[request_id] = _Entry(now_s, now_s, decodes=decodes)
        self._waiting.add(request_id)

    def launched(self, request_ids: Callable[[], Iterable[str]], now_s: float) -> None:
        """These are in the microbatch that runs next; asked for only while somebody waits."""
        if not self._waiting:
            return
        for request_id in self._waiting.intersection(request_ids()):
            entry = self._entries[request_id]
            entry.turn(_Doing.DECODE if entry.decodes else _Doing.PREFILL, now_s)
            self._waiting.discard(request_id)

    def emitted(self, request_id: str, now_s: float) -> None:
        """An output token of the request came."""
        entry = self._entries.get(request_id)
        if entry is not None and not entry.decodes:
            entry.decodes = True
            if entry.doing is _Doing.PREFILL:
                entry.turn(_Doing.DECODE, now_s)

    def preempted(self, request_ids: Iterable[str], now_s: float) -> None:
        """These wait; those of them that ran before have lost their KV."""
        for request_id in request_ids:
            entry = self._entries.get(request_id)
            if entry is None or request_id in self._waiting:
                continue
            entry.turn(_Doing.WAIT, now_s)
            self._waiting.add(request_id)
            if len(entry.preempted_s) < PREEMPTIONS_TOLD:
                entry.preempted_s.append(now_s - entry.began_s)

    def end(self, request_id: str, now_s: float) -> RequestTimes | None:
        """The request is over here; None if it is not known."""
        self._waiting.discard(request_id)
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return None
        entry.turn(entry.doing, now_s)
        spent_s = entry.spent_s
        return RequestTimes(
            spent_s[_Doing.WAIT],
            spent_s[_Doing.PREFILL],
            spent_s[_Doing.DECODE],
            entry.preempted_s,
        )

    def prune(self, known: Container[str], count: int) -> None:
        """Forget requests that are not in `known`, which has `count`, once there are many."""
        if len(self._entries) > 2 * count + SLACK:
            for request_id in [name for name in self._entries if name not in known]:
                self.end(request_id, 0.0)

    def check_invariants(self, running: Mapping[str, object]) -> None:
        """Raise AssertionError if a waiting request or one of `running` is not known."""
        assert self._waiting <= self._entries.keys()
        assert running.keys() <= self._entries.keys()
