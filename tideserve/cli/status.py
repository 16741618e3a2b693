"""`tideserve status`: the services, workers and groups as the gateway reports them."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from services.core.engine_kind import EngineKind
from tideserve.cli.adapter_status import adapter_lines
from tideserve.cli.client import AdminClient
from tideserve.cli.cluster_folder import ClusterFolder
from tideserve.cli.errors import CommandError, Unreachable
from tideserve.cli.host import disk_faults
from tideserve.cli.processes import process_faults
from tideserve.cli.upstream_status import outage_lines, upstream_lines
from tideserve.cli.worker_lacks import lack_lines

INDENT = " " * 10
# Causes whose name on the wire does not explain itself.
CAUSES = {
    "manual": "by hand",
    "relief": "demand subsided",
    "full": "the first is full",
    "large": "for a large request that waits",
    "uneven": "uneven load",
}


def decision_lines(status: Mapping[str, Any]) -> list[str]:
    """Lines for the latest overload decisions, newest last; numbers are tokens of KV cache."""
    lines = []
    for row in status.get("decisions") or []:
        lines.append(f"{_clock(row['decided_unix_s'])}  {row['model']}: {decision_text(row)}")
        lines += [
            INDENT + line for line in (_demand(row), _reason(row), row.get("outcome")) if line
        ]
    return lines


def loss_lines(status: Mapping[str, Any]) -> list[str]:
    """Lines for the last loss of each group, newest last."""
    return [
        f"{_clock(row['lost_unix_s'])}  {row['group_id']} at epoch {row['epoch']}: {row['reason']}"
        for row in status.get("losses") or []
    ]


def decision_text(row: Mapping[str, Any]) -> str:
    """The action of a decision, with its cause."""
    parts = dict(zip(row["group_ids"], row.get("parts") or [], strict=False))
    groups = [f"{name} into {parts[name]}" if name in parts else name for name in row["group_ids"]]
    change = {
        "merge": "merge " + (", ".join(row["group_ids"]) or f"to gain {row['needed_tokens']:,}"),
        "restore": "split " + ", ".join(groups),
        "call_off": "do not split " + ", ".join(row["group_ids"]),
        "exhausted": f"{row['needed_tokens']:,} short after all merges",
        "move": "move requests from " + " to ".join(row["group_ids"]),
    }
    cause = CAUSES.get(row["cause"], row["cause"])
    return f"{change.get(row['action'], row['action'])} ({cause})"


def _clock(unix_s: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix_s))


def _demand(row: Mapping[str, Any]) -> str:
    waiting = row["waiting_tokens"] + row["queued_tokens"] + row["refused_tokens"]
    return (
        f"demand {row['demand_tokens']:,}: {row['used_tokens']:,} in use,"
        f" {waiting:,} for {row['waiting']:,} waiting requests;"
        f" {row['forecast_tokens']:,} more expected soon"
    )


def _reason(row: Mapping[str, Any]) -> str:
    if row["cause"] == "manual" or row["action"] == "move":
        return ""
    for_s = f"for {row['held_s']:.1f} s (needed: {row['dwell_s']:g} s)"
    if row["cause"] == "relief":
        return f"together below {row['threshold_tokens']:,}, where groups split, {for_s}"
    if row["demand_tokens"] + row["forecast_tokens"] <= row["threshold_tokens"]:
        stuck = row.get("stuck_tokens", 0)
        return f"groups are full: {stuck:,} more are needed there than they hold {for_s}"
    return f"together above the room of {row['threshold_tokens']:,} {for_s}"


GATEWAY_AWAY = (
    "the gateway is down; the status comes from the other services; see `tideserve logs gateway`"
)
KV_OF_MERGED = (
    "KV blocks are counted per worker. In a merged group a block holds only the KV of the worker's"
    " layers, so the group has room for as many blocks as its smallest member, not for their sum."
)
STATUS_PATH = "/tideserve/v1/status"
BAR_CELLS = 10
LISTS = ("pids", "members")
MIXED = "mixed"
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def show_status(
    url: str, key: str | None, as_json: bool, why: bool, folder: ClusterFolder | None = None
) -> None:
    """Print the state of the cluster whose admin port is `url`.

    `why` adds decisions, losses and refusals. With `folder`, that of a cluster on this machine, its
    processes are checked too, and the other services are queried if the gateway does not answer.

    Raises:
        CommandError: as `read_status`; if only the gateway is down, after printing the rest.
    """
    gateway_error = None
    try:
        status = read_status(url, key)
    except Unreachable as error:
        if folder is None:
            raise
        from tideserve.cli.direct_status import direct_status  # slow import

        gateway_error = error
        status = direct_status(folder)
    if folder is not None and (faults := _faults(folder, status)):
        status["warnings"] = [*(status.get("warnings") or []), *faults]
    if as_json:
        print(json.dumps(status, indent=2))
    else:
        _print(status, why)
    if gateway_error is not None:
        raise CommandError(f"{url} does not answer: {GATEWAY_AWAY}") from gateway_error


def _faults(folder: ClusterFolder, status: Mapping[str, Any]) -> list[str]:
    """Faults of disk and processes. Without a row, it is unknown which services registered."""
    state, rows = folder.read_state(), status["services"]
    names = {row["name"] for row in rows} if rows else None
    return [*disk_faults(folder.root), *process_faults(state or {}, names)]


def _print(status: Mapping[str, Any], why: bool) -> None:
    console = Console(highlight=False)
    tables = (workers_table(status), batch_table(status), host_table(status))
    for table in filter(None, (services_table(status), *tables, groups_table(status))):
        console.print(table)
    if any(len(row["members"]) > 1 for row in status.get("groups", [])):
        console.print(KV_OF_MERGED, soft_wrap=True)
    if scheduling := status.get("scheduling"):
        console.print(f"scheduling {escape(scheduling)}")
    console.print(etcd_line(status))
    if why:
        _print_decisions(console, status)
        if lines := obstacle_lines(status):
            console.print("[bold]Merged groups[/]")
            for line in lines:
                console.print(f"  {escape(line)}", soft_wrap=True)
        _print_losses(console, status)
        _print_refusals(console, status)
    for device, workers in paced_workers(status).items():
        console.print(
            f"[yellow]! PACED: iterations of {escape(workers)} are padded to the times of"
            f" {escape(device)}[/]",
            soft_wrap=True,
        )
    for line in engine_lines(status):
        console.print(escape(line), soft_wrap=True)
    for line in trouble_lines(status):
        console.print(f"[yellow]! {escape(line)}[/]", soft_wrap=True)


def read_status(url: str, key: str | None, timeout_s: float = 10.0) -> dict[str, Any]:
    """Status of the cluster from the admin port at `url`. Raises CommandError."""
    with AdminClient(url, key, timeout_s) as client:
        status = client.get_json(STATUS_PATH)
    if not isinstance(status, dict) or "services" not in status:
        raise CommandError(f"{url} is not the admin port of a tideserve gateway; correct the URL")
    return status


def _print_decisions(console: Console, status: Mapping[str, Any]) -> None:
    console.print("[bold]Decisions about memory[/] [dim](tokens of KV cache, newest last)[/]")
    for line in decision_lines(status) or ["none yet: demand has not exceeded the KV cache"]:
        console.print(f"  {escape(line)}", soft_wrap=True)


def _print_losses(console: Console, status: Mapping[str, Any]) -> None:
    console.print("[bold]Losses[/] [dim](the last one of each group, newest last)[/]")
    for line in loss_lines(status) or ["none since this memory manager leads"]:
        console.print(f"  {escape(line)}", soft_wrap=True)
    for line in draining_lines(status):
        console.print(escape(line), soft_wrap=True)


def _print_refusals(console: Console, status: Mapping[str, Any]) -> None:
    console.print("[bold]Refusals for lateness[/] [dim](the last of each class)[/]")
    for line in refusal_lines(status) or ["none since this scheduler started"]:
        console.print(f"  {escape(line)}", soft_wrap=True)


def refusal_lines(status: Mapping[str, Any]) -> list[str]:
    """A sentence for each model and class: how many were late, and the numbers of the last."""
    return [
        f"{row['model']}, {row['service_class']}: {row['last_minute']:,} in the last minute. The"
        f" last, {row['age_s']:.0f} s ago: predicted up to {row['wait_s']:.1f} s, due in"
        f" {max(0.0, row['left_s']):.1f} s; {row['ahead_tokens']:,} tokens ahead,"
        f" {row['rate']:,.0f} start per second, limited by {row['limited_by']}; Retry-After"
        f" {row['retry_after_s']:.0f} s"
        for row in status.get("late_refusals") or []
    ]


def obstacle_lines(status: Mapping[str, Any]) -> list[str]:
    """A sentence for each merged group: why it does not split now."""
    obstacles = status.get("split_obstacles") or {}
    return [
        f"{group_id} stays merged: {reason}" if reason else f"{group_id} is about to split"
        for group_id, reason in sorted(obstacles.items())
    ]


def draining_lines(status: Mapping[str, Any]) -> list[str]:
    """A sentence for each worker that shuts down."""
    return [
        f"{row['id']} is draining: {row['running'] + row['waiting']} requests are left, which move"
        " to other workers as these have room, or end here"
        for row in status.get("workers", [])
        if row.get("draining")
    ]


def trouble_lines(status: Mapping[str, Any]) -> list[str]:
    """Sentences for warnings: models that need workers, settings, services that do not answer."""
    messages = [*(status.get("warnings") or []), *(status.get("errors") or [])]
    lines = [*shortfall_lines(status), *outage_lines(status), *lack_lines(status)]
    return [*lines, *map(str, messages)]


def shortfall_lines(status: Mapping[str, Any]) -> list[str]:
    """A sentence for each model that lacks more KV cache than merging can add."""
    return [
        f"{row['model']} lacks KV cache for {row['tokens']:,} tokens, more than merging groups can"
        " add; add workers, or send less"
        for row in status.get("shortfalls") or []
    ]


def services_table(status: Mapping[str, Any]) -> Table:
    """Name, process id, memory and readiness of every service."""
    table = _table("Services", "name", "pid>", "memory>", "ready")
    for row in status["services"]:
        ready = "[green]yes[/]" if row["ready"] else "[red]no[/]"
        table.add_row(escape(row["name"]), str(row["pid"]), size_text(row["rss_bytes"]), ready)
    return table


def etcd_line(status: Mapping[str, Any]) -> str:
    """Version and alarms of the cluster's etcd, if etcd answers."""
    etcd = status.get("etcd") or {}
    if not etcd.get("version"):
        return "[red]etcd does not answer[/]"
    alarms = "; ".join(etcd.get("alarms") or [])
    return f"etcd {escape(etcd['version'])}" + (f" [red]{escape(alarms)}[/]" if alarms else "")


