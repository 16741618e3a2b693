"""Engines ship running requests to each other; tokens equal those of an undisturbed run."""

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import psutil
import pytest

from services.core.groups.layer_map import Stage
from services.core.request import Limits, Request, Sampling
from services.core.shipments import outgoing
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.compute.runner_config import RunnerConfig
from services.worker.engine.transfer import receiver, sender
from tests.support.engine_networks import QueueNetwork
from tests.support.generation import generate_tokens
from tests.support.shipping_group import ShippingGroup
from tests.support.undisturbed import Oracle, tight_config

OUTPUT = 200
BLOCK = 4
MOVES = int(os.environ.get("TIDESERVE_SHIPPED_MOVES", "10000"))


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> RunnerConfig:
    return tight_config(tmp_path_factory.mktemp("ship") / "model", layers=3)


@pytest.fixture(scope="module")
def oracle(tight: RunnerConfig) -> Oracle:
    return Oracle(tight)


@pytest.fixture(scope="module")
def config(tight: RunnerConfig) -> RunnerConfig:
    return roomy(tight)


def roomy(tight: RunnerConfig) -> RunnerConfig:
    return replace(tight, budget_bytes=tight.budget_bytes + (1 << 20))


@pytest.fixture
def group(config: RunnerConfig) -> Iterator[ShippingGroup]:
    # Parts arrive long before any timeout.
    made = ShippingGroup(config, 2, seed=3, network=QueueNetwork(turn_s=0.001))
    yield made
    made.close()


def request(number: int, prompt: int = 60, output: int = OUTPUT) -> Request:
    rng = random.Random(number)
    ids = tuple(rng.randrange(3, 300) for _ in range(prompt))
    sampling = Sampling(0.0) if number % 2 else Sampling(0.9, 0.95, 20, number)
    return Request(f"r-{number}", ids, sampling, Limits(output), 0.0)


def undisturbed(config: RunnerConfig, requests: list[Request]) -> list[list[int]]:
    runner = ModelRunner.load(config)
    try:
        return [
            generate_tokens(
                runner,
                [request.prompt_ids],
                max_tokens=request.limits.max_tokens,
                seed=0,
                samplings=[request.sampling],
            )[0]
            for request in requests
        ]
    finally:
        runner.close()


def test_a_request_moves_with_its_kv(
    group: ShippingGroup, config: RunnerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outgoing, "GROWTH_BLOCKS", 100)  # parts take many iterations here
    moving = request(1)
    group.start(moving, "w0")
    stream = group.streams["r-1"]
    group.run_until(lambda: len(stream.tokens) > 20)
    answer = group.move("w0", "w1", 1)
    assert (answer.moved, answer.kept) == (1, 0)
    group.run_until(lambda: group.counts("w1").received_total == 1)
    assert group.owner["r-1"] == "w1"
    assert not group.engines["w0"].member.state.sequences
    group.end()
    assert stream.tokens == undisturbed(config, [moving])[0]
    ran = sum(engine.member.iteration_tokens.total for engine in group.engines.values())
    tokens_max = len(moving.prompt_ids) + OUTPUT - 1
    assert tokens_max <= ran <= tokens_max + BLOCK + 1


@pytest.mark.parametrize("seed", range(6))
def test_moves_change_no_token_of_any_request(
    seed: int, tight: RunnerConfig, oracle: Oracle
) -> None:
    """Grammars, penalties, log probabilities and seeds, moved often, at any token, both ways."""
    group = ShippingGroup(roomy(tight), 3, seed, max_batch_tokens=24)
    rng = group.rng
    try:
        for left, right in (("w0", "w1"), ("w1", "w2"), ("w0", "w2")):
            group.introduce(left, right)
        for request in rng.sample(oracle.requests, 24):
            group.start(request)
            for _ in range(rng.randrange(60)):
                group.turn()
            source, target = rng.sample(sorted(group.engines), 2)
            group.ship(source, target, rng.randrange(3))
            group.carry(rng.choice([0, 0, 50, 150]))
        group.end()
        for stream in group.streams.values():
            assert not stream.refused
            oracle.check(stream)
        assert group.gateway.shipped > 0
    finally:
        group.close()


