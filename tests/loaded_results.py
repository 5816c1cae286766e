"""Loads damaged results while each file, import, process and code that is asked for is noted: a script, for an audit
hook stays for the rest of a process.

`python loaded_results.py COUNT` prints what it saw as JSON.
"""

import json
import sys

from fuzzed import altered, damaged

import ejkernel_ops as ek

FORBIDDEN = ("import", "open", "exec", "compile", "os.", "subprocess.", "socket.", "shutil.", "ctypes.", "pickle.")
LISTENING, SEEN = [False], set()


def hook(event, arguments):
    if LISTENING[0] and event.startswith(FORBIDDEN):
        SEEN.add(f"{event} {arguments[:1]!r}"[:200])


def texts(text, count):
    """Half of them damaged text, half of them right JSON with another value somewhere."""
    yield from damaged(text.encode(), count // 2)
    yield from map(json.dumps, altered(json.loads(text), count - count // 2))


def main(count):
    config = ek.LinearConfig(backend="xla", fwd=ek.FwdParams(blocksize_m=2))
    trials = (ek.Trial(config, "timed", 0.5), ek.Trial(config, "failed", reason="no tile"))
    entries = [ek.Entry("linear@v1", f"{n:016x}", config, heuristic=config, ms=1.0, trials=trials) for n in range(2)]
    text = ek.AutotuningResult(ek.device_fingerprint(), tuple(entries)).dumps()
    ek.AutotuningResult.loads(text)  # what this package imports late is imported now
    sys.addaudithook(hook)
    outcomes = dict.fromkeys(("loaded", "refused"), 0)
    for raw in texts(text, count):
        LISTENING[0] = True
        try:
            ek.AutotuningResult.loads(raw)
            outcomes["loaded"] += 1
        except (ek.CacheFormatError, ek.ConfigError):
            outcomes["refused"] += 1
        finally:
            LISTENING[0] = False
    print(json.dumps(outcomes | {"seen": sorted(SEEN)}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
