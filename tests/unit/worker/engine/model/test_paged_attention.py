"""Attention in a single compiled call, compared with one row at a time in float64."""

import random
from itertools import pairwise

import pytest
import torch

from services.core.planner.batch import Batch, Chunk, SampleSpec
from services.core.request import blocks_for
from services.worker.engine.model.attention.compiled import CompiledPagedAttention
from services.worker.engine.model.attention.paged import MetadataBuilder
from services.worker.engine.model.cpu_kernels import paged_attention
from services.worker.engine.model.cpu_kernels.paged_attention import fits
from tests.support.panels import PANEL_DTYPES, needs_panel_product

BLOCKS = 64
DECODE = SampleSpec(None, 1)
BUILDER = {"device": torch.device("cpu"), "compute_dtype": torch.float32}


class Cache:
    """A sequence in its own cache, whose memory is initialised with NaN."""

    def __init__(
        self,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        length: int,
        block_size: int = 16,
        window: int | None = None,
        seed: int = 0,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(count: int) -> torch.Tensor:
            return torch.randn(length, count, head_dim, generator=generator)

        self.query, self.key, self.value = normal(heads), normal(kv_heads), normal(kv_heads)
        self.block_size, self.window = block_size, window
        shape = (BLOCKS, 2, block_size, kv_heads, head_dim)
        self.blocks = torch.full(shape, torch.nan, dtype=dtype)
        self.table = random.Random(seed).sample(range(BLOCKS), blocks_for(length, block_size))
        self.attention = CompiledPagedAttention(head_dim, dtype)
        self.scaling = head_dim**-0.5

    def chunk(self, begin: int, end: int, sample: SampleSpec | None = None) -> Chunk:
        return Chunk("a", begin, (0,) * (end - begin), tuple(self.table), sample)

    def attend(self, begin: int, end: int, sample: SampleSpec | None = None) -> torch.Tensor:
        """Rows `begin` to `end` as one chunk."""
        rows, batch = slice(begin, end), Batch((self.chunk(begin, end, sample),))
        return self.attention.forward(
            self.query[rows],
            self.key[rows],
            self.value[rows],
            self.blocks,
            MetadataBuilder(self.block_size, **BUILDER).build(batch, BLOCKS),
            sliding_window=self.window,
            scaling=self.scaling,
        )

    def expected(self) -> torch.Tensor:
        """All rows in float64, from inputs rounded as in the cache."""
        dtype = self.blocks.dtype
        query, key, value = (
            tensor.to(dtype).double() for tensor in (self.query, self.key, self.value)
        )
        share = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(share, 1) for tensor in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * self.scaling
        distance = torch.arange(len(query))[:, None] - torch.arange(len(query))
        hidden = distance < 0
        if self.window is not None:
            hidden |= distance >= self.window
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value).float()


def cuts(length: int, *, seed: int) -> list[int]:
    """Random positions at which to split a prompt."""
    rng = random.Random(seed)
    made = [0]
    while made[-1] < length:
        made.append(min(length, made[-1] + rng.choice([1, 2, 3, 15, 16, 17, 64, 65, 100])))
    return made


