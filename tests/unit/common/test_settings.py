"""Configuration from environment, file and secret files: precedence and errors."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.common.config import from_mapping, parse_yaml
from services.common.errors import ConfigError
from services.common.settings import describe, load_settings
from services.core.setting import choice, number, option, size


@dataclass(frozen=True)
class Example:
    name: str = option(help="A name.")
    queue_limit: int = number(7, "A limit.", minimum=1, maximum=99)
    ratio: float = number(0.5, "A ratio.", minimum=0, maximum=1)
    room_bytes: int = size(2**20, "Room.", minimum=1, maximum=2**40)
    verbose: bool = option(False, "Whether to talk.")
    mode: str = choice("fast", ("fast", "slow"), "How.")
    folder: Path | None = option(None, "A folder.")
    limit: int | None = number(None, "Another limit.", minimum=1, maximum=9)
    tags: tuple[str, ...] = option((), "Tags.")
    prefix: str = option("p", "A prefix.")
    table: dict[str, int] | None = option(None, "A table.")
    key: str | None = option(None, "A key.", secret=True)


def load(path: Path | None = None, **variables: str) -> Example:
    environment = {f"TIDESERVE__{key}": text for key, text in variables.items()}
    return load_settings(Example, path, environment).config


def write(folder: Path, text: str, name: str = "service.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_environment_variables_are_read_by_type() -> None:
    config = load(
        NAME="yes",
        QUEUE_LIMIT=" 8",
        RATIO="1",
        ROOM_BYTES="1.5 GiB",
        VERBOSE="True",
        MODE="slow",
        FOLDER="/a b",
        LIMIT="9",
        TAGS="x, y,",
        KEY="0123",
    )
    assert config == Example(
        *("yes", 8, 1.0, 3 * 2**29, True, "slow", Path("/a b"), 9, ("x", "y")), key="0123"
    )
    assert isinstance(config.ratio, float)


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("on", True), ("NO", False), ("0", False), ("false", False)]
)
def test_booleans_are_parsed(text: str, value: bool) -> None:
    assert load(NAME="n", VERBOSE=text).verbose is value


def test_an_empty_value_is_none_if_allowed_and_else_text() -> None:
    config = load(NAME="", LIMIT="", FOLDER="", PREFIX="")
    assert config == Example("", prefix="")


def test_precedence_is_environment_file_default(tmp_path: Path) -> None:
    path = write(tmp_path, "name: n\nqueue_limit: 5\nlimit: 3\nroom_bytes: 2KiB\n")
    settings = load_settings(Example, path, {"TIDESERVE__QUEUE_LIMIT": "6", "HOME": "/"})
    assert settings.config == Example("n", 6, limit=3, room_bytes=2048)
    assert settings.origins["queue_limit"] == "the environment (TIDESERVE__QUEUE_LIMIT)"
    assert settings.origins["limit"] == str(path)
    assert settings.origins["mode"] == "default"


def test_kubernetes_variables_are_ignored() -> None:
    others = {"TIDESERVE_PORT": "tcp://10.0.0.1:80", "TIDESERVE_SERVICE_HOST": "10.0.0.1"}
    assert load_settings(Example, None, {"TIDESERVE__NAME": "n", **others}).config == Example("n")


@pytest.mark.parametrize(
    ("variables", "messages"),
    [
        ({"QUEUE_LIMT": "1"}, ("TIDESERVE__QUEUE_LIMT", "did you mean TIDESERVE__QUEUE_LIMIT?")),
        ({"queue_limit": "1"}, ("TIDESERVE__queue_limit", "did you mean TIDESERVE__QUEUE_LIMIT?")),
        ({"ZZZZZZZZ": "1"}, ("TIDESERVE__ZZZZZZZZ", "--help lists those known")),
        ({"QUEUE_LIMIT": "x"}, ("'queue_limit'", "TIDESERVE__QUEUE_LIMIT", "a whole number")),
        ({"QUEUE_LIMIT": "1.5"}, ("'1.5' is not a whole number",)),
        ({"QUEUE_LIMIT": ""}, ("'' is not a whole number",)),
        ({"QUEUE_LIMIT": "100"}, ("(TIDESERVE__QUEUE_LIMIT) is 100", "1 to 99")),
        ({"RATIO": "nan"}, ("is nan, but must be 0 to 1",)),
        ({"RATIO": "half"}, ("'half' is not a number",)),
        ({"ROOM_BYTES": "1 Gigs"}, ("'room_bytes'", "is not a size", "1GiB")),
        ({"VERBOSE": "maybe"}, ("'maybe' is not true or false",)),
        ({"MODE": "medium"}, ("one of fast, slow",)),
        ({"TABLE": "a=1"}, ("'table'", "be given only in a YAML file")),
        ({"KEY": ""}, ("'key' in the environment (TIDESERVE__KEY) is empty",)),
        ({"KEY_FILE": ""}, ("TIDESERVE__KEY_FILE", "must be the path of a file")),
        ({"KEY_FILE": "/no/such"}, ("cannot read /no/such", "TIDESERVE__KEY_FILE", "No such file")),
        ({"KEY": "a", "KEY_FILE": "/b"}, ("both TIDESERVE__KEY and TIDESERVE__KEY_FILE",)),
        ({"NAME_FILE": "/b"}, ("unknown variable TIDESERVE__NAME_FILE",)),
    ],
)
def test_invalid_environment_variables_are_named(
    variables: Mapping[str, str], messages: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, **({"NAME": "n"} | dict(variables)))
    for word in messages:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("nmae: n", ("unknown configuration key 'nmae'", "did you mean 'name'?")),
        ("queue_limit: 1", ("'name' is missing", "set TIDESERVE__NAME, or add it to ")),
        ("{name: n, key: a, key_file: b}", ("gives both 'key' and 'key_file'; remove either",)),
        ("{name: n, key_file: 3}", ("'key_file'", "must be the path of a file")),
        ("{name: n, key_file: /no/such}", ("cannot read /no/such, given as 'key_file'",)),
        ("{name: n, name_file: x}", ("unknown configuration key 'name_file'",)),
    ],
)
def test_invalid_file_values_are_named(
    tmp_path: Path, text: str, messages: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, text))
    for word in (*messages, "service.yaml" if "no/such" not in text else ""):
        assert word in str(caught.value)


def test_missing_keys_without_a_file_are_named() -> None:
    with pytest.raises(ConfigError, match=r"'name' is missing; set TIDESERVE__NAME, or .*--config"):
        load()


@pytest.mark.parametrize(
    ("content", "secret"), [(b"abc\n", "abc"), (b"a b \r\n", "a b "), (b"a\n\n", "a\n")]
)
def test_a_secret_file_is_read_without_its_line_end(
    tmp_path: Path, content: bytes, secret: str
) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    assert load(NAME="n", KEY_FILE=str(path)).key == secret
    assert load(write(tmp_path, f"name: n\nkey_file: {path}")).key == secret


@pytest.mark.parametrize(
    ("content", "message"), [(b"\n", "empty"), (b"\xff\xfe", "UTF-8"), (b"x" * 70_000, "too large")]
)
def test_an_empty_secret_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        load(NAME="n", KEY_FILE=str(path))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("in_file", ["key: of-the-file", "key_file: /no/such"])
def test_a_secret_in_the_environment_takes_precedence(tmp_path: Path, in_file: str) -> None:
    config = write(tmp_path, f"name: n\n{in_file}\n")
    secret = write(tmp_path, "from-a-file\n", "secret")
    if "file:" not in in_file:
        assert load(config, KEY_FILE=str(secret)).key == "from-a-file"
    else:
        config.write_text(f"name: n\nkey_file: {secret}\n")
    assert load(config, KEY="direct").key == "direct"


def test_the_printed_configuration_has_origins_and_no_secrets(tmp_path: Path) -> None:
    path = write(tmp_path, 'name: "a: b\\n# c"\nroom_bytes: 3145728\ntags: [x, "y, z"]\n')
    secret = write(tmp_path, "hidden", "secret")
    settings = load_settings(Example, path, {"TIDESERVE__KEY_FILE": str(secret)})
    text = describe(settings)
    assert "hidden" not in text
    lines = dict(line.split(": ", 1) for line in text.splitlines())
    assert len(lines) == 12
    assert lines["key"] == f"'***'  # {secret} (TIDESERVE__KEY_FILE)"
    assert lines["room_bytes"] == f"3MiB  # {path}"
    assert lines["queue_limit"] == "7  # default"
    again = from_mapping(Example, parse_yaml(text, "the description") | {"key": "hidden"}, "it")
    assert again == settings.config


def test_a_secret_that_is_absent_is_shown_as_absent() -> None:
    settings = load_settings(Example, None, {"TIDESERVE__NAME": "n"})
    assert "key: null  # default\n" in describe(settings)
