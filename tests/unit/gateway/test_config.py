"""Errors and warnings of a gateway's configuration."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.common.config import from_mapping
from services.common.errors import ConfigError
from services.common.settings import load_settings
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
def test_unprotected_ports_on_the_network(options: dict[str, Any], doors: str) -> None:
    warning = config(**options).exposure or ""
    assert warning.startswith(doors)
    assert bool(warning) == bool(doors)


@pytest.mark.parametrize("name", ["", "m" * 257])
@pytest.mark.parametrize("config_class", [GatewayConfig, WorkerConfig])
def test_a_model_name_refused_by_the_scheduler(config_class: type, name: str) -> None:
    options = {"etcd_url": "h:1", "model_dir": "/m", "model_name": name, "memory_bytes": "1GiB"}
    if config_class is GatewayConfig:
        del options["memory_bytes"]
    with pytest.raises(ConfigError, match=r"model_name.* 1 to 256 characters"):
        from_mapping(config_class, options, "a file")
    assert from_mapping(config_class, options | {"model_name": "ä\n" * 128}, "a file")


def models(*entries: dict[str, Any], **options: Any) -> GatewayConfig:
    data = {"etcd_url": "h:1", "models": list(entries)} | options
    return from_mapping(GatewayConfig, data, "a file")


A, B = {"name": "a", "dir": "/a"}, {"name": "b", "dir": "/b"}


def test_a_model_of_a_list_overrides_the_keys_of_the_file() -> None:
    first, second = models(
        *(A | {"aliases": ["x"], "tool_format": "hermes"}, B),
        tool_format="none",
        expected_workers=3,
    ).served_models
    assert (first.aliases, first.tool_format, second.tool_format) == (("x",), "hermes", "none")
    assert (first.expected_workers, second.expected_workers) == (3, 3)
    assert (first.quota_weight, second.dir) == (1.0, Path("/b"))


def test_a_single_model_equals_a_list_of_length_1() -> None:
    (only,) = config(model_aliases=" x, y ,", expected_workers=2).served_models
    assert (only.name, only.dir, only.aliases) == ("m", Path("/m"), ("x", "y"))
    assert only.expected_workers == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"models": [A, A]}, "two models of 'models' have the name 'a'"),
        ({"models": [A, B | {"aliases": ["a"]}]}, "two models of 'models' have the name 'a'"),
        ({"models": [A], "model_name": "m"}, "'models' and 'model_name' are both set"),
        ({"models": [A], "model_aliases": "m"}, "'models' and 'model_aliases' are both set"),
        ({"models": [A | {"alias": 1}]}, "did you mean 'aliases'"),
        ({"models": [A | {"aliases": [1]}]}, "an alias of the model 'a' is 1"),
        ({"models": [A | {"quota_weight": 0}]}, "must be 0.001 to 1000"),
        ({"models": ["a"]}, "must be a mapping"),
        ({"models": "a"}, "must be of type list"),
        ({"models": [A] * 65}, "has 65 models"),
        ({}, "'model_name' is missing"),
        ({"model_name": "m"}, "'model_dir' is missing"),
    ],
)
def test_invalid_models_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_mapping(GatewayConfig, {"etcd_url": "h:1"} | options, "a file")


def test_models_of_the_environment_are_json() -> None:
    variables = {"TIDESERVE__ETCD_URL": "h:1", "TIDESERVE__MODELS": json.dumps([A, B])}
    loaded = load_settings(GatewayConfig, None, variables).config
    assert [model.name for model in loaded.served_models] == ["a", "b"]
    for text, message in (("[", "no valid JSON"), ("a", "must be a list"), ("[1]", "a mapping")):
        with pytest.raises(ConfigError, match=message):
            load_settings(GatewayConfig, None, variables | {"TIDESERVE__MODELS": text})
