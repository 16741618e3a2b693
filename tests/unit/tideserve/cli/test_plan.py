"""`tideserve plan`: for an example cluster, and for the cluster of a status."""

import json
from dataclasses import asdict
from typing import Any

import pytest

from services.core.groups.layer_map import ModelShape
from services.core.overload.drop_plan import MergeKey, PlanGroup, PlanMember
from tideserve.cli.errors import CommandError
from tideserve.cli.plan import cluster_of, example_cluster, plan_for, show_plan, summary

SHAPE = ModelShape(30, 7_000_000, 56_000_000, 100_000, True, 768, 7.0, 0.0, 56.0)


def worker(name: str, **changes: object) -> dict[str, Any]:
    row: dict[str, object] = {
        "id": name,
        "kv_blocks_total": 100,
        "kv_blocks_free": 40,
        "host": "10.0.0.1",
        "block_size": 16,
        "arena_bytes": 1 << 30,
        "shape": asdict(SHAPE),
    }
    return row | changes


def group(*names: str, **changes: object) -> dict[str, Any]:
    row: dict[str, object] = {"id": f"g-{names[0]}", "model": "m", "members": list(names)}
    return row | {"layers": []} | changes


def test_an_example_cluster_is_planned_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    show_plan("100GiB", "", None, 50, as_json=True)
    result = json.loads(capsys.readouterr().out)
    assert result["sufficient"] and result["freed_bytes"] >= 100 << 30
    assert result["groups"] == 50 and result["plan_cpu_s"] >= 0
    for merge in result["merges"]:
        assert len(merge["groups"]) == 2
        edges = [(stage["first_layer"], stage["end_layer"]) for stage in merge["stages"]]
        assert edges[0][0] == 0 and edges[-1][1] == 48 and edges[0][1] == edges[1][0]
        assert merge["tokens_after"] > merge["tokens_before"]


def test_an_example_cluster_is_planned_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    show_plan("1GiB", "", None, 4, as_json=False)
    text = capsys.readouterr().out
    assert "ms of CPU time" in text
    assert "which is enough: 1.0 GiB are needed" in text and "planned for 4 groups in" in text


def test_names_are_not_truncated_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    show_plan("150GiB", "", None, 4, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines]
    shown = [row[:3] for row in rows if row and row[0].startswith("group-")]
    assert sorted(row[0] for row in shown) == [f"group-worker-{number}" for number in range(4)]
    assert sorted(row[1] for row in shown) == [f"worker-{number}" for number in range(4)]
    assert sum(int(row[2]) for row in shown) == 48
    assert all(len(line) <= 80 for line in lines)


def test_an_infeasible_demand_is_reported() -> None:
    cluster = example_cluster(3)
    lines = summary(plan_for(cluster, 1 << 50), cluster)
    assert any("no plan frees more" in line for line in lines)


def test_a_single_group_has_no_partner(capsys: pytest.CaptureFixture[str]) -> None:
    show_plan("1GiB", "", None, 1, as_json=False)
    text = capsys.readouterr().out
    assert "no groups can merge: no partner is left among 1 group" in text
    assert "Merges" not in text


def test_long_tables_are_truncated(capsys: pytest.CaptureFixture[str]) -> None:
    show_plan("1TiB", "", None, 100, as_json=False)
    assert "more (--json shows all)" in capsys.readouterr().out


def test_a_status_file_is_planned() -> None:
    status = {
        "workers": [
            worker("w0"),
            worker("w1", host="10.0.0.2", kv_blocks_free=100),
            worker("w2"),
            worker("w3", shape=None),
        ],
        "groups": [
            group("w0", "w1", layers=[[0, 20], [20, 30]]),
            group("w2"),
            group("w3"),
            group("gone"),
            group("w0", "w2"),
        ],
    }
    cluster = cluster_of(status)
    key, used = MergeKey("m"), 60 * 16 * 30 * 768
    assert cluster.groups == [
        PlanGroup("g-w0", key, (PlanMember("w0", 0, 20), PlanMember("w1", 20, 30)), (), used),
        PlanGroup("g-w2", key, (PlanMember("w2", 0, 30),), ("10.0.0.1",), used),
    ]
    assert cluster.shapes == {"m": SHAPE}
    planned = plan_for(cluster, 1)
    assert [len(target.stages) for target in planned.targets] == [3]


def test_a_cluster_without_sizes_is_an_error() -> None:
    with pytest.raises(CommandError, match="no group"):
        cluster_of({"services": [], "workers": [worker("w0", shape=None)], "groups": [group("w0")]})


def test_an_invalid_demand_is_refused() -> None:
    with pytest.raises(CommandError, match="--demand: 'much' is not a size"):
        show_plan("much", "", None, 2, as_json=False)
