"""Tunes a train step once, saves what was found, and trains with it in another process, which tunes nothing.

    python examples/share_result.py --save runs/tuned.json

The other process may be tomorrow's run, a CI job or the other 63 hosts. There every call has to have its config in the
file (`mode="pinned"`): a call that has none is an error, and nothing is looked up, tuned or timed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

import ejlayers
from ejkernel_ops import policy_override
from ejlayers import AutotuningResult


@nnx.jit
def train_step(model: nnx.MultiHeadAttention, x: jax.Array) -> jax.Array:
    """A step of plain gradient descent: any train step will do."""
    loss, grads = nnx.value_and_grad(lambda model: jnp.square(model(x, is_causal=True) - x).mean())(model)
    nnx.update(model, jax.tree.map(lambda param, grad: param - grad, nnx.state(model, nnx.Param), grads))
    return loss


def step_arguments(length: int = 128) -> tuple[nnx.MultiHeadAttention, jax.Array]:
    """A swapped layer and a batch, the same in every process."""
    model = ejlayers.swap(nnx.MultiHeadAttention(4, 64, decode=False, rngs=nnx.Rngs(0)))
    return model, jax.random.normal(jax.random.key(0), (4, length, 64))


def pinned(result: AutotuningResult) -> dict[str, str]:
    """What a process makes of a result: its digest, that of the program, and the loss of a step, bit for bit."""
    arguments = step_arguments()
    with policy_override(mode="pinned"), result:
        program = train_step.lower(*arguments).as_text()
        loss = train_step(*arguments)
    digest = hashlib.sha256(program.encode()).hexdigest()
    return {"result": result.digest[:16], "program": digest[:16], "loss": float(loss).hex()}


def elsewhere(file: Path) -> dict[str, str]:
    """The same in a new process, which knows nothing but the file."""
    command = [sys.executable, __file__, "--load", str(file)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def main(arguments: list[str] | None = None) -> bool:
    """Tunes, saves, uses, compares and merges; returns whether both processes agree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", type=Path, default=Path("runs/tuned.json"), help="the file of the result")
    parser.add_argument("--load", type=Path, help="do what the other process does: load this file and use it")
    options = parser.parse_args(arguments)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # on a GPU both processes have room
    if options.load:
        print(json.dumps(pinned(AutotuningResult.load(options.load))))
        return True

    result = ejlayers.tune(train_step, *step_arguments(), whole_step=False)
    options.save.parent.mkdir(parents=True, exist_ok=True)
    result.save(options.save)
    print(f"tuned {len(result.entries)} calls; {options.save} has {options.save.stat().st_size} bytes")

    here, there = pinned(result), elsewhere(options.save)
    for name in here:
        print(f"{name:8} here {here[name]:22} there {there[name]:22} {'equal' if here[name] == there[name] else 'NO'}")

    longer = ejlayers.tune(train_step, *step_arguments(256), whole_step=False)
    print("\nof a length twice as large (-: only the first, +: only the second, !: another config):")
    print(result.diff(longer))
    print(f"both as one: {len((result | longer).entries)} calls")
    return here == there


if __name__ == "__main__":
    sys.exit(not main())
