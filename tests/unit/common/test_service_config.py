"""Rules for the options of all services."""

from typing import Any

import pytest

from services.common.errors import ConfigError
from services.common.setting import known_keys, settings_of
from services.gateway.config import GatewayConfig
from services.memmgr.config import MemmgrConfig
from services.scheduler.config import SchedulerConfig
from services.worker.config import WorkerConfig

CONFIGS = (GatewayConfig, SchedulerConfig, MemmgrConfig, WorkerConfig)


@pytest.mark.parametrize("cls", CONFIGS)
def test_every_option_has_a_description(cls: type[Any]) -> None:
    for key, setting in settings_of(cls).items():
        assert setting.help.endswith("."), key


@pytest.mark.parametrize("cls", CONFIGS)
def test_a_number_of_bytes_can_be_written_as_a_size(cls: type[Any]) -> None:
    settings = settings_of(cls)
    named = {key for key in settings if {"bytes", "memory"} & set(key.split("_"))}
    assert named == {key for key, setting in settings.items() if setting.metadata.get("size")}


@pytest.mark.parametrize("cls", CONFIGS)
def test_secret_file_keys_are_unique(cls: type[Any]) -> None:
    assert len(set(known_keys(cls))) == len(known_keys(cls))


@pytest.mark.parametrize("cls", CONFIGS)
def test_every_number_has_a_range(cls: type[Any]) -> None:
    settings = settings_of(cls)
    assert not [key for key, setting in settings.items() if setting.values_text.endswith("number")]


def test_shown_addresses_contain_no_password() -> None:
    with pytest.raises(ConfigError, match="'etcd_user' and 'etcd_password'") as caught:
        SchedulerConfig(etcd_url="https://etcd:2379,https://u:hidden@etcd:2380")
    assert "hidden" not in str(caught.value)
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS") as caught:
        SchedulerConfig(etcd_url="https://etcd:2379", otlp_endpoint="http://u:hidden@c:4317")
    assert "hidden" not in str(caught.value)
