"""What tuning shows: its progress on a terminal, and its result as text, Markdown and a picture."""

import io
import re
import sys

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

import ejkernel_ops as ek
from ejkernel_ops.execution.progress import Progress

from . import fakes
from .fakes import FAKE, FakeConfig

pytestmark = pytest.mark.filterwarnings("ignore:.*keep their heuristic")

X = jnp.linspace(-2.0, 2.0, 21).reshape(7, 3)
SHAPES = "bfloat16[8,128] bfloat16[128,64]"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def on_terminal(monkeypatch):
    """Stands for stderr; no fixture, for pytest puts its own there when a test begins."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stderr", Terminal())
    return sys.stderr


@pytest.fixture
def lowered(monkeypatch):
    """A program with one call, two of whose three candidates fail."""
    monkeypatch.setattr(fakes.Fake, "default", FakeConfig(ms=0.5))
    monkeypatch.setattr(fakes.Fake, "candidates", (FakeConfig("fails"), FakeConfig("zeros", ms=0.0)))
    return jax.jit(lambda x: FAKE(x)).lower(X)


def selector(on_event=None):
    return ek.ConfigSelectorChain(tuner=ek.Autotuner(num_iters=2), on_event=on_event)


def shown(file):
    """What was drawn, without control codes."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())


def trial(status="timed", ms=None, cfg=1):
    return ek.Trial(cfg, status, ms)


def entry(op="linear@v1", cfg=2, heuristic_ms=3.0, ms=2.0, **fields):
    trials = (trial(ms=heuristic_ms, cfg=1), trial(ms=ms, cfg=2), trial(ms=9.0, cfg=3))
    fields = {"trials": trials, "shapes": SHAPES, "heuristic": 1} | fields
    return ek.Entry(op, "0123456789abcdef", cfg, heuristic_ms=heuristic_ms, ms=ms, **fields)


def result(*entries, **fields):
    return ek.AutotuningResult("gpu|H100|9.0", entries, versions={"jax": "1"}, **fields)


# Progress


def test_progress_shows_op_candidates_failures_and_ops(monkeypatch, lowered):
    terminal = on_terminal(monkeypatch)
    ek.autotune_lowered(selector(), lowered)
    text = shown(terminal)
    for part in (
        "fake@v1 float32[7,3]",
        "0 of 1 ops",
        "candidate 1 of 3",
        "candidate 2 of 3, 1 failed (1 compile_failed)",
        "3 candidates checked, 2 failed (1 compile_failed, 1 wrong), timing",
        "1 of 1 ops, best gain 1.00x (fake@v1)",
    ):
        assert part in text
    assert terminal.getvalue().rstrip().endswith("\x1b[2K")  # its lines are gone


def test_recorded_calls_show_progress_too(monkeypatch, lowered):
    terminal = on_terminal(monkeypatch)
    [(key, recorded)] = [
        (key, call) for key, call in ek.get_invocations()["fake@v1"].items() if call[1][0].shape == (7, 3)
    ]
    chain = selector()
    ek.set_default_selector(chain)
    ek.autotune_recorded({"fake@v1": {key: recorded}})
    assert "fake@v1" in shown(terminal)
    assert chain.on_event is None


@pytest.mark.parametrize("progress", [True, False])
def test_progress_is_silent_unless_wanted_and_on_a_terminal(lowered, monkeypatch, progress):
    stderr = io.StringIO() if progress else Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    for module in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, module)
    ek.autotune_lowered(selector(), lowered, progress=progress)
    assert stderr.getvalue() == ""
    assert "rich" not in sys.modules


