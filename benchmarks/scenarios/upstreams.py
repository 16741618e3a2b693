"""`upstreams`: two servers behind a gateway, and behind the client's round-robin.

The servers are two clusters of a single paced worker each. Requests of a trace of code completions,
with its unequal lengths, arrive by a Poisson process at the servers in turn, and at a third cluster
in front of them (`tideserve up --upstream`), whose queue assigns them late. Bar: its P99 TTFT is
not above that of round-robin.
"""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.client_process import run_answered
from benchmarks.dispatch_rounds import DispatchRounds
from benchmarks.scenarios.scenario import LoadChoice, Scenario, TrialVerdict
from benchmarks.systems.schedulings import merged
from benchmarks.systems.system import Deployment, Say
from benchmarks.systems.tideserve import Tideserve
from tideserve.load.client import Job
from tideserve.load.record import SentRequest
from tideserve.load.traces import AZURE_CODE, load_trace
from tideserve.load.workload import LengthScale, Workload

FRONT, PLAIN = "gateway", "round-robin"
PACE = "A100-40G-7B:4"
SERVERS = 2
AZURE_CODE_BEGIN_S, AZURE_CODE_S, QUICK_AZURE_CODE_S = 250.0, 50.0, 25.0
"""Part of the slice: 187 requests, quick 95."""
ROUNDS, QUICK_ROUNDS = 7, 3
ROUND_TIMEOUT_S = 300.0
LENGTHS = {"lengths of the trace": LengthScale(0.5, 1.0, (16, 2048), (4, 128))}
DISPATCH = DispatchRounds(FRONT, PLAIN, LENGTHS, {"lengths of the trace": 1.0})


@dataclass(frozen=True, slots=True)
class InFront:
    """The servers, and the cluster in front of them."""

    servers: tuple[Tideserve, ...]
    front: Tideserve

    @classmethod
    def start(cls, deployment: Deployment, say: Say, stack: ExitStack) -> "InFront":
        """Start all clusters; `stack` stops them."""
        # The gateway in front reads the load from the servers' /metrics. Both loads of a round have
        # the same prompts and run on the same servers: a prefix cache would favour the second.
        own = {"gateway": {"cluster_metrics": True}, "worker": {"prefix_caching": False}}
        options = merged(deployment.options, own)
        alone = replace(deployment, workers=1, options=options)
        servers = tuple(Tideserve(f"server {number}", (), alone) for number in range(SERVERS))
        for server in servers:
            stack.callback(server.stop)
            server.start(say)
        urls = [server.urls[0] for server in servers]
        in_front = replace(deployment, workers=SERVERS, paced=None, options={"upstream": urls})
        front = Tideserve(FRONT, (), in_front)
        stack.callback(front.stop)
        front.start(say)
        return cls(servers, front)

    def send(self, name: str, load: Workload, concurrency: int | None) -> tuple[SentRequest, ...]:
        """The records of a load on the gateway in front, or on the servers in turn."""
        systems = (self.front,) if name == FRONT else self.servers
        urls = tuple(system.urls[0] for system in systems)
        return run_answered(
            Job(urls, self.front.model, load.requests, ROUND_TIMEOUT_S, concurrency)
        )


def run(deployment: Deployment, choice: LoadChoice, say: Say, progress: Say) -> TrialVerdict:
    """Start the clusters and measure."""
    deployment = replace(deployment, paced=deployment.paced or PACE)
    trace = load_trace(AZURE_CODE if choice.trace is None else Path(choice.trace))
    seconds = QUICK_AZURE_CODE_S if choice.quick else AZURE_CODE_S
    recorded = trace.slice(AZURE_CODE_BEGIN_S, seconds)
    rounds = QUICK_ROUNDS if choice.quick else ROUNDS
    with ExitStack() as stack:
        sides = InFront.start(deployment, say, stack)
        record = DISPATCH.measure(sides.send, recorded, rounds, choice.seed, progress)
    figures, rows, problems = DISPATCH.judge(record)
    return TrialVerdict({"paced": deployment.paced, **figures}, rows, problems)


SCENARIO = Scenario(
    name="upstreams",
    memory="82MiB",
    paced_memory="82MiB",
    run=run,
    options=frozenset({"paced", "trace"}),
    tiny_model={"num_hidden_layers": 4, "max_position_embeddings": 4096},
    # Workers of a single group cannot merge.
    up_options={"overload_policy": "recompute"},
)
