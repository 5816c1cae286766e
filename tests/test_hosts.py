"""Two processes of `jax.distributed` on one machine: they run one program, or all stop before a collective."""

import json
import re
from pathlib import Path

import pytest

from .two_processes import run_two

TESTS = Path(__file__).parent
SCENARIOS = (
    "synced", "alone", "same", "different", "nested_in_another_order", "one_tunes_and_one_enters", "first_fails",
    "second_has_no_program", "other_programs", "calls_ask_nobody", "own_tuning_changes_no_call", "disk_of_the_first",
    "whole_step", "whole_step_alone", "entered_while_another_thread_waits", "entered_by_two_threads_at_once",
    "interrupted", "interrupted_at_work", "sharded_step", "sharded_steps_that_differ", "late",
)  # fmt: skip


def run_scenarios(folder, *scenarios, limit=100.0):
    """The exit status of two processes, what each printed, by scenario, and its errors; none may take longer."""

    def command(rank, port):
        return [TESTS / "process_of_two.py", folder, port, rank, *scenarios]

    codes, outputs, errors, hung = run_two(folder, command, limit)
    lines = [[line for line in out.splitlines() if line.startswith('["')] for out in outputs]
    found = [dict(map(json.loads, each)) for each in lines]
    assert not hung, f"processes {hung} were killed after {limit} s; they had printed {found}; errors: {errors}"
    return codes, found, errors


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    codes, found, errors = run_scenarios(tmp_path_factory.mktemp("two"), *SCENARIOS)
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
    "sharded_steps_that_differ": ("ConfigError", "ConfigError", r"kernels, digest \w+, but in process 1: "),
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
    assert [
        tuned
        for *_, tuned in outcomes
        if name in ("second_has_no_program", "other_programs", "sharded_steps_that_differ")
    ] in ([], [0, 0])


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


def test_a_step_over_a_mesh_of_both_is_tuned_alike_and_is_one_program(said):
    """Tuned for what one device runs; the programs are compared as text, before and with the result."""
    first, second = said["sharded_step"]
    assert first == second
    assert first["shapes"] == ["float32[2,8] float32[8,4]", "float32[2,8] float32[8,4] ..."]
    assert (first["loss"], first["grad"]) == (8.0**3, 8.0)  # ones all over


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
        run_scenarios(tmp_path, "same", limit=0.2)


def test_a_process_that_dies_while_it_tunes_leaves_no_other_waiting(tmp_path):
    codes, found, errors = run_scenarios(tmp_path, "first_dies", limit=60.0)
    assert codes[0] == 3, errors
    assert codes[1] != 0 or found[1]["first_dies"][0] == "ConfigError", errors
