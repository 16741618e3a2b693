"""Checks the invariants I1-I17 (docs/protocol.md) on the event logs of a cluster.

Pure: the caller reads the files and passes their entries. The audit needs the logs of all engines,
memory managers and gateways of a run. All must run on a single host, because I2 and I9 compare
times of its clock.

Terms: a *group* is engines that serve together; its *configuration* is its members and their layers
(*stages*); its *epoch* is a number that every change increases. The *committed record* is the
configuration in etcd. An *attempt* is a two-phase change of groups: prepare, then commit. A group
is *marked* while an attempt prepares to change it, and DEGRADED if it lacks layers. A change has
*settled* at a member once its sequences and KV have moved. A *segment* is a run of tokens that a
gateway read from one worker.

I1  an engine plans and runs only the stage that the committed record of its epoch assigns to it,
    and holds the parameters of that stage's layers
I2  after each change of an engine's memory, the engines together hold every layer
I3  a group's epochs only increase, each epoch has a single configuration, and no worker is in two
    groups
I4  an engine's epochs only increase, and each was committed; a commit has the consent of every
    member, none of which had aborted the attempt; leaderships commit in order
I5  an engine emits a token in the epoch in which it was planned; another engine emits it only if
    the request was restarted, and exact engines then emit the same token; each segment of a
    client's stream has tokens that its worker emitted; members of a group loaded the same weights
I6  used blocks have an owner at all times; no block is in use after all requests have ended
I7  parameters, KV (incoming and departing layers included) and staging are within the budget
I8  a client receives tokens 0, 1, 2, … without gaps, all before the end of the stream
I9  members switch to each commit and settle in time; no group stays marked or DEGRADED
I10 each request ends exactly once, at its gateway and in the engines; no engine keeps a request
I11 no process takes a step of the memory escalation while a cheaper step of its own suffices
    (`escalation_order`): no merge is decided while demand fits or, for a full
    group, while moves may help; planners are checked by replay
I12 a block recalled from host memory has the checksum with which it was saved under its hash
I13 each slot of host memory is empty, has a copy or is being filled; no copies are kept for
    preempted requests of an engine without requests
I14 a line of a batch ends once, with a result of the last leader that claimed it
I15 a request that its worker returns has ended there before it runs at another worker; requests
    whose worker was lost may run at two workers for a while
I16 no request is refused as late while a group could start it; checked by replay (`refusals`)
I17 no request is refused for want of memory before merges are exhausted; checked by replay

The audit cannot detect what a log does not record, such as a write past the end of a block.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from services.core.audit.engine_history import Emitted, EngineHistory, Key, times_started
from services.core.audit.facts import EngineSwitched
from services.core.audit.group_history import GroupHistory
from services.core.audit.line_history import LineHistory
from services.core.audit.record import Findings, Recorded
from services.core.audit.stream_history import AuditedStream, StreamHistory

STABLE_WITHIN_S = 30.0

Logs = Sequence[Iterable[Recorded]]


@dataclass(slots=True)
class Audit:
    """The histories of a run, and the findings."""

    stable_within_s: float = STABLE_WITHIN_S  # time limit of I9 after a commit
    # End of the suspension of each process that a test suspended, by worker and the clock of the
    # logs; the time limit of commits during the suspension starts at its end.
    stopped_until_s: Mapping[str, float] = field(default_factory=dict)
    findings: Findings = field(default_factory=Findings)
    engines: list[EngineHistory] = field(default_factory=list)  # by process
    groups: GroupHistory = field(init=False)
    streams: StreamHistory = field(init=False)
    lines: LineHistory = field(init=False)

    def __post_init__(self) -> None:
        self.groups = GroupHistory(self.findings)
        self.streams = StreamHistory(self.findings)
        self.lines = LineHistory(self.findings)

    def run(
        self, engines: Logs, memory_managers: Logs, gateways: Logs, killed_gateways: Logs = ()
    ) -> Findings:
        """Read all logs and check; requests of `killed_gateways` need not have ended."""
        # Groups first: the checks of engines and streams refer to committed configurations.
        for entries in memory_managers:
            self.groups.read(entries)
        self.groups.finish()
        for entries in engines:
            engine = EngineHistory(self.findings)
            engine.read(entries)
            self.engines.append(engine)
        for entries in killed_gateways:
            self.streams.read(self.lines.noted(entries), killed=True)
        for entries in gateways:
            self.streams.read(self.lines.noted(entries))
        self.lines.finish()
        for engine in self.engines:
            self._check_switches(engine)
        for engine in self._live_engines:
            self._check_in_time(engine)
        self._check_layers_held()
        self._check_models()
        self._check_tokens()
        self._check_single_worker()
        self._check_requests_ended()
        self._check_blocks_freed()
        self._check_groups_stable()
        return self.findings

    @property
    def _end_s(self) -> float:
        return max([self.groups.last_s, *(engine.last_s for engine in self.engines)])

    @property
    def _live_engines(self) -> list[EngineHistory]:
        """Engines that are in a group at the end; checks of the end state skip all others."""
        members = [member for group in self.groups.live.values() for member in group.members]
        return [engine for engine in self.engines if any(map(engine.is_process_of, members))]

    # --- configurations

    def _check_switches(self, engine: EngineHistory) -> None:
        for switch in engine.switches:
            group_epoch = (switch.group_id, switch.epoch)
            members = self.groups.configurations.get(group_epoch)
            self.findings.check(
                "I4",
                members is not None,
                "{} switched to {} at epoch {}, which was never committed",
                *(engine.worker_id, *group_epoch),
            )
            # I1: the engine's layer map equals that of the committed record.
            record = [(m.worker_id, m.first_layer, m.end_layer) for m in members or ()]
            runs = [(s.worker_id, s.first_layer, s.end_layer) for s in switch.stages]
            self.findings.check(
                "I1",
                members is None or record == runs,
                "{} runs {} in epoch {} as {}, but the record says {}",
                *(engine.worker_id, *group_epoch, runs, record),
            )
            attempt = self.groups.attempts.get(group_epoch, "")
            self.findings.check(
                "I4",
                attempt not in engine.aborted,
                "attempt {} was committed, though {} had aborted it",
                *(attempt, engine.worker_id),
            )

    def _check_in_time(self, engine: EngineHistory) -> None:
        """I9: the engine settled each of its configurations, or a later one, in time."""
        stopped_until_s = self.stopped_until_s.get(engine.worker_id, -inf)
        for group_epoch, members in self.groups.configurations.items():
            # A configuration read from the store has no known time of commit.
            since_s = self.groups.committed_s.get(group_epoch)
            mine = any(engine.is_process_of(member) for member in members)
            if since_s is None or not mine:
                continue
            due_s = max(since_s, stopped_until_s) + self.stable_within_s
            if self._end_s < due_s:
                continue
            settled = any(
                fact.settled and fact.epoch >= group_epoch[1] and fact.now_s <= due_s
                for fact in engine.memory
            )
            self.findings.check(
                "I9",
                settled or _superseded(engine.switches, group_epoch[1], due_s),
                "{} had not settled in {} at epoch {} {:g} s after the commit",
                *(engine.worker_id, *group_epoch, due_s - since_s),
            )

    def _check_groups_stable(self) -> None:
        for group_id in self.groups.live:
            unstable_s = self._end_s - self.groups.unstable_since_s.get(group_id, self._end_s)
            self.findings.check(
                "I9",
                unstable_s <= self.stable_within_s,
                "{} has not been stable for {:.1f} s",
                *(group_id, unstable_s),
            )

    # --- parameters

    def _check_layers_held(self) -> None:
        """I2. A process that died counts with its last resident layers."""
        by_model: dict[str, list[EngineHistory]] = {}
        for engine in self.engines:
            by_model.setdefault(engine.model_digest, []).append(engine)
        for engines in by_model.values():
            names = {engine.worker_id for engine in engines}
            held: dict[str, frozenset[int]] = {}
            facts = [(fact.now_s, e.worker_id, fact) for e in engines for fact in e.memory]
            for _, worker_id, fact in sorted(facts, key=lambda entry: entry[0]):
                held[worker_id] = frozenset(fact.resident)
                lost = set(range(engines[0].num_layers)).difference(*held.values())
                self.findings.check(
                    "I2",
                    not lost or held.keys() != names,
                    "no engine holds layers {} since {} changed in epoch {}",
                    *(sorted(lost), worker_id, fact.epoch),
                )

    def _check_models(self) -> None:
        for group_epoch, members in self.groups.configurations.items():
            digests = {
                engine.model_digest
                for engine in self.engines
                if any(map(engine.is_process_of, members))
            }
            self.findings.check(
                "I5",
                len(digests) <= 1,
                "{} at epoch {} has members of different models",
                *group_epoch,
            )

    # --- requests

    def _check_tokens(self) -> None:
        """I5: a token has a single engine, unless its request was restarted elsewhere."""
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
            self._check_equal_tokens(emitted)
        for request_id, stream in self.streams.streams.items():
            self._check_stream(request_id, stream, emitted)

    def _check_equal_tokens(self, emitted: Mapping[Key, Sequence[Emitted]]) -> None:
        """I5 for exact engines: a token that is emitted again, after a loss, is the same."""
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
        """I5: the worker of each segment emitted the tokens that the client received."""
        self.findings.check(
            "I5",
            bool(stream.segments) or not (stream.workers_known and stream.token_ids),
            "{} received tokens without a worker",
            request_id,
        )
        # A moved segment may contain tokens of each earlier worker.
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
                    "{} received {} as token {}, but {} emitted {}",
                    *(request_id, token_id, index, names),
                    ", ".join(map(str, own)) or "none",
                )

    def _check_single_worker(self) -> None:
        """I15: a request that arrives at a worker runs at no other, unless that was lost."""
        parted = any(engine.lost_peers for engine in self.engines)
        for request_id, stream in self.streams.streams.items():
            runs = [run for engine in self.engines for run in engine.runs.get(request_id, ())]
            # Both sides of an interrupted hand-over may run it, and the gateway reads from one.
            if not stream.workers_known or (parted and any(run.adopted for run in runs)):
                continue
            runs.sort(key=lambda run: run.began_s)
            for later, run in enumerate(runs):
                for earlier in () if run.adopted else runs[:later]:
                    if earlier.worker_id not in stream.lost_workers | {run.worker_id}:
                        self.findings.check(
                            "I15",
                            earlier.ended_s <= run.began_s,
                            "{} began at {} while it ran at {}",
                            *(request_id, run.worker_id, earlier.worker_id),
                        )

    def _check_requests_ended(self) -> None:
        finished: Counter[str] = sum((engine.finished for engine in self.engines), Counter())
        for request_id, count in finished.items():
            # A restarted request may finish at each engine that received it.
            times = times_started(request_id, self.engines)
            self.findings.check(
                "I10",
                count <= times,
                "{} finished {} times in the engines, which received it {} times",
                *(request_id, count, times),
            )
        for request_id, stream in self.streams.streams.items():
            self.findings.check(
                "I10",
                stream.outcome != "length" or finished[request_id] > 0,
                "{} ended at its gateway, but in no engine",
                request_id,
            )
        for engine in self._live_engines:
            left = sorted(engine.open_sequences)
            self.findings.check(
                "I10", not left, "{} keeps {} at the end", engine.worker_id, ", ".join(left[:5])
            )

    def _check_blocks_freed(self) -> None:
        living = self._live_engines
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
    """Whether the engine switched to a later configuration before the deadline."""
    return any(switch.epoch > epoch and switch.now_s <= until_s for switch in switches)
