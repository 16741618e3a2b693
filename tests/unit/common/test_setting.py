"""Options of a service in `--help` and in the reference."""

from dataclasses import dataclass
from pathlib import Path

from services.common.setting import PAGE_BYTES, settings_of
from services.common.settings import help_text
from services.core.setting import choice, device_name, number, option, size


@dataclass(frozen=True)
class Example:
    name: str = option(help="A name.")
    port: int | None = number(None, "A port.", minimum=0, maximum=65535)
    room_bytes: int = size(2**20, "Room.", minimum=2**12, maximum=2**40, multiple_of=512)
    chunk_bytes: int = size(
        2**21, "Chunk.", minimum=PAGE_BYTES, maximum=2**30, multiple_of=PAGE_BYTES
    )
    verbose: bool = option(False, "Whether to talk.")
    mode: str = choice("fast", ("fast", "slow"), "How.")
    device: str = device_name("cpu", "Where.")
    folder: Path | None = option(None, "A folder.")
    tags: tuple[str, ...] = option((), "Tags.", default_text="no tags")
    limit: int = number(7, "A limit.", minimum=1, maximum=9, elsewhere="on GPUs 9", expert=True)
    devices: str = option("", "Devices.")
    key: str | None = option(None, "A key.", secret=True)


def test_settings_become_table_rows() -> None:
    assert [
        (key, setting.values_text, setting.default_text)
        for key, setting in settings_of(Example).items()
    ] == [
        ("name", "text", "required"),
        ("port", "0 to 65535", "none"),
        ("room_bytes", "4KiB to 1TiB, a multiple of 512", "1MiB"),
        ("chunk_bytes", "whole pages, up to 1GiB", "2MiB"),
        ("verbose", "true or false", "false"),
        ("mode", "fast, slow", "fast"),
        ("device", "cpu, cuda or cuda:N", "cpu"),
        ("folder", "path", "none"),
        ("tags", "a list, with commas", "no tags"),
        ("limit", "1 to 9", "7; on GPUs 9"),
        ("devices", "text", "empty"),
        ("key", "text", "none"),
    ]


def test_settings_become_help_texts() -> None:
    text = help_text(Example)
    assert "  port  (0 to 65535; default: none)\n      A port.\n" in text
    assert "  name  (text; required)\n" in text
    assert "A key. Or in a file: key_file." in text
    assert "limit" not in text, "for experts"
