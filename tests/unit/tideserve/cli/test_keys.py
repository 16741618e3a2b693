import json
import multiprocessing
import stat
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from services.core.quota.limits import QuotaLimits
from services.gateway.keys.key_file import hash_of, read_keys
from services.gateway.keys.key_ring import KeyRing, KeySource
from tideserve.cli.commands.main import app
from tideserve.cli.errors import CommandError
from tideserve.cli.keys import add_key


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["key", *map(str, arguments)])


def made(*arguments: object) -> str:
    result = run("new", *arguments)
    assert result.exit_code == 0, result.output
    return str(result.stdout).strip()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.jsonl"


def test_a_new_key_is_printed_once_and_accepted(path: Path) -> None:
    key = made("--owner", "alice", "--model", "m", "--requests-per-minute", 60, path)
    (entry,) = read_keys(path)
    assert key.startswith("tsk_") and key not in path.read_text()
    assert entry.sha256 == hash_of(key) and entry.created is not None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    principal = KeyRing(path=path).principal(f"Bearer {key}")
    assert (principal.owner, principal.models) == ("alice", {"m"})
    assert principal.limits == QuotaLimits(requests_per_minute=60) and not principal.admin


def test_a_second_key_has_the_limits_of_the_first(path: Path) -> None:
    made("--owner", "alice", "--concurrent", 3, path)
    path.write_text("# by hand\n" + path.read_text().rstrip("\n"))
    made("--owner", "alice", "--admin", path)
    made("--owner", "bob", path)
    entries = read_keys(path)
    assert [entry.concurrent for entry in entries] == [3, 3, None]
    assert [entry.admin for entry in entries] == [False, True, False]
    before = path.read_bytes()
    result = run("new", "--owner", "alice", "--concurrent", 4, path)
    assert "different limits" in str(result.exception) and path.read_bytes() == before


def test_the_list_shows_everything_but_hashes(path: Path) -> None:
    key = made("--owner", "alice", "--model", "m", "--tokens-per-minute", 1000, path)
    made("--owner", "ops", "--admin", path)
    (alice, ops) = json.loads(run("list", path, "--json").stdout)
    assert alice["id"] == hash_of(key)[:12] and alice["models"] == ["m"]
    assert alice["tokens_per_minute"] == 1000 and ops["admin"] is True
    for shown in (run("list", path).stdout, run("list", path, "--json").stdout):
        assert "alice" in shown and hash_of(key) not in shown


def test_a_row_of_the_list_fits_a_terminal(path: Path) -> None:
    made("--owner", "alice", "--requests-per-minute", 600, path)
    (entry,) = read_keys(path)
    assert entry.created is not None
    result = CliRunner().invoke(app, ["key", "list", str(path)], env={"COLUMNS": "80"})
    title, row = result.stdout.splitlines()
    assert title.split()[-1] == "CREATED"
    assert row.split()[0] == entry.key_id and row.split()[-1] == entry.created[:10]


def test_limits_of_an_owner_are_changed_in_the_file(path: Path) -> None:
    for _ in range(2):
        made("--owner", "alice", "--concurrent", 3, path)
    path.write_text(path.read_text().replace('"concurrent": 3', '"concurrent": 5'))
    assert [entry.concurrent for entry in read_keys(path)] == [5, 5]


def test_revoked_keys_are_removed_in_place(path: Path) -> None:
    first, second = made("--owner", "alice", path), made("--owner", "alice", path)
    other = made("--owner", "bob", path)
    source, inode = KeySource(path), path.stat().st_ino

    def left() -> set[str]:
        source.poll()
        return {entry.sha256 for entry in source.entries}

    run("revoke", path, hash_of(first)[:12])
    assert left() == {hash_of(second), hash_of(other)}
    run("revoke", path, "--owner", "alice")
    assert left() == {hash_of(other)}
    made("--owner", "carol", path)
    assert len(left()) == 2 and path.stat().st_ino == inode


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("revoke", "FILE"), "name the keys to revoke"),
        (("revoke", "FILE", "012345678901"), "there is no key"),
        (("revoke", "FILE", "--owner", "bob"), "'bob' has no key"),
        (("new", "--owner", "a b", "FILE"), "'owner' must be"),
        (("list", "FILE.none"), "No such file"),
        (("revoke", "FILE.none", "012345678901"), "No such file"),
    ],
)
def test_invalid_commands_are_refused_without_a_change(
    path: Path, arguments: tuple[str, ...], message: str
) -> None:
    made("--owner", "alice", path)
    before = path.read_bytes()
    result = run(*(argument.replace("FILE", str(path)) for argument in arguments))
    assert isinstance(result.exception, CommandError) and message in str(result.exception)
    assert path.read_bytes() == before


def test_a_file_writable_by_others_is_refused(path: Path) -> None:
    path.touch()
    path.chmod(0o666)
    assert "writable by other users" in str(run("new", "--owner", "alice", path).exception)


def test_concurrent_commands_lose_no_key(path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        tasks = [(path, f"owner-{n}", False, None, QuotaLimits()) for n in range(40)]
        keys = pool.starmap(add_key, tasks, chunksize=5)
    assert {entry.sha256 for entry in read_keys(path)} == set(map(hash_of, keys))
