"""KunServe §5: bursts with and without dropped parameters, by lengths, and restoring."""

from collections.abc import Mapping
from typing import Any

from tideserve.cli.papers.page import Comparison, PaperPage, ratio
from tideserve.cli.papers.runs import Figures, PageRun, at, run_example
from tideserve.cli.papers.svg import BarChart, Chart, LineChart

EXAMPLE = "drop-a100"
SETS: Mapping[str, Mapping[str, Any]] = {
    "ShareGPT": {},
    "BurstGPT": {
        "prompt": {"mean": 642, "cv": 1.0, "most": 4000},
        "output": {"mean": 262, "cv": 1.0, "most": 2000},
        "rate_per_s": 12,
        "burst_rate_per_s": 48,
    },
    "LongBench": {
        "prompt": {"mean": 5900, "cv": 0.6, "most": 16000},
        "output": {"mean": 499, "cv": 0.6, "most": 2000},
        "rate_per_s": 1.6,
        "burst_rate_per_s": 6,
    },
}
"""Keys of the load that differ: lengths of KunServe Table 2, rates that overflow the memory."""
DROP, RECOMPUTE = "drop", "recompute"
SEVERAL = {"kind": "on_off", "on_rate_per_s": 18, "off_rate_per_s": 4, "on_s": 30, "off_s": 60}
"""Several overloads in a row, as in Figure 16."""
NEVER_S = 3600
RESTORED, KEPT = "with restore", "without restore"


def page(run: PageRun) -> PaperPage:
    """Run the simulations."""
    sets = run_example(EXAMPLE, run, {"loads": dict(SETS)})
    restored, kept = (
        run_example(
            EXAMPLE,
            run,
            {
                "workload": {**SEVERAL, **_LENGTHS},
                "overload_policy": DROP,
                "monitor": {} if restore else {"split_dwell_s": NEVER_S},
                "duration_s": 300,
            },
        )[""][DROP]
        for restore in (True, False)
    )
    return PaperPage(
        "KunServe: parameter-centric memory management",
        (
            "8 instances of A100-14B, an estimate from data sheets, with 40 GB for model and KV.",
            "Arrivals by gamma-distributed gaps with a burst of four times the rate, instead of the"
            " paper's scaled BurstGPT trace; lengths log-normal with the means of its data sets.",
            "recompute stands for vLLM: a preempted request is computed again.",
        ),
        [*_rows(sets), *_restore_rows(restored, kept)],
        [*_charts(sets), *_restore_charts(restored, kept)],
        (
            "InferCept (swap), Llumnix (migrate) and pipelines from the start: not simulated.",
            "The 72B model on several GPUs: there is no profile of it.",
        ),
    )


_LENGTHS = {
    "prompt": {"mean": 1660, "cv": 1.0, "most": 4000},
    "output": {"mean": 373, "cv": 1.0, "most": 2000},
}


def _rows(sets: Mapping[str, Mapping[str, Figures]]) -> list[Comparison]:
    rows = []
    for name, systems in sets.items():
        drop, base = systems[DROP], systems[RECOMPUTE]
        tail = ratio(at(base, "ttft_s", "p99"), at(drop, "ttft_s", "p99"))
        gap = ratio(at(drop, "tpot_s", "p50"), at(base, "tpot_s", "p50"))
        note = (
            "The paper: 12.7 to 72.2 times over all sets and baselines; its smallest is shown."
            " Depends on how far the burst exceeds the memory."
        )
        rows += [
            Comparison(
                "Figure 13", f"P99 TTFT, recompute over drop, {name}", 12.7, tail, note=note
            ),
            Comparison(
                "Figure 13",
                f"median time per token, drop over recompute, {name}",
                1.19,
                gap,
                note="The paper: 1.158 to 1.227. Requests that recompute waits for do not decode"
                " meanwhile, so its median may be that of an emptier device.",
            ),
        ]
    return rows


def _restore_rows(restored: Figures, kept: Figures) -> list[Comparison]:
    why = "Two overloads of 30 s in 300 s instead of the paper's 640 s of a trace."
    return [
        Comparison(
            "Figure 16",
            f"{text}, {RESTORED} over {KEPT}",
            paper,
            ratio(at(restored, metric, share), at(kept, metric, share)),
            note=why,
        )
        for text, metric, share, paper in (
            ("median TTFT", "ttft_s", "p50", 0.72),
            ("median time per token", "tpot_s", "p50", 0.77),
        )
    ]


def _charts(sets: Mapping[str, Mapping[str, Figures]]) -> list[Chart]:
    charts: list[Chart] = [
        LineChart(
            f"Figure 12: KV demand over the undropped capacity, {name}",
            "seconds",
            "share",
            {system: _over_time(of, "demand_share") for system, of in systems.items()}
            | {"capacity with drop": _over_time(systems[DROP], "capacity_share")},
            guide=1.0,
        )
        for name, systems in sets.items()
    ]
    for title, metric, share in (
        ("Figure 13: P99 time to first token", "ttft_s", "p99"),
        ("Figure 13: median time per token", "tpot_s", "p50"),
    ):
        values = {
            system: [at(systems[system], metric, share) for systems in sets.values()]
            for system in (DROP, RECOMPUTE)
        }
        charts.append(BarChart(title, "seconds", list(sets), values))
    return charts


def _restore_charts(restored: Figures, kept: Figures) -> list[Chart]:
    both = {RESTORED: restored, KEPT: kept}
    return [
        LineChart(
            "Figure 16: KV capacity over the undropped one",
            "seconds",
            "share",
            {name: _over_time(of, "capacity_share") for name, of in both.items()},
        ),
        BarChart(
            "Figure 16: latencies of several overloads",
            "seconds",
            ["median TTFT", "P99 TTFT"],
            {n: [at(of, "ttft_s", share) for share in ("p50", "p99")] for n, of in both.items()},
        ),
    ]


def _over_time(figures: Figures, key: str) -> list[tuple[float, float]]:
    return [(sample["time_s"], sample[key]) for sample in figures["kv_over_time"]]
