"""History of an engine process from its event log, with the checks that need no other log.

Part of an audit (`audit.py` lists the invariants). A group's first member *leads* it: it plans
microbatches for all members. The *epoch* is the number of the group's configuration. Each start of
a request is a *sequence* with its own `seq_id`; `request_id_of` converts it to the request's id.
"""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Row
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from services.core.audit.facts import EngineStarted, EngineSwitched, MemoryHeld
from services.core.audit.record import Findings, Recorded
from services.core.changeover.frames import Samples
from services.core.changeover.vocabulary import (
    FrameReceived,
    NoteAborted,
    NoteAdopted,
    NoteMoved,
    PeersLost,
    RunStage,
)
from services.core.groups.vocabulary import Member
from services.core.planner.events import (
    EmitToken,
    IterationFinished,
    Planned,
    RefuseRequest,
    RequestAborted,
    RequestArrived,
)
from services.core.planner.sequence_ids import request_id_of

Key = tuple[str, int]
"""A request id, and the output index of a token."""


@dataclass(slots=True)
class Run:
    """A sequence while an engine leads it, from its arrival or adoption to its end."""

    worker_id: str
    began_s: float
    adopted: bool
    ended_s: float = inf


class Emitted(NamedTuple):
    """An emitted token, with the epoch and the engine that emitted it."""

    token_id: int
    epoch: int
    worker_id: str


def times_started(request_id: str, engines: "Row[EngineHistory]") -> int:
    """How often these engines may have started a request: as often as gateways sent it."""
    arrived = sum(engine.arrived[request_id] for engine in engines)
    if not any(engine.lost_peers for engine in engines):
        return arrived
    # If members lose each other during a hand-over, both engines may continue the request.
    return arrived + sum(engine.adopted[request_id] for engine in engines)