@pytest.mark.parametrize("seed", range(4))
def test_groups_may_change_while_requests_move(
    seed: int, tight: RunnerConfig, oracle: Oracle
) -> None:
    group = ShippingGroup(roomy(tight), 2, seed, max_batch_tokens=24)
    rng = group.rng
    half = group.num_layers // 2 + 1
    merged = [[Stage("w0", 0, half), Stage("w1", half, group.num_layers)]]
    apart = [[Stage(name, 0, group.num_layers)] for name in ("w0", "w1")]
    try:
        for groups in (merged, apart, merged, apart):
            for request in rng.sample(oracle.requests, 4):
                name = f"{len(group.streams)}-{request.request_id.split('-')[1]}"
                group.start(replace(request, request_id=name))
            if groups is merged:
                group.introduce("w0", "w1")
                for _ in range(rng.randrange(80)):
                    group.turn()
                for source, target in (("w0", "w1"), ("w1", "w0")):
                    group.ship(source, target)
            group.reconfigure(groups)
            group.settle()
        group.end()
        for stream in group.streams.values():
            oracle.check(stream)
    finally:
        group.close()


@pytest.mark.parametrize("seed", range(4))
def test_a_connection_may_break_while_requests_move(
    seed: int, tight: RunnerConfig, oracle: Oracle
) -> None:
    network = QueueNetwork()
    group = ShippingGroup(roomy(tight), 2, seed, max_batch_tokens=24, network=network)
    rng = group.rng
    try:
        for request in rng.sample(oracle.requests, 16):
            group.start(request)
            group.introduce("w0", "w1")
            for _ in range(rng.randrange(60)):
                group.turn()
            group.ship(*rng.sample(("w0", "w1"), 2))
            for _ in range(rng.randrange(30)):
                group.turn()
            network.part("w0", "w1", rng.choice([("w0", "w1"), ("w0",), ("w1",)]))
            network.notify_break("w0", "w1")
        group.end()
        for stream in group.streams.values():
            oracle.check(stream)
    finally:
        group.close()


@pytest.mark.parametrize(("seed", "lost"), [(1, "w0"), (2, "w1"), (3, "w0"), (4, "w1")])
def test_a_worker_may_die_while_requests_move(
    seed: int, lost: str, tight: RunnerConfig, oracle: Oracle
) -> None:
    group = ShippingGroup(roomy(tight), 3, seed, max_batch_tokens=24)
    rng = group.rng
    try:
        for request in rng.sample(oracle.requests, 12):
            group.start(request, "w0")
        group.introduce("w0", "w1")
        group.run_until(lambda: sum(bool(stream.tokens) for stream in group.streams.values()) > 4)
        group.ship("w0", "w1")
        for _ in range(rng.randrange(200)):
            group.turn()
        group.lose(lost)
        group.end()
        for stream in group.streams.values():
            oracle.check(stream)
    finally:
        group.close()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_moves_in_a_row(config: RunnerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests move back and forth: memory grows by less than 1 KiB per move."""
    for module in (receiver, sender):  # the history of transfers grows up to this number
        monkeypatch.setattr(module, "ENDED_MAX", 100)
    kinds = [request(number, 40, 300) for number in range(8)]
    expected = undisturbed(config, kinds)
    group = ShippingGroup(config, 2, seed=1)
    process, numbers = psutil.Process(), count()
    early: tuple[int, int] | None = None  # (moves, memory) after part of the moves
    try:
        while (moves := group.gateway.shipped) < MOVES:
            if early is None and moves > MOVES // 10:
                early = moves, process.memory_info().rss
            while len(group.streams) < len(kinds):
                number = next(numbers)
                kind = kinds[number % len(kinds)]
                group.start(replace(kind, request_id=f"{number % len(kinds)}-{number}"))
            for _ in range(40):
                group.turn()
            group.introduce("w0", "w1")
            for source, target in (("w0", "w1"), ("w1", "w0")):
                group.ship(source, target)
            group.carry(220)
            for name in [name for name, stream in group.streams.items() if stream.over]:
                stream = group.streams.pop(name)
                assert stream.tokens == expected[int(name.partition("-")[0])]
                del group.owner[name]
            group.shipped.clear()
        assert early is not None
        grown = process.memory_info().rss - early[1]
        group.end()
        assert grown < 1024 * (moves - early[0]), f"{grown} bytes"
    finally:
        group.close()
