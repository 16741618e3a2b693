"""Flags made from dataclass fields: complete, as well described as the fields, and late."""

import dataclasses
import inspect
import re
import subprocess
import sys
import types
import typing
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.command import FLAGS, bench
from benchmarks.faults.matrix import FAULTS, PHASES
from benchmarks.scenarios import SUMMARIES
from benchmarks.scenarios.scenario import find_scenario
from benchmarks.systems.tideserve import MECHANISMS
from services.common.config import field_of, kinds_of
from services.common.reference import values_text
from tideserve.cli.cluster_options import SECTIONS, ClusterOptions
from tideserve.cli.commands.main import app
from tideserve.cli.option_command import Flags, Wording, option_command
from tideserve.cli.vllm_install import CPU_BUILD, GPU_BUILD

HEAVY = ("grpc", "httpx", "torch", "transformers", "psutil", "zmq", "fastapi")
FIELDS = {one.name: one for one in dataclasses.fields(ClusterOptions)}


def help_of(command: str) -> str:
    result = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    return re.sub(r"[│\s]+", " ", result.output)


def run(flags: Flags, arguments: list[str]) -> tuple[dict[str, Any], bool]:
    """What a command with these flags finds."""
    found: list[tuple[dict[str, Any], bool]] = []
    one = typer.Typer(add_completion=False)

    @one.command(cls=option_command(flags))
    def command(context: typer.Context, quick: bool = False) -> None:
        found.append((context.obj, quick))

    result = CliRunner().invoke(one, arguments)
    assert result.exit_code == 0, result.output
    return found[0]


def test_a_command_finds_what_was_given_and_none_for_the_rest() -> None:
    flags = Flags(("memory", "workers", "dtype", "queue_deadline"))
    arguments = ["--quick", "--memory", "2GiB", "--workers", "3", "--queue-deadline", "1.5"]
    given = {"memory": "2GiB", "workers": 3, "dtype": None, "queue_deadline": 1.5}
    assert run(flags, arguments) == (given, True)


def test_wordings_replace_what_the_field_says() -> None:
    one = typer.Typer(add_completion=False)
    wordings = {"workers": Wording("How many.", "as many as you like")}

    @one.command(cls=option_command(Flags(("workers", "dtype"), wordings)))
    def command(context: typer.Context) -> None:
        """Nothing."""

    text = CliRunner().invoke(one, ["--help"], env={"COLUMNS": "200"}).output
    assert "How many. [1 to 64] [default: (as many as you like)]" in text
    assert field_of(ClusterOptions, "dtype").metadata["help"] in text


def test_up_has_a_flag_with_help_range_and_default_for_every_option() -> None:
    text = help_of("up")
    hints = typing.get_type_hints(ClusterOptions)
    for name in FIELDS.keys() - set(SECTIONS):
        assert f" --{name.replace('_', '-')} " in text
        assert FIELDS[name].metadata["help"] in text
        if "range" in FIELDS[name].metadata:
            assert f"[{values_text(hints[name], FIELDS[name].metadata)}]" in text
    for said in (
        "[default: (120)]",
        "[default: (1GiB)]",
        "╭─ Limits",
        "[env var: TIDESERVE_API_KEY]",
    ):
        assert said in text


@pytest.mark.parametrize("command", ["bench", "profile"])
def test_other_commands_say_the_same_about_the_same_option(command: str) -> None:
    text = help_of(command)
    assert FIELDS["dtype"].metadata["help"] in text
    assert FIELDS["memory"].metadata["help"] in text


def test_bench_names_every_scenario_and_what_it_measures() -> None:
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
    usual, own = "[default: (SmolLM2-135M-Instruct)]", "[default: (a tiny one with random weights)]"
    for name, default in (("steady", usual), ("clients", usual), ("drop", usual), ("churn", own)):
        assert default in help_of(f"bench {name}"), name
    assert usual in help_of("bench")


def test_the_command_has_all_options_after_the_help_of_a_scenario() -> None:
    help_of("bench faults")
    assert " --systems " in help_of("bench")


def test_every_parameter_is_read_by_some_scenario() -> None:
    (command,) = (
        one for one in app.registered_commands if one.name is None and one.callback is bench
    )
    named = set(inspect.signature(bench).parameters) - {"context", "scenario"}
    read = set().union(*(find_scenario(name).reads for name in SUMMARIES))
    assert command.cls is not None and read == named | set(FLAGS.names)


def test_to_install_an_engine_says_how_large_it_is() -> None:
    text = help_of("engine install")
    assert CPU_BUILD.size in text and GPU_BUILD.size in text


def test_bench_names_every_suffix_of_a_system() -> None:
    text = help_of("bench")
    for name in MECHANISMS:
        assert f" -{name}" in text


@pytest.mark.parametrize(("command", "loaded"), [("up", True), ("bench", True), ("status", False)])
def test_what_help_loads(command: str, loaded: bool) -> None:
    code = (
        "import sys\nfrom tideserve.cli.commands.main import app\n"
        f"try: app(['{command}', '--help'])\n"
        f"finally: print([m for m in {HEAVY} if m in sys.modules], 'services' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == f"[] {loaded}"


def test_an_option_that_a_service_has_is_the_services() -> None:
    """Same type, same checks; only the port of a cluster must be known beforehand."""
    checks = ("range", "multiple_of", "options", "pattern", "size", "secret")
    passed = 0
    for name, one in FIELDS.items():
        cls, key = one.metadata.get("passed_to", (None, ""))
        if cls is None:
            continue
        passed += 1
        theirs = field_of(cls, key)
        differing = [it for it in checks if one.metadata.get(it) != theirs.metadata.get(it)]
        assert differing == (["range"] if name == "port" else [])
        assert _kinds(ClusterOptions, name) == _kinds(cls, key)
    assert passed > 15


def _kinds(cls: type[Any], name: str) -> set[Any]:
    return set(kinds_of(typing.get_type_hints(cls)[name])) - {types.NoneType}
