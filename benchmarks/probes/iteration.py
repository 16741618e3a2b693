"""How much longer iterations take than products: `python -m benchmarks.probes.iteration`.

One engine without a cluster, one JSON object on stdout. For each shape of a batch, iterations take
turns with the products of their weights alone, and of each the median counts. Attention has a floor
of its own: its products at the rate of those of many rows, or the bytes of the KV that it reads at
the rate of a sum over memory, whichever takes longer.

Exit code 2 with a sentence on stderr if it cannot be measured.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from services.common.clock import monotonic_s
from services.common.lifecycle import EXIT_UNUSABLE
from services.core.cost.model import Chunks
from services.core.groups.slab_names import EMBEDDING, HEAD, layer_name
from services.core.planner.block_pool import BlockPool
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.compute.runner_config import RunnerConfig, compute_dtype
from services.worker.engine.compute.staging import SCRATCH_BYTES
from services.worker.engine.memory.panels import inputs_of
from services.worker.engine.model import cpu_kernels
from services.worker.engine.model.linear import SlabLinear, UpcastScratch
from services.worker.engine.profile.measurer import Measurer
from services.worker.errors import WorkerError

GIB = 1 << 30
READ_BYTES = 256 << 20
"""More than any cache holds."""
RATE_ROWS = 256
"""Rows of the product whose rate is the processor's."""


@dataclass(frozen=True, slots=True)
class BatchShape:
    """A batch: `requests` of them have `new` tokens each after `context` computed ones."""

    name: str
    requests: int
    new: int
    context: int

    @property
    def chunks(self) -> Chunks:
        """The same for the measurer."""
        return ((self.context, self.new),) * self.requests

    @property
    def rows(self) -> int:
        """Tokens that run."""
        return self.requests * self.new

    @property
    def pairs(self) -> int:
        """Pairs of a token that runs and one that it sees."""
        return self.requests * (self.new * self.context + self.new * (self.new + 1) // 2)


SHAPES = (
    *(BatchShape(f"prefill of {new}", 1, new, 0) for new in (64, 128, 256, 1024, 2048)),
    *(BatchShape(f"decode of {count}, context 128", count, 1, 127) for count in (1, 8, 64)),
    BatchShape("decode of 16, context 1,024", 16, 1, 1023),
)


class Products:
    """The products of all weights of a runner, with rows of chance."""

    def __init__(self, runner: ModelRunner, dtype: torch.dtype) -> None:
        device = torch.device("cpu")
        compute = compute_dtype(device, dtype)
        compiled = cpu_kernels.fit(device, dtype, compute)
        scratch = UpcastScratch(SCRATCH_BYTES, compute, device) if compute != dtype else None
        slabs, geometry = runner.stage_memory.slabs, runner.geometry

        def products(names: Iterable[str], ending: str) -> list[tuple[SlabLinear, int]]:
            views = [view for name in names for view in slabs[name].views().items()]
            return [
                (SlabLinear(weight, None, scratch, compiled=compiled), inputs_of(weight))
                for path, weight in views
                if path.endswith(ending)
            ]

        layers = [layer_name(index) for index in range(geometry.num_layers)]
        head = EMBEDDING if geometry.tied_embeddings else HEAD
        self._compute = compute
        self._layers = products(layers, "_proj.weight")
        self._head = products([head], f"{head}.weight")
        weights = [view for name in layers for view in slabs[name].views().items()]
        self._values = sum(one.numel() for path, one in weights if path.endswith("_proj.weight"))

    @torch.inference_mode()
    def duration_s(self, rows: int, sampled: int) -> float:
        """How long they take, the head for those rows that are sampled from."""
        parts = [(self._layers, rows), (self._head, sampled)]
        inputs = {
            (count, size): torch.randn(count, size, dtype=self._compute)
            for products, count in parts
            for _, size in products
        }
        started_s = monotonic_s()
        for products, count in parts:
            for product, size in products:
                product(inputs[count, size])
        return monotonic_s() - started_s

    def operations_per_s(self) -> float:
        """Multiplications and additions of the layers' products with many rows."""
        took_s = min(self.duration_s(RATE_ROWS, 0) for _ in range(3))
        return 2 * RATE_ROWS * self._values / took_s


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(prog="tideserve-profile-iteration")
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--memory-gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    try:
        runner = ModelRunner.load(
            RunnerConfig(
                model_dir=arguments.model_dir,
                device="cpu",
                dtype=dtype,
                budget_bytes=int(arguments.memory_gib * GIB),
                threads=1,
            )
        )
    except WorkerError as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_UNUSABLE)
    try:
        print(json.dumps(measure(runner, dtype, arguments.rounds)))
    finally:
        runner.close()


def measure(runner: ModelRunner, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Each shape in turn, `rounds` times, after one round that does not count."""
    measurer = Measurer(runner, BlockPool(runner.num_blocks))
    products = Products(runner, dtype)
    operations_per_s, bytes_per_s = products.operations_per_s(), _read_bytes_per_s()
    iterations: dict[str, list[float]] = {shape.name: [] for shape in SHAPES}
    alone: dict[str, list[float]] = {shape.name: [] for shape in SHAPES}
    for _ in range(rounds + 1):
        for shape in SHAPES:
            took_s = measurer.duration_s(shape.chunks)
            assert took_s is not None, "nothing interrupts it"
            iterations[shape.name].append(took_s)
            alone[shape.name].append(products.duration_s(shape.rows, shape.requests))
    geometry = runner.geometry
    values = geometry.num_heads * geometry.head_dim * geometry.num_layers

    def row(shape: BatchShape) -> dict[str, Any]:
        iteration_s, products_s = (median(each[shape.name][1:]) for each in (iterations, alone))
        read = shape.requests * (shape.context + shape.new) * runner.kv_bytes_per_token
        attention_s = max(4 * shape.pairs * values / operations_per_s, read / bytes_per_s)
        return {
            "shape": shape.name,
            "iteration_s": iteration_s,
            "products_s": products_s,
            "attention_floor_s": attention_s,
            "over_products": iteration_s / products_s,
            "over_floor": iteration_s / (products_s + attention_s),
        }

    return {
        "dtype": str(dtype).removeprefix("torch."),
        "panels": cpu_kernels.has_panel_product(dtype),
        "operations_per_s": operations_per_s,
        "read_bytes_per_s": bytes_per_s,
        "shapes": [row(shape) for shape in SHAPES],
    }


def _read_bytes_per_s() -> float:
    values = torch.ones(READ_BYTES // 8, dtype=torch.int64)
    return READ_BYTES / min(_took_s(values.sum) for _ in range(5))


def _took_s(run: Callable[[], object]) -> float:
    started_s = monotonic_s()
    run()
    return monotonic_s() - started_s


if __name__ == "__main__":
    main()
