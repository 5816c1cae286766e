"""Bytes and operations of a train step on many GPUs, by arithmetic alone: nothing is run.

    python benchmarks/scaling_on_paper.py            # prints a table, which docs/several_devices.md has too

A device's work takes what one step took on one H200, by the share of the operations that it has; bytes take what a
link carries, in one direction. Nothing is taken to overlap: what does is better than this.
"""

from __future__ import annotations

import dataclasses

from attention_chart import markdown
from rows import read_rows
from table_cells import BENCHMARKS
from train_step import SIZES, Size, num_parameters

# Bytes a second that a GPU sends within a machine of 8, and out of it (one 400 Gb/s port).
NVLINK, NETWORK = 450e9, 50e9
MACHINE = 8  # GPUs of a machine
MODEL = "llama-1b"
BASE = SIZES[MODEL]
# Our step on one GPU, untuned.
STEP_MS = next(
    float(row["ms"])
    for row in read_rows(BENCHMARKS / "train_step_h200.csv")
    if (row["model"], row["way"]) == (MODEL, "ours")
)
BFLOAT16, FLOAT32 = 2, 4


@dataclasses.dataclass(frozen=True)
class Plan:
    """How devices share out a step: copies of the model, parts of it, parts of its matrices, parts of the length."""

    data: int = 1
    fsdp: int = 1
    model: int = 1
    context: int = 1

    @property
    def devices(self) -> int:
        """All of them."""
        return self.data * self.fsdp * self.model * self.context

    def __str__(self) -> str:
        return ", ".join(f"{name} {count}" for name, count in dataclasses.asdict(self).items() if count > 1)


def around(count: int) -> float:
    """The part of an array that a device sends, when all get all of it or each the sum of one part."""
    return (count - 1) / count


def bytes_of(size: Size, plan: Plan) -> dict[str, tuple[float, int]]:
    """Bytes that a device sends in a step, by what for, and the number of neighbouring devices that they stay among.

    Devices that share out a matrix are next to each other, then those of a length, of a model, and copies.
    """
    parameters = num_parameters(size)
    head, rest = size.vocab * size.width, parameters - size.vocab * size.width
    rows = size.batch * size.length / plan.context  # of a device
    activations = rows * size.width * BFLOAT16
    keys = 2 * activations / plan.model  # keys and values: as many heads as queries
    gradients = (rest * BFLOAT16 + head * FLOAT32) / plan.model  # the head's is summed in float32
    length, parts = plan.model * plan.context, plan.model * plan.context * plan.fsdp
    found = {
        "weights, both directions": (2 * parameters / plan.model * BFLOAT16 * around(plan.fsdp), parts),
        "gradients over fsdp": (gradients * around(plan.fsdp), parts),
        "gradients over data": (2 * gradients / plan.fsdp * around(plan.data), plan.devices),
        "activations over model": (4 * size.layers * 2 * activations * around(plan.model), plan.model),
        "keys, and their gradients": (size.layers * (keys + keys + 2 * keys) * around(plan.context), length),
    }
    return {name: (sent, count) for name, (sent, count) in found.items() if sent}


def row(size: Size, plan: Plan) -> list[str]:
    """A row of the table."""
    tokens = size.batch * size.length
    flops = size.flops(num_parameters(size)) / (plan.model * plan.context)
    compute = STEP_MS * flops / BASE.flops(num_parameters(BASE))
    near = far = 0.0
    for sent, count in bytes_of(size, plan).values():  # what goes around more devices than a machine has goes out of it
        near, far = (near + sent, far) if count <= MACHINE else (near, far + sent)
    moved = (near / NVLINK + far / NETWORK) * 1e3
    shared = tokens * plan.data * plan.fsdp
    return [
        str(plan.devices), str(plan), f"{shared / 1e6:.2f} M", f"{flops / 1e12:.0f}", f"{compute:.0f}",
        f"{near / 1e9:.2f}", f"{far / 1e9:.2f}", f"{moved:.0f}", f"{compute / (compute + moved):.2f}",
    ]  # fmt: skip


PLANS = {
    "llama-1b": [
        Plan(fsdp=8), Plan(fsdp=64), Plan(data=8, fsdp=8), Plan(fsdp=8, model=8), Plan(data=128, fsdp=8),
        Plan(fsdp=1024), Plan(data=16, fsdp=8, model=8),
    ],
    "llama-1b, 64k tokens": [Plan(context=8), Plan(fsdp=8, context=8), Plan(data=16, fsdp=8, context=8)],
}  # fmt: skip
HEADER = [
    "model", "GPUs", "shared out by", "tokens a step", "TFLOP a GPU", "ms of work", "GB by NVLink", "GB by network",
    "ms of moving", "efficiency, nothing overlapped",
]  # fmt: skip


def table() -> str:
    """All plans as a Markdown table."""
    rows = []
    for name, plans in PLANS.items():
        size = dataclasses.replace(BASE, batch=1, length=1 << 16) if "64k" in name else BASE
        rows += [[name, *row(size, plan)] for plan in plans]
    return markdown(HEADER, rows)


if __name__ == "__main__":
    print(table())
