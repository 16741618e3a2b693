"""Check the pages: named files and tests exist, and relative links and #anchors resolve."""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IGNORED = (".venv", "build", "dist")
FENCED = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
PATH = re.compile(r"`([\w-]+/[\w./*-]+)(?:`|::)")
TEST = re.compile(r"`(test_\w+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
EXTERNAL = re.compile(r"[a-z]+:")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


def findings(root: Path = ROOT) -> list[str]:
    """A line per broken name or link in the pages below `root`."""
    pages = sorted(
        page for page in root.rglob("*.md") if page.relative_to(root).parts[0] not in IGNORED
    )
    tests = "\n".join(path.read_text("utf-8") for path in (root / "tests").rglob("*.py"))
    return [
        f"{page.relative_to(root)}:{line}: {problem}"
        for page in pages
        for line, problem in problems(page, root, tests)
    ]


def problems(page: Path, root: Path, tests: str) -> Iterator[tuple[int, str]]:
    """(line, problem) per broken name or link; `tests` is the source of all tests."""
    text = page.read_text("utf-8")
    for match in PATH.finditer(text):
        path = match[1].rstrip("/")
        # Check only paths of this tree: others are values, such as model names or media types.
        if (root / path.split("/")[0]).is_dir() and not any(root.glob(path)):
            yield _line(text, match), f"no file {path}; name the file that replaces it"
    for match in TEST.finditer(text):
        if f"def {match[1]}(" not in tests:
            yield _line(text, match), f"no test {match[1]}; name the test that replaces it"
    plain = FENCED.sub(lambda match: "\n" * match[0].count("\n"), text)
    for match in LINK.finditer(plain):
        name, _, anchor = match[1].partition("#")
        target = page.parent / name if name else page
        if EXTERNAL.match(name):
            continue
        if not target.exists():
            yield _line(plain, match), f"no file {name}; correct the link"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            yield _line(plain, match), f"no heading #{anchor} in {target.name}; correct the link"


@cache
def anchors(page: Path) -> set[str]:
    """The anchors that GitHub generates for the headings of a page."""
    seen: Counter[str] = Counter()
    made = set()
    for heading in HEADING.findall(FENCED.sub("", page.read_text("utf-8"))):
        label = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", label.lower()).replace(" ", "-")
        made.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return made


def _line(text: str, match: re.Match[str]) -> int:
    return text.count("\n", 0, match.start(1)) + 1


def main() -> int:
    """Returns 1 if a name or a link is broken."""
    broken = findings()
    print("".join(f"{line}\n" for line in broken), end="")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
