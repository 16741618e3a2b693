"""Check what documentation, comments and messages say, as far as a program can read it.

Sources   A source is described in docs/references.md and nowhere else; other files cite its key.
          A section sign follows a key, and titles and links of papers stand on that page only.
Sentences No sentence begins with "who" unless it asks. No docstring or comment begins with "of",
          "that" or "those". Its subject is named.
Words     docs/glossary.md lists words that are not used, and what to say instead. Pages,
          docstrings, comments, messages and names of tests are read; backquotes are not.
Paths     Files and tests that a page names are there.
"""

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REFERENCES = "docs/references.md"
GLOSSARY = "docs/glossary.md"
UNUSED = "## Words that are not used"
"""The section of the glossary with the table of words that texts do without."""
FOLDERS = (
    *("bench", "deploy", "docker", "docs", "proto", "scripts", "services", "tests", "tideserve"),
)
SUFFIXES = frozenset({".css", ".html", ".js", ".md", ".proto", ".py", ".sh", ".toml", ".yaml"})
GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$|^deploy/schemas/")
OWN_TEST = "tests/unit/scripts/test_check_texts.py"
"""It says on purpose what is wrong."""
ATTRIBUTION = "tideserve/load/data/README.md"
"""Its licence asks for the source beside the data."""
TITLE_MIN = 12
"""Characters of what counts as a title: the keys are shorter."""
LINK = re.compile(r"arxiv(?:\.org|:\s*\d)|doi\.org|openreview\.net", re.IGNORECASE)
NAMELESS = re.compile(r"\b(?:the|this|that) papers?\b(?!')", re.IGNORECASE)
SECTION = re.compile(r"(?:(RFC \d+)|([\w.-]+))?,?\s*\u00a7")
RFC = re.compile(r"\bRFC \d+")
HEADLESS = re.compile(
    r"\b(Who(?:ever|m|se)?)\b[^.?!|]*(?:[.!|]|\Z)|\A(?:['\"]{3}|#)\s*(Of|That|Those|(?<=# )What)\b"
)
"""A sentence that begins with "who", unless it is a question; a passage that names no subject."""
FENCED = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
QUOTED = re.compile(r"`[^`\n]*`")
TOPS = "|".join(FOLDERS)
PATH = re.compile(rf"`((?:{TOPS})/[\w./*-]+)(?:`|::)")
TEST = re.compile(r"`(test_\w+)`")

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


@cache
def unused_words(glossary: str) -> tuple[tuple[re.Pattern[str], str], ...]:
    """What matches each word that texts do without, and what to say instead."""
    section = glossary.partition(UNUSED)[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line[:2] == "| "]
    return tuple(
        (re.compile(r"\b" + r"\s+".join(word.split()) + r"\b", re.IGNORECASE), instead.strip())
        for listed, instead in rows[1:]
        for word in listed.split(",")
    )


def prose(name: str, text: str) -> Iterator[tuple[int, str]]:
    """(number of its first line, words) of each passage of `text` that is for people."""
    if name.endswith(".py"):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            passage = token.type == tokenize.STRING and " " in token.string
            if passage or token.type == tokenize.COMMENT:
                yield token.start[0], QUOTED.sub("``", token.string)
            elif token.string.startswith("test_"):
                yield token.start[0], token.string[5:].replace("_", " ").capitalize()
    elif name.endswith(".md"):
        plain = FENCED.sub(lambda match: "\n" * match[0].count("\n"), text)
        yield 1, QUOTED.sub("``", plain)
    elif name.endswith(".proto"):
        for number, line in enumerate(text.splitlines(), 1):
            yield number, QUOTED.sub("``", line.partition("//")[2])


def words(name: str, text: str, glossary: str) -> Iterator[Finding]:
    """Words that `glossary` has other words for, and sentences without a subject."""
    for first, passage in () if name == GLOSSARY else prose(name, text):
        for match in HEADLESS.finditer(passage):
            number = first + passage.count("\n", 0, match.start())
            begins = match[1] or match[2]
            yield number, f"'{begins}' begins a sentence; name its subject ({GLOSSARY})"
        for pattern, instead in unused_words(glossary):
            for match in pattern.finditer(passage):
                number = first + _line(passage, match) - 1
                yield number, f"'{match[0]}' is not used; say: {instead} ({GLOSSARY})"


def paths(name: str, text: str, root: Path, tests: str) -> Iterator[Finding]:
    """Files that a page names and `root` lacks, and tests that are not among `tests`."""
    if not name.endswith(".md"):
        return
    for match in PATH.finditer(text):
        if not any(root.glob(match[1].rstrip("/"))):
            yield _line(text, match), f"there is no {match[1]}; name the file that has it now"
    for match in TEST.finditer(text):
        if f"def {match[1]}(" not in tests:
            yield _line(text, match), f"there is no test {match[1]}; name the one that has it now"


def findings(root: Path = ROOT) -> list[str]:
    """All that is wrong in the tree, a line for each."""
    references = (root / REFERENCES).read_text(encoding="utf-8")
    glossary = (root / GLOSSARY).read_text(encoding="utf-8")
    read = dict(texts(root))
    tests = "\n".join(text for name, text in read.items() if name.startswith("tests/"))
    return [
        f"{name}:{number}: {what}"
        for name, text in read.items()
        for number, what in (
            *sources(name, text, references),
            *words(name, text, glossary),
            *paths(name, text, root, tests),
        )
    ]


def main() -> int:
    """1 when something is wrong."""
    found = findings()
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
