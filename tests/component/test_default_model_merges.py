"""SmolLM2 in float32 on two engine processes that merge over UCX: tokens equal undisturbed runs.

Each scenario starts with the groups that the previous scenario left.
"""

import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from pathlib import Path

import pytest
import pytest_asyncio
import torch
import transformers
from tokenizers import Tokenizer

from services.core.groups.layer_map import Stage
from services.core.planner.config import IterationConfig
from services.core.request import (
    Grammar,
    GrammarKind,
    Limits,
    LogprobOptions,
    Request,
    Sampling,
)
from services.worker.config import WorkerConfig
from tests.support.default_texts import TEXTS
from tests.support.engine_processes import EngineProcesses, Stream
from tests.support.near_ties import count_excused
from tideserve.cli.cache import cache_root
from tideserve.cli.model_store import prepare_default_model

# The processes are started once for all tests.
pytestmark = pytest.mark.asyncio(loop_scope="module")

NAMES = ("w0", "w1")
SCENARIOS = 10
EVENTS = 6
EXCUSED_MAX = 0.005
"""Largest share of tokens that near-ties may explain."""
MEMORY_BYTES = 557 << 20
BLOCKS = range(6, 11)
"""KV blocks of a single-worker group: room for two or three requests, so some are preempted."""
NONE: frozenset[int] = frozenset()
STOPS = frozenset({2})
SCHEMA = """{"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99},
"kind": {"enum": ["sea", "sky"]}}, "required": ["n", "kind"], "additionalProperties": false,
"x-guidance": {"whitespace_flexible": false}}"""
SAMPLINGS = (
    Sampling(0.8, seed=0),
    Sampling(0.0),
    Sampling(0.8, seed=2, repetition_penalty=1.3, frequency_penalty=0.4),
    Sampling(0.0, repetition_penalty=1.2, bad_words=((28,), (30, 198))),
    Sampling(0.8, seed=4, grammar=Grammar(GrammarKind.JSON_SCHEMA, SCHEMA)),
    Sampling(0.0, presence_penalty=1.0, logit_bias=((28, 2.0),)),
    Sampling(0.8, seed=6, grammar=Grammar(GrammarKind.REGEX, "([a-z]{2,9} ){2,6}[a-z]{3}")),
    Sampling(0.0, grammar=Grammar(GrammarKind.JSON_SCHEMA, SCHEMA)),
)


@dataclass
class Oracle:
    """Requests with the outputs of undisturbed runs, and a comparison that allows near-ties."""

    requests: list[Request]
    model_dir: Path
    outputs: list[list[int]] = field(default_factory=list)
    compared: int = 0
    """Tokens."""
    excused: int = 0
    _reference: transformers.PreTrainedModel | None = None

    def check(self, request: Request, output: list[int], *, whole: bool) -> None:
        """Check that an output, or its prefix, equals the undisturbed run except for near-ties."""
        wanted = self.outputs[int(request.request_id.split("-")[1])]
        self.compared += len(output)
        if output == (wanted if whole else wanted[: len(output)]):
            return
        if self._reference is None:
            self._reference = transformers.AutoModelForCausalLM.from_pretrained(
                self.model_dir, dtype=torch.float32
            )
        excused = count_excused(
            self._reference,
            list(request.prompt_ids),
            output,
            request.sampling,
            request.limits.stop_token_ids,
            self.model_dir,
        )
        assert excused, f"{output} instead of {wanted}"
        self.excused += excused
        stopped = output[-1:] and output[-1] in request.limits.stop_token_ids
        assert not whole or stopped or len(output) == request.limits.max_tokens

    def check_logprobs(self, stream: Stream, *, whole: bool) -> None:
        """Check that each token has its row, and that the first token brought the prompt's rows."""
        asked, prompt = stream.request.logprobs, stream.request.prompt_ids
        if asked.output is not None:
            assert stream.logprobs.keys() == stream.tokens.keys()
            assert all(row.logprob <= 0 < row.rank for row in stream.logprobs.values())
        if asked.prompt is not None and whole:
            assert stream.prompt_logprobs is not None
            assert len(stream.prompt_logprobs) == len(prompt) - 1


