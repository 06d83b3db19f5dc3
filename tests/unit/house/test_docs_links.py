"""Links in the documentation: the files and headings that they name exist."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)
PICTURE = re.compile(r"""src="([^"]+)\"""")
LINK = re.compile(r"\]\(([^()\s]+)\)")


def text_lines(page: Path) -> Iterator[str]:
    """The page's lines outside of fenced blocks."""
    fenced = False
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield line


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the page's headings."""
    seen: Counter[str] = Counter()
    found = set()
    for line in text_lines(page):
        if heading := re.match(r"#{1,6} (.*)", line):
            title = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading[1]).strip().lower()
            slug = re.sub(r"[^\w\- ]", "", title).replace(" ", "-")
            found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
            seen[slug] += 1
    return found


def broken(page: Path) -> list[str]:
    """The relative links of a page that lead nowhere."""
    text = "\n".join(text_lines(page))
    links = [link for link in LINK.findall(text) + PICTURE.findall(text) if not re.match(r"[a-z]+:", link)]
    wrong = []
    for link in links:
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page: Path):
    assert broken(page) == []


def test_a_broken_link_is_found(tmp_path: Path):
    (tmp_path / "other.md").write_text("# `[fault]` and more, twice\n\n```sh\n# no heading\n```\n\n## A\n\n## A\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Top\n\n[a](other.md#a), [b](other.md#a-1), [c](other.md#fault-and-more-twice), [d](#top), [e](https://none)\n"
        "[f](other.md#a-2), [g](other.md#no-heading), [h](gone.md), [two\nlines](#bottom), "
        '<img src="gone.png">\n'
    )
    assert broken(page) == ["other.md#a-2", "other.md#no-heading", "gone.md", "#bottom", "gone.png"]
