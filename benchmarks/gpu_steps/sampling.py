"""Sampling on a GPU: tokens compared with the host's, and durations alone and during decodes.

Weights are random; logits are synthetic, with almost all of the probability on a few tokens.
Without a GPU, the kernels need Triton's interpreter (`TRITON_INTERPRET=1`).
"""

import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_engine import LEAD_CYCLES, REPEATS, SIZES, load, typical_ms
from benchmarks.gpu_steps.figures import Figures, step_parser
from benchmarks.sampling_rows import Rows, language_logits, random_rows
from services.core.planner.batch import Batch, Chunk, SampleSpec, SampleTerms
from services.core.planner.block_pool import BlockPool
from services.core.request import Sampling, blocks_for
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.sampling.device_sampler import GPU_SIZES, DeviceSampler, KernelSizes
from services.worker.engine.sampling.grammar import Grammars
from services.worker.engine.sampling.sampler import Sampled, Sampler

CONTEXT, OUTPUT = 1000, 200
QWEN = Sampling(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05)
"""The generation_config.json of Qwen2.5-7B- and 14B-Instruct."""
CASES: dict[str, SampleTerms] = {
    "greedy": SampleTerms(Sampling(temperature=0.0)),
    "temperature": SampleTerms(Sampling()),
    "top_p": SampleTerms(Sampling(top_p=0.8)),
    "qwen_default": SampleTerms(QWEN),
    "qwen_default_logprobs_5": SampleTerms(QWEN, top_logprobs=5),
    "qwen_default_allowed": SampleTerms(replace(QWEN, allowed_token_ids=tuple(range(500)))),
}
NO_MODEL = Path("no model")


@dataclass(frozen=True, slots=True)
class SamplingExtent:
    """The requests of an iteration, the repeats of each time, and the comparisons with the host.

    `equality`: (vocabulary, batches).
    """

    rows: int
    repeats: int
    equality: tuple[tuple[int, int], ...]
    kernels: KernelSizes


FULL = SamplingExtent(64, REPEATS, ((32_000, 32), (152_064, 8)), GPU_SIZES)
DRY = SamplingExtent(1, 1, ((1000, 4),), KernelSizes(1024, 8, 1024, 256, 1000))


