"""BucketServe §V: throughput, targets met and overhead, beside UELLM and DistServe."""

from collections.abc import Mapping
from itertools import islice, pairwise
from random import Random

from services.common.device_profile import DeviceProfile, load_profile
from services.core.cost.padded import Execution
from services.core.scheduler.bucket_bounds import BUCKETS_MAX
from tideserve.cli.papers.bucketserve_runs import (
    ALPACA,
    ATTAINED,
    BUCKETSERVE,
    CLIENTS,
    DEVICE,
    DISTSERVE,
    FIRST_S,
    INSTANCES,
    LONG,
    LONGBENCH,
    MIXED,
    PROMPT_INSTANCES,
    SETS,
    SHORT,
    TARGETS_S,
    TIDESERVE,
    UELLM,
    Closed,
    Loads,
    attained_load,
    closed_rates,
    open_loads,
    planning_s,
)
from tideserve.cli.papers.page import Comparison, PaperPage, ratio
from tideserve.cli.papers.runs import PageRun
from tideserve.cli.papers.svg import BarChart, Chart, LineChart

TARGETS_NOTE = (
    "Depends on the targets, which the paper does not state. While targets are met, fewer requests"
    " wait than a batch holds, so there is a single bucket, as the paper has it, and both systems"
    " run alike; its DistServe degrades earlier than an engine that pads."
)
APART_NOTE = (
    f"Prompts run on {PROMPT_INSTANCES} instances of their own, whose padding then limits the"
    " requests served; decodes are left out. Beyond the load that it can serve, DistServe-like"
    " pads every prompt to the longest that waits."
)
SERVED_NOTE = (
    "The highest rate of the loads shown. A static batch waits for its longest output, so the"
    " assumed lengths decide. DistServe-like shares all instances between prompts and decodes, and"
    " does not degrade under overload, as nothing of it is transferred or dropped."
)


def page(run: PageRun) -> PaperPage:
    """Run all simulations of the paper."""
    device = load_profile(DEVICE)
    closed = closed_rates(device, run)
    served = {name: open_loads(device, name, run) for name in (ALPACA, MIXED)}
    apart = {name: open_loads(device, name, run, apart=True) for name in (ALPACA, MIXED)}
    plan_s = {count: planning_s(count) for count in (1, 2, 4, 8, BUCKETS_MAX)}
    charts: list[Chart] = [
        _lengths_chart(run),
        *_batch_charts(device),
        LineChart(
            "Figure 5a: throughput, Mixed",
            "requests at a time",
            "tokens per second",
            {name: [(n, of[0]) for n, of in points.items()] for name, points in closed.items()},
        ),
        _utilisation_chart(closed),
        *_open_charts(served),
        *_apart_charts(served, apart),
        _breakdown_chart(served[MIXED], plan_s[BUCKETS_MAX]),
        LineChart(
            "Figure 6b: time to plan the order of 1,024 requests",
            "buckets",
            "milliseconds",
            {"plan": [(count, 1e3 * seconds) for count, seconds in plan_s.items()]},
        ),
    ]
    return PaperPage(
        "BucketServe: bucket-based dynamic batching",
        (
            f"{INSTANCES} instances of {DEVICE} (Llama-2-13B), an estimate from data sheets.",
            "BucketServe: padded prompts, buckets of its algorithm 1. DistServe-like: padded"
            " prompts by arrival; prompts run apart from decodes, on the same instances unless a"
            " figure says that prompts are apart."
            " UELLM-like: static batches by arrival. tideserve: no padding, adaptive buckets.",
            f"Alpaca: {SHORT[0].mean:g} prompt tokens on average; LongBench: cut to"
            f" {LONG[0].most:,}; Mixed: 80 % and 20 %. Outputs: {SHORT[1].mean:g} and"
            f" {LONG[1].mean:g} tokens (assumed).",
            "Targets (assumed): first token within "
            + "; ".join(f"{s:g} s, {t:g} s per token ({n})" for n, (s, t) in TARGETS_S.items()),
        ),
        [*_offline(closed), *_online(served, apart), _overhead(served[MIXED], plan_s)],
        charts,
        ("The transfer of KV from instances for prompts to those for decodes: its time is small.",),
    )


