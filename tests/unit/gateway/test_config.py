"""What a gateway's configuration refuses, and what it warns of."""

from pathlib import Path
from typing import Any

import pytest

from services.common.config import from_mapping
from services.common.errors import ConfigError
from services.gateway.config import GatewayConfig
from services.worker.config import WorkerConfig


def config(**options: Any) -> GatewayConfig:
    return GatewayConfig(etcd_url="h:1", model_name="m", model_dir=Path("/m"), **options)


@pytest.mark.parametrize(
    ("options", "doors"),
    [
        ({}, ""),
        ({"host": "0.0.0.0"}, "HTTP on 0.0.0.0 may"),
        ({"host": ""}, "HTTP on all addresses may"),
        ({"host": "0.0.0.0", "api_key": "k"}, ""),
        ({"host": "::", "api_keys_file": Path("/keys")}, ""),
        ({"public_grpc_host": "0.0.0.0"}, ""),
        ({"public_grpc_host": "0.0.0.0", "public_grpc_port": 0}, "gRPC on 0.0.0.0 may"),
        (
            {"host": "::", "public_grpc_host": "::", "public_grpc_port": 0},
            "HTTP on :: and gRPC on :: may",
        ),
        (
            {
                "public_grpc_host": "0.0.0.0",
                "public_grpc_port": 0,
                "public_grpc_ca_file": Path("/ca"),
            },
            "",
        ),
    ],
)
def test_ports_that_the_network_may_use_without_a_key(options: dict[str, Any], doors: str) -> None:
    warning = config(**options).exposure or ""
    assert warning.startswith(doors)
    assert bool(warning) == bool(doors)


@pytest.mark.parametrize("name", ["", "m" * 257])
@pytest.mark.parametrize("config_class", [GatewayConfig, WorkerConfig])
def test_a_model_name_that_the_scheduler_refuses(config_class: type, name: str) -> None:
    options = {"etcd_url": "h:1", "model_dir": "/m", "model_name": name, "memory_bytes": "1GiB"}
    if config_class is GatewayConfig:
        del options["memory_bytes"]
    with pytest.raises(ConfigError, match=r"model_name.* 1 to 256 characters"):
        from_mapping(config_class, options, "a file")
    assert from_mapping(config_class, options | {"model_name": "ä\n" * 128}, "a file")
