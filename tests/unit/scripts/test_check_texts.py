"""What a program can tell about texts: sources, words that are not used, files that are named."""

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
GLOSSARY = """\
# Glossary

| word | meaning |
|---|---|
| tide | what ebbs |

## Words that are not used

| not | but |
|---|---|
| ebbing, by who | tide |

## How
| boat | ship |
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


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("a.py", '"""One.\n\nTwo Ebbing.\n"""\n', [3]),
        ("a.py", "one = 1\n# ebbing it is\n", [2]),
        ("a.py", 'raise Error("it is ebbing now")\n', [1]),
        ("a.py", '"""Said by\nwho says it."""\n', [2]),
        ("a.py", 'ebbing = "ebbing"  # `ebbing`, webbing, by whom\n', []),
        ("a.md", "One.\n\nIt is ebbing.\n", [3]),
        ("a.md", "`ebbing`\n\n```\nebbing\n```\nebbing\n", [6]),
        ("a.md", "a tide, a boat\n", []),
        ("a.proto", "message Ebbing {}\n// ebbing\n", [2]),
        ("a.yaml", "ebbing: true  # ebbing\n", []),
        ("tests/a.py", "# ebbing\ndef test_it_is_ebbing() -> None: ...\n", [1, 2]),
        ("docs/glossary.md", "ebbing\n", []),
    ],
)
def test_words_that_are_not_used(name: str, text: str, lines: list[int]) -> None:
    assert [number for number, _ in check_texts.words(name, text, GLOSSARY)] == lines


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("# It waits.\n# Who sends more keeps the rest.\n", [2]),
        ("'''A lane.\n\nWhoever connects shows a secret. It is new.\n'''\n", [3]),
        ("'''Whose turn it is'''\n", [1]),
        ("'''Who may send? The leader may.'''\n", []),
        ("# the one who sends, or whoever it is\nwho = Who\n", []),
        ("# `Who` is a name, and so is Whole.\n", []),
        ("def test_who_waits_is_told() -> None:\n    '''Of a list.'''\n", [1, 2]),
        ("one = 1  # of these\n# Those of one.\ntwo = 'Of two'  # What is two.\n", [2, 3]),
        ("'''One.\n\nOf these, one.\n'''\n", []),
    ],
)
def test_a_sentence_that_begins_with_who_asks(text: str, lines: list[int]) -> None:
    assert [number for number, _ in check_texts.words("services/a.py", text, GLOSSARY)] == lines


def test_a_page_names_files_and_tests_that_are_there(tmp_path: Path) -> None:
    (tmp_path / "services" / "core").mkdir(parents=True)
    (tmp_path / "services" / "core" / "a.py").write_text("")
    page = (
        "`services/core/a.py` `services/core/*.py` `services/core/` `services/core/a.py::f`\n"
        "`services/core/b.py` `test_it` `other/b.py`\n`test_gone` `services/*/c.py`\n"
    )
    found = list(check_texts.paths("docs/a.md", page, tmp_path, "def test_it() -> None:"))
    assert [number for number, _ in found] == [2, 3, 3]
    assert not list(check_texts.paths("a.py", page, tmp_path, ""))


def test_findings_name_file_line_and_remedy(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / check_texts.REFERENCES).write_text(REFERENCES)
    (tmp_path / check_texts.GLOSSARY).write_text(GLOSSARY)
    (tmp_path / "docs" / "a.md").write_text("one\nas in Other §2\n")
    (found,) = check_texts.findings(tmp_path)
    assert found.startswith("docs/a.md:2: 'Other' before a section is no key of docs/references.md")
