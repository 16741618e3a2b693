"""Runs this worker's stage of microbatches: the layers that it holds of the model.

KunServe §4.1: after its members have dropped layers, a group runs the model as a pipeline of
stages. The first stage embeds the tokens, the last stage samples. A single worker is both.
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
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.compute.stage_output import LaunchedStage, StageOutput

Meanwhile = Callable[[], None]
"""Work of the engine's thread while a GPU runs layers. It changes no block table."""


@dataclass(frozen=True, slots=True)
class _Paused:
    """A suspended microbatch."""

    output: StageOutput | None  # its result, if only its padding by the pacer was interrupted
    ran_s: float  # how long it ran, padding included


class StageRunner:
    """A pipeline stage in a worker's memory.

    `lock` is held while block tables or memory mappings change, so that KV transfers on another
    thread never touch blocks of another sequence. `pacer` pads iterations to a device's times.
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
        meanwhile: Meanwhile | None = None,
    ) -> StageOutput | None:
        """Run the leader's stage; None if `interrupted` returned True before a layer.

        With `suspends`, an interrupted microbatch keeps its state. A later microbatch whose
        `resumes` is set continues it at the same layer. `meanwhile` is called after the launch of
        the layers, before the wait for their result.
        """
        if microbatch.turns:
            with self.lock:
                self.runner.stage_memory.turn_tails(microbatch.turns)
        if not microbatch.preemptible:
            return self._run(microbatch.batch, None, interrupted, meanwhile)
        if microbatch.resumes is None:
            self._paused = None
        return self._run_preemptible(microbatch, interrupted, meanwhile, suspends=suspends)

    def run_next(self, body: Activations, payload: Any) -> StageOutput:
        """Run a stage after the first; the output is empty if the microbatch has no chunks.

        `body` lists the chunks, `payload` has their hidden states. The block table must be current.
        """
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
        meanwhile: Meanwhile | None,
        *,
        suspends: bool,
    ) -> StageOutput | None:
        """Run a microbatch that may be interrupted while it computes or the pacer pads its time.

        If the padding is suspended, the computed result is kept for the resumption.
        """
        batch, paused = microbatch.batch, self._paused
        self._paused = None
        started_s = monotonic_s() - (paused.ran_s if paused is not None else 0.0)
        output = paused.output if paused is not None else None
        self.runner.sampler.keep_only(self.table.tables.keys())
        # Without a kept result, compute from the start or from the layer of the suspension.
        if output is None:
            if microbatch.resumes is None:
                run = self.runner.launch_stage(batch, None, interrupted, suspends=suspends)
            else:
                run = self.runner.launch_resumed(batch, interrupted)
            output = _collected(run, meanwhile)
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
        meanwhile: Meanwhile | None = None,
    ) -> StageOutput | None:
        # Forget the sampling state of sequences without blocks: a sequence that runs again brings
        # its sampling parameters with its next chunk.
        self.runner.sampler.keep_only(self.table.tables.keys())
        started_s = monotonic_s()
        output = _collected(self.runner.launch_stage(batch, hidden, interrupted), meanwhile)
        if self._pacer is not None and output is not None:
            self._pacer.pad(batch, started_s, self.share)
        return output


def _collected(run: LaunchedStage | None, meanwhile: Meanwhile | None) -> StageOutput | None:
    """Return the result of a run, after other work meanwhile; None if it was interrupted."""
    if run is None:
        return None
    if meanwhile is not None:
        meanwhile()
    return run.collect()


def hidden_bytes(output: StageOutput) -> Any:
    """Return the hidden states as bytes, the payload of `Activations`; no copy in host memory."""
    if output.hidden is None:
        return b""
    return output.hidden.contiguous().view(torch.uint8).cpu().numpy().reshape(-1)
