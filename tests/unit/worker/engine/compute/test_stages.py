"""Layers run on several workers and change workers without a change of tokens."""

import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import get_ident

import pytest
import torch
from llguidance import LLMatcher, LLTokenizer

from services.core.groups.slab_names import layer_name
from services.core.planner.batch import Batch, Chunk, SampleSpec, SampleTerms
from services.core.request import Grammar, GrammarKind, Sampling
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.compute.runner_config import RunnerConfig
from services.worker.engine.compute.stage_output import StageOutput
from services.worker.engine.sampling import grammar as grammar_module
from services.worker.errors import InvalidBatch, LayerNotResident
from tests.support.device import CHUNK_BYTES, DEVICE, EXACT, SMALL_BUDGET
from tests.support.generation import GREEDY, Generation
from tests.support.tiny_models import EOS_TOKEN_ID, make_tiny_model

LAYERS = 4
PROMPTS = [[5, 6, 7], list(range(100, 140)), list(range(20, 120)), [9] * 30, [11, 12] * 40]
SAMPLINGS = [GREEDY, GREEDY, Sampling(temperature=1.0, seed=3), GREEDY, Sampling(seed=8)]
MAX_TOKENS = 20
MODELS = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False},
    "llama-tied": {"tie_word_embeddings": True},
}


class Pipeline:
    """Runners one after the other, hidden states passed by hand.

    The block ids of a batch are the first runner's; every other one has its own, `local_id`.
    """

    def __init__(self, *stages: tuple[ModelRunner, range]) -> None:
        self.stages = stages
        self.block_size = stages[0][0].block_size

    @property
    def num_blocks(self) -> int:
        """Blocks that all stages have; even, for `local_id`."""
        return min(runner.num_blocks for runner, _ in self.stages) // 2 * 2

    def merge(self) -> None:
        """Each runner drops the layers of the others."""
        for runner, layers in self.stages:
            runner.stage_memory.set_stage(layers.start, layers.stop)
            runner.check_invariants()

    def run(self, batch: Batch) -> dict[str, int]:
        """Run an iteration through all stages."""
        output = StageOutput()
        for stage, (runner, _) in enumerate(self.stages):
            chunks = tuple(
                chunk._replace(block_ids=tuple(local_id(stage, b) for b in chunk.block_ids))
                for chunk in batch.chunks
            )
            made = runner.run_stage(Batch(chunks), output.hidden)
            assert made is not None
            output = made
            runner.stage_memory.finish_drop()
            runner.check_invariants()
        assert output.sampled is not None
        return output.sampled

    def move_kv(self, blocks: list[int], *, to_first: bool) -> None:
        """KV of the layers that other stages run, from the first worker to them or back."""
        first = self.stages[0][0].stage_memory
        for stage, (runner, layers) in enumerate(self.stages[1:], start=1):
            own = [local_id(stage, block) for block in blocks]
            for layer in layers:
                if to_first:
                    first.unpack_kv(layer, blocks, runner.stage_memory.pack_kv(layer, own))
                else:
                    runner.stage_memory.unpack_kv(layer, own, first.pack_kv(layer, blocks))

    def relocate(self, moves: list[tuple[int, int]]) -> None:
        """Move blocks, named by the first worker's ids, in all stages."""
        for stage, (runner, _) in enumerate(self.stages):
            runner.stage_memory.relocate(
                [(local_id(stage, source), local_id(stage, target)) for source, target in moves]
            )


def local_id(stage: int, block: int) -> int:
    """A stage's own id for the first stage's `block`."""
    return block if stage == 0 else block ^ 1


class Workers:
    """Full copies of a model, and operations that merge and split them."""

    def __init__(self, model_dir: Path, stack: ExitStack) -> None:
        self._model_dir = model_dir
        self._stack = stack

    def load(self) -> ModelRunner:
        """Add a worker."""
        runner = ModelRunner.load(
            RunnerConfig(
                model_dir=self._model_dir,
                device=DEVICE,
                dtype=EXACT,
                budget_bytes=SMALL_BUDGET,
                chunk_bytes=CHUNK_BYTES,
                max_batch_tokens=128,
                max_model_len=512,
                threads=1,
            )
        )
        self._stack.callback(runner.close)
        return runner


