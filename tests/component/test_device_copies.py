"""Merges, exchanges and restores on a GPU whose copies run as late as their events allow.

The memory and the streams are those of a fake driver; the model computes on the processor.
"""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Any

import pytest

from services.worker.engine.compute import assembly
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.compute.runner_config import RunnerConfig
from services.worker.engine.compute.stage_output import LaunchedStage, StageOutput
from services.worker.engine.memory.arena import Arena
from services.worker.engine.memory.budget import MemoryPlan
from services.worker.engine.memory.cuda import CudaArena
from services.worker.engine.memory.device_copies import DeviceCopies, PinnedSlot
from services.worker.engine.pipeline import stage_runner
from services.worker.engine.pipeline.piece_copies import PieceCopies
from services.worker.engine.transfer.frame import Bytes
from tests.support.engine_group import EngineGroup
from tests.support.engine_networks import QueueNetwork
from tests.support.fake_cuda_driver import FakeCudaDriver
from tests.support.fake_streams import FakeStreams
from tests.support.group_scenario import LAYERS, Scenario
from tests.support.undisturbed import Oracle, tight_config

SEEDS = range(48)
SEEDS_OF_FAULTS = range(24)
EVENTS = 8
COPIED_BYTES = 240 << 10  # holds three of the five slabs


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunnerConfig:
    return tight_config(tmp_path_factory.mktemp("models") / "llama", LAYERS)


@pytest.fixture(scope="module")
def oracle(config: RunnerConfig) -> Oracle:
    return Oracle(config)


Drivers = dict[DeviceCopies, FakeStreams]


class AtOnce(Executor):
    """An executor that runs submitted work immediately."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


@pytest.fixture
def drivers(monkeypatch: pytest.MonkeyPatch) -> Drivers:
    """The fake streams of each engine loaded by the test."""
    made: Drivers = {}

    def open_memory(
        config: RunnerConfig, plan: MemoryPlan, block_bytes: int
    ) -> tuple[Arena, DeviceCopies | None]:
        driver = FakeCudaDriver(plan.chunk_bytes, plan.total_chunks)
        streams = FakeStreams(driver, seed=len(made))
        copies = DeviceCopies(streams, block_bytes=block_bytes)
        made[copies] = streams
        sizes = {"chunk_bytes": plan.chunk_bytes, "total_chunks": plan.total_chunks}
        arena = CudaArena(driver, copies.fence, **sizes, maps_later=config.overlap)
        return arena, copies if config.overlap else None

    monkeypatch.setattr(assembly, "open_memory", open_memory)
    monkeypatch.setattr(assembly, "_hashers", lambda config: AtOnce())
    return made


class LateKernels:
    """Delays the kernels of an iteration until its result is collected.

    Between launch and result, movers of the group take steps.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.group: EngineGroup | None = None
        self.steps = 0
        self._launch = ModelRunner._launch
        self._collected = stage_runner._collected
        monkeypatch.setattr(ModelRunner, "_launch", self._launch_late())
        monkeypatch.setattr(stage_runner, "_collected", self._collect_late)

    def _launch_late(self) -> Any:
        launch = self._launch

        def launch_late(runner: ModelRunner, *args: Any, **kwargs: Any) -> LaunchedStage:
            copies = runner.stage_memory.copies
            if copies is None:
                made = launch(runner, *args, **kwargs)
                assert made is not None
                return made
            copies.begin_work()

            def collect() -> StageOutput:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(copies, "begin_work", lambda: None)
                    run = launch(runner, *args, **kwargs)
                    assert run is not None
                    return run.collect()

            return LaunchedStage(None, collect)

        return launch_late

    def _collect_late(self, run: LaunchedStage | None, meanwhile: Any) -> StageOutput | None:
        if self.group is not None:
            for engine in self.group.engines.values():
                for _ in range(self.group.rng.randrange(4)):
                    engine.mover.step(self.group.now_s)
                    self.steps += 1
        return self._collected(run, meanwhile)


