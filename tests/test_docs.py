"""README and the pages of `docs`: their code runs, and what they name is there."""

import ast
import functools
import importlib
import io
import os
import re
import subprocess
import sys
import traceback
import types
from contextlib import redirect_stdout

import pytest
import typer

from ejkernel_ops import clear_invocations
from ejkernel_ops.__main__ import app
from ejkernel_ops.core.kernel import KERNELS

from . import test_reference
from .pages import MARKS, PAGES, ROOT, anchors, blocks, commands, links, name, parsed, spans

WITH_CODE = [page for page in PAGES if blocks(page, "python")]
REFERENCE = sorted((ROOT / "docs/reference").glob("*.md"))
OF_RUNS = {"follow_stock.csv", "metrics.csv", "benchmarks/measured/"}  # what runs write, and a folder to put it into
FOLDERS = "benchmarks|constraints|docs|ejkernel_ops|ejlayers|examples|tests"


def each(pages):
    """README's code runs at both ends of what is supported, the rest once."""
    once = [pytest.param(page, marks=[] if page.name == "README.md" else pytest.mark.once) for page in pages]
    return pytest.mark.parametrize("page", once, ids=[name(page) for page in pages])


def wrong(page, findings):
    """Fails with one line for each finding `(number, text)`."""
    found = [f"{name(page)}:{number}: {text}" for number, text in findings]
    assert not found, "\n" + "\n".join(found)


# Code


@pytest.fixture
def as_found(monkeypatch, tmp_path):
    """A folder of its own, no call recorded; environment and kernels are afterwards what they were before."""
    environment, kernels = dict(os.environ), dict(KERNELS)
    clear_invocations()
    monkeypatch.chdir(tmp_path)
    os.environ |= {"COLUMNS": "160", "EJKERNEL_CACHE_DIR": str(tmp_path / "cache")}
    yield
    for now, before in ((os.environ, environment), (KERNELS, kernels)):
        now.clear()
        now.update(before)


@each(WITH_CODE)
def test_code_of_a_page_runs_and_prints_what_it_shows(page, as_found, monkeypatch):
    module = types.ModuleType(f"page_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    printed = ""
    for block in parsed(page)[0]:
        if block.language == "python" and not block.mark:
            printed = run(block, vars(module))
        elif block.info == 'title="printed"':
            assert stripped(printed) == stripped(block.code), f"{name(page)}:{block.line} shows what is not printed"


def run(block, names):
    """What a block prints; what it raises names the line of the page."""
    with redirect_stdout(io.StringIO()) as out:
        try:
            exec(block.compiled(), names)
        except Exception as error:
            lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(block.page)]
            error.add_note(f"{name(block.page)}:{lines[-1] if lines else block.line}")
            raise
    return out.getvalue()


def stripped(text):
    return [line.rstrip() for line in text.strip("\n").splitlines()]


@each(WITH_CODE)
def test_names_of_ours_in_code_that_cannot_run_here_are_there(page):
    known = {package: package for package in ("ejkernel_ops", "ejlayers")}
    findings = []
    for block in blocks(page, "python"):
        assert block.mark in ("", *MARKS), f"{name(page)}:{block.line - 1}: {block.mark!r} is none of {MARKS}"
        nodes = list(ast.walk(ast.parse(block.code)))
        for node in nodes:
            if isinstance(node, ast.Import):
                known |= {a.asname: a.name for a in node.names if a.asname and a.name.startswith("ej")}
        if block.mark:
            block.compiled()
            findings += [(block.line - 1 + n.lineno, text) for n in nodes if (text := missing(n, known))]
    wrong(page, findings)


