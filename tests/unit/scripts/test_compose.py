"""The compose files: hardening of every service, and known settings."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted([*ROOT.glob("compose*.yaml"), ROOT / "docker" / "compose.test.yaml"])
SERVICES = ("gateway", "memmgr", "scheduler", "worker")


def services(path: Path) -> dict[str, dict[str, Any]]:
    declared: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text())["services"]
    return declared


@pytest.mark.parametrize("name", ["etcd", "model", *SERVICES])
def test_no_service_can_change_its_own_image(name: str) -> None:
    service = services(ROOT / "compose.yaml")[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service and "cap_add" not in service


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_ports_bind_to_loopback_by_default(path: Path) -> None:
    for service in services(path).values():
        for port in service.get("ports", ()):
            assert re.match(r"(127\.0\.0\.1|\$\{HTTP_HOST:-127\.0\.0\.1\}):", port), port


def test_images_run_as_an_unprivileged_user() -> None:
    for name in ("Dockerfile", "etcd.Dockerfile"):
        text = (ROOT / "docker" / name).read_text()
        final = [stage for stage in re.split(r"^FROM ", text, flags=re.M) if "USER " in stage]
        assert final
        assert all(user == "65532:65532" for user in re.findall(r"^USER (.*)$", text, re.M))
        assert "# syntax" not in text


def test_each_service_image_has_a_health_check_and_no_shell() -> None:
    text = (ROOT / "docker" / "Dockerfile").read_text()
    stages = {
        re.split(r"\s", stage, maxsplit=3)[2]: stage
        for stage in re.split(r"^FROM ", text, flags=re.M)[1:]
        if " AS " in stage.splitlines()[0]
    }
    for name in SERVICES:
        assert "HEALTHCHECK" in stages[name]
        assert f'ENTRYPOINT ["python3", "-m", "services.{name}"]' in stages[name]
