"""The GPU benchmarks, on a CPU with tiny calls, and what is made of their tables."""

import csv
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.once


def table(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_attention_is_measured_and_drawn(scripts, tmp_path, capsys):
    attention, chart = scripts("attention"), scripts("attention_chart")
    out = tmp_path / "attention_smoke.csv"
    common = ["--smoke", "--rounds", "2", "--peers", "cudnn", "--out", str(out)]
    attention.main([*common, "--points", "d16_*"])
    first = table(out)
    chosen = {row["direction"]: row for row in first if row["contender"] == "chosen"}
    assert list(chosen) == ["forward", "forward+backward"]
    for direction, row in chosen.items():
        assert float(row["ms"]) > 0
        assert float(row["vs_cudnn"]) > 0
        assert 0 < float(row["error_vs_cudnn"]) < 3
        assert float(row["tuning_s"]) > 0
        assert row["forward_config"].startswith("xla ")
        assert row["backward_config"].startswith("xla ") == (direction != "forward")
        assert row["clock"] == "wall"
        assert row["jax"] == jax.__version__
    assert {row["contender"] for row in first} == {"cudnn", "ours_xla", "chosen", "chosen_any_order"}

    attention.main([*common, "--points", "d16_*", "bias_*", "--missing", "--no-tune", "--no-errors"])
    both = table(out)
    assert both[: len(first)] == first
    assert {row["point"] for row in both[len(first) :]} == {"bias_grad_64"}
    assert {row["tuned"] for row in both[len(first) :]} == {"False"}

    capsys.readouterr()
    chart.main([str(out), "--out", str(out.with_suffix(".png"))])
    printed = capsys.readouterr().out
    assert "| chosen forward against the best eligible back end | at least 0.98 |" in printed
    assert "| bias_grad_64 | forward+backward |" in printed
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_losses_of_swapped_layers_are_written_beside_those_of_stock_ones(scripts, tmp_path, capsys):
    out = tmp_path / "follow_stock.csv"
    run = ["--framework", "equinox", "--size", "smoke", "--steps", "2", "--out", str(out)]
    for options in (["--seeds", "2"], [], []):
        scripts("follow_stock").main([*run, *options])
    first, second = table(out)  # the same run again replaces its row
    assert float(first["median_spread_of_seeds"]) > float(first["max_difference"])
    assert second["median_spread_of_seeds"] == ""
    assert float(second["max_difference"]) < 1e-5
    assert "max_difference=" in capsys.readouterr().out


def test_points_are_named_once_and_hold_the_work_that_they_say(scripts):
    points = scripts("attention_points")
    found = {point.name: point for point in points.points()}
    assert len(found) == len(points.points()) == 30 + 8
    assert set(points.TUNED) <= {*found, "d16_causal_64"}
    assert set(points.WITH_XLA) <= set(found)
    for point in found.values():
        if point.kind == "grid":
            assert (point.batch * point.length, point.heads * point.head_dim) == (16384, 2048)
    packed = found["packed_16k"].documents()
    assert (len(packed), packed.sum(), packed.min() > 0) == (16, 16384, True)
    full, window = found["d128_causal_16k"], found["window_16k"]
    assert full.flops("forward") == 4 * 16 * 128 * 16384**2 / 2
    assert window.flops("forward+backward") == pytest.approx(3.5 * full.flops("forward") * 0.1211, rel=1e-3)


@pytest.mark.parametrize("name", ["packed_16k", "bias_grad_2k", "window_16k", "softcap_4k"])
def test_all_contenders_compute_what_the_reference_does(scripts, name):
    points, contenders = scripts("attention_points"), scripts("attention_contenders")
    point = next(point for point in points.points() if point.name == name).small()
    point = dataclasses.replace(point, length=64, heads=2, kv_heads=1, window=point.window and 8)
    x = points.arrays_of(point)
    exact = points.reference(point, x)
    wide = {name: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a for name, a in x.items()}
    for make in (contenders.ours, *([contenders.cudnn] if point.cap is None else [])):
        out, gradients = jax.jit(contenders.program(make(point), point, "forward+backward"))(wide)
        assert {"out", *gradients} == set(exact)
        for name, value in {"out": out, **gradients}.items():
            np.testing.assert_allclose(value, exact[name], rtol=1e-4, atol=1e-4, err_msg=name)


def test_ops_are_measured_beside_plain_expressions_that_compute_the_same(scripts, tmp_path):
    ops, out = scripts("ops"), tmp_path / "ops.csv"
    ops.main(["norm", "rotary", "--smoke", "--rounds", "2", "--no-tune", "--out", str(out)])
    rows = table(out)
    assert {row["contender"] for row in rows} == {"plain", "xla", "untuned"}  # there is no Triton on a CPU
    assert all(float(row["ms"]) > 0 and float(row["over_copy"]) > 0 for row in rows)
    for point in ops.points(smoke=True):
        arrays = ops.arrays_of(point)
        both = [step(*given) for step, given in (ops.lowered(point, f, arrays) for f in (point.ours, point.plain))]
        for ours, plain in zip(*map(jax.tree.leaves, both)):
            assert ours.shape == plain.shape
            assert abs(np.float32(ours) - np.float32(plain)).max() <= 0.05 * max(1, abs(np.float32(plain)).max())


def test_a_whole_step_is_timed_and_followed(scripts, tmp_path, capsys):
    train_step, out = scripts("train_step"), tmp_path / "train_step.csv"
    common = ["smoke", "--ways", "stock_xla", "ours", "--no-tune", "--out", str(out)]
    train_step.main([*common, "--rounds", "1", "--steps", "2"])
    rows = table(out)
    assert [row["way"] for row in rows] == ["stock_xla", "ours"]
    assert all(float(row["tokens_per_s"]) > 0 for row in rows)
    train_step.main([*common, "--follow", "3"])
    losses = table(tmp_path / "train_step_losses.csv")
    assert [row["step"] for row in losses] == ["0", "1", "2"]
    for name in ("ours", "stock_xla_rounded"):
        assert all(abs(float(row[name]) - float(row["stock_xla"])) < 0.05 for row in losses)
    scripts("loss_chart").main([str(tmp_path / "train_step_losses.csv"), "--out", str(tmp_path / "losses.png")])
    assert (tmp_path / "losses.png").stat().st_size > 10_000
