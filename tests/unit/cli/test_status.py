"""Tables of `tideserve status`."""

import io
from typing import Any

from rich.console import Console
from rich.table import Table

from cli.status import groups_table, services_table, size_text, usage_bar, workers_table

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


def shown(table: Table) -> str:
    output = io.StringIO()
    Console(width=200, file=output).print(table)
    return output.getvalue()


def test_tables_hold_what_the_gateway_told() -> None:
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


def test_a_cluster_without_workers_yet_is_shown() -> None:
    assert "Workers" in shown(workers_table({"services": []}))


def test_bars() -> None:
    assert usage_bar(0, 100) == "░" * 10 + " 0/100"
    assert usage_bar(1, 100).startswith("█░")
    assert usage_bar(99, 100).startswith("█" * 10)
    assert usage_bar(0, 0) == "░" * 10 + " 0/0"


def test_sizes() -> None:
    sizes = [0, 1023, 2048, 5 * 2**20, 150 * 2**20, 3 * 2**30]
    assert [size_text(size) for size in sizes] == [
        "0 B",
        "1023 B",
        "2 KiB",
        "5.0 MiB",
        "150 MiB",
        "3.0 GiB",
    ]
