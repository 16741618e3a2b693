"""A stand-in for any service: answers like a gateway or only runs, and exits as configured.

Started like real services: `python -m tests.support.fake_service --config FILE --with-parent PID`.
Its own configuration keys: fake_exit (exit at once with this code, after printing fake_sentence),
fake_deaf (ignore SIGTERM), fake_unready (never ready), fake_child (start a process of its own).
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from services.common.lifecycle import die_with_parent

STATUS = {
    "services": [
        {"name": name, "pid": os.getpid(), "rss_bytes": 50 << 20, "ready": True}
        for name in ("gateway", "worker-0")
    ],
    "workers": [],
    "groups": [],
}


class Handler(BaseHTTPRequestHandler):
    """The gateway's routes that the command uses."""

    config: dict[str, Any]

    def do_GET(self) -> None:
        """Readiness, models, status."""
        if self.path == "/ready":
            unready = self.config.get("fake_unready")
            self._answer(503 if unready else 200, {"missing": ["the tide"] if unready else []})
        elif self.path == "/v1/models":
            self._answer(200, {"data": [{"id": self.config["model_name"]}]})
        elif self.path == "/tideserve/v1/status":
            self._answer(200, STATUS)
        else:
            self._answer(404, {"error": {"message": "no such path"}})

    def do_POST(self) -> None:
        """A chat completion that repeats the last message, word by word."""
        key = self.config.get("api_key")
        if key and self.headers["Authorization"] != f"Bearer {key}":
            self._answer(401, {"error": {"message": "wrong key"}})
            return
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["model"] != self.config["model_name"]:
            self._answer(404, {"error": {"message": f"there is no model {body['model']}"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for word in body["messages"][-1]["content"].split():
            self._event({"choices": [{"delta": {"content": word + " "}}]})
            if word == "fail":
                self._event({"error": {"message": "the worker was lost"}})
                return
            if word == "break":
                return
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        """Suppress the access log."""

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main() -> None:
    """Run until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--with-parent", type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent()
    if os.getppid() != arguments.with_parent:
        sys.exit(2)
    config = yaml.safe_load(arguments.config.read_text())
    if "fake_exit" in config:
        print(config.get("fake_sentence", "no sentence"), file=sys.stderr)
        sys.exit(config["fake_exit"])
    if config.get("fake_child"):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    stop = threading.Event()
    if config.get("fake_deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
    if "expected_workers" in config:
        handler = type("Configured", (Handler,), {"config": config})
        for port in (config["port"], config["admin_port"]):
            server = ThreadingHTTPServer((config["host"], port), handler)
            threading.Thread(target=server.serve_forever, daemon=True).start()
    print(json.dumps({"time": "2026-01-01T00:00:00", "level": "info", "message": "alive"}))
    stop.wait()


if __name__ == "__main__":
    main()
