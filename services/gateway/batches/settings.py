"""Settings of files and batches."""

from dataclasses import dataclass

from services.core.batches.order import BatchOrder
from services.core.setting import choice, number, option, seconds, size

DAY_S = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """Settings of files and batches; without `batch_store` the gateway serves neither."""

    batch_store: str | None = option(
        None,
        "URL of the database of files and batches: sqlite:////FOLDER/batches.db, or"
        " postgresql+psycopg://USER:PASSWORD@HOST/DATABASE, which several gateways can share."
        " Unset: no files and batches.",
        secret=True,
    )
    batch_files: str | None = option(
        None,
        "Folder for the contents of files: a path, or a URL of fsspec such as s3://BUCKET/FOLDER."
        " Required with PostgreSQL.",
        default_text="folder files beside the database",
    )
    batch_window: int = number(
        2048,
        "Maximum lines of batches that run or wait in the scheduler's queue.",
        minimum=1,
        maximum=100_000,
    )
    batch_order: BatchOrder = choice(
        BatchOrder.PREFIX,
        BatchOrder,
        "Order of a batch's lines: prefix runs lines with the same beginning together, fifo keeps"
        " the file's order, sjf and ljf run the shortest or longest first.",
    )
    batch_file_bytes_max: int = size(
        200_000_000, "Maximum bytes of an uploaded file.", minimum=2**10, maximum=2**40
    )
    batch_lines_max: int = number(
        50_000, "Maximum lines of a batch.", minimum=1, maximum=10_000_000
    )
    batch_open_max: int = number(
        1000,
        "Maximum batches of an owner of API keys that have not ended; further ones get 429.",
        minimum=1,
        maximum=1_000_000,
    )
    batch_expiry_max_s: float = seconds(
        7.0 * DAY_S, "Longest completion window of a batch, in seconds.", minimum=3600
    )
    batch_keep_s: float = number(
        30.0 * DAY_S,
        "Seconds that ended batches and their output files are kept; uploads stay until deleted.",
        minimum=3600,
        maximum=3650 * DAY_S,
    )
