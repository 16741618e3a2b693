"""Metrics ports of a local cluster, and the target file for Prometheus."""

import asyncio
import json

from prometheus_client import CollectorRegistry

from services.common.metrics_server import metrics_exposed
from tideserve.cli.metrics_ports import MetricsPorts, targets_json


async def test_a_service_can_listen_on_a_held_port_again_and_again() -> None:
    ports = MetricsPorts()
    try:
        held = ports.hold(["gateway", "worker-0"])
        assert len(set(held.values())) == 2
        for _ in range(2):
            async with metrics_exposed(CollectorRegistry(), "127.0.0.1", held["gateway"]) as port:
                assert port == held["gateway"]
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
    finally:
        ports.release()
        ports.release()


def test_every_process_is_in_the_prometheus_targets() -> None:
    configs = {
        "gateway": {"host": "0.0.0.0", "grpc_host": "10.0.0.1", "metrics_port": 1},
        "memmgr": {"metrics_port": 2},
        "worker-0": {"host": "0.0.0.0", "metrics_port": 3},
        "worker-1": {"metrics_port": None},
    }
    assert json.loads(targets_json(configs)) == [
        {
            "targets": ["10.0.0.1:1"],
            "labels": {"job": "gateway", "process": "gateway"},
        },
        {
            "targets": ["127.0.0.1:2"],
            "labels": {"job": "memmgr", "process": "memmgr"},
        },
        {
            "targets": ["127.0.0.1:3"],
            "labels": {"job": "worker", "process": "worker-0"},
        },
    ]
