"""LoRA adapters in vLLM: loads them into slots by digest, and evicts idle ones.

vLLM holds at most `adapter_slots` adapters. A request *claims* the slot of its adapter when it
arrives and releases it when it ends; a slot without claims is idle, and the least recently used
idle slot is given to the next adapter. vLLM knows an adapter by its digest, so that its prefix
cache never mixes adapters, and weights loaded under an old name do not replace those of running
requests.
"""

import asyncio
import logging
import tempfile
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from services.common.adapter_files import (
    AdapterUnreadable,
    CopyFailed,
    adapter_digest,
    folder_below,
)
from services.common.clock import monotonic_s
from services.common.timeouts import timeout
from services.core.adapter import Adapter, AdapterUse, LoadedAdapter
from services.worker.vllm_engine.outputs import VllmOutput

LOAD_TIMEOUT_S = 120.0
"""Longest time for which a request waits until its adapter is loaded."""

log = logging.getLogger(__name__)


class CannotLoad(ValueError):
    """An adapter cannot be loaded; the message has cause and remedy."""


class LoadFailed(Exception):
    """An adapter could not be loaded now; the request may be repeated elsewhere."""


class LoraEngine(Protocol):
    """The part of vLLM's `AsyncLLM` that loads and applies adapters."""

    async def add_lora(self, lora_request: Any) -> bool: ...

    async def remove_lora(self, lora_id: int) -> bool: ...

    def generate(
        self,
        prompt: Any,
        sampling_params: Any,
        request_id: str,
        *,
        lora_request: Any,
        priority: int,
    ) -> AsyncGenerator[VllmOutput, None]: ...


@dataclass(slots=True, eq=False)
class _AdapterSlot:
    """A slot in use; `loading` ends with vLLM's request for the adapter, or an error."""

    adapter: Adapter
    number: int  # vLLM's id of the adapter, new for each load
    loading: "asyncio.Task[tuple[Any, float]]"
    claims: int = 0
    used_s: float = 0.0  # time of the latest claim or release
    load_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class SlotClaim:
    """A request's claim to the slot of its adapter; release it once."""

    _engine: LoraEngine
    _slot: _AdapterSlot
    _now_s: Callable[[], float]

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *, priority: int
    ) -> AsyncGenerator[VllmOutput, None]:
        """As `AsyncLLM.generate`, with the adapter, once it is loaded.

        Raises:
            CannotLoad: if its files are missing or have another digest, or vLLM rejects them.
            LoadFailed: if that takes longer than `LOAD_TIMEOUT_S`, or this machine's disk is full.
        """
        try:
            async with timeout(LOAD_TIMEOUT_S):
                # Other requests wait for the same load, so none of them may cancel it.
                lora, _ = await asyncio.shield(self._slot.loading)
        except TimeoutError as error:
            name = self._slot.adapter.name
            raise LoadFailed(
                f"the adapter '{name}' was not loaded within {LOAD_TIMEOUT_S:g} s"
            ) from error
        outputs = self._engine.generate(
            prompt, sampling_params, request_id, lora_request=lora, priority=priority
        )
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    def release(self) -> None:
        """The request has ended."""
        self._slot.claims -= 1
        self._slot.used_s = self._now_s()


