"""The group protocol, real engines and the gateway's attempts together, under faults."""

import os

import pytest

from services.worker.engine.compute.runner_config import RunnerConfig
from tests.support.joined_world import JoinedWorld
from tests.support.undisturbed import Oracle, tight_config

LAYERS = 4
SEEDS = int(os.environ.get("TIDESERVE_JOINED_SEEDS", "40"))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunnerConfig:
    return tight_config(tmp_path_factory.mktemp("models") / "llama", LAYERS)


@pytest.fixture(scope="module")
def oracle(config: RunnerConfig) -> Oracle:
    return Oracle(config)


def live(config: RunnerConfig, oracle: Oracle, seed: int) -> JoinedWorld:
    world = JoinedWorld(config, oracle.requests, seed)
    try:
        world.run()
        for client in world.gateway.clients.values():
            assert not client.stream.refused, (seed, client.request_id, client.stream.refused)
            oracle.check(client.stream)
    finally:
        world.close()
    return world


@pytest.mark.parametrize("seed", range(SEEDS))
def test_requests_get_their_tokens_whatever_fails(
    config: RunnerConfig, oracle: Oracle, seed: int
) -> None:
    live(config, oracle, seed)