def workers_table(status: Mapping[str, Any]) -> Table:
    """Memory and requests of every worker; `batch_table` shows the share of class `batch`."""
    rows = status.get("workers", [])
    columns = ["id", "pids", "params>", "KV blocks", "run>", "wait>", "preempted>"]
    pipelined = any(row.get("pipeline_busy_s") for row in rows)
    if pipelined:
        columns.append("bubble>")
    cached = any(row.get("prefix_queries_total") for row in rows)
    if cached:
        columns.append("hits>")
    has_roles = any(row.get("role", MIXED) != MIXED for row in rows)
    if has_roles:
        columns += ["role", "handed over>"]
    if several := _has_several_models(rows):
        columns.insert(1, "model")
    table = _table("Workers", *columns)
    for row in rows:
        total = row["kv_blocks_total"]
        table.add_row(
            escape(row["id"]),
            *([escape(row.get("model") or "–")] if several else []),
            " ".join(map(str, row["pids"])),
            size_text(row["parameter_bytes"]),
            usage_bar(total - row["kv_blocks_free"], total),
            str(row["running"]),
            str(row["waiting"]),
            str(row["preemptions_total"]),
            *([bubble_text(row)] if pipelined else []),
            *([hits_text(row)] if cached else []),
            *([row.get("role", MIXED), str(row["handed_over_total"])] if has_roles else []),
        )
    return table


