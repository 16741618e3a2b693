"""Tables of `tideserve status`."""

import io
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from tideserve.cli import status as status_module
from tideserve.cli.status import (
    batch_table,
    decision_lines,
    decision_text,
    draining_lines,
    etcd_line,
    foreign_engines,
    groups_table,
    host_table,
    loss_lines,
    obstacle_lines,
    paced_workers,
    refusal_lines,
    services_table,
    shortfall_lines,
    size_text,
    trouble_lines,
    usage_bar,
    workers_table,
)

STATUS: dict[str, Any] = {
    "services": [
        {"name": "gateway", "pid": 12, "rss_bytes": 150 * 2**20, "ready": True},
        {"name": "memmgr", "pid": 13, "rss_bytes": 60 * 2**20, "ready": False},
    ],
    "workers": [
        {
            "id": "worker-0",
            "pids": [20, 21],
            "parameter_bytes": 269 * 10**6,
            "kv_blocks_total": 1000,
            "kv_blocks_free": 750,
            "running": 3,
            "waiting": 4,
            "preemptions_total": 5,
        }
    ],
    "groups": [{"id": "group-worker-0", "epoch": 6, "members": ["worker-0"]}],
}


def shown(table: Table, width: int = 200) -> str:
    output = io.StringIO()
    Console(width=width, file=output).print(table)
    return output.getvalue()


def worker_lines(*rows: dict[str, Any], width: int = 200) -> list[list[str]]:
    return [line.split() for line in shown(workers_table({"workers": rows}), width).splitlines()]


def row_of(lines: list[list[str]], name: str) -> list[str]:
    return next(line for line in lines if name in line)


def batch_lines(*rows: dict[str, Any], width: int = 200) -> list[list[str]]:
    table = batch_table({"workers": list(rows)})
    assert table is not None
    return [line.split() for line in shown(table, width).splitlines()]


def test_batch_work_is_shown_separately_if_present() -> None:
    assert batch_table(STATUS) is None
    batch = {"batch_running": 2, "batch_waiting": 4, "kv_blocks_batch": 100}
    row = STATUS["workers"][0] | batch
    assert ["worker-0", "2", "4", "100", "–"] in batch_lines(row, width=80)
    assert shown(workers_table({"workers": [row]})) == shown(workers_table(STATUS))


def test_tables_show_the_gateway_status() -> None:
    services = shown(services_table(STATUS))
    assert "gateway" in services
    assert "150 MiB" in services
    assert "no" in services
    workers = shown(workers_table(STATUS))
    for text in ("worker-0", "20 21", "257 MiB", "███░░░░░░░ 250/1000", "3", "4", "5"):
        assert text in workers
    groups = shown(groups_table(STATUS))
    assert "group-worker-0" in groups
    assert "6" in groups


def test_a_model_without_workers_is_reported() -> None:
    assert shortfall_lines(STATUS) == []
    (line,) = shortfall_lines(STATUS | {"shortfalls": [{"model": "m", "tokens": 12345}]})
    assert "m lacks KV cache for 12,345 tokens" in line and "add workers" in line


def test_faults_are_described_in_sentences() -> None:
    status = STATUS | {"warnings": ["they differ"], "errors": ["it is silent"]}
    assert trouble_lines(status) == ["they differ", "it is silent"]
    assert trouble_lines(STATUS) == []


def test_workers_without_drops_or_cost_models_are_grouped_by_reason() -> None:
    rows = [
        {"id": "w0", "no_drops": "UCX cannot be loaded", "cost_model": "none: it is busy"},
        {"id": "w1", "no_drops": "UCX cannot be loaded", "cost_model": "profile"},
        {"id": "w2", "no_drops": ""},
    ]
    assert trouble_lines(STATUS | {"workers": rows}) == [
        "w0 has no cost model: it is busy",
        "w0, w1 cannot drop layers: UCX cannot be loaded",
    ]


