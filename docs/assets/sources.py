"""What pages link to outside of this folder is in the site too: `../examples/own_kernel.py` as a page that shows it.

So links are relative paths of the repository, which work wherever it is read, and the site names no host. What a fence
says that a block needs, as in "```python gpu", is its title.
"""

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PROSE = ("CHANGELOG.md", "CONTRIBUTING.md")  # pages of the site that are not in this folder
LINK = re.compile(r"(\]\()([^)#\s:]+)(?=[#)])")
NEEDS = re.compile(r"^( *```python) (\w+)$", re.MULTILINE)
BLOCK = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the changelog and its like, and a page for each file that pages link to."""
    for name in PROSE:
        files.append(File.generated(config, _place(ROOT / name), abs_src_path=str(ROOT / name)))
    linked = {path for page in files.documentation_pages() for path in _linked(page)}
    for path in sorted(linked):
        if files.get_file_from_path(_place(path)) is None:
            shown = {"content": _shown(path), "inclusion": InclusionLevel.NOT_IN_NAV}
            files.append(File.generated(config, _place(path), **shown))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Makes links between files links between pages of the site, and what blocks need titles."""
    if page.file.abs_src_path is None:
        return markdown
    folder, place = Path(page.file.abs_src_path).parent, Path(page.file.src_uri).parent

    def moved(match: re.Match[str]) -> str:
        path = (folder / match[2]).resolve()
        return match[1] + os.path.relpath(_place(path), place) if path.is_file() else match[0]

    parts = BLOCK.split(markdown)  # text, block, text ...
    parts[::2] = [LINK.sub(moved, text) for text in parts[::2]]
    parts[1::2] = [NEEDS.sub(r'\1 title="needs \2"', block) for block in parts[1::2]]
    return "".join(parts)


def _linked(page: File) -> list[Path]:
    """The files outside of this folder that a page links to."""
    found = LINK.findall(BLOCK.sub("", page.content_string))
    paths = [(Path(page.abs_src_path).parent / link).resolve() for _, link in found]
    return [path for path in paths if path.is_file() and path.is_relative_to(ROOT) and not path.is_relative_to(DOCS)]


def _place(path: Path) -> str:
    """Where a file of the repository is in the site."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    return path.name.lower() if path.name in PROSE else f"source/{path.relative_to(ROOT).as_posix()}.md"


def _shown(path: Path) -> str:
    name, language = path.relative_to(ROOT).as_posix(), path.suffix.removeprefix(".") or "text"
    return f"---\nhide: [navigation, toc]\n---\n\n# {name}\n\n````{language}\n{path.read_text()}\n````\n"
