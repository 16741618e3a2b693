"""Tables of the batch store, and the engines of its databases: SQLite or PostgreSQL."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Connection,
    Double,
    Engine,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    create_engine,
    event,
    insert,
    select,
)
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.expression import ColumnElement

from services.common.errors import ConfigError
from services.core.batches.vocabulary import ENDED, BatchState

SCHEMA_VERSION = 1
BUSY_TIMEOUT_S = 5.0
"""Seconds that SQLite waits for another process's lock; the same for locks in PostgreSQL."""
CONNECT_TIMEOUT_S = 5.0
STATEMENT_TIMEOUT_S = 30.0
LOST_TIMEOUT_S = 20.0
"""Time after which a connection to PostgreSQL counts as lost if nothing is acknowledged."""
# File systems on which SQLite's locks do not exclude other machines.
_SHARED_FILE_SYSTEMS = ("nfs", "cifs", "smb", "9p", "ceph", "gluster", "fuse.", "lustre", "gpfs")

metadata = MetaData()

leadership = Table(
    "leadership",
    metadata,
    Column("id", Integer, CheckConstraint("id = 1"), primary_key=True, autoincrement=False),
    Column("schema_version", Integer, nullable=False),
    # The fencing token: increased by each leadership.
    Column("token", BigInteger, nullable=False),
    # The token of the election that the leader won, and when it wrote last.
    Column("election", BigInteger, nullable=False),
    Column("seen_s", Double, nullable=False),
)