def test_a_large_cluster_fits_a_narrow_terminal() -> None:
    row = {
        "id": "worker-63",
        "pids": [1234567, 1234568],
        "parameter_bytes": 2690 * 10**6,
        "kv_blocks_total": 100_000,
        "kv_blocks_free": 250,
        "running": 128,
        "waiting": 1024,
        "preemptions_total": 1_234_567,
    }
    lines = worker_lines(row, width=80)
    assert ["id", "pids", "params", "KV", "blocks", "run", "wait", "preempted"] in lines
    usage = ["█" * 10, "99750/100000"]
    assert ["worker-63", "1234567", "2.5", "GiB", *usage, "128", "1024", "1234567"] in lines
    assert ["1234568"] in lines


def test_a_cluster_without_workers_yet_is_shown() -> None:
    assert "Workers" in shown(workers_table({"services": []}))


@pytest.mark.parametrize(
    ("title", "counts", "share"),
    [
        ("bubble", {"pipeline_busy_s": 7.5, "pipeline_bubble_s": 2.5}, "25%"),
        ("hits", {"prefix_queries_total": 400, "prefix_hits_total": 250}, "62%"),
    ],
)
def test_a_share_is_shown_once_there_is_something_to_count(
    title: str, counts: dict[str, float], share: str
) -> None:
    row = STATUS["workers"][0] | dict.fromkeys(counts, 0)
    assert title not in str(worker_lines(row))
    lines = worker_lines(row, row | counts | {"id": "w1"})
    assert (row_of(lines, "worker-0")[-1], row_of(lines, "w1")[-1]) == ("–", share)


def test_roles_are_shown_while_a_worker_has_another_than_mixed() -> None:
    row = STATUS["workers"][0] | {"role": "mixed", "handed_over_total": 0}
    assert "role" not in str(worker_lines(row))
    lines = worker_lines(row, row | {"id": "w1", "role": "prefill", "handed_over_total": 7})
    assert row_of(lines, "worker-0")[-2:] == ["mixed", "0"]
    assert row_of(lines, "w1")[-2:] == ["prefill", "7"]


def test_the_share_of_batch_work_is_shown_once_there_was_some() -> None:
    row = STATUS["workers"][0] | {
        "online_processed_tokens_total": 0,
        "batch_processed_tokens_total": 0,
    }
    assert batch_table({"workers": [row]}) is None
    counts = {"online_processed_tokens_total": 300, "batch_processed_tokens_total": 900}
    lines = batch_lines(row, row | counts | {"id": "w1"})
    assert row_of(lines, "worker-0")[-1] == "–"
    assert row_of(lines, "w1")[-1] == "75%"


def test_interrupted_iterations_are_shown_once_there_were_some() -> None:
    row = STATUS["workers"][0] | {"batch_running": 1, "discarded_tokens_total": 0}
    row["preempted_iterations_total"] = 0
    assert "interrupted" not in str(batch_lines(row))
    resumed = row | {"preempted_iterations_total": 7, "id": "w1"}
    lost = resumed | {"discarded_tokens_total": 4096, "id": "w2"}
    lines = batch_lines(row, resumed, lost, width=80)
    assert row_of(lines, "worker-0")[-1] == "0"
    assert row_of(lines, "w1")[-1] == "7"
    assert row_of(lines, "w2")[-3:] == ["7", "(-4096", "tokens)"]


def test_shared_blocks_are_shown_once_there_were_some() -> None:
    row = STATUS["workers"][0] | {"batch_running": 1, "lost_tail_tokens_total": 0}
    row["shared_tails_total"] = 0
    assert "shared" not in str(batch_lines(row))
    kept = row | {"shared_tails_total": 3, "id": "w1"}
    lost = kept | {"lost_tail_tokens_total": 21, "id": "w2"}
    lines = batch_lines(row, kept, lost, width=80)
    assert row_of(lines, "worker-0")[-1] == "0"
    assert row_of(lines, "w1")[-1] == "3"
    assert row_of(lines, "w2")[-3:] == ["3", "(-21", "tokens)"]


def test_bars_are_drawn() -> None:
    assert usage_bar(0, 100) == "░" * 10 + " 0/100"
    assert usage_bar(1, 100).startswith("█░")
    assert usage_bar(99, 100).startswith("█" * 10)
    assert usage_bar(0, 0) == "░" * 10 + " 0/0"


