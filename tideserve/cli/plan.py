"""`tideserve plan`: shows which groups would merge for a demand, without merging them."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from services.common.clock import cpu_s
from services.common.errors import ConfigError
from services.common.garbage_collection import gc_paused
from services.common.size import parse_size_bytes
from services.core.groups.layer_map import ModelShape, SplitError
from services.core.overload.drop_plan import DropPlan, MergeKey, PlanGroup, PlanMember, plan_drop
from services.core.overload.target import Target, plan_group, targets_of
from tideserve.cli.errors import EXIT_UNUSABLE, CommandError
from tideserve.cli.status import read_status, size_text

ROWS_MAX = 20
# Qwen2.5-14B in bfloat16 on 80 GB devices, eight to a host, eight hosts to a rack.
EXAMPLE_SHAPE = ModelShape(
    num_layers=48,
    layer_bytes=551_000_000,
    embedding_bytes=1_557_000_000,
    head_bytes=1_557_000_000,
    tied_embeddings=False,
    kv_bytes=4096,
    layer_cost=551.0,
    head_cost=1557.0,
)
EXAMPLE_ARENA_BYTES = 72 << 30
EXAMPLE_MODEL = "example-14B"


@dataclass(frozen=True, slots=True)
class PlanInput:
    """Input of the planner: groups, sizes of each model, memory of each worker."""

    groups: list[PlanGroup]
    shapes: dict[str, ModelShape]
    arena_bytes: dict[str, int]


@dataclass(frozen=True, slots=True)
class PlannedMerges:
    """A plan, with the CPU time of planning and of splitting the layers."""

    plan: DropPlan
    targets: tuple[Target, ...]
    plan_s: float
    split_s: float


def show_plan(demand: str, url: str, key: str | None, instances: int | None, as_json: bool) -> None:
    """Plan for a running or an example cluster and print the plan. Raises CommandError."""
    try:
        needed_bytes = parse_size_bytes(demand)
    except ConfigError as error:
        raise CommandError(f"--demand: {error}", EXIT_UNUSABLE) from error
    if instances is not None:
        cluster = example_cluster(instances)
    else:
        cluster = cluster_of(read_status(url, key))
    planned = plan_for(cluster, needed_bytes)
    if as_json:
        print(json.dumps(result_of(planned, cluster), indent=2))
        return
    console = Console(highlight=False)
    if planned.targets:
        console.print(merges_table(planned))
    for line in summary(planned, cluster):
        console.print(line, soft_wrap=True)


def example_cluster(instances: int) -> PlanInput:
    """A cluster of single-worker groups with random amounts of running KV."""
    rng = Random(0)
    key = MergeKey(EXAMPLE_MODEL)
    groups, arena_bytes = [], {}
    for number in range(instances):
        name = f"worker-{number}"
        location = (f"rack-{number // 64}", f"host-{number // 8}")
        members = (PlanMember(name, 0, EXAMPLE_SHAPE.num_layers),)
        kv_bytes = rng.randrange(EXAMPLE_ARENA_BYTES // 2)
        groups.append(PlanGroup(f"group-{name}", key, members, location, kv_bytes))
        arena_bytes[name] = EXAMPLE_ARENA_BYTES
    return PlanInput(groups, {EXAMPLE_MODEL: EXAMPLE_SHAPE}, arena_bytes)


def cluster_of(status: Mapping[str, Any]) -> PlanInput:
    """The cluster that a gateway's status shows. Raises CommandError."""
    workers = {row["id"]: row for row in status.get("workers", [])}
    groups: list[PlanGroup] = []
    shapes: dict[str, ModelShape] = {}
    arena_bytes: dict[str, int] = {}
    for row in status.get("groups", []):
        rows = [workers.get(name) for name in row["members"]]
        known = [row for row in rows if row is not None and row.get("shape")]
        if not known or len(known) < len(rows):
            continue
        shape = shapes.setdefault(row["model"], ModelShape(**known[0]["shape"]))
        layers = row.get("layers") or [[0, shape.num_layers]]
        if len(layers) != len(known):
            continue
        members = tuple(PlanMember(row["id"], *run) for row, run in zip(known, layers, strict=True))
        arena_bytes |= {row["id"]: row["arena_bytes"] for row in known}
        locations, used_bytes = [(row["host"],) for row in known], map(_used_bytes, known)
        key = MergeKey(row["model"])
        groups.append(plan_group(row["id"], key, members, locations, used_bytes))
    if not groups:
        raise CommandError("no group reports the sizes of its model; wait until its workers serve")
    return PlanInput(groups, shapes, arena_bytes)