def test_program_without_stderr_is_tuned(lowered, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert len(ek.autotune_lowered(selector(), lowered).entries) == 1


def test_the_selectors_own_listener_hears_everything(monkeypatch, lowered):
    on_terminal(monkeypatch)
    alone, beside = [], []
    for heard, progress in ((alone, False), (beside, True)):
        chain = selector(listen := lambda event, heard=heard, **data: heard.append((event, sorted(data))))
        ek.autotune_lowered(chain, lowered, progress=progress)
        assert chain.on_event is listen
    assert alone == beside
    assert ("trial", ["done", "op_id_v", "total", "trial"]) in beside


def test_an_error_of_the_listener_goes_on_and_the_display_goes(monkeypatch, lowered):
    terminal = on_terminal(monkeypatch)

    def listen(event, **data):
        if event == "trial":
            raise ZeroDivisionError

    chain = selector(listen)
    with pytest.raises(ZeroDivisionError):
        ek.autotune_lowered(chain, lowered)
    assert chain.on_event is listen
    assert terminal.getvalue().rstrip().endswith("\x1b[2K")
    assert sys.stderr is terminal  # rich had put its own there
    ek.autotune_lowered(chain := selector(), lowered)  # the next run is shown again
    assert "1 of 1 ops" in shown(terminal)


def test_progress_inside_progress_draws_nothing_of_its_own(monkeypatch):
    terminal = on_terminal(monkeypatch)
    heard = []
    chain = selector(lambda event, **data: heard.append(event))
    with Progress(chain):
        outer = chain.on_event
        with Progress(chain), Progress(selector()):
            assert chain.on_event is outer
            chain.emit("tuning_start", total=2)
        assert chain.on_event is outer
        chain.emit("whole_step")
    assert heard == ["tuning_start", "whole_step"]
    assert terminal.getvalue().count("\x1b[?25l") == 1  # one display
    assert "whole step" in shown(terminal)


def test_a_listener_that_was_put_there_meanwhile_stays():
    chain = selector()
    with Progress(chain, console=Console(file=io.StringIO(), force_terminal=True)):
        chain.on_event = print
    assert chain.on_event is print


def test_progress_tells_gain_time_left_best_time_and_a_busy_machine(monkeypatch):
    file, clock, chain = io.StringIO(), iter(range(0, 10_000, 10)), selector()
    monkeypatch.setattr("ejkernel_ops.execution.progress.time.monotonic", lambda: next(clock))
    with Progress(chain, console=Console(file=file, force_terminal=True, width=120)):
        chain.emit("tuning_start", total=4)
        for index in range(2):
            chain.emit("op_start", op_id_v="linear@v1", shapes=SHAPES, index=index, total=4)
            chain.emit("trial", op_id_v="linear@v1", trial=trial(), done=1, total=2)
            chain.emit("trial", op_id_v="linear@v1", trial=trial("illegal"), done=2, total=2)
            chain.emit("sampled", op_id_v="linear@v1", count=1, best_ms=1.25)
            chain.emit("op_done", op_id_v="linear@v1", entry=entry(), index=index, total=4)
        chain.emit("op_skipped", op_id_v="linear@v1", reason="", index=2, total=4)
        chain.emit("choice", op_id_v="linear@v1")  # nothing to do with tuning
        chain.emit("busy", spread=0.4)
    text = shown(file)
    for part in ("2 candidates checked, best 1.250 ms", " left, best gain 1.50x (linear@v1)", "3 of 4 ops"):
        assert part in text
    assert "the machine is busy: times spread by 40%" in text
    assert "failed" not in text  # an illegal config was never run


# Text


def test_text_tells_the_failures_of_each_op():
    trials = (trial(), trial("wrong"), *[trial("out_of_memory")] * 2, trial("illegal"), trial("not_tried"))
    text = str(result(entry(trials=trials), entry("linear_bwd@v1")))
    assert f"\nlinear@v1 {SHAPES}: 3 of 4 candidates failed: 2 out_of_memory, 1 wrong\n" in text
    assert re.search(r"\n  out_of_memory: .*\(and 1 more in entry.trials\)\n", text)
    assert text.count("failed") == 1


def cells(line):
    """The cells of a row of a Markdown table."""
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_markdown_is_a_table_with_the_same_cells_and_lines():
    tuned = result(entry(shapes="a|b\nc"), step_ms=(4.0, 2.0), skipped=(("x@v1:0", "why | not"),), notes=("note",))
    lines = tuned.to_markdown().splitlines()
    header, rule, row = (cells(line) for line in lines if line.startswith("|"))
    assert header[:3] == ["op", "operands", "calls"]
    assert {len(header), len(rule), len(row)} == {9}
    assert all(set(cell) <= set("-:") for cell in rule)
    assert row == ["linear@v1", "a|b c", "1", "-", "2", "3.000", "2.000", "1.50x", "tuned"]
    assert "a\\|b c" in tuned.to_markdown()
    items = [line for line in lines if line.startswith("- ")]
    assert items[0] == "- whole step: 4.0 ms with heuristics, 2.0 ms with it (2.00x)"
    assert items[1:3] == ["- not tuned: x@v1:0: why \\| not", "- note"]
    assert items[3].startswith("- digest ")


def test_markdown_without_entries_has_no_table():
    text = result().to_markdown()
    assert not re.search(r"^\|", text, re.MULTILINE)
    assert "- no kernels in this program" in text


# Picture


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_picture_is_written_without_touching_matplotlibs_state(tmp_path, suffix):
    matplotlib = pytest.importorskip("matplotlib")
    before, modules = dict(matplotlib.rcParams), set(sys.modules)
    failed = (trial("wrong"), trial("out_of_memory"))
    entries = [
        entry(),
        entry("slow@v1", ms=6.0, trials=failed),
        entry("disk@v1", heuristic_ms=None, ms=None, trials=()),
    ]
    result(*entries).plot(tmp_path / f"tuned.{suffix}")
    start = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix]
    assert (tmp_path / f"tuned.{suffix}").read_bytes().startswith(start)
    assert dict(matplotlib.rcParams) == before
    assert "matplotlib.pyplot" not in set(sys.modules) - modules


def test_picture_has_labels_gains_and_failures(tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setitem(matplotlib.rcParamsDefault, "svg.fonttype", "none")  # text stays text
    result(entry(trials=(trial("wrong"),)), entry("disk@v1", ms=None, source="disk")).plot(tmp_path / "tuned.svg")
    text = (tmp_path / "tuned.svg").read_text().replace("\xa0", " ")
    for part in ("linear@v1", SHAPES, "1.50x", "1 failed: 1 wrong", "not timed: from disk", "gpu|H100|9.0"):
        assert part in text


@pytest.mark.parametrize("count", [0, 1, 70])
def test_picture_of_any_number_of_ops(tmp_path, count):
    pytest.importorskip("matplotlib")
    result(*[entry(f"op{n}@v1", ms=1.0 + n) for n in range(count)]).plot(tmp_path / "tuned.svg")
    assert (tmp_path / "tuned.svg").stat().st_size > 1000


def test_picture_without_matplotlib_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ek.UnsupportedError, match=re.escape("pip install 'ejlayers[train]'")):
        result(entry()).plot(tmp_path / "tuned.png")


@pytest.mark.parametrize(("name", "error"), [("a.gif", ek.ConfigError), ("a", ek.ConfigError), ("no/a.png", OSError)])
def test_picture_that_cannot_be_written_says_why(tmp_path, name, error):
    with pytest.raises(error, match=r"expected one of .png|does not exist"):
        result(entry()).plot(tmp_path / name)
