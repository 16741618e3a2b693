"""Runs synthetic batches on a model runner and times them, to fit a cost model.

A batch is a sequence of chunks (prefix, new): the context tokens already in the KV cache, and the
new tokens to compute.
"""

from collections.abc import Callable, Sequence

from services.common.clock import monotonic_s, thread_cpu_s
from services.core.cost.model import Chunks, CostModel, Sample, fit_apart, fit_together
from services.core.planner.batch import Batch, Chunk, SampleSpec, SampleTerms
from services.core.planner.block_pool import BlockPool
from services.core.request import Sampling, blocks_for
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.profile.batches import BatchLimits

GREEDY = SampleTerms(Sampling(temperature=0.0))


Borrow = Callable[[Sequence[int]], tuple[tuple[int, ...], ...]]
"""Free KV blocks to overwrite, in rows of these numbers, until the next call or event."""


class Measurer:
    """Times batches on `runner`; overwrites the KV blocks that `borrow` returns."""

    def __init__(self, runner: ModelRunner, borrow: Borrow) -> None:
        self._runner = runner
        self._borrow = borrow
        self._ran_s = 0.0
        self._cpu_s = 0.0

    @property
    def cpu_share(self) -> float:
        """Share of the batches' durations in which this thread had a processor.

        Always 1 on a GPU, for which the thread waits.
        """
        on_cpu = self._runner.device.type == "cpu"
        return min(1.0, self._cpu_s / self._ran_s) if on_cpu and self._ran_s else 1.0

    def duration_s(
        self, chunks: Chunks, interrupted: Callable[[], bool] | None = None
    ) -> float | None:
        """Run a batch; returns its duration, None if `interrupted` returned True before a layer.

        Every chunk samples greedily: a chunk of a single token as a decode step, a longer chunk as
        the last chunk of a prompt.
        """
        block_size = self._runner.block_size
        # Do not compute the prefixes: attention takes the same time over any contents of blocks.
        tables = self._borrow([blocks_for(prefix + new, block_size) for prefix, new in chunks])
        batch = Batch(
            tuple(
                Chunk(
                    seq_id=f"profile-{index}",
                    start=prefix,
                    token_ids=self._token_ids(index, new),
                    block_ids=table,
                    sample=SampleSpec(GREEDY, int(new == 1)),
                )
                for index, ((prefix, new), table) in enumerate(zip(chunks, tables, strict=True))
            )
        )
        started_s, started_cpu_s = monotonic_s(), thread_cpu_s()
        sampled = self._runner.run(batch, interrupted)
        duration_s = monotonic_s() - started_s
        self._ran_s += duration_s
        self._cpu_s += thread_cpu_s() - started_cpu_s
        return duration_s if sampled is not None else None

    def _token_ids(self, index: int, count: int) -> tuple[int, ...]:
        vocab = self._runner.geometry.vocab_size
        return tuple((31 * index + 7 * position) % vocab for position in range(count))


def batch_limits_of(runner: ModelRunner, max_batch_tokens: int, max_running: int) -> BatchLimits:
    """Return the limits of a batch on `runner`."""
    return BatchLimits(
        max_batch_tokens=max_batch_tokens,
        max_running=max_running,
        max_model_len=runner.geometry.max_model_len,
        num_blocks=runner.num_blocks,
        block_size=runner.block_size,
    )


TIME_MAX_S = 2.0
"""Time limit of the rough measurement, after which no batch starts."""
UNKNOWNS = 7
"""Coefficients of a fit without a knee."""
REPEATS = 2
"""Runs of each batch: the first also warms up caches and memory."""


def measure_rough_model(runner: ModelRunner, max_batch_tokens: int, max_running: int) -> CostModel:
    """Measure a rough cost model before the first request.

    Deadlines, lookahead and dispatch need a cost model at once. The rough model is not stored: the
    worker refines it under load, and measures a profile while idle. Call this before any sequence
    owns a KV block.
    """
    # Use a separate pool: a replay of the event log must repeat all allocations of the planner's.
    measurer = Measurer(runner, BlockPool(runner.num_blocks).borrow)
    began_s = monotonic_s()
    best_s: dict[Chunks, float] = {}
    for chunks in rough_batches(batch_limits_of(runner, max_batch_tokens, max_running)):
        for _ in range(REPEATS):
            if best_s and monotonic_s() - began_s > TIME_MAX_S:
                break
            measured_s = measurer.duration_s(chunks)
            assert measured_s is not None, "the measurement has no interrupt"
            best_s[chunks] = min(measured_s, best_s.get(chunks, measured_s))
    samples = [Sample(chunks, seconds) for chunks, seconds in best_s.items()]
    # Too few samples to choose between fits by cross-validation.
    return fit_apart(samples) if len(samples) > UNKNOWNS else fit_together(samples)


def rough_batches(limits: BatchLimits) -> list[Chunks]:
    """Return the batches to time, the most informative first, of those within `limits`."""
    points: list[Chunks] = [
        ((0, 1),),
        ((0, 16),),
        ((16, 1),) * 8,
        ((0, min(256, limits.max_batch_tokens)),),
        ((512, 1),) * 4,
        ((512, 64),),
        ((128, 1),) * 24,
        (*((128, 1),) * 8, (0, 64)),
        ((0, 32),) * 3,
        ((0, 64),),
        ((128, 1),) * 2,
    ]
    return [chunks for chunks in points if limits.allows(chunks)]
