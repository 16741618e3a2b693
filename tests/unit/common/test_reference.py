"""What `--help` and the reference say about a service's options."""

from dataclasses import dataclass
from pathlib import Path

from services.common.config import PAGE_BYTES, choice, device_name, number, option, size
from services.common.reference import help_text, rows


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
    made: str = option(help="Made.", factory=lambda: "now", default_text="made when it is needed")
    devices: str = option("", "Devices.")
    key: str | None = option(None, "A key.", secret=True)


def test_rows() -> None:
    assert [(row.key, row.values, row.default) for row in rows(Example)] == [
        ("name", "text", "required"),
        ("port", "0 to 65535", "none"),
        ("room_bytes", "4KiB to 1TiB, a multiple of 512", "1MiB"),
        ("chunk_bytes", "whole pages, up to 1GiB", "2MiB"),
        ("verbose", "true or false", "false"),
        ("mode", "fast, slow", "fast"),
        ("device", "cpu, cuda or cuda:N", "cpu"),
        ("folder", "path", "none"),
        ("tags", "a list, with commas", "no tags"),
        ("made", "text", "made when it is needed"),
        ("devices", "text", "empty"),
        ("key", "text", "none"),
    ]
    assert Example("n").made == "now"


def test_help() -> None:
    text = help_text(Example)
    assert "  port  (0 to 65535; default: none)\n      A port.\n" in text
    assert "  name  (text; required)\n" in text
    assert "A key. Or as a file: key_file." in text
