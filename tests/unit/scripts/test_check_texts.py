"""What a program can tell about texts: sources are described once and cited by key."""

from collections.abc import Sequence
from pathlib import Path

import check_texts
import pytest

REFERENCES = """\
| key | source | used for |
|---|---|---|
| KunServe | *Parameters that
ebb*, [arXiv:1](https://arxiv.org/abs/1) | plans |
| RFC 9 | *Certificates and so on* | dates |
"""


def wrong(text: str, name: str = "services/a.py") -> Sequence[int]:
    """Lines of `text` in which something is wrong with a source."""
    return [number for number, _ in check_texts.sources(name, text, REFERENCES)]


def test_texts_of_all_kinds_are_read_but_no_generated_ones() -> None:
    names = dict(check_texts.texts())
    for name in ("README.md", "docs/references.md", "services/core/ids.py", "compose.yaml"):
        assert name in names
    assert not [name for name in names if name.endswith(("_pb2.py", "_pb2.pyi", "_pb2_grpc.py"))]


@pytest.mark.parametrize(
    "text",
    [
        "as in KunServe §4.3",
        "(KunServe\n§4.3)",
        "RFC 9 §4.1",
        "papers were read",
        "parameters that do not ebb",
        "the paper's edge",
    ],
)
def test_citations_by_key_are_well(text: str) -> None:
    assert wrong(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "as in §4.3",
        "as in Other §4.3",
        "RFC 8 says so",
        "as the paper says",
        "https://arxiv.org/abs/1",
        "arXiv:1",
        "see Parameters that ebb",
        "see parameters\nthat ebb",
    ],
)
def test_what_is_no_citation_by_key_is_named(text: str) -> None:
    assert wrong(text) == [1 + text.count("\n")]


def test_a_source_is_described_on_its_page_and_beside_data_whose_licence_asks_for_it() -> None:
    assert wrong(REFERENCES, check_texts.REFERENCES) == []
    assert wrong("*Parameters that ebb*", check_texts.ATTRIBUTION) == []
    assert wrong("*Parameters that ebb*", "README.md") == [1]


def test_findings_name_file_line_and_remedy(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / check_texts.REFERENCES).write_text(REFERENCES)
    (tmp_path / "docs" / "a.md").write_text("one\nas in Other §2\n")
    (found,) = check_texts.findings(tmp_path)
    assert found.startswith("docs/a.md:2: 'Other' before a section is no key of docs/references.md")
