"""An engine in a test's process: a real arena, planner, mover and model, over given lanes."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Semaphore
from typing import Any

from services.common.event_log import EventLog
from services.core.changeover.state import Changeover, MemberConfig
from services.core.planner.block_table import StageTable
from services.core.planner.config import IterationConfig
from services.core.queue_order import Scheduling
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.host.copier import HostCopier
from services.worker.engine.host.driver import HostDriver
from services.worker.engine.host.lane import HostLane
from services.worker.engine.host.store import HostStore
from services.worker.engine.pipeline.fact_log import FactLog
from services.worker.engine.pipeline.links import Links
from services.worker.engine.pipeline.member import Member
from services.worker.engine.pipeline.piece_copies import PieceCopies
from services.worker.engine.pipeline.stage_runner import StageRunner
from services.worker.engine.process import kv_layout
from services.worker.engine.transfer.gate import ActivationGate
from services.worker.engine.transfer.lane import Identity, Lane
from services.worker.engine.transfer.mover import Mover, MoverConfig
from services.worker.engine.transfer.receiver import EpochStatusOf, Unpack
from tests.support.engine_networks import EngineNetwork

PIECE_BLOCKS = 3
"""Blocks of a piece that a `SteppedCopier` copies, so that a job has several."""
COPIER_TIMEOUT_S = 60.0


class SteppedCopier(HostCopier):
    """A copier of which each `step` runs up to the next piece, or to the end of a task.

    A thread of its own runs each task, but only within `step`, so that everything else may happen
    between two pieces. `fail` ends it where it is. `seen` counts the jobs that were "cancelled",
    "cancelled midway" and "lost midway", and copies whose blocks were "moved" between two pieces.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._piece_blocks = PIECE_BLOCKS
        self._tasks_thread = ThreadPoolExecutor(max_workers=1)
        self._task: Future[bool] | None = None
        self._go, self._paused = Semaphore(0), Semaphore(0)
        self._failed = False
        self._blocks: dict[tuple[int, int], int] = {}  # (job, place) → device block
        self.seen: Counter[str] = Counter()

    @property
    def is_alive(self) -> bool:
        return not self._failed

    def fail(self) -> None:
        """The copier's thread fails."""
        self.seen["lost midway"] += self._task is not None
        self._failed = True

    def cancel(self, job: int) -> None:
        known = self._jobs.get(job)
        self.seen["cancelled"] += known is not None
        self.seen["cancelled midway"] += known is not None and known not in self._tasks
        super().cancel(job)

    def step(self, wait_s: float) -> bool:
        if not self._failed and (self._tasks or self._task is not None):
            self._resume()
        return not self._failed

    def close(self) -> None:
        super().close()
        while self._task is not None:
            self._resume()
        self._tasks_thread.shutdown()

    def _resume(self) -> None:
        if self._task is None:
            self._task = self._tasks_thread.submit(self._run_task)
            self._task.add_done_callback(lambda _: self._paused.release())
        self._go.release()
        assert self._paused.acquire(timeout=COPIER_TIMEOUT_S), "the copier waits for something"
        if self._task.done():
            ended, self._task = self._task, None
            ended.result()

    def _run_task(self) -> bool:
        self._go.acquire()
        return super().step(0.0)

    def _copy_piece(self, *piece: Any) -> None:
        self._paused.release()
        self._go.acquire()
        super()._copy_piece(*piece)

    def _device_blocks(self, job: Any, places: Sequence[int]) -> list[int]:
        blocks = super()._device_blocks(job, places)
        for place, block in zip(places, blocks, strict=True):
            before = self._blocks.setdefault((job.command.job, place), block)
            self.seen["moved"] += before != block
            self._blocks[job.command.job, place] = block
        return blocks


@dataclass
class Engine:
    """One worker's engine."""

    identity: Identity
    member: Member
    mover: Mover
    bulk: Lane
    copier: SteppedCopier | None = None  # copies KV to and from host memory

    def close(self) -> None:
        """Release its memory and descriptors."""
        self.mover.close()
        if self.copier is not None:
            self.copier.close()
        self.bulk.close()
        self.member.links.lane.close()
        self.runner.close()

    @property
    def runner(self) -> ModelRunner:
        return self.member.stage.runner