# --- comparisons


def _offline(closed: Closed) -> list[Comparison]:
    rates = {name: points[max(CLIENTS)][0] for name, points in closed.items()}
    ours = rates[BUCKETSERVE]
    return [
        Comparison(
            "Figure 5a",
            "throughput over UELLM",
            3.58,
            ratio(ours, rates[UELLM]),
            note="The gain grows with the lengths' spread and with the padding of a static batch,"
            " which the paper does not state; ended rows of our static batches cost nothing.",
        ),
        Comparison(
            "Figure 5a",
            "throughput over DistServe",
            1.31,
            ratio(ours, rates[DISTSERVE]),
            note="All gain is padding avoided: DistServe-like pads a whole iteration, by arrival,"
            " on instances that also decode.",
        ),
        Comparison(
            "Figure 5b",
            "GPU utilisation",
            0.8166,
            ratio(ours, rates[TIDESERVE]),
            "%",
            "Ours is the throughput over that of the engine without padding: the share of the"
            " device's time that is not padding. The paper reads the device's counter.",
        ),
    ]


def _online(served: Mapping[str, Loads], apart: Mapping[str, Loads]) -> list[Comparison]:
    rows = [
        Comparison(
            figure,
            f"load over DistServe at 80 % of targets met, {kind}",
            paper,
            ratio(*(attained_load(served[kind][name]) for name in (BUCKETSERVE, DISTSERVE))),
            note=TARGETS_NOTE + _over_targets(served[kind], apart[kind]),
        )
        for figure, kind, paper in (("Figure 5c", ALPACA, 1.37), ("Figure 5d", MIXED, 1.93))
    ]
    for figure, loads, base, paper, note in (
        ("Figure 5e", served[ALPACA], UELLM, 1.975, SERVED_NOTE),
        ("Figure 5f", served[MIXED], DISTSERVE, 1.4, SERVED_NOTE),
        ("Figure 5f", apart[MIXED], DISTSERVE, 1.4, APART_NOTE),
        ("Figure 5f", served[MIXED], UELLM, 3.47, SERVED_NOTE),
    ):
        most = (max(p.ended_per_s for p in loads[name]) for name in (BUCKETSERVE, base))
        quantity = f"served requests over {base}, {ALPACA if loads is served[ALPACA] else MIXED}"
        if loads is apart[MIXED]:
            quantity += ", prompts apart"
        rows.append(Comparison(figure, quantity, paper, ratio(*most), note=note))
    return rows


def target_ratios(loads: Loads) -> list[tuple[float, float]]:
    """By target of the first token in seconds: the load of BucketServe over that of DistServe.

    Targets that a system misses at the lowest load are left out.
    """
    ratios = list[tuple[float, float]]()
    for index, target_s in enumerate(FIRST_S):
        ours, base = (attained_load(loads[name], index) for name in (BUCKETSERVE, DISTSERVE))
        if (value := ratio(ours, base)) is not None:
            ratios.append((target_s, value))
    return ratios


def _over_targets(served: Loads, apart: Loads) -> str:
    ratios = [value for loads in (served, apart) for _, value in target_ratios(loads)]
    if not ratios:
        return ""
    return (
        f" With targets of {FIRST_S[0]:g} to {FIRST_S[-1]:g} s for the first token alone, and with"
        f" prompts apart or not: {min(ratios):.2f} to {max(ratios):.2f} ×."
    )


def _overhead(loads: Loads, plan_s: Mapping[int, float]) -> Comparison:
    highest = loads[BUCKETSERVE][-1]
    return Comparison(
        "Figure 6a",
        "bucketing over execution time, at most",
        0.01,
        _bucketing_s(plan_s[BUCKETS_MAX]) / max(1e-9, highest.first_s + highest.rest_s),
        "%",
        "Ours: the time of a plan in this process for each request that causes one; an upper"
        " bound, since a plan serves at least 32 changes.",
        at_most=True,
    )


