"""Configuration is strict, and every error names the key, the place and the remedy."""

import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from services.common.config import dump, from_mapping, like, parse_yaml, read_yaml
from services.common.errors import ConfigError
from services.common.setting import settings_of, values_of
from services.common.size import format_size, parse_size_bytes
from services.core.setting import choice, computed, device_name, nested, number, option, size
from services.scheduler.config import SchedulerConfig


@dataclass(frozen=True)
class Example:
    name: str
    port: int = number(0, minimum=0, maximum=65535)
    timeout_s: float = number(1.0, minimum=0.1, maximum=10)
    mode: str = choice("fast", ("fast", "slow"))
    folder: Path = Path("/nowhere")
    limit: int | None = number(None, minimum=1, maximum=9)
    verbose: bool = False
    tags: tuple[str, ...] = ()
    device: str = device_name("cpu")
    chunk: int | None = number(None, minimum=4, maximum=40, multiple_of=4)
    room_bytes: int = size(2**20, minimum=2**10, maximum=2**30)
    key: str | None = option(None, "A key.", secret=True)


def parse(**data: object) -> Example:
    return from_mapping(Example, {"name": "n", **data}, "the test")


def test_defaults_and_values_are_read() -> None:
    assert parse() == Example("n")
    assert parse(device="cuda:7", chunk=8) == Example("n", device="cuda:7", chunk=8)
    parsed = parse(
        port=65535, timeout_s=2, mode="slow", folder="/a/b", limit=9, verbose=True, tags=["x"]
    )
    assert parsed == Example("n", 65535, 2.0, "slow", Path("/a/b"), 9, True, ("x",))
    assert isinstance(parsed.timeout_s, float)


@pytest.mark.parametrize(
    ("data", "messages"),
    [
        ({"prot": 1}, ("unknown configuration key 'prot'", "the test", "did you mean 'port'?")),
        ({"zzzzzz": 1}, ("'zzzzzz'", "known keys: name, port")),
        ({"port": -1}, ("'port' in the test is -1", "0 to 65535")),
        ({"port": 65536}, ("65536", "0 to 65535")),
        ({"port": 10**400}, ("'port'", "0 to 65535")),
        ({"port": "80"}, ("'port'", "'80'", "of type int")),
        ({"port": 1.5}, ("1.5", "of type int")),
        ({"port": True}, ("True", "of type int")),
        ({"port": None}, ("None", "of type int")),
        ({"timeout_s": float("nan")}, ("nan", "0.1 to 10")),
        ({"timeout_s": 10**400}, ("inf", "0.1 to 10")),
        ({"timeout_s": False}, ("False", "of type float")),
        ({"mode": "medium"}, ("'medium'", "fast, slow")),
        ({"chunk": 6}, ("'chunk'", "multiple of 4")),
        ({"device": "gpu"}, ("'device' in the test is 'gpu'", "cpu, cuda or cuda:N")),
        ({"device": "cuda:"}, ("'cuda:'", "cpu, cuda or cuda:N")),
        ({"device": "cpu\n"}, ("'device'", "cpu, cuda or cuda:N")),
        ({"mode": ["fast"]}, ("'mode'", "of type str")),
        ({"limit": 0}, ("'limit'", "1 to 9")),
        ({"limit": "x"}, ("int or NoneType",)),
        ({"folder": 3}, ("'folder'", "of type Path")),
        ({"verbose": 1}, ("'verbose'", "of type bool")),
        ({"name": {"a": 1}}, ("'name'", "of type str")),
        ({"room_bytes": "much"}, ("'room_bytes' in the test", "'much' is not a size")),
        ({"room_bytes": 1}, ("'room_bytes' in the test is 1", "1KiB to 1GiB")),
        ({"room_bytes": "2TiB"}, ("1KiB to 1GiB",)),
        ({"key": ""}, ("'key' in the test is empty", "give the secret")),
    ],
)
def test_invalid_values_are_refused(data: dict[str, object], messages: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(**data)
    for word in messages:
        assert word in str(caught.value)


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match="'name' is missing in the test; add it"):
        from_mapping(Example, {}, "the test")


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("1GiB", 2**30),
        ("400 MiB", 400 * 2**20),
        ("1.5kib", 1536),
        ("1500000", 1_500_000),
        (" 2 GB ", 2 * 10**9),
        ("7b", 7),
    ],
)
def test_sizes_are_parsed(text: str, size_bytes: int) -> None:
    assert parse_size_bytes(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "x", "1 Gib b", "1.2.3", "--1", "nan", "1 PiB", "0.5", "2.5b"]
)
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_size_bytes(text)


@pytest.mark.parametrize("text", ["0", "-1GiB", "1e40", "99999999 TiB", "0.0001KiB", "1e-10GiB"])
def test_sizes_out_of_range_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="out of range"):
        parse_size_bytes(text)


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("name: n\nport: 7\n")
    assert from_mapping(Example, read_yaml(path), "it") == Example("n", 7)
    path.write_text("")
    assert read_yaml(path) == {}


