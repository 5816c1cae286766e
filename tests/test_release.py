"""Wheel and sdist hold what they should, and the wheel runs with one framework, with the other, and with none."""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest

from .pages import ROOT
from .release_check import run

build = pytest.importorskip("hatchling.build")
pytestmark = pytest.mark.once
NOT_SHIPPED = {".ci/run"}
FRAMEWORKS = {"flax": ("equinox",), "equinox": ("flax", "optax"), "": ("flax", "optax", "equinox")}  # extra -> missing
MISSING = """
import sys

class Missing:
    def find_spec(name, *_):
        if name.partition(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing)
import ejlayers
assert ejlayers.__file__.startswith({path!r}), ejlayers.__file__
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with wheel and sdist."""
    folder = tmp_path_factory.mktemp("dist")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return folder / build.build_wheel(str(folder)), folder / build.build_sdist(str(folder))


def tracked():
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    return set(done.stdout.split()) or pytest.skip("not a clone of the repository")


def test_sdist_has_every_file_of_the_repository_and_no_other(built):
    with tarfile.open(built[1]) as sdist:
        files = {path.partition("/")[2] for path in sdist.getnames()}
    assert files - {"PKG-INFO"} == tracked() - NOT_SHIPPED


def test_wheel_has_the_packages_and_no_other_file(built):
    with zipfile.ZipFile(built[0]) as wheel:
        files = {path for path in wheel.namelist() if ".dist-info/" not in path}
        (license,) = [path for path in wheel.namelist() if path.endswith("licenses/LICENSE")]
        assert wheel.read(license) == (ROOT / "LICENSE").read_bytes()
    assert files == {path for path in tracked() if path.startswith(("ejkernel_ops/", "ejlayers/"))}
    assert {"ejkernel_ops/py.typed", "ejlayers/py.typed"} <= files


@pytest.mark.parametrize("extra", FRAMEWORKS, ids=lambda extra: extra or "neither")
def test_wheel_runs_with(built, tmp_path, extra):
    path = str(tmp_path / "wheel")
    with zipfile.ZipFile(built[0]) as wheel:
        wheel.extractall(path)
    before = MISSING.format(missing=FRAMEWORKS[extra], path=path)
    done = run(sys.executable, extra, tmp_path, before, path)
    assert done.returncode == 0, done.stderr


def test_changelog_has_this_version_in_the_form_of_keep_a_changelog():
    text = (ROOT / "CHANGELOG.md").read_text()
    unreleased, *versions = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert unreleased == "[Unreleased]"
    numbers = [re.fullmatch(r"\[(\d+)\.(\d+)\.(\d+)\] - \d{4}-\d\d-\d\d", version) for version in versions]
    assert all(numbers), versions
    in_order = [tuple(map(int, number.groups())) for number in numbers]
    assert in_order == sorted(set(in_order), reverse=True)
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == ".".join(map(str, in_order[0]))
    sections = re.findall(r"^### (.*)$", text, re.MULTILINE)
    assert set(sections) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