def requests_of(model_dir: Path) -> list[Request]:
    rng = random.Random(2)
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    return [
        Request(
            f"undisturbed-{number}",
            tuple(tokenizer.encode(text).ids),
            SAMPLINGS[number],
            Limits(rng.randint(8, 16), stop_token_ids=STOPS if SAMPLINGS[number].grammar else NONE),
            0.0,
            LogprobOptions(output=number % 3) if number < 4 else LogprobOptions(prompt=1),
        )
        for number, text in enumerate(TEXTS)
    ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineProcesses]:
    config = WorkerConfig(
        worker_id="",
        etcd_url="",
        model_name="m",
        model_dir=prepare_default_model(cache_root(), print),
        run_dir=tmp_path_factory.mktemp("engines"),
        memory_bytes=MEMORY_BYTES,
        dtype="float32",
        chunk_bytes=64 << 10,
        planner=IterationConfig(max_batch_tokens=64, max_running=16, min_microbatch_tokens=8),
        profile_when_idle=False,
    )
    made = EngineProcesses()
    try:
        await made.start(config, NAMES)
        if not made.workers["w0"].facts.bulk_address:
            pytest.skip("UCX cannot be loaded on this machine")
        assert all(worker.facts.kv_blocks_total in BLOCKS for worker in made.workers.values())
        yield made
    finally:
        await made.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def oracle(engines: EngineProcesses) -> Oracle:
    model_dir = prepare_default_model(cache_root(), print)
    made = Oracle(requests_of(model_dir), model_dir)
    for wave in (made.requests[:4], made.requests[4:]):
        for number, request in enumerate(wave):
            await engines.serve(request, NAMES[number % len(NAMES)])
        await engines.until(lambda: all(stream.over for stream in engines.streams.values()))
    assert engines.preemptions == 0, "the undisturbed run was disturbed"
    made.outputs = [engines.streams[request.request_id].output() for request in made.requests]
    return made


@pytest.fixture(scope="module")
def pages(engines: EngineProcesses) -> dict[str, int]:
    """The mapped bytes of each arena before the scenarios."""
    return arena_pages(engines)


def arena_pages(engines: EngineProcesses) -> dict[str, int]:
    """Mapped bytes of each engine's arena, none of which may be mapped twice."""
    mapped = {}
    for name, worker in engines.workers.items():
        ranges = sorted(arena_ranges(worker.client.pid))
        for (_, end), (start, _) in pairwise(ranges):
            assert end <= start, f"{name} has mapped a chunk twice"
        mapped[name] = sum(end - start for start, end in ranges)
    return mapped


def arena_ranges(pid: int) -> Iterator[tuple[int, int]]:
    """Byte ranges of the arena's memory file that a process has mapped."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        place, _, offset, *_, path = line.split(maxsplit=5)
        if "tideserve-arena" in path:
            start, end = (int(part, 16) for part in place.split("-"))
            yield int(offset, 16), int(offset, 16) + end - start


class Scenario:
    """Random events from the seed; their timing depends on the machine."""

    def __init__(self, engines: EngineProcesses, oracle: Oracle, seed: int) -> None:
        self.rng = random.Random(seed)
        self.engines = engines
        self.oracle = oracle
        self.seed = seed
        self.names: list[str] = []
        shape = engines.workers["w0"].facts.shape
        assert shape is not None
        self.layers = shape.num_layers

    async def run(self) -> None:
        """Run random events, then let all requests end."""
        for _ in range(4):
            await self.arrive()
        for _ in range(EVENTS):
            events = (self.arrive, self.abort, self.stop, self.change, self.wait)
            await self.rng.choices(events, (3, 1, 1, 3, 3))[0]()
        streams = [self.engines.streams[name] for name in self.names]
        await self.engines.until(lambda: all(stream.over for stream in streams))

    async def arrive(self) -> None:
        request = self.rng.choice(self.oracle.requests)
        number = request.request_id.split("-")[1]
        name = f"{self.seed}.{len(self.names)}-{number}"
        self.names.append(name)
        leader = self.rng.choice(self.engines.groups)[0].worker_id
        await self.engines.serve(replace(request, request_id=name), leader)

    async def abort(self) -> None:
        if (name := self.open_one()) is not None:
            await self.engines.abort(name)

    async def stop(self) -> None:
        """Place a stop string a few tokens ahead in the output of a request."""
        if (name := self.open_one()) is not None:
            tokens = len(self.engines.streams[name].tokens)
            self.engines.stop_after(name, tokens + self.rng.randint(0, 3))

    async def wait(self) -> None:
        """Wait for a request's next tokens."""
        if (name := self.open_one()) is not None:
            stream = self.engines.streams[name]
            enough = len(stream.tokens) + self.rng.randint(1, 3)
            await self.engines.until(lambda: stream.over or len(stream.tokens) >= enough)

    def open_one(self) -> str | None:
        names = [name for name in self.names if not self.engines.streams[name].over]
        return self.rng.choice(names) if names else None

    async def change(self) -> None:
        """Merge, move the layer boundary, or split; a stop string may be reached meanwhile."""
        engines, rng = self.engines, self.rng
        if len(engines.groups) == 1 and rng.random() < 0.5:
            targets = [[engines.alone(name)] for name in NAMES]
        else:
            first, last = rng.sample(NAMES, 2)
            cut = rng.randrange(8, self.layers - 7)
            targets = [[Stage(first, 0, cut), Stage(last, cut, self.layers)]]
        if rng.random() < 0.5:
            await self.stop()
        await engines.reconfigure(targets, abandon=rng.random() < 0.1)


