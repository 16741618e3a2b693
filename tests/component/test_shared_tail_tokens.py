"""Sharing of tail blocks (`block_sharing`) changes no token."""

import os
from collections import Counter
from collections.abc import Iterable

import pytest

from services.core.queue_order import Scheduling
from services.worker.engine.compute.runner_config import RunnerConfig
from services.worker.engine.memory.stage_memory import StageMemory
from tests.support.class_scenario import ClassScenario
from tests.support.group_scenario import LAYERS
from tests.support.undisturbed import Oracle, tight_config

SCENARIOS = int(os.environ.get("TIDESERVE_SHARING_SCENARIOS", "40"))
EVENTS = 10
SCHEDULINGS = (Scheduling.SLO, Scheduling.CONSERVE, Scheduling.BROS)


class SharingScenario(ClassScenario):
    """Batch requests fill the memory of each worker before online requests grow."""

    def arrive(self) -> None:
        for _ in range(3):
            super().arrive()
            for _ in range(4):
                self.group.turn()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunnerConfig:
    return tight_config(tmp_path_factory.mktemp("models") / "llama", LAYERS)


@pytest.fixture(scope="module")
def oracle(config: RunnerConfig) -> Oracle:
    return Oracle(config)


def _run(config: RunnerConfig, oracle: Oracle, seeds: Iterable[int]) -> Counter[str]:
    """Run scenarios with shared tails, interruptions, aborts, merges, splits and lost workers."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        scheduling = SCHEDULINGS[seed % len(SCHEDULINGS)]
        scenario = SharingScenario(config, oracle.requests, seed, scheduling, block_sharing=True)
        try:
            scenario.run(EVENTS)
            scenario.check_streams(oracle)
        finally:
            scenario.group.close()
        seen += scenario.seen
    return seen


@pytest.mark.timeout(300 + 5 * SCENARIOS)
def test_shared_tails_change_no_token(config: RunnerConfig, oracle: Oracle) -> None:
    seen = _run(config, oracle, range(SCENARIOS))
    wanted = ("shared", "lost tails", "suspended", "yielded", "killed")
    assert all(seen[kind] for kind in wanted), seen


def test_an_early_overwritten_entry_is_detected(
    config: RunnerConfig, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch sequence's entries stay where the online sequence writes its own."""
    monkeypatch.setattr(StageMemory, "turn_tails", lambda *_: None)
    with pytest.raises(AssertionError):
        _run(config, oracle, range(SCENARIOS))
