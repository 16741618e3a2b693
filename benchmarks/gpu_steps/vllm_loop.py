"""The load of `engine_loop` on vLLM, in vLLM's environment, without its server."""

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from benchmarks.gpu_steps.figures import Figures, step_parser
from benchmarks.gpu_steps.loop_load import (
    CASE_TIMEOUT_S,
    DRY,
    FULL,
    SAMPLINGS,
    LoopLoad,
    figures_of,
)

MEMORY_SHARE = 0.5
"""Share of GPU memory: about that of `FULL` for the other engine on a GPU with 141 GB."""
MAX_MODEL_LEN, MAX_BATCH_TOKENS, MAX_RUNNING = 4096, 2048, 256


def main() -> None:
    """Measure and write the file."""
    chosen = step_parser(__doc__).parse_args()
    figures = Figures(chosen.file)
    with tempfile.TemporaryDirectory(prefix="vllm-loop-") as folder:
        asyncio.run(serve_all(DRY if chosen.dry else FULL, chosen.dry, Path(folder), figures))
    figures.end()


async def serve_all(load: LoopLoad, dry: bool, folder: Path, figures: Figures) -> None:
    """Start vLLM, and run the cases one after another."""
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    began_s = time.monotonic()
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(load.write_model(folder)),
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="float32" if dry else "bfloat16",
            gpu_memory_utilization=MEMORY_SHARE,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=MAX_BATCH_TOKENS,
            max_num_seqs=MAX_RUNNING,
            enable_prefix_caching=False,
            generation_config="vllm",
            disable_log_stats=True,
        )
    )
    try:
        figures.add("version", vllm.__version__)
        figures.add("start_s", round(time.monotonic() - began_s, 2))
        figures.add("lengths", {"prompt": load.prompt_tokens, "output": load.output_tokens})
        runs = 0
        for count, name in load.cases:
            for _ in range(2):  # the first run warms up
                runs += 1
                case = run_case(engine, load, count, name, runs)
                result = await asyncio.wait_for(case, CASE_TIMEOUT_S)
            figures.add(f"{count} {name}", result)
            print(f"{count} {name} after {time.monotonic() - began_s:.1f} s", file=sys.stderr)
    finally:
        engine.shutdown()


async def run_case(
    engine: Any, load: LoopLoad, count: int, sampling: str, run: int
) -> dict[str, float]:
    """Run `count` requests at once; returns the figures."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    params = SamplingParams(
        max_tokens=load.output_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        **SAMPLINGS[sampling],
    )
    began_s = time.perf_counter()
    streams = [
        arrivals(engine.generate({"prompt_token_ids": list(prompt)}, params, f"{run}-{number}"))
        for number, prompt in enumerate(load.prompts(count, run))
    ]
    return figures_of(await asyncio.gather(*streams), began_s)


async def arrivals(outputs: AsyncIterator[Any]) -> list[float]:
    """When each token arrives; tokens of one output arrive together."""
    times_s: list[float] = []
    async for output in outputs:
        now_s = time.perf_counter()
        times_s += [now_s] * len(output.outputs[0].token_ids)
    return times_s


if __name__ == "__main__":
    main()