def missing(node, known):
    """What a node of code names that is not in our packages, or `""`."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in known.values():
        module = importlib.import_module(node.module)
        return absent(node.module, {alias.name for alias in node.names if not hasattr(module, alias.name)})
    if isinstance(node, ast.Attribute):
        first, *rest = ast.unparse(node).split(".")
        found = importlib.import_module(known[first]) if first in known else None
        for part in rest:
            if not isinstance(found, types.ModuleType):
                break
            if not hasattr(found, part):
                return absent(found.__name__, {part})
            found = getattr(found, part)
    return ""


# Commands


@each(PAGES)
def test_commands_and_their_flags_are_there(page):
    wrong(page, [(number, text) for number, line in commands(page) if (text := unknown(line))])


def unknown(line):
    """What a line of a shell names that is not there, or `""`."""
    flags = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", line))
    if found := re.search(r"python\S* -m ejkernel_ops ([a-z]+)(?: (\{[\w,]+\}|[a-z]+))?", line):
        words = [(found[1],), *((found[1], word) for word in re.findall(r"\w+", found[2] or ""))]
        ours = [command for command in words if command in our_commands()]
        if not ours or ("{" in found[0] and len(ours) < len(words) - 1):
            return f"not all of {found[0]!r} are commands"
        return absent(found[0], flags - set.union(*map(our_commands().__getitem__, ours)))
    if found := re.search(r"python\S* ((?:examples|benchmarks)/\S+\.py)", line):
        if not (ROOT / found[1]).exists():
            return f"no file {found[1]}"
        return absent(found[0], {flag for flag in flags if flag not in help_of(found[1]) and "--xla" not in flag})
    if found := re.match(r"make ([a-z][\w-]*)", line):
        return absent("Makefile", set(found.groups()) - matches("Makefile", r"^([a-z][\w-]*):"))
    if found := re.search(r"pip install.*?(?:\.|ejlayers)\[([\w,]+)\]", line):
        return absent("pyproject.toml", set(found[1].split(",")) - matches("pyproject.toml", r"^(\w+) = \["))
    return ""


def absent(where, names):
    return f"{where} has no {', '.join(sorted(names))}" if names else ""


def matches(file, pattern):
    return set(re.findall(pattern, (ROOT / file).read_text(), re.MULTILINE))


@functools.cache
def our_commands():
    """The options of each command of `python -m ejkernel_ops`, by its words."""

    def walk(group, words):
        for word, command in group.commands.items():
            if hasattr(command, "commands"):
                yield from walk(command, (*words, word))
            else:
                yield (*words, word), {option for p in command.params for option in p.opts} | {"--help"}

    return dict(walk(typer.main.get_command(app), ()))


@functools.cache
def help_of(script):
    done = subprocess.run(
        [sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "160"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


# Links, files, tests


@each(PAGES)
def test_links_lead_to_files_and_headings(page):
    wrong(page, [(number, text) for number, *link in links(page) if (text := broken(page, *link))])


def broken(page, path, anchor):
    """Why a link leads nowhere, or `""`."""
    target = (page.parent / path).resolve() if path else page
    if not target.is_file():
        return f"no file {path}"
    if not target.is_relative_to(ROOT):
        return f"{path} is not in the repository"
    if anchor and anchor not in anchors(target):
        return f"{name(target)} has no heading #{anchor}, or hosts of code give it another one"
    return ""


@each(PAGES)
def test_files_that_a_page_names_exist(page):
    findings = []
    for number, span in spans(page):
        named = re.fullmatch(rf"((?:{FOLDERS})/[\w./-]+)(?:::\w+)?", span)
        table = re.fullmatch(r"\w+\.csv", span)
        file = f"docs/benchmarks/{span}" if table else named and named[1]
        if file and span not in OF_RUNS and not (ROOT / file).exists():
            findings.append((number, f"no file {file}"))
    wrong(page, findings)


@each(PAGES)
def test_tests_that_a_page_names_exist(page):
    file, findings = "", []
    for number, span in spans(page):
        if found := re.fullmatch(r"(test_\w+\.py)?::(test_\w+)", span):
            file = found[1] or file
            if f"\ndef {found[2]}(" not in (ROOT / "tests" / file).read_text():
                findings.append((number, f"no test {file}::{found[2]}"))
    wrong(page, findings)


# Reference


def test_reference_has_each_public_name_once():
    text = "\n".join(page.read_text() for page in REFERENCE)
    shown = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    assert sorted(shown) == sorted(set(shown))
    assert set(shown) == set(test_reference.PUBLIC) | {f"ejkernel_ops.{name}" for name in test_reference.VALUES}