@pytest.fixture(params=sorted(MODELS))
def workers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Workers]:
    name: str = request.param
    model_dir = make_tiny_model(
        tmp_path_factory.mktemp(name), name.split("-")[0], layers=LAYERS, **MODELS[name]
    )
    with ExitStack() as stack:
        yield Workers(model_dir, stack)


def generation_of(runner: ModelRunner | Pipeline, seed: int) -> Generation:
    return Generation(
        runner,  # type: ignore[arg-type]
        PROMPTS,
        max_tokens=MAX_TOKENS,
        seed=seed,
        samplings=SAMPLINGS,
        batch_tokens=128,
        concurrency=4,
    )


def restore(runner: ModelRunner, peers: Sequence[ModelRunner], used_blocks: int) -> None:
    """Restore all layers: from a peer that has them, otherwise from the model folder."""
    memory = runner.stage_memory
    memory.shrink_kv(memory.blocks_after_adding(0, LAYERS), used_blocks=used_blocks)
    for name in memory.missing_slabs(0, LAYERS):
        memory.map_layer_parameters(name)
        holder = next((p for p in peers if p.stage_memory.slabs[name].resident), None)
        if holder is None:
            memory.load_layer(name)
        else:
            for offset in range(0, len(memory.slab_bytes(name)), 10_000):
                size = min(10_000, len(memory.slab_bytes(name)) - offset)
                target = torch.empty(size, dtype=torch.uint8)
                memory.unpack_slab(
                    name, offset, holder.stage_memory.pack_slab(name, offset, target)
                )
        while not memory.finish_layer(name, max_bytes=100_000):
            runner.check_invariants()
    memory.map_kv_of(range(LAYERS))
    runner.check_invariants()
    memory.set_stage(0, LAYERS)


def used_blocks(generation: Generation) -> list[int]:
    """Blocks that running requests own."""
    return sorted(block for table in generation.tables for block in table)


def compact(generation: Generation, pipeline: Pipeline, limit: int) -> int:
    """Move blocks from above `limit` to below it; returns the number of moves."""
    used = used_blocks(generation)
    free = [block for block in range(limit) if block not in used]
    moves = [(block, free.pop()) for block in used if block >= limit]
    pipeline.relocate(moves)
    renamed = dict(moves)
    generation.tables = [[renamed.get(b, b) for b in table] for table in generation.tables]
    generation.free_blocks = free
    return len(moves)


@pytest.mark.parametrize(
    "cuts", [(1,), (2,), (3,), (1, 2), (1, 3), (2, 3)], ids=lambda cuts: "+".join(map(str, cuts))
)
def test_stages_produce_the_tokens_of_a_single_runner(
    workers: Workers, cuts: tuple[int, ...]
) -> None:
    runners = [workers.load() for _ in range(len(cuts) + 1)]
    expected = generation_of(runners[0], seed=0).run()
    bounds = (0, *cuts, LAYERS)
    layers = [range(first, end) for first, end in itertools.pairwise(bounds)]
    pipeline = Pipeline(*zip(runners, layers, strict=True))
    pipeline.merge()
    assert generation_of(pipeline, seed=1).run() == expected


@pytest.mark.parametrize("seed", range(3))
def test_requests_live_through_merges_and_splits(workers: Workers, seed: int) -> None:
    """Twice: started on a worker, moved to a pipeline, which uses memory of dropped parameters."""
    rng = random.Random(seed)
    first, second = workers.load(), workers.load()
    expected = generation_of(first, seed=0).run()
    generation = generation_of(first, seed=1 + seed)
    moved = 0
    for _ in range(2):
        for _ in range(rng.randint(1, 5)):
            generation.step()
        moved += merge_and_split(generation, first, second, rng)
        generation.run_batch = first.run
    assert moved, "blocks above the limit were in use"
    assert generation.run() == expected


