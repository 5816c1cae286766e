"""The examples in a small size: each shows what it says that it shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from ejkernel_ops import AutotuningResult, ConfigError, device_fingerprint

ROOT = Path(__file__).parent.parent
SCRIPTS = [script for script in sorted((ROOT / "examples").glob("*.py")) if "__main__" in script.read_text()]
pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def examples(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setenv("COLUMNS", "160")
    jax.devices()  # so that no example decides how many there are for the tests that follow


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_every_example_says_what_it_does(script):
    shown = subprocess.run(
        [sys.executable, script, "--help"], capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    assert "usage" in shown.stdout.lower()


def test_own_kernel_tunes_both_directions(capsys):
    import own_kernel

    result = own_kernel.main([])
    assert sorted(e.op_id_v for e in result.entries) == ["swiglu@v1", "swiglu_bwd@v1"]
    assert len(result.entries[0].trials) > 1
    assert "loss" in capsys.readouterr().out


def test_own_kernel_checks_its_triton_kernels_without_a_gpu(monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed; it exists for Linux only")
    import own_kernel

    monkeypatch.setenv("EJKERNEL_OPS_INTERPRET", "0")  # and is put back
    differences = own_kernel.main(["--check"])
    assert sorted(differences) == ["dgate", "dup", "out"]
    assert max(differences.values()) < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_own_kernels_compile_for_an_h100_without_spills(dtype):
    pytest.importorskip("triton", reason="Triton is not installed; it exists for Linux only")
    import own_kernel

    from .compiled import compiled, launches

    x = jax.ShapeDtypeStruct((7, 1000), dtype)

    def both(x):
        forward, backward = own_kernel.swiglu, own_kernel.swiglu.backward
        for cfg in forward.candidate_cfgs_triton(None):
            forward.run_triton(x, x, cfg=cfg)
            backward.run_triton(x, x, x, x, cfg=cfg, needs=None)

    found = launches(both, x)
    assert [launch.name for launch in found] == ["swiglu_forward", "swiglu_backward"] * 5
    assert [compiled(launch).spills for launch in found] == [0] * 10


def test_packed_documents_have_the_losses_that_they_have_alone(capsys):
    import packed_documents

    assert packed_documents.main(["--documents", "5", "--length", "96"]) < 1e-4
    padded, packed = capsys.readouterr().out.splitlines()[-2:]
    assert padded.split()[:2] == ["padded", "5"]
    assert int(packed.split()[1]) < 5


def test_packing_loses_no_document_and_overfills_no_row():
    import packed_documents

    documents = packed_documents.docstrings(60, 200)
    rows = packed_documents.packed(documents, 200)
    assert sorted(number for row in rows for number in row) == list(range(60))
    assert all(sum(len(documents[number]) for number in row) <= 200 for row in rows)
    assert len(rows) < 45


@pytest.mark.cpu
def test_a_window_needs_less_than_what_stock_attention_does():
    import long_context

    short, long = long_context.main(["--lengths", "256", "1024", "--window", "64"])
    assert long["window_mib"] < long["stock_mib"] / 2
    assert long["stock_mib"] > 10 * short["stock_mib"]  # of four times the length


@pytest.mark.cpu
def test_a_cache_gives_the_bytes_that_recomputing_gives(capsys):
    import decode

    assert decode.main(["--count", "6", "--layers", "1"])
    assert "equal bytes: 12 of 12" in capsys.readouterr().out


def test_another_process_makes_of_a_result_what_this_one_does(tmp_path, capsys):
    import share_result

    assert share_result.main(["--save", str(tmp_path / "runs" / "tuned.json")])
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines() if line.endswith("equal")] == ["result", "program", "loss"]
    assert "\n+ flash_attention@v1:" in shown


def test_a_call_that_a_shared_result_lacks_is_an_error():
    import share_result

    with pytest.raises(ConfigError, match="pinned"):
        share_result.pinned(AutotuningResult(device_fingerprint(), ()))


@pytest.mark.cpu
def test_several_devices_compute_what_one_does_on_parts_of_everything(capsys):
    import several_devices

    assert several_devices.main(["--mesh", "2", "2"]) < 1e-5
    shown = capsys.readouterr().out
    assert "(32, 2, 16)   of which a device has (16, 2, 16)" in shown
    assert "collective-permute" in shown  # keys and values go around a ring


@pytest.mark.cpu
def test_several_devices_are_made_of_a_cpu_that_is_alone():
    flags = " ".join(flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag)
    code = "import jax, several_devices as s; print(s.mesh_of(2, 3).size, jax.device_count())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}"},
    )  # fmt: skip
    assert done.stdout.split() == ["6", "6"]


@pytest.mark.cpu
def test_too_few_devices_are_said():
    import several_devices

    assert jax.device_count() == 8
    with pytest.raises(SystemExit, match="--mesh 4 4 takes 16 devices; there are 8"):
        several_devices.mesh_of(4, 4)


def test_the_page_of_examples_shows_each_of_them_and_what_it_prints(scripts):
    shown = dict(scripts("example_outputs").blocks((ROOT / "docs" / "examples.md").read_text()))
    assert {command.split()[0] for command in shown} == {f"examples/{script.name}" for script in SCRIPTS}
    for command, output in shown.items():
        assert output.strip(), f"docs/examples.md has no output of {command}: make examples"


def test_outputs_on_the_page_of_examples_are_replaced_and_nothing_else(scripts):
    outputs = scripts("example_outputs")
    page = (ROOT / "docs" / "examples.md").read_text()
    texts = dict(outputs.blocks(page))
    assert outputs.renewed(page, texts.__getitem__, "ten cores") == re.sub(
        r"<!-- begin -->.*<!-- end -->", "<!-- begin -->ten cores<!-- end -->", page
    )
    renewed = outputs.renewed(page, lambda command: f"new {command}\n", "ten cores")
    assert dict(outputs.blocks(renewed)) == {command: f"new {command}\n" for command in texts}


def test_long_outputs_are_cut_to_their_first_and_last_lines(scripts):
    outputs = scripts("example_outputs")
    lines = outputs.cut("\n".join(f"{number:200}" for number in range(100))).splitlines()
    assert len(lines) == outputs.FIRST + 1 + outputs.LAST
    assert max(map(len, lines)) <= outputs.WIDTH
    assert outputs.cut("a\nb\n") == "a\nb\n"
