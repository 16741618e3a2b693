"""Generates output for prompts with a model runner, without the real planner."""

import random
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from services.core.planner.batch import Batch, Chunk, SampleSpec, SampleTerms
from services.core.request import Sampling, blocks_for
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.compute.runner_config import RunnerConfig
from tests.support.device import CHUNK_BYTES, DEVICE, EXACT, chunks_of

GREEDY = Sampling(temperature=0.0)


def load_runner(model_dir: Path, dtype: torch.dtype = EXACT) -> ModelRunner:
    """A runner of a tiny model on one thread of the processor, or on the device of the tests."""
    return ModelRunner.load(
        RunnerConfig(
            model_dir=model_dir,
            device=DEVICE,
            dtype=dtype,
            budget_bytes=chunks_of(64 << 20),
            chunk_bytes=CHUNK_BYTES,
            max_batch_tokens=512,
            threads=1,
        )
    )


def generate_tokens(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    seed: int,
    samplings: Sequence[Sampling] | None = None,
    batch_tokens: int = 512,
    concurrency: int = 8,
    stop_ids: Collection[int] = (),
) -> list[list[int]]:
    """`max_tokens` output ids for each prompt.

    Chunk sizes, the mix of prefills and decodes and the order of block ids are random, from `seed`.
    `stop_ids` end a grammar, but no request.
    """
    return Generation(
        runner,
        prompts,
        max_tokens=max_tokens,
        seed=seed,
        samplings=samplings or [GREEDY] * len(prompts),
        batch_tokens=batch_tokens,
        concurrency=concurrency,
        stop_ids=stop_ids,
    ).run()


class Generation:
    """A toy planner: at most `concurrency` requests at once, one chunk each per batch."""

    def __init__(
        self,
        runner: ModelRunner,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        seed: int,
        samplings: Sequence[Sampling],
        batch_tokens: int,
        concurrency: int,
        stop_ids: Collection[int] = (),
    ) -> None:
        """`stop_ids` end a grammar, but no request."""
        self.runner = runner
        self.run_batch = runner.run
        self.token_ids = [list(prompt) for prompt in prompts]
        self.tables: list[list[int]] = [[] for _ in prompts]
        self._computed = [0] * len(prompts)
        self._prompt_len = [len(prompt) for prompt in prompts]
        self._max_tokens = max_tokens
        self._samplings = samplings
        self._stop_ids = frozenset(stop_ids)
        self._batch_tokens = batch_tokens
        self._concurrency = concurrency
        self._rng = random.Random(seed)
        self.free_blocks = list(range(runner.num_blocks))
        self._rng.shuffle(self.free_blocks)
        self._waiting = list(range(len(prompts)))
        self._running: list[int] = []

    def run(self) -> list[list[int]]:
        """Step until every request has finished."""
        while self._waiting or self._running:
            self.step()
        return [ids[length:] for ids, length in zip(self.token_ids, self._prompt_len, strict=True)]

    def step(self) -> None:
        """Plan, run and apply one batch."""
        while self._waiting and len(self._running) < self._concurrency:
            self._running.append(self._waiting.pop(0))
        self._rng.shuffle(self._running)
        budget = self._batch_tokens
        chunks = []
        for request in self._running:
            size = min(budget, self._chunk_size(request))
            if size:
                chunks.append(self._chunk(request, size))
                budget -= size
        sampled = self.run_batch(Batch(tuple(chunks)))
        for chunk in chunks:
            self._computed[int(chunk.seq_id)] += len(chunk.token_ids)
        for request_id, token in sampled.items():
            self.token_ids[int(request_id)].append(token)
        for request in [r for r in self._running if self._outputs(r) == self._max_tokens]:
            self._running.remove(request)
            self.free_blocks = self.tables[request] + self.free_blocks
            self.tables[request] = []

    def _outputs(self, request: int) -> int:
        return len(self.token_ids[request]) - self._prompt_len[request]

    def _chunk_size(self, request: int) -> int:
        remaining = len(self.token_ids[request]) - self._computed[request]
        return remaining if remaining == 1 else self._rng.randint(1, remaining)

    def _chunk(self, request: int, size: int) -> Chunk:
        start = self._computed[request]
        end = start + size
        table = self.tables[request]
        while len(table) < blocks_for(end, self.runner.block_size):
            table.append(self.free_blocks.pop())
        complete = end == len(self.token_ids[request])
        return Chunk(
            seq_id=str(request),
            start=start,
            token_ids=tuple(self.token_ids[request][start:end]),
            block_ids=tuple(table),
            sample=self._spec(request) if complete else None,
        )

    def _spec(self, request: int) -> SampleSpec:
        """The complete sampling spec, sent with every step."""
        sampling = self._samplings[request]
        prompt, output = self._parts(request)
        terms = SampleTerms(sampling, prompt, output, self._stop_ids)
        return SampleSpec(terms, len(output))

    def _parts(self, request: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Prompt and output so far."""
        ids, length = self.token_ids[request], self._prompt_len[request]
        return tuple(ids[:length]), tuple(ids[length:])