def merge_and_split(
    generation: Generation, first: ModelRunner, second: ModelRunner, rng: random.Random
) -> int:
    """Run some steps as a pipeline; returns the number of relocated blocks."""
    cut = rng.randint(1, LAYERS - 1)
    before = first.num_blocks
    pipeline = Pipeline((first, range(cut)), (second, range(cut, LAYERS)))
    pipeline.merge()
    for runner, layers in pipeline.stages:
        for layer in layers:
            runner.stage_memory.kv_ranges[layer].blocks()[before:] = torch.nan
    pipeline.move_kv(used_blocks(generation), to_first=False)
    for runner, _ in pipeline.stages:
        runner.stage_memory.release_departed(0)
    generation.free_blocks += range(before, pipeline.num_blocks)
    generation.run_batch = pipeline.run
    for _ in range(rng.randint(1, 5)):
        generation.step()

    memory = first.stage_memory
    moved = compact(generation, pipeline, memory.blocks_after_adding(0, LAYERS) // 2 * 2)
    highest = max(used_blocks(generation), default=-1)
    restore(first, [second], highest + 1)
    restore(second, [first], 0)
    pipeline.move_kv(used_blocks(generation), to_first=True)
    assert first.num_blocks == before
    return moved


def test_a_wrong_block_changes_tokens(
    tmp_path: Path,
) -> None:
    """The comparison above detects a single wrong block of a single layer."""
    with ExitStack() as stack:
        workers = Workers(make_tiny_model(tmp_path, layers=LAYERS), stack)
        first, second = workers.load(), workers.load()
        expected = generation_of(first, seed=0).run()
        generation = generation_of(first, seed=1)
        for _ in range(8):
            generation.step()
        pipeline = Pipeline((first, range(2)), (second, range(2, LAYERS)))
        pipeline.merge()
        pipeline.move_kv(used_blocks(generation), to_first=False)
        table = max(generation.tables, key=len)
        mine, other = local_id(1, table[0]), local_id(1, table[1])
        second.stage_memory.unpack_kv(3, [mine], second.stage_memory.pack_kv(3, [other]))
        generation.run_batch = pipeline.run
        assert generation.run() != expected


def test_a_stage_refuses_foreign_chunks(tmp_path: Path) -> None:
    with ExitStack() as stack:
        runner = Workers(make_tiny_model(tmp_path, layers=LAYERS), stack).load()
        batch = Batch((Chunk("a", 0, (1, 2), (0,), SampleSpec(SampleTerms(GREEDY), 0)),))
        hidden = torch.zeros(2, 64, dtype=EXACT, device=DEVICE)
        with pytest.raises(InvalidBatch, match="takes hidden"):
            runner.run_stage(batch, hidden)
        runner.stage_memory.set_stage(1, 3)
        with pytest.raises(InvalidBatch, match="part of the layers"):
            runner.run(batch)
        for wrong in (None, hidden[:1], hidden.half()):
            with pytest.raises(InvalidBatch, match="takes hidden"):
                runner.run_stage(batch, wrong)
        output = runner.run_stage(batch, hidden)
        assert output is not None
        assert output.sampled is None
        assert output.hidden is not None
        assert output.hidden.shape == (2, 64)
        assert runner.run_stage(batch, hidden, lambda: True) is None
        with pytest.raises(LayerNotResident, match=r"model\.layers\.3 "):
            runner.stage_memory.set_stage(1, 4)
        assert not runner.stage_memory.slabs[layer_name(0)].resident


def test_grammars_are_compiled_while_the_last_stage_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At no other stage, and not on the thread that runs the layers."""
    folder = make_tiny_model(tmp_path / "m", layers=2)
    config = RunnerConfig(folder, "cpu", torch.float32, 16 * 2**20)
    first, last = ModelRunner.load(config), ModelRunner.load(config)
    pipeline = Pipeline((first, range(0, 1)), (last, range(1, 2)))
    pipeline.merge()
    built: list[tuple[Grammar, int]] = []
    real = grammar_module._build_matcher

    def noted(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
        built.append((grammar, get_ident()))
        return real(tokenizer, grammar)

    monkeypatch.setattr(grammar_module, "_build_matcher", noted)
    grammar = Grammar(GrammarKind.REGEX, "[0-9]+")
    terms = SampleTerms(replace(GREEDY, grammar=grammar), stop_ids=frozenset({EOS_TOKEN_ID}))
    batch = Batch((Chunk("r", 0, (5, 6, 7), (0,), SampleSpec(terms, 0)),))
    tokens = pipeline.run(batch)
    assert last.grammars.matcher(grammar, {EOS_TOKEN_ID}).allowed_tokens().mask[tokens["r"]]
    assert [name for name, _ in built] == [grammar]
    assert built[0][1] != get_ident()
