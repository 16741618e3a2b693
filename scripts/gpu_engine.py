"""Time the engine itself on this GPU, beside the decoder of `gpu_profile.py` as one captured graph.

    python scripts/gpu_engine.py FILE [--size 14B] [--memory-gib 60]

Needs an NVIDIA GPU with room for the model, and Python with PyTorch for CUDA, Triton and what the
engine itself imports. Weights are random: they do not influence the time. FILE gets, for batches of
each kind, how long an iteration takes from its plan to its tokens, how long the same work takes as
one graph and as products alone; what a drop of half of the layers costs; how soon an iteration
stops; and how much memory the engine uses beside the arena.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_decoder import SIZES, Decoder, Size
from gpu_facts import attempt
from gpu_timing import capture, typical_s
from torch.nn import functional

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # as a worker has it
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from services.core.planner.batch import SampleSpec, SampleTerms  # noqa: E402
from services.core.planner.block_pool import BlockPool  # noqa: E402
from services.core.request import Sampling  # noqa: E402
from services.worker.engine.compute.runner import ModelRunner  # noqa: E402
from services.worker.engine.compute.runner_config import RunnerConfig  # noqa: E402
from services.worker.engine.profile.measurer import Measurer  # noqa: E402
from services.worker.engine.sampling.sampler import Sampled  # noqa: E402

REPEATS, INTERRUPTIONS = 12, 20
Chunks = tuple[tuple[int, int], ...]
BATCHES: dict[str, Chunks] = {
    "decode of 1 at 1,000": ((1000, 1),),
    "decode of 16 at 1,000": ((1000, 1),) * 16,
    "decode of 64 at 1,000": ((1000, 1),) * 64,
    "decode of 256 at 500": ((500, 1),) * 256,
    "prefill of 256": ((0, 256),),
    "prefill of 2,048": ((0, 2048),),
    "prefill of 512 beside decode of 32 at 1,000": ((0, 512), *((1000, 1),) * 32),
}


def main() -> None:
    """Measure, and write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, help="where the figures go")
    parser.add_argument("--size", default="14B", help=f"one of {', '.join(SIZES)}")
    parser.add_argument("--memory-gib", type=float, default=60, help="budget of the engine")
    arguments = parser.parse_args()
    size = SIZES[arguments.size]
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d"),
        "pytorch": torch.__version__,
        "model": f"{size.model} in bfloat16, random weights",
    }
    began_s = time.monotonic()
    runner = load(size, int(arguments.memory_gib * 2**30))
    found["load_s"] = round(time.monotonic() - began_s, 1)
    found["chunk_mib"] = runner.stage_memory.plan.chunk_bytes >> 20
    found["kv_tokens"] = runner.num_blocks * runner.block_size
    measurer = Measurer(runner, BlockPool(runner.num_blocks))
    found["iterations"] = {name: iteration(measurer, chunks) for name, chunks in BATCHES.items()}
    found["interrupted"] = attempt(partial(interruptions, measurer))
    found["sampled"] = attempt(partial(sampling, runner))
    found["staging_mib"] = runner.staging_bytes >> 20
    found["torch_reserved_mib"] = torch.cuda.max_memory_reserved() >> 20
    found["torch_allocated_mib"] = torch.cuda.max_memory_allocated() >> 20
    free_bytes, all_bytes = torch.cuda.mem_get_info()
    arena_bytes = runner.stage_memory.plan.arena_bytes
    found["beside_arena_mib"] = (all_bytes - free_bytes - arena_bytes) >> 20
    found["drop"] = attempt(partial(drop, runner, measurer))
    runner.check_invariants()
    runner.close()
    for name, times in graph_times(size).items():
        found["iterations"][name] |= times
    arguments.file.write_text(json.dumps(found, indent=1))
    print(json.dumps(found, indent=1))


def load(size: Size, budget_bytes: int) -> ModelRunner:
    """The engine with random weights of this size."""
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "hidden_size": size.hidden,
                "intermediate_size": size.intermediate,
                "num_hidden_layers": size.layers,
                "num_attention_heads": size.heads,
                "num_key_value_heads": size.kv_heads,
                "head_dim": size.head_dim,
                "vocab_size": size.vocabulary,
                "max_position_embeddings": 32_768,
                "tie_word_embeddings": False,
            }
        )
    )
    config = RunnerConfig(
        model_dir=folder,
        device="cuda",
        dtype=torch.bfloat16,
        budget_bytes=budget_bytes,
        load_format="dummy",
        max_running=256,
        threads=1,
    )
    return ModelRunner.load(config)


def sampling(runner: ModelRunner) -> dict[str, float]:
    """Tokens of 64 rows: drawn, drawn from the best, and with rules, which the host does."""
    logits = torch.randn(64, runner.geometry.vocab_size, dtype=torch.bfloat16, device="cuda")
    kinds = {
        "greedy_ms": Sampling(temperature=0),
        "drawn_ms": Sampling(seed=1),
        "top_p_ms": Sampling(top_p=0.9, seed=1),
        "penalised_ms": Sampling(frequency_penalty=0.5, seed=1),
    }
    found = {}
    for name, chosen in kinds.items():
        spec = SampleSpec(SampleTerms(chosen), 0)
        specs = [(f"{name}-{row}", spec) for row in range(64)]
        act = partial(runner.sampler.sample, logits, specs, Sampled())
        found[name] = statistics.median([timed_ms(act) for _ in range(6)][1:])
    runner.sampler.keep_only(())
    return found