def test_sizes_are_formatted() -> None:
    sizes = [0, 1023, 2048, 5 * 2**20, 150 * 2**20, 3 * 2**30]
    assert [size_text(size) for size in sizes] == [
        "0 B",
        "1023 B",
        "2 KiB",
        "5.0 MiB",
        "150 MiB",
        "3.0 GiB",
    ]


def test_padded_times_are_reported() -> None:
    row = STATUS["workers"][0]
    rows = [row | {"id": f"w{number}", "paced": "A100-14B"} for number in range(2)]
    assert paced_workers({"workers": [*rows, row]}) == {"A100-14B": "w0, w1"}
    assert paced_workers(STATUS) == {}


def test_engines_that_never_merge_are_reported() -> None:
    row = STATUS["workers"][0]
    rows = [row | {"id": f"w{number}", "engine": "vllm"} for number in range(2)]
    ours = row | {"engine": "tideserve"}
    assert foreign_engines({"workers": [*rows, ours]}) == {"vllm": "w0, w1"}
    assert foreign_engines(STATUS) == {}, "an older gateway reports none"


DECISION = {
    "decided_unix_s": 0,
    "model": "m[x]",
    "action": "merge",
    "cause": "overload",
    "needed_tokens": 1200,
    "group_ids": [],
    "threshold_tokens": 20000,
    "held_s": 0.25,
    "dwell_s": 0.2,
    "demand_tokens": 21200,
    "forecast_tokens": 333,
    "capacity_tokens": 19999,
    "undropped_tokens": 20000,
    "used_tokens": 19000,
    "waiting_tokens": 100,
    "queued_tokens": 2000,
    "refused_tokens": 100,
    "waiting": 7,
    "outcome": "g0, g1 merge: stable, all members serve epoch 4",
}


def test_a_cancelled_split_is_reported() -> None:
    row = DECISION | {"action": "call_off", "group_ids": ["g0"]}
    assert decision_text(row) == "do not split g0 (overload)"


def test_partial_splits_show_the_number_of_new_groups() -> None:
    row = DECISION | {"action": "restore", "cause": "manual", "group_ids": ["g0", "g1"]}
    assert decision_text(row | {"parts": [2, 3]}) == "split g0 into 2, g1 into 3 (by hand)"


def test_decisions_show_their_numbers() -> None:
    restore = DECISION | {"action": "restore", "cause": "relief", "group_ids": ["g0", "g1"]}
    other = DECISION | {"action": "exhausted", "outcome": ""}
    by_hand = DECISION | {"cause": "manual", "group_ids": ["g3", "g4"]}
    lines = decision_lines({"decisions": [DECISION, restore, other, by_hand]})
    demand = "demand 21,200: 19,000 in use, 2,200 for 7 waiting requests; 333 more expected soon"
    above = "together above the room of 20,000 for 0.2 s (needed: 0.2 s)"
    below = "together below 20,000, where groups split, for 0.2 s (needed: 0.2 s)"
    assert [line[10:] for line in lines] == [
        "m[x]: merge to gain 1,200 (overload)",
        demand,
        above,
        DECISION["outcome"],
        "m[x]: split g0, g1 (demand subsided)",
        demand,
        below,
        DECISION["outcome"],
        "m[x]: 1,200 short after all merges (overload)",
        demand,
        above,
        "m[x]: merge g3, g4 (by hand)",
        demand,
        DECISION["outcome"],
    ]
    assert decision_lines({"services": []}) == []


def test_losses_say_which_group_and_why() -> None:
    row = {"group_id": "g1", "epoch": 7, "lost_unix_s": 0, "reason": "w1 is gone"}
    (line,) = loss_lines({"losses": [row]})
    assert line[8:] == "  g1 at epoch 7: w1 is gone"
    assert loss_lines({"services": []}) == [], "an older gateway reports none"


def test_refusals_for_lateness_show_their_numbers() -> None:
    row = {
        "model": "m[x]",
        "service_class": "interactive",
        "last_minute": 1200,
        "age_s": 2.6,
        "wait_s": 4.25,
        "left_s": 0.5,
        "ahead_tokens": 12_345,
        "rate": 2904.7,
        "limited_by": "memory",
        "retry_after_s": 9.0,
    }
    assert refusal_lines({"late_refusals": [row]}) == [
        "m[x], interactive: 1,200 in the last minute. The last, 3 s ago: predicted up to 4.2 s, due"
        " in 0.5 s; 12,345 tokens ahead, 2,905 start per second, limited by memory; Retry-After 9 s"
    ]
    assert refusal_lines({"services": []}) == [], "an older gateway sends none"


