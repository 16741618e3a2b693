"""The page on gRPC says what the code does."""

import ast
import re
from pathlib import Path

import tideserve.client
from services.gateway.body_budget import BODY_BYTES_MAX
from services.gateway.grpc import lobby
from services.gateway.grpc.call import MESSAGE_TIMEOUT_S, STREAM_IDLE_S
from services.gateway.grpc.errors import table_rows
from services.gateway.grpc.server import CONNECTION_AGE_S, METADATA_BYTES_MAX, STREAMS_MAX
from services.gateway.running import REMEMBER_S, REMEMBERED_MAX
from tideserve.client import sync
from tideserve.client.sync import Client
from tideserve.gateway.v1 import gateway_pb2 as pb

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "grpc.md").read_text()


def test_the_table_of_errors_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| `(\w+)` \| `(\w+)` \|$", PAGE, re.MULTILINE)
    written = {name: (int(status), code, reason) for name, status, code, reason in rows}
    assert written == table_rows()


def test_the_example_uses_what_there_is() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    tree = ast.parse(code)
    imported = [
        name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    ]
    assert set(imported) <= set(tideserve.client.__all__)
    used = set(re.findall(r"client\.(\w+)\(", code))
    assert used and all(hasattr(Client, name) for name in used)


def test_numbers_are_those_of_the_code() -> None:
    assert f"({sync.TIMEOUT_S:g} s unless" in PAGE
    assert f"Messages of clients {BODY_BYTES_MAX >> 20} MiB, metadata" in PAGE
    assert f"metadata {METADATA_BYTES_MAX >> 10} KiB, {STREAMS_MAX:,} calls" in PAGE
    assert f"within {MESSAGE_TIMEOUT_S:g} s" in PAGE and f"none for {STREAM_IDLE_S:g} s" in PAGE
    assert f"at most {lobby.WAITING_MAX:,} calls whose message" in PAGE
    assert f"of which {lobby.READING_MAX} are read" in PAGE
    assert f"{lobby.STREAMS_MAX} open streams" in PAGE and f"{lobby.PARKED_MAX} such calls" in PAGE
    assert f"More than {lobby.ALL_MAX:,}" in PAGE
    assert f"{CONNECTION_AGE_S // 60} minutes and `request_timeout_s`" in PAGE
    assert f"for {REMEMBER_S / 60:g} minutes" in PAGE and f"last {REMEMBERED_MAX:,}" in PAGE


def test_the_methods_that_are_named_exist() -> None:
    for service, method in re.findall(r"tideserve\.gateway\.v1\.(\w+)/(\w+)", PAGE):
        found = pb.DESCRIPTOR.services_by_name[service].methods_by_name
        assert method in found