class AdapterSlots:
    """The slots of a vLLM engine; call its methods in the event loop of the engine."""

    def __init__(
        self,
        engine: LoraEngine,
        slots: int,
        roots: Sequence[Path],
        to_lora: Callable[[str, int, str], Any],
        dead: tuple[type[Exception], ...] = (),
        now_s: Callable[[], float] = monotonic_s,
    ) -> None:
        """`to_lora(name, id, folder)` makes vLLM's `LoRARequest`; folders lie below `roots`.

        `dead`: errors after which vLLM is dead; they are raised as they are.
        """
        self._engine = engine
        self._count = slots
        self._roots = roots
        self._to_lora = to_lora
        self._dead = dead
        self._now_s = now_s
        self._slots: dict[str, _AdapterSlot] = {}  # by digest
        self._evicted: list[int] = []  # ids that vLLM still holds
        self._next_number = 1
        # vLLM computes nothing while it loads, so loads follow each other.
        self._turn = asyncio.Lock()
        self._loads_total = 0
        self._load_seconds_total = 0.0

    def claim(self, adapter: Adapter) -> SlotClaim | None:
        """Claim the slot of an adapter, and begin to load it if necessary; None if none is free."""
        slot = self._slots.get(adapter.digest)
        if slot is None:
            if len(self._slots) >= self._count and not self._evict():
                return None
            loading = asyncio.create_task(self._load(adapter, self._next_number))
            slot = _AdapterSlot(adapter, self._next_number, loading)
            self._slots[adapter.digest] = slot
            self._next_number += 1
            loading.add_done_callback(partial(self._note_loaded, slot))
        slot.claims += 1
        slot.used_s = self._now_s()
        return SlotClaim(self._engine, slot, self._now_s)

    def use(self) -> AdapterUse:
        """Adapters and free slots, for the worker's reports."""
        slots = self._slots.values()
        return AdapterUse(
            adapters=tuple(
                LoadedAdapter(slot.adapter.key, not slot.load_s, slot.claims, slot.load_s)
                for slot in slots
            ),
            adapter_slots_free=self._count - len(self._slots),
            adapter_slots=self._count,
            adapters_loaded=sum(slot.load_s > 0 for slot in slots),
            adapter_loads_total=self._loads_total,
            adapter_load_seconds_total=self._load_seconds_total,
        )

    def _evict(self) -> bool:
        """Free the least recently used idle slot; False if there is none."""
        idle = [slot for slot in self._slots.values() if not slot.claims and slot.load_s]
        if not idle:
            return False
        slot = min(idle, key=lambda slot: slot.used_s)
        del self._slots[slot.adapter.digest]
        self._evicted.append(slot.number)
        return True

    async def _load(self, adapter: Adapter, number: int) -> tuple[Any, float]:
        """Load an adapter into vLLM; returns its `LoRARequest`, and the seconds that it took."""
        async with self._turn:
            began_s = self._now_s()
            with tempfile.TemporaryDirectory(prefix="tideserve-adapter-") as folder:
                await asyncio.to_thread(self._copy, adapter, Path(folder))
                lora = self._to_lora(adapter.digest, number, folder)
                try:
                    while self._evicted:
                        await self._engine.remove_lora(self._evicted[-1])
                        self._evicted.pop()
                    await self._engine.add_lora(lora)
                except self._dead:
                    raise
                except Exception as error:
                    raise CannotLoad(
                        f"vLLM cannot load the adapter '{adapter.name}': {error}; correct its"
                        " files and load it again"
                    ) from error
            return lora, max(self._now_s() - began_s, 1e-6)

    def _note_loaded(self, slot: _AdapterSlot, loading: "asyncio.Task[tuple[Any, float]]") -> None:
        """Note the end of a load; after a failure the slot is free."""
        if loading.cancelled() or (error := loading.exception()) is not None:
            del self._slots[slot.adapter.digest]
            if not loading.cancelled():
                log.warning("%s", error)
            return
        _, slot.load_s = loading.result()
        self._loads_total += 1
        self._load_seconds_total += slot.load_s
        adapter = slot.adapter
        log.info("loaded adapter %s (%.12s) in %.3f s", adapter.name, adapter.digest, slot.load_s)

    def _copy(self, adapter: Adapter, target: Path) -> None:
        """Copy the files of an adapter, so that vLLM loads the bytes that have its digest."""
        try:
            digest = adapter_digest(folder_below(adapter.source, self._roots), target)
        except AdapterUnreadable as error:
            raise CannotLoad(f"the adapter '{adapter.name}' cannot be loaded: {error}") from error
        except CopyFailed as error:
            raise LoadFailed(f"the adapter '{adapter.name}' was not loaded: {error}") from error
        if digest != adapter.digest:
            raise CannotLoad(
                f"the folder {adapter.source} of the adapter '{adapter.name}' has changed since it"
                f" was loaded: its digest is {digest:.12}, not {adapter.digest:.12}; load it again"
                " with POST /v1/load_lora_adapter"
            )
