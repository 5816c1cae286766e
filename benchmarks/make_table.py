"""Makes the tables of tuned configs that come with the package from measured results.

Each file in `benchmarks/measured/` is an `AutotuningResult` of one run on one device. The results of a device model
become one table, `ejkernel_ops/tables/<model>.json`: what was tuned, with its times, without the candidates that lost.

    python benchmarks/make_table.py [--check]
"""

import argparse
import dataclasses
import sys
from pathlib import Path

from ejkernel_ops import AutotuningResult
from ejkernel_ops.config.table import table_name
from ejkernel_ops.errors import EjkernelError
from ejkernel_ops.execution.result_json import read

ROOT = Path(__file__).parent.parent
MEASURED, TABLES = ROOT / "benchmarks" / "measured", ROOT / "ejkernel_ops" / "tables"


def tables(measured):
    """The text of each table by file name.

    Raises `ValueError` where a file cannot be used: it names the file.
    """
    found = {}
    for path in sorted(measured.glob("*.json")):
        try:
            result = bare(read(AutotuningResult, path.read_bytes()))
            name = table_name(result.device)
            found[name] = found[name].merge(result) if name in found else result
        except EjkernelError as error:
            raise ValueError(f"{path.name}: {error}") from None
    return {name: in_order(result).dumps() + "\n" for name, result in found.items()}


def bare(result):
    """What a result says for every user: the calls that were tuned, and how."""
    tuned = [dataclasses.replace(e, trials=(), count=1, executions=1) for e in result.entries if is_measured(e)]
    return AutotuningResult(result.device, tuple(tuned), versions=result.versions)


def is_measured(entry):
    """Whether an entry was timed in that run, and can be found by its neighbours."""
    return entry.source == "tuned" and entry.ms is not None and entry.place is not None


def in_order(result):
    """The same entries in an order that does not depend on the files."""
    return dataclasses.replace(result, entries=tuple(sorted(result.entries, key=lambda e: (e.op_id_v, e.call_key))))


def main(arguments=None, measured=MEASURED, folder=TABLES):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where a table is not what would be made"
    )
    check = parser.parse_args(arguments).check
    try:
        made = tables(measured)
    except ValueError as error:
        sys.exit(f"{error}. Measure it again, or remove the file")
    old = {path.name: path.read_text() for path in folder.glob("*.json")}
    if check and made != old:
        differ = sorted(name for name in made.keys() | old.keys() if made.get(name) != old.get(name))
        sys.exit(f"{', '.join(differ)} in {folder.name}/ is not what {measured.name}/ gives; run this without --check")
    if check:
        return
    folder.mkdir(exist_ok=True)
    for name in old.keys() - made.keys():
        (folder / name).unlink()
    for name, text in made.items():
        (folder / name).write_text(text)
        print(f"{folder.name}/{name}")


if __name__ == "__main__":
    main()
