"""Makes LoRA adapters available to clients, and takes them away: for the admin port."""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from services.common.adapter_files import AdapterUnreadable, folder_below
from services.common.clock import unix_s
from services.common.errors import StoreError
from services.core.adapter import NAME_CHARS_MAX
from services.gateway.cluster.adapter_directory import AdapterDirectory, ChangedMeanwhile
from services.gateway.model.adapter_folder import AdapterFolder, read_adapter
from services.gateway.vocabulary.errors import (
    BadRequest,
    NoSuchModel,
    NotSupported,
    ServiceUnavailable,
)
from tideserve.common.v1 import adapter_pb2

RETRY_S = 2.0
ADAPTERS_MAX = 4096
"""Adapters of all models together; gateways that load at the same time may exceed it slightly."""

log = logging.getLogger(__name__)


class AdapterLoader:
    """Checks the folders of adapters, and writes and deletes their records."""

    def __init__(
        self,
        directory: AdapterDirectory,
        roots: Sequence[str],
        model_dirs: Mapping[str, Path],
        aliases: Mapping[str, str],
        rank_max: Callable[[str], int],
    ) -> None:
        """`roots`: folders below which adapters may lie; none: no adapter can be loaded.

        `model_dirs`: folder of each model; `aliases`: model of each name of a model. `rank_max`
        returns the largest rank that a worker of a model loads, 0 if none loads adapters.
        """
        self._directory = directory
        self._roots = [Path(root) for root in roots]
        self._model_dirs = model_dirs
        self._aliases = aliases
        self._rank_max = rank_max

    async def load(self, name: str, path: str, base: str, in_place: bool, by: str) -> str:
        """Check the adapter in the folder `path` and publish it as `name`; returns what was done.

        `base`: a name of its model; "" if there is a single model. `in_place`: replace the adapter
        of this name. `by`: owner of the key.

        Raises:
            GatewayError: if the name is taken, the adapter does not fit, or etcd does not answer.
        """
        model = self._check(name, base)
        revision, known = self._directory.revision(name), self._directory.record(name)
        try:
            folder = await asyncio.to_thread(self._read, path, self._model_dirs[model])
        except AdapterUnreadable as error:
            raise BadRequest(str(error), param="lora_path") from error
        self._check_rank(model, folder.rank)
        if known is None and len(self._directory.names()) >= ADAPTERS_MAX:
            raise BadRequest(
                f"there are {ADAPTERS_MAX} adapters already; unload one that is not used",
                param="lora_name",
            )
        if known is not None and not in_place:
            if (known.digest, known.base, known.source) == (folder.digest, model, path):
                return f"LoRA adapter '{name}' was loaded before, with the same weights."
            raise BadRequest(
                f"the adapter '{name}' is loaded already; send 'load_inplace': true to replace it",
                param="lora_name",
            )
        record = adapter_pb2.AdapterRecord(
            name=name,
            base=model,
            source=path,
            digest=folder.digest,
            rank=folder.rank,
            targets=folder.targets,
            created=unix_s(),
            created_by=by,
        )
        await self._change(name, lambda: self._directory.write(record, revision))
        log.info("adapter %s of %s is %.12s in %s", name, model, folder.digest, path)
        return f"LoRA adapter '{name}' added successfully."

    async def unload(self, name: str) -> str:
        """Delete the record of an adapter; its running requests end normally.

        Raises:
            GatewayError: if there is no such adapter, or etcd does not answer.
        """
        if self._directory.record(name) is None:
            raise NoSuchModel(
                f"there is no adapter {name[:128]!a}; see /v1/models", param="lora_name"
            )
        revision = self._directory.revision(name)
        await self._change(name, lambda: self._directory.delete(name, revision))
        log.info("adapter %s was removed", name)
        return f"LoRA adapter '{name}' removed successfully."

    def _check(self, name: str, base: str) -> str:
        """Check the names; returns the adapter's model."""
        if not self._roots:
            raise NotSupported(
                "this gateway loads no adapters; set 'adapter_roots' to the folders below which"
                " they lie"
            )
        if not 1 <= len(name) <= NAME_CHARS_MAX or not name.isprintable() or name != name.strip():
            raise BadRequest(
                f"'lora_name' must have 1 to {NAME_CHARS_MAX} printable characters, without spaces"
                " around it; choose another name",
                param="lora_name",
            )
        if name in self._aliases:
            raise BadRequest(
                f"'{name}' is the name of a model; choose another for the adapter",
                param="lora_name",
            )
        if not base and len(self._model_dirs) == 1:
            return next(iter(self._model_dirs))
        model = self._aliases.get(base)
        if model is None:
            named = f"{base[:128]!a} is no model of this gateway" if base else "'base' is missing"
            raise BadRequest(
                f"{named}; name the adapter's model in 'base': {_listed(self._model_dirs)}",
                param="base",
            )
        return model

    def _read(self, path: str, model_dir: Path) -> AdapterFolder:
        return read_adapter(folder_below(path, self._roots), model_dir)

    def _check_rank(self, model: str, rank: int) -> None:
        rank_max = self._rank_max(model)
        # Without workers nothing is known; the scheduler refuses requests until there are some.
        if 0 < rank_max < rank:
            raise BadRequest(
                f"the adapter has rank {rank}, but workers of {model} load up to {rank_max}; raise"
                " their 'adapter_rank_max'",
                param="lora_path",
            )

    async def _change(self, name: str, change: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await change()
        except ChangedMeanwhile as error:
            raise ServiceUnavailable(
                f"the adapter '{name}' was changed at the same time; retry", retry_after_s=RETRY_S
            ) from error
        except StoreError as error:
            raise ServiceUnavailable(
                f"the adapter '{name}' may not have been changed: {error}; retry",
                retry_after_s=RETRY_S,
            ) from error


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names))
