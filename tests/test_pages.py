"""What the pages of `docs` say: their tables are what was measured, their pictures and messages what the code has."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ejkernel_ops import errors

from .reference import visible

pytestmark = pytest.mark.once

ROOT = Path(__file__).parent.parent
_FILE = re.compile(r'^```py title="(\w+\.py)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import docs_tables

    return docs_tables


def test_tables_are_what_was_measured(tables):
    assert tables.main(["--check"]) == 0


def test_a_number_that_was_changed_by_hand_is_found_and_written_anew(tables, monkeypatch, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("<!-- table: overhead -->\n| what | 7 |\n<!-- end -->\nmore")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "pages", lambda: [page])
    assert tables.main(["--check"]) == 1
    assert "-| what | 7 |" in capsys.readouterr().out
    assert tables.main([]) == 0
    written = page.read_text()
    assert re.search(r"^\| recording, us \| \d", written, re.MULTILINE)
    assert "| 7 |" not in written
    assert written.endswith("<!-- end -->\nmore")
    assert tables.main(["--check"]) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- table: speed -->\n<!-- end -->", "table 'speed' is not known; expected one of attention_cpu"),
        ("<!-- table: overhead -->\n", "is not followed by"),
    ],
)
def test_a_table_that_cannot_be_made_is_an_error(tables, text, message):
    with pytest.raises(SystemExit, match=message):
        tables.with_tables(text, ROOT)


# Troubleshooting

MESSAGES = ("Finding", "warn")  # called with one
REASONS = ("_wrong_triton", "_wrong_jax_triton", "_wrong_plugin", "_broken", "_too_old", "_machine", "private_module")


def _messages():
    """Findings of the doctor, and warnings, with what they say as a pattern: what is filled in may be anything."""
    for file in [*(ROOT / "ejkernel_ops").rglob("*.py"), *(ROOT / "ejlayers").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            found = []
            if isinstance(node, ast.Call) and node.args:
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                found = [node.args[0]] if name in MESSAGES else []
            elif isinstance(node, ast.FunctionDef) and node.name in REASONS:
                found = [n.value for n in ast.walk(node) if isinstance(n, ast.Return) and n.value is not None]
            for text in found:
                for part in [text.body, text.orelse] if isinstance(text, ast.IfExp) else [text]:
                    if (pattern := _pattern(part)) is not None:
                        yield pytest.param(pattern, id=f"{file.name}:{part.lineno}")


def _pattern(text):
    """What a text says, with anything but the end of a cell in its gaps; `None` where it is all gaps."""
    parts = text.values if isinstance(text, ast.JoinedStr) else [text]
    fixed = [part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else None for part in parts]
    if not any(part and part.strip(" ,.:;") for part in fixed):
        return None
    return "".join("[^|\\n]+?" if part is None else re.escape(part.replace("`", "")) for part in fixed)


@pytest.mark.parametrize("pattern", list(_messages()))
def test_each_finding_of_the_doctor_and_each_warning_is_on_the_page(pattern):
    assert re.search(pattern, (ROOT / "docs/troubleshooting.md").read_text().replace("`", ""))


@pytest.mark.parametrize("name", [n for n, c in vars(errors).items() if isinstance(c, type)])
def test_each_class_of_errors_is_on_the_page(name):
    assert f"`{name}`" in (ROOT / "docs/troubleshooting.md").read_text()


# A kernel of one's own


@pytest.mark.slow
def test_the_files_of_the_page_about_kernels_run_as_a_reader_would_run_them(tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed; it exists for Linux only")
    files = dict(
        re.findall(r'^```py title="(\w+\.py)"\n(.*?)^```$', (ROOT / "docs/own_kernel.md").read_text(), re.M | re.S)
    )
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    env = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "EJKERNEL_CACHE_DIR": str(tmp_path / "cache")}
    for command in (["-m", "pytest", "-q", "test_squared_relu.py"], ["tune_squared_relu.py"]):
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=300, env=os.environ | env
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "squared_relu_bwd@v1" in done.stdout


# Pictures of masks


@pytest.fixture
def masks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs/pictures"))
    import masks

    return masks


def test_pictures_of_masks_are_what_attention_sees_and_what_its_definition_says(masks):
    assert {path.stem for path in (ROOT / "docs/pictures").glob("*.svg")} >= masks.CASES.keys()
    for name, (sizes, options) in masks.CASES.items():
        seen = masks.seen(sizes, options)
        np.testing.assert_array_equal(seen, visible((1, 1, *sizes), **options)[0, 0], err_msg=name)
        assert (ROOT / f"docs/pictures/{name}.svg").read_text() == masks.svg(seen), (
            f"python docs/pictures/masks.py: {name}"
        )


def test_each_picture_of_a_mask_is_on_the_page(masks):
    page = (ROOT / "docs/attention_conventions.md").read_text()
    assert sorted(re.findall(r"\(pictures/(\w+)\.svg\)", page)) == sorted(masks.CASES)
