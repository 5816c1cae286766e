"""Attention on a GPU, forward and forward+backward, against cuDNN, tokamax and XLA, in turns in one run.

    python benchmarks/attention.py                     # every point, the most telling first, for nine minutes
    python benchmarks/attention.py --points packed_16k 'd64_*' --tune '*' --merge
    python benchmarks/attention.py --list

Device time where the profiler gives it, else the wall clock, for all contenders of a point alike. Ours are:

- `ours_triton`, `ours_cudnn`, `ours_cudnn_triton` (forward on one, backward on the other), ...: every eligible back
  end with its heuristic config. cuDNN's backward is not deterministic, so it is eligible with `deterministic=False`.
- `chosen`: what `autotune_lowered` takes of the whole step, with deterministic gradients; `chosen_any_order`: the
  backward of `deterministic=False`. At points that are not tuned (`--tune`), the fastest of the ones above.

After each point `docs/benchmarks/attention_<card>.csv` is written; `attention_chart.py` draws it and prints targets.
tokamax is left out where it cannot be imported. `--smoke`: tiny calls on a CPU, with XLA in cuDNN's place.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import datetime
import fnmatch
import importlib.metadata
import os
import re
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from attention_contenders import BACKWARD, FORWARD, Contender, cudnn, eligible, peers, tokamax_module, tuned
from attention_points import DIRECTIONS, TUNED, Arrays, Point, arrays_of, points, reference, smoke_points
from rows import read_rows, write_rows

from ejkernel_ops.errors import DeviceLostError, EjkernelError
from ejkernel_ops.execution.failures import first_line, lost_device
from ejkernel_ops.execution.measure import NoDeviceTime, device_times, interleaved, spread

# Measuring


def compiled(wanted: dict[Any, tuple[Contender, Point, str]]) -> tuple[dict[Any, Any], dict[Any, str]]:
    """Programs by the keys of what is wanted, XLA's part in threads; and why the others are missing."""
    programs, reasons = {}, {}
    with concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        futures = {}
        for key, (contender, point, direction) in wanted.items():
            try:
                futures[key] = threads.submit(contender.lower(point, direction).compile)
            except Exception as error:  # a contender may fail in any way, and must not take the others along
                reasons[key] = first_line(error)
        for key, future in futures.items():
            try:
                programs[key] = future.result()
            except Exception as error:
                reasons[key] = first_line(error)
    return programs, reasons


def warm(programs: dict[Any, Any], x: Arrays, reasons: dict[Any, str]) -> None:
    """Runs each once, and takes out those that fail."""
    for key in list(programs):
        try:
            jax.block_until_ready(programs[key](x))
        except Exception as error:
            if lost_device(str(error)):
                raise
            reasons[key] = first_line(error)
            del programs[key]


def timed(programs: dict[Any, Any], x: Arrays, rounds: int, notes: dict[Any, str]) -> tuple[dict[Any, Any], str]:
    """Samples of each program in milliseconds, in turns, and the clock."""
    runs = [lambda program=program: program(x) for program in programs.values()]
    clock = "wall"
    if jax.default_backend() == "gpu":
        try:
            return dict(zip(programs, device_times(runs, rounds))), "device"
        except NoDeviceTime as error:
            clock = f"wall: {error}"
        for key, run in zip(programs, runs):
            try:
                device_times([run], 1)
            except NoDeviceTime as error:
                notes[key] = f"no device time: {error}"
    return dict(zip(programs, interleaved(runs, rounds))), clock


