"""A cluster that listens on IPv6, with unusual characters in the model name."""

import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.cluster import Cluster
from tests.support.tiny_models import make_tiny_model

NAME = 'we"ird\n/../näme{x="y"}'


def has_ipv6() -> bool:
    """Whether the loopback address of IPv6 exists here."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_ipv6_and_an_odd_model_name(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, seed=3)
    options: dict[str, Any] = {
        "workers": 1,
        "memory": "32MiB",
        "dtype": "float64",
        "chunk_size": "64KiB",
    }
    with (
        Cluster(model_dir=folder, host="::1", model_name=NAME, **options) as cluster,
        httpx.Client(base_url=f"http://[::1]:{cluster.port}", timeout=60) as client,
    ):
        (model,) = client.get("/v1/models").json()["data"]
        assert model["id"] == NAME
        body = {"model": NAME, "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}
        response = client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        assert response.json()["model"] == NAME
        label = json.dumps(NAME, ensure_ascii=False)
        assert f"model_name={label}" in client.get("/metrics").text
