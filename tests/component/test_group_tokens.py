"""Requests of groups that merge and split get the tokens of an undisturbed run."""

import itertools
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer

from services.core.changeover.kv_exchange import SequenceMove
from services.core.groups.layer_map import Stage
from services.core.planner import sequence
from services.core.planner.budget import Spent
from services.core.planner.events import RequestAborted, RequestArrived
from services.core.planner.packing import Replaceable
from services.core.planner.sequence_ids import request_id_of
from services.core.request import (
    Limits,
    Request,
    Sampling,
)
from services.worker.engine.compute.runner_config import RunnerConfig
from services.worker.engine.memory.stage_memory import StageMemory
from services.worker.engine.pipeline.member import Member
from services.worker.engine.transfer.errors import UcxUnavailable
from services.worker.engine.transfer.ucx_transport import load_ucxx
from tests.support import division_scenario
from tests.support.class_scenario import ClassScenario
from tests.support.division_scenario import DivisionScenario
from tests.support.engine_group import EngineGroup
from tests.support.engine_networks import EngineNetwork, QueueNetwork, UcxNetwork
from tests.support.group_scenario import LAYERS, Scenario, split_in
from tests.support.tiny_models import EOS_TOKEN_ID
from tests.support.undisturbed import CHUNK_BYTES, REQUESTS, Oracle, tight_config

EVENTS = 8
OVER_UCX = 25
"""One of this many scenarios uses real lanes between its engines."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunnerConfig:
    """The budget fits parameters and staging only; tests add memory for KV."""
    return tight_config(tmp_path_factory.mktemp("models") / "llama", LAYERS)


@pytest.fixture(scope="module")
def oracle(config: RunnerConfig) -> Oracle:
    return Oracle(config)


def members(group: EngineGroup) -> list[Member]:
    return [engine.member for engine in group.engines.values()]


def roomy(config: RunnerConfig) -> RunnerConfig:
    return replace(config, budget_bytes=config.budget_bytes + (1 << 20))


def start_all(group: EngineGroup, oracle: Oracle, numbers: Iterable[int]) -> None:
    for number in numbers:
        group.start(replace(oracle.requests[number], request_id=f"{number}-{number}"))


def ucx_network() -> EngineNetwork:
    """A UCX network; skips the test without UCX."""
    try:
        load_ucxx()
    except UcxUnavailable as error:
        pytest.skip(str(error))
    return UcxNetwork()


SCENARIOS = range(int(os.environ.get("TIDESERVE_SCENARIOS", "1000")))
"""Members cache prefixes in every second scenario."""
CLASS_SCENARIOS = int(os.environ.get("TIDESERVE_CLASS_SCENARIOS", "14"))
CLASS_AT_ONCE = 14
CLASS_EVENTS = 18
QUICK = 120
"""Number of scenarios that run in `make test`; the rest are in `make test-slow`."""


@pytest.mark.parametrize(
    "seed",
    [
        *SCENARIOS[:QUICK],
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in SCENARIOS[QUICK:]),
    ],
)
def test_random_interleavings_change_no_token(
    config: RunnerConfig, oracle: Oracle, seed: int
) -> None:
    network: EngineNetwork = QueueNetwork()
    if seed % OVER_UCX == 0:
        network = ucx_network()
    scenario = Scenario(config, oracle.requests, seed, network)
    try:
        scenario.run(events=EVENTS)
        for stream in scenario.group.streams.values():
            assert not stream.refused
            oracle.check(stream)
    finally:
        scenario.group.close()


@pytest.mark.parametrize("first", range(0, CLASS_SCENARIOS, CLASS_AT_ONCE))
def test_preempted_batch_requests_change_no_token(
    config: RunnerConfig, oracle: Oracle, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are interrupted before any layer, yield KV, rest on shelves, and lose their worker.

    With `packing`, they also fill the turns of online requests.
    """
    seen: Counter[str] = Counter()
    give = Replaceable.take_next

    def counted(self: Replaceable, spent: Spent) -> sequence.Sequence | None:
        given = give(self, spent)
        seen["turns"] += given is not None
        return given

    monkeypatch.setattr(Replaceable, "take_next", counted)
    for seed in range(first, min(first + CLASS_AT_ONCE, CLASS_SCENARIOS)):
        scenario = ClassScenario(config, oracle.requests, seed)
        try:
            scenario.run(CLASS_EVENTS)
            scenario.check_streams(oracle)
        finally:
            scenario.group.close()
        seen += scenario.seen
    if first == 0 and CLASS_SCENARIOS >= CLASS_AT_ONCE:
        wanted = (
            "suspended",
            "resumed",
            "discarded",
            "yielded",
            "rested",
            "killed, special",
            "turns",
        )
        assert all(seen[event] for event in wanted), seen