def run(
    config: RunnerConfig,
    oracle: Oracle,
    seed: int,
    drivers: Drivers,
    kernels: LateKernels | None = None,
) -> Counter[str]:
    """Run a scenario and compare its tokens; returns counts of the streams' actions.

    With odd seeds, members hold copies of some layers in host memory.
    """
    config = replace(config, host_weights_bytes=seed % 2 * COPIED_BYTES)
    scenario = Scenario(config, oracle.requests, seed, QueueNetwork())
    streams = []
    if kernels is not None:
        kernels.group = scenario.group
    try:
        for engine in scenario.group.engines.values():
            copies = engine.runner.stage_memory.copies
            if copies is None:
                continue
            streams.append(drivers[copies])
            streams[-1].locks.append(engine.member.stage.lock)
        scenario.run(events=EVENTS)
        for stream in scenario.group.streams.values():
            assert not stream.refused
            oracle.check(stream)
    finally:
        if kernels is not None:
            kernels.group = None
        scenario.group.close()
    for engine_streams in streams:
        check_log(engine_streams.log)
    return Counter(f"{action} {stream}" for each in streams for action, stream, _ in each.log)


def check_log(log: list[tuple[str, str, int]]) -> None:
    """Check that every copy waits for launched work and is followed by an event."""
    recorded = waited = 0
    for place, (action, stream, number) in enumerate(log):
        if (action, stream) == ("record", "work"):
            recorded = number
        elif (action, stream) == ("wait", "copies"):
            assert 0 < number <= recorded
            waited = place
        elif action in ("gather", "scatter", "read", "write"):
            assert waited == place - 1, "a copy does not wait for work"
            assert log[place + 1] == ("record", "copies", number)


@pytest.mark.parametrize("seed", SEEDS)
def test_late_copies_change_no_token(
    config: RunnerConfig, oracle: Oracle, drivers: Drivers, seed: int
) -> None:
    run(config, oracle, seed, drivers)


@pytest.mark.parametrize("seed", SEEDS)
def test_copies_during_an_iteration_change_no_token(
    config: RunnerConfig,
    oracle: Oracle,
    drivers: Drivers,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    kernels = LateKernels(monkeypatch)
    run(config, oracle, seed, drivers, kernels)
    assert kernels.steps


@pytest.mark.parametrize("seed", SEEDS[:4])
def test_copies_between_iterations_change_no_token(
    config: RunnerConfig, oracle: Oracle, drivers: Drivers, seed: int
) -> None:
    assert not run(replace(config, overlap=False), oracle, seed, drivers)


def test_the_scenarios_copy_in_both_directions_and_wait_for_copies(
    config: RunnerConfig, oracle: Oracle, drivers: Drivers
) -> None:
    seen: Counter[str] = Counter()
    for seed in SEEDS[:12]:
        seen += run(config, oracle, seed, drivers)
    wanted = [
        f"{action} copies" for action in ("gather", "scatter", "read", "write", "synchronize")
    ]
    assert all(seen[each] for each in [*wanted, "wait work"]), seen


def without_waits(copies: DeviceCopies) -> None:
    """Remove the wait of work for copies."""
    copies._work = copies._streams.record_work()


def pack_with_the_lock(
    copies: PieceCopies, target: Bytes, read: Callable[[PinnedSlot], None]
) -> None:
    """Make the mover wait for the device while it holds the stage's lock."""
    device = copies.stage.runner.stage_memory.copies
    assert device is not None
    slot = device.take(target.size)
    with copies.stage.lock:
        read(slot)
        slot.wait()
    target[:] = slot.bytes
    device.give_back(slot)


@pytest.mark.parametrize(
    ("owner", "name", "fault", "noticed"),
    [
        (DeviceCopies, "begin_work", without_waits, None),  # wrong content or tokens
        (PieceCopies, "pack", pack_with_the_lock, "with a lock held"),
    ],
)
def test_missing_waits_are_detected(
    config: RunnerConfig,
    oracle: Oracle,
    drivers: Drivers,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    fault: Callable[..., object],
    noticed: str | None,
) -> None:
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises(AssertionError, match=noticed):
        for seed in SEEDS_OF_FAULTS:
            run(config, oracle, seed, drivers)
