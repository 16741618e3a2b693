"""Idle profiling: when it runs, and its side effects."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from services.common import config as config_module
from services.common.device_profile import load_profile
from services.core.cost.model import CostModel
from services.core.groups.layer_map import Stage
from services.core.planner.config import IterationConfig
from services.core.planner.events import CostModelLearned
from services.core.planner.state import PlannerState
from services.core.request import Limits, Request, Sampling
from services.worker.config import WorkerConfig
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.compute.runner_config import RunnerConfig
from services.worker.engine.process import idle_profiler
from services.worker.engine.profile import idle, measurer, session
from services.worker.engine.profile.batches import Effort
from services.worker.engine.profile.idle import IdleProfiler
from services.worker.engine.profile.measurer import Measurer, batch_limits_of
from services.worker.engine.profile.session import ProfileSession
from services.worker.ipc import StartRequest
from tests.support.engine_group import EngineGroup
from tests.support.engine_inbox import open_inbox
from tests.support.lone_member import lone_member
from tests.support.tiny_models import make_tiny_model

TINY = Effort(
    prefixes=(0, 32),
    new_tokens=(2, 16),
    decodes=(1, 4),
    contexts=(16, 64),
    held_out_each=2,
    target_s=0.0,
)


def no_request() -> bool:
    """Report that no request is present."""
    return False


@pytest.fixture(autouse=True)
def any_noise_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept any noise, as tests run on busy machines."""
    monkeypatch.setattr(session, "QUIET_NOISE_MAX", 1e9)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), dtype=torch.float32)


@pytest.fixture
def config(model_dir: Path) -> RunnerConfig:
    return RunnerConfig(
        model_dir=model_dir,
        device="cpu",
        dtype=torch.float32,
        budget_bytes=24 << 20,
        max_batch_tokens=64,
        max_running=16,
        max_model_len=256,
        threads=1,
    )


@pytest.fixture
def runner(config: RunnerConfig) -> Iterator[ModelRunner]:
    runner = ModelRunner.load(config)
    yield runner
    runner.close()


@pytest.fixture
def state(runner: ModelRunner) -> PlannerState:
    return PlannerState(
        IterationConfig(
            block_size=runner.block_size,
            num_blocks=runner.num_blocks,
            max_batch_tokens=64,
            max_running=16,
            max_waiting=16,
        )
    )


