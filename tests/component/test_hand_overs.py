"""Engines hand over requests after their prompt; tokens equal those of an undisturbed run."""

import os
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from services.core.destination import Destination
from services.core.request import Limits, Request, Sampling
from services.core.shipments import incoming
from services.worker.engine.compute.runner_config import RunnerConfig
from tests.component.test_shipments import roomy, undisturbed
from tests.support.engine_networks import QueueNetwork
from tests.support.group_scenario import LAYERS
from tests.support.hand_over_scenario import HandOverScenario
from tests.support.shipping_group import ShippingGroup
from tests.support.undisturbed import Oracle, tight_config

BLOCK = 4
EVENTS = 40
SEEDS = int(os.environ.get("TIDESERVE_HAND_OVER_SEEDS", "6"))


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> RunnerConfig:
    return tight_config(tmp_path_factory.mktemp("hand-overs") / "model", layers=LAYERS)


@pytest.fixture(scope="module")
def oracle(tight: RunnerConfig) -> Oracle:
    return Oracle(tight)


@pytest.fixture
def group(tight: RunnerConfig) -> Iterator[ShippingGroup]:
    network = QueueNetwork(turn_s=0.001)
    made = ShippingGroup(roomy(tight), 2, seed=5, max_batch_tokens=24, network=network)
    yield made
    made.close()


def request(output: int) -> Request:
    ids = tuple(random.Random(4).randrange(3, 300) for _ in range(60))
    place = Destination("w1", "address of w1", "group-w1", 1)
    return replace(Request("r-1", ids, Sampling(0.0), Limits(output), 0.0), hand_to=place)


def connect(group: ShippingGroup) -> None:
    group.introduce("w0", "w1")
    connections = group.engines["w0"].member._connections
    group.run_until(lambda: connections.reaches("w1"))


def test_the_target_generates_the_output(group: ShippingGroup, tight: RunnerConfig) -> None:
    connect(group)
    asked = request(40)
    group.start(asked, "w0")
    group.run_until(lambda: group.owner["r-1"] == "w1")
    group.end()
    assert group.streams["r-1"].tokens == undisturbed(roomy(tight), [asked])[0]
    counts = group.counts("w0")
    assert (counts.handed_over_total, counts.hand_overs_kept_total) == (1, 0)
    assert group.counts("w1").received_total == 1
    ran = [engine.member.iteration_tokens.total for engine in group.engines.values()]
    assert sum(ran) <= 60 + 40 - 1 + BLOCK + 1


def test_without_a_connection_the_source_generates_the_output(
    group: ShippingGroup, tight: RunnerConfig
) -> None:
    asked = request(40)
    group.start(asked, "w0")
    group.end()
    assert group.streams["r-1"].tokens == undisturbed(roomy(tight), [asked])[0]
    counts = group.counts("w0")
    assert group.owner["r-1"] == "w0"
    assert (counts.handed_over_total, counts.hand_overs_kept_total) == (0, 1)


@pytest.mark.timeout(300 + 5 * SEEDS)
def test_hand_overs_change_no_token(tight: RunnerConfig, oracle: Oracle) -> None:
    """Random hand-overs, moves, merges, splits, broken connections and deaths.

    In float64; `TIDESERVE_HAND_OVER_SEEDS` scenarios, of which 500 suffice.
    """
    totals = [0, 0, 0, 0]
    for seed in range(SEEDS):
        scenario = run(tight, oracle, seed)
        numbers = (scenario.handed, scenario.kept, scenario.merges, scenario.splits)
        totals = [a + b for a, b in zip(totals, numbers, strict=True)]
    handed, kept, merges, splits = totals
    assert handed > 2 * SEEDS and kept > SEEDS / 2 and merges > SEEDS / 2 and splits > SEEDS / 4


def run(tight: RunnerConfig, oracle: Oracle, seed: int) -> HandOverScenario:
    scenario = HandOverScenario(tight, oracle.requests, seed)
    try:
        scenario.run(EVENTS)
        for stream in scenario.group.streams.values():
            assert not stream.refused, stream.refused
            oracle.check(stream)
    finally:
        scenario.close()
    return scenario


def test_missing_kv_is_detected(
    tight: RunnerConfig, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens of the test above depend on the sent KV."""
    everything = property(lambda landing: len(landing.hashes))
    monkeypatch.setattr(incoming._Landing, "whole", everything)
    with pytest.raises(AssertionError):
        for seed in range(SEEDS):
            run(tight, oracle, seed)
