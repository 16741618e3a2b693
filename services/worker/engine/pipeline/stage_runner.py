"""Runs this worker's stage of microbatches.

KunServe §4.1: after a drop the group runs as a pipeline. The first stage embeds, the last samples.
"""

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch

from services.common.clock import monotonic_s
from services.core.changeover.frames import Activations
from services.core.planner.batch import Batch, Chunk, Microbatch
from services.core.planner.block_table import StageTable
from services.worker.engine.compute.pacer import Pacer
from services.worker.engine.compute.runner import ModelRunner, StageOutput


@dataclass(frozen=True, slots=True)
class _Paused:
    """A suspended microbatch."""

    output: StageOutput | None  # its result, if only its padding by the pacer was interrupted
    ran_s: float  # how long it ran


class StageRunner:
    """A pipeline stage over a worker's memory.

    `lock` is held while block tables or mappings change, so that transfers, which run on another
    thread, never touch blocks that were reallocated.
    """

    def __init__(self, runner: ModelRunner, table: StageTable, pacer: Pacer | None = None) -> None:
        self.runner = runner
        self.table = table
        self.lock = Lock()
        self._pacer = pacer
        self._paused: _Paused | None = None

    @property
    def share(self) -> float:
        """The fraction of the model's layers that run here."""
        memory = self.runner.stage_memory
        return len(memory.layers) / memory.num_layers

    def run_first(
        self,
        microbatch: Microbatch,
        interrupted: Callable[[], bool] | None = None,
        *,
        suspends: bool = False,
    ) -> StageOutput | None:
        """Run the leader's stage; None if it was interrupted.

        With `suspends`, an interrupted microbatch keeps its state and resumes at the same layer
        when a later microbatch `resumes` it.
        """
        if not microbatch.preemptible:
            return self._run(microbatch.batch, None, interrupted)
        if microbatch.resumes is None:
            self._paused = None
        return self._run_preemptible(microbatch, interrupted, suspends=suspends)

    def run_next(self, body: Activations, payload: Any) -> StageOutput:
        """Run a later stage, whose block table is up to date; an empty output without chunks."""
        if not body.chunks:
            return StageOutput(sampled={})
        batch = Batch(
            tuple(
                Chunk(
                    chunk.seq_id,
                    chunk.start,
                    (0,) * chunk.tokens,  # embedded by the first stage
                    self.table.block_ids(chunk.seq_id),
                    chunk.sample,
                    chunk.score,
                )
                for chunk in body.chunks
            )
        )
        hidden = self.runner.hidden_from_bytes(payload, batch.tokens)
        output = self._run(batch, hidden, None)
        assert output is not None
        return output

    def _run_preemptible(
        self,
        microbatch: Microbatch,
        interrupted: Callable[[], bool] | None,
        *,
        suspends: bool,
    ) -> StageOutput | None:
        """Run a microbatch that may be interrupted, also while the pacer pads its time.

        A result that is ready by then is kept for the resumption.
        """
        batch, paused = microbatch.batch, self._paused
        self._paused = None
        started_s = monotonic_s() - (paused.ran_s if paused is not None else 0.0)
        output = paused.output if paused is not None else None
        self.runner.sampler.keep_only(self.table.tables.keys())
        # Without a kept result, compute: from the start, or from the layer of the suspension.
        if output is None:
            if microbatch.resumes is None:
                output = self.runner.run_stage(batch, None, interrupted, suspends=suspends)
            else:
                output = self.runner.resume_stage(batch, interrupted)
        ended = output is not None
        if ended and self._pacer is not None:
            ended = self._pacer.pad(batch, started_s, self.share, interrupted)
        if not ended and suspends:
            self._paused = _Paused(output, monotonic_s() - started_s)
        return output if ended else None

    def _run(
        self,
        batch: Batch,
        hidden: torch.Tensor | None,
        interrupted: Callable[[], bool] | None,
    ) -> StageOutput | None:
        # A request without blocks here has ended, or its next chunk brings its terms again.
        self.runner.sampler.keep_only(self.table.tables.keys())
        started_s = monotonic_s()
        output = self.runner.run_stage(batch, hidden, interrupted)
        if self._pacer is not None and output is not None:
            self._pacer.pad(batch, started_s, self.share)
        return output


def hidden_bytes(output: StageOutput) -> Any:
    """The payload of `Activations`: hidden states as bytes; no copy if they are in host memory."""
    if output.hidden is None:
        return b""
    return output.hidden.contiguous().view(torch.uint8).cpu().numpy().reshape(-1)