def iteration(measurer: Measurer, chunks: Chunks) -> dict[str, float]:
    """From the batch's plan to its tokens on the host, as the engine's loop waits for them."""
    times_s = [measurer.duration_s(chunks) or 0.0 for _ in range(REPEATS + 3)][3:]
    return {"engine_ms": 1e3 * statistics.median(times_s), "longest_ms": 1e3 * max(times_s)}


def graph_times(size: Size) -> dict[str, dict[str, float]]:
    """The same batches without an engine: one graph for an iteration, and its products alone."""
    decoder = Decoder(size, 150_000 if size.kv_heads < size.heads else 70_000)
    found = {}
    for name, chunks in BATCHES.items():
        work = decoder.prepare(chunks)
        whole = capture(partial(decoder.run, work))
        rows = len(work.tokens)
        alone = capture(partial(products, decoder, rows, len(chunks)))
        found[name] = {
            "graph_ms": 1e3 * typical_s(whole.replay, REPEATS),
            "products_ms": 1e3 * typical_s(alone.replay, REPEATS),
        }
    return found


def products(decoder: Decoder, rows: int, sampled: int) -> None:
    """All products of an iteration of so many tokens."""
    size = decoder.size
    hidden = torch.ones(rows, size.hidden, dtype=torch.bfloat16, device=decoder.device)
    inner = hidden.new_ones(rows, size.heads * size.head_dim)
    gated = hidden.new_ones(rows, size.intermediate)
    for weights in decoder.weights:
        functional.linear(hidden, weights.qkv)
        functional.linear(inner, weights.output)
        functional.linear(hidden, weights.gate_up)
        functional.linear(gated, weights.down)
    functional.linear(hidden[:sampled], decoder.head)


def interruptions(measurer: Measurer) -> dict[str, float]:
    """How long an iteration of 2,048 tokens goes on after it was asked to stop."""
    whole_s = statistics.median(measurer.duration_s(((0, 2048),)) or 0.0 for _ in range(5))
    polled_s = statistics.median(
        measurer.duration_s(((0, 2048),), lambda: False) or 0.0 for _ in range(5)
    )
    late_ms = []
    for number in range(INTERRUPTIONS):
        stop, asked_s = threading.Event(), [0.0]
        at_s = whole_s * (0.1 + 0.7 * number / INTERRUPTIONS)
        timer = threading.Timer(at_s, partial(_ask, stop, asked_s))
        timer.start()
        ended = measurer.duration_s(((0, 2048),), stop.is_set)
        torch.cuda.synchronize()
        now_s = time.perf_counter()
        timer.join()
        if ended is None:
            late_ms.append(1e3 * (now_s - asked_s[0]))
    return {
        "whole_ms": 1e3 * whole_s,
        "interruptible_ms": 1e3 * polled_s,
        "stopped": len(late_ms),
        "stop_ms": statistics.median(late_ms),
        "longest_stop_ms": max(late_ms),
    }


def _ask(stop: threading.Event, asked_s: list[float]) -> None:
    asked_s[0] = time.perf_counter()
    stop.set()


def timed_ms(act: Callable[[], object]) -> float:
    """Milliseconds on the host."""
    began_s = time.perf_counter()
    act()
    return 1e3 * (time.perf_counter() - began_s)


def drop(runner: ModelRunner, measurer: Measurer) -> dict[str, Any]:
    """Half of the layers go, their memory becomes KV; then a layer comes back from host memory."""
    memory = runner.stage_memory
    half = memory.num_layers // 2
    before = memory.num_blocks
    found: dict[str, Any] = {"prepare_ms": timed_ms(partial(memory.prepare_drop, 0, half))}
    report = memory.set_stage(0, half)
    found |= {
        "pause_us": report.paused_us,
        "dropped_gib": report.dropped_bytes / 2**30,
        "mapped_gib": report.mapped_bytes / 2**30,
        "tokens_before": before * runner.block_size,
    }
    slices = [timed_ms(memory.finish_drop)]
    while memory.arena.retired_chunks:
        slices.append(timed_ms(memory.finish_drop))
    found |= {"finish_ms": sum(slices), "longest_slice_ms": max(slices), "slices": len(slices)}
    found["tokens_when_kv_has_left"] = memory.release_departed(0) * runner.block_size
    memory.finish_drop(None)
    limit = memory.blocks_beside(0, half + 1)
    found["shrink_ms"] = timed_ms(partial(memory.shrink_kv, limit, used_blocks=0))
    name = f"model.layers.{half}"
    found["map_layer_ms"] = timed_ms(partial(memory.map_layer_parameters, name))
    size_bytes = memory.slabs[name].layout.size_bytes
    piece = torch.zeros(min(64 << 20, size_bytes), dtype=torch.uint8)
    took_ms = timed_ms(partial(memory.unpack_slab, name, 0, piece))
    found["unpack_gib_per_s"] = piece.numel() / 2**30 / (took_ms / 1e3)
    blocks = list(range(min(256, memory.num_blocks)))
    memory.pack_kv(0, blocks)
    packed = memory.pack_kv(0, blocks)
    took_ms = timed_ms(partial(memory.pack_kv, 0, blocks, packed))
    found["pack_gib_per_s"] = packed.numel() / 2**30 / (took_ms / 1e3)
    took_ms = timed_ms(partial(memory.unpack_kv, 0, blocks, packed))
    found["unpack_kv_gib_per_s"] = packed.numel() / 2**30 / (took_ms / 1e3)
    memory.abandon_restore()
    memory.finish_drop(None)
    return found


if __name__ == "__main__":
    main()