@pytest.mark.parametrize("dtype", PANEL_DTYPES)
@pytest.mark.parametrize("window", [None, 1, 7, 64, 100])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(3, 1, 64), (4, 4, 16), (4, 2, 80), (2, 1, 128), (2, 1, 4)]
)
def test_chunks_attend_to_all_before_them(
    heads: int, kv_heads: int, head_dim: int, window: int | None, dtype: torch.dtype
) -> None:
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "length": 333}
    cache = Cache(**sizes, window=window, dtype=dtype)
    borders = cuts(333, seed=head_dim)
    actual = torch.cat([cache.attend(*rows) for rows in pairwise(borders)])
    # Weights are rounded to bfloat16, whose relative error is 2**-9 at most.
    tolerance = 2**-7 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(actual, cache.expected(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", PANEL_DTYPES)
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("block_size", [4, 16, 20])
def test_a_row_has_the_same_bits_however_the_prompt_is_cut(
    block_size: int, window: int | None, dtype: torch.dtype
) -> None:
    sizes = {"heads": 6, "kv_heads": 2, "head_dim": 64, "length": 230}
    options = {"block_size": block_size, "window": window, "dtype": dtype}
    whole = Cache(**sizes, **options).attend(0, 230)
    for seed in range(4):
        cache = Cache(**sizes, **options)
        parts = [cache.attend(*rows) for rows in pairwise(cuts(230, seed=seed))]
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("dtype", PANEL_DTYPES)
@pytest.mark.parametrize("window", [None, 1, 20, 64, 300])
@pytest.mark.parametrize("head_dim", [4, 32, 48, 64, 128])
@pytest.mark.parametrize("block_size", [4, 16, 32])
def test_decode_steps_attend_to_all_before_them(
    block_size: int, head_dim: int, window: int | None, dtype: torch.dtype
) -> None:
    sizes = {"heads": 6, "kv_heads": 2, "head_dim": head_dim, "length": 150}
    cache = Cache(**sizes, block_size=block_size, window=window, dtype=dtype)
    expected = cache.expected()
    cache.attend(0, 129)
    tolerance = 2**-7 if dtype == torch.bfloat16 else 1e-5
    for step in range(129, 150):
        actual = cache.attend(step, step + 1, DECODE)
        close = {"rtol": tolerance, "atol": tolerance}
        torch.testing.assert_close(actual, expected[step : step + 1], **close)


@needs_panel_product
def test_a_row_does_not_depend_on_its_batch() -> None:
    """A chunk, a decode step and another chunk together, and each of them alone."""
    sizes = {"heads": 6, "kv_heads": 2, "head_dim": 64, "length": 100}
    caches = [Cache(**sizes, seed=seed) for seed in range(3)]
    spans = [(20, 100, None), (70, 71, DECODE), (64, 90, None)]
    blocks = torch.cat([cache.blocks for cache in caches])
    alone, chunks = [], []
    for index, (cache, (begin, end, sample)) in enumerate(zip(caches, spans, strict=True)):
        cache.attend(0, begin)
        blocks[index * BLOCKS : (index + 1) * BLOCKS] = cache.blocks
        alone.append(cache.attend(begin, end, sample))
        ids = tuple(index * BLOCKS + block for block in cache.table)
        chunks.append(cache.chunk(begin, end, sample)._replace(seq_id=str(index), block_ids=ids))
    rows_of = dict(zip(caches, spans, strict=True))
    together = caches[0].attention.forward(
        *(
            torch.cat([getattr(cache, name)[slice(*rows[:2])] for cache, rows in rows_of.items()])
            for name in ("query", "key", "value")
        ),
        blocks,
        MetadataBuilder(16, **BUILDER).build(Batch(tuple(chunks)), len(blocks)),
        sliding_window=None,
        scaling=caches[0].scaling,
    )
    assert torch.equal(together, torch.cat(alone))
    bits = torch.cat([cache.blocks for cache in caches]).view(torch.int16)
    assert torch.equal(blocks.view(torch.int16), bits)


@needs_panel_product
def test_scores_of_any_size_are_weighed() -> None:
    """Scores that rise from tile to tile, and some whose exponentials are beyond float32."""
    cache = Cache(heads=2, kv_heads=1, head_dim=64, length=200)
    cache.key *= torch.linspace(0.1, 60, 200)[:, None, None]
    torch.testing.assert_close(cache.attend(0, 200), cache.expected(), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize(
    ("block_size", "head_dim", "dtype"),
    [(6, 64, torch.bfloat16), (16, 6, torch.bfloat16), (16, 64, torch.float64)],
)
def test_other_caches_do_not_fit(block_size: int, head_dim: int, dtype: torch.dtype) -> None:
    assert not fits(block_size, head_dim, dtype)


def test_nothing_fits_without_a_matrix_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attention, "panel_calls", lambda _dtype: None)
    assert not fits(16, 64, torch.bfloat16)


@needs_panel_product
def test_unsupported_inputs_are_refused() -> None:
    cache = Cache(heads=3, kv_heads=1, head_dim=64, length=4)
    cache.query = torch.zeros(4, 3, 32)
    with pytest.raises(ValueError, match="cannot attend"):
        cache.attend(0, 4)
    cache = Cache(heads=3, kv_heads=1, head_dim=64, length=4)
    cache.value = torch.zeros(3, 1, 64)
    with pytest.raises(ValueError, match="cannot be stored"):
        cache.attend(0, 4)


@pytest.mark.parametrize("dtype", PANEL_DTYPES)
@pytest.mark.parametrize("window", [None, 90])
def test_rows_and_heads_that_take_turns_have_the_same_bits(
    dtype: torch.dtype, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with AMX, with more pairs than fit in a turn, and some incomplete ones."""
    outputs = []
    for instructions in ([], ["amx_bf16"]):
        monkeypatch.setattr(paged_attention, "product_instructions", lambda _, i=instructions: i)
        cache = Cache(
            heads=6, kv_heads=2, head_dim=64, length=300, window=window, dtype=dtype, seed=7
        )
        outputs.append(torch.cat([cache.attend(0, 37), cache.attend(37, 300)]))
    assert torch.equal(*outputs)
    torch.testing.assert_close(outputs[1], cache.expected(), rtol=2e-2, atol=2e-2)
