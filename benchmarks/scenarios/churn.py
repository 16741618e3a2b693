"""`churn`: many merges and splits under load must not lose, duplicate or block requests, nor leak.

The groups are changed manually, one change at a time, while requests keep arriving and some clients
disconnect. Afterwards the event log of every process is replayed and audited for invariants I1-I11.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.audit_logs import Audited
from benchmarks.faults.cluster import await_true, running_cluster
from benchmarks.faults.load import Shape, SteadyLoad
from benchmarks.faults.memory import ResidentMemory
from benchmarks.faults.outcomes import Tally, request_rows
from benchmarks.group_changes import MERGE_PATH, SPLIT_PATH, ChangeFailed, change_groups
from benchmarks.scenarios.scenario import GPU, LoadChoice, Scenario, TrialVerdict
from benchmarks.systems.cluster_status import read_status
from benchmarks.systems.system import Deployment, Say
from services.common.clock import monotonic_s
from tideserve.cli.tiny_model import DEEP

FULL_CYCLES, QUICK_CYCLES = 100, 10
CHANGE_TIMEOUT_S, REST_TIMEOUT_S = 60.0, 30.0
PAUSE_S = 0.3
"""How long each configuration serves before the next change."""
OPTIONS = {"overload_policy": "recompute"}
"""The cluster changes its groups only on request."""


@dataclass(slots=True)
class Churned:
    """Results of the changes."""

    wanted: int
    merges: int = 0
    splits: int = 0
    refused: int = 0
    failure: str = ""
    duration_s: float = 0.0
    memory: ResidentMemory = field(default_factory=lambda: ResidentMemory(10, growth_max=0.05))
    """Resident memory of each worker's processes after every cycle, which varies with logs."""
    blocks: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Free and total blocks at the end, by worker."""


def churn(
    url: str, admin_url: str, model: str, cycles: int, shape: Shape, say: Say
) -> tuple[Churned, Tally]:
    """Merge and split all groups `cycles` times under load, then wait until the cluster is idle.

    Raises:
        SystemUnavailable: if the cluster does not report its status.
    """
    done, began_s = Churned(cycles), monotonic_s()
    with SteadyLoad(url, model, shape) as load:
        time.sleep(PAUSE_S)
        try:
            for cycle in range(cycles):
                say(f"cycle {cycle + 1} of {cycles}, {load.tally.ended} requests have ended")
                done.refused += change_groups(admin_url, MERGE_PATH, CHANGE_TIMEOUT_S)
                done.merges += 1
                # Let the merged group serve requests before the split.
                time.sleep(PAUSE_S)
                done.refused += change_groups(admin_url, SPLIT_PATH, CHANGE_TIMEOUT_S)
                done.splits += 1
                time.sleep(PAUSE_S)
                for worker in read_status(admin_url)["workers"]:
                    done.memory.note(str(worker["id"]), worker["pids"])
        except ChangeFailed as error:
            done.failure = f"change {done.merges + done.splits + 1} failed: {error}"
        say("waiting for the last requests")
    done.duration_s = monotonic_s() - began_s
    await_true(_at_rest(admin_url, done), REST_TIMEOUT_S)
    return done, load.tally


def _at_rest(admin_url: str, done: Churned) -> Callable[[], bool]:
    """A check that no worker has a request, which records the free blocks."""

    def at_rest() -> bool:
        workers = read_status(admin_url)["workers"]
        done.blocks = {
            worker["id"]: (int(worker["kv_blocks_free"]), int(worker["kv_blocks_total"]))
            for worker in workers
        }
        idle = bool(workers) and not any(
            worker["running"] or worker["waiting"] for worker in workers
        )
        return idle and all(free == total > 0 for free, total in done.blocks.values())

    return at_rest


def judge(done: Churned, tally: Tally, audited: Audited) -> TrialVerdict:
    """Figures, and a problem for every violated property."""
    problems = [done.failure] if done.failure else []
    problems += tally.problems()
    problems += [
        f"{name} has {total - free} of {total} blocks in use when idle"
        for name, (free, total) in done.blocks.items()
        if free != total
    ]
    problems += [*done.memory.problems(), *audited.problems]
    counts = tally.counts()
    del counts["different"]  # answers are not compared
    figures = {
        "cycles": done.wanted,
        "merges": done.merges,
        "splits": done.splits,
        "changes_refused_at_first": done.refused,
        "duration_s": done.duration_s,
        "requests": counts,
        "rss_bytes": done.memory.figures(),
        "kv_blocks_free_and_total": done.blocks,
        "replayed": {
            name: {"events": replay.events, "decisions": replay.decisions}
            for name, replay in audited.replayed.items()
        },
        **audited.figures,
        "problems": problems,
    }
    decisions = sum(replay.decisions for replay in audited.replayed.values())
    rows = [
        ("merges / splits", f"{done.merges} / {done.splits} in {done.duration_s:,.0f} s"),
        ("refused at first and repeated", str(done.refused)),
        *request_rows(counts),
        *done.memory.rows(),
        *(
            (f"free blocks of {name} at rest", f"{free} of {total}")
            for name, (free, total) in done.blocks.items()
        ),
        (
            "decisions replayed",
            f"{decisions:,}, {'not all alike' if audited.differing else 'identical'}",
        ),
        *audited.rows,
    ]
    return TrialVerdict(figures, rows, problems)


def run(deployment: Deployment, choice: LoadChoice, say: Say, progress: Say) -> TrialVerdict:
    """Start a cluster with event logs, change its groups, and audit the logs."""
    cycles = choice.cycles or (QUICK_CYCLES if choice.quick else FULL_CYCLES)
    with running_cluster(deployment, deployment.workers, OPTIONS, say) as cluster:
        shape = Shape(seed=choice.seed)
        done, tally = churn(cluster.url, cluster.admin_url, cluster.model, cycles, shape, progress)
        progress("replaying and auditing the event logs")
        verdict = judge(done, tally, cluster.audit())
        cluster.keep_if(verdict.problems, "churn", say)
    return verdict


SCENARIO = Scenario(
    name="churn",
    memory="32MiB",
    run=run,
    options=GPU | {"cycles"},
    tiny_model=DEEP,
    gpu_memory="256MiB",
)
