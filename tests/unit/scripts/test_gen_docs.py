"""Pages made from the code: complete, and compared with it."""

import dataclasses
from pathlib import Path

import gen_docs

from tideserve.cli.cluster_options import CONFIGS, SECTIONS, ClusterOptions

ROOT = Path(__file__).resolve().parents[3]


def test_the_committed_pages_are_what_the_code_gives() -> None:
    assert gen_docs.outdated(ROOT) == []


def test_a_page_that_is_missing_or_edited_is_named(tmp_path: Path) -> None:
    assert gen_docs.outdated(tmp_path) == list(gen_docs.PAGES)
    gen_docs.write(tmp_path)
    assert gen_docs.outdated(tmp_path) == []
    page = tmp_path / "docs" / "configuration.md"
    page.write_text(page.read_text().replace("1024", "1025", 1))
    assert gen_docs.outdated(tmp_path) == ["docs/configuration.md"]


def test_every_option_has_a_row_with_its_variable() -> None:
    text = gen_docs.configuration()
    for config in CONFIGS.values():
        for one in dataclasses.fields(config):
            assert f"| `{one.name}` | `TIDESERVE__{one.name.upper()}` | " in text
    for one in dataclasses.fields(ClusterOptions):
        flag = f"| `--{one.name.replace('_', '-')}` | `{one.name}` | "
        assert (flag in text) == (one.name not in SECTIONS)
    assert "| `queue_limit` | `TIDESERVE__QUEUE_LIMIT` | 1 to 1000000 | 1024 | " in text
    assert "| `queue_limit` (scheduler) |" in text
    assert "| `lease_ttl_s` (all) |" in text


def test_a_bar_in_a_cell_does_not_end_it() -> None:
    text = gen_docs.table(("a", "b"), [("x|y", "z")])
    assert text == "| a | b |\n| --- | --- |\n| x\\|y | z |\n"
