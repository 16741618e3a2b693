"""Checks invariants I1-I11 (docs/protocol.md) on the recorded logs of a cluster.

Pure: the caller reads the files and hands over their entries. The logs of all engines, memory
managers and gateways of one run are needed, on one machine: I2 and I9 compare its clock; nothing
else does.

I1  an engine plans and runs stages only where the committed record of its epoch puts it, and holds
    the parameters of the layers that it runs; the layers are those that the record gives it
I2  after each change of any engine's memory, the engines together hold every layer
I3  a group's epochs only rise, each has one configuration, and no worker is in two groups
I4  an engine's epochs only rise, and each was committed; a commit has the consent of every member
    and none of them had aborted the attempt; leaderships commit in order
I5  a token leaves one engine, in the epoch in which it was planned; others may emit it, too, if its
    request was started again: the same one where engines are exact; clients get segments, each of
    tokens that its worker emitted; members of a group have loaded the same parameters
I6  used blocks have an owner at all times, and when all requests are over, none is used
I7  parameters, KV (also of layers that come or go) and staging are within the budget
I8  clients get token 0, 1, 2, …; nothing after the end, and all of them before it
I9  each commit is carried out and settled by its members in time; no group stays marked or degraded
I10 each request ends exactly once, at its gateway and in the engines; no engine keeps one
I11 no process makes a concession while a cheaper one of its own would have done (core.concession):
    no merge is decided while demand fits; of planners, `concession_order` tells it in their replay

A log cannot show what a process did not note: a write past a block's end, say.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from services.core.audit.engine_history import Emitted, EngineHistory, Key, times_started
from services.core.audit.facts import EngineSwitched
from services.core.audit.group_history import GroupHistory
from services.core.audit.record import Findings, Recorded
from services.core.audit.stream_history import AuditedStream, StreamHistory

STABLE_WITHIN_S = 30.0

Logs = Sequence[Iterable[Recorded]]


@dataclass(slots=True)
class Audit:
    """The histories of one run; `findings` has what was checked and what is broken.

    `stopped_until_s`: workers whose processes stood still, and until when, by the clock of the
    logs; they settle what was committed meanwhile within `stable_within_s` from then.
    """

    stable_within_s: float = STABLE_WITHIN_S
    stopped_until_s: Mapping[str, float] = field(default_factory=dict)
    findings: Findings = field(default_factory=Findings)
    engines: list[EngineHistory] = field(default_factory=list)
    groups: GroupHistory = field(init=False)
    streams: StreamHistory = field(init=False)

    def __post_init__(self) -> None:
        self.groups = GroupHistory(self.findings)
        self.streams = StreamHistory(self.findings)

    def run(
        self, engines: Logs, memory_managers: Logs, gateways: Logs, killed_gateways: Logs = ()
    ) -> Findings:
        """Read all logs and check everything; requests of `killed_gateways` need not have ended."""
        for entries in memory_managers:
            self.groups.read(entries)
        self.groups.finish()
        for entries in engines:
            engine = EngineHistory(self.findings)
            engine.read(entries)
            self.engines.append(engine)
        for entries in killed_gateways:
            self.streams.read(entries, killed=True)
        for entries in gateways:
            self.streams.read(entries)
        for engine in self.engines:
            self._check_switches(engine)
        for engine in self._living:
            self._check_in_time(engine)
        self._check_copies()
        self._check_models()
        self._check_tokens()
        self._check_ends()
        self._check_rest()
        self._check_groups_stable()
        return self.findings

    @property
    def _end_s(self) -> float:
        return max([self.groups.last_s, *(one.last_s for one in self.engines)])

    @property
    def _living(self) -> list[EngineHistory]:
        """The engines that are in a group at the end; engines that died need not be at rest."""
        members = [member for group in self.groups.live.values() for member in group.members]
        return [one for one in self.engines if any(map(one.is_process_of, members))]

    # --- configurations

    def _check_switches(self, engine: EngineHistory) -> None:
        for switch in engine.switches:
            place = (switch.group_id, switch.epoch)
            members = self.groups.configurations.get(place)
            self.findings.check(
                "I4",
                members is not None,
                "{} switched to {} at epoch {}, which was never committed",
                *(engine.worker_id, *place),
            )
            given = [(one.worker_id, one.first_layer, one.end_layer) for one in members or ()]
            runs = [(one.worker_id, one.first_layer, one.end_layer) for one in switch.stages]
            self.findings.check(
                "I1",
                members is None or given == runs,
                "{} runs {} in epoch {} as {}, but the record says {}",
                *(engine.worker_id, *place, runs, given),
            )
            attempt = self.groups.attempts.get(place, "")
            self.findings.check(
                "I4",
                attempt not in engine.aborted,
                "attempt {} was committed, though {} had aborted it",
                *(attempt, engine.worker_id),
            )

    def _check_in_time(self, engine: EngineHistory) -> None:
        """Each configuration of the engine was reached, or a later one, and settled."""
        stopped_until_s = self.stopped_until_s.get(engine.worker_id, -inf)
        for place, members in self.groups.configurations.items():
            since_s = self.groups.committed_s.get(place)
            mine = any(engine.is_process_of(member) for member in members)
            if since_s is None or not mine:
                continue
            due_s = max(since_s, stopped_until_s) + self.stable_within_s
            if self._end_s < due_s:
                continue
            settled = any(
                fact.settled and fact.epoch >= place[1] and fact.now_s <= due_s
                for fact in engine.memory
            )
            self.findings.check(
                "I9",
                settled or _superseded(engine.switches, place[1], due_s),
                "{} had not settled in {} at epoch {} {:g} s after the commit",
                *(engine.worker_id, *place, due_s - since_s),
            )

    def _check_groups_stable(self) -> None:
        for group_id in self.groups.live:
            unstable_s = self._end_s - self.groups.unstable_since_s.get(group_id, self._end_s)
            self.findings.check(
                "I9",
                unstable_s <= self.stable_within_s,
                "{} is not stable since {:.1f} s",
                *(group_id, unstable_s),
            )

    # --- parameters

    def _check_copies(self) -> None:
        """A process that died counts with what it held last."""
        by_model: dict[str, list[EngineHistory]] = {}
        for engine in self.engines:
            by_model.setdefault(engine.model_digest, []).append(engine)
        for engines in by_model.values():
            names = {engine.worker_id for engine in engines}
            held: dict[str, frozenset[int]] = {}
            facts = [(fact.now_s, one.worker_id, fact) for one in engines for fact in one.memory]
            for _, worker_id, fact in sorted(facts, key=lambda one: one[0]):
                held[worker_id] = frozenset(fact.resident)
                lost = set(range(engines[0].num_layers)).difference(*held.values())
                self.findings.check(
                    "I2",
                    not lost or held.keys() != names,
                    "nobody holds layers {} any more since {} changed in epoch {}",
                    *(sorted(lost), worker_id, fact.epoch),
                )

    def _check_models(self) -> None:
        for place, members in self.groups.configurations.items():
            found = {
                engine.model_digest
                for engine in self.engines
                if any(map(engine.is_process_of, members))
            }
            self.findings.check(
                "I5", len(found) <= 1, "{} at epoch {} has members of different models", *place
            )

    # --- requests

    def _check_tokens(self) -> None:
        """A token comes from one engine, unless two may go on with its request."""
        emitted: dict[Key, list[Emitted]] = {}
        for engine in self.engines:
            for key, tokens in engine.tokens.items():
                others = emitted.setdefault(key, [])
                first, other = tokens[0], others[-1] if others else None
                self.findings.check(
                    "I5",
                    other is None or times_started(key[0], self.engines) > 1,
                    "token {} of {} came from {} in epoch {} and from {} in epoch {}",
                    *(key[1], key[0], first.worker_id, first.epoch),
                    *((other.worker_id, other.epoch) if other else ("", 0)),
                )
                others += tokens
        if all(engine.exact for engine in self.engines):
            self._check_alike(emitted)
        for request_id, stream in self.streams.streams.items():
            self._check_stream(request_id, stream, emitted)

    def _check_alike(self, emitted: Mapping[Key, Sequence[Emitted]]) -> None:
        """An index that was emitted again, since the first time was lost, has the same token."""
        for (request_id, index), tokens in emitted.items():
            if len(tokens) > 1:
                ids = sorted({token.token_id for token in tokens})
                self.findings.check(
                    "I5",
                    len(ids) == 1,
                    "token {} of {} was emitted as {}",
                    *(index, request_id, ", ".join(map(str, ids))),
                )

    def _check_stream(
        self, request_id: str, stream: AuditedStream, emitted: Mapping[Key, Sequence[Emitted]]
    ) -> None:
        """Each token of the client is one that the worker of its segment emitted."""
        self.findings.check(
            "I5",
            bool(stream.segments) or not (stream.workers_known and stream.token_ids),
            "{} got tokens of no worker",
            request_id,
        )
        for first, end, workers in stream.sources():
            names = "the workers" if workers is None else " or ".join(sorted(workers))
            for index in range(first, end):
                tokens = emitted.get((request_id, index), ())
                own = [
                    token.token_id
                    for token in tokens
                    if workers is None or token.worker_id in workers
                ]
                token_id = stream.token_ids[index]
                self.findings.check(
                    "I5",
                    token_id in own,
                    "{} got {} as token {}, but {} emitted {}",
                    *(request_id, token_id, index, names),
                    ", ".join(map(str, own)) or "none",
                )

    def _check_ends(self) -> None:
        finished: Counter[str] = sum((one.finished for one in self.engines), Counter())
        for request_id, count in finished.items():
            times = times_started(request_id, self.engines)
            self.findings.check(
                "I10",
                count <= times,
                "{} finished {} times in the engines, which got it {} times",
                *(request_id, count, times),
            )
        for request_id, stream in self.streams.streams.items():
            self.findings.check(
                "I10",
                stream.outcome != "length" or finished[request_id] > 0,
                "{} ended at its gateway, but in no engine",
                request_id,
            )
        for engine in self._living:
            left = sorted(engine.open_sequences)
            self.findings.check(
                "I10", not left, "{} keeps {} at the end", engine.worker_id, ", ".join(left[:5])
            )

    def _check_rest(self) -> None:
        living = self._living
        if any(engine.open_sequences for engine in living):
            return
        for engine in living:
            if engine.memory:
                last = engine.memory[-1]
                self.findings.check(
                    "I6",
                    last.blocks_taken == 0,
                    "{} has {} blocks in use, though all requests are over",
                    *(engine.worker_id, last.blocks_taken),
                )


def _superseded(switches: Sequence[EngineSwitched], epoch: int, until_s: float) -> bool:
    """Whether a later configuration was entered before the settling of this one was due."""
    return any(switch.epoch > epoch and switch.now_s <= until_s for switch in switches)
