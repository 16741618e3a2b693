"""Arize Phoenix, a third-party trace store, in an environment of its own in the cache."""

import json
import os
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import venv
from pathlib import Path
from typing import Any, Self

from benchmarks.systems.client_environment import install
from tests.support.ports import free_port
from tideserve.cli.cache import cache_root, create_cache

PACKAGE = "arize-phoenix==20.26.0"
READY_TIMEOUT_S = 240.0
SPANS_MAX = 1000


def trace_store(fetch: bool) -> Path | None:
    """The store's command; None if it is not installed, which `fetch` does: about 1 GiB."""
    folder = cache_root() / "trace-store" / PACKAGE.partition("==")[2]
    program = folder / "bin" / "phoenix"
    if fetch and not program.is_file():
        create_cache(cache_root())
        venv.create(folder, with_pip=True, clear=True)
        install(folder / "bin" / "python", [PACKAGE], PACKAGE)
    return program if program.is_file() else None


class TraceStore:
    """Serves from `__enter__` to `__exit__` on free ports; its data is deleted on exit."""

    def __init__(self, program: Path) -> None:
        self._program = program
        self._folder = tempfile.TemporaryDirectory(prefix="tideserve-traces-")
        self._port, otlp_port = free_port(), free_port()
        self.endpoint = f"http://127.0.0.1:{otlp_port}"
        self._environment = os.environ | {
            "PHOENIX_WORKING_DIR": self._folder.name,
            "PHOENIX_HOST": "127.0.0.1",
            "PHOENIX_PORT": str(self._port),
            "PHOENIX_GRPC_PORT": str(otlp_port),
            "PHOENIX_TELEMETRY_ENABLED": "false",
        }

    def __enter__(self) -> Self:
        with (Path(self._folder.name) / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [str(self._program), "serve"],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while self._get("/v1/projects") is None:
            assert self._process.poll() is None, self.log()
            assert time.monotonic() < deadline_s, self.log()
            time.sleep(0.2)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def log(self) -> str:
        """The end of its output."""
        return (Path(self._folder.name) / "log").read_text(errors="replace")[-2000:]

    def spans(self) -> list[dict[str, Any]]:
        """All spans as returned by the store."""
        answer = self._get(f"/v1/projects/default/spans?limit={SPANS_MAX}")
        spans: list[dict[str, Any]] = answer["data"] if answer is not None else []
        assert len(spans) < SPANS_MAX, "there are more"
        return spans

    def trace(self, trace_id: str) -> list[dict[str, Any]]:
        """The spans of a trace."""
        return [span for span in self.spans() if span["context"]["trace_id"] == trace_id]

    def _get(self, path: str) -> Any:
        """The JSON at a path; None while the store does not answer with JSON."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=30) as got:
                return json.load(got)
        except (OSError, urllib.error.HTTPError):
            return None