@pytest.mark.parametrize(
    "content",
    [
        b"a: [",
        b"\xff\xfe\xfa",
        b"a: 2020-99-99",
        b"[" * 100_000,
        b"!!python/object/apply:os.system ['true']",
    ],
)
def test_invalid_yaml_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is not valid YAML"):
        read_yaml(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("key: hidden: x", "at line 1, column 12: mapping values are not allowed here"),
        ("a: 1\nkey: @hidden", "at line 2, column 6: found character '@' that cannot start"),
        ("key: 'a'hidden", "at line 1, column 9: expected <block end>, but found '<scalar>'"),
        ("key: *hidden", "at line 1, column 6: found undefined alias"),
        ("key: !hidden x", "at line 1, column 6: could not determine a constructor"),
        ("key: !hidden!x y", "at line 1, column 6: found undefined tag handle"),
        ("a: &hidden 1\nb: &hidden 2", "at line 2, column 4: second occurrence"),
        ("key: !!int hidden", "it contains an invalid value or character"),
        ("key: !!bool hidden", "it contains an invalid value or character"),
        ("key: !!timestamp hidden", "it contains an invalid value or character"),
    ],
)
def test_invalid_yaml_is_not_quoted_in_the_error(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match="it is not valid YAML") as caught:
        parse_yaml(text, "it")
    assert message in str(caught.value)
    shown = "".join(traceback.format_exception(caught.value))
    assert "hidden" not in shown


@pytest.mark.parametrize("content", ["- a", "text", "1: 2"])
def test_a_file_without_a_mapping_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match="must contain a mapping"):
        read_yaml(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        read_yaml(tmp_path / "none.yaml")


def test_a_size_is_bytes_or_text() -> None:
    assert parse(room_bytes="2MiB") == parse(room_bytes=2**21) == Example("n", room_bytes=2**21)


@pytest.mark.parametrize("size_bytes", [1, 1023, 1024, 1536, 2**20, 3 * 2**30, 2**50, 10**9])
def test_a_size_as_text_is_read_back(size_bytes: int) -> None:
    assert parse_size_bytes(format_size(size_bytes)) == size_bytes


def test_a_secret_is_neither_shown_nor_passed_on() -> None:
    config = parse(key="hidden", tags=["a"], folder="/x")
    assert "hidden" not in repr(config)
    text = dump(config)
    assert "hidden" not in text
    assert from_mapping(Example, parse_yaml(text, "it"), "it") == parse(tags=["a"], folder="/x")
    with pytest.raises(ConfigError, match="'key' in the test is not usable") as caught:
        parse(key=654321)
    assert "654321" not in str(caught.value)


@dataclass(frozen=True)
class Other:
    port: int = like(Example, "port")
    limit: int = like(Example, "limit", default=3, help="Another.", default_text="three", more=1)
    mode: str = like(Example, "mode", default="slow")
    key: str | None = like(Example, "key")


def test_a_field_can_copy_another_field() -> None:
    assert Other() == Other(0, 3, "slow", None)
    metadata = settings_of(Other)["limit"].metadata
    assert (metadata["help"], metadata["default_text"], metadata["more"]) == (
        "Another.",
        "three",
        1,
    )
    for data, message in (
        ({"port": -1}, "0 to 65535"),
        ({"limit": 10}, "1 to 9"),
        ({"mode": "x"}, "fast, slow"),
        ({"key": " "}, "is empty"),
    ):
        with pytest.raises(ConfigError, match=message):
            from_mapping(Other, data, "the test")
    assert "hidden" not in repr(Other(key="hidden"))


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Part:
    colour: Colour = choice(Colour.RED, Colour)
    least: int = number(1, minimum=0, maximum=9, key="low")
    most: int = number(5, minimum=0, maximum=9)
    measured: int = computed(0)

    def __post_init__(self) -> None:
        if self.least > self.most:
            raise ValueError(f"'low' is {self.least}, but must not exceed 'most' ({self.most})")


@dataclass(frozen=True)
class Inner:
    colour: Colour = choice(Colour.BLUE, Colour)


@dataclass(frozen=True)
class Outer:
    name: str = ""
    part: Part = nested(Part(most=7))
    inner: Inner = nested(Inner())

    @staticmethod
    def defaults_for(given: Mapping[str, Any]) -> dict[str, Any]:
        return {"most": 9} if given.get("name") == "large" else {}


def test_nested_dataclasses_are_flattened() -> None:
    outer = from_mapping(Outer, {"low": 2, "colour": "blue"}, "it")
    assert outer == Outer(part=Part(Colour.BLUE, 2, 7))
    assert outer.part.colour is Colour.BLUE
    assert values_of(outer) == {"name": "", "colour": "blue", "low": 2, "most": 7}
    assert from_mapping(Outer, parse_yaml(dump(outer), "it"), "it") == outer
    assert from_mapping(Outer, {"colour": "red"}, "it").inner == Inner(Colour.RED), "one key"


def test_a_default_may_derive_from_another_value() -> None:
    assert from_mapping(Outer, {"name": "large"}, "it").part.most == 9
    assert from_mapping(Outer, {"name": "large", "most": 3}, "it").part.most == 3


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"measured": 1}, "unknown configuration key 'measured' in it"),
        ({"least": 1}, "unknown configuration key 'least' in it"),
        ({"colour": "green"}, "'colour' in it is 'green', but must be one of red, blue"),
        ({"colour": 1}, "'colour' in it is 1, but must be of type str"),
        ({"low": 8}, "'low' is 8, but must not exceed 'most' (7)"),
    ],
)
def test_errors_of_nested_dataclasses_name_the_key(data: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        from_mapping(Outer, data, "it")


@pytest.mark.parametrize(("text", "value"), [("off", "off"), ("on", "on"), ('"on"', "on")])
def test_unquoted_on_and_off_are_accepted_as_options(text: str, value: str) -> None:
    config = from_mapping(
        SchedulerConfig, {"etcd_url": "e"} | parse_yaml(f"buckets: {text}", "it"), "it"
    )
    assert values_of(config)["buckets"] == value
    with pytest.raises(ConfigError, match="but must be of type str"):
        from_mapping(SchedulerConfig, {"etcd_url": "e", "batch_order": value == "on"}, "it")