def measure(point: Point, options: argparse.Namespace) -> list[dict]:
    """The rows of one point."""
    chosen, seconds, note = [], None, ""
    if any(fnmatch.fnmatchcase(point.name, pattern) for pattern in options.tune):
        try:
            chosen, seconds = tuned(point)
        except DeviceLostError:
            raise
        except EjkernelError as error:
            note = f"tuning failed: {first_line(error)}"
    both = [*peers(options.peers, point), *eligible(point), *chosen]
    contenders = {"forward+backward": both, "forward": _forwards(both)}
    errors = {} if options.no_errors else ERRORS.of(point, both)
    x, rows = arrays_of(point), []
    programs, reasons = compiled(
        {(direction, c): (c, point, direction) for direction in DIRECTIONS for c in _distinct(contenders[direction])}
    )
    warm(programs, x, reasons)
    for direction in DIRECTIONS:
        mine = {c: program for (at, c), program in programs.items() if at == direction}
        notes = {c: reason for (at, c), reason in reasons.items() if at == direction}
        times, clock = timed(mine, x, options.rounds, notes) if mine else ({}, "")
        table = Table(point, direction, contenders[direction], times, notes, errors)
        shared = {"tuned": bool(chosen), "tuning_s": "" if seconds is None else round(seconds, 1), "clock": clock}
        shared["rounds"] = options.rounds
        rows += [row | shared | {"note": row["note"] or note} for row in table.rows(bool(chosen))]
    return rows


def _forwards(both: list[Contender]) -> list[Contender]:
    """The contenders of the forward direction: of ours each forward config once."""
    return [c.forward_only() for c in both if not c.is_ours or c.name == "chosen" or c.name.count("_") == 1]


def _distinct(contenders: list[Contender]) -> list[Contender]:
    """One contender for each program."""
    return list({c.alike(): c for c in contenders}.values())


@dataclasses.dataclass
class Table:
    """What was measured at one point in one direction."""

    point: Point
    direction: str
    contenders: list[Contender]
    times: dict[Contender, list[float]]
    notes: dict[Contender, str]
    errors: dict[Any, dict[str, tuple[float, float]]]

    def __post_init__(self):
        by_value = {c.alike(): samples for c, samples in self.times.items()}
        self.times = {c: by_value[c.alike()] for c in self.contenders if c.alike() in by_value}
        by_value = {c.alike(): note for c, note in self.notes.items()}
        self.notes = {c: by_value[c.alike()] for c in self.contenders if c.alike() in by_value}

    def rows(self, has_chosen: bool) -> list[dict]:
        """A row of each contender."""
        rows = [self._row(contender) for contender in self.contenders]
        if has_chosen:
            return rows
        for name, any_order in (("chosen", False), ("chosen_any_order", True)):
            best = self._fastest([c for c in self.times if c.is_ours and (any_order or c.deterministic)])
            if best is not None and (any_order is False or self.direction != "forward"):
                rows.append(self._row(best) | {"contender": name})
        return rows

    def _fastest(self, among: list[Contender]) -> Contender | None:
        return min(among, key=lambda c: statistics.median(self.times[c]), default=None)

    def _row(self, contender: Contender) -> dict:
        others = [c for c in self.times if not c.is_ours]
        cudnn = next((c for c in others if c.name == "cudnn"), None)
        samples, configs = self.times.get(contender), dict(contender.choice)
        median = statistics.median(samples) if samples else None
        leaves = self.errors.get(contender.alike(), {})
        leaves = [leaves[n] for n in leaves if n == "out" or self.direction != "forward"]
        names = ("batch", "length", "heads", "head_dim", "causal", "kind")
        return {
            "point": self.point.name,
            **{name: getattr(self.point, name) for name in names},
            "kv_heads": self.point.key_heads,
            "direction": self.direction,
            "contender": contender.name,
            "deterministic": "" if contender.deterministic is None else contender.deterministic,
            "ms": _rounded(median, 5),
            "spread": _rounded(spread(samples) if samples else None, 4),
            "tflops": _rounded(median and self.point.flops(self.direction) / median / 1e9, 1),
            "vs_cudnn": _rounded(self._ratio(cudnn, contender), 3),
            "vs_best_peer": _rounded(self._ratio(self._fastest(others), contender), 3),
            "error_vs_cudnn": _rounded(max((rms for rms, _ in leaves), default=None), 3),
            "max_error_vs_cudnn": _rounded(max((most for _, most in leaves), default=None), 3),
            "forward_config": _text(configs.get(FORWARD)),
            "backward_config": _text(configs.get(BACKWARD)),
            "note": self.notes.get(contender, ""),
        }

    def _ratio(self, other: Contender | None, contender: Contender) -> float | None:
        """How many times as fast as another contender, by rounds."""
        if other is None or contender not in self.times:
            return None
        return statistics.median(a / b for a, b in zip(self.times[other], self.times[contender]))


