"""Check what documentation, comments and messages say, as far as a program can read it.

Sources   A source is described in docs/references.md and nowhere else; other files cite its key.
          A section sign follows a key, and titles and links of papers stand on that page only.
"""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REFERENCES = "docs/references.md"
FOLDERS = (
    *("bench", "deploy", "docker", "docs", "proto", "scripts", "services", "tests", "tideserve"),
)
SUFFIXES = frozenset({".css", ".html", ".js", ".md", ".proto", ".py", ".sh", ".toml", ".yaml"})
GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$|^deploy/schemas/")
OWN_TEST = "tests/unit/scripts/test_check_texts.py"
"""It says on purpose what is wrong."""
ATTRIBUTION = "tideserve/bench/data/README.md"
"""Its licence asks for the source beside the data."""
TITLE_MIN = 12
"""Characters of what counts as a title: the keys are shorter."""
LINK = re.compile(r"arxiv(?:\.org|:\s*\d)|doi\.org|openreview\.net", re.IGNORECASE)
NAMELESS = re.compile(r"\b(?:the|this|that) papers?\b(?!')", re.IGNORECASE)
SECTION = re.compile(r"(?:(RFC \d+)|([\w.-]+))?,?\s*\u00a7")
RFC = re.compile(r"\bRFC \d+")

Finding = tuple[int, str]
"""The number of a line, and what is wrong in it."""


def texts(root: Path = ROOT) -> Iterator[tuple[str, str]]:
    """(path below `root`, content) of every text that people wrote."""
    tops = [path for path in root.glob("*") if path.is_file()]
    inner = (path for folder in FOLDERS for path in (root / folder).rglob("*"))
    for path in (*sorted(tops), *sorted(inner)):
        name = path.relative_to(root).as_posix()
        hidden = any(part.startswith((".", "__pycache__")) for part in Path(name).parts)
        passed_over = hidden or name == OWN_TEST or GENERATED.search(name)
        if path.suffix in SUFFIXES and not passed_over:
            yield name, path.read_text(encoding="utf-8")


def keys(references: str) -> set[str]:
    """The keys of a page of references: the first column of its tables."""
    first = (line.split("|")[1].strip() for line in references.splitlines() if line[:2] == "| ")
    return set(first) - {"key"}


def titles(references: str) -> list[str]:
    """The titles of the page, in small letters and with single spaces."""
    found = (" ".join(title.lower().split()) for title in re.findall(r"\*([^*]+)\*", references))
    return [title for title in found if len(title) >= TITLE_MIN]


def sources(name: str, text: str, references: str) -> Iterator[Finding]:
    """What of a text, in the file `name`, is not cited by a key of `references`."""
    if name in (REFERENCES, ATTRIBUTION):
        return
    known = keys(references)
    for pattern, what in (
        (LINK, f"links to a paper; cite its key, and describe it in {REFERENCES}"),
        (NAMELESS, f"does not say which paper; name its key of {REFERENCES}"),
    ):
        yield from ((_line(text, match), what) for match in pattern.finditer(text))
    for match in RFC.finditer(text):
        if match[0] not in known:
            yield _line(text, match), f"{match[0]} is not in {REFERENCES}; describe it there"
    for match in SECTION.finditer(text):
        key = match[1] or match[2] or ""
        if key not in known:
            what = f"'{key}' before a section is no key of {REFERENCES}; describe the source"
            yield _line(text, match), what
    yield from _titles_in(text, references)


def _titles_in(text: str, references: str) -> Iterator[Finding]:
    plain = " ".join(text.lower().split())
    for title in titles(references):
        if title in plain:
            broken = r"\s+".join(map(re.escape, title.split()))
            for match in re.finditer(broken, text, re.IGNORECASE):
                what = f"names the title of a source; cite its key of {REFERENCES}"
                yield _line(text, match), what


def _line(text: str, match: re.Match[str]) -> int:
    """The number of the line in which the last character of `match` is."""
    return text.count("\n", 0, match.end() - 1) + 1


def findings(root: Path = ROOT) -> list[str]:
    """All that is wrong in the tree, a line for each."""
    references = (root / REFERENCES).read_text(encoding="utf-8")
    checks: tuple[Callable[[str, str, str], Iterator[Finding]], ...] = (sources,)
    return [
        f"{name}:{number}: {what}"
        for name, text in texts(root)
        for check in checks
        for number, what in check(name, text, references)
    ]


def main() -> int:
    """1 when something is wrong."""
    found = findings()
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