def batch_table(status: Mapping[str, Any]) -> Table | None:
    """Requests and KV of class `batch` at every worker, and its share of all tokens so far.

    None if no worker has had batch work.
    """
    rows = status.get("workers", [])
    counts = ("batch_running", "batch_waiting", "batch_processed_tokens_total")
    if not any(row.get(count) for row in rows for count in counts):
        return None
    columns = ["id", "run>", "wait>", "KV blocks>", "of all tokens so far>"]
    interrupted = any(row.get("preempted_iterations_total") for row in rows)
    if interrupted:
        columns.append("interrupted>")
    shared = any(row.get("shared_tails_total") for row in rows)
    if shared:
        columns.append("blocks shared>")
    table = _table("Of these, batch work", *columns)
    for row in rows:
        table.add_row(
            escape(row["id"]),
            str(row.get("batch_running", 0)),
            str(row.get("batch_waiting", 0)),
            str(row.get("kv_blocks_batch", 0)),
            batch_text(row),
            *([interrupted_text(row)] if interrupted else []),
            *([shared_text(row)] if shared else []),
        )
    return table


def host_table(status: Mapping[str, Any]) -> Table | None:
    """Copies of KV in host memory, and what they have saved; None if no worker has any."""
    rows = [row for row in status.get("workers", []) if row.get("host_blocks_total")]
    if not rows:
        return None
    columns = ["id", "memory>", "blocks>", "owed>", "saved>", "recalled tokens>", "of all hits>"]
    failed = any(row["host_failures_total"] for row in rows)
    table = _table("KV in host memory", *columns, *(["failures>"] if failed else []))
    for row in rows:
        hits = row["prefix_hits_total"]
        table.add_row(
            escape(row["id"]),
            size_text(row["host_bytes"]),
            f"{row['host_blocks_total']:,}",
            f"{row['host_blocks_owed']:,}",
            f"{row['saved_blocks_total']:,}",
            f"{row['recalled_tokens_total']:,}",
            f"{min(1.0, row['host_hit_tokens_total'] / hits):.0%}" if hits else "–",
            *([str(row["host_failures_total"])] if failed else []),
        )
    return table


