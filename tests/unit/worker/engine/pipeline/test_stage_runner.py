"""Input of a stage, and the time that it takes."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from services.core.changeover.frames import Activations, StageChunk, activations
from services.core.cost.model import CostModel
from services.core.planner.batch import Batch, Chunk, Microbatch, SampleSpec
from services.core.planner.block_pool import BlockPool
from services.core.planner.block_table import StageTable
from services.worker.engine.compute.pacer import Pacer
from services.worker.engine.compute.stage_output import LaunchedStage, StageOutput
from services.worker.engine.pipeline import stage_runner
from services.worker.engine.pipeline.stage_runner import StageRunner, hidden_bytes
from tests.support.fake_model import BLOCKS, FAKE, LAYERS, expected_tokens, load_fake

PROMPT = tuple(range(40, 51))


@pytest.fixture
def stages() -> Iterator[list[StageRunner]]:
    """Two, the first of which runs one layer."""
    made = [StageRunner(load_fake(FAKE), StageTable(BlockPool(BLOCKS))) for _ in range(2)]
    for stage, layers in zip(made, ((0, 1), (1, LAYERS)), strict=True):
        stage.runner.stage_memory.set_stage(*layers)
    yield made
    for stage in made:
        stage.runner.close()


def microbatch(blocks: tuple[int, ...]) -> Microbatch:
    return Microbatch(1, Batch((Chunk("r", 0, PROMPT, blocks, SampleSpec(None, 0)),)))


def test_a_later_stage_runs_the_chunks_in_its_own_blocks(stages: list[StageRunner]) -> None:
    first, last = stages
    assert (first.share, last.share) == (1 / 3, 2 / 3)
    planned = microbatch((0, 1, 2))
    output = first.run_first(planned)
    assert output is not None and output.sampled is None
    last.table.adopt("other", 2)
    last.table.adopt("r", 3)
    result = last.run_next(activations(planned, 0.0), hidden_bytes(output))
    assert result.sampled == {"r": expected_tokens(PROMPT, 1)[0]}
    assert cast(Any, last.runner).sampler.kept == ["other", "r"]


def test_nothing_runs_without_chunks(stages: list[StageRunner]) -> None:
    cast(Any, stages[1].runner).run_stage = None
    assert stages[1].run_next(Activations(3, ("r",), ()), b"") == StageOutput(sampled={})


def test_empty_hidden_states_have_no_bytes() -> None:
    assert hidden_bytes(StageOutput(sampled={"r": 1})) == b""


def test_an_interrupted_stage_has_no_result(stages: list[StageRunner]) -> None:
    assert stages[0].run_first(microbatch((0, 1, 2)), lambda: True) is None


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_paced_stage_lasts_as_long_as_its_share_of_the_layers(
    monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    """A discarded iteration is not padded, so that its requests continue at once."""
    monkeypatch.setattr(stage_runner, "monotonic_s", lambda: 50.0)
    slept: list[float] = []
    pacer = Pacer(CostModel(0.0, 0.0, 3.0, 0.0), lambda: 50.25, slept.append)
    stage = StageRunner(load_fake(FAKE), StageTable(BlockPool(BLOCKS)), pacer)
    stage.runner.stage_memory.set_stage(0, 1)
    assert (stage.run_first(microbatch((0, 1, 2)), lambda: interrupted) is None) == interrupted
    assert slept == ([] if interrupted else [0.75])
    stage.runner.close()


def test_a_paced_iteration_resumes_where_it_was_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The elapsed time counts, and finished results wait for the remaining time."""
    clock = [50.0]
    monkeypatch.setattr(stage_runner, "monotonic_s", lambda: clock[0])

    def sleep(duration_s: float) -> None:
        clock[0] += duration_s

    pacer = Pacer(CostModel(0.0, 0.0, 3.2, 0.0), lambda: clock[0], sleep)
    stage = StageRunner(load_fake(FAKE), StageTable(BlockPool(BLOCKS)), pacer)
    real, computed = stage.runner.launch_stage, []

    def launch_stage(batch: Batch, *_: Any, suspends: bool) -> LaunchedStage | None:
        computed.append(suspends)
        return real(batch)

    cast(Any, stage.runner).launch_stage = launch_stage
    first = replace(microbatch((0, 1, 2)), preemptible=True)
    asked = iter(range(99))
    assert stage.run_first(first, lambda: next(asked) == 9, suspends=True) is None
    assert clock[0] == pytest.approx(51.0)
    clock[0] = 70.0
    output = stage.run_first(replace(first, number=3, resumes=1), lambda: False, suspends=True)
    assert output is not None
    assert output.sampled == {"r": expected_tokens(PROMPT, 1)[0]}
    assert clock[0] == pytest.approx(72.2) and computed == [True]
    stage.runner.close()


def test_scored_chunks_stay_scored(stages: list[StageRunner]) -> None:
    """The last stage scores prompts and samples."""
    last, seen = stages[1], []
    last.table.adopt("r", 1)
    run = LaunchedStage(StageOutput())
    cast(Any, last.runner).launch_stage = lambda batch, *_: seen.append(batch) or run
    spec = SampleSpec(None, 5)
    chunk = StageChunk("r", 2, 1, 1, spec, cast(Any, "score"))
    last.run_next(Activations(3, (), (chunk,)), np.zeros(8, np.uint8))
    assert seen == [Batch((Chunk("r", 2, (0,), (0,), spec, cast(Any, "score")),))]


@pytest.mark.parametrize("preemptible", [False, True])
def test_other_work_runs_between_launch_and_result(preemptible: bool) -> None:
    stage = StageRunner(load_fake(FAKE), StageTable(BlockPool(BLOCKS)))
    order: list[str] = []
    run = LaunchedStage(None, lambda: order.append("result") or StageOutput())

    def launch_stage(*_: Any, **__: Any) -> LaunchedStage | None:
        order.append("launch")
        return run

    cast(Any, stage.runner).launch_stage = launch_stage
    first = replace(microbatch((0, 1, 2)), preemptible=preemptible)
    stage.run_first(first, meanwhile=lambda: order.append("meanwhile"))
    assert order == ["launch", "meanwhile", "result"]
    cast(Any, stage.runner).launch_stage = lambda *_, **__: None
    assert stage.run_first(first, meanwhile=lambda: order.append("again")) is None
    assert "again" not in order
    stage.runner.close()
