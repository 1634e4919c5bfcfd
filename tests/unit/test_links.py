"""Links of the documentation, and the pages that code names: each leads somewhere."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
RECORDS = REPOSITORY / "docs" / "records"
RESULTS = REPOSITORY / "benchmarks" / "results"
PAGES = [
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((REPOSITORY / "docs").rglob("*.md")),
]
FENCE = re.compile(r"^\s*(```|~~~).*?^\s*\1", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
DEFINITION = re.compile(r"^\s*\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
REFERENCE = re.compile(r"""(?:href|src)=["']([^"']+)["']""")
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*\s*$", re.MULTILINE)
ANCHOR = re.compile(r"""<a\s+(?:id|name)=["']([^"']+)["']""")
NAMED_PAGE = re.compile(r"docs/[\w./-]+\.md")
ELSEWHERE = re.compile(r"^[a-z][a-z0-9+.-]*:", re.IGNORECASE)


class Link(NamedTuple):
    """A relative link of a page, in two parts."""

    path: str
    anchor: str


def links(page: Path) -> Iterator[Link]:
    """Yield the relative links and pictures of a page, code left out."""
    text = CODE.sub("", FENCE.sub("", page.read_text(encoding="utf-8")))
    for expression in (LINK, DEFINITION, REFERENCE):
        for target in expression.findall(text):
            if not ELSEWHERE.match(target):
                path, _, anchor = unquote(target).partition("#")
                yield Link(path, anchor)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page as GitHub makes them of its headings."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    found = set(ANCHOR.findall(text))
    seen: Counter[str] = Counter()
    for heading in HEADING.findall(text):
        shown = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def dangling(page: Path) -> Iterator[str]:
    """Yield the links of a page that lead nowhere."""
    for path, anchor in links(page):
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            yield f"{path}: no such file"
        elif anchor and (target.suffix != ".md" or anchor not in anchors(target)):
            yield f"{path}#{anchor}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_link_of_a_page_leads_somewhere(page):
    assert list(dangling(page)) == []


def test_dangling_links_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b`, c\n\n## Twice\n\n## Twice\n\n"
        "[here](#a-b-c) [second](#twice-1) [page](page.md#twice) [web](https://example.org/x#y)\n"
        "`[code](nowhere.md)` [lost](lost.md) [third](#twice-2)\n"
    )
    assert list(dangling(page)) == ["lost.md: no such file", "#twice-2: no such heading"]


@pytest.mark.parametrize("folder", ["geojax", "configs", "launch", "benchmarks", "examples"])
def test_every_page_that_code_names_exists(folder):
    named = {
        (str(path.relative_to(REPOSITORY)), page)
        for path in (REPOSITORY / folder).rglob("*")
        if path.suffix in (".py", ".yaml", ".yml", ".sh", "") and path.is_file()
        for page in NAMED_PAGE.findall(path.read_text(encoding="utf-8"))
    }
    assert {each for each in named if not (REPOSITORY / each[1]).exists()} == set()


def test_the_index_lists_every_record():
    listed = {path for path, _ in links(RECORDS / "README.md")}
    assert listed >= {page.name for page in RECORDS.glob("*.md")} - {"README.md"}


def test_the_index_lists_every_result():
    listed = {(RECORDS / path).resolve() for path, _ in links(RECORDS / "README.md")}
    assert listed >= set(RESULTS.glob("*.json"))