def _bucketing_s(plan_s: float) -> float:
    """Planning time of a request in a queue of 1,024: a plan follows at least 32 changes."""
    return plan_s / 32


# --- charts


def _lengths_chart(run: PageRun) -> BarChart:
    bounds = (64, 128, 256, 512, 1024, 2048, 4096)
    values: dict[str, list[float | None]] = {}
    for name in (ALPACA, LONGBENCH):
        drawn = SETS[name].drawn(Random(f"shown {run.seed}"))
        prompts = [arrival.prompt_tokens for arrival in islice(drawn, 2000)]
        below = [sum(tokens <= bound for tokens in prompts) / len(prompts) for bound in bounds]
        values[name] = [after - before for before, after in pairwise((0.0, *below))]
    return BarChart(
        "Figure 2: prompt lengths (log-normal stand-ins)",
        "share of requests",
        [f"≤ {bound}" for bound in bounds],
        values,
    )


def _batch_charts(device: DeviceProfile) -> tuple[BarChart, BarChart]:
    """Time and utilisation of a batch of 16 prompts, padded to the longest."""
    chunks = {
        "short": [(0, 128)] * 16,
        "long": [(0, 2048)] * 16,
        "mixed": [(0, 128)] * 12 + [(0, 2048)] * 4,
    }
    padded = {n: device.model.batch_s(Execution.PADDED.chunks(of)) for n, of in chunks.items()}
    shares = [device.model.batch_s(of) / padded[name] for name, of in chunks.items()]
    names, times_s = list(chunks), list(padded.values())
    return (
        BarChart("Figure 3a: time of 16 prompts", "seconds", names, {"padded": times_s}),
        BarChart("Figure 3b: share that is no padding", "share", names, {"padded": shares}),
    )


def _utilisation_chart(closed: Closed) -> LineChart:
    whole = closed[TIDESERVE]
    lines = {
        name: [(n, of[0] / whole[n][0]) for n, of in points.items() if whole[n][0]]
        for name, points in closed.items()
        if name != TIDESERVE
    }
    return LineChart(
        "Figure 5b: throughput over that without padding", "requests at a time", "share", lines
    )


def _open_charts(served: Mapping[str, Loads]) -> list[Chart]:
    charts: list[Chart] = []
    for figure, kind in (("5c", ALPACA), ("5d", MIXED)):
        lines = {n: [(p.rate, p.attainment) for p in of] for n, of in served[kind].items()}
        title = f"Figure {figure}: targets met, {kind}"
        charts.append(LineChart(title, "requests per second", "share", lines, ATTAINED))
    for figure, kind in (("5e", ALPACA), ("5f", MIXED)):
        lines = {n: [(p.rate, p.ended_per_s) for p in of] for n, of in served[kind].items()}
        title = f"Figure {figure}: requests served, {kind}"
        charts.append(LineChart(title, "requests sent per second", "served per second", lines))
    return charts


def _apart_charts(served: Mapping[str, Loads], apart: Mapping[str, Loads]) -> list[Chart]:
    by_target = {kind: target_ratios(loads) for kind, loads in served.items()}
    by_target |= {f"{kind}, apart": target_ratios(loads) for kind, loads in apart.items()}
    points = {name: [(p.rate, p.ended_per_s) for p in of] for name, of in apart[MIXED].items()}
    return [
        LineChart(
            "Figures 5c and 5d: load over DistServe-like by target",
            "first token within seconds",
            "×",
            by_target,
        ),
        LineChart(
            "Figure 5f: requests served, Mixed, prompts apart",
            "requests sent per second",
            "served per second",
            points,
        ),
    ]


def _breakdown_chart(loads: Loads, plan_s: float) -> BarChart:
    points = loads[BUCKETSERVE]
    return BarChart(
        "Figure 6a: where the time goes, BucketServe, Mixed",
        "seconds",
        [f"{point.rate:.1f}/s" for point in points],
        {
            "queue and prefill": [point.first_s for point in points],
            "decode": [point.rest_s for point in points],
            "bucketing": [_bucketing_s(plan_s) for _ in points],
        },
    )
