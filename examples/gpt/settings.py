"""What makes a run the run that it is, kept in its folder."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from .launch import Refused
from .sizes import SIZES, LlamaSize, Size

_CHOICES = {"framework": ("nnx", "linen", "equinox"), "size": tuple(SIZES), "dtype": ("float32", "bfloat16")}
_FILE = "run.json"


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags that decide the numbers of a run, and a digest of its text: a resumed run must have the same."""

    framework: str = "nnx"
    size: str = "tiny"
    dtype: str = "float32"
    seed: int = 0
    steps: int = 0  # those of the size
    compare: bool = False
    corpus: str | None = None
    text: str = ""

    def __post_init__(self):
        for name, choices in _CHOICES.items():
            if (given := getattr(self, name)) not in choices:
                raise Refused(f"--{name} is {given!r}; expected one of {', '.join(choices)}")
        if self.is_llama and self.framework != "nnx":
            raise Refused(f"--framework is {self.framework!r}; --size {self.size} is there for nnx alone")
        if not self.steps:
            object.__setattr__(self, "steps", self.shape.steps)
        for name, least in (("steps", 1), ("seed", 0)):
            if (given := getattr(self, name)) < least:
                raise Refused(f"--{name} is {given}; expected at least {least}")

    @property
    def shape(self) -> Size:
        """The size itself."""
        return SIZES[self.size]

    @property
    def is_llama(self) -> bool:
        """Whether the model is a Llama, not a GPT."""
        return isinstance(self.shape, LlamaSize)

    def save(self, folder: Path) -> None:
        """Writes them into the folder of their run."""
        (folder / _FILE).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @classmethod
    def of_run(cls, folder: Path) -> Settings:
        """Those of a run that was there before.

        Raises:
            Refused: the folder is not that of a run.
        """
        try:
            return cls(**json.loads((folder / _FILE).read_text()))
        except OSError as error:
            raise Refused(f"--resume: {folder} is no run: cannot read {_FILE}: {error.strerror}") from None
        except (ValueError, TypeError) as error:
            raise Refused(f"--resume: {folder / _FILE} was not written by this program: {error}") from None

    def refuse_others(self, given: dict) -> None:
        """Refuses what differs from these settings, of a run that is to go on."""
        for name, value in given.items():
            if value is not None and value != (own := getattr(self, name)):
                raise Refused(f"--{name} is {value!r}; the run that is resumed has {own!r}: leave it out")
