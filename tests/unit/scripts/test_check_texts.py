"""Broken names and links of pages are reported with file and line."""

import re
from pathlib import Path

import check_texts

LINK = re.compile(r"arxiv(?:\.org|:\s*\d)|doi\.org|openreview\.net", re.IGNORECASE)
CITED = re.compile(r"(?:(RFC \d+)|([\w.-]+))?,?\s*\u00a7")


def test_only_broken_names_and_links_are_reported(tmp_path: Path) -> None:
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
    findings = [line.partition(";")[0] for line in check_texts.findings(tmp_path)]
    assert sorted(findings) == sorted(
        [
            "docs/a.md:9: no file services/gone.py",
            "docs/a.md:10: no test test_gone",
            "docs/a.md:11: no file gone.md",
            "docs/a.md:12: no heading #gone in b.md",
            "docs/a.md:13: no heading #no-heading in a.md",
            "docs/b.md:1: no file c.md",
        ]
    )


def test_every_source_is_described_on_the_page_of_references() -> None:
    page = check_texts.ROOT / "docs" / "references.md"
    keys = set(re.findall(r"^\| ([^|]+?) \|", page.read_text("utf-8"), re.MULTILINE))
    assert {"KunServe", "BROS"} <= keys
    for folder in ("benchmarks", "docs", "proto", "scripts", "services", "tests", "tideserve"):
        for path in (check_texts.ROOT / folder).rglob("*"):
            if path.suffix not in (".md", ".proto", ".py", ".yaml") or path in (
                page,
                Path(__file__),
            ):
                continue
            text = path.read_text("utf-8")
            assert not LINK.search(text), f"{path} links to a paper; cite its key of {page.name}"
            for rfc, key in CITED.findall(text):
                assert (rfc or key) in keys, f"{path} cites {rfc or key}"
