"""Reads a system's counters while a round runs, in a thread of its own."""

import threading

from bench.systems.system import System
from services.common.clock import monotonic_s

INTERVAL_S = 1.0


class Sampler:
    """`with Sampler(system) as sampler:`; afterwards `samples` holds (time, KV use)."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self.samples: list[tuple[float, float]] = []

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            use = self._system.counters().kv_use
            if use is not None:
                self.samples.append((monotonic_s(), use))
