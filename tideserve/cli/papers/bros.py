"""BROS §7: real-time requests beside best-effort ones, and alone."""

from collections.abc import Mapping

from tideserve.cli.papers.page import Comparison, PaperPage, ratio
from tideserve.cli.papers.runs import Figures, PageRun, at, run_example
from tideserve.cli.papers.svg import BarChart, Chart

FIRST, ROBIN, BROS, OURS = "prefill-first", "round-robin", "bros", "slo"
HOST = "bros-host"


def page(run: PageRun) -> PaperPage:
    """Run the examples `hybrid-bros-opt-13b`, `hybrid-bros-alone` and `hybrid-bros-sharing`."""
    loads = run_example("hybrid-bros-opt-13b", run)
    alone = run_example("hybrid-bros-alone", run)
    sharing = run_example("hybrid-bros-sharing", run)
    return PaperPage(
        "BROS: hybrid real-time and best-effort requests",
        (
            "OPT-13B on two A100 of 40 GB as one device, an estimate from data sheets. The examples"
            " hybrid-bros-opt-30b and hybrid-bros-llama-70b have the paper's other models.",
            "prefill-first: the paper's vLLM. bros: its packing, without shared blocks and host"
            " memory: best-effort work that loses its KV is computed again. bros-host: with lazy"
            " checkpoints in host memory, of which there is enough. slo: our default.",
        ),
        [row for load, systems in loads.items() for row in _rows(load, systems)]
        + [row for load, systems in alone.items() for row in _alone_rows(load, systems)]
        + [row for load, systems in sharing.items() for row in _sharing_rows(load, systems)],
        _charts(loads),
        ("TGI as a baseline.",),
    )


def _latency(figures: Figures) -> float | None:
    value: float | None = at(figures, "classes", "online", "normalized_latency_s", "mean")
    return value


def _attained(figures: Figures) -> float | None:
    return _in_time(figures, "ttft")


def _in_time(figures: Figures, kind: str) -> float | None:
    value: float | None = at(figures, "classes", "online", "slo_attainment", kind)
    return value


def _best_effort(figures: Figures) -> float | None:
    value: float | None = at(figures, "classes", "batch", "throughput_requests_per_s")
    return value


def _rows(load: str, systems: Mapping[str, Figures]) -> list[Comparison]:
    first, robin, bros = (systems[name] for name in (FIRST, ROBIN, BROS))
    mean = "The paper's value is the mean over its loads."
    return [
        Comparison(
            "Figure 10",
            f"latency per token, bros over vLLM, {load}",
            0.258,
            ratio(_latency(bros), _latency(first)),
            note=mean,
        ),
        Comparison(
            "Figure 10",
            f"latency per token, bros over round robin, {load}",
            0.457,
            ratio(_latency(bros), _latency(robin)),
            note=f"{mean} Our round robin runs prompts in chunks.",
        ),
        Comparison(
            "Figure 10",
            f"best-effort requests per second, bros over vLLM, {load}",
            0.887,
            ratio(_best_effort(bros), _best_effort(first)),
            note=f"{mean} Without its shared blocks and host memory, preempted work runs again.",
        ),
        Comparison(
            "Figure 10",
            f"best-effort requests per second, bros-host over vLLM, {load}",
            0.887,
            ratio(_best_effort(systems[HOST]), _best_effort(first)),
            note=mean,
        ),
        Comparison(
            "Figure 11",
            f"first tokens in time, bros over vLLM, {load}",
            36.38,
            ratio(_attained(bros), _attained(first)),
            note="The paper's value is the highest of its loads: vLLM attains next to nothing"
            " there. Ours depends on how little prefill-first attains.",
        ),
    ]


def _alone_rows(load: str, systems: Mapping[str, Figures]) -> list[Comparison]:
    if not {FIRST, BROS} <= systems.keys():
        return []
    return [
        Comparison(
            "Figure 12",
            f"latency per token without best-effort work, bros over vLLM, {load or 'alone'}",
            0.706,
            ratio(_latency(systems[BROS]), _latency(systems[FIRST])),
            note="The paper's value is the mean over its loads; the gain grows with the load.",
        )
    ]


def _sharing_rows(load: str, systems: Mapping[str, Figures]) -> list[Comparison]:
    note = (
        "OPT-30B with 70 % of its KV memory, since requests do not compete for all of it here."
        " Without shared blocks, the paper computes requests that find no block again, of either"
        " kind; ours take the blocks of best-effort requests then, so real-time requests gain"
        " little from sharing them, and only the last ones are shared."
    )
    return [
        Comparison(
            "Figure 13",
            f"{title}, {system} with shared blocks over without, {load}",
            printed,
            ratio(_in_time(systems[shared], kind), _in_time(systems[system], kind)),
            note=note,
        )
        for system, shared in ((BROS, "bros-sharing"), ("bros-64", "bros-sharing-64"))
        for title, kind, printed in (
            ("first tokens in time", "ttft", 1.23),
            ("times per token in time", "tpot", 1.63),
        )
    ]


def _charts(loads: Mapping[str, Mapping[str, Figures]]) -> list[Chart]:
    shown = (FIRST, ROBIN, BROS, HOST, OURS)
    names = [load.replace(", ", " ").replace(" a second", "/s") for load in loads]
    return [
        BarChart(
            title,
            unit,
            names,
            {name: [value_of(systems[name]) for systems in loads.values()] for name in shown},
        )
        for title, unit, value_of in (
            ("Figure 10: latency per token, real time", "seconds", _latency),
            ("Figure 10: best-effort requests", "per second", _best_effort),
            ("Figure 11: first tokens in time", "share", _attained),
        )
    ]