def plan_for(cluster: PlanInput, needed_bytes: int) -> PlannedMerges:
    """Plan merges and split their layers among the members. Raises CommandError."""
    with gc_paused():
        started_s = cpu_s()
        plan = plan_drop(cluster.groups, cluster.shapes, needed_bytes)
        planned_s = cpu_s()
    try:
        targets = targets_of(plan, cluster.shapes, cluster.arena_bytes)
    except SplitError as error:
        raise CommandError(str(error)) from error
    return PlannedMerges(plan, targets, planned_s - started_s, cpu_s() - planned_s)


def merges_table(planned: PlannedMerges) -> Table:
    """A row for each merged group, at most `ROWS_MAX`."""
    table = Table(title="Merges", title_justify="left", title_style="bold", box=SIMPLE)
    for name in ("groups", "members", "layers"):
        table.add_column(name, no_wrap=True, overflow="fold")
    for name in ("frees", "KV tokens now", "then"):
        table.add_column(name, justify="right")
    for target in planned.targets[:ROWS_MAX]:
        table.add_row(
            # A line per name, because lists would break within names on a narrow terminal.
            escape("\n".join(target.merge.group_ids)),
            escape("\n".join(stage.worker_id for stage in target.stages)),
            "\n".join(str(stage.num_layers) for stage in target.stages),
            size_text(target.merge.freed_bytes),
            f"{target.tokens_before:,}",
            f"{target.tokens_after:,}",
        )
    return table


def summary(planned: PlannedMerges, cluster: PlanInput) -> list[str]:
    """Sentences below the table: the memory that the plan frees, and the planning time."""
    plan, lines = planned.plan, []
    if len(planned.targets) > ROWS_MAX:
        lines.append(f"… and {len(planned.targets) - ROWS_MAX:,} more (--json shows all)")
    freed, needed = size_text(plan.freed_bytes), size_text(plan.needed_bytes)
    groups = f"{len(cluster.groups):,} group" + "s" * (len(cluster.groups) != 1)
    if plan.sufficient:
        lines.append(f"frees {freed}, which is enough: {needed} are needed")
    elif planned.targets:
        lines.append(
            f"[yellow]! frees {freed}, but {needed} are needed, and no plan frees more;"
            " add workers[/]"
        )
    else:
        lines.append(f"[yellow]! no groups can merge: no partner is left among {groups}[/]")
    took = f"planned for {groups} in {planned.plan_s * 1e3:.1f} ms of CPU time"
    if planned.targets:
        merges = f"{len(planned.targets):,} merge" + "s" * (len(planned.targets) != 1)
        took += f"; layers of {merges} split in {planned.split_s * 1e3:.1f} ms"
    lines.append(took)
    return lines


def result_of(planned: PlannedMerges, cluster: PlanInput) -> dict[str, Any]:
    """The plan as JSON."""
    plan = planned.plan
    return {
        "needed_bytes": plan.needed_bytes,
        "freed_bytes": plan.freed_bytes,
        "sufficient": plan.sufficient,
        "groups": len(cluster.groups),
        "plan_cpu_s": planned.plan_s,
        "split_cpu_s": planned.split_s,
        "merges": [
            {
                "groups": list(target.merge.group_ids),
                "stages": [asdict(stage) for stage in target.stages],
                "freed_bytes": target.merge.freed_bytes,
                "tokens_before": target.tokens_before,
                "tokens_after": target.tokens_after,
            }
            for target in planned.targets
        ],
    }


def _used_bytes(worker: Mapping[str, Any]) -> int:
    """Bytes of KV in use, over all layers of the model."""
    shape = worker["shape"]
    tokens = (worker["kv_blocks_total"] - worker["kv_blocks_free"]) * worker["block_size"]
    used: int = tokens * shape["num_layers"] * shape["kv_bytes"]
    return used