@pytest.fixture
def profiler(
    runner: ModelRunner,
    state: PlannerState,
    config: RunnerConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> IdleProfiler:
    monkeypatch.setattr(idle, "MIN_IDLE_S", 0.0)
    own = ProfileSession(TINY, batch_limits_of(runner, 64, 16))
    measurer = Measurer(runner, state.pool.borrow)
    path = tmp_path / "p" / "mine.yaml"

    def adopt(model: CostModel) -> None:
        state.handle(CostModelLearned(model))

    return IdleProfiler(own, measurer, runner, config, 1, path, adopt)


def test_profiling_waits_for_an_idle_engine(
    profiler: IdleProfiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert profiler.step(no_request)
    monkeypatch.setattr(idle, "MIN_IDLE_S", 60.0)
    profiler.note_work()
    assert not profiler.step(no_request)
    assert not (tmp_path / "p").exists()


def test_profiling_stores_a_profile_and_frees_its_blocks(
    profiler: IdleProfiler, state: PlannerState, runner: ModelRunner, tmp_path: Path
) -> None:
    while profiler.step(no_request):
        state.check_invariants()
        assert state.pool.free_count == runner.num_blocks
    profile = load_profile(tmp_path / "p" / "mine.yaml")
    assert profile.model.batch_s([(0, 16)]) > 0
    assert state.config.cost_model == profile.model, "it is used at once"
    assert profile.accuracy is not None
    assert profile.kv_bytes_per_token == runner.kv_bytes_per_token
    assert not profiler.step(no_request), "it is done"


def test_profiling_yields_within_a_batch(
    profiler: IdleProfiler, state: PlannerState, runner: ModelRunner, tmp_path: Path
) -> None:
    """An interrupted measurement is not recorded and holds no block."""
    asked: list[int] = []

    def at_the_second_layer() -> bool:
        asked.append(1)
        return len(asked) % 2 == 0

    for _ in range(1000):
        assert profiler.step(at_the_second_layer)
    assert len(asked) == 2000, "two layers each time"
    assert state.pool.free_count == runner.num_blocks
    assert not (tmp_path / "p").exists()


def test_measurements_on_a_busy_machine_are_not_stored(
    profiler: IdleProfiler,
    state: PlannerState,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(session, "QUIET_NOISE_MAX", -1.0)
    while profiler.step(no_request):
        pass
    assert "nothing is stored" in caplog.text
    assert not (tmp_path / "p").exists()
    assert state.config.cost_model is None


def test_a_profile_of_a_crowded_machine_is_stored_with_a_warning(
    profiler: IdleProfiler,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(session, "CPU_SHARE_MIN", 2.0)
    while profiler.step(no_request):
        pass
    assert "had a processor for only" in caplog.text
    assert (tmp_path / "p" / "mine.yaml").exists()


def test_the_processor_share_covers_only_the_batches(
    runner: ModelRunner, state: PlannerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = {
        "monotonic_s": iter([0.0, 2.0, 10.0, 12.0]),
        "thread_cpu_s": iter([5.0, 6.0, 7.0, 9.0]),
    }
    for name, values in clocks.items():
        monkeypatch.setattr(measurer, name, values.__next__)
    measured = Measurer(runner, state.pool.borrow)
    assert measured.cpu_share == 1.0
    for share in (0.5, 0.75):
        assert measured.duration_s(((0, 2),)) == 2.0
        assert measured.cpu_share == share


def test_a_folder_that_cannot_be_written_is_only_a_warning(
    profiler: IdleProfiler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "p").write_text("a file where the folder should be")
    while profiler.step(no_request):
        pass
    assert "cannot be stored" in caplog.text


def test_the_loop_profiles_only_without_requests(
    profiler: IdleProfiler,
    state: PlannerState,
    runner: ModelRunner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request that arrives between two measured batches runs at the next step."""
    steps: list[int] = []
    real_step = profiler.step

    def counted(interrupted: Callable[[], bool]) -> bool:
        assert not state.sequences
        steps.append(1)
        return real_step(interrupted)

    monkeypatch.setattr(profiler, "step", counted)
    with open_inbox(runner.grammars) as inbox:
        loop = inbox.loop(lone_member(state, runner), profiler=profiler)
        loop.step(0)
        loop.step(0)
        assert len(steps) == 2
        request = Request("a", (5, 6, 7), Sampling(0.0), Limits(max_tokens=3), 0.0)
        inbox.send(StartRequest(request))
        for _ in range(3):
            loop.step(0)
        assert len(steps) == 2, "three iterations, nothing else"
        assert not state.sequences
        loop.step(0)
        assert len(steps) == 3
        state.check_invariants()


def test_a_survivor_is_profiled_only_after_its_layers_are_restored(config: RunnerConfig) -> None:
    profiler = Mock(step=Mock(return_value=True))
    group = EngineGroup(config, workers=2, seed=1)
    try:
        group.change([[Stage("w0", 0, 1), Stage("w1", 1, 2)]])
        survivor = group.engines["w0"].member
        group.lose("w1")
        group.settle()
        with open_inbox(group.engines["w0"].runner.grammars) as inbox:
            loop = inbox.loop(survivor, profiler=profiler)
            for _ in range(20):
                loop.step(0)
            assert not survivor.busy_changing, "only the missing layers prevent a measurement"
            profiler.step.assert_not_called()
            group.restore()
            group.settle()
            while not profiler.step.called:
                loop.step(0)
    finally:
        group.close()


def worker_config(model_dir: Path, **values: Any) -> WorkerConfig:
    given = {
        "worker_id": "worker-0",
        "etcd_url": "http://127.0.0.1:1",
        "model_name": "tiny",
        "model_dir": str(model_dir),
        "run_dir": "/nowhere",
        "memory_bytes": 24 << 20,
        "dtype": "float32",
        "max_batch_tokens": 64,
        "max_running": 16,
    }
    return config_module.from_mapping(WorkerConfig, given | values, "a test")


def test_only_an_unpaced_worker_with_a_folder_profiles_when_idle(
    runner: ModelRunner, state: PlannerState, model_dir: Path, tmp_path: Path
) -> None:
    member = lone_member(state, runner)

    def wanted(**values: Any) -> bool:
        return idle_profiler(runner, member, worker_config(model_dir, **values)) is not None

    folder = str(tmp_path / "profiles")
    assert wanted(profile_dir=folder)
    assert not wanted()
    assert not wanted(profile_dir=folder, profile_when_idle=False)
    assert not wanted(profile_dir=folder, paced="A100-14B")


def test_a_stored_profile_is_not_measured_again(
    runner: ModelRunner,
    state: PlannerState,
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A damaged profile is measured again."""
    monkeypatch.setattr(idle, "MIN_IDLE_S", 0.0)
    monkeypatch.setattr("services.worker.engine.process.IDLE", TINY)
    own, member = worker_config(model_dir, profile_dir=str(tmp_path)), lone_member(state, runner)
    profiler = idle_profiler(runner, member, own)
    assert profiler is not None
    while profiler.step(no_request):
        member.changeover.check_invariants()
    assert member.cost_origin == "idle" and state.config.cost_model is not None
    assert idle_profiler(runner, member, own) is None
    (stored,) = tmp_path.glob("*.yaml")
    stored.write_text("name: [")
    assert idle_profiler(runner, member, own) is not None
