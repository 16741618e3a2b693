"""The `tideserve` command. Everything heavy is imported by the command that needs it."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from tideserve.cli.default import DEFAULT_PORT, DEFAULT_URL
from tideserve.cli.errors import EXIT_UNUSABLE, CommandError
from tideserve.cli.option_types import ApiKey, ClusterDir, Url
from tideserve.cli.up_command import EXAMPLES, up

app = typer.Typer(
    name="tideserve",
    help="Serve a large language model from a cluster of workers on this machine.\n\n"
    "Start with [bold]tideserve up[/], then try [bold]tideserve chat[/] in another terminal.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


app.command(epilog=EXAMPLES)(up)


@app.command(
    epilog="Examples:\n\n"
    "  tideserve status\n\n"
    "  tideserve status --why\n\n"
    "  tideserve status --json | jq .workers"
)
def status(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    why: Annotated[
        bool,
        typer.Option("--why", help="Also the latest decisions about memory and their numbers."),
    ] = False,
) -> None:
    """Show services, workers and groups of a running cluster."""
    from tideserve.cli.status import show_status

    show_status(url, api_key, json, why)


@app.command(
    epilog="Examples:\n\n"
    "  tideserve plan --demand 400MiB\n\n"
    "  tideserve plan --demand 20TiB --instances 10000"
)
def plan(
    demand: Annotated[
        str, typer.Option(help="KV that is needed beyond what is free, such as 4GiB.")
    ],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    instances: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=100_000,
            help="Plan for so many made-up instances of a 14B model, without a cluster.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show which groups would merge to free that much memory; nothing is changed."""
    from tideserve.cli.plan import show_plan

    show_plan(demand, url, api_key, instances, json)


@app.command(
    epilog="Examples:\n\n  tideserve drop\n\n  tideserve drop group-worker-0 group-worker-1"
)
def drop(
    groups: Annotated[
        list[str] | None,
        typer.Argument(help="Groups as `tideserve status` shows them.", show_default="all"),
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Merge groups by hand: each worker drops layers that another one runs, and gets KV cache.

    Requests go on. Waits until the merged group serves, or says why it does not.
    """
    from tideserve.cli.groups import drop as run

    run(url, api_key, groups or [])


@app.command(epilog="Examples:\n\n  tideserve restore\n\n  tideserve restore group-worker-0")
def restore(
    group: Annotated[
        str | None,
        typer.Argument(
            help="Merged group as `tideserve status` shows it.", show_default="the only one"
        ),
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Split a merged group by hand: each worker takes its layers back.

    Requests go on. Waits until all workers serve alone, or says why they do not.
    """
    from tideserve.cli.groups import restore as run

    run(url, api_key, group)


@app.command(
    epilog="Examples:\n\n"
    "  tideserve chat\n\n"
    "  tideserve chat 'What is the capital of France?' --temperature 0\n\n"
    "  git diff | tideserve chat --system 'Summarise this change.'"
)
def chat(
    prompt: Annotated[
        str | None, typer.Argument(help="What to ask; without it, standard input.")
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    model: Annotated[
        str | None, typer.Option(help="Model to ask.", show_default="the one that is served")
    ] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 always takes the likeliest token.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer in tokens.")] = None,
) -> None:
    """Talk to the served model; answers are shown as they are made."""
    from tideserve.cli.chat import chat as run

    run(url, api_key, prompt, model, system, temperature, max_tokens)


@app.command(
    epilog="Examples:\n\n"
    "  tideserve logs\n\n"
    "  tideserve logs worker-0 --follow\n\n"
    "  tideserve logs gateway --lines 500 --raw | jq ."
)
def logs(
    service: Annotated[
        str | None,
        typer.Argument(
            help="gateway, scheduler, memmgr, worker-0, …, etcd.", show_default="all, merged"
        ),
    ] = None,
    port: Annotated[int, typer.Option(help="HTTP port of the cluster.")] = DEFAULT_PORT,
    cluster_dir: ClusterDir = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on as lines are written.")
    ] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="Lines of each service to begin with.")
    ] = 50,
    raw: Annotated[bool, typer.Option("--raw", help="Lines as they were written.")] = False,
) -> None:
    """Show what the services of a cluster on this machine wrote."""
    from tideserve.cli.cluster_folder import ClusterFolder, default_folder
    from tideserve.cli.logs import show_logs

    folder = ClusterFolder(cluster_dir or default_folder(port))
    show_logs(folder.logs, service, lines, follow, raw)


