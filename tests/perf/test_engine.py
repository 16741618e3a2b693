"""Duration of iterations relative to their matrix products alone.

One engine of one thread without a cluster. For each shape of a batch, iterations take turns with
the products of their weights, and the medians count. Attention has a floor of its own: its products
at the rate of those of many rows, or the bytes of the KV that it reads at the rate of a sum over
memory, whichever takes longer.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

import pytest
import torch

from services.common.clock import monotonic_s
from services.core.groups.slab_names import EMBEDDING, HEAD, layer_name
from services.core.planner.block_pool import BlockPool
from services.worker.engine.compute.assembly import SCRATCH_BYTES
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.compute.runner_config import compute_dtype
from services.worker.engine.memory.panels import inputs_of
from services.worker.engine.model import cpu_kernels
from services.worker.engine.model.linear import SlabLinear, UpcastScratch
from services.worker.engine.profile.measurer import Measurer
from tests.perf.measuring import MIB, fast_dtype, runner_of_one_thread, show

ROUNDS = 7
MEMORY_BYTES = 2048 * MIB
READ_BYTES = 256 * MIB
"""Bytes that exceed all caches."""
RATE_ROWS = 256
"""Rows of the product that measures the processor's rate."""
ITERATION_MAX = 1.5
"""An iteration over its products and the floor of attention; 1.02 to 1.28 on a quiet machine."""


@dataclass(frozen=True, slots=True)
class BatchShape:
    """A batch: `requests` requests with `new` tokens each after `context` computed tokens."""

    name: str
    requests: int
    new: int
    context: int

    @property
    def pairs(self) -> int:
        """Pairs of a token that runs and a token that it attends to."""
        return self.requests * (self.new * self.context + self.new * (self.new + 1) // 2)


SHAPES = (
    *(BatchShape(f"prefill of {new}", 1, new, 0) for new in (64, 128, 256, 1024, 2048)),
    *(BatchShape(f"decode of {count}, context 128", count, 1, 127) for count in (1, 8, 64)),
    BatchShape("decode of 16, context 1,024", 16, 1, 1023),
)


class Products:
    """The products of all weights of a runner, with random rows."""

    def __init__(self, runner: ModelRunner, dtype: torch.dtype) -> None:
        device = torch.device("cpu")
        compute = compute_dtype(device, dtype)
        compiled = cpu_kernels.fit(device, dtype, compute)
        scratch = UpcastScratch(SCRATCH_BYTES, compute, device) if compute != dtype else None
        slabs, geometry = runner.stage_memory.slabs, runner.geometry

        def products(names: Iterable[str], ending: str) -> list[tuple[SlabLinear, int, int]]:
            views = (view for name in names for view in slabs[name].views().items())
            return [
                (SlabLinear(view, None, scratch, compiled=compiled), inputs_of(view), view.numel())
                for path, view in views
                if path.endswith(ending)
            ]

        head = EMBEDDING if geometry.tied_embeddings else HEAD
        self._compute = compute
        self._layers = products(map(layer_name, range(geometry.num_layers)), "_proj.weight")
        self._head = products([head], f"{head}.weight")
        self._values = sum(values for _, _, values in self._layers)

    @torch.inference_mode()
    def duration_s(self, rows: int, sampled: int) -> float:
        """Duration of the products; the head only has the sampled rows."""
        parts = [(self._layers, rows), (self._head, sampled)]
        inputs = {
            (count, size): torch.randn(count, size, dtype=self._compute)
            for products, count in parts
            for _, size, _ in products
        }

        def run() -> None:
            for products, count in parts:
                for product, size, _ in products:
                    product(inputs[count, size])

        return duration_s(run)

    def operations_per_s(self) -> float:
        """Multiplications and additions of the layers' products with many rows."""
        return 2 * RATE_ROWS * self._values / min(self.duration_s(RATE_ROWS, 0) for _ in range(3))


def duration_s(run: Callable[[], object]) -> float:
    began_s = monotonic_s()
    run()
    return monotonic_s() - began_s


@pytest.mark.timeout(1800)
def test_iterations_take_little_longer_than_their_products() -> None:
    dtype = getattr(torch, fast_dtype())
    iterations: dict[str, list[float]] = {shape.name: [] for shape in SHAPES}
    alone: dict[str, list[float]] = {shape.name: [] for shape in SHAPES}
    with runner_of_one_thread(MEMORY_BYTES) as runner:
        measurer, products = (
            Measurer(runner, BlockPool(runner.num_blocks).borrow),
            Products(runner, dtype),
        )
        operations_per_s = products.operations_per_s()
        values = torch.ones(READ_BYTES // 8, dtype=torch.int64)
        bytes_per_s = READ_BYTES / min(duration_s(values.sum) for _ in range(5))
        for _ in range(ROUNDS + 1):  # the first round warms up
            for shape in SHAPES:
                chunks = ((shape.context, shape.new),) * shape.requests
                iterations[shape.name].append(measurer.duration_s(chunks) or 0.0)
                rows = shape.requests * shape.new
                alone[shape.name].append(products.duration_s(rows, shape.requests))
        geometry, token_bytes = runner.geometry, runner.kv_bytes_per_token
    width = geometry.num_heads * geometry.head_dim * geometry.num_layers
    rows = {
        "weights": f"{dtype}, {'panels' if cpu_kernels.has_panel_product(dtype) else 'row-major'}",
        "products of many rows": f"{operations_per_s / 1e9:,.0f} Gflop/s",
        "reading memory": f"{bytes_per_s / (1 << 30):,.1f} GiB/s",
    }
    for shape in SHAPES:
        iteration_s, products_s = (median(each[shape.name][1:]) for each in (iterations, alone))
        read_bytes = shape.requests * (shape.context + shape.new) * token_bytes
        floor_s = max(4 * shape.pairs * width / operations_per_s, read_bytes / bytes_per_s)
        rows[shape.name] = (
            f"{1e3 * iteration_s:,.1f} ms; products {1e3 * products_s:,.1f} ms:"
            f" {iteration_s / products_s:.2f} x; with the floor of attention,"
            f" {1e3 * floor_s:,.1f} ms: {iteration_s / (products_s + floor_s):.2f} x"
        )
        assert iteration_s <= ITERATION_MAX * (products_s + floor_s), shape.name
    show("iterations", rows)
