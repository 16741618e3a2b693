"""LoRA adapters with the real vLLM: outputs, prefixes, a reload, and a changed folder.

It needs the environment of `tideserve engine install vllm`, and takes about a minute.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.support.cluster import Cluster
from tests.support.tiny_adapters import make_tiny_adapter
from tests.support.tiny_models import make_tiny_model
from tideserve.cli.cache import cache_root
from tideserve.cli.vllm_install import installed_vllm

START_S = 900.0
SLOTS = 2
PROMPT = list(range(10, 110))
"""Three whole blocks of 32 tokens."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3 * START_S),
    pytest.mark.skipif(
        installed_vllm(cache_root()) is None, reason="needs `tideserve engine install vllm`"
    ),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    make_tiny_model(folder / "model", dtype=torch.float32, hidden=128, layers=2)
    for seed, name in enumerate(("a", "b", "c")):
        make_tiny_adapter(folder / name, folder / "model", seed=seed)
    return folder


@pytest.fixture(scope="module")
def cluster(root: Path) -> Iterator[Cluster]:
    with Cluster(
        root / "model",
        workers=1,
        memory="200MiB",
        dtype="float32",
        engine="vllm",
        max_batch_tokens=512,
        ready_timeout=START_S,
        threads=1,
        gateway={"adapter_roots": [str(root)]},
        worker={
            "start_timeout_s": START_S,
            "engine_args": {"enforce_eager": True},
            "adapter_slots": SLOTS,
            "adapter_rank_max": 8,
            "adapter_roots": [str(root)],
        },
    ) as running:
        yield running


async def load(cluster: Cluster, name: str, folder: Path, **fields: Any) -> None:
    body = {"lora_name": name, "lora_path": str(folder)} | fields
    headers = {"x-tideserve-admin": "1"}
    async with httpx.AsyncClient(base_url=cluster.admin_url, headers=headers) as admin:
        answer = await admin.post("/v1/load_lora_adapter", json=body)
    assert answer.status_code == 200, answer.text


async def complete(cluster: Cluster, model: str, **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60.0) as http:
        return await http.post("/v1/completions", json=body | fields)


async def answer_of(cluster: Cluster, model: str, **fields: Any) -> tuple[list[int], int]:
    """The output tokens, and the number of cached prompt tokens."""
    answer = await complete(cluster, model, **fields)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    cached: int = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    return body["choices"][0]["token_ids"], cached


def base_of(cluster: Cluster) -> str:
    """The name of the model."""
    models = cluster.get("/v1/models")["data"]
    return next(model["id"] for model in models if model["parent"] is None)


async def test_outputs_and_prefixes_are_specific_to_the_adapter(
    cluster: Cluster, root: Path
) -> None:
    base = base_of(cluster)
    for name in ("a", "b"):
        await load(cluster, name, root / name)
    names = (base, "a", "b")
    first = {name: await answer_of(cluster, name) for name in names}
    again = {name: await answer_of(cluster, name) for name in names}

    outputs = {name: tuple(ids) for name, (ids, _) in first.items()}
    assert len(set(outputs.values())) == len(names), "each has weights of its own"
    assert [cached for _, cached in first.values()] == [0, 0, 0], "nothing is shared"
    assert {name: tuple(ids) for name, (ids, _) in again.items()} == outputs
    assert all(cached > 0 for _, cached in again.values())


async def test_more_adapters_than_slots_take_turns(cluster: Cluster, root: Path) -> None:
    for name in ("a", "b", "c"):
        await load(cluster, name, root / name, load_inplace=True)
    outputs = {name: (await answer_of(cluster, name))[0] for name in ("a", "b", "c")}
    for name in ("c", "a", "b", "a", "c"):
        assert (await answer_of(cluster, name))[0] == outputs[name]
    (row,) = cluster.workers()
    assert row["adapter_slots"] == SLOTS
    assert row["adapter_loads_total"] > SLOTS and row["adapter_load_seconds_total"] > 0


async def test_a_reload_applies_to_new_requests_and_a_changed_folder_is_refused(
    cluster: Cluster, root: Path
) -> None:
    folder, model_dir = root / "changing", root / "model"
    make_tiny_adapter(folder, model_dir, seed=10)
    await load(cluster, "changing", folder)
    expected, _ = await answer_of(cluster, "changing", max_tokens=200)
    body = {"max_tokens": 200, "stream": True, "stream_options": {"include_usage": False}}
    fields = {"model": "changing", "prompt": PROMPT, "temperature": 0, "ignore_eos": True}
    fields |= {"return_token_ids": True} | body
    async with (
        httpx.AsyncClient(base_url=cluster.url, timeout=60.0) as http,
        http.stream("POST", "/v1/completions", json=fields) as running,
    ):
        lines = running.aiter_lines()
        ids = ids_of(await anext(lines))
        # While it runs, the folder's weights change, first without a reload.
        make_tiny_adapter(folder, model_dir, seed=11)
        await load(cluster, "changing", folder, load_inplace=True)
        new, _ = await answer_of(cluster, "changing")
        async for line in lines:
            ids += ids_of(line)
    assert ids == expected, "it keeps the weights with which it began"
    assert new != expected[: len(new)]

    make_tiny_adapter(folder, model_dir, seed=12)
    # Its slot still holds the last loaded weights.
    assert (await answer_of(cluster, "changing"))[0] == new
    for name in ("a", "b"):
        await load(cluster, name, root / name, load_inplace=True)
        await answer_of(cluster, name)
    refused = await complete(cluster, "changing")
    assert refused.status_code == 400
    assert "'changing' has changed since it was loaded" in refused.json()["error"]["message"]


def ids_of(line: str) -> list[int]:
    """The tokens of an event of a stream."""
    if not line.startswith("data: {"):
        return []
    choices = json.loads(line.removeprefix("data: "))["choices"]
    return [token for choice in choices for token in choice.get("token_ids") or ()]
