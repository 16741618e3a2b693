"""Host memory of the workers of a cluster, for copies of KV, as the options and sections have it.

The section `worker` of the configuration file, or of a model, overrides the option `host_memory`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from services.common.host_memory import available_bytes, limit_bytes
from services.common.size import format_size
from services.core.setting import AUTO_BYTES
from services.worker.host_config import AUTO_PART
from tideserve.cli.cluster_options import ClusterOptions
from tideserve.cli.errors import EXIT_UNUSABLE, CommandError
from tideserve.cli.option_checks import HOST_MEMORY, host_memory_in


def host_memories(options: ClusterOptions) -> list[int]:
    """Bytes of `host_memory` of each worker; `AUTO_BYTES` for `auto`."""
    listed = options.listed_models
    sections = [model.worker for model in listed for _ in range(model.workers)]
    return [_chosen(options, own) for own in sections or [{}] * options.workers]


def with_host_memory(options: ClusterOptions) -> ClusterOptions:
    """The options with bytes instead of `auto`, which divides this machine's memory.

    Raises:
        CommandError: if this machine or container can never hold the host memory of all workers.
    """
    share = min(max(options.memories), available_bytes() // AUTO_PART // options.workers)
    models = tuple([replace(m, worker=_fixed(m.worker, share)) for m in options.listed_models])
    fixed = replace(
        options,
        host_memory=share if options.host_memory == AUTO_BYTES else options.host_memory,
        services=_fixed(options.services, share),
        worker=_fixed(options.worker, share),
        listed_models=models,
    )
    # A quarter of what is available is never more than the limit.
    if any(size not in (0, AUTO_BYTES) for size in host_memories(options)):
        _check_limit(fixed)
    return fixed


def describe_host_memory(options: ClusterOptions) -> str:
    """The host memory of each worker in words; "" without any."""
    sizes = sorted({size for size in host_memories(options) if size})
    if not sizes:
        return ""
    return " to ".join(format_size(size) for size in dict.fromkeys((sizes[0], sizes[-1]))) + " each"


def _check_limit(options: ClusterOptions) -> None:
    """Raise CommandError if this machine or container can never hold all memory."""
    sizes, limit = host_memories(options), limit_bytes()
    own_bytes = sum(options.memories) if options.device == "cpu" else 0
    needed = sum(sizes) + own_bytes
    if needed <= limit:
        return
    flag = "--host-memory" if set(sizes) == {options.host_memory} else f"'{HOST_MEMORY}'"
    memory = "memory" if options.listed_models else f"--memory {format_size(options.memory)}"
    raise CommandError(
        f"{flag} {describe_host_memory(options).removesuffix(' each')} of {len(sizes)} workers"
        + (f" and their {memory}" if own_bytes else "")
        + f" need {needed / 2**30:.1f} GiB, but this machine or container has"
        f" {limit / 2**30:.1f} GiB; lower it",
        EXIT_UNUSABLE,
    )


def _chosen(options: ClusterOptions, own: Mapping[str, Any]) -> int:
    """Bytes of a worker with the section `own` of its model."""
    section = {**options.services, **options.worker, **own}
    return host_memory_in(section, options.host_memory)


def _fixed(section: Mapping[str, Any], share: int) -> dict[str, Any]:
    """The section with `share` instead of `auto`."""
    automatic = host_memory_in(section, 0) == AUTO_BYTES
    return {**section, HOST_MEMORY: share} if automatic else dict(section)