def _rounded(x: float | None, digits: int) -> float | str:
    return "" if x is None else round(x, digits)


def _text(cfg: Any) -> str:
    """A config such as `triton 64x64 w4 s2 + 128x64 w8 s3`."""
    if cfg is None:
        return ""
    p, text = cfg.fwd or cfg.bwd, cfg.backend
    if p is not None and p.q_blocksize:
        text += f" {p.q_blocksize}x{p.kv_blocksize}" + (f" w{p.num_warps} s{p.num_stages}" if p.num_warps else "")
    if getattr(p, "num_warps_mn", None):
        text += f" + {p.blocksize_m}x{p.blocksize_n} w{p.num_warps_mn} s{p.num_stages_mn}"
    return text


# Errors


class Errors:
    """Errors of ours over cuDNN's, both against float64, at small calls; those of a kind are computed once."""

    def __init__(self):
        self.known: dict[Any, dict[str, tuple[float, float]]] = {}  # root of the mean square and largest, by leaf

    def of(self, point: Point, contenders: list[Contender]) -> dict[Any, dict[str, tuple[float, float]]]:
        """Ratios by leaf for each contender, under `alike()`."""
        small = point.small()
        stock_point = dataclasses.replace(small, cap=None)  # cuDNN has no soft cap: it is asked without
        asked = {(stock_point, "cudnn"): (Contender("cudnn", cudnn), stock_point, "forward+backward")}
        asked |= {(small, c.alike()): (c, small, "forward+backward") for c in contenders if c.is_ours}
        missing = {key: wanted for key, wanted in asked.items() if key not in self.known}
        programs, reasons = compiled(missing)
        for at in (stock_point, small):
            here = {key: program for key, program in programs.items() if key[0] == at}
            if here:
                x = arrays_of(at)
                warm(here, x, reasons)
                exact = reference(at, x)
                for key, program in here.items():
                    self.known[key] = _errors(program(x), exact)
        for reason in reasons.values():
            print(f"  no error: {reason}", flush=True)
        base = self.known.get((stock_point, "cudnn"))
        if base is None:
            return {}
        found = {}
        for contender in (c for c in contenders if (small, c.alike()) in self.known):
            mine = self.known[small, contender.alike()]
            ratios = {name: (mine[name][0] / rms, mine[name][1] / most) for name, (rms, most) in base.items()}
            found[contender.alike()] = found[contender.forward_only().alike()] = ratios
        return found


ERRORS = Errors()


def _errors(outs: Any, exact: dict[str, np.ndarray]) -> dict[str, tuple[float, float]]:
    out, gradients = outs
    found = {}
    for name, x in {"out": out, **gradients}.items():
        difference = np.asarray(x).astype(np.float64) - exact[name]
        found[name] = float(np.sqrt(np.mean(difference**2))), float(np.abs(difference).max())
    return found


# The run


def card() -> str:
    """The card's short name, such as `h100`."""
    kind = jax.devices()[0].device_kind
    found = re.search(r"\b[A-Z]+\d{2,}\w*", kind)
    return (found[0] if found else re.sub(r"\W+", "_", kind)).lower()