def main() -> None:
    """Measure and write the file."""
    parser = step_parser(__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--memory-gib", type=float, default=24)
    chosen = parser.parse_args()
    figures = Figures(chosen.file)
    extent = DRY if chosen.dry else FULL
    device = torch.device("cpu" if chosen.dry else chosen.device)
    size = SIZES["tiny"] if chosen.dry else SIZES["14B"] | {"num_hidden_layers": chosen.layers}
    figures.add("rows", extent.rows)
    for vocab_size, batches in extent.equality:
        compare = partial(equality, vocab_size, batches, extent, device)
        figures.measure(f"equality_{vocab_size}", compare)
    figures.measure("sampler_ms", partial(sampler_figures, size["vocab_size"], extent, device))
    budget_bytes = 100 << 20 if chosen.dry else int(chosen.memory_gib * 2**30)
    runner = load(size, device, budget_bytes)
    figures.add("layers", runner.geometry.num_layers)
    figures.measure("decode_ms", partial(decode_figures, runner, extent))
    figures.end()


def equality(
    vocab_size: int, batches: int, extent: SamplingExtent, device: torch.device
) -> dict[str, Any]:
    """Compare the choices of the device with the host's, for random rows with every option."""
    rng, rows = np.random.default_rng(vocab_size), extent.rows
    on_device = device_sampler(vocab_size, extent, device)
    differ: list[str] = []
    for _ in range(batches):
        made = random_rows(rng, rows, vocab_size)
        host, there = (sampled(made, each, device) for each in (None, on_device))
        differ += [
            str(terms)
            for name, terms in zip(map(str, range(rows)), made.terms, strict=True)
            if (host.tokens.get(name), host.failed.get(name))
            != (there.tokens.get(name), there.failed.get(name))
        ]
    return {"rows": batches * rows, "differ": len(differ), "first": differ[:3]}


def sampled(rows: Rows, on_device: DeviceSampler | None, device: torch.device) -> Sampled:
    """Sample `rows` with a new sampler."""
    vocab_size = rows.logits.shape[1]
    grammars = Grammars(NO_MODEL, vocab_size)
    sampler, made = Sampler(vocab_size, grammars, torch.float32, on_device), Sampled()
    specs = [
        (str(place), SampleSpec(terms, index))
        for place, (terms, index) in enumerate(zip(rows.terms, rows.indices, strict=True))
    ]
    logits = rows.logits.clone() if on_device is None else rows.logits.to(device)
    with np.errstate(invalid="ignore", over="ignore"):
        sampler.sample(logits, specs, made)
    return made


def device_sampler(vocab_size: int, extent: SamplingExtent, device: torch.device) -> DeviceSampler:
    """A sampler for batches of `extent`."""
    return DeviceSampler(
        vocab_size,
        rows_max=extent.rows,
        slots=extent.rows,
        max_model_len=10 * CONTEXT,
        device=device,
        sizes=extent.kernels,
    )


def sampler_figures(
    vocab_size: int, extent: SamplingExtent, device: torch.device
) -> dict[str, dict[str, float]]:
    """Time the sampler alone: until the host has the tokens, and on the device."""
    logits = language_logits(np.random.default_rng(1), extent.rows, vocab_size).to(device)
    figures = {name: sampler_ms(logits, terms, extent) for name, terms in CASES.items()}
    # Nuclei that do not fit into a window, or into a wide window.
    for name, deviation in (("wide", 1.8), ("flat", 0.03)):
        wide = torch.zeros_like(logits).normal_(0, deviation)
        figures[f"top_p_{name}"] = sampler_ms(wide, CASES["top_p"], extent)
    return figures


def sampler_ms(
    logits: torch.Tensor, terms: SampleTerms, extent: SamplingExtent
) -> dict[str, float]:
    """Time iterations of a sampler of `logits` [rows, vocab]."""
    rows, vocab_size = logits.shape
    on_device = device_sampler(vocab_size, extent, logits.device)
    sampler = Sampler(vocab_size, Grammars(NO_MODEL, vocab_size), torch.float32, on_device)
    steps = Requests(terms, rows, vocab_size)

    def iterate() -> float:
        began_s = time.perf_counter()
        made = Sampled()
        sampler.sample(logits, list(steps.specs().items()), made)
        ended_s = time.perf_counter()
        steps.add(made.tokens)
        return ended_s - began_s

    def on_device_s() -> float:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        specs, made = list(steps.specs().items()), Sampled()
        # Keep the device busy while the host launches, so that launch latency is not timed.
        torch.cuda._sleep(LEAD_CYCLES)
        began.record()
        finish = sampler.start(logits, specs)
        ended.record()
        finish(made)
        steps.add(made.tokens)
        return began.elapsed_time(ended) / 1e3

    figures = {"until_tokens": typical_ms(iterate, extent.repeats)}
    if logits.is_cuda:
        figures["device"] = typical_ms(on_device_s, extent.repeats)
    return figures


class Requests:
    """Requests with equal terms, each with its own prompt and output."""

    def __init__(self, terms: SampleTerms, count: int, vocab_size: int) -> None:
        rng = np.random.default_rng(count)
        self._reads = terms.sampling.reads_output
        self._terms: dict[str, SampleTerms | None] = {}
        for place in range(count):
            prompt, output = (
                tuple(rng.integers(vocab_size, size=size).tolist()) if self._reads else ()
                for size in (CONTEXT, OUTPUT)
            )
            sampling = replace(terms.sampling, seed=place)
            self._terms[str(place)] = replace(
                terms, sampling=sampling, prompt_ids=prompt, output_ids=output
            )
        self._new: dict[str, tuple[int, ...]] = {}
        self._index = OUTPUT

    def specs(self) -> dict[str, SampleSpec]:
        """The specs of the next tokens."""
        return {
            name: SampleSpec(terms, self._index, self._new.get(name, ()))
            for name, terms in self._terms.items()
        }

    def add(self, tokens: dict[str, int]) -> None:
        """Append the sampled tokens to the outputs."""
        self._terms = dict.fromkeys(self._terms)
        self._new = {name: (token,) for name, token in tokens.items()} if self._reads else {}
        self._index += 1


def decode_figures(runner: ModelRunner, extent: SamplingExtent) -> dict[str, float]:
    """Time decodes of all requests at `CONTEXT` tokens for each case, in ms per iteration."""
    device, vocab_size = runner.device, runner.geometry.vocab_size
    rows, repeats = extent.rows, extent.repeats
    logits = language_logits(np.random.default_rng(2), rows, vocab_size).to(device)
    compute = runner.decoder.logits

    def made_up(hidden: torch.Tensor) -> torch.Tensor:
        compute(hidden)
        return logits[: len(hidden)]

    figures = {}
    with torch.inference_mode():
        runner.decoder.logits = made_up  # type: ignore[method-assign]
        for name, terms in CASES.items():
            figures[name] = typical_ms(
                partial(decoded_s, runner, Requests(terms, rows, vocab_size))
            )
        sampler = runner.sampler
        runner.sampler = Sampler(vocab_size, runner.grammars, torch.float32)
        requests = Requests(CASES["qwen_default"], rows, vocab_size)
        figures["qwen_default_on_host"] = typical_ms(partial(decoded_s, runner, requests), repeats)
        runner.sampler = sampler
        runner.decoder.logits = compute  # type: ignore[method-assign]
    return figures


def decoded_s(runner: ModelRunner, requests: Requests) -> float:
    """Duration of an iteration in which each request decodes a token."""
    needed = blocks_for(CONTEXT + 1, runner.block_size)
    specs = requests.specs()
    tables = BlockPool(runner.num_blocks).borrow([needed] * len(specs))
    batch = Batch(
        tuple(
            Chunk(name, CONTEXT, (7,), table, spec)
            for (name, spec), table in zip(specs.items(), tables, strict=True)
        )
    )
    began_s = time.perf_counter()
    tokens = runner.run(batch)
    duration_s = time.perf_counter() - began_s
    runner.sampler.keep_only(specs.keys())
    requests.add(tokens or {})
    return duration_s


if __name__ == "__main__":
    main()