files = Table(
    "files",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("owner", String(256), nullable=False),
    Column("purpose", String(64), nullable=False),
    Column("name", Text, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("object_name", String(512), nullable=False),
    Column("created_s", Double, nullable=False),
    Column("expires_s", Double),
    # The row outlives the deletion until the object is deleted as well.
    Column("deleted_s", Double),
    Index("files_of_owner", "owner", "created_s", "id"),
    Index("files_by_object", "object_name"),
)

ENTERED: Mapping[BatchState, str] = {
    state: f"{state.value}_s" for state in BatchState if state is not BatchState.VALIDATING
}
"""The column with the time at which a batch entered a state; VALIDATING has `created_s`."""
OPEN = [state for state in BatchState if state not in ENDED]
"""The states of batches that have not ended."""

batches = Table(
    "batches",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("owner", String(256), nullable=False),
    Column("key_id", String(64), nullable=False),
    Column("endpoint", String(64), nullable=False),
    Column("input_file", String(64), ForeignKey("files.id"), nullable=False),
    Column("window_s", Integer, nullable=False),
    Column("created_s", Double, nullable=False),
    Column("expires_s", Double, nullable=False),
    Column("state", String(16), nullable=False),
    Column("metadata", Text, nullable=False),
    Column("errors", Text, nullable=False),
    # Lines: of the input, and those that ended; rows of a batch that ended are deleted later.
    Column("total", Integer, nullable=False),
    Column("completed", Integer, nullable=False),
    Column("failed", Integer, nullable=False),
    Column("dropped", Integer, nullable=False),
    Column("cleared", Integer, nullable=False),
    # Tokens: estimate of all, and of the ended lines.
    Column("tokens", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    *(Column(name, Double) for name in ENTERED.values()),
    Column("output_file", String(64), ForeignKey("files.id")),
    Column("error_file", String(64), ForeignKey("files.id")),
    # Time until these two files expire.
    Column("output_keep_s", Integer),
    Column("idempotency_key", String(256)),
    UniqueConstraint("owner", "idempotency_key"),
    Index("batches_of_owner", "owner", "created_s", "id"),
    Index("batches_in_state", "state"),
)

lines = Table(
    "lines",
    metadata,
    Column("batch", String(64), ForeignKey("batches.id"), primary_key=True),
    Column("line", Integer, primary_key=True, autoincrement=False),
    Column("custom_id", Text, nullable=False),
    Column("offset", BigInteger, nullable=False),
    Column("length", Integer, nullable=False),
    Column("sort_key", BigInteger, nullable=False),
    Column("state", String(16), nullable=False),
    # The leadership that claimed the line last.
    Column("token", BigInteger, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("not_before_s", Double, nullable=False),
    Column("status", Integer, nullable=False),
    Column("request_id", String(256), nullable=False),
    Column("result", LargeBinary),
    Column("output_ids", LargeBinary),
    UniqueConstraint("batch", "custom_id"),
    Index("lines_to_claim", "batch", "state", "sort_key", "line"),
)


class database_now(ColumnElement[float]):
    """The clock of the database in Unix seconds."""

    type = Double()
    inherit_cache = True


@compiles(database_now, "sqlite")
def _sqlite_now(element: database_now, compiler: Any, **options: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(database_now, "postgresql")
def _postgresql_now(element: database_now, compiler: Any, **options: Any) -> str:
    return "extract(epoch from clock_timestamp())::double precision"


def open_engine(url: str) -> Engine:
    """The engine of a URL such as sqlite:////var/lib/tideserve/batches.db.

    Raises:
        ConfigError: if the URL is invalid, its driver is missing, or SQLite's file is not on a
            local file system.
    """
    try:
        parsed = make_url(url)
        backend = parsed.get_backend_name()
        if backend == "sqlite":
            return _sqlite(parsed)
        if backend == "postgresql":
            return _postgresql(parsed)
    except ArgumentError:
        raise ConfigError(
            "'batch_store' is not a URL; write sqlite:////FOLDER/batches.db or"
            " postgresql+psycopg://USER@HOST/DATABASE"
        ) from None
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"'batch_store' needs the package {error.name}; install tideserve[postgres]"
        ) from None
    raise ConfigError(f"'batch_store' has the database {backend}; use sqlite or postgresql")


def create_tables(connection: Connection) -> None:
    """Create the tables unless they exist.

    Raises:
        ConfigError: if a newer version created them.
    """
    if connection.dialect.name == "postgresql":
        # Concurrent creation of a table fails even with IF NOT EXISTS.
        connection.exec_driver_sql("SELECT pg_advisory_xact_lock(7266170)")
    metadata.create_all(connection)
    version = connection.scalar(select(leadership.c.schema_version))
    if version is None:
        row = {"id": 1, "schema_version": SCHEMA_VERSION, "token": 0, "election": 0, "seen_s": 0.0}
        connection.execute(insert(leadership), row)
    elif version != SCHEMA_VERSION:
        raise ConfigError(
            f"the batch store has tables of version {version}, and this gateway needs"
            f" {SCHEMA_VERSION}; use the gateway that created them, or another database"
        )


def _sqlite(url: URL) -> Engine:
    if not url.database or url.database == ":memory:":
        raise ConfigError(
            "'batch_store' names no file, so batches would be lost with the process; write"
            " sqlite:////FOLDER/batches.db"
        )
    path = Path(url.database)
    _check_local(path)
    try:
        # SQLite creates its other files with the mode of this file: they hold customers' data.
        os.close(os.open(path, os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise ConfigError(
            f"cannot open the batch store {path}: {error.strerror}; create its folder, or correct"
            " 'batch_store'"
        ) from error
    engine = create_engine(
        url,
        hide_parameters=True,
        # The writer and the reader have a connection each.
        pool_size=2,
        max_overflow=0,
        connect_args={"timeout": BUSY_TIMEOUT_S, "check_same_thread": False},
    )

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, record: Any) -> None:
        # The driver would begin transactions late, and upgrade a read lock to a write lock.
        connection.isolation_level = None
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        reads = connection.get_execution_options().get("reads", False)
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")

    return engine


def _postgresql(url: URL) -> Engine:
    if url.drivername == "postgresql":
        url = url.set(drivername="postgresql+psycopg")
    waits = {
        "lock_timeout": BUSY_TIMEOUT_S,
        "statement_timeout": STATEMENT_TIMEOUT_S,
        # A gateway that is suspended in a transaction must not lock out the next leader.
        "idle_in_transaction_session_timeout": LOST_TIMEOUT_S,
    }
    options = [f"-c {name}={int(seconds * 1000)}" for name, seconds in waits.items()]
    return create_engine(
        url,
        hide_parameters=True,
        pool_size=2,
        max_overflow=0,
        pool_pre_ping=True,
        connect_args={
            "connect_timeout": int(CONNECT_TIMEOUT_S),
            # A server whose machine is gone answers nothing at all.
            "tcp_user_timeout": int(LOST_TIMEOUT_S * 1000),
            "keepalives_idle": int(LOST_TIMEOUT_S / 2),
            "keepalives_interval": int(LOST_TIMEOUT_S / 4),
            "keepalives_count": 2,
            "options": " ".join(options),
        },
    )


def _check_local(path: Path) -> None:
    """Raise ConfigError if the path is on a file system that other machines may share."""
    folder = path.resolve().parent
    # The last mount of a folder hides earlier ones.
    rows = (line.split() for line in _mounts().splitlines())
    kinds = {Path(fields[1]): fields[2] for fields in rows if len(fields) > 2}
    above = [mount for mount in kinds if folder.is_relative_to(mount)]
    kind = kinds[max(above, key=lambda mount: len(mount.parts))] if above else ""
    if kind.startswith(_SHARED_FILE_SYSTEMS):
        raise ConfigError(
            f"the batch store {path} is on a file system of type {kind}, on which SQLite loses"
            " data; use a local disk, or PostgreSQL"
        )


def _mounts() -> str:
    """The mounts of this process; empty if they are unknown."""
    try:
        return Path("/proc/self/mounts").read_text("utf-8", "replace")
    except OSError:
        return ""
