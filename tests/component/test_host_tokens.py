"""KV in host memory changes no token of a real model.

Batch requests yield, groups merge and split, workers and copiers are lost, and copies are
interrupted anywhere: a block may move while it is copied, and its waiting request may end.
"""

import os
import random
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.common.event_log import read_config, read_entries
from services.core.audit.engine_history import EngineHistory
from services.core.audit.record import Findings
from services.core.changeover.state import Changeover, MemberConfig
from services.core.host.vocabulary import Save
from services.core.planner import prefix_cache
from services.core.planner.sequence_ids import request_id_of
from services.core.prefix.block_hash import prompt_root
from services.core.request import Request
from services.worker.engine.compute.runner_config import RunnerConfig
from services.worker.engine.host.store import HostStore
from tests.support import division_scenario
from tests.support.class_scenario import ClassScenario
from tests.support.division_scenario import DivisionScenario
from tests.support.group_scenario import LAYERS
from tests.support.host_group import HostGroup, host_settings, swap_blocks
from tests.support.undisturbed import Oracle, tight_config
from tideserve.sim.replay import WORKER_TYPES, replay

SCENARIOS = int(os.environ.get("TIDESERVE_HOST_SCENARIOS", "5"))
DIVISIONS = int(os.environ.get("TIDESERVE_HOST_DIVISIONS", "1"))
EVENTS, DIVISION_EVENTS = 18, 4
SLOTS = (8, 30, 200)
"""Store sizes: fewer blocks than the longest request has, a scarce store, and a roomy store."""
SALTS = ("", "", "other")
PROMPTS, PROMPT_MIN = 6, 20
FIRST = 3
"""First seed: the next few scenarios include every kind of event."""
LOGGED = 4
"""One of this many scenarios writes event logs, without relocating blocks."""
SWAPPED, SHARED = 4, 3
"""Seeds of scenarios with swapped blocks, and with blocks shared between owners."""


def options(seed: int) -> dict[str, Any]:
    """Options of host memory by seed; every fifth seed has no prefetch."""
    settings = host_settings(save=Save.BATCH if seed % 4 == 3 else Save.ALL, prefetch=seed % 5 != 4)
    return {"host_slots": SLOTS[seed % len(SLOTS)], "settings": settings}


class HostClassScenario(ClassScenario):
    """A few repeated prompts of two owners; copiers fail."""

    GROUP = HostGroup
    group: HostGroup
    relocates = True
    copiers_failed = 0

    def arrive(self) -> None:
        for _ in range(3):
            super().arrive()
            for _ in range(6):
                self.group.turn()

    def wait(self) -> None:
        if self._chances.random() < 0.1:
            self.group.fail_copier(self._chances)
            self.copiers_failed += 1
        for _ in range(self._chances.randint(1, 80)):
            self.group.turn()
            if self.relocates and self._chances.random() < 0.1:
                self.group.relocate(self._chances)

    def abort(self) -> None:
        """Abort a request that waits for its recall, if there is one."""
        pins = {
            request_id_of(sequence.seq_id)
            for engine in self.group.engines.values()
            for sequence in engine.member.state.sequence_table.waiting
            if sequence.pin
        }
        waiting = sorted(name for name in pins if not self.group.streams[name].over)
        if waiting:
            self.seen["aborted recalls"] += 1
            self.group.abort(self._chances.choice(waiting))
        else:
            super().abort()


class HostDivisionScenario(DivisionScenario):
    """Groups of four that split; a worker may die."""

    GROUP = HostGroup
    group: HostGroup


def some_owned(requests: list[Request], seed: int) -> list[Request]:
    """A few of the requests with longer prompts, for each owner."""
    long = [request for request in requests if len(request.prompt_ids) > PROMPT_MIN]
    few = random.Random(f"prompts {seed}").sample(long, PROMPTS)
    return [replace(request, cache_salt=salt) for request in few for salt in SALTS]


def ran(
    config: RunnerConfig, oracle: Oracle, seed: int, event_logs: Path | None = None
) -> HostClassScenario:
    """Run a scenario to its end and close its engines."""
    requests = some_owned(oracle.requests, seed)
    scenario = HostClassScenario(config, requests, seed, event_logs=event_logs, **options(seed))
    scenario.relocates = event_logs is None
    with closing(scenario.group):
        scenario.run(EVENTS)
        scenario.seen += scenario.group.seen
    return scenario


def check(scenario: HostClassScenario, oracle: Oracle) -> None:
    scenario.check_streams(oracle)
    scenario.group.check_owners()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunnerConfig:
    return tight_config(tmp_path_factory.mktemp("models") / "llama", LAYERS)


@pytest.fixture(scope="module")
def oracle(config: RunnerConfig) -> Oracle:
    return Oracle(config)


def audit(folder: Path, findings: Findings) -> None:
    """Replay the logs in `folder`, and audit them."""
    for path in sorted(folder.iterdir()):
        entries = list(read_entries(path, WORKER_TYPES))
        assert replay(Changeover.of(read_config(path, MemberConfig)), entries).difference == ""
        EngineHistory(findings).read(entries)


def test_host_memory_changes_no_token(config: RunnerConfig, oracle: Oracle, tmp_path: Path) -> None:
    seen, findings = Counter[str](), Findings()
    for seed in range(FIRST, FIRST + SCENARIOS):
        logs = tmp_path if seed % LOGGED == LOGGED - 1 else None
        scenario = ran(config, oracle, seed, logs)
        check(scenario, oracle)
        seen += scenario.seen
        if logs is not None:
            audit(logs, findings)
            for path in logs.iterdir():
                path.unlink()
    wanted = ("saved", "recalled", "yielded", "killed", "cancelled midway", "moved", "failures")
    assert all(seen[kind] for kind in wanted), seen
    assert findings.checks["I12"] and findings.checks["I13"]
    # A request that is asked for again at its worker has its first tokens twice in the log (I5).
    assert not [text for text in findings.violations if text.startswith(("I12", "I13"))]


def test_copies_survive_splits_of_groups(tmp_path_factory: pytest.TempPathFactory) -> None:
    config = tight_config(tmp_path_factory.mktemp("models") / "llama", division_scenario.LAYERS)
    oracle, seen = Oracle(config), Counter[str]()
    for seed in range(DIVISIONS):
        scenario = HostDivisionScenario(
            config, some_owned(oracle.requests, seed), seed, **options(seed)
        )
        with closing(scenario.group):
            scenario.run(DIVISION_EVENTS)
            for stream in scenario.group.streams.values():
                assert not stream.refused, stream.refused
                oracle.check(stream)
            scenario.group.check_owners()
            seen += scenario.group.seen + scenario.seen
    assert seen["saved"] and seen["divided"], seen


def test_a_swapped_block_is_detected(
    config: RunnerConfig, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without checksums, two swapped copies cause tokens of another request."""
    swap_blocks(monkeypatch)
    scenario = ran(config, oracle, SWAPPED)
    check(scenario, oracle)
    assert scenario.seen["failures"] > scenario.copiers_failed
    monkeypatch.setattr(HostStore, "is_intact", lambda store, slot: True)
    streams = ran(config, oracle, SWAPPED).group.streams.values()
    assert any(
        stream.tokens != oracle.tokens(stream.request) for stream in streams if not stream.aborted
    )


def test_hits_of_another_owner_are_detected(
    config: RunnerConfig, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The salt is omitted from the hashes of blocks."""
    monkeypatch.setattr(prefix_cache, "prompt_root", lambda salt: prompt_root(""))
    with pytest.raises(AssertionError, match="hits of another owner"):
        check(ran(config, oracle, SHARED), oracle)
