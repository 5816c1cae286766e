"""The text: Python sources, by default those of the standard library, which every machine has."""

from __future__ import annotations

import dataclasses
import hashlib
import sysconfig
from pathlib import Path

import numpy as np

_SKIPPED = {"site-packages", "test", "tests", "__pycache__", "idlelib", "lib2to3", "encodings", "turtledemo"}
_MAX_BYTES = 24 << 20


class CorpusError(Exception):
    """A folder that holds too little text."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Bytes to train on, and bytes of other files to validate on."""

    train: np.ndarray
    held_out: np.ndarray
    files: int

    @property
    def digest(self) -> str:
        """Tells texts apart."""
        return hashlib.sha256(self.train.tobytes() + self.held_out.tobytes()).hexdigest()[:16]

    def batch(self, batch: int, context: int, seed: int, step: int) -> np.ndarray:
        """Random windows of `context + 1` bytes, the same for one seed and step: `(batch, context + 1)` int32."""
        rng = np.random.default_rng((seed, step))
        return _windows(self.train, rng.integers(0, len(self.train) - context - 1, batch), context)

    def validation(self, batch: int, context: int, count: int) -> list[np.ndarray]:
        """`count` batches of evenly spaced windows of the held-out bytes, always the same."""
        starts = np.linspace(0, len(self.held_out) - context - 2, batch * count).astype(int)
        return [_windows(self.held_out, starts[i::count], context) for i in range(count)]


def _windows(data: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    return data[starts[:, None] + np.arange(context + 1)].astype(np.int32)


def read_corpus(folder: Path | None, context: int) -> Corpus:
    """All `.py` files of a folder, one in ten held out by the hash of its name.

    Raises:
        CorpusError: no such folder, or too little text for one window of each kind.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    if not root.is_dir():
        raise CorpusError(f"corpus {root} is no folder")
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    total = 0
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root)
        if total > _MAX_BYTES or _SKIPPED & set(name.parts):
            continue
        try:
            text = file.read_bytes()
        except OSError:
            continue
        parts[hashlib.sha256(name.as_posix().encode()).digest()[0] < 26].append(text)
        total += len(text)
    arrays = [np.frombuffer(b"".join(parts[held_out]), np.uint8) for held_out in (False, True)]
    if min(map(len, arrays)) < 2 * context + 2:
        raise CorpusError(
            f"corpus folder {root} has {total} bytes of Python in {sum(map(len, parts.values()))} files; "
            f"expected more than {2 * context} to train on and as many to hold out"
        )
    return Corpus(*arrays, files=sum(map(len, parts.values())))