DIVISIONS = int(os.environ.get("TIDESERVE_DIVISIONS", "512"))
DIVISIONS_AT_ONCE = 2 * len(division_scenario.MOMENTS)
DIVISION_EVENTS = 4


@pytest.fixture(scope="module")
def four_layers(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunnerConfig, Oracle]:
    config = tight_config(tmp_path_factory.mktemp("models") / "llama", division_scenario.LAYERS)
    return config, Oracle(config)


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=pytest.mark.slow if first else ())
        for first in range(0, DIVISIONS, DIVISIONS_AT_ONCE)
    ],
)
def test_splits_into_smaller_groups_change_no_token(
    four_layers: tuple[RunnerConfig, Oracle], first: int
) -> None:
    """4 → 2+2 → 1, 2+2 → 4 and 3 → 2+1; mostly a worker dies in a phase of a change."""
    config, oracle = four_layers
    seen: Counter[str] = Counter()
    for seed in range(first, first + DIVISIONS_AT_ONCE):
        scenario = DivisionScenario(config, oracle.requests, seed)
        try:
            scenario.run(DIVISION_EVENTS)
            for stream in scenario.group.streams.values():
                assert not stream.refused, f"{seed}: {stream.refused}"
                oracle.check(stream)
                assert stream.tokens == oracle.tokens(stream.request), seed
        finally:
            scenario.group.close()
        seen += scenario.seen
    assert seen["divided"] >= DIVISIONS_AT_ONCE / 2, seen
    assert seen["prepared"] and seen["committed"], seen


def test_undisturbed_runs_cover_all_options(config: RunnerConfig, oracle: Oracle) -> None:
    """Finished outputs match their grammar; all kinds of log probabilities are requested."""
    tokenizer = Tokenizer.from_file(str(config.model_dir / "tokenizer.json"))
    ended = 0
    for request in oracle.requests:
        grammar, tokens = request.sampling.grammar, oracle.tokens(request)
        if grammar is None or tokens[-1] != EOS_TOKEN_ID:
            continue
        ended += 1
        assert re.fullmatch(grammar.text, tokenizer.decode(tokens[:-1]))
    assert ended >= 2
    assert {request.logprobs.output for request in oracle.requests} == {None, 0, 3}
    assert {request.logprobs.prompt for request in oracle.requests} == {None, 0, 2}