@dataclass(slots=True)
class EngineHistory:
    """An engine process, from its start to the end of its log."""

    findings: Findings
    worker_id: str = "an engine"
    incarnation: str = ""
    model_digest: str = ""  # of all loaded parameters
    num_layers: int = 0
    epoch: int = 0  # 0 before the first configuration
    switches: list[EngineSwitched] = field(default_factory=list)
    memory: list[MemoryHeld] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)  # ids of aborted attempts at changes of groups
    exact: bool = False  # see `EngineStarted`
    tokens: dict[Key, list[Emitted]] = field(default_factory=dict)
    arrived: Counter[str] = field(default_factory=Counter)  # arrivals from gateways, by request
    adopted: Counter[str] = field(default_factory=Counter)  # adoptions, by request
    # A member of a change was lost: both engines of a hand-over may continue the request.
    lost_peers: bool = False
    finished: Counter[str] = field(default_factory=Counter)  # finished answers, by request
    open_sequences: dict[str, Run] = field(default_factory=dict)  # not ended, led by this engine
    # All sequences that this engine led, by request, without those that it handed over.
    runs: dict[str, list[Run]] = field(default_factory=dict)
    last_s: float = 0.0  # time of the last entry
    _now_s: float = 0.0  # time of the current entry
    _budget_bytes: int = 0
    _planned_in: dict[int, int] = field(default_factory=dict)  # microbatch -> epoch
    _sampled_in: int = 0  # epoch in which the last sampled microbatch was planned
    _newcomer: str = ""  # sequence that the last event added, or ""
    _unanswered: set[str] = field(default_factory=set)  # arrived sequences without a token
    _sampled: bool = False  # the last event delivered sampled tokens
    _returned: set[str] = field(default_factory=set)  # sequences that returned to the scheduler

    def is_process_of(self, member: Member) -> bool:
        """Whether `member` names this process (worker and incarnation)."""
        return (self.worker_id, self.incarnation) == (member.worker_id, member.incarnation)

    def read(self, entries: Iterable[Recorded]) -> None:
        """Read all entries of the log, in order."""
        for entry in entries:
            value = entry.value
            self._now_s = getattr(value, "now_s", self._now_s)
            self.last_s = max(self.last_s, self._now_s)
            match value:
                case RequestArrived() | RequestAborted() | IterationFinished():
                    self._take_event(value)
                case EmitToken() | RefuseRequest():
                    self._take_command(value)
                case EngineSwitched():
                    self._switch(value)
                case MemoryHeld():
                    self._note_memory(value)
                case EngineStarted():
                    self._start(value)
                case NoteAborted():
                    self.aborted.add(value.attempt)
                case _:
                    self._take_work(value)
        for run in self.open_sequences.values():
            run.ended_s = self.last_s  # a process that died cannot log the end

    def _start(self, fact: EngineStarted) -> None:
        self.worker_id, self.incarnation = fact.worker_id, fact.incarnation
        self.model_digest, self.num_layers = fact.model_digest, fact.num_layers
        self._budget_bytes = fact.budget_bytes
        self.exact = fact.exact

    # --- configurations

    def _switch(self, fact: EngineSwitched) -> None:
        self.findings.check(
            "I4",
            fact.epoch > self.epoch,
            "{} switched to epoch {}, though it was already at {}",
            *(self.worker_id, fact.epoch, self.epoch),
        )
        self.epoch = fact.epoch
        self.switches.append(fact)

    @property
    def _leads(self) -> bool:
        """Whether the engine leads its group; without a configuration it serves alone."""
        return not self.switches or self.switches[-1].stages[0].worker_id == self.worker_id

    def _take_work(self, value: object) -> None:
        # Only a leader plans microbatches; other members run the frames that the leader sends.
        match value:
            case Planned(microbatch=microbatch) if microbatch is not None:
                self._planned_in[microbatch.number] = self.epoch
                self.findings.check(
                    "I1",
                    self._leads,
                    "{} planned microbatch {} in epoch {}, which another worker leads",
                    *(self.worker_id, microbatch.number, self.epoch),
                )
                for chunk in microbatch.batch.chunks:
                    if chunk.seq_id in self._returned:
                        self.findings.check(
                            "I15",
                            False,
                            "{} planned {}, which it had returned",
                            *(self.worker_id, request_id_of(chunk.seq_id)),
                        )
            case RunStage(frame=frame) if frame.chunks:
                self.findings.check(
                    "I1",
                    not self._leads,
                    "{} ran a stage of another leader in epoch {}, which it leads",
                    *(self.worker_id, self.epoch),
                )
            case FrameReceived(frame=Samples(number=number)):
                self._take_samples(number)
            case NoteAdopted():
                seq_id = value.sequence.request.request_id
                self.adopted[request_id_of(seq_id)] += 1
                self._enter(seq_id, adopted=True)
            case PeersLost(workers=workers):
                self.lost_peers = self.lost_peers or bool(workers)
            case NoteMoved():
                if run := self.open_sequences.pop(value.seq_id, None):
                    self.runs[request_id_of(value.seq_id)].remove(run)

    # --- memory

    def _note_memory(self, fact: MemoryHeld) -> None:
        self.memory.append(fact)
        stage = range(fact.first_layer, fact.end_layer)
        missing = sorted(set(stage) - set(fact.resident))
        self.findings.check(
            "I1",
            not missing,
            "{} runs layers {} to {} in epoch {}, but does not hold {}",
            *(self.worker_id, fact.first_layer, fact.end_layer - 1, fact.epoch, missing),
        )
        # `kv_bytes` includes KV of incoming and departing layers, so the check covers changes.
        used_bytes = fact.parameter_bytes + fact.kv_bytes + fact.staging_bytes
        self.findings.check(
            "I7",
            used_bytes <= self._budget_bytes,
            "{} uses {} bytes in epoch {}, but its budget is {}",
            *(self.worker_id, used_bytes, fact.epoch, self._budget_bytes),
        )
        self.findings.check(
            "I6",
            (fact.blocks_taken > 0) == (fact.owners > 0) and fact.blocks_taken <= fact.blocks,
            "{} has {} of {} blocks in use in epoch {}, of {} requests",
            *(self.worker_id, fact.blocks_taken, fact.blocks, fact.epoch, fact.owners),
        )

    # --- requests

    def _take_event(self, event: RequestArrived | RequestAborted | IterationFinished) -> None:
        self._newcomer = ""
        self._sampled = False
        match event:
            case RequestArrived(request=request):
                self.arrived[request_id_of(request.request_id)] += 1
                self._enter(request.request_id)
                self._unanswered.add(request.request_id)
                self._returned.discard(request.request_id)
            case RequestAborted(request_id=request_id):
                self._end_all(request_id)
            case IterationFinished(number=number):
                self._take_samples(number or 0)

    def _take_samples(self, number: int) -> None:
        self._newcomer = ""
        self._sampled = True
        self._sampled_in = self._planned_in.pop(number, self.epoch)

    def _enter(self, seq_id: str, adopted: bool = False) -> None:
        self._newcomer = "" if seq_id in self.open_sequences else seq_id
        if self._newcomer:
            run = self.open_sequences[seq_id] = Run(self.worker_id, self._now_s, adopted)
            self.runs.setdefault(request_id_of(seq_id), []).append(run)

    def _end(self, seq_id: str) -> None:
        if run := self.open_sequences.pop(seq_id, None):
            run.ended_s = self._now_s

    def _end_all(self, request_id: str, but: str = "") -> None:
        """End all sequences of a request, except `but`."""
        for seq_id in tuple(self.open_sequences):
            if seq_id != but and request_id_of(seq_id) == request_id:
                self._end(seq_id)

    def _take_command(self, command: EmitToken | RefuseRequest) -> None:
        seq_id = command.request_id
        request_id = request_id_of(seq_id)
        if isinstance(command, RefuseRequest):
            # A refusal ends a sequence that just arrived, or that had no valid token to sample, or
            # that returns to the scheduler. The refusal of a duplicate leaves the original open.
            if seq_id == self._newcomer or self._sampled or command.returned:
                self._end(seq_id)
                self._unanswered.discard(seq_id)
            if command.returned:
                self._returned.add(seq_id)
            return
        if seq_id in self._returned:
            self.findings.check(
                "I15",
                False,
                "{} emitted token {} of {}, which it had returned",
                *(self.worker_id, command.index, request_id),
            )
        self.findings.check(
            "I5",
            self._sampled_in == self.epoch,
            "{} emitted token {} of {} in epoch {}, which was planned in epoch {}",
            *(self.worker_id, command.index, request_id, self.epoch, self._sampled_in),
        )
        if command.index == 0 or seq_id in self._unanswered:
            # This sequence answers the request from now on, and replaces its other sequences: a
            # lost worker may have handed a sequence over before a gateway restarted the request.
            self._unanswered.discard(seq_id)
            self._end_all(request_id, but=seq_id)
        key = (request_id, command.index)
        self.findings.check(
            "I5",
            key not in self.tokens or times_started(request_id, (self,)) > 1,
            "{} emitted token {} of {} twice",
            *(self.worker_id, command.index, request_id),
        )
        emitted = Emitted(command.token_id, self.epoch, self.worker_id)
        self.tokens.setdefault(key, []).append(emitted)
        if command.finish_reason is not None:
            self.finished[request_id] += 1
            self._end(seq_id)