@pytest.mark.parametrize("seed", range(SCENARIOS))
async def test_random_interleavings_change_no_token(
    engines: EngineProcesses, oracle: Oracle, pages: dict[str, int], seed: int
) -> None:
    assert all(stream.over for stream in engines.streams.values()), "another scenario has not ended"
    scenario = Scenario(engines, oracle, seed)
    await scenario.run()
    for name in scenario.names:
        stream = engines.streams[name]
        oracle.check(stream.request, stream.output(), whole=not stream.aborted)
        oracle.check_logprobs(stream, whole=not stream.aborted)
    await engines.until(lambda: all(worker.idle for worker in engines.workers.values()))


async def test_requests_continue_under_another_leader(
    engines: EngineProcesses, oracle: Oracle
) -> None:
    """Start all requests at a worker that then follows the other; retry if they end too early.

    The random scenarios move requests only on fast machines.
    """
    before = engines.moved
    shape = engines.workers[NAMES[0]].facts.shape
    assert shape is not None
    layers = shape.num_layers
    for attempt in count():
        if len(engines.groups) == 1:
            assert await engines.reconfigure([[engines.alone(name)] for name in NAMES])
        names = [f"moved{attempt}-{number}" for number in range(len(oracle.requests))]
        for name, request in zip(names, oracle.requests, strict=True):
            await engines.serve(replace(request, request_id=name), NAMES[1])
        half = layers // 2
        first, last = (Stage(NAMES[0], 0, half), Stage(NAMES[1], half, layers))
        assert await engines.reconfigure([[first, last]])
        streams = [engines.streams[name] for name in names]
        await engines.until(lambda streams=streams: all(stream.over for stream in streams))
        for stream in streams:
            oracle.check(stream.request, stream.output(), whole=True)
        if engines.moved > before:
            return


async def test_requests_that_do_not_fit_are_preempted(
    engines: EngineProcesses, oracle: Oracle
) -> None:
    """Start all requests at a single-worker group."""
    if len(engines.groups) == 1:
        assert await engines.reconfigure([[engines.alone(name)] for name in NAMES])
    names = [f"flood-{number}" for number in range(len(oracle.requests))]
    for name, request in zip(names, oracle.requests, strict=True):
        await engines.serve(replace(request, request_id=name), NAMES[0])
    streams = [engines.streams[name] for name in names]
    await engines.until(lambda: all(stream.over for stream in streams))
    for stream in streams:
        oracle.check(stream.request, stream.output(), whole=True)
        oracle.check_logprobs(stream, whole=True)
    assert engines.preemptions > 0


async def test_all_memory_is_released(
    engines: EngineProcesses, pages: dict[str, int], oracle: Oracle
) -> None:
    """Check memory after the scenarios and after requests have moved between engines."""
    assert oracle.excused <= EXCUSED_MAX * oracle.compared
    assert engines.moved > 0
    await engines.until(lambda: all(worker.at_rest for worker in engines.workers.values()))
    await engines.until(lambda: arena_pages(engines) == pages)
