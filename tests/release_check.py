"""Installs the wheel alone into fresh environments, and runs there what a user would: `make release-check`.

With the flax extra README's code, with the equinox extra code of its own, with neither what says what to install.

python tests/release_check.py dist constraints/python3.11.txt
"""

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from pages import ROOT, blocks

EQUINOX = """
import equinox as eqx, jax, jax.numpy as jnp
import ejlayers

class Model(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    head: eqx.nn.Linear

    def __call__(self, x):
        return jax.vmap(self.head)(x + self.attention(x, x, x))

@eqx.filter_jit
def train_step(model, batch):
    loss, grads = eqx.filter_value_and_grad(lambda model: (jax.vmap(model)(batch) ** 2).mean())(model)
    return eqx.apply_updates(model, jax.tree.map(lambda g: -1e-2 * g, grads)), loss

keys = jax.random.split(jax.random.key(0))
model = ejlayers.swap(Model(eqx.nn.MultiheadAttention(2, 16, key=keys[0]), eqx.nn.Linear(16, 4, key=keys[1])))
batch = jnp.ones((2, 8, 16))
with ejlayers.tune(train_step, model, batch):
    model, loss = train_step(model, batch)
assert jnp.isfinite(loss)
assert all(row.replaced for row in ejlayers.report(model).rows)
"""
NEITHER = """
import importlib, jax, ejkernel_ops, ejlayers

assert ejkernel_ops.rms_norm(jax.numpy.ones((2, 8))).shape == (2, 8)
for name, extra in {"nnx": "flax", "linen": "flax", "equinox": "equinox"}.items():
    for get in (lambda: getattr(ejlayers, name), lambda: importlib.import_module(f"ejlayers.{name}")):
        try:
            get()
        except ModuleNotFoundError as error:
            assert f"ejlayers.{name} needs {extra}" in str(error) and f"'ejlayers[{extra}]'" in str(error), error
        else:
            raise SystemExit(f"{extra} is installed")
"""
CODE = {  # by extra
    "flax": "\n".join(block.code for block in blocks(ROOT / "README.md", "python")),
    "equinox": EQUINOX,
    "": NEITHER,
}


def run(python, extra, folder, before="", path=""):
    """Runs the code of an extra in a folder of its own; `path` is all that can be imported beside what is installed."""
    environment = {"PYTHONPATH": path, "EJKERNEL_CACHE_DIR": str(folder / "cache"), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [python, "-c", before + CODE[extra]], cwd=folder, env=os.environ | environment, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip


def main(dist, constraints):
    """Checks the wheel in a folder; returns how many of the environments failed."""
    (wheel,) = Path(dist).absolute().glob("*.whl")
    failed = 0
    for extra in CODE:
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            venv.create(folder / "venv", with_pip=True)
            python = folder / "venv/bin/python"
            wanted = f"ejlayers[{extra}] @ {wheel.as_uri()}" if extra else str(wheel)
            pip = [
                python,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
                "--constraint",
                constraints,
            ]
            subprocess.run([*pip, wanted], check=True)
            done = run(python, extra, folder)
        print(f"{extra or 'neither'}: {'runs' if done.returncode == 0 else done.stderr}")
        failed += done.returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
