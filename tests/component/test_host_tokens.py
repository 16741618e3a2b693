"""Tokens of a real model with host copies: batch work that yields, divisions of groups, losses."""

import os
from collections import Counter
from typing import Any

import pytest

from services.core.host.vocabulary import Save
from tests.support import division_scenario
from tests.support.class_scenario import ClassScenario
from tests.support.division_scenario import DivisionScenario
from tests.support.group_scenario import LAYERS, Scenario
from tests.support.host_group import HostGroup, host_settings
from tests.support.undisturbed import Oracle, tight_config

SEEDS = range(int(os.environ.get("TIDESERVE_HOST_SEEDS", "5")))
EVENTS, DIVISION_EVENTS = 18, 4


class SomeHostGroup(HostGroup):
    """Room for few, some or many copies, by the seed; without prefetch for each fifth."""

    def __init__(self, *given: Any, **options: Any) -> None:
        seed = given[2]
        settings = host_settings(
            save=Save.BATCH if seed % 4 == 3 else Save.ALL, prefetch=seed % 5 != 4
        )
        slots = (200, 30, 8)[seed % 3]
        super().__init__(*given, host_slots=slots, settings=settings, **options)


class HostClassScenario(ClassScenario):
    """Requests of both classes."""

    GROUP = SomeHostGroup


class HostDivisionScenario(DivisionScenario):
    """Groups of four that divide, while a worker may die."""

    GROUP = SomeHostGroup


def copied(scenario: Scenario) -> Counter[str]:
    """What the engines that live have copied."""
    seen: Counter[str] = Counter()
    for engine in scenario.group.engines.values():
        host = engine.member.state.host
        assert host is not None
        seen["saved"] += host.counts.saved_blocks_total
        seen["recalled"] += host.counts.recalled_tokens_total
    return seen


def check(scenario: Scenario, oracle: Oracle) -> None:
    for stream in scenario.group.streams.values():
        assert not stream.refused, stream.refused
        oracle.check(stream)


def test_batch_work_that_yields_comes_back_from_the_host(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    config = tight_config(tmp_path_factory.mktemp("models") / "llama", LAYERS)
    oracle, seen = Oracle(config), Counter[str]()
    for seed in SEEDS:
        scenario = HostClassScenario(config, oracle.requests, seed)
        try:
            scenario.run(EVENTS)
            check(scenario, oracle)
            seen += copied(scenario) + scenario.seen
        finally:
            scenario.group.close()
    assert seen["saved"] and seen["recalled"] and seen["yielded"], seen


def test_copies_outlive_divisions_of_groups(tmp_path_factory: pytest.TempPathFactory) -> None:
    config = tight_config(tmp_path_factory.mktemp("models") / "llama", division_scenario.LAYERS)
    oracle, seen = Oracle(config), Counter[str]()
    for seed in SEEDS:
        scenario = HostDivisionScenario(config, oracle.requests, seed)
        try:
            scenario.run(DIVISION_EVENTS)
            check(scenario, oracle)
            seen += copied(scenario) + scenario.seen
        finally:
            scenario.group.close()
    assert seen["saved"] and seen["divided"], seen