def make_engine(
    identity: Identity,
    runner: ModelRunner,
    network: EngineNetwork,
    now_s: Callable[[], float],
    *,
    max_batch_tokens: int,
    max_running: int,
    prefix_caching: bool = False,
    event_logs: Path | None = None,
    machine: type[Changeover] = Changeover,
    planner: Mapping[str, Any] | None = None,
    ships: bool = False,
    host_slots: int = 0,
) -> Engine:
    """An engine without a configuration or a thread; `now_s` is its clock.

    It writes its event log to `event_logs`. `machine` is its change-over state machine. `planner`:
    more fields of the planner's configuration. `ships`: it ships KV of running requests.
    `host_slots`: KV blocks
    in host memory, for a planner that has `host`.
    """
    made_with = IterationConfig(
        block_size=runner.block_size,
        num_blocks=runner.num_blocks,
        max_batch_tokens=max_batch_tokens,
        max_running=max_running,
        max_waiting=1000,
        min_microbatch_tokens=4,
        prefix_caching=prefix_caching,
        **{"scheduling": Scheduling.FCFS, **(planner or {})},  # the policy slo needs a cost model
    )
    memory, worker_id = runner.stage_memory, identity.worker_id
    member_config = MemberConfig(
        worker_id,
        memory.num_layers,
        memory.tied_embeddings,
        made_with,
        process=identity.incarnation,
        kv_layout=kv_layout(runner) if ships else "",
    )
    log = EventLog(event_logs, worker_id, member_config) if event_logs is not None else None
    changeover = machine.of(member_config)
    state = changeover.planner
    facts = FactLog(log, state, memory, now_s)
    facts.start(identity, memory.plan.arena_bytes + memory.plan.staging_bytes, exact=True)
    stage = StageRunner(runner, state.table)
    host = _host(changeover, stage, host_slots) if host_slots else None
    activations, bulk = network.lanes(identity)
    gate = ActivationGate()
    settings = MoverConfig(chunk_bytes=4096)
    movers: list[Mover] = []

    def create_mover(is_current: EpochStatusOf, unpack: Unpack) -> Mover:
        movers.append(Mover(bulk, gate, settings, is_current, unpack))
        return movers[0]

    member = Member(
        identity,
        changeover,
        stage,
        Links(activations, worker_id, gate),
        bulk,
        create_mover,
        now_s,
        facts,
        host=host and host[0],
    )
    return Engine(identity, member, movers[0], bulk, host and host[1])


def _host(
    changeover: Changeover, stage: StageRunner, slots: int
) -> tuple[HostDriver, SteppedCopier]:
    """Host copies of an engine, with a copier that has no thread."""
    tier, memory = changeover.planner.host, stage.runner.stage_memory
    assert tier is not None
    layers, layer_bytes = memory.num_layers, memory.kv_ranges[0].shape.size_bytes
    store = HostStore(layers, layer_bytes, slots * layers * layer_bytes, lambda: 1 << 40)
    copier = SteppedCopier(PieceCopies(stage), memory, store, tier.block_of)
    lane = HostLane(tier.settings.block_bytes / tier.settings.link_bytes_per_s)
    return HostDriver(store, copier, lane, tier), copier


def wrong_books(engines: Mapping[str, Engine]) -> list[str]:
    """Stages whose block counts at the leader differ from their own; empty at rest."""
    wrong = []
    for engine in engines.values():
        configuration, ledger = (
            engine.member.configuration,
            engine.member.state.sequence_table.ledger,
        )
        if configuration is None or not configuration.leads:
            continue
        counted = zip(configuration.stages[1:], ledger.used, ledger.capacity, strict=True)
        for stage, used, capacity in counted:
            table = engines[stage.worker_id].member.state.table
            pool = table.pool
            if (used, capacity) != (table.block_count, pool.usable):
                wrong.append(
                    f"{stage.worker_id} uses {table.block_count} of {pool.usable} blocks,"
                    f" {engine.identity.worker_id} counts {used} of {capacity}"
                )
    return wrong


def check_engines(engines: Mapping[str, Engine]) -> None:
    """Check every planner, table and arena."""
    for engine in engines.values():
        if engine.member.configuration is None or engine.member.configuration.leads:
            engine.member.state.check_invariants()
        engine.runner.check_invariants()


def at_rest(engine: Engine) -> bool:
    """Whether no request holds a block, and nothing is in flight."""
    return not engine.member.state.table.seq_ids and not engine.member.state.in_flight


def check_at_rest(engines: Mapping[str, Engine]) -> None:
    """Check that no block is allocated and no transfer is open."""
    for engine in engines.values():
        table: StageTable = engine.member.state.table
        table.check_invariants()
        assert not table.seq_ids, f"{engine.identity.worker_id} keeps {table.seq_ids}"
        assert table.pool.free_count == table.pool.usable
        load = engine.member.state.load()
        assert (load.running, load.waiting) == (0, 0)
        assert load.kv_blocks_free == load.kv_blocks_total, f"{engine.identity}: {load}"
    assert not wrong_books(engines), wrong_books(engines)