def test_a_swapped_block_is_detected(
    config: RunnerConfig, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Comparing tokens detects an exchange that swaps two blocks."""
    unpack = StageMemory.unpack_kv
    first_of: dict[tuple[int, int], int] = {}
    swaps = 0

    def swapped(
        self: StageMemory, layer: int, block_ids: Sequence[int], payload: torch.Tensor
    ) -> None:
        # Not of the same piece, as attention ignores the order of whole blocks.
        nonlocal swaps
        ids = list(block_ids)
        first = first_of.setdefault((id(self), layer), ids[0])
        if first != ids[0] and not swaps:
            ids[0] = first
            swaps += 1
        unpack(self, layer, ids, payload)

    monkeypatch.setattr(StageMemory, "unpack_kv", swapped)
    longest = [request for request in oracle.requests if len(request.prompt_ids) > 30][:4]
    with closing(EngineGroup(roomy(config), 2, seed=2)) as group:
        for number, request in enumerate(longest):
            name = f"{number}-{request.request_id.split('-')[1]}"
            group.start(replace(request, request_id=name))
        group.run_until(lambda: all(stream.tokens for stream in group.streams.values()))
        group.reconfigure([split_in(["w0", "w1"], [1])])
        group.finish()
        assert swaps == 1
        assert any(
            stream.tokens != oracle.tokens(stream.request) for stream in group.streams.values()
        )


@pytest.mark.parametrize("leaves", ["w0", "w1"])
def test_a_leaving_member_hands_over_all_requests(
    config: RunnerConfig, oracle: Oracle, leaves: str
) -> None:
    """A leader or follower leaves its group; all its requests continue elsewhere."""
    with closing(EngineGroup(roomy(config), 2, seed=1)) as group:
        group.reconfigure([split_in(["w0", "w1"], [1])])
        start_all(group, oracle, range(6))
        group.run_until(lambda: any(stream.tokens for stream in group.streams.values()))
        group.draining = {leaves}
        group.change([[Stage("w0", 0, LAYERS)], [Stage("w1", 0, LAYERS)]])
        assert not group.engines[leaves].member.state.sequences
        group.end()
        for stream in group.streams.values():
            assert stream.tokens == oracle.tokens(stream.request)


@pytest.mark.parametrize("lost", ["w0", "w1"])
@pytest.mark.parametrize("turns", [0, 30, 200])
def test_the_survivor_of_a_group_serves_again(
    config: RunnerConfig, oracle: Oracle, lost: str, turns: int
) -> None:
    """A leader or follower dies during or after the exchange; the other restores all layers.

    It recomputes its own requests; those of the lost worker end.
    """
    left = "w1" if lost == "w0" else "w0"
    with closing(EngineGroup(roomy(config), 2, seed=turns)) as group:
        start_all(group, oracle, range(6))
        for _ in range(100):
            group.turn()
        group.reconfigure([split_in(["w0", "w1"], [1])])
        for _ in range(turns):
            group.turn()
        group.lose(lost)
        group.run_until(lambda: group.engines[left].member.settled)
        led = [stream for stream in group.streams.values() if not stream.over]
        group.restore()
        serves_on(group, oracle)
        for stream in led:
            assert stream.tokens == oracle.tokens(stream.request)


@pytest.mark.parametrize("spread", [True, False])
@pytest.mark.parametrize("lost", ["w1", "w2"])
def test_members_of_a_divided_group_share_its_requests(
    config: RunnerConfig, oracle: Oracle, lost: str, spread: bool
) -> None:
    """A follower of three dies: its leader keeps half of the requests to recompute."""
    with closing(
        EngineGroup(
            replace(config, budget_bytes=config.budget_bytes + 64 * LAYERS * CHUNK_BYTES),
            3,
            seed=7,
            planner={"spread_after_loss": spread},
        )
    ) as group:
        group.gateway.asks_again = group.gateway.resumes = group.gateway.balances = True
        group.change([split_in(["w0", "w1", "w2"], [1, 2])])
        start_all(group, oracle, range(9))
        group.run_until(lambda: sum(bool(stream.tokens) for stream in group.streams.values()) >= 6)
        open_ones = [name for name, stream in group.streams.items() if not stream.over]
        group.lose(lost)
        whole = [[Stage(name, 0, LAYERS)] for name in group.engines]
        attempt = group.prepare(whole)
        assert group.await_answers(attempt, whole)
        group.commit(whole)
        serves_on(group, oracle)
        for stream in group.streams.values():
            assert not stream.refused, stream.refused
            assert stream.tokens == oracle.tokens(stream.request)
        assert not group.violations
        readers = Counter(group.owner[name] for name in open_ones)
        if spread:
            assert group.gateway.returned == group.gateway.asked > 0
            assert readers.keys() == group.engines.keys()
        else:
            assert group.gateway.asked == 0 and readers.keys() == {"w0"}


@pytest.mark.parametrize("late", ["w0", "w1"])
def test_a_member_that_missed_a_split_does_not_wait_for_others_kv(
    config: RunnerConfig, oracle: Oracle, late: str
) -> None:
    """It was partitioned from the records, and gets a group of its own with its layers.

    The others have continued without it. It recomputes its requests.
    """
    with closing(EngineGroup(roomy(config), 2, seed=1)) as group:
        group.change([split_in(["w0", "w1"], [1])])
        start_all(group, oracle, range(6))
        group.run_until(lambda: sum(bool(stream.tokens) for stream in group.streams.values()) >= 3)
        alone = [[Stage(name, 0, LAYERS)] for name in ("w0", "w1")]
        attempt = group.prepare(alone)
        assert group.await_answers(attempt, alone)
        group.commit(alone, (late,))
        group.commit([[Stage(late, 0, LAYERS)]])
        serves_on(group, oracle)
        for stream in group.streams.values():
            assert stream.tokens == oracle.tokens(stream.request)


CUTS = range(int(os.environ.get("TIDESERVE_CUT_SCENARIOS", "40")))


def test_disconnected_members_lose_no_request(config: RunnerConfig, oracle: Oracle) -> None:
    """The lanes of a live member are cut: during the exchange, under load, or when idle."""
    rebuilt = [cut_scenario(config, oracle, seed) for seed in CUTS]
    assert {True, False} == set(rebuilt), "groups are rebuilt or divided"


def cut_scenario(config: RunnerConfig, oracle: Oracle, seed: int) -> bool:
    """Returns whether the group was rebuilt."""
    rng = random.Random(seed)
    names = ["w0", "w1", "w2"][: rng.choice([2, 3])]
    room = rng.choice([8, 16, 64]) * LAYERS * CHUNK_BYTES
    roomy = replace(config, budget_bytes=config.budget_bytes + room)
    with closing(EngineGroup(roomy, len(names), seed, prefix_caching=seed % 2 == 1)) as group:
        group.gateway.asks_again = group.gateway.resumes = True
        start_all(group, oracle, range(4))
        for _ in range(rng.randint(0, 100)):
            group.turn()
        rng.shuffle(names)
        stages = split_in(names, sorted(rng.sample(range(1, LAYERS), len(names) - 1)))
        group.reconfigure([stages])
        if rng.random() < 0.6:
            group.settle()
        start_all(group, oracle, range(4, 8))
        for _ in range(rng.randint(0, 150)):
            group.turn()
        group.network.cut(rng.choice(names))
        for _ in range(rng.randint(0, 40)):
            group.turn()
        rebuilt = group.mend(stages)
        serves_on(group, oracle)
        for stream in group.streams.values():
            wanted = oracle.tokens(stream.request)
            assert stream.tokens == wanted, (seed, stream)
    return rebuilt


def serves_on(group: EngineGroup, oracle: Oracle) -> None:
    """Check that further requests get their tokens and leave no state."""
    start_all(group, oracle, range(10, 14))
    group.end()
    for number in range(10, 14):
        stream = group.streams[f"{number}-{number}"]
        assert stream.tokens == oracle.tokens(stream.request)


def retried_scenario(
    config: RunnerConfig, requests: list[Request], seed: int, *, resumes: bool = False
) -> EngineGroup:
    """Lose members while groups change; requests without a token are retried.

    If the gateway `resumes`, others are resumed after their tokens.
    """
    rng = random.Random(seed)
    kv_bytes = rng.choice([5, 8, 16, 32]) * LAYERS * CHUNK_BYTES
    engines = rng.choice([2, 3, 3, 4])
    group = EngineGroup(
        replace(config, budget_bytes=config.budget_bytes + kv_bytes),
        engines,
        seed,
        max_batch_tokens=rng.choice([8, 16, 64]),  # prompts have up to 40
        max_running=8,
    )
    group.gateway.asks_again = True
    group.gateway.resumes = resumes
    numbers = iter(range(100))

    def start(count: int) -> None:
        for number in itertools.islice(numbers, count if group.groups else 0):
            request = rng.choice(requests)
            name = f"{number}-{request.request_id.split('-')[1]}"
            group.start(replace(request, request_id=name))

    def turns(most: int) -> None:
        for _ in range(rng.randint(0, most)):
            group.turn()
            group.check_tables()

    names = rng.sample(sorted(group.engines), min(engines, LAYERS))
    group.reconfigure([split_in(names, sorted(rng.sample(range(1, LAYERS), len(names) - 1)))])
    targets = parted(names, rng)
    group.draining = set(rng.sample(names, 1)) if rng.random() < 0.7 else set()
    start(rng.randint(2, 4))
    turns(60)
    attempt = group.prepare(targets)
    ready = group.await_answers(attempt, targets)
    start(rng.randint(2, 5))
    turns(15)
    if ready:
        group.commit(targets)
    else:
        group.abort_attempt(attempt, targets)
    for _ in range(rng.choice([5, 20, 60, 150])):
        if group.gateway.to_ask_for(names[1:]):
            break  # at a worker whose KV others also hold
        group.turn()
    open_ones = [name for name, stream in group.streams.items() if group.gateway.would_ask(stream)]
    for name in rng.sample(open_ones, min(len(open_ones), rng.randint(0, 2))):
        group.gateway.hang_up(name)
    turns(rng.choice([0, 0, 10]))
    group.lose(rng.choice(group.gateway.to_ask_for(names[1:]) or names))
    start(rng.randint(0, 3))
    turns(40)
    group.restore()
    return group


def parted(names: list[str], rng: random.Random) -> list[list[Stage]]:
    """A random layout of `names`: all alone, or one pair and the rest alone."""
    if len(names) == 2 or rng.random() < 0.5:
        return [[Stage(name, 0, LAYERS)] for name in names]
    pair = rng.sample(names, 2)
    alone = [[Stage(name, 0, LAYERS)] for name in names if name not in pair]
    return [split_in(pair, [rng.randint(1, LAYERS - 1)]), *alone]


@pytest.mark.parametrize("seed", range(int(os.environ.get("TIDESERVE_RESUMED_SCENARIOS", "30"))))
def test_requests_resume_after_their_tokens_wherever_the_leader_is_lost(
    config: RunnerConfig, oracle: Oracle, seed: int
) -> None:
    """Penalties, grammars, sampling and log probabilities, while groups change."""
    with closing(retried_scenario(config, oracle.requests, 1000 + seed, resumes=True)) as group:
        group.end()
        for stream in group.streams.values():
            assert not stream.refused, stream.refused
            assert stream.finish_reason is not None
            oracle.check(stream)
            assert stream.tokens == oracle.tokens(stream.request)
        assert not group.violations


RETRIED = range(int(os.environ.get("TIDESERVE_RETRIED_SCENARIOS", "20")))


@pytest.mark.parametrize("seed", RETRIED)
def test_a_retried_request_is_unaffected_by_its_first_sequence(
    config: RunnerConfig, oracle: Oracle, seed: int
) -> None:
    """Late orders, KV, adoption and tokens of the first sequence have no effect."""
    with closing(retried_scenario(config, oracle.requests, seed)) as group:
        group.end()
        for stream in group.streams.values():
            assert not stream.refused, stream.refused
            oracle.check(stream)


@pytest.mark.parametrize("late", [(), ("w0",)])
@pytest.mark.parametrize("turns", [0, 4])
def test_a_survivor_that_had_not_switched_keeps_its_prepared_layers(
    config: RunnerConfig, oracle: Oracle, late: tuple[str, ...], turns: int
) -> None:
    """A commit assigns more layers to the worker; the other dies before it has switched.

    It may not even have received that commit.
    """
    with closing(EngineGroup(roomy(config), 2, seed=1)) as group:
        group.change([split_in(["w0", "w1"], [1])])
        start_all(group, oracle, range(6))
        group.run_until(lambda: any(stream.tokens for stream in group.streams.values()))
        targets = [split_in(["w0", "w1"], [2])]
        attempt = group.prepare(targets)
        assert group.await_answers(attempt, targets)
        left = group.engines["w0"].member
        group.commit(targets, ("w1", *late))  # a leader waits for members in the old configuration
        for _ in range(turns):
            group.turn()
        assert left.links.epoch < group.epoch, "it should not have switched yet"
        group.lose("w1")
        group.run_until(lambda: left.links.epoch == group.epoch and left.settled)
        assert list(left.stage.runner.stage_memory.layers) == [0, 1]
        group.reconfigure([[Stage("w0", 0, LAYERS)]])
        serves_on(group, oracle)


def is_dealt(group: EngineGroup, worker_id: str) -> bool:
    """Whether another leader is handing a request to that worker."""
    return any(
        worker_id in member.changeover._handover.pending.values() for member in members(group)
    )


def is_source(group: EngineGroup, worker_id: str) -> bool:
    """Whether another leader still needs KV from that worker."""
    others = [engine for name, engine in group.engines.items() if name != worker_id]
    return any(
        transfer.source == worker_id
        for engine in others
        for move in moves_of(engine.member)
        for transfer in move.transfers
    )


def is_fetching(group: EngineGroup, worker_id: str) -> bool:
    """Whether that leader still needs KV from another worker."""
    moves = moves_of(group.engines[worker_id].member)
    return any(transfer.source != worker_id for move in moves for transfer in move.transfers)


def moves_of(leader: Member) -> list[SequenceMove]:
    exchange = leader.changeover._moves._exchange
    return [
        *exchange.waiting.values(),
        *(exchanged.move for exchanged in exchange.underway.values()),
    ]


@pytest.mark.parametrize(
    ("moment", "engines", "lost"),
    [
        (moment, engines, lost)
        for moment in (is_dealt, is_source, is_fetching)
        for engines, lost in ((2, "w0"), (2, "w1"), (3, "w0"), (3, "w1"), (3, "w2"))
        if lost != "w0" or moment is is_source  # the old leader, which distributes requests
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_split_worker_keeps_serving_when_another_dies(
    config: RunnerConfig,
    oracle: Oracle,
    moment: Callable[[EngineGroup, str], bool],
    lost: str,
    engines: int,
    seed: int,
) -> None:
    """Requests continue, recomputed if their KV is lost; no worker keeps orphaned KV."""
    names = [f"w{index}" for index in range(engines)]
    with closing(EngineGroup(roomy(config), engines, seed)) as group:
        group.change([split_in(names, list(range(1, engines)))])
        targets = [[Stage(name, 0, LAYERS)] for name in names]
        attempt = group.prepare(targets)
        assert group.await_answers(attempt, targets)
        longest = sorted(
            range(REQUESTS), key=lambda number: -len(oracle.tokens(oracle.requests[number]))
        )
        start_all(group, oracle, longest[:8])
        group.run_until(lambda: sum(bool(stream.tokens) for stream in group.streams.values()) >= 4)
        group.commit(targets)
        group.run_until(lambda: moment(group, lost))
        group.lose(lost)
        for request_id, owner in group.owner.items():
            if owner == lost:
                group.streams[request_id].aborted = True
        open_ones = [stream for stream in group.streams.values() if not stream.over]
        assert open_ones, "nothing has to go on"
        start_all(group, oracle, longest[8:12])
        group.end()
        if moment is is_source:
            assert any(member.state.preemptions_total for member in members(group)), (
                "whose KV is gone?"
            )
        for stream in group.streams.values():
            if not stream.aborted:
                assert stream.tokens == oracle.tokens(stream.request)


@pytest.mark.parametrize("names", [("w0", "w1"), ("w1", "w0")])
@pytest.mark.parametrize("turns", [0, 8, 20])
def test_block_counts_are_right_after_the_other_part_of_a_split_dies(
    config: RunnerConfig, oracle: Oracle, names: tuple[str, str], turns: int
) -> None:
    """Two of three members stay together, led by the old leader or by another one.

    Requests handed to the third return to the old leader, or end. Their blocks are freed at both,
    and the current leader counts them as free.
    """
    with closing(EngineGroup(roomy(config), 3, seed=1)) as group:
        group.change([split_in(["w0", "w1", "w2"], [1, 2])])
        targets = [split_in(list(names), [2]), [Stage("w2", 0, LAYERS)]]
        attempt = group.prepare(targets)
        assert group.await_answers(attempt, targets)
        start_all(group, oracle, range(8))
        group.run_until(lambda: sum(bool(stream.tokens) for stream in group.streams.values()) >= 3)
        group.commit(targets)
        group.run_until(lambda: all(member.links.epoch == group.epoch for member in members(group)))
        for _ in range(turns):
            group.turn()
        group.lose("w2")
        for request_id, owner in group.owner.items():
            if owner == "w2":
                group.streams[request_id].aborted = True
        start_all(group, oracle, range(8, 12))
        group.end()
        assert any(not stream.aborted for stream in group.streams.values())
        for stream in group.streams.values():
            if not stream.aborted:
                assert stream.tokens == oracle.tokens(stream.request)


def test_damaged_parameters_from_a_peer_are_read_from_the_model_folder(
    config: RunnerConfig, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpack = StageMemory.unpack_slab
    damaged: list[str] = []

    def damage(self: StageMemory, name: str, offset: int, payload: torch.Tensor) -> None:
        broken = payload.clone()
        broken[0] ^= 1
        damaged.append(name)
        unpack(self, name, offset, broken)

    with closing(EngineGroup(roomy(config), 2, seed=1)) as group:
        group.change([split_in(["w0", "w1"], [1])])
        start_all(group, oracle, range(4))
        monkeypatch.setattr(StageMemory, "unpack_slab", damage)
        group.reconfigure([[Stage(name, 0, LAYERS)] for name in ("w0", "w1")])
        start_all(group, oracle, range(4, 8))
        group.finish()
        assert damaged
        for stream in group.streams.values():
            assert stream.tokens == oracle.tokens(stream.request)


@pytest.mark.parametrize("moment", ["handed over", "adopted", "retried"])
def test_an_abort_follows_its_request_without_a_gateway(config: RunnerConfig, moment: str) -> None:
    """An abort reaches the old leader before or after `Adopted` has."""
    with closing(EngineGroup(roomy(config), 2, seed=1)) as group:
        request = Request("r", (5, 6, 7), Sampling(temperature=0.0), Limits(150), 0.0)
        new, old = group.engines["w0"].member, group.engines["w1"].member
        group.start(request, "w1")
        group.settle()
        group.reconfigure([split_in(["w0", "w1"], [1])])
        group.run_until(lambda: "r" in map(request_id_of, old.changeover._handover.pending))
        if moment == "adopted":
            group.run_until(lambda: old.settled)
        old.handle(RequestAborted(group.now_s, "r"))
        if moment == "retried":
            group.run_until(lambda: "r" in map(request_id_of, new.state.sequences))
            new.handle(RequestAborted(group.now_s, "r"))
            new.handle(RequestArrived(group.now_s, request))
            group.streams["r"].tokens.clear()
            group.finish()
            assert len(group.streams["r"].tokens) == 150, "the old abort is not of this one"
        else:
            group.run_until(lambda: old.settled and not new.state.sequences)
            assert len(group.streams["r"].tokens) < 150
            group.streams["r"].aborted = True
            group.finish()
        group.check_at_rest()


def test_a_later_change_survives_a_peer_lost_long_ago(config: RunnerConfig, oracle: Oracle) -> None:
    """All moves of the lost peer's change have finished."""
    network = QueueNetwork()
    roomy = replace(config, budget_bytes=config.budget_bytes + 16 * LAYERS * CHUNK_BYTES)
    with closing(EngineGroup(roomy, 3, seed=0, network=network)) as group:
        group.change([split_in(["w0", "w1"], [1])])
        group.change([[Stage("w0", 0, LAYERS)], [Stage("w1", 0, LAYERS)]])
        group.lose("w1")
        for _ in range(50):
            group.turn()
        network.skip(40.0)
        group.start(oracle.requests[0], "w0")
        group.reconfigure([split_in(["w0", "w2"], [1])])
        group.finish()
        oracle.check(group.streams[oracle.requests[0].request_id])
