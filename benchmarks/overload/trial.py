"""Measures loads of `overload` on a running cluster."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from random import Random
from statistics import median
from threading import Event

import psutil

from benchmarks.client_process import run_job
from benchmarks.faults.cluster import await_true, blocks_free
from benchmarks.overload.figures import RECOVERED_FACTOR, Measured, Probe, recovered_s
from benchmarks.overload.load import (
    Targets,
    class_shares,
    mean_tokens,
    request,
    targets_for,
)
from benchmarks.scenarios.recovery import EndlessStreams
from benchmarks.stats import quotient
from benchmarks.systems.cluster_status import read_status
from benchmarks.systems.system import Counters, Say
from benchmarks.systems.tideserve import Tideserve
from services.common.clock import monotonic_s
from services.common.timeouts import timeout
from tideserve.cli.errors import SystemUnavailable
from tideserve.load.client import LEAD_S, Job, Returns
from tideserve.load.event_stream import OpenAIServer, StreamedAnswer, StreamFailed
from tideserve.load.record import SentRequest
from tideserve.load.workload import (
    DEFAULT_CLASS,
    PlannedRequest,
    Workload,
    prompt_ids,
    with_lead_in,
)

CLIENTS_PER_WORKER = 64
"""Clients of the closed loop: about twice as many as decode at the same time."""
LATEST_S = 1800.0
CAPACITY_FROM_S = 6.0
SETTLE_SHARE = 1 / 3
"""Part of a load before its steady state."""
REST_TIMEOUT_S = 90.0
IDLE_PROBES = 5
PROBE_TIMEOUT_S = 60.0
PROBE_TOKENS = 192
"""Prompt of a probe, which leaves room for decodes in an iteration of 256 tokens. A longer prompt
needs two iterations while any request decodes: its TTFT would show when the last answer ends.
"""
PROBE_EVERY_S, SAMPLE_S = 0.25, 0.5
AT_ONCE_EVERY, RETURNS_MAX = 5, 3


class ClosedLoop(EndlessStreams):
    """Clients with a standard request each at a time, at all stages from the start."""

    def drawn(self, clients: int, seed: int) -> Iterator[PlannedRequest]:
        # A target so late that no request is refused.
        targets = targets_for(LATEST_S, mixed=False)
        first = tuple(request(n, f"{seed} closed", DEFAULT_CLASS, targets) for n in range(clients))
        yield from with_lead_in(Workload(first, ""), clients).requests[:clients]
        for number in itertools.count(clients):
            if self._stopped.is_set():
                return
            yield request(number, f"{seed} closed", DEFAULT_CLASS, targets)


@dataclass(frozen=True, slots=True)
class Load:
    """A load: requests in order of arrival, for `seconds`."""

    requests: Sequence[PlannedRequest]
    seconds: float
    targets: Targets

    @classmethod
    def drawn(
        cls, factor: float, capacity_tokens_s: float, seconds: float, targets: Targets, seed: str
    ) -> "Load":
        """Poisson arrivals of `factor` times the capacity, in tokens."""
        rng = Random(f"overload arrivals {seed}")
        shares = class_shares(factor, targets.mixed)
        sample = [request(n, "sample", DEFAULT_CLASS, targets) for n in range(1000)]
        rate = factor * capacity_tokens_s / mean_tokens(sample)
        requests, at_s = list[PlannedRequest](), 0.0
        while at_s < seconds:
            (name,) = rng.choices(list(shares), list(shares.values()))
            made = request(len(requests), seed, name, targets)
            requests.append(replace(made, arrival_s=at_s))
            at_s += rng.expovariate(rate)
        return cls(requests, seconds, targets)


class Trial:
    """Measures loads on a running cluster."""

    def __init__(self, cluster: Tideserve, recovery_max_s: float, seed: int) -> None:
        self._cluster = cluster
        self._recovery_max_s = recovery_max_s
        self._seed = seed
        self._probes = itertools.count()
        self._gateway = psutil.Process(cluster.state["pids"]["gateway"])

    def capacity_tokens_s(self, seconds: float) -> float:
        """Tokens processed per second in a closed loop. Raises SystemUnavailable."""
        cluster = self._cluster
        clients = CLIENTS_PER_WORKER * int(cluster.options()["workers"])
        loop = ClosedLoop(cluster.urls[0], cluster.model, clients, self._seed)
        loop.start()
        try:
            time.sleep(CAPACITY_FROM_S)
            before, from_s = cluster.counters(), monotonic_s()
            time.sleep(seconds)
            after, to_s = cluster.counters(), monotonic_s()
        finally:
            loop.stop()
        self._rest()
        if before.processed is None or after.processed is None or loop.failures:
            raise SystemUnavailable(f"{cluster.name}: the closed loop failed: {loop.failures[:1]}")
        return (after.processed - before.processed) / (to_s - from_s)

    def measure(self, load: Load, progress: Say) -> Measured:
        """Send a load to the idle cluster, and wait until it is idle again."""
        measured = Measured(load.targets, self._idle_ttft_s(load.targets))
        measured.gateway_bytes.append(self._gateway.memory_info().rss)
        before, cost, since_s = (
            self._cluster.counters(),
            self._cluster.process_cost(),
            monotonic_s(),
        )
        self._send(load, measured, progress)
        spent, seconds = self._cluster.process_cost().since(cost), monotonic_s() - since_s
        measured.cores = {kind: cpu_s / seconds for kind, cpu_s in spent.seconds.items()}
        self._rest()
        measured.iterations_over_paced = _over_paced(before, self._cluster.counters())
        return measured

    def _send(self, load: Load, measured: Measured, progress: Say) -> None:
        cluster, begun = self._cluster, Event()
        job = Job(
            tuple(cluster.urls),
            cluster.model,
            tuple(load.requests),
            timeout_s=load.seconds + self._recovery_max_s,
            returns=Returns(load.seconds, AT_ONCE_EVERY, RETURNS_MAX),
        )

        def note(line: str) -> None:
            begun.set()
            progress(line)

        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(run_job, job, note)
            while not (begun.wait(SAMPLE_S) or sending.done()):
                pass
            end_s = monotonic_s() + LEAD_S + load.seconds
            self._watch(measured, sending, end_s)
            limit_s = RECOVERED_FACTOR * measured.idle_ttft_s
            until_s = end_s + self._recovery_max_s
            measured.probes = asyncio.run(self._probe(load.targets, None, limit_s, until_s))
            measured.records = sending.result()
        end_s = measured.records[0].due_s + load.seconds
        measured.window_s = (end_s - (1 - SETTLE_SHARE) * load.seconds, end_s)

    def _idle_ttft_s(self, targets: Targets) -> float:
        """Median TTFT of the idle cluster. Raises SystemUnavailable."""
        idle = [probe.ttft_s for probe in asyncio.run(self._probe(targets, IDLE_PROBES))]
        known = [ttft_s for ttft_s in idle if ttft_s is not None]
        if len(known) < len(idle):
            raise SystemUnavailable(f"{self._cluster.name} refuses requests while it is idle")
        return median(known)

    def _watch(
        self, measured: Measured, sending: "Future[tuple[SentRequest, ...]]", until_s: float
    ) -> None:
        """Sample the gateway's memory until `until_s`."""
        while monotonic_s() < until_s and not sending.done():
            measured.gateway_bytes.append(self._gateway.memory_info().rss)
            time.sleep(min(SAMPLE_S, max(0.0, until_s - monotonic_s())))

    async def _probe(
        self,
        targets: Targets,
        count: int | None,
        limit_s: float = 0.0,
        until_s: float = float("inf"),
    ) -> list[Probe]:
        """Send standard requests in turn: `count`, or until TTFT is within `limit_s` again."""
        server = OpenAIServer(self._cluster.urls[0], None)
        probes = list[Probe]()
        try:
            while len(probes) != count and monotonic_s() < until_s:
                probe = await self._probe_once(server, targets, until_s)
                probes.append(probe)
                if recovered_s(probes, limit_s) is not None:
                    break
                await asyncio.sleep(max(0.0, probe.sent_s + PROBE_EVERY_S - monotonic_s()))
        finally:
            await server.close()
        return probes

    async def _probe_once(self, server: OpenAIServer, targets: Targets, until_s: float) -> Probe:
        number = next(self._probes)
        made = request(number, f"{self._seed} probe", DEFAULT_CLASS, targets)
        prompt = prompt_ids(PROBE_TOKENS, f"probe {number}")
        made = replace(made, prompt_ids=prompt, output_tokens=1)
        answer, sent_s = StreamedAnswer(), monotonic_s()
        with contextlib.suppress(StreamFailed, OSError, TimeoutError):
            async with timeout(min(PROBE_TIMEOUT_S, until_s - sent_s)):
                await server.complete(self._cluster.model, made, answer, lambda: None)
        times_s = answer.token_times_s
        return Probe(sent_s, times_s[0] - sent_s if times_s else None)

    def _rest(self) -> None:
        """Wait until no request is in the cluster. Raises SystemUnavailable."""
        url = self._cluster.admin_url
        if not await_true(lambda: blocks_free(read_status(url)), REST_TIMEOUT_S):
            raise SystemUnavailable(f"{self._cluster.name}: blocks are in use without a request")


def _over_paced(before: Counters, after: Counters) -> float | None:
    """Duration of the iterations, over that of the paced device."""
    rise = {
        name: (getattr(after, name) or 0.0) - (getattr(before, name) or 0.0)
        for name in ("prefill_s", "decode_s", "prefill_predicted_s", "decode_predicted_s")
    }
    return quotient(
        rise["prefill_s"] + rise["decode_s"],
        rise["prefill_predicted_s"] + rise["decode_predicted_s"],
    )
