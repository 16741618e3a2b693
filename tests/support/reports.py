"""Worker reports with defaults for all fields."""

from services.core.adapter import NO_ADAPTERS, AdapterUse
from services.core.report import EngineReport, Load, LoadReport, MemoryReport
from services.core.scheduler.vocabulary import LoadReported


def load_reported(
    now_s: float,
    worker_id: str,
    number: int,
    *,
    incarnation: str = "i",
    epoch: int = 1,
    received: tuple[str, ...] = (),
    passed_on: bool = False,
    running: int = 0,
    waiting: int = 0,
    free: int = 0,
    wanted: int = 0,
    total: int = 0,
    prefill: int = 0,
    queries: int = 0,
    hits: int = 0,
    dropped: tuple[int, ...] = (),
    dropped_total: int = 0,
    batch_running: int = 0,
    batch_waiting: int = 0,
    batch_blocks: int = 0,
    batch_yields: bool = False,
    most: int = 0,
    adapter_use: AdapterUse = NO_ADAPTERS,
) -> LoadReported:
    """The event of a load report."""
    load = Load(
        running,
        waiting,
        free,
        wanted,
        kv_blocks_total=total,
        prefill_tokens=prefill,
        prefix_queries_total=queries,
        prefix_hits_total=hits,
        batch_running=batch_running,
        batch_waiting=batch_waiting,
        kv_blocks_batch=batch_blocks,
        batch_yields=batch_yields,
        sequences_max=most,
        adapter_use=adapter_use,
    )
    report = LoadReport(
        worker_id, incarnation, number, epoch, load, received, dropped, dropped_total
    )
    return LoadReported(now_s, report, passed_on)


def memory_report(
    worker_id: str, engine: EngineReport, incarnation: str = "i", kv_block_bytes: int = 10
) -> MemoryReport:
    """A memory report of a worker."""
    return MemoryReport(worker_id, incarnation, (11,), 100, 0, kv_block_bytes, engine)
