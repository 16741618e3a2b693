"""What a worker's configuration leaves open: its name, and a folder of its own."""

import contextlib
import re
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from services.common.errors import ConfigError
from services.worker.config import WorkerConfig

# It is a part of keys in etcd and of file names.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")


@contextlib.contextmanager
def settled(config: WorkerConfig) -> Iterator[WorkerConfig]:
    """The configuration with a name and a folder; a folder that is made here is removed again.

    Raises:
        ConfigError: if the name cannot be one.
    """
    name = config.worker_id or socket.gethostname()
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"'worker_id' is '{name}', but must be letters, digits, dots, dashes and underscores;"
            " set another one (the default is the name of the host)"
        )
    if config.run_dir is not None:
        yield replace(config, worker_id=name)
        return
    with tempfile.TemporaryDirectory(prefix="tideserve-") as folder:
        yield replace(config, worker_id=name, run_dir=Path(folder))
