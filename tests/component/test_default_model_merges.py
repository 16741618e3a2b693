"""SmolLM2 in float32 on three engine processes that merge over UCX: tokens as undisturbed."""

import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import pytest
import pytest_asyncio
import torch
import transformers
from tokenizers import Tokenizer

from cli.cache import cache_root
from cli.model_store import prepare_default_model
from services.core.memory.layer_map import Stage
from services.core.request import Limits, Request, Sampling
from services.worker.config import WorkerConfig
from tests.support.engine_processes import EngineProcesses
from tests.support.near_ties import count_excused

# One start of the processes for all of them.
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("merges")]

NAMES = ("w0", "w1", "w2")
SCENARIOS = 10
EVENTS = 7
MEMORY_BYTES = 590 << 20
BLOCKS_MAX = 64
"""Of one worker: seven requests want more, so some are preempted."""
TEXTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n",
    "Explain in one paragraph why the sky is blue. " * 8,
    "A list of prime numbers: 2, 3, 5, 7,",
    "I write to you about the tide tables. " * 10,
    "Water boils at",
    "The three laws of robotics are:\n1.",
)


@dataclass
class Oracle:
    """Requests, the outputs of their undisturbed run, and a judge of what differs."""

    requests: list[Request]
    model_dir: Path
    outputs: list[list[int]] = field(default_factory=list)
    excused: int = 0
    _reference: transformers.PreTrainedModel | None = None

    def check(self, request: Request, output: list[int], *, whole: bool) -> None:
        """The output, or its beginning, is that of the undisturbed run, near-ties excused."""
        wanted = self.outputs[int(request.request_id.split("-")[1])]
        if output == (wanted if whole else wanted[: len(output)]):
            return
        if self._reference is None:
            self._reference = transformers.AutoModelForCausalLM.from_pretrained(
                self.model_dir, dtype=torch.float32
            )
        excused = count_excused(self._reference, list(request.prompt_ids), output, request.sampling)
        assert excused, f"{output} instead of {wanted}"
        self.excused += excused
        assert not whole or len(output) == request.limits.max_tokens


def requests_of(model_dir: Path) -> list[Request]:
    rng = random.Random(2)
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    return [
        Request(
            f"undisturbed-{number}",
            tuple(tokenizer.encode(text).ids),
            Sampling(0.0) if number % 2 else Sampling(0.8, seed=number),
            Limits(rng.randint(6, 16)),
            0.0,
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
        max_batch_tokens=64,
        max_running=16,
        min_microbatch_tokens=8,
        profile_when_idle=False,
    )
    made = EngineProcesses()
    try:
        await made.start(config, NAMES)
        if not made.workers["w0"].facts.bulk_address:
            pytest.skip("UCX cannot be loaded on this machine")
        assert all(one.facts.kv_blocks_total < BLOCKS_MAX for one in made.workers.values())
        yield made
    finally:
        await made.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def oracle(engines: EngineProcesses) -> Oracle:
    model_dir = prepare_default_model(cache_root(), print)
    made = Oracle(requests_of(model_dir), model_dir)
    for number, request in enumerate(made.requests):
        await engines.serve(request, NAMES[number % len(NAMES)])
    await engines.until(lambda: all(one.over for one in engines.streams.values()))
    made.outputs = [engines.streams[one.request_id].output() for one in made.requests]
    return made


def arena_pages(engines: EngineProcesses) -> dict[str, int]:
    """Bytes of each engine's arena that are mapped somewhere; none twice."""
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
    """Random events, all from the seed; when they happen is up to the machine."""

    def __init__(self, engines: EngineProcesses, oracle: Oracle, seed: int) -> None:
        self.rng = random.Random(seed)
        self.engines = engines
        self.oracle = oracle
        self.seed = seed
        self.names: list[str] = []
        shape = engines.workers["w0"].facts.shape
        assert shape is not None
        self.layers = shape.num_layers
        self.changes = 0

    async def run(self) -> None:
        """Do it all, restore everything, and let everything end."""
        await self.arrive()
        await self.arrive()
        await self.change()
        for _ in range(EVENTS):
            events = (self.arrive, self.abort, self.stop, self.change, self.wait)
            await self.rng.choices(events, (6, 1, 1, 3, 2))[0]()
        streams = [self.engines.streams[name] for name in self.names]
        await self.engines.until(lambda: all(one.over for one in streams))
        for group in [one for one in self.engines.groups if len(one) > 1]:
            apart = [[self.engines.alone(stage.worker_id)] for stage in group]
            assert await self.engines.reconfigure(apart)
        await self.engines.until(lambda: all(one.at_rest for one in self.engines.workers.values()))

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
        """The gateway finds a stop string in the text of a request, a few tokens from now."""
        if (name := self.open_one()) is not None:
            tokens = len(self.engines.streams[name].tokens)
            self.engines.stop_after(name, tokens + self.rng.randint(0, 3))

    async def wait(self) -> None:
        """For a request's next tokens."""
        if (name := self.open_one()) is not None:
            stream = self.engines.streams[name]
            enough = len(stream.tokens) + self.rng.randint(1, 3)
            await self.engines.until(lambda: stream.over or len(stream.tokens) >= enough)

    def open_one(self) -> str | None:
        names = [name for name in self.names if not self.engines.streams[name].over]
        return self.rng.choice(names) if names else None

    async def change(self) -> None:
        """Merge two groups, or split one; perhaps one that stops its text meanwhile."""
        engines, rng = self.engines, self.rng
        pipelines = [one for one in engines.groups if len(one) > 1]
        if pipelines and (len(engines.groups) == 1 or rng.random() < 0.4):
            members = rng.choice(pipelines)
            targets = [[engines.alone(stage.worker_id)] for stage in members]
        else:
            names = [s.worker_id for group in rng.sample(engines.groups, 2) for s in group]
            cuts = sorted(rng.sample(range(4, self.layers - 3), len(names) - 1))
            bounds = [0, *cuts, self.layers]
            targets = [[Stage(one, *bounds[i : i + 2]) for i, one in enumerate(names)]]
        if rng.random() < 0.5:
            await self.stop()
        self.changes += await engines.reconfigure(targets, give_up=rng.random() < 0.1)


@pytest.mark.parametrize("seed", range(SCENARIOS))
async def test_every_interleaving_gives_the_tokens_of_an_undisturbed_run(
    engines: EngineProcesses, oracle: Oracle, seed: int
) -> None:
    assert all(one.at_rest for one in engines.workers.values()), "another scenario has not ended"
    pages = arena_pages(engines)
    scenario = Scenario(engines, oracle, seed)
    await scenario.run()
    for name in scenario.names:
        stream = engines.streams[name]
        oracle.check(stream.request, stream.output(), whole=not stream.aborted)
    await engines.until(lambda: arena_pages(engines) == pages)


async def test_the_scenarios_were_scenarios(engines: EngineProcesses, oracle: Oracle) -> None:
    """Requests moved between the processes, and were preempted."""
    print(f"{oracle.excused} tokens excused, {engines.moved} moves, {engines.preemptions}")
    assert engines.moved > 0
    assert engines.preemptions > 0
