"""Errors of a worker's engine, each a `WorkerError`; every message has the cause and the remedy.

A slab holds the parameters of a layer, of the embedding or of the head; a stage is the range of
layers that a worker runs.
"""

_MIB = 1 << 20


class WorkerError(Exception):
    """Base of all errors that a worker raises deliberately."""


class ModelError(WorkerError):
    """The model folder cannot be served."""


class BudgetTooSmall(WorkerError):
    """The memory budget cannot hold the parameters, staging buffers and a minimum of KV cache."""

    def __init__(
        self, *, needed_bytes: int, budget_bytes: int, parameter_bytes: int, staging_bytes: int
    ) -> None:
        self.needed_bytes = needed_bytes
        self.budget_bytes = budget_bytes
        self.parameter_bytes = parameter_bytes
        self.staging_bytes = staging_bytes
        super().__init__(
            f"the memory budget of {_mib(budget_bytes)} MiB is too small: parameters take "
            f"{_mib(parameter_bytes)} MiB and staging {_mib(staging_bytes)} MiB; raise it to at "
            f"least {_mib(needed_bytes)} MiB"
        )


class DeviceError(WorkerError):
    """The device is unsupported, missing or out of memory."""


class ArenaExhausted(WorkerError):
    """An allocation needs more chunks than are free."""

    def __init__(self, *, requested_chunks: int, free_chunks: int) -> None:
        self.requested_chunks = requested_chunks
        self.free_chunks = free_chunks
        super().__init__(
            f"{requested_chunks} memory chunks were requested, but only {free_chunks} are free; "
            "unmap another range first"
        )


class LayerNotResident(WorkerError):
    """A layer cannot run because its parameters are not mapped."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"the parameters of {name} are not in memory; restore them before running the layer"
        )


class SlabCorrupted(WorkerError):
    """Restored parameters differ from the dropped parameters."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"the restored parameters of {name} do not match their digest; fetch them again"
        )


class InvalidStage(WorkerError):
    """A layer range does not exist, or a step of its change is out of order."""


class InvalidBlocks(WorkerError):
    """KV blocks are not mapped here, or received bytes do not match them."""


class InvalidBatch(WorkerError):
    """The engine cannot execute a batch."""


def cpu_only_torch_error(torch_version: str) -> str:
    """Error text for a CPU-only torch when a GPU was requested."""
    return (
        f"torch {torch_version} is a CPU-only build; install the CUDA build (`make clean`, then"
        " `make serve` without TORCH_INDEX; docs/gpus.md), or remove --device"
    )


def _mib(size_bytes: int) -> int:
    """`size_bytes` in MiB, rounded up, so that a stated minimum is always sufficient."""
    return -(-size_bytes // _MIB)
