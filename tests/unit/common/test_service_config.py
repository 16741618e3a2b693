"""Rules for the options of all services."""

import dataclasses
from typing import Any

import pytest

from services.common.errors import ConfigError
from services.common.reference import rows
from services.common.settings import secret_names
from services.gateway.config import GatewayConfig
from services.memmgr.config import MemmgrConfig
from services.scheduler.config import SchedulerConfig
from services.worker.config import WorkerConfig

CONFIGS = (GatewayConfig, SchedulerConfig, MemmgrConfig, WorkerConfig)


@pytest.mark.parametrize("cls", CONFIGS)
def test_every_option_has_a_sentence(cls: type[Any]) -> None:
    for row in rows(cls):
        assert row.help and row.help.endswith("."), row.key


@pytest.mark.parametrize("cls", CONFIGS)
def test_a_number_of_bytes_can_be_written_as_a_size(cls: type[Any]) -> None:
    named = {one.name for one in dataclasses.fields(cls) if "bytes" in one.name.split("_")}
    assert named == {one.name for one in dataclasses.fields(cls) if one.metadata.get("size")}


@pytest.mark.parametrize("cls", CONFIGS)
def test_the_file_of_a_secret_is_no_other_key(cls: type[Any]) -> None:
    names = {one.name for one in dataclasses.fields(cls)}
    assert not names & {f"{name}_file" for name in secret_names(cls)}


@pytest.mark.parametrize("cls", CONFIGS)
def test_every_number_has_a_range(cls: type[Any]) -> None:
    assert not [row.key for row in rows(cls) if row.values in ("number", "whole number")]


def test_an_address_that_is_shown_holds_no_password() -> None:
    with pytest.raises(ConfigError, match="'etcd_user' and 'etcd_password'") as caught:
        SchedulerConfig(etcd_url="https://etcd:2379,https://u:hidden@etcd:2380")
    assert "hidden" not in str(caught.value)
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS") as caught:
        SchedulerConfig(etcd_url="https://etcd:2379", otlp_endpoint="http://u:hidden@c:4317")
    assert "hidden" not in str(caught.value)
