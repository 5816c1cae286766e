"""The reference is the docstrings: every public name has one that is complete. Environment variables are all told."""

import ast
import importlib
import inspect
import re
from pathlib import Path
from typing import TypeVar

import flax.linen
import pytest

from ejkernel_ops.environment import VARIABLES

ROOT = Path(__file__).parent.parent
PACKAGES = ("ejkernel_ops", "ejlayers", "ejlayers.nnx", "ejlayers.linen", "ejlayers.equinox")
VALUES = {"LABEL_PREFIXES", "LABEL_RE", "Cfg", "Out"}  # public names that are no functions or classes
OPS = ("flash_attention", "linear", "rotary_embedding")
SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Example|Source):", re.MULTILINE)
SOURCES = sorted(path for package in ("ejkernel_ops", "ejlayers") for path in (ROOT / package).rglob("*.py"))
METHODS = (staticmethod, classmethod, property)


def exported(package):
    """What an `__init__.py` re-exports, by name."""
    module = importlib.import_module(package)
    tree = ast.parse(Path(module.__file__).read_text())
    names = [a.asname or a.name for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names]
    found = {name: getattr(module, name) for name in names if not name.startswith("_")}
    return {name: obj for name, obj in found.items() if getattr(obj, "__module__", "").startswith("ej")}


def public():
    """Functions and classes of the packages, by the first name under which they are found."""
    found = {}
    for package in PACKAGES:
        for name, obj in exported(package).items():
            if not isinstance(obj, TypeVar) and all(obj is not other for other in found.values()):
                found[f"{package}.{name}"] = obj
    return found


def methods():
    """The public methods and properties that public classes define themselves."""
    found = {}
    for path, cls in public().items():
        for name, value in vars(cls).items() if isinstance(cls, type) else ():
            is_method = inspect.isfunction(value) or isinstance(value, METHODS) or hasattr(value, "attrname")
            is_field = name in getattr(cls, "__dataclass_fields__", {})  # whose default may be a function
            if is_method and not is_field and not name.startswith("_"):
                found[f"{path}.{name}"] = value
    return found


PUBLIC, ALL_METHODS = public(), methods()
FULL = {k: v for k, v in PUBLIC.items() if not (isinstance(v, type) and issubclass(v, Exception))}
FUNCTIONS = {k: v for k, v in FULL.items() if not isinstance(v, type)}
CALLED = {k: getattr(v, "__func__", v) for k, v in ALL_METHODS.items() if callable(getattr(v, "__func__", v))}


def each(found):
    return pytest.mark.parametrize("obj", [pytest.param(obj, id=name) for name, obj in found.items()])


def sections(obj):
    """A docstring by section; what comes before the first one is under `""`."""
    parts = SECTION.split(inspect.cleandoc(obj.__doc__ or ""))
    assert len(set(parts[1::2])) == len(parts[1::2]), f"a section occurs twice: {parts[1::2]}"
    return {"": parts[0]} | dict(zip(parts[1::2], parts[2::2]))


def parameters(obj):
    """The parameters of a function, or of a class's constructor, with their stars; of a Linen layer its own fields."""
    if getattr(obj, "_is_protocol", False):
        return []
    if isinstance(obj, type) and issubclass(obj, flax.linen.Module):
        return [name for name in vars(obj).get("__annotations__", {}) if name not in ("parent", "name")]
    if isinstance(obj, type):
        obj = obj.__new__ if issubclass(obj, tuple) else obj.__init__
    found = list(inspect.signature(obj).parameters.values())
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return [stars.get(p.kind, "") + p.name for p in found if p.name not in ("self", "cls", "_cls")]


def described(obj):
    """The parameters that `Args:` has."""
    return re.findall(r"^    (\*{0,2}\w+): \S", sections(obj).get("Args", ""), re.MULTILINE)


def test_all_is_collected():
    assert {f"ejkernel_ops.{name}" for name in (*OPS, "Kernel", "Key", "AutotuningResult", "LabelError")} <= set(PUBLIC)
    assert {"ejlayers.tune", "ejlayers.nnx.MultiHeadAttention", "ejlayers.linen.Dense"} <= set(PUBLIC)
    kinds = ("Kernel.backends", "Kernel.run", "AutotuningResult.loads", "Executor.chooser")
    assert {f"ejkernel_ops.{name}" for name in kinds} <= set(ALL_METHODS)
    assert "ejlayers.nnx.Linear.why_not" in CALLED
    names = set(re.findall(r" as (\w+)", (ROOT / "ejkernel_ops/__init__.py").read_text()))
    missing = names - {name.removeprefix("ejkernel_ops.") for name in PUBLIC}
    assert missing == VALUES


@each(PUBLIC | ALL_METHODS)
def test_first_line_is_one_sentence(obj):
    assert obj.__doc__, "no docstring"
    first, *rest = obj.__doc__.split("\n")
    assert first.endswith("."), f"no full stop: {first!r}"
    assert len(first) > 1
    assert not re.search(r"[.!?]\s", first), f"more than one sentence: {first!r}"
    assert not rest or not rest[0].strip(), f"no blank line after {first!r}"


@each(FULL)
def test_args_name_every_parameter(obj):
    assert described(obj) == parameters(obj)


@each(CALLED)
def test_args_of_a_method_are_all_of_them_or_none(obj):
    assert described(obj) in ([], parameters(obj))


@each(FUNCTIONS)
def test_returns_are_told(obj):
    annotation = inspect.signature(obj).return_annotation
    assert annotation is not inspect.Signature.empty
    assert ("Returns" in sections(obj)) == (annotation not in (None, "None"))


@each(FULL)
def test_example_can_be_run(obj):
    assert ">>> " in sections(obj).get("Example", "")


@each({f"ejkernel_ops.{name}": PUBLIC[f"ejkernel_ops.{name}"] for name in OPS})
def test_ops_name_their_source(obj):
    assert sections(obj).get("Source", "").strip()


# Environment variables


def test_environment_variables_are_those_of_the_table():
    part = re.search(r"^## Environment variables\n(.*?)(?=^## |\Z)", (ROOT / "docs/design.md").read_text(), re.M | re.S)
    assert part is not None
    rows = [line.split("|")[1].strip() for line in part[1].splitlines() if line.startswith("|")]
    assert rows[0] == "variable"
    assert rows[2:] == [f"`{name}`" for name in VARIABLES]


def test_environment_variables_that_are_read_are_declared():
    text = (ROOT / "ejkernel_ops/environment.py").read_text()
    names = {n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    assert {n for n in names if re.fullmatch(r"EJ[A-Z]+(_[A-Z]+)+", n)} == set(VARIABLES)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_one_file_reads_the_environment(path):
    readers = {"environ", "environb", "getenv", "getenvb", "expandvars"}
    used = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module in ("os", "os.path"):
            used.update(alias.name for alias in node.names)
    assert bool(used & readers) == (path == ROOT / "ejkernel_ops/environment.py")