def about() -> dict[str, str]:
    """What the times depend on besides the code."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(command, capture_output=True, text=True).stdout.split("\n")[0]
    except OSError:
        driver = ""
    packages = {"jax": "jax", "jaxlib": "jaxlib", "cudnn": "nvidia-cudnn-cu13", "triton": "triton"}
    packages |= {"jax_triton": "jax-triton", "tokamax": "tokamax"}
    versions = {name: _version(package) for name, package in packages.items()}
    versions["cudnn"] = versions["cudnn"] or _version("nvidia-cudnn-cu12")
    return {
        "device": jax.devices()[0].device_kind,
        "driver": driver,
        **versions,
        "date": datetime.date.today().isoformat(),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", nargs="+", default=["*"], help="names or globs; --list shows the names")
    parser.add_argument("--peers", nargs="*", default=["cudnn", "tokamax", "tokamax_triton", "xla"])
    parser.add_argument("--tune", nargs="*", default=TUNED, help="names or globs of the points that are tuned")
    parser.add_argument("--no-tune", dest="tune", action="store_const", const=[], help="the same as an empty --tune")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--budget", type=float, default=540.0, help="seconds after which no further point starts")
    parser.add_argument("--no-errors", action="store_true", help="look at speed alone")
    parser.add_argument("--merge", action="store_true", help="keep the rows of other points that the table has")
    parser.add_argument("--missing", action="store_true", help="as --merge, and only points that the table lacks")
    parser.add_argument("--out", type=Path, help="default docs/benchmarks/attention_<card>.csv")
    parser.add_argument("--smoke", action="store_true", help="tiny calls, XLA in cuDNN's place")
    parser.add_argument("--list", action="store_true", help="print the names of the points")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    start, options = time.monotonic(), parsed(arguments)
    known = smoke_points() if options.smoke else points()
    asked = [p for p in known if any(fnmatch.fnmatchcase(p.name, pattern) for pattern in options.points)]
    if options.list or not asked:
        raise SystemExit("\n".join(p.name for p in known))
    if jax.default_backend() != "gpu" and not options.smoke:
        raise SystemExit("no GPU here; --smoke tries the script on a CPU")
    folder = Path(tempfile.gettempdir() if options.smoke else "docs/benchmarks")
    out = options.out or folder / f"attention_{'smoke' if options.smoke else card()}.csv"
    rows = read_rows(out) if (options.merge or options.missing) and out.exists() else []
    if rows and "point" not in rows[0]:
        raise SystemExit(f"{out} is another table; move it away")
    if options.missing:
        asked = [p for p in asked if p.name not in {row["point"] for row in rows}]
    _leave_out_tokamax(options)
    shared = about()
    for index, point in enumerate(asked):
        if index and time.monotonic() - start > options.budget:
            print("the time is over; left:", *(p.name for p in asked[index:]))
            break
        begun = time.monotonic()
        try:
            found = [row | shared for row in measure(point, options)]
        except Exception as error:  # one point must not take the others along
            if isinstance(error, DeviceLostError) or lost_device(str(error)):
                raise
            print(f"{point.name}: failed: {first_line(error)}", flush=True)
            continue
        if rows and list(rows[0]) != list(found[0]):
            raise SystemExit(f"{out} has other columns; move it away")
        rows = [row for row in rows if row["point"] != point.name] + found
        write_rows(out, rows)  # after each point: device time may end
        print(f"{point.name}: {time.monotonic() - begun:.1f} s, clock {found[0]['clock']}", flush=True)
        for row in found:
            print(
                f"  {row['direction']:16} {row['contender']:18} {row['ms']:>9} ms {row['tflops']:>6} TFLOP/s "
                f"{row['vs_cudnn']:>6} of cuDNN, error {row['error_vs_cudnn']}  {row['forward_config']} | "
                f"{row['backward_config']}  {row['note']}",
                flush=True,
            )


def _leave_out_tokamax(options: argparse.Namespace) -> None:
    """Says so where tokamax is asked for and cannot be had."""
    if not any(name.startswith("tokamax") for name in options.peers):
        return
    try:
        tokamax_module()
    except Exception as error:  # its imports may fail in any way
        print(f"without tokamax: {first_line(error)}", flush=True)
        options.peers = [name for name in options.peers if not name.startswith("tokamax")]


if __name__ == "__main__":
    main()
