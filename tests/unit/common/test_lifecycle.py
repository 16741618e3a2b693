"""Start and end of a service process: configuration, error line, exit code."""

import re
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest

from services.common.lifecycle import EXIT_UNUSABLE
from tests.support.python import run_python
from tideserve.cli.certificates import Authority, write_pair
from tideserve.cli.local_cluster import python_environment

PROGRAM = """
import asyncio
from dataclasses import dataclass
from services.core.setting import number, option
from services.common.errors import ConfigError
from services.common.lifecycle import main

@dataclass
class Config:
    limit: int = number(3, "A limit.", minimum=1, maximum=9)
    key: str | None = option(None, "A key.", secret=True)

async def fail(error):
    raise error

async def serve(config, stop):
    async with asyncio.TaskGroup() as tasks:
        for error in [{errors}]:
            tasks.create_task(fail(error))

main("tide", Config, serve)
"""


def run(errors: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = python_environment() | variables
    return run_python("-c", PROGRAM.format(errors=errors), *arguments, env=environment)


def test_a_configuration_error_is_the_last_line() -> None:
    done = run("ConfigError('no tide')")
    assert done.returncode == EXIT_UNUSABLE
    assert done.stderr == "tideserve-tide: no tide\n"


def test_a_configuration_error_is_shown_beside_other_errors() -> None:
    done = run("ConfigError('no tide'), ValueError('a fault')")
    assert done.returncode == 1
    assert "tideserve-tide: no tide\n" in done.stderr
    assert "ValueError: a fault" in done.stderr


def test_a_service_raises_its_limit_of_open_files() -> None:
    show = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE), flush=True)"
    program = PROGRAM.format(errors="").replace(
        "async def serve(config, stop):",
        f"""
async def serve(config, stop):
    {show}
""",
    )
    before = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))\n"
    done = run_python("-c", before + program, env=python_environment())
    assert done.stdout == "(300, 300)\n"


def test_a_service_without_an_error_exits_with_0() -> None:
    done = run("")
    assert (done.returncode, done.stderr) == (0, "")


def test_printing_the_configuration_starts_nothing(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("limit: 4\n")
    arguments = ("--config", str(config), "--print-config")
    done = run("ConfigError('it was started')", *arguments, TIDESERVE__KEY="hidden")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "# tideserve-tide; secrets are masked\n"
        f"limit: 4  # {config}\n"
        "key: '***'  # the environment (TIDESERVE__KEY)\n"
    )


def test_an_invalid_configuration_ends_the_service() -> None:
    done = run("", TIDESERVE__LIMIT="10")
    assert (done.returncode, done.stdout) == (EXIT_UNUSABLE, "")
    assert done.stderr == (
        "tideserve-tide: 'limit' in the environment (TIDESERVE__LIMIT) is 10, but must be 1 to 9\n"
    )


def test_help_lists_every_key() -> None:
    done = run("", "--help")
    assert done.returncode == 0
    assert "limit  (1 to 9; default: 3)" in done.stdout
    assert "key  (text; default: none)" in done.stdout


SPEAKING = """
import logging
from services.common.lifecycle import main
from services.common.service_config import ServiceConfig

async def serve(config, stop):
    logging.getLogger("tide").info("low")
    logging.getLogger("tide").warning("high")

main("tide", ServiceConfig, serve)
"""


@pytest.mark.parametrize(
    ("level", "form", "lines"),
    [
        ("info", "text", [r"\S+Z info +tide: low", r"\S+Z warning +tide: high"]),
        ("warning", "json", [r'\{"time": .*"level": "warning".*"message": "high"\}']),
    ],
)
def test_level_and_format_of_log_lines_are_options(level: str, form: str, lines: list[str]) -> None:
    variables = {"ETCD_URL": "http://none:1", "LOG_LEVEL": level, "LOG_FORMAT": form}
    given = {f"TIDESERVE__{k}": v for k, v in variables.items()}
    done = run_python("-c", SPEAKING, env=python_environment() | given)
    stderr_lines = done.stderr.splitlines()
    assert len(stderr_lines) == len(lines)
    assert all(
        re.fullmatch(line, actual) for line, actual in zip(lines, stderr_lines, strict=True)
    ), stderr_lines


HANDSHAKE = """
import asyncio
import sys
from pathlib import Path
from services.common import lifecycle
import grpc.aio
from services.common.tls import CertificateFiles, CertificateSource
from services.common.transport import Transport

async def main(folder):
    files = CertificateFiles("tls", folder / "w.pem", folder / "w.pem", folder / "w-key.pem")
    server = grpc.aio.server()
    port = Transport(CertificateSource(files)).add_port(server, "127.0.0.1:0")
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"no handshake" * 9)
    try:
        await reader.read()
    except ConnectionError:
        pass
    writer.close()
    await server.stop(0)

asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.mark.parametrize("verbosity", ["", "INFO"])
def test_grpc_logging_is_off_by_default(tmp_path: Path, verbosity: str) -> None:
    issued = Authority.create("x").issue("w", ("w",), timedelta(days=1))
    write_pair(tmp_path, "w", issued)
    given = {"GRPC_VERBOSITY": verbosity} if verbosity else {}
    done = run_python("-c", HANDSHAKE, str(tmp_path), env=python_environment() | given)
    assert done.returncode == 0, done.stderr
    assert ("Handshake failed" in done.stderr) == bool(verbosity), done.stderr
