"""Two processes of `jax.distributed` on one machine: they run one program, or all stop before a collective."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SCENARIOS = (
    "synced", "alone", "same", "different", "nested_in_another_order", "one_tunes_and_one_enters", "first_fails",
    "second_has_no_program", "other_programs", "calls_ask_nobody", "own_tuning_changes_no_call", "disk_of_the_first",
    "whole_step", "whole_step_alone", "entered_while_another_thread_waits", "entered_by_two_threads_at_once",
    "interrupted", "interrupted_at_work", "late",
)  # fmt: skip


def run_two(folder, *scenarios, limit=100.0):
    """The exit status of two processes, what each printed, by scenario, and its errors; none may take longer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS), *filter(None, sys.path)]),
        "JAX_PLATFORMS": "cpu", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4",
    }  # fmt: skip
    files = [[folder / f"{name}{rank}" for name in ("out", "err")] for rank in (0, 1)]
    with contextlib.ExitStack() as stack:
        processes = []
        for rank, (out, err) in enumerate(files):
            command = [sys.executable, TESTS / "process_of_two.py", folder, port, str(rank), *scenarios]
            streams = [stack.enter_context(path.open("w")) for path in (out, err)]
            processes.append(subprocess.Popen(command, stdout=streams[0], stderr=streams[1], env=env))
            stack.callback(processes[-1].wait)
            stack.callback(processes[-1].kill)
        deadline, hung = time.monotonic() + limit, []
        for rank, process in enumerate(processes):
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                hung.append(rank)
    lines = [[line for line in out.read_text().splitlines() if line.startswith('["')] for out, _ in files]
    found, errors = [dict(map(json.loads, each)) for each in lines], [err.read_text() for _, err in files]
    assert not hung, f"processes {hung} were killed after {limit} s; they had printed {found}; errors: {errors}"
    return [process.returncode for process in processes], found, errors


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    codes, found, errors = run_two(tmp_path_factory.mktemp("two"), *SCENARIOS)
    assert [set(SCENARIOS) - set(one) for one in found] == [set(), set()], errors
    assert codes == [0, 0], errors
    return {name: [one[name] for one in found] for name in SCENARIOS}


def test_all_take_what_process_0_tunes_and_compile_the_same_50_programs(said):
    first, second = said["synced"]
    assert (first["tuned"], second["tuned"], first["entries"]) == (50, 0, 50)
    assert first["digest"] == second["digest"]
    assert first["programs"] == second["programs"]


def test_tuning_by_oneself_would_have_given_other_programs(said):
    first, second = said["alone"]
    assert first["digest"] != second["digest"]
    assert sum(a == b for a, b in zip(first["programs"], second["programs"])) < 40


def test_the_same_results_are_entered_nested_and_again_and_count_inside_alone(said):
    assert said["same"] == [[1.0, 7.0, 64.0]] * 2


STOPS = {  # what is planted -> the error of each process
    "different": (
        "ConfigError", "ConfigError",
        r"entering a result in process 0: digest \w{16} over none, but in process 1: digest \w",
    ),
    "nested_in_another_order": ("ConfigError", "ConfigError", "but in process 1"),
    "one_tunes_and_one_enters": (
        "ConfigError", "ConfigError", "what is done in process 0: reading the program, but in process 1: entering a",
    ),
    "first_fails": ("ValueError", "TuningError", "tuning failed in process 0: ValueError: no such$"),
    "second_has_no_program": (
        "TuningError", "LabelError", "reading the program failed in process 1: LabelError: the program is compiled",
    ),
    "other_programs": ("ConfigError", "ConfigError", r"1 kernels, digest \w+, but in process 1: .*, 2 kernels, digest"),
}  # fmt: skip


@pytest.mark.parametrize("name", STOPS)
def test_a_planted_difference_or_failure_stops_all_and_before_any_collective(said, name):
    *kinds, message = STOPS[name]
    outcomes = said[name]
    assert [kind for kind, *_ in outcomes] == kinds
    for kind, text, *_ in outcomes:
        if kinds[0] == kinds[1] or kind == "TuningError":  # the one that failed raises its own error
            assert re.search(message, text), text
    assert [after for _, _, after, *_ in outcomes] == [64.0, 64.0]  # a collective of both still gives its sum
    assert [tuned for *_, tuned in outcomes if name in ("second_has_no_program", "other_programs")] in ([], [0, 0])


def test_a_call_tunes_nothing_and_asks_no_disk(said):
    assert said["calls_ask_nobody"] == [1.0, 1.0]


def test_what_a_process_tunes_by_itself_is_kept_on_its_disk_and_changes_no_call(said):
    assert said["own_tuning_changes_no_call"] == [[[["tuned"] * 3, ["disk"] * 3], 1.0]] * 2


def test_what_the_disk_of_process_0_has_is_not_tuned_again(said):
    assert said["disk_of_the_first"] == [[["tuned"] * 3, ["disk"] * 3]] * 2


def test_the_whole_step_is_timed_in_step_and_decided_alike(said):
    first, second = said["whole_step"]
    assert first == second
    assert first[1] is not None, first


def test_without_sync_the_whole_step_is_left_out_and_a_note_says_so(said):
    for notes in said["whole_step_alone"]:
        assert "the whole step was not timed: with several processes that needs sync=True" in notes


def test_who_does_not_come_in_time_is_named_to_all_and_is_told_too(said):
    assert said["late"] == [[
        "ConfigError",
        "waiting: not every process came here; 0.5 s are waited at most, and process 1 was missing. All must tune, and "
        "enter the same results, in the same order", 64.0,
    ]] * 2  # fmt: skip


def test_a_result_that_was_compared_is_entered_while_another_thread_waits_for_tuning(said):
    assert said["entered_while_another_thread_waits"] == [True, True]


def test_threads_that_enter_one_result_at_once_compare_it_once(said):
    """However many there are in each process: otherwise the processes would no longer meet in the same order."""
    assert said["entered_by_two_threads_at_once"] == [[True, True], [True]]


@pytest.mark.parametrize("name", ["interrupted", "interrupted_at_work"])
def test_an_interrupt_is_heard_while_another_process_works_and_is_told_to_it(said, name):
    (heard_in_time, *error), interrupted = said[name]
    assert (interrupted, heard_in_time) == ("KeyboardInterrupt", True)
    assert error == ["TuningError", "waiting failed in process 1: KeyboardInterrupt: "]


def test_a_process_that_hangs_fails_whatever_its_test_expects(tmp_path):
    with pytest.raises(AssertionError, match=r"processes \[0, 1\] were killed after 0.2 s; they had printed"):
        run_two(tmp_path, "same", limit=0.2)


def test_a_process_that_dies_while_it_tunes_leaves_no_other_waiting(tmp_path):
    codes, found, errors = run_two(tmp_path, "first_dies", limit=60.0)
    assert codes[0] == 3, errors
    assert codes[1] != 0 or found[1]["first_dies"][0] == "ConfigError", errors