def bubble_text(row: Mapping[str, Any]) -> str:
    """Pipeline bubble: share of a worker's time in pipelines that it waited for other stages."""
    bubble_s = row["pipeline_bubble_s"]
    pipelined_s = row["pipeline_busy_s"] + bubble_s
    return f"{bubble_s / pipelined_s:.0%}" if pipelined_s else "–"


def hits_text(row: Mapping[str, Any]) -> str:
    """Hit rate of a worker's prefix cache, in prompt tokens."""
    looked_up = row["prefix_queries_total"]
    return f"{row['prefix_hits_total'] / looked_up:.0%}" if looked_up else "–"


def batch_text(row: Mapping[str, Any]) -> str:
    """Share of class `batch` in the tokens that a worker has processed."""
    batch = row.get("batch_processed_tokens_total", 0)
    processed = batch + row.get("online_processed_tokens_total", 0)
    return f"{batch / processed:.0%}" if processed else "–"


def interrupted_text(row: Mapping[str, Any]) -> str:
    """Interrupted iterations of batch work, and their tokens that had to be recomputed."""
    count, discarded = row["preempted_iterations_total"], row["discarded_tokens_total"]
    return f"{count} (-{discarded} tokens)" if discarded else str(count)


def shared_text(row: Mapping[str, Any]) -> str:
    """Last blocks shared with online requests, and tokens that were recomputed for it."""
    count, lost = row["shared_tails_total"], row["lost_tail_tokens_total"]
    return f"{count} (-{lost} tokens)" if lost else str(count)


