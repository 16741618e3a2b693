"""An engine process that serves requests without a gateway: times between tokens."""

import asyncio
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gpu_steps.figures import Figures, step_parser
from benchmarks.gpu_steps.loop_load import (
    CASE_TIMEOUT_S,
    DRY,
    FULL,
    SAMPLINGS,
    LoopLoad,
    figures_of,
)
from services.common.timeouts import timeout
from services.core.planner.config import GPU_LIMITS, IterationConfig
from services.core.request import Limits, Request, Sampling
from services.worker.config import WorkerConfig
from services.worker.engine_client import EngineClient
from services.worker.ipc import Progress


def main() -> None:
    """Measure and write the file."""
    chosen = step_parser(__doc__).parse_args()
    figures = Figures(chosen.file)
    device = "cpu" if chosen.dry else chosen.device
    with tempfile.TemporaryDirectory(prefix="tideserve-loop-") as folder:
        asyncio.run(serve_all(DRY if chosen.dry else FULL, device, Path(folder), figures))
    figures.end()


async def serve_all(load: LoopLoad, device: str, folder: Path, figures: Figures) -> None:
    """Start the engine, and run the cases one after another. Raises ServiceError."""
    config = WorkerConfig(
        worker_id="engine-loop",
        etcd_url="",
        model_name="random-weights",
        model_dir=load.write_model(folder),
        run_dir=folder / "run",
        memory_bytes=load.memory_bytes,
        device=device,
        dtype="float32" if device == "cpu" else "bfloat16",
        load_format="dummy",
        profile_when_idle=False,
        planner=IterationConfig(**(GPU_LIMITS if device != "cpu" else {})),
    )
    client = EngineClient(config, "1")
    began_s = time.monotonic()
    try:
        ready = await client.start()
        figures.add("start_s", round(time.monotonic() - began_s, 2))
        figures.add("kv_tokens", ready.kv_blocks_total * ready.block_size)
        figures.add("lengths", {"prompt": load.prompt_tokens, "output": load.output_tokens})
        streams = LoopStreams(client, load)
        running = asyncio.create_task(client.run(streams.note, lambda: None))
        for count, name in load.cases:
            # The first run of a case compiles kernels and captures graphs.
            await streams.run(count, name)
            figures.add(f"{count} {name}", await streams.run(count, name))
            print(f"{count} {name} after {time.monotonic() - began_s:.1f} s", file=sys.stderr)
        running.cancel()
        await asyncio.wait([running])
    finally:
        await client.stop()


@dataclass(slots=True)
class LoopStreams:
    """Sends requests to an engine, and notes when their tokens arrive."""

    client: EngineClient
    load: LoopLoad
    _times_s: dict[str, list[float]] = field(default_factory=dict)
    _left: set[str] = field(default_factory=set)
    _failed: list[str] = field(default_factory=list)
    _all_ended: asyncio.Event = field(default_factory=asyncio.Event)
    _runs: int = 0

    def note(self, progress: Progress) -> None:
        """Record the tokens of an iteration."""
        now_s = time.perf_counter()
        for token in progress.tokens:
            self._times_s[token.request_id].append(now_s)
            if token.finish_reason is not None:
                self._left.discard(token.request_id)
        self._failed += [refusal.message for refusal in progress.refusals]
        if not self._left or self._failed:
            self._all_ended.set()

    async def run(self, count: int, sampling: str) -> dict[str, float]:
        """Run `count` requests at once; returns the figures.

        Raises:
            RuntimeError: if the engine refuses a request.
            TimeoutError: if they do not end.
        """
        self._runs += 1
        requests = [
            Request(
                f"{self._runs}-{number}",
                prompt,
                Sampling(**SAMPLINGS[sampling]),
                Limits(max_tokens=self.load.output_tokens),
                time.monotonic(),
            )
            for number, prompt in enumerate(self.load.prompts(count, self._runs))
        ]
        self._times_s = {request.request_id: [] for request in requests}
        self._left = set(self._times_s)
        self._all_ended.clear()
        began_s = time.perf_counter()
        for request in requests:
            await self.client.start_request(request)
        async with timeout(CASE_TIMEOUT_S):
            await self._all_ended.wait()
        if self._failed:
            raise RuntimeError(f"the engine refuses a request: {self._failed[0]}")
        return figures_of(self._times_s.values(), began_s)


if __name__ == "__main__":
    main()
