"""BROS §7: real-time requests beside best-effort ones, and alone."""

from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import NamedTuple

from tideserve.cli.papers.page import Comparison, PaperPage, ratio
from tideserve.cli.papers.planning import planning_share
from tideserve.cli.papers.runs import Figures, PageRun, at, example, run_example
from tideserve.cli.papers.svg import BarChart, Chart

FIRST, ROBIN, BROS, OURS = "prefill-first", "round-robin", "bros", "slo"
HOST = "bros-host"
PLANNED = ("OPT-13B", "OPT-30B")
"""Models of Figure 14."""
PLANNED_LOAD = "ShareGPT, 10 a second"
Loads = Mapping[str, Mapping[str, Figures]]
Value = Callable[[Figures], float | None]


class _Printed(NamedTuple):
    """The paper's means over its loads of a data set, of BROS over vLLM and over round robin."""

    latency: tuple[float, float]
    best_effort: tuple[float, float]
    first_tokens: tuple[float, float]
    token_times: tuple[float, float]


PRINTED: Mapping[str, _Printed] = {
    "ShareGPT": _Printed((0.258, 0.457), (0.887, 0.912), (36.38, 11.75), (1.73, 1.47)),
    "LMSYS-Chat": _Printed((0.304, 0.742), (0.823, 0.848), (21.42, 14.23), (2.62, 2.28)),
}
"""BROS §7.2, by data set."""


def page(run: PageRun) -> PaperPage:
    """Run the examples `hybrid-bros-opt-13b`, `hybrid-bros-alone` and `hybrid-bros-sharing`."""
    loads = run_example("hybrid-bros-opt-13b", run)
    alone = run_example("hybrid-bros-alone", run)
    sharing = run_example("hybrid-bros-sharing", run)
    planning = {model: _planning(model, run) for model in PLANNED}
    return PaperPage(
        "BROS: hybrid real-time and best-effort requests",
        (
            "OPT-13B on two A100 of 40 GB as one device, an estimate from data sheets. The examples"
            " hybrid-bros-opt-30b and hybrid-bros-llama-70b have the paper's other models.",
            "prefill-first: the paper's vLLM. bros: its packing, without shared blocks and host"
            " memory: best-effort work that loses its KV is computed again. bros-host: with lazy"
            " checkpoints in host memory, of which there is enough. slo: our default.",
        ),
        [
            *(row for name in PRINTED for row in _mean_rows(name, loads)),
            *(row for load, systems in loads.items() for row in _rows(load, systems)),
            *(row for load, systems in alone.items() for row in _alone_rows(load, systems)),
            *(row for load, systems in sharing.items() for row in _sharing_rows(load, systems)),
            *_planning_rows(planning),
        ],
        [
            *_charts(loads, alone, sharing),
            BarChart("Figure 14: planning", "share", list(planning), {BROS: [*planning.values()]}),
        ],
        ("TGI as a baseline.",),
    )


def _latency(figures: Figures) -> float | None:
    value: float | None = at(figures, "classes", "online", "normalized_latency_s", "mean")
    return value


def _attained(figures: Figures) -> float | None:
    return _in_time(figures, "ttft")


def _token_times(figures: Figures) -> float | None:
    return _in_time(figures, "tpot")


def _in_time(figures: Figures, kind: str) -> float | None:
    value: float | None = at(figures, "classes", "online", "slo_attainment", kind)
    return value


def _best_effort(figures: Figures) -> float | None:
    value: float | None = at(figures, "classes", "batch", "throughput_requests_per_s")
    return value


