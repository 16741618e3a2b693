"""Several engines in one process: real arenas, planners, transfers and models, no clock, no thread.

A seeded random order decides which engine takes a turn, which frame comes next, and when a transfer
moves a piece, so that tests explore interleavings reproducibly; over a
`UcxNetwork`, when frames arrive is up to UCX.
"""

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from services.core.groups.layer_map import Stage
from services.core.planner.events import EmitToken, RequestAborted, RequestArrived
from services.core.request import FinishReason, Request, TokenLogprobs
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.compute.runner_config import RunnerConfig
from services.worker.engine.pipeline.serving import Interrupts
from services.worker.engine.transfer.lane import Identity
from services.worker.ipc import (
    AdoptedRequest,
    ApplyConfiguration,
    GroupPlan,
    MemberPlan,
    Prepare,
    Prepared,
    Shipped,
)
from services.worker.ipc import Lane as LanePlan
from tests.support.engine_gateway import EngineGateway
from tests.support.engine_networks import EngineNetwork, QueueNetwork
from tests.support.engines import (
    Engine,
    at_rest,
    check_at_rest,
    check_engines,
    make_engine,
    wrong_books,
)

TURNS_MAX = 200_000
ATTEMPT_TURNS = 5_000
MEND_TURNS = 600


@dataclass
class Stream:
    """A request and the output that its client has received.

    `stop_after`: number of output tokens after which its gateway detects a stop string.
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    aborted: bool = False
    refused: str = ""
    stop_after: int | None = None

    @property
    def over(self) -> bool:
        return self.finish_reason is not None or self.aborted or bool(self.refused)


class EngineGroup:
    """`workers` engines of one model; each starts in a group of its own."""

    ships = False  # ships running requests to other groups
    host_slots = 0  # KV blocks in host memory

    def __init__(
        self,
        config: RunnerConfig,
        workers: int,
        seed: int,
        *,
        max_batch_tokens: int = 64,
        max_running: int = 16,
        prefix_caching: bool = False,
        network: EngineNetwork | None = None,
        event_logs: Path | None = None,
        load: Callable[[RunnerConfig], ModelRunner] = ModelRunner.load,
        planner: Mapping[str, Any] | None = None,
        interrupts: Interrupts | None = None,
    ) -> None:
        """`network` is a `QueueNetwork` if none is given; in `event_logs` each engine keeps one.

        `planner`: more fields of each planner's configuration. `interrupts`: as in `Member.launch`.
        """
        self.rng = random.Random(seed)
        self.network = network or QueueNetwork()
        self.now_s = self.network.now_s()
        self.epoch = 0
        self.streams: dict[str, Stream] = {}
        self.owner: dict[str, str] = {}  # request id → the engine that streams it
        self.groups: list[list[Stage]] = []
        self.prepared: dict[tuple[str, str], Prepared] = {}
        self.shipped: dict[str, Shipped] = {}
        self.violations: list[str] = []
        self.draining: set[str] = set()
        self.gateway = EngineGateway(self)
        self._attempts = 0
        self._idle_turns = 0
        self._event_logs = event_logs
        self._load = load
        self._prefix_caching = prefix_caching
        self._planner = planner
        self._interrupts = interrupts
        self.engines: dict[str, Engine] = {}
        for index in range(workers):
            self._add(f"w{index}", config, max_batch_tokens, max_running)
        self.num_layers = self.engines["w0"].runner.stage_memory.num_layers
        self.epoch = 1
        for name in self.engines:
            alone = [self._alone(name)]
            self.groups.append(alone)
            self.engines[name].member.apply(ApplyConfiguration(self._plans([alone], 1)))

    def _add(
        self, worker_id: str, config: RunnerConfig, max_batch_tokens: int, max_running: int
    ) -> None:
        identity = Identity(worker_id, f"{worker_id}-1")
        self.engines[worker_id] = make_engine(
            identity,
            self._load(config),
            self.network,
            lambda: self.now_s,
            max_batch_tokens=max_batch_tokens,
            max_running=max_running,
            prefix_caching=self._prefix_caching,
            event_logs=self._event_logs,
            planner=self._planner,
            ships=self.ships,
            host_slots=self.host_slots,
        )

    def _alone(self, worker_id: str) -> Stage:
        return Stage(worker_id, 0, self.num_layers)

    # --- clients

    def start(self, request: Request, leader: str = "") -> None:
        """Submit a request to a leader, by default that of a random group."""
        leader = leader or self.rng.choice(self.groups)[0].worker_id
        self.streams[request.request_id] = Stream(request)
        self.owner[request.request_id] = leader
        sent = self.gateway.outgoing(request)
        self.engines[leader].member.handle(RequestArrived(self.now_s, sent))

    def abort(self, request_id: str) -> None:
        """Abort a request, also at a later owner."""
        self.streams[request_id].aborted = True
        if self.gateway.abort(request_id):
            return
        owner = self.owner[request_id]
        self.engines[owner].member.handle(RequestAborted(self.now_s, request_id))

    def stop(self, request_id: str, tokens: int) -> None:
        """Place a stop string at output token `tokens`, at which the gateway aborts the request."""
        self.streams[request_id].stop_after = tokens
        self._look_for_stop(request_id)

    def _look_for_stop(self, request_id: str) -> None:
        stream = self.streams[request_id]
        complete = stream.stop_after is not None and len(stream.tokens) >= stream.stop_after
        if complete and not stream.over:
            self.abort(request_id)

    # --- changes

    def prepare(self, groups: Sequence[Sequence[Stage]]) -> str:
        """Prepare a change at every member; returns the attempt."""
        self._attempts += 1
        attempt = f"attempt-{self._attempts}"
        plans = self._plans(groups, self.epoch + 1)
        for group in plans:
            for member in group.members:
                self.engines[member.worker_id].member.prepare(Prepare(attempt, plans))
        return attempt

    def answers(self, attempt: str) -> list[Prepared]:
        """The members' answers to an attempt."""
        return [answer for (name, _), answer in self.prepared.items() if name == attempt]

    def await_answers(
        self, attempt: str, groups: Sequence[Sequence[Stage]], turns: int = ATTEMPT_TURNS
    ) -> bool:
        """Run until every member has answered or `turns` are over; True if all are ready."""
        members = sum(len(group) for group in groups)
        for _ in range(turns):
            if len(self.answers(attempt)) == members:
                return all(not answer.error for answer in self.answers(attempt))
            self.turn()
        return False

    def abort_attempt(self, attempt: str, groups: Sequence[Sequence[Stage]]) -> None:
        """Abort an attempt."""
        for group in groups:
            for stage in group:
                self.engines[stage.worker_id].member.abort(attempt)

    def commit(self, groups: Sequence[Sequence[Stage]], late: Collection[str] = ()) -> None:
        """Commit at random moments; `late` members receive the commit with the next change only."""
        self.epoch += 1
        plans = self._plans(groups, self.epoch)
        names = [member.worker_id for group in plans for member in group.members]
        self.groups = [
            group for group in self.groups if not any(s.worker_id in names for s in group)
        ]
        self.groups += [list(group) for group in groups]
        self.rng.shuffle(names)
        for name in names:
            for _ in range(self.rng.randrange(4)):
                self.turn()
            if name not in late:
                self.engines[name].member.apply(ApplyConfiguration(plans))

    def reconfigure(self, groups: Sequence[Sequence[Stage]], prepare: bool = True) -> None:
        """Prepare, wait for readiness and commit a change."""
        if prepare:
            attempt = self.prepare(groups)
            ready = self.await_answers(attempt, groups)
            assert ready, self.answers(attempt)
        self.commit(groups)

    def change(self, groups: Sequence[Sequence[Stage]], prepare: bool = True) -> None:
        self.reconfigure(groups, prepare)
        self.settle()

    def settle(self) -> None:
        """Run until every member has finished the last change."""
        self.run_until(lambda: all(e.member.settled for e in self.engines.values()))

    def _plans(self, groups: Sequence[Sequence[Stage]], epoch: int) -> list[GroupPlan]:
        return [
            GroupPlan(
                f"group-{group[0].worker_id}", epoch, [self._plan_of(stage) for stage in group]
            )
            for group in groups
        ]

    def _plan_of(self, stage: Stage) -> MemberPlan:
        engine = self.engines[stage.worker_id]
        nonce = f"what {stage.worker_id} expects in attempt {self._attempts}"
        return MemberPlan(
            stage.worker_id,
            engine.identity.incarnation,
            stage.first_layer,
            stage.end_layer,
            LanePlan(engine.member.links.lane.address, nonce),
            LanePlan(engine.bulk.address, nonce),
            f"address of {stage.worker_id}",
            stage.worker_id in self.draining,
        )

    def lose(self, worker_id: str) -> None:
        """Kill a worker, which ends its requests. The rest of its group stops serving.

        A gateway that `asks_again` retries those without tokens.
        """
        lost_groups = [
            stages for stages in self.groups if any(s.worker_id == worker_id for s in stages)
        ]
        group = lost_groups[0] if lost_groups else []  # the worker served nothing
        self.groups = [stages for stages in self.groups if stages is not group]
        lost = self.engines.pop(worker_id)
        self.network.cut(worker_id)
        lost.close()
        self.epoch += 1
        if self.gateway.asks_again:
            self.gateway.lose(worker_id)
        for request_id, owner in self.owner.items():
            if owner == worker_id:
                self.streams[request_id].aborted = True
        for stage in group:
            if stage.worker_id != worker_id:
                plans = self._plans([[stage]], self.epoch)
                self.engines[stage.worker_id].member.apply(ApplyConfiguration(plans))

    def mend(self, stages: Sequence[Stage]) -> bool:
        """Rebuild a group whose members lost their connections, or else divide it.

        Returns whether it was rebuilt.
        """
        attempt = self.prepare([stages])
        if self.await_answers(attempt, [stages], MEND_TURNS):
            self.commit([stages])
            return True
        self.abort_attempt(attempt, [stages])
        self.groups = [group for group in self.groups if group != list(stages)]
        self.epoch += 1
        for stage in stages:
            plans = self._plans([[stage]], self.epoch)
            self.engines[stage.worker_id].member.apply(ApplyConfiguration(plans))
        self.restore()
        return False

    def restore(self) -> None:
        """Restore all layers at the survivors of groups that lost a member."""
        placed = {stage.worker_id for group in self.groups for stage in group}
        for worker_id in sorted(self.engines.keys() - placed):
            whole = [[self._alone(worker_id)]]
            attempt = self.prepare(whole)
            while not self.await_answers(attempt, whole):
                self.abort_attempt(attempt, whole)  # not yet in an earlier configuration
                attempt = self.prepare(whole)
            self.commit(whole)

    # --- turns

    def turn(self) -> None:
        """Run a random step: an engine's turn, the arrival of a frame, or a piece of a transfer."""
        self.now_s = self.network.now_s()
        actions: list[Callable[[], bool | None]] = [*self.network.deliveries()]
        actions += [partial(self._step, engine) for engine in self.engines.values()]
        actions += [partial(self._step_mover, engine) for engine in self.engines.values()]
        actions += self.gateway.actions()
        actions += self.more_actions()
        worked = self.rng.choice(actions)()
        self._idle_turns = self._idle_turns + 1 if worked is False else 0
        if self._idle_turns > 2 * len(actions):
            self.network.rest()

    def more_actions(self) -> list[Callable[[], bool | None]]:
        """Additional possible steps, for subclasses."""
        return []

    def run_until(self, condition) -> None:  # type: ignore[no-untyped-def]
        """Run until `condition()` holds. Raises AssertionError after too many turns."""
        for _ in range(TURNS_MAX):
            if condition():
                return
            self.turn()
        raise AssertionError(f"stuck: {self.describe()}")

    def finish(self) -> None:
        """Run until every stream has ended and the group is idle."""
        self.run_until(lambda: all(stream.over for stream in self.streams.values()))
        self.settle()
        self.run_until(lambda: all(self._at_rest(e) for e in self.engines.values()))
        self.run_until(lambda: not self.wrong_books())

    def end(self) -> None:
        self.finish()
        self.check_at_rest()

    def describe(self) -> str:
        """A summary for failure messages."""
        left = {k: (self.owner[k], len(s.tokens)) for k, s in self.streams.items() if not s.over}
        settled = {name: engine.member.settled for name, engine in self.engines.items()}
        books = self.wrong_books() if all(settled.values()) else []
        return f"open {left}, settled {settled}, groups {self.groups}, wrong books {books}"

    def wrong_books(self) -> list[str]:
        """Stages whose block counts at the leader differ from their own; empty at rest."""
        return wrong_books(self.engines)

    def check_invariants(self) -> None:
        """Check every planner, table and arena."""
        assert not self.violations, self.violations
        check_engines(self.engines)

    def check_tables(self) -> None:
        """Check that no stream has a foreign token, and that no two sequences share a block."""
        assert not self.violations, self.violations
        for engine in self.engines.values():
            engine.member.state.table.check_invariants()

    def check_at_rest(self) -> None:
        """Check that no block is allocated and no transfer is open."""
        self.check_invariants()
        check_at_rest(self.engines)

    def close(self) -> None:
        """Release all memory."""
        for engine in self.engines.values():
            engine.close()

    def _at_rest(self, engine: Engine) -> bool:
        return at_rest(engine)

    def _step_mover(self, engine: Engine) -> bool:
        return engine.mover.step(self.now_s) <= self.now_s

    def _step(self, engine: Engine) -> bool:
        took = engine.member.take()
        self._hear(engine)
        ran = engine.member.launch(self._interrupts)
        self._hear(engine)
        return took or ran

    def _hear(self, engine: Engine) -> None:
        news = engine.member.take_outbox()
        worker_id = engine.identity.worker_id
        for answer in news.prepared:
            self.prepared[answer.attempt, worker_id] = answer
        for ended in news.shipped:
            self.shipped[ended.order] = ended
        for adopted in news.adopted:
            if not self.gateway.adopted(worker_id, adopted):
                self.take_over(worker_id, adopted)
        for token in news.tokens:
            if not self.gateway.token(worker_id, token):
                self.note_token(worker_id, token)
        for refusal in news.refusals:
            if not self.gateway.refused(worker_id, refusal):
                self.streams[refusal.request_id].refused = refusal.message
        for moved in news.moved:
            self.gateway.moved(worker_id, moved)

    def take_over(self, worker_id: str, adopted: AdoptedRequest) -> None:
        """Attach the reader of a request to the worker that adopted it."""
        stream = self.streams[adopted.request_id]
        # Only the lost worker knew which tokens the client has received.
        known = self.owner[adopted.request_id] in self.engines
        if known and adopted.emitted_ids[: len(stream.tokens)] != stream.tokens:
            self.violations.append(f"{adopted.request_id} was adopted with other tokens")
        missed = adopted.emitted_ids[len(stream.tokens) :]
        stream.tokens += missed
        if missed and adopted.logprobs is not None:
            stream.logprobs += adopted.logprobs.rows(-len(missed)).unpacked()
        if len(missed) == len(stream.tokens) > 0 and adopted.prompt_logprobs is not None:
            stream.prompt_logprobs = adopted.prompt_logprobs.unpacked()
        self.owner[adopted.request_id] = worker_id
        if stream.aborted:
            self.abort(adopted.request_id)
        self._look_for_stop(adopted.request_id)

    def note_token(self, worker_id: str, token: EmitToken) -> None:
        """Deliver a token to the reader of its request."""
        request_id = token.request_id
        stream = self.streams[request_id]
        if stream.aborted:
            return
        if self.owner[request_id] != worker_id or token.index != len(stream.tokens):
            self.violations.append(
                f"{request_id}: token {token.index} of {worker_id}, expected {len(stream.tokens)}"
                f" of {self.owner[request_id]}"
            )
            return
        stream.tokens.append(token.token_id)
        if token.logprobs is not None:
            stream.logprobs += token.logprobs.unpacked()
        if token.prompt_logprobs is not None:
            if stream.prompt_logprobs is not None:
                self.violations.append(f"{request_id}: the prompt's rows come twice")
            stream.prompt_logprobs = token.prompt_logprobs.unpacked()
        stream.finish_reason = token.finish_reason
        self._look_for_stop(request_id)
