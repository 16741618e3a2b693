"""The Python client, installed from its wheels without the server, against a real gateway."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import build_wheels
import pytest

from services.common.etcd import Store
from tests.support.certified import DAY, Certified
from tests.support.environment import Environment
from tests.support.gateway import TEXT, gateway_case
from tideserve.cli.certificates import write_pair

KEY = "k" * 24
# Runs where neither the server nor this tree can be imported.
TOUR = """
import asyncio, importlib.util, json, sys
import tideserve.client as tide
assert importlib.util.find_spec("services") is None

target, key, ca, cert, private = sys.argv[1:]
tls = tide.Tls(ca, cert or None, private or None) if ca else False
results = {}

with tide.Client(target, api_key=key, tls=tls, timeout_s=60) as client:
    results["models"] = [model.id for model in client.models()]
    answer = client.chat("hi", model="m", max_tokens=20, temperature=0)
    results["chat"] = answer.choices[0].message.text
    with client.stream_chat("hi", model="m", max_tokens=20) as stream:
        results["stream"] = "".join(piece.text for piece in stream)
    results["complete"] = client.complete(["a", "b"], model="m", max_tokens=5).choices[1].text
    ids = client.tokenize("hi", model="m")
    results["round"] = client.detokenize(ids, model="m")
    with client.stream_chat("hi", model="m") as stream:
        next(stream)
        client.cancel(stream.id)
        try:
            for piece in stream:
                pass
        except tide.Cancelled as error:
            results["cancelled"] = error.reason
    try:
        client.chat("hi", model="other")
    except tide.ModelNotFound as error:
        results["error"] = [error.reason, error.field]

async def main():
    async with tide.AsyncClient(target, api_key=key, tls=tls, timeout_s=60) as client:
        async with client.stream_complete("hi", model="m", max_tokens=20) as stream:
            results["asyncio"] = "".join([piece.text async for piece in stream])

asyncio.run(main())
print(json.dumps(results))
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with tideserve-api and tideserve-client, and nothing else of the tree."""
    folder = tmp_path_factory.mktemp("client")
    built = {path.name.split("-")[0]: path for path in build_wheels.build(folder / "dist")}
    made = Environment(folder / "environment")
    for name in ("tideserve_api", "tideserve_client"):
        made.install(built[name])
    return made


@pytest.fixture(params=["clear", "tls", "mtls"])
async def options(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[dict[str, Any]]:
    """Configuration of the gateway, and certificate files of the client."""
    if request.param == "clear":
        yield {"config": {}, "files": ["", "", ""]}
        return
    certified = Certified(tmp_path)
    write_pair(tmp_path, "http", certified.authority.issue("http", ("127.0.0.1",), DAY))
    write_pair(tmp_path, "client", certified.authority.issue("client", ("client",), DAY))
    config = {
        "http_tls_cert_file": tmp_path / "http.pem",
        "http_tls_key_file": tmp_path / "http-key.pem",
    }
    pair = ["", ""]
    if request.param == "mtls":
        config["public_grpc_ca_file"] = certified.ca_file
        pair = [str(tmp_path / "client.pem"), str(tmp_path / "client-key.pem")]
    yield {"config": config, "files": [str(certified.ca_file), *pair]}


async def test_a_tour(
    store: Store, tmp_path: Path, environment: Environment, options: dict[str, Any]
) -> None:
    async with gateway_case(store, tmp_path / "model", api_key=KEY, **options["config"]) as case:
        arguments = (case.target, KEY, *options["files"])
        results = json.loads(
            await asyncio.to_thread(environment.command, "python", "-c", TOUR, *arguments)
        )
    assert results == {
        "models": ["m"],
        "chat": TEXT[:20],
        "stream": TEXT[:20],
        "complete": TEXT[:5],
        "round": "hi",
        "cancelled": "CANCELLED",
        "error": ["MODEL_NOT_FOUND", "model"],
        "asyncio": TEXT[:20],
    }