def paced_workers(status: Mapping[str, Any]) -> dict[str, str]:
    """Ids of the workers with paced iterations, by the device whose times they imitate."""
    return _workers_by(status, "paced")


def engine_lines(status: Mapping[str, Any]) -> list[str]:
    """A sentence for each other engine, upstream server, and worker with adapters."""
    others = [
        f"{engine} runs the model of {workers}, which never merge or drop layers"
        for engine, workers in foreign_engines(status).items()
    ]
    return [*upstream_lines(status), *others, *adapter_lines(status)]


def foreign_engines(status: Mapping[str, Any]) -> dict[str, str]:
    """Ids of the workers that run the model with another engine than tideserve's, by engine."""
    shown = (EngineKind.TIDESERVE, EngineKind.OPENAI)
    by_engine = _workers_by(status, "engine")
    return {engine: ids for engine, ids in by_engine.items() if engine not in shown}


def _workers_by(status: Mapping[str, Any], key: str) -> dict[str, str]:
    """Ids of the workers that report `key`, by its value."""
    by_value: dict[str, list[str]] = {}
    for row in status.get("workers", []):
        if row.get(key):
            by_value.setdefault(str(row[key]), []).append(str(row["id"]))
    return {value: ", ".join(ids) for value, ids in by_value.items()}


def groups_table(status: Mapping[str, Any]) -> Table:
    """Epoch of every group, and its members with their layers; the first member leads.

    A degraded group has lost a member and serves no requests.
    """
    groups = status.get("groups", [])
    several = _has_several_models(groups)
    table = _table("Groups", "id", *(["model"] if several else []), "epoch>", "members")
    for row in groups:
        members, runs = row["members"], row.get("layers") or []
        if len(members) > 1 and len(runs) == len(members):
            members = [
                f"{name} (layers {first}-{end - 1})"
                for name, (first, end) in zip(members, runs, strict=True)
            ]
        state = " [red](degraded)[/]" if row.get("degraded") else ""
        table.add_row(
            escape(row["id"]),
            *([escape(row["model"])] if several else []),
            str(row["epoch"]),
            escape(", ".join(members)) + state,
        )
    return table


def _has_several_models(rows: Sequence[Mapping[str, Any]]) -> bool:
    return len({row["model"] for row in rows if row.get("model")}) > 1


def size_text(size_bytes: int) -> str:
    """Format a size in the largest fitting binary unit."""
    size, unit = float(size_bytes), 0
    while size >= 1024 and unit < len(UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} {UNITS[unit]}" if unit < 2 or size >= 100 else f"{size:.1f} {UNITS[unit]}"


def usage_bar(used: int, total: int) -> str:
    """A usage bar with numbers. The bar is empty only if `used` is 0."""
    cells = -(-used * BAR_CELLS // total) if total > 0 else 0
    cells = max(0, min(BAR_CELLS, cells))
    return f"{'█' * cells}{'░' * (BAR_CELLS - cells)} {used}/{total}"


def _table(title: str, *columns: str) -> Table:
    """An empty table; a column whose name ends in > is aligned to the right.

    On a narrow terminal, only lists wrap.
    """
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
    )
    for column in columns:
        right = column.endswith(">")
        table.add_column(
            column.rstrip(">"),
            justify="right" if right else "left",
            no_wrap=column not in LISTS,
            overflow="fold",
        )
    return table