def _mean_rows(name: str, loads: Loads) -> list[Comparison]:
    """Means over the loads of a data set, beside the paper's."""
    own = [systems for load, systems in loads.items() if load.startswith(name)]
    printed = PRINTED[name]
    rows = []
    for at_place, (base, title) in enumerate(((FIRST, "vLLM"), (ROBIN, "round robin"))):
        over = f"over {title}, {name}, mean of loads"
        rows += [
            Comparison(
                "Figure 10",
                f"latency per token, bros {over}",
                printed.latency[at_place],
                _mean([ratio(_latency(of[BROS]), _latency(of[base])) for of in own]),
                note="The paper's mean is over three models, too. Our round robin runs prompts in"
                " chunks, and our iterations follow each other without a pause.",
            ),
            *(
                Comparison(
                    "Figure 10",
                    f"best-effort requests per second, {system} {over}",
                    printed.best_effort[at_place],
                    _mean([ratio(_best_effort(of[system]), _best_effort(of[base])) for of in own]),
                    note="As above. Best-effort work that loses its KV "
                    + ("is copied back." if system == HOST else "is computed again."),
                )
                for system in (BROS, HOST)
            ),
            *(
                Comparison(
                    "Figure 11",
                    f"{what} in time, bros {over}",
                    values[at_place],
                    ratio(
                        _mean([_in_time(of[BROS], kind) for of in own]),
                        _mean([_in_time(of[base], kind) for of in own]),
                    ),
                    note="Depends on how little the other system attains: of first tokens, the"
                    " paper's vLLM 1.28 % and its round robin 10.55 %.",
                )
                for what, kind, values in (
                    ("first tokens", "ttft", printed.first_tokens),
                    ("times per token", "tpot", printed.token_times),
                )
            ),
        ]
    return rows


def _rows(load: str, systems: Mapping[str, Figures]) -> list[Comparison]:
    """Figures of a load, which the paper only draws."""
    note = "The paper's text has means only."
    first = systems[FIRST]
    return [
        Comparison("Figure 10", f"{title}, {load}", None, value, note=note)
        for title, value in (
            ("latency per token, bros over vLLM", ratio(_latency(systems[BROS]), _latency(first))),
            *(
                (
                    f"best-effort requests per second, {system} over vLLM",
                    ratio(_best_effort(systems[system]), _best_effort(first)),
                )
                for system in (BROS, HOST)
            ),
        )
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if known else None


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


def _planning(model: str, run: PageRun) -> float | None:
    prepared = example(f"hybrid-bros-{model.lower()}", run)[PLANNED_LOAD]
    return planning_share(prepared, BROS)


def _planning_rows(planning: Mapping[str, float | None]) -> list[Comparison]:
    return [
        Comparison(
            "Figure 14",
            f"planning, as a share of iteration time, {model}",
            printed,
            planning[model],
            "%",
            note="Measured on this machine, by the processor's time; the iterations are simulated.",
            at_most=True,
        )
        for model, printed in zip(PLANNED, (0.0952, 0.0842), strict=True)
    ]


def _charts(loads: Loads, alone: Loads, sharing: Loads) -> list[Chart]:
    shown = (FIRST, ROBIN, BROS, HOST, OURS)
    shared = (BROS, "bros-sharing", "bros-64", "bros-sharing-64")
    return [
        *(
            _chart(title, unit, loads, shown, value_of)
            for title, unit, value_of in (
                ("Figure 10: latency per token, real time", "seconds", _latency),
                ("Figure 10: best-effort requests", "per second", _best_effort),
                ("Figure 11: first tokens in time", "share", _attained),
                ("Figure 11: times per token in time", "share", _token_times),
            )
        ),
        _chart("Figure 12: latency per token, alone", "seconds", alone, (FIRST, BROS), _latency),
        _chart("Figure 13: first tokens in time", "share", sharing, shared, _attained),
        _chart("Figure 13: times per token in time", "share", sharing, shared, _token_times),
    ]


def _chart(title: str, unit: str, loads: Loads, shown: Sequence[str], value_of: Value) -> BarChart:
    names = [load.replace(", ", " ").replace(" a second", "/s") for load in loads]
    columns = {name: [value_of(systems[name]) for systems in loads.values()] for name in shown}
    return BarChart(title, unit, names, columns)
