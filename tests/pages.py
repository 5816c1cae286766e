"""README and the pages of `docs`: their blocks of code, commands, links and headings, each with its line."""

import dataclasses
import functools
import re
import unicodedata
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if page.exists()]
MARKS = ("gpu", "devices", "hosts", "network")  # what a block needs that a test has not
SHELL = ("", "sh", "bash", "console", "yaml")
_FENCE = re.compile(r"^( *)(`{3,})([\w-]*) *(.*)$")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} (.+)$")
_SPAN = re.compile(r"`([^`]+)`")


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of code: its language, what else its fence says, its text, and the line of the page where that begins."""

    page: Path
    line: int
    language: str
    info: str
    code: str

    @property
    def mark(self):
        """What the block needs, `""` for nothing."""
        return self.info.split()[0] if self.language == "python" and self.info and "=" not in self.info else ""

    def compiled(self):
        """Its code, with the page's name and lines in what goes wrong."""
        return compile("\n" * (self.line - 1) + self.code, str(self.page), "exec")


def name(page):
    """How a test calls a page: its path in the repository."""
    return page.relative_to(ROOT).as_posix()


@functools.cache
def parsed(page):
    """The blocks of a page, and its other lines as `(number, text)`."""
    blocks, prose, opened, begun = [], [], None, 0
    lines = page.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        fence = _FENCE.match(line)
        if opened is None and fence:
            opened, begun = fence, number
        elif opened is None:
            prose.append((number, line))
        elif fence and fence[2] == opened[2] and not fence[3]:
            code = "".join(f"{text.removeprefix(opened[1])}\n" for text in lines[begun : number - 1])
            blocks.append(Block(page, begun + 1, opened[3], opened[4], code))
            opened = None
    if opened is not None:
        raise ValueError(f"{name(page)}:{begun}: a block of code that does not end")
    return blocks, prose


def blocks(page, *languages):
    """The blocks of a page in these languages."""
    return [block for block in parsed(page)[0] if block.language in languages]


def spans(page):
    """Code in the text of a page, as `(number, text)`."""
    return [(number, span) for number, line in parsed(page)[1] for span in _SPAN.findall(line)]


def commands(page):
    """Code in the text of a page, and lines of its shell blocks, as `(number, text)`."""
    lines = [(n, line.strip()) for b in blocks(page, *SHELL) for n, line in enumerate(b.code.splitlines(), b.line)]
    return spans(page) + lines


def links(page):
    """The links of a page to files and headings, as `(number, path, anchor)`; those to other hosts are left out."""
    found = [(number, link) for number, line in parsed(page)[1] for link in _LINK.findall(_SPAN.sub("", line))]
    return [(number, *link.partition("#")[::2]) for number, link in found if not re.match(r"\w+:", link)]


@functools.cache
def anchors(page):
    """What a link may name on a page: headings that have one anchor here and on hosts of code, and names of the API."""
    headings = [match[1] for _, line in parsed(page)[1] if (match := _HEADING.match(line))]
    texts = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "") for heading in headings]
    both = {_in_site(text) for text in texts} & {_on_host(text) for text in texts}
    return both | {line.split()[1] for _, line in parsed(page)[1] if line.startswith("::: ")}


def _in_site(text):
    text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())


def _on_host(text):
    return re.sub(r"[^\w -]", "", text.strip().lower()).replace(" ", "-")
