"""Print the words a sentence of each page, and fail on a sentence of more than 25 words.

    python docs/sentences.py              # the table, and the sentences that are too long
    python docs/sentences.py --limit 20   # look for those of more than 20

Pages are README.md, CONTRIBUTING.md, CHANGELOG.md and docs/. Headings, tables, code blocks, HTML
and pictures do not count. Code in backquotes is one word, and a link counts with its text alone.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent
LIMIT = 25
FENCE = re.compile(r"(`{3,}|~{3,})")
# A heading, table, HTML, definition of a link, or picture. <https://...> is a link in prose.
NOT_PROSE = re.compile(r"#{1,6}\s|\||<(?!https?:)|\[[^\]]+\]:\s|!\[")
ITEM = re.compile(r"^\s*(?:[-*+]|\d+[.)])\s+")
QUOTE = re.compile(r"^\s*(?:>\s?)+")
# A full stop, perhaps inside quotes or emphasis, and a blank. After three dots, a capital too.
END_OF_SENTENCE = re.compile(
    r"""(?:(?<=[.?!])(?<!\.\.\.)|(?<=\.\.\.)(?=\W*[A-Z]))(["')\]*_”]*)\s+"""
)
# Full stops that end no sentence: of abbreviations, and of numbers in "...: 1. this; 2. that".
NO_END = re.compile(r"\b(e\.g|i\.e|al|approx|cf|vs|Fig|No|Sec|Eq|(?<=[;:]\s)\d+)\.(?=\s)")
NEWLINE_IN_CODE = "\N{SYMBOL FOR NEWLINE}"


class Sentence(NamedTuple):
    """A sentence of a page and the line that it begins on."""

    line: int
    text: str

    @property
    def words(self) -> int:
        """Words of the sentence: the parts between blanks that hold a letter or a digit."""
        return sum(bool(re.search(r"[^\W_]", word)) for word in self.text.split())


def pages() -> list[Path]:
    """Return every page of prose, README first."""
    top = [REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    return top + sorted((REPOSITORY / "docs").rglob("*.md"))


def paragraphs(text: str) -> list[tuple[int, str]]:
    """Split a page of Markdown into paragraphs and list items, each with its first line's number.

    Headings, tables, code, HTML and pictures are left out.
    """
    found: list[tuple[int, list[str]]] = []
    fence, going_on, skipping = "", False, ""
    for number, line in enumerate(text.splitlines(), 1):
        stripped = QUOTE.sub("", line).strip()
        opening = FENCE.match(stripped)
        if fence:
            fence = "" if stripped.startswith(fence) else fence
        elif skipping:  # a picture's description or a tag may go on for some lines
            skipping = "" if not stripped or skipping in stripped else skipping
        elif opening:
            fence, going_on = opening.group(), False
        elif not stripped or (not going_on and line.startswith("    ") and not ITEM.match(line)):
            going_on = False
        elif NOT_PROSE.match(stripped):
            going_on = False
            if stripped.startswith("!["):
                skipping = "" if "](" in stripped else "]("
            elif stripped.startswith("<"):
                skipping = "" if ">" in stripped else ">"
        elif going_on and not ITEM.match(line):
            found[-1][1].append(stripped)
        else:
            found.append((number, [ITEM.sub("", stripped, count=1)]))
            going_on = True
    return [(number, "\n".join(lines)) for number, lines in found]


def sentences(text: str) -> list[Sentence]:
    """Return the sentences of a page of Markdown; code in backquotes is one word."""
    found = []
    for line, paragraph in paragraphs(text):
        plain, begin = _plain(paragraph), 0
        ends = [(end.end(1), end.end()) for end in END_OF_SENTENCE.finditer(plain)]
        for end, next_begin in [*ends, (len(plain), len(plain))]:
            sentence = plain[begin:end]
            if re.search(r"\w", sentence):
                before = plain[:begin]
                lines = before.count("\n") + before.count(NEWLINE_IN_CODE)
                shown = " ".join(sentence.replace(NEWLINE_IN_CODE, "_").split())
                found.append(Sentence(line + lines, shown))
            begin = next_begin
    return found


def _plain(paragraph: str) -> str:
    """Return a paragraph with links as their texts and code as one word."""

    def one_word(code: re.Match[str]) -> str:
        inner = code.group(2).strip().replace("\n", NEWLINE_IN_CODE)
        # Punctuation inside code ends no sentence.
        return "`" + re.sub(r"\s", "_", inner) + "`"

    paragraph = re.sub(r"(`+)(.+?)\1(?!`)", one_word, paragraph, flags=re.DOTALL)
    paragraph = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
    return NO_END.sub(r"\1", paragraph)


def main() -> int:
    """Print the table and the sentences that are too long; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=int, default=LIMIT, help="words that a sentence may have")
    parser.add_argument("pages", nargs="*", type=Path, help="default: all")
    arguments = parser.parse_args()
    too_long = []
    print(f"{'page':<40} {'sentences':>9} {'words each':>10} {'longest':>7} {'too long':>8}")
    for page in arguments.pages or pages():
        of_page = sentences(page.read_text(encoding="utf-8"))
        words = [sentence.words for sentence in of_page] or [0]
        long = [sentence for sentence in of_page if sentence.words > arguments.limit]
        name = page.resolve().relative_to(REPOSITORY)
        mean = sum(words) / len(words)
        print(f"{name!s:<40} {len(of_page):>9} {mean:>10.1f} {max(words):>7} {len(long):>8}")
        too_long += [(name, sentence) for sentence in long]
    sys.stdout.flush()
    for name, sentence in too_long:
        print(f"{name}:{sentence.line}: {sentence.words} words: {sentence.text}", file=sys.stderr)
    return bool(too_long)


if __name__ == "__main__":
    sys.exit(main())
