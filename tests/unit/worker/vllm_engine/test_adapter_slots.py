"""Adapters in vLLM: loaded by digest, kept while requests use them, evicted when idle."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from services.common.adapter_files import WEIGHTS, adapter_digest
from services.core.adapter import Adapter, LoadedAdapter
from services.core.report import OtherRoom
from services.core.request import Limits, Request, Sampling
from services.worker.ipc import AbortRequest, ReturnRequests, StartRequest
from services.worker.vllm_engine.adapter_slots import AdapterSlots
from tests.support.fake_async_llm import AdapterOnTest, Dead, FakeAsyncLLM, FakeLora, output
from tests.support.waiting import eventually

SLOTS = 2
PROMPT = (1, 2, 3)

Load = Callable[..., Adapter]


@pytest.fixture
def make(tmp_path: Path) -> Load:
    """Write the folder of an adapter; returns the adapter as validated by a gateway."""

    def make(name: str, weights: str = "") -> Adapter:
        folder = tmp_path / "adapters" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_config.json").write_text("{}")
        (folder / WEIGHTS).write_text(weights or f"weights of {name}")
        return Adapter(name, adapter_digest(folder), str(folder), 8)

    return make


@pytest.fixture
async def on(tmp_path: Path) -> AsyncIterator[AdapterOnTest]:
    running = AdapterOnTest(adapter_slots=SLOTS, adapter_roots=[tmp_path / "adapters"])
    yield running
    await running.close()


def start(request_id: str, adapter: Adapter | None, **more: object) -> StartRequest:
    request = Request(request_id, PROMPT, Sampling(), Limits(8), 0.0, adapter=adapter)
    return StartRequest(replace(request, **more))  # type: ignore[arg-type]


async def started(on: AdapterOnTest, request_id: str, adapter: Adapter | None) -> None:
    on.send(start(request_id, adapter))
    await eventually(lambda: request_id in on.llm.given)


async def ended(on: AdapterOnTest, request_id: str) -> None:
    on.llm.emit(request_id, output(5, ended="length"))
    await eventually(lambda: request_id in {t.request_id for p in on.progress for t in p.tokens})


def refusal_of(on: AdapterOnTest, request_id: str) -> str:
    messages = [r for p in on.progress for r in p.refusals if r.request_id == request_id]
    return messages[0].message if messages else ""


def reported(on: AdapterOnTest) -> tuple[dict[int, tuple[bool, int]], int]:
    """Adapters by key with (loading, running), and free slots, of the last report."""
    use = on.progress[-1].report.load.adapter_use
    return {a.digest: (a.loading, a.running) for a in use.adapters}, use.adapter_slots_free


async def test_a_request_runs_with_its_adapter_and_others_without(
    on: AdapterOnTest, make: Load
) -> None:
    first = make("first")
    await started(on, "r0", None)
    await started(on, "r1", first)
    await started(on, "r2", first)

    assert on.llm.loras["r0"] is None
    lora = on.llm.loras["r1"]
    # vLLM's prefix cache distinguishes adapters by name.
    assert lora is not None and lora.lora_name == first.digest
    assert on.llm.loras["r2"] == lora and on.llm.added == [lora]
    await eventually(lambda: reported(on) == ({first.key: (False, 2)}, SLOTS - 1))
    await ended(on, "r1")
    await eventually(lambda: reported(on) == ({first.key: (False, 1)}, SLOTS - 1))


async def test_vllm_loads_a_copy_that_has_the_digest(on: AdapterOnTest, make: Load) -> None:
    first = make("first")
    await started(on, "r0", first)

    (lora,) = on.llm.added
    assert on.llm.weights[lora.lora_int_id] == "weights of first"
    assert lora.lora_path != first.source


async def test_other_weights_under_the_name_get_a_slot_of_their_own(
    on: AdapterOnTest, make: Load
) -> None:
    old = make("first", "old")
    await started(on, "r0", old)
    new = make("first", "new")
    await started(on, "r1", new)
    # It was admitted before the reload, and its weights are still in a slot.
    await started(on, "r2", old)

    weights = [on.llm.weights[on.llm.loras[name].lora_int_id] for name in ("r0", "r1", "r2")]
    assert weights == ["old", "new", "old"]


async def test_a_folder_that_has_changed_is_refused(on: AdapterOnTest, make: Load) -> None:
    old = make("first", "old")
    make("first", "new")
    on.send(start("r0", old))
    await eventually(lambda: refusal_of(on, "r0"))

    text = refusal_of(on, "r0")
    assert "'first' has changed" in text and "load it again with POST" in text
    assert not on.llm.added and "r0" not in on.llm.given
    await eventually(lambda: reported(on) == ({}, SLOTS))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/etc", "is not below any of 'adapter_roots'"),
        ("adapters/first", "must be an absolute path"),
        ("{root}/../outside", "is not below any of 'adapter_roots'"),
        ("{root}/link", "is not below any of 'adapter_roots'"),
        ("{root}/none", "adapter_config.json of the adapter in"),
    ],
)
async def test_a_folder_that_cannot_be_read_is_refused(
    on: AdapterOnTest, make: Load, tmp_path: Path, source: str, message: str
) -> None:
    adapter, root = make("first"), tmp_path / "adapters"
    shutil.copytree(root / "first", tmp_path / "outside")
    (root / "link").symlink_to(tmp_path / "outside")
    on.send(start("r0", replace(adapter, source=source.format(root=root))))
    await eventually(lambda: refusal_of(on, "r0"))

    assert message in refusal_of(on, "r0") and not on.llm.added


async def test_an_adapter_rejected_by_vllm_frees_its_slot(on: AdapterOnTest, make: Load) -> None:
    first = make("first")
    on.llm.rejects = "rank 64 is greater than 16"
    on.send(start("r0", first))
    await eventually(lambda: refusal_of(on, "r0"))
    assert "vLLM cannot load the adapter 'first': rank 64" in refusal_of(on, "r0")

    on.llm.rejects = ""
    await started(on, "r1", first)
    assert on.llm.loras["r1"] is not None


async def test_an_idle_adapter_makes_room_the_least_recently_used_first(
    on: AdapterOnTest, make: Load
) -> None:
    adapters = [make(f"a{number}") for number in range(4)]
    await started(on, "r0", adapters[0])
    on.now_s = 1.0
    await started(on, "r1", adapters[1])
    for name in ("r1", "r0"):
        on.now_s += 1.0
        await ended(on, name)
    await started(on, "r2", adapters[2])

    assert on.llm.removed == [on.llm.loras["r1"].lora_int_id]
    assert len(on.llm.weights) == SLOTS
    # No slot is idle now but that of the first.
    await started(on, "r3", adapters[3])
    on.send(start("r4", adapters[0], returnable=True))
    await eventually(lambda: refusal_of(on, "r4"))
    (refusal,) = [r for p in on.progress for r in p.refusals]
    assert refusal.returned


async def test_an_abort_during_the_load_keeps_the_adapter(on: AdapterOnTest, make: Load) -> None:
    first = make("first")
    on.llm.loads.clear()
    on.send(start("r0", first))
    await eventually(
        lambda: bool(on.progress) and reported(on) == ({first.key: (True, 1)}, SLOTS - 1)
    )
    on.send(AbortRequest("r0"))
    await eventually(lambda: reported(on) == ({first.key: (True, 0)}, SLOTS - 1))
    on.llm.loads.set()
    await eventually(lambda: reported(on) == ({first.key: (False, 0)}, SLOTS - 1))

    assert "r0" not in on.llm.given
    use = on.progress[-1].report.load.adapter_use
    assert (use.adapter_slots, use.adapters_loaded, use.adapter_loads_total) == (SLOTS, 1, 1)
    assert use.adapters == (LoadedAdapter(first.key, load_s=use.adapter_load_seconds_total),)


async def test_a_worker_that_shuts_down_finishes_requests_with_adapters(
    on: AdapterOnTest, make: Load
) -> None:
    on.send(start("r0", make("first"), resumable=True))
    on.send(start("r1", None, resumable=True))
    await eventually(lambda: len(on.llm.given) == 2)
    on.stats.running = 2
    for name in ("r0", "r1"):
        on.llm.emit(name, output(5))
    await eventually(lambda: sum(len(p.tokens) for p in on.progress) == 2)
    on.send(ReturnRequests(OtherRoom(10_000, (10_000,))))
    await eventually(lambda: refusal_of(on, "r1"))

    assert not refusal_of(on, "r0")


async def test_a_dead_vllm_is_not_an_unloadable_adapter(make: Load, tmp_path: Path) -> None:
    llm = FakeAsyncLLM()
    llm.dead = True
    slots = AdapterSlots(llm, 1, [tmp_path], FakeLora, (Dead,))
    claim = slots.claim(make("first"))
    assert claim is not None
    with pytest.raises(Dead):
        await anext(claim.generate({}, {}, "r0", priority=0))


async def test_a_hanging_load_times_out(
    make: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.worker.vllm_engine.adapter_slots.LOAD_TIMEOUT_S", 0.01)
    running = AdapterOnTest(adapter_slots=1, adapter_roots=[tmp_path])
    running.llm.loads.clear()
    running.send(start("r0", make("first")))
    await eventually(lambda: refusal_of(running, "r0"))

    (refusal,) = [r for p in running.progress for r in p.refusals]
    assert refusal.retryable and "was not loaded within" in refusal.message
    running.llm.loads.set()
    await running.close()
    await asyncio.sleep(0)


async def test_a_full_disk_is_not_a_client_error(
    on: AdapterOnTest, make: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, copy: Path | None = None) -> str:
        assert copy is not None
        (copy / WEIGHTS).symlink_to("/dev/full")
        return adapter_digest(folder, copy)

    first = make("first")
    with monkeypatch.context() as patched:
        patched.setattr("services.worker.vllm_engine.adapter_slots.adapter_digest", full)
        on.send(start("r0", first))
        await eventually(lambda: refusal_of(on, "r0"))
    (refusal,) = [r for p in on.progress for r in p.refusals]
    assert refusal.retryable and "free space in the temporary folder" in refusal.message
    # The slot is free again, and the next request loads the adapter.
    await started(on, "r1", first)
    await ended(on, "r1")
