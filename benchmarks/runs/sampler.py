"""Reads a system's counters while a round runs, in a thread of its own."""

import threading

from benchmarks.systems.system import System
from services.common.clock import monotonic_s
from tideserve.load.record import TokenSample

INTERVAL_S = 1.0


class CounterSampler:
    """A context in which a system's counters are read once a second, in seconds of the clock.

    `capacity_samples`: (time, tokens of KV cache). `pipeline_samples`: (time, busy seconds, bubble
    seconds), both summed over all stages of pipelines since the system began. `token_samples`: what
    has been processed since then.
    """

    def __init__(self, system: System) -> None:
        self._system = system
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self.capacity_samples: list[tuple[float, int]] = []
        self.pipeline_samples: list[tuple[float, float, float]] = []
        self.token_samples: list[TokenSample] = []

    def __enter__(self) -> "CounterSampler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            counters, now_s = self._system.counters(), monotonic_s()
            if counters.capacity_now_tokens is not None:
                self.capacity_samples.append((now_s, counters.capacity_now_tokens))
            if counters.busy_s is not None and counters.bubble_s is not None:
                self.pipeline_samples.append((now_s, counters.busy_s, counters.bubble_s))
            if counters.processed is not None:
                self.token_samples.append(
                    TokenSample(
                        now_s,
                        counters.processed,
                        counters.output,
                        counters.recomputed,
                        counters.batch_processed,
                        counters.batch_recomputed,
                    )
                )
