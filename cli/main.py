"""The `tideserve` command. Everything heavy is imported by the command that needs it."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.default import DEFAULT_PORT, DEFAULT_URL
from cli.errors import EXIT_UNUSABLE, CommandError

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

Url = Annotated[
    str,
    typer.Option(
        envvar="TIDESERVE_URL",
        help="The gateway; needed when the cluster has another port or host.",
        show_default=DEFAULT_URL,
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="TIDESERVE_API_KEY",
        help="API key of the cluster, if it has one; better in the environment, where other users"
        " do not see it.",
    ),
]
ClusterDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder of logs and state.", show_default="clusters/PORT in the tideserve cache"
    ),
]
MODEL, RESOURCES, LIMITS, CLUSTER = "Model", "Resources", "Limits", "Cluster"


@app.command(
    epilog="Examples:\n\n"
    "  tideserve up\n\n"
    "  tideserve up --model Qwen/Qwen2.5-0.5B-Instruct --workers 1 --memory 4GiB\n\n"
    "  tideserve up --model ./my-model --dtype float32 --port 9000\n\n"
    "  TIDESERVE_API_KEY=secret tideserve up --host 0.0.0.0\n\n"
    "  tideserve up --config cluster.yaml"
)
def up(
    model: Annotated[
        str | None,
        typer.Option(
            help="Hub id or local folder with safetensors.",
            show_default="SmolLM2-135M-Instruct",
            rich_help_panel=MODEL,
        ),
    ] = None,
    model_name: Annotated[
        str | None,
        typer.Option(
            help="Name that clients send.",
            show_default="the hub id or the folder's name",
            rich_help_panel=MODEL,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="bfloat16, float32 or float64.", show_default="bfloat16", rich_help_panel=MODEL
        ),
    ] = None,
    load_format: Annotated[
        str | None,
        typer.Option(
            help="auto, or dummy for random weights.", show_default="auto", rich_help_panel=MODEL
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="How many workers; each holds the model.",
            show_default="2",
            rich_help_panel=RESOURCES,
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Device memory of each worker: parameters, KV cache and staging.",
            show_default="1GiB",
            rich_help_panel=RESOURCES,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Device of the workers: cpu, cuda or cuda:N.",
            show_default="cpu",
            rich_help_panel=RESOURCES,
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            help="Compute threads of each worker.",
            show_default="processors / workers",
            rich_help_panel=RESOURCES,
        ),
    ] = None,
    chunk_size: Annotated[
        str | None,
        typer.Option(
            help="Size of a chunk of device memory, such as 2MiB; whole pages.",
            rich_help_panel=RESOURCES,
        ),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(help="Tokens in a KV block.", rich_help_panel=RESOURCES),
    ] = None,
    overload_policy: Annotated[
        str | None,
        typer.Option(
            help="When requests overflow the KV cache: drop replicated layers, or recompute.",
            show_default="drop",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    paced: Annotated[
        str | None,
        typer.Option(
            help="Pad iterations to the times of a device profile, such as A100-14B, or a file.",
            rich_help_panel=RESOURCES,
        ),
    ] = None,
    max_running: Annotated[
        int | None,
        typer.Option(help="Requests that a worker runs at once.", rich_help_panel=LIMITS),
    ] = None,
    max_batch_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of one iteration; more raise throughput and the time between tokens.",
            show_default="256",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Longest prompt and answer together, in tokens.",
            show_default="what the model and the KV cache allow",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    queue_limit: Annotated[
        int | None,
        typer.Option(help="Requests that may wait; more get 503.", rich_help_panel=LIMITS),
    ] = None,
    queue_deadline: Annotated[
        float | None,
        typer.Option(help="Seconds that one may wait; then 504.", rich_help_panel=LIMITS),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            help="Address to listen on; 0.0.0.0 opens it to the network.",
            show_default="127.0.0.1",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            help="HTTP port; all others are found through etcd.",
            show_default=str(DEFAULT_PORT),
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    api_key: ApiKey = None,
    etcd: Annotated[
        str | None,
        typer.Option(
            help="URL of a running etcd.",
            show_default="a private one",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    lease_ttl: Annotated[
        int | None,
        typer.Option(
            help="Seconds after which a silent service counts as gone.", rich_help_panel=CLUSTER
        ),
    ] = None,
    ready_timeout: Annotated[
        float | None,
        typer.Option(
            help="Seconds until the cluster must be ready.",
            show_default="180",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="YAML file with these options (queue_limit: 64) and sections gateway, scheduler,"
            " memmgr, worker for more of theirs. Flags win.",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    cluster_dir: ClusterDir = None,
    with_parent: Annotated[
        bool,
        typer.Option(
            "--with-parent",
            help="Stop when the process that started this one ends (make).",
            rich_help_panel=CLUSTER,
        ),
    ] = False,
) -> None:
    """Start a cluster: gateway, scheduler, memory manager, workers.

    It runs until Ctrl-C, drains then, and leaves no process behind. What dies is started again.
    """
    flags = dict(locals())
    for name in ("config", "with_parent"):
        del flags[name]
    _up(config, flags, with_parent)


def _up(config: Path | None, flags: dict[str, Any], with_parent: bool) -> None:
    from cli.parent_watch import ParentWatch
    from cli.stop_signals import StopSignals

    signals = StopSignals()
    signals.install()
    if with_parent:
        ParentWatch().start(signals.request)
    from cli.cluster_options import read_options
    from cli.up import Up
    from services.common.errors import ConfigError

    try:
        options = read_options(config, flags)
    except ConfigError as error:
        raise CommandError(str(error), EXIT_UNUSABLE) from error
    Up(options, signals).run()


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
    from cli.status import show_status

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
    from cli.plan import show_plan

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
    from cli.groups import drop as run

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
    from cli.groups import restore as run

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
    from cli.chat import chat as run

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
    from cli.cluster_folder import ClusterFolder, default_folder
    from cli.logs import show_logs

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
        typer.Argument(help="steady, burst, overhead, or drop for what a drop costs without load."),
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
    dtype: Annotated[str, typer.Option(help="bfloat16, float32 or float64.")] = "bfloat16",
    paced: Annotated[
        str | None,
        typer.Option(help="Device profile (A100-14B) whose iteration times are kept, too."),
    ] = None,
    slo: Annotated[
        list[str] | None,
        typer.Option(help="Target: ttft=1.5 (seconds), tpot=5x (times the best P50)."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Azure or BurstGPT CSV, Mooncake JSONL.")
    ] = None,
    trace_start: Annotated[
        float | None, typer.Option(min=0, help="Where the slice begins, in seconds.")
    ] = None,
    trace_duration: Annotated[
        float | None, typer.Option(min=0.001, help="Length of the slice, in seconds.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Mean requests a second; keeps the pattern.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Makes the prompts.")] = 0,
    api_key: ApiKey = None,
) -> None:
    """Compare systems: latencies, throughput, service levels, KV demand."""
    from bench.scenarios.scenario import Choice
    from cli.bench import BenchArguments, run_bench

    choice = Choice(quick, seed, trace, trace_start, trace_duration, rate)
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

    Starts a small cluster for each policy, takes about two minutes and ends by itself.
    """
    from cli.demo import run_demo

    run_demo()


@app.command(
    epilog="Examples:\n\n"
    "  tideserve simulate sim/examples/burst-a100.yaml\n\n"
    "  tideserve simulate my-cluster.yaml --seed 7 --json figures.json\n\n"
    "  tideserve simulate --against bench.json"
)
def simulate(
    config: Annotated[
        Path | None,
        typer.Argument(help="YAML file; examples are in sim/examples.", show_default=False),
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
) -> None:
    """Simulate a cluster of any size with the policies of the real one.

    With --against, the cluster and load of a benchmark, its figures beside the simulated ones.
    """
    if (config is None) == (against is None):
        raise CommandError("give either a configuration or --against, not both", EXIT_UNUSABLE)
    if against is not None:
        from cli.against import run_against

        run_against(against, profile, json)
    elif config is not None:
        from cli.simulate import run_simulation

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
    quick: Annotated[
        bool, typer.Option("--quick", help="About 40 seconds instead of two minutes.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Measure how long iterations take here, fit the cost model and store it for workers.

    Reports the error on batches that the fit has not seen, beside the noise of the machine.
    """
    from cli.profile import run_profile

    flags = {
        "model": model,
        "dtype": dtype,
        "load_format": load_format,
        "device": device,
        "memory": memory,
        "threads": threads,
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
