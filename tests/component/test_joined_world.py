"""The group protocol, real engines and the gateway's attempts together, under random faults.

`TIDESERVE_JOINED_SEEDS=5000 make test TESTS=tests/component/test_joined_world.py` runs more worlds.
A failure names its seed and the last events; PYTEST_ARGS="-k 'whatever_fails[SEED]'" repeats it.
"""

import os

import pytest

from services.worker.engine.compute.runner_config import RunnerConfig
from tests.support.group_store import Violated
from tests.support.joined_removals import REMOVED
from tests.support.joined_world import JoinedWorld, Rules
from tests.support.undisturbed import Oracle, tight_config

LAYERS = 4
SEEDS = range(int(os.environ.get("TIDESERVE_JOINED_SEEDS", "60")))
"""Number of worlds; each takes half a second to a second of a core."""
BATCHES = 10
DIVIDING_SEEDS = range(int(os.environ.get("TIDESERVE_DIVIDING_SEEDS", "120")))
"""Worlds whose groups also split into smaller groups."""
DIVIDING_QUICK = 12
GIVEN_BACK = (16, 25, 30)
"""Worlds that lose a member of a group whose leader can share requests."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunnerConfig:
    return tight_config(tmp_path_factory.mktemp("models") / "llama", LAYERS)


@pytest.fixture(scope="module")
def oracle(config: RunnerConfig) -> Oracle:
    return Oracle(config)


def live(
    config: RunnerConfig, oracle: Oracle, seed: int, rules: Rules | None = None
) -> JoinedWorld:
    """Run a world to its end, and compare its tokens with undisturbed runs."""
    world = JoinedWorld(config, oracle.requests, seed, rules or Rules())
    try:
        world.run(oracle.check)
    finally:
        world.close()
    return world


@pytest.mark.parametrize("seed", SEEDS)
def test_requests_get_their_tokens_whatever_fails(
    config: RunnerConfig, oracle: Oracle, seed: int
) -> None:
    live(config, oracle, seed)


@pytest.mark.parametrize(
    "seed",
    [
        *DIVIDING_SEEDS[:DIVIDING_QUICK],
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in DIVIDING_SEEDS[DIVIDING_QUICK:]),
    ],
)
def test_requests_get_their_tokens_while_groups_split_into_smaller_groups(
    config: RunnerConfig, oracle: Oracle, seed: int
) -> None:
    live(config, oracle, seed, Rules(divides=True))


def test_the_worlds_cover_their_faults(config: RunnerConfig, oracle: Oracle) -> None:
    worlds = [live(config, oracle, seed) for seed in range(BATCHES)]
    assert sum(world.control.committed for world in worlds) >= BATCHES, "hardly anything changed"
    assert sum(world.gateway.resumed for world in worlds) > 0, "no request lost its worker"
    ends = {client.stream.aborted for world in worlds for client in world.gateway.clients.values()}
    assert ends == {True, False}
    divided = [live(config, oracle, seed, Rules(divides=True)).divided for seed in range(3)]
    assert sum(divided) > 0, "no group split into smaller groups"


def test_leaders_of_divided_groups_return_requests(config: RunnerConfig, oracle: Oracle) -> None:
    returned = [live(config, oracle, seed).gateway.returned for seed in GIVEN_BACK]
    assert sum(returned) > 0, "no leader gave a request back"


@pytest.mark.parametrize(
    ("removed", "seed"),
    [
        ("start over", 7),
        ("reports of trouble", 7),
        ("renewal", 12),
        ("farewell", 27),
        ("desertion", 13),
        ("division", 7),
        ("a look at lanes", 5),
        ("leaving the lost", 5),
        ("settlement", 1),
        ("resume", 1),
    ],
)
def test_every_recovery_rule_is_needed(
    config: RunnerConfig, oracle: Oracle, removed: str, seed: int
) -> None:
    """Without the rule the world of this seed fails; with it, it succeeds."""
    live(config, oracle, seed)
    with pytest.raises(Violated):
        live(config, oracle, seed, REMOVED[removed])
