"""Broken names and links of pages are reported with file and line."""

from pathlib import Path

import check_texts


def test_broken_names_and_links_are_reported_and_sound_ones_are_not(tmp_path: Path) -> None:
    for folder in ("docs", "services", "tests", ".venv"):
        (tmp_path / folder).mkdir()
    (tmp_path / "services/a.py").write_text("")
    (tmp_path / "tests/test_a.py").write_text("def test_it() -> None: ...")
    (tmp_path / ".venv/a.md").write_text("[x](gone.md)")
    (tmp_path / "docs/b.md").write_text("## Of `a`, and [b](c.md): c\n## Twice\n## Twice\n")
    (tmp_path / "docs/a.md").write_text(
        "`services/a.py` `services/*.py` `services/` `services/a.py::f` `test_it` `text/plain`\n"
        "[a](b.md) [b](b.md#of-a-and-b-c) [c](#here) [d](../services/a.py) [e](b.md#twice-1)\n"
        "[f](https://example.org/gone.md)\n"
        "```sh\n# no heading\n[g](gone.md)\n```\n"
        "# Here\n"
        "`services/gone.py`\n`test_gone`\n[a](gone.md)\n[b](b.md#gone)\n[c](#no-heading)\n"
    )
    found = [line.partition(";")[0] for line in check_texts.findings(tmp_path)]
    assert sorted(found) == sorted(
        [
            "docs/a.md:9: no file services/gone.py",
            "docs/a.md:10: no test test_gone",
            "docs/a.md:11: no file gone.md",
            "docs/a.md:12: no heading #gone in b.md",
            "docs/a.md:13: no heading #no-heading in a.md",
            "docs/b.md:1: no file c.md",
        ]
    )