@app.command(
    epilog="Examples:\n\n"
    "  tideserve bench steady --quick\n\n"
    "  tideserve bench burst --quick --json burst.json --plot burst.png\n\n"
    "  tideserve bench steady --systems tideserve,mine=http://127.0.0.1:9000"
)
def bench(
    scenario: Annotated[
        str,
        typer.Argument(
            help="steady, burst, ablation, overhead; drop for what a drop costs without load;"
            " churn for merges and splits in a row under load."
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
    model: Annotated[
        str | None,
        typer.Option(help="Hub id or local folder.", show_default="SmolLM2-135M-Instruct"),
    ] = None,
    workers: Annotated[int, typer.Option(help="Workers, and instances of vLLM.")] = 2,
    memory: Annotated[
        str | None,
        typer.Option(help="Memory of each worker.", show_default="the scenario's"),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="bfloat16, float32 or float64.", show_default="the scenario's"),
    ] = None,
    paced: Annotated[
        str | None,
        typer.Option(
            help="Device profile (A100-14B, or A100-14B:2 at half its speed) whose iteration times"
            " are kept, too; without --model, by a tiny model that this machine computes fast"
            " enough."
        ),
    ] = None,
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
    from tideserve.bench.scenarios.scenario import Choice
    from tideserve.cli.bench import BenchArguments, run_bench

    tiny = paced is not None and model is None
    _, slowdown = split_slowdown(paced) if paced is not None and tiny else ("", 1.0)
    choice = Choice(
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
            model,
            workers,
            memory,
            dtype,
            paced,
            slo or (),
            api_key,
            json,
            plot,
        )
    )


@app.command()
def demo() -> None:
    """Watch memory change its purpose: a flood of requests under two overload policies.

    Starts a small cluster for each policy and ends by itself.
    """
    from tideserve.cli.demo import run_demo

    run_demo()


@app.command(
    epilog="Examples:\n\n"
    "  tideserve simulate tideserve/sim/examples/burst-a100.yaml\n\n"
    "  tideserve simulate my-cluster.yaml --seed 7 --json figures.json\n\n"
    "  tideserve simulate --against bench.json\n\n"
    "  tideserve simulate --against burst.json --calibrate burst.json"
)
def simulate(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="YAML file; examples are in tideserve/sim/examples.", show_default=False
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Makes arrivals and lengths.", show_default="the file's, or 0"),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="File for all figures.")] = None,
    against: Annotated[
        Path | None,
        typer.Option(help="Result of 'tideserve bench --json': simulate what it measured."),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            help="With --against: name or file of the device profile.",
            show_default="the one that 'tideserve profile' stored",
        ),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="With --against: another result of 'tideserve bench', whose workers counted how"
            " much longer than that profile says iterations take; or the same one, of which each"
            " system gets what the others counted."
        ),
    ] = None,
) -> None:
    """Simulate a cluster of any size with the policies of the real one.

    With --against, the cluster and load of a benchmark, its figures beside the simulated ones.
    """
    if (config is None) == (against is None):
        raise CommandError("give either a configuration or --against, not both", EXIT_UNUSABLE)
    if against is None and (profile is not None or calibrate is not None):
        raise CommandError("--profile and --calibrate go with --against only", EXIT_UNUSABLE)
    if against is not None and seed is not None:
        raise CommandError("--seed is the result's own with --against", EXIT_UNUSABLE)
    if against is not None:
        from tideserve.cli.against import run_against

        run_against(against, profile, calibrate, json)
    elif config is not None:
        from tideserve.cli.simulate import run_simulation

        run_simulation(config, seed, json)


@app.command(
    epilog="Examples:\n\n"
    "  tideserve profile\n\n"
    "  tideserve profile --quick --json | jq .error\n\n"
    "  tideserve profile --model ./my-model --dtype float32 --threads 2"
)
def profile(
    model: Annotated[
        str | None,
        typer.Option(help="Hub id or local folder.", show_default="SmolLM2-135M-Instruct"),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16, float32 or float64.", show_default="bfloat16")
    ] = None,
    load_format: Annotated[
        str | None, typer.Option(help="auto, or dummy for random weights.", show_default="auto")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Device.", show_default="cpu")] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="Device memory: parameters, KV cache, staging.", show_default="1GiB"),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(help="Compute threads.", show_default="as for a worker of tideserve up"),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Workers that share this machine's processors and memory: as many engines run at"
            " once, and one is measured. Other devices are measured alone.",
            show_default="2",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="About 40 seconds instead of two minutes.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Measure how long iterations take here, fit the cost model and store it for workers.

    Reports the error on batches that the fit has not seen, beside the noise of the machine.
    """
    from tideserve.cli.profile import run_profile

    flags = {
        "model": model,
        "dtype": dtype,
        "load_format": load_format,
        "device": device,
        "memory": memory,
        "threads": threads,
        "workers": workers,
    }
    run_profile(flags, quick, json)


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed_version

    try:
        print(f"tideserve {installed_version('tideserve')}")
    except PackageNotFoundError:
        print("tideserve (from its source folder)")


def main() -> None:
    """Entry point: errors are one sentence on standard error and an exit code."""
    try:
        app()
    except CommandError as error:
        print(f"tideserve: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader of our output has had enough, as in `tideserve logs | head`.
        sys.stderr.close()
        sys.exit(0)


if __name__ == "__main__":
    main()
