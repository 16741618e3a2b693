"""Host copies change no token, despite group changes, aborts and losses.

The integer model (`fake_model`) derives a token from all values that all layers have stored for its
request, so a misplaced block changes it.
"""

import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.common import failpoint
from services.common.event_log import read_config, read_entries
from services.core.audit.engine_history import EngineHistory
from services.core.audit.record import Findings
from services.core.changeover.state import Changeover, MemberConfig
from services.core.host.vocabulary import Save
from services.core.request import Limits, Request, Sampling
from services.worker.engine.host.store import HostStore
from tests.support.engine_networks import QueueNetwork
from tests.support.fake_model import FAKE, expected_tokens, load_fake
from tests.support.group_scenario import Scenario
from tests.support.host_group import HostGroup, host_settings, swap_blocks
from tideserve.sim.replay import WORKER_TYPES, replay

SEEDS = range(int(os.environ.get("TIDESERVE_HOST_SEEDS", "8")))
EVENTS = 12
REQUESTS = 12


def requests() -> list[Request]:
    """Requests, many of which share prompt prefixes."""
    rng, made = random.Random(7), list[Request]()
    for number in range(REQUESTS):
        begin = rng.choice(made).prompt_ids if made and rng.random() < 0.8 else ()
        kept = begin[: rng.randint(0, len(begin))]
        prompt = (*kept, *(rng.randrange(3, 60) for _ in range(rng.randint(10, 40))))[:64]
        made.append(Request(f"r-{number}", prompt, Sampling(0.0), Limits(rng.randint(1, 16)), 0.0))
    return made


class HostScenario(Scenario):
    """Requests with repeated prompts on engines that save and recall; copiers may fail."""

    GROUP = HostGroup
    group: HostGroup

    def __init__(self, seed: int, **options: Any) -> None:
        rng = random.Random(seed)
        settings = host_settings(
            save=rng.choice([Save.ALL, Save.ALL, Save.BATCH]), prefetch=rng.random() < 0.9
        )
        options = {"settings": settings, "host_slots": rng.choice([12, 40, 200])} | options
        super().__init__(FAKE, requests(), seed, QueueNetwork(), load=load_fake, **options)

    def run(self, events: int) -> None:
        for _ in range(4 * events):
            self.arrive()
            self.wait()
            if self.rng.random() < 0.1:
                self.abort()
            if self.rng.random() < 0.005:
                self.group.fail_copier(self.rng)
            self.group.check_invariants()
        super().run(events)

    def check(self) -> None:
        for stream in self.group.streams.values():
            assert not stream.refused
            limits = stream.request.limits
            wanted = expected_tokens(stream.request.prompt_ids, limits.max_tokens)
            assert stream.tokens == (wanted[: len(stream.tokens)] if stream.aborted else wanted)
        self.group.check_owners()


@pytest.fixture
def scenario() -> Iterator[list[HostScenario]]:
    made: list[HostScenario] = []
    yield made
    for scenario in made:
        scenario.group.close()


def ran(seed: int, made: list[HostScenario], **options: Any) -> Counter[str]:
    """Run a scenario; returns the counters of its engines' copies."""
    scenario = HostScenario(seed, **options)
    made.append(scenario)
    scenario.run(EVENTS)
    scenario.check()
    return scenario.group.seen


def test_host_copies_change_no_token(scenario: list[HostScenario]) -> None:
    counts: Counter[str] = Counter()
    for seed in SEEDS:
        counts += ran(seed, scenario)
        scenario.pop().group.close()
    assert counts["saved"] > 10 * len(SEEDS) and counts["recalled"] > 10 * len(SEEDS)
    assert counts["failures"], "no copier has failed"


def audited(made: HostScenario, folder: Path) -> Findings:
    """Run a scenario with logs but without checking its tokens; check that the logs replay."""
    try:
        made.run(EVENTS)
    finally:
        made.group.close()
    findings = Findings()
    for path in folder.iterdir():
        entries = list(read_entries(path, WORKER_TYPES))
        assert replay(Changeover.of(read_config(path, MemberConfig)), entries).difference == ""
        EngineHistory(findings).read(entries)
    return findings


def test_logs_replay_and_pass_the_audit(tmp_path: Path) -> None:
    findings = audited(HostScenario(1, host_slots=200, event_logs=tmp_path), tmp_path)
    assert findings.checks["I12"] > 10 and findings.checks["I13"] > 10
    assert not findings.violations


def test_the_audit_detects_a_swapped_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swap_blocks(monkeypatch)
    monkeypatch.setattr(HostStore, "is_intact", lambda store, slot: True)
    made = HostScenario(1, host_slots=200, event_logs=tmp_path)
    violations = audited(made, tmp_path).violations
    assert any(sentence.startswith("I12: ") for sentence in violations)


def test_a_swapped_block_is_detected(
    scenario: list[HostScenario], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without checksums, two swapped copies make requests read each other's KV."""
    swap_blocks(monkeypatch)
    counts = ran(3, scenario, host_slots=200)
    assert counts["failures"] > 0
    monkeypatch.setattr(HostStore, "is_intact", lambda store, slot: True)
    with pytest.raises(AssertionError):
        for seed in range(10):
            ran(seed, scenario, host_slots=200)


def test_owners_share_no_host_copies(scenario: list[HostScenario]) -> None:
    """The same prompts with another salt have no hits in host memory."""
    made = HostScenario(1, host_slots=200)
    scenario.append(made)
    group, name = made.group, "w0"
    prompts = [request for request in requests() if len(request.prompt_ids) > 20][:12]
    for salt in ("one", "other"):
        before = group.counts(name).recalled_tokens_total
        for number, request in enumerate(prompts):
            group.start(replace(request, request_id=f"{salt}{number}", cache_salt=salt), name)
            group.finish()
        assert group.counts(name).recalled_tokens_total == before, f"hits of salt {salt}"
    for number, request in enumerate(prompts):
        group.start(replace(request, request_id=f"again{number}", cache_salt="one"), name)
        group.finish()
    assert group.counts(name).recalled_tokens_total > before
    made.check()


def test_copies_pass_their_failpoints(scenario: list[HostScenario], tmp_path: Path) -> None:
    names = {f"engine.host.{place}.leader" for place in ("save", "recall", "arrived")}
    failpoint.arm([f"{name}=note" for name in sorted(names)], tmp_path / "hits")
    try:
        ran(1, scenario, host_slots=200)
        assert {hit["name"] for hit in failpoint.read_hits(tmp_path / "hits")} == names
    finally:
        failpoint.arm([], tmp_path / "hits")
