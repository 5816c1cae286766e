"""Pictures of the docs: each is drawn by its script from its table, and is readable in both themes."""

import re
from pathlib import Path

import pytest

from ejkernel_ops import AttentionConfig, AutotuningResult, BwdParams, Entry, FwdParams, Trial, device_fingerprint

matplotlib = pytest.importorskip("matplotlib")
pytestmark = pytest.mark.once

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)#]+\.(?:svg|png))\)")
SHOWN = {  # by each picture's script
    "attention_chart": ["forward+backward, head_dim 256", "tokamax, Triton", "ours, chosen"],
    "loss_chart": ["stock, float32", "ours", "less the first"],
    "memory_chart": ["gpt2-small", "sequences of 1024 tokens in a batch", "ours", "GiB at the peak"],
    "step_chart": [
        "NVIDIA H200, jax 0.11.2",
        "gpt2-small: time of a step",
        "stock, XLA attention",
        "llama-1b: memory at the peak",
    ],
    "tuning_chart": ["flash_attention_bwd on XLA, ms", "queries of a block", "8192 tokens"],
}


@pytest.fixture
def text_of(scripts, monkeypatch):
    """The words of an SVG that a script draws."""
    monkeypatch.setitem(scripts("charts").STYLE, "svg.fonttype", "none")

    def drawn(script, *arguments):
        picture = Path(arguments[-1])
        scripts(script).main([str(argument) for argument in arguments])
        svg = picture.read_text()
        assert svg.startswith("<?xml")
        return svg

    return drawn


def test_each_picture_has_a_script_and_is_shown_on_a_page(scripts):
    drawn = scripts("pictures").SCRIPTS
    assert set(drawn) == set(SHOWN)
    shown = {(page.parent / link).resolve() for page in PAGES for link in LINK.findall(page.read_text())}
    assert {ROOT / "docs" / "pictures" / picture for picture in drawn.values()} <= shown


@pytest.mark.parametrize("script", SHOWN)
def test_a_picture_is_drawn_from_its_table_and_says_where_that_was_measured(text_of, tmp_path, script):
    svg = text_of(script, "--out", tmp_path / "picture.svg")
    for part in SHOWN[script]:
        assert part in svg, part
    assert re.search(r": (NVIDIA [\w ]+|cpu), jax \d+\.\d+\.\d+, 20\d\d-\d\d-\d\d<", svg)


def test_all_pictures_are_drawn_at_once_and_again_with_the_same_bytes(scripts, tmp_path):
    pictures = scripts("pictures")
    for folder in ("first", "second"):
        pictures.main(["--folder", str(tmp_path / folder)])
    for name in pictures.SCRIPTS.values():
        first, second = ((tmp_path / folder / name).read_bytes() for folder in ("first", "second"))
        assert first == second, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pictures_that_a_page_shows_exist(page):
    for link in LINK.findall(page.read_text()):
        assert (page.parent / link).is_file(), f"{page.name} shows {link}"


def contrast(color, page):
    """How far two colours are apart in lightness, by the Web Content Accessibility Guidelines 2.2."""

    def luminance(color):
        channels = matplotlib.colors.to_rgb(color)
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear))

    high, low = sorted((luminance(color), luminance(page)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("page", ["#ffffff", "#1e2129"])
def test_text_and_lines_stand_out_from_a_white_page_and_from_a_dark_one(scripts, page):
    import matplotlib.colors  # noqa: F401

    charts = scripts("charts")
    assert contrast(charts.TEXT, page) >= 3.8
    for name, series in charts.SERIES.items():
        assert contrast(series.color, page) >= 2.9, name


def test_ways_that_meet_in_one_picture_differ_in_more_than_colour(scripts):
    charts, contenders = scripts("charts"), scripts("attention_chart").CONTENDERS
    for together in (contenders, ("stock_cudnn", "stock_cudnn_rounded", "stock_xla", "swapped", "ours", "ours_tuned")):
        styles = [(charts.SERIES[name].line, charts.SERIES[name].marker) for name in together]
        assert len(set(styles)) == len(styles)


def saved_result(path):
    """A result of attention in both directions, with the times of four pairs of blocks each."""

    def entry(op, side, params):
        configs = {
            (q, kv): AttentionConfig(backend="xla", **{side: params(q_blocksize=q, kv_blocksize=kv)})
            for q in (64, 128)
            for kv in (32, 256)
        }
        trials = tuple(Trial(cfg, "timed", ms=q / 16 + kv / 32) for (q, kv), cfg in configs.items())
        cfg = configs[64, 32]
        return Entry(f"{op}@v1", "0123456789abcdef", cfg, shapes="float32[1,256,2,8] ...", ms=5.0, trials=trials)

    entries = entry("flash_attention", "fwd", FwdParams), entry("flash_attention_bwd", "bwd", BwdParams)
    AutotuningResult(device_fingerprint(), entries, versions={"jax": "9.9.9"}).save(path)


def test_a_landscape_of_a_saved_result_shows_the_times_of_its_trials(text_of, tmp_path):
    saved_result(tmp_path / "tuned.json")
    svg = text_of("tuning_chart", tmp_path / "tuned.json", "--out", tmp_path / "picture.svg")
    for part in ("flash_attention_bwd on xla, ms", "float32[1,256,2,8]", "jax 9.9.9", ">5<", ">9<", ">12<", ">16<"):
        assert part in svg, part


def test_a_result_without_attention_is_refused(text_of, tmp_path):
    AutotuningResult(device_fingerprint(), ()).save(tmp_path / "tuned.json")
    with pytest.raises(SystemExit, match="no call of attention whose blocks were timed"):
        text_of("tuning_chart", tmp_path / "tuned.json", "--out", tmp_path / "picture.svg")


def test_memory_is_that_of_programs_that_are_never_run(scripts, tmp_path):
    out = tmp_path / "memory.csv"
    scripts("memory").main(["smoke", "--ways", "stock_xla", "ours", "--batches", "2", "8", "--out", str(out)])
    rows = scripts("rows").read_rows(out)
    assert [(row["way"], row["batch"]) for row in rows] == [(w, b) for w in ("stock_xla", "ours") for b in ("2", "8")]
    small, large = (float(row["temporary_gib"]) for row in rows[:2])
    assert large > 2 * small > 0
    assert all(float(row["peak_gib"]) > float(row["temporary_gib"]) for row in rows)
