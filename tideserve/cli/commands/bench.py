"""`tideserve bench`. Everything heavy is imported when it runs."""

from pathlib import Path
from typing import Annotated

import typer

from tideserve.bench.scenarios import scenario_names
from tideserve.cli.default import DEFAULT_WORKERS
from tideserve.cli.option_command import Flags, Wording
from tideserve.cli.option_types import ApiKey

OF_SCENARIO = Wording(default="the scenario's")
FLAGS = Flags(
    ("model", "workers", "memory", "dtype", "paced"),
    {
        "workers": Wording("Workers, and instances of vLLM."),
        "memory": OF_SCENARIO,
        "dtype": OF_SCENARIO,
        "paced": Wording(
            "Device profile (A100-14B, or A100-14B:2 at half its speed) whose iteration times are"
            " kept, too; without --model, by a tiny model that this machine computes fast enough."
        ),
    },
)
EXAMPLES = (
    "Examples:\n\n"
    "  tideserve bench steady --quick\n\n"
    "  tideserve bench burst --quick --json burst.json --plot burst.png\n\n"
    "  tideserve bench steady --systems tideserve,mine=http://127.0.0.1:9000"
)


def bench(
    context: typer.Context,
    scenario: Annotated[
        str,
        typer.Argument(
            help=f"One of {', '.join(scenario_names())}; README.md says what each measures."
        ),
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="At most four minutes of measuring per system.")
    ] = False,
    systems: Annotated[
        str | None,
        typer.Option(
            help="tideserve, an overload policy (drop, recompute), vllm, name=URL; a suffix"
            " -mechanism switches one off.",
            show_default="the scenario's",
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="File for all figures.")] = None,
    plot: Annotated[Path | None, typer.Option(help="File for pictures: .png, .svg, .pdf.")] = None,
    slo: Annotated[
        list[str] | None,
        typer.Option(help="Target: ttft=1.5 (seconds), tpot=5x (times the best P50)."),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            help="Azure or BurstGPT CSV, Mooncake JSONL, or made-up arrivals:"
            " gamma:RATE,CV,SECONDS or phases:SECONDS@RATE,…",
            show_default="Azure conversations",
        ),
    ] = None,
    trace_start: Annotated[
        float | None, typer.Option(min=0, help="Where the slice begins, in seconds.")
    ] = None,
    trace_duration: Annotated[
        float | None, typer.Option(min=0.001, help="Length of the slice, in seconds.")
    ] = None,
    trace_repeat: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1000,
            help="The slice this many times in a row.",
            show_default="once; a full run of the scenario's own slice twice",
        ),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Mean requests a second; keeps the pattern.")
    ] = None,
    time_scale: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="Instead of --rate: arrivals so many times as far apart; 1 as recorded."
        ),
    ] = None,
    cycles: Annotated[
        int | None,
        typer.Option(
            min=1, max=100_000, help="Merges of churn, each with a split.", show_default="100"
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Makes the prompts, and the arrivals of a pattern.")
    ] = 0,
    api_key: ApiKey = None,
) -> None:
    """Compare systems: latencies, throughput, service levels, KV demand."""
    from services.common.device_profile import split_slowdown
    from tideserve.bench.scenarios.scenario import LoadChoice
    from tideserve.cli.bench import BenchArguments, run_bench

    given = {name: value for name, value in context.obj.items() if value is not None}
    paced, workers = given.get("paced"), given.get("workers", DEFAULT_WORKERS)
    tiny = paced is not None and "model" not in given
    _, slowdown = split_slowdown(paced) if paced is not None and tiny else ("", 1.0)
    choice = LoadChoice(
        quick=quick,
        seed=seed,
        trace=trace,
        trace_start_s=trace_start,
        trace_duration_s=trace_duration,
        trace_repeat=trace_repeat,
        rate_per_s=rate,
        time_scale=time_scale,
        paced=tiny,
        slowdown=slowdown,
        cycles=cycles,
        workers=workers,
    )
    run_bench(
        BenchArguments(
            scenario,
            choice,
            systems,
            slos=slo or (),
            api_key=api_key,
            json=json,
            plot=plot,
            **given,
        )
    )
