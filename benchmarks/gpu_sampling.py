"""Time sampling beside decodes on a GPU, and compare its tokens with the host's.

    python -m benchmarks.gpu_sampling FILE [--size 14B] [--memory-gib 60]

Weights are random; the logits are made up, so that a few tokens have almost all of the probability.
`TRITON_INTERPRET=1 python -m benchmarks.gpu_sampling FILE --device cpu --size tiny --memory-gib
0.1 --rows 2 --repeats 1` runs the same steps without a GPU. The figures are written to FILE as
JSON.
"""

import argparse
import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_engine import LEAD_CYCLES, REPEATS, SIZES, load, typical_ms
from benchmarks.sampling_rows import Rows, language_logits, random_rows
from services.core.planner.batch import Batch, Chunk, SampleSpec, SampleTerms
from services.core.planner.block_pool import BlockPool
from services.core.request import Sampling, blocks_for
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.sampling.device_sampler import DeviceSampler
from services.worker.engine.sampling.grammar import Grammars
from services.worker.engine.sampling.sampler import Sampled, Sampler

CONTEXT, OUTPUT = 1000, 200
QWEN = Sampling(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05)
"""Qwen2.5's generation_config."""
CASES: dict[str, SampleTerms] = {
    "greedy": SampleTerms(Sampling(temperature=0.0)),
    "temperature 1": SampleTerms(Sampling()),
    "top-p 0.8": SampleTerms(Sampling(top_p=0.8)),
    "Qwen2.5": SampleTerms(QWEN),
    "Qwen2.5, 5 log probabilities": SampleTerms(QWEN, top_logprobs=5),
    "Qwen2.5, allowed tokens": SampleTerms(replace(QWEN, allowed_token_ids=tuple(range(500)))),
}
ON_HOST = "Qwen2.5, sampled on the host"
EQUALITY = ((32_000, 32), (152_064, 8))
"""(vocabulary, batches) of the comparison with the host."""
NO_MODEL = Path("no model")


def main() -> None:
    """Measure and write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, help="output file of the figures")
    parser.add_argument("--size", default="14B", choices=SIZES)
    parser.add_argument("--memory-gib", type=float, default=60, help="budget of the engine")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=64, help="requests of an iteration")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    chosen = parser.parse_args()
    device = torch.device(chosen.device)
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "date": time.strftime("%Y-%m-%d"),
        "pytorch": torch.__version__,
        "model": f"the sizes of {chosen.size} in bfloat16, random weights",
        "rows": chosen.rows,
    }
    vocab_size: int = SIZES[chosen.size]["vocab_size"]
    sizes = EQUALITY if device.type == "cuda" else ((vocab_size, 4),)
    figures["equality"] = [equality(*each, chosen.rows, device) for each in sizes]
    figures["sampler"] = sampler_figures(vocab_size, chosen.rows, chosen.repeats, device)
    runner = load(SIZES[chosen.size], device, int(chosen.memory_gib * 2**30))
    figures["decode"] = decode_figures(runner, chosen.rows, chosen.repeats)
    runner.close()
    chosen.file.write_text(json.dumps(figures, indent=1))
    print(json.dumps(figures, indent=1))


def equality(vocab_size: int, batches: int, rows: int, device: torch.device) -> dict[str, Any]:
    """Compare the choices of the device with the host's, for random rows with every option."""
    rng = np.random.default_rng(vocab_size)
    on_device = device_sampler(vocab_size, rows, device)
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
    sizes = {"vocabulary": vocab_size, "rows": batches * rows}
    return sizes | {"differ": len(differ), "first": differ[:3]}


def sampled(rows: Rows, on_device: DeviceSampler | None, device: torch.device) -> Sampled:
    """What a new sampler makes of `rows`."""
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


def device_sampler(vocab_size: int, rows: int, device: torch.device) -> DeviceSampler:
    """A sampler for batches of `rows` rows."""
    return DeviceSampler(
        vocab_size, rows_max=rows, slots=rows, max_model_len=10 * CONTEXT, device=device
    )


def sampler_figures(
    vocab_size: int, rows: int, repeats: int, device: torch.device
) -> dict[str, dict[str, float]]:
    """Time the sampler alone: until the host has the tokens, and on the device."""
    logits = language_logits(np.random.default_rng(1), rows, vocab_size).to(device)
    flat = torch.zeros_like(logits).normal_(0, 0.03)
    figures = {name: sampler_ms(logits, terms, repeats) for name, terms in CASES.items()}
    # The nucleus does not fit into the window.
    figures["top-p 0.8, equal logits"] = sampler_ms(flat, CASES["top-p 0.8"], repeats)
    return figures


def sampler_ms(logits: torch.Tensor, terms: SampleTerms, repeats: int) -> dict[str, float]:
    """Time iterations of a sampler of `logits` [rows, vocab]."""
    rows, vocab_size = logits.shape
    on_device = device_sampler(vocab_size, rows, logits.device)
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

    figures = {"until_tokens_ms": typical_ms(iterate, repeats)}
    if logits.is_cuda:
        figures["device_ms"] = typical_ms(on_device_s, repeats)
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


def decode_figures(runner: ModelRunner, rows: int, repeats: int) -> dict[str, float]:
    """Time decodes of `rows` requests at `CONTEXT` tokens for each case, in ms per iteration."""
    device, vocab_size = runner.device, runner.geometry.vocab_size
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
        requests = Requests(CASES["Qwen2.5"], rows, vocab_size)
        figures[ON_HOST] = typical_ms(partial(decoded_s, runner, requests), repeats)
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
