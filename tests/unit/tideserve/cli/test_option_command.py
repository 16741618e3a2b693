"""Flags generated from dataclass fields: complete, documented, and built lazily."""

import inspect
import re
import subprocess
import sys
import types
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.command import FLAGS, bench
from benchmarks.faults.matrix import FAULTS, PHASES
from benchmarks.scenarios import SUMMARIES
from benchmarks.scenarios.scenario import find_scenario
from benchmarks.systems.tideserve import MECHANISMS
from services.common.setting import Setting, is_str_enum, settings_of
from tideserve.cli.cluster_options import CONFIGS, SECTIONS, ClusterOptions
from tideserve.cli.commands.main import app
from tideserve.cli.option_command import Flags, Wording, option_command
from tideserve.cli.vllm_install import CPU_BUILD, GPU_BUILD

HEAVY = ("grpc", "httpx", "torch", "transformers", "psutil", "zmq", "fastapi")
OPTIONS = settings_of(ClusterOptions)


def help_of(command: str) -> str:
    result = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    return re.sub(r"[│\s]+", " ", result.output)


def run(flags: Flags, arguments: list[str]) -> tuple[dict[str, Any], bool]:
    """The options that a command with these flags reads."""
    calls: list[tuple[dict[str, Any], bool]] = []
    app_under_test = typer.Typer(add_completion=False)

    @app_under_test.command(cls=option_command(flags))
    def command(context: typer.Context, quick: bool = False) -> None:
        calls.append((context.obj, quick))

    result = CliRunner().invoke(app_under_test, arguments)
    assert result.exit_code == 0, result.output
    return calls[0]


def test_absent_options_are_none() -> None:
    flags = Flags(("memory", "workers", "dtype", "queue_deadline"))
    arguments = ["--quick", "--memory", "2GiB", "--workers", "3", "--queue-deadline", "1.5"]
    given = {"memory": "2GiB", "workers": 3, "dtype": None, "queue_deadline": 1.5}
    assert run(flags, arguments) == (given, True)


def test_wordings_replace_the_description_of_the_field() -> None:
    app_under_test = typer.Typer(add_completion=False)
    wordings = {"workers": Wording("How many.", "as many as you like")}

    @app_under_test.command(cls=option_command(Flags(("workers", "dtype"), wordings)))
    def command(context: typer.Context) -> None:
        """Nothing."""

    text = CliRunner().invoke(app_under_test, ["--help"], env={"COLUMNS": "200"}).output
    assert "How many. [1 to 64] [default: (as many as you like)]" in text
    assert OPTIONS["dtype"].help in text


def test_up_has_a_flag_with_help_range_and_default_for_every_option() -> None:
    text = help_of("up")
    for name in OPTIONS.keys() - {*SECTIONS, "chunk_size"}:
        assert f" --{name.replace('_', '-')} " in text
        assert OPTIONS[name].help in text
        if "range" in OPTIONS[name].metadata:
            assert f"[{OPTIONS[name].values_text}]" in text
    assert "--chunk-size" not in text, "for experts"
    for text_part in (
        "[default: (120)]",
        "[default: (1GiB)]",
        "╭─ Limits",
        "[env var: TIDESERVE_API_KEY]",
    ):
        assert text_part in text


@pytest.mark.parametrize("command", ["bench", "profile"])
def test_commands_share_the_help_of_an_option(command: str) -> None:
    text = help_of(command)
    assert OPTIONS["dtype"].help in text
    assert OPTIONS["memory"].help in text


def test_bench_help_describes_every_scenario() -> None:
    text = help_of("bench")
    for name, summary in SUMMARIES.items():
        assert find_scenario(name).name == name
        assert f" {name}: {summary} " in text


def test_a_scenario_has_a_help_of_its_own() -> None:
    text = help_of("bench faults")
    for name in (*PHASES, *FAULTS):
        assert f" {name}: " in text
    for option in ("--cells", "--append", "--minutes", "--quick"):
        assert f" {option} " in text
    for option in ("--systems", "--trace", "--cycles", "--slo"):
        assert f" {option} " not in text
    assert "Comma" not in text and "Scenarios:" not in text
    assert " --cycles " in help_of("bench churn") and " --cells " not in help_of("bench churn")
    assert " --systems " in help_of("bench steady") and " --trace " in help_of("bench burst")
    assert " --systems " not in help_of("bench drop")
    usual, own = (
        "[default: (SmolLM2-135M-Instruct)]",
        "[default: (a tiny model with random weights)]",
    )
    for name, default in (("steady", usual), ("clients", usual), ("drop", usual), ("churn", own)):
        assert default in help_of(f"bench {name}"), name
    assert usual in help_of("bench")


def test_the_command_has_all_options_after_the_help_of_a_scenario() -> None:
    help_of("bench faults")
    assert " --systems " in help_of("bench")


def test_every_parameter_is_read_by_some_scenario() -> None:
    (command,) = (
        candidate
        for candidate in app.registered_commands
        if candidate.name is None and candidate.callback is bench
    )
    named = set(inspect.signature(bench).parameters) - {"context", "scenario"}
    read = set().union(*(find_scenario(name).reads for name in SUMMARIES))
    assert command.cls is not None and read == named | set(FLAGS.names)


def test_help_of_engine_install_names_the_size() -> None:
    text = help_of("engine install")
    assert CPU_BUILD.size in text and GPU_BUILD.size in text


def test_bench_names_every_suffix_of_a_system() -> None:
    text = help_of("bench")
    for name in MECHANISMS:
        assert f" -{name}" in text


@pytest.mark.parametrize(("command", "loaded"), [("up", True), ("bench", True), ("status", False)])
def test_help_imports_little(command: str, loaded: bool) -> None:
    code = (
        "import sys\nfrom tideserve.cli.commands.main import app\n"
        f"try: app(['{command}', '--help'])\n"
        f"finally: print([m for m in {HEAVY} if m in sys.modules], 'services' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == f"[] {loaded}"


def test_shared_options_use_the_definition_of_the_service() -> None:
    """Same type and checks; only the port of a cluster must be known beforehand."""
    checks = ("range", "multiple_of", "options", "pattern", "size", "secret")
    passed = 0
    for name, option in OPTIONS.items():
        services, key = option.metadata.get("passed_to", ((), ""))
        passed += bool(services)
        for service_option in (settings_of(CONFIGS[service])[key] for service in services):
            differing = [
                key_of_metadata
                for key_of_metadata in checks
                if option.metadata.get(key_of_metadata)
                != service_option.metadata.get(key_of_metadata)
            ]
            assert differing == (["range"] if name == "port" else [])
            assert _kinds(option) == _kinds(service_option)
    assert passed > 15


def _kinds(setting: Setting) -> set[Any]:
    return {str if is_str_enum(kind) else kind for kind in setting.kinds} - {types.NoneType}