def test_merged_groups_show_why_they_do_not_split() -> None:
    assert obstacle_lines({"split_obstacles": {"g1": "", "g0": "demand must fall"}}) == [
        "g0 stays merged: demand must fall",
        "g1 is about to split",
    ]
    assert obstacle_lines({}) == [], "an older gateway sends none"


def test_draining_workers_are_named_with_their_requests() -> None:
    rows = [{"id": f"w{n}", "running": 2, "waiting": n, "draining": n == 1} for n in range(2)]
    (line,) = draining_lines({"workers": rows})
    assert line.startswith("w1 is draining: 3 requests are left")
    assert draining_lines({"workers": [{"id": "w0"}]}) == [], "an older gateway sends none"


def test_members_of_a_merged_group_are_shown_with_their_layers() -> None:
    row = {"id": "g", "epoch": 7, "members": ["w0", "w1"], "layers": [[0, 14], [14, 30]]}
    assert "w0 (layers 0-13), w1 (layers 14-29)" in shown(groups_table({"groups": [row]}))


@pytest.mark.parametrize("members", [["worker-0"], ["worker-0", "worker-1"]])
def test_the_kv_of_merged_groups_is_explained(
    members: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [{"id": "group-worker-0", "epoch": 6, "members": members}]
    monkeypatch.setattr(status_module, "read_status", lambda *_: STATUS | {"groups": groups})
    status_module.show_status("http://here", None, as_json=False, why=False)
    is_explained = (
        "as many blocks as its smallest member, not for their sum" in capsys.readouterr().out
    )
    assert is_explained == (len(members) > 1)


def test_a_group_that_has_lost_a_member_is_shown_as_degraded() -> None:
    row = {"id": "g", "epoch": 7, "members": ["w0"], "layers": [[0, 14]]}
    assert "w0 (degraded)" in shown(groups_table({"groups": [row | {"degraded": True}]}))
    assert "degraded" not in shown(groups_table({"groups": [row | {"degraded": False}]}))


def test_etcd_is_shown() -> None:
    assert etcd_line({"etcd": {"version": "3.5.16"}}) == "etcd 3.5.16"
    assert "does not answer" in etcd_line({"etcd": {"version": None}})
    full = etcd_line({"etcd": {"version": "3.5.16", "alarms": ["memberID:1 alarm:NOSPACE"]}})
    assert full == "etcd 3.5.16 [red]memberID:1 alarm:NOSPACE[/]"


def test_workers_that_count_tokens_are_named_with_the_reason() -> None:
    rows = [{"id": f"worker-{number}", "cost_model": "none: it is off"} for number in range(2)]
    rows.append({"id": "worker-2", "cost_model": "start"})
    (line,) = trouble_lines({"workers": rows})
    assert "worker-0, worker-1" in line and line.endswith("it is off")
    assert trouble_lines({"workers": [{"id": "old"}]}) == []


def test_kv_in_host_memory_is_shown_where_a_worker_has_room_for_it() -> None:
    row = STATUS["workers"][0] | {"host_blocks_total": 0, "prefix_hits_total": 400}
    assert host_table({"workers": [row]}) is None
    used = row | {
        "host_bytes": 64 << 20,
        "host_blocks_total": 1500,
        "host_blocks_owed": 3,
        "saved_blocks_total": 1234,
        "recalled_tokens_total": 5678,
        "host_hit_tokens_total": 100,
        "host_failures_total": 0,
    }
    table = host_table({"workers": [row, used | {"id": "w1"}]})
    assert table is not None
    (line,) = [line.split() for line in shown(table, 200).splitlines() if "w1" in line]
    assert line == ["w1", "64.0", "MiB", "1,500", "3", "1,234", "5,678", "25%"]
    table = host_table({"workers": [used | {"host_failures_total": 7}]})
    assert table is not None and "failures" in shown(table, 200)
