"""Every figure can be redrawn from a stored table alone, says what it shows, and reaches the disk whole."""

import warnings

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from synthetic_rows import synthetic_rows, synthetic_table

from specbench import plots
from specbench.bench.prompts import load_prompts, prompt_set_hash
from specbench.bench.records import load_runs, to_frame, write_table
from specbench.bench.summary import per_position_rates, summarize
from specbench.errors import DataError
from specbench.plot_style import FORMAT_COLOURS

PROMPTS = load_prompts()[::4]
# name -> (what the axis labels must say, value of the baseline drawn, along which axis)
FIGURES = {
    "acceptance": ("tokens / round", 1.0, "y"),
    "acceptance_by_category": ("tokens / round", 1.0, "x"),
    "per_position": ("accepted / proposed", 1.0, "y"),
    "throughput": ("tokens / s", None, "y"),
    "speedup": ("\u00d7", 1.0, "y"),
    "time_share": ("%", None, "y"),
}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Both formats and transformers' own loop, read back from files."""
    folder = tmp_path_factory.mktemp("runs")
    table = synthetic_table(prompts=PROMPTS)
    plain = table[(table.k == 0) & (table.verifier_format == "bf16")].assign(engine="transformers")
    plain[["draft_s", "verify_s", "other_s"]] = np.nan
    write_table(pd.concat([table, plain]), folder / "results.parquet")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return load_runs(folder)


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def texts(ax):
    return [text.get_text() for text in ax.texts]


def caption(ax):
    return next(text for text in ax.texts if text.get_gid() == "caption")


def levels(ax, axis):
    """Places of lines across the whole Axes."""
    across = "x" if axis == "y" else "y"
    lines = [line for line in ax.lines if list(getattr(line, f"get_{across}data")()) == [0, 1]]
    return [getattr(line, f"get_{axis}data")()[0] for line in lines]


@pytest.mark.parametrize("name", FIGURES)
def test_figure_says_what_it_shows(table, name):
    unit, baseline, axis = FIGURES[name]
    ax = getattr(plots, name)(table)
    assert unit in ax.get_xlabel() + ax.get_ylabel()
    said = caption(ax).get_text().replace("\u00a0", " ").replace("\n", " ")
    assert "n = " in said and "prompts" in said and "SmolLM2-135M-Instruct, cpu, bfloat16" in said
    assert ax.get_title(loc="left")
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels
    if name == "time_share":
        assert labels == ["draft", "verify", "other"] and {"bf16", "w4a16"} <= set(texts(ax))
    else:
        assert all(any(label.startswith(name) for label in labels) for name in ("bf16", "w4a16"))
        assert "95 % bootstrap" in said
    if baseline is not None:
        assert baseline in levels(ax, axis)


@pytest.mark.parametrize("name", FIGURES)
def test_nothing_overlaps_or_is_cut(table, name):
    check_places(getattr(plots, name)(table))


def check_places(ax):
    ax.figure.canvas.draw()
    page = ax.figure.bbox
    boxes = {"title": ax._left_title, "legend": ax.get_legend(), "caption": caption(ax), "x": ax.xaxis.label, "y": ax.yaxis.label}
    boxes = {what: artist.get_window_extent() for what, artist in boxes.items() if getattr(artist, "get_text", lambda: "x")().strip()}
    for what, box in boxes.items():
        assert page.x0 - 1 <= box.x0 and box.x1 <= page.x1 + 1 and page.y0 - 1 <= box.y0 and box.y1 <= page.y1 + 1, what
        for other, second in boxes.items():
            assert what == other or not box.overlaps(second), (what, other)
    assert boxes["legend"].y0 >= ax.get_window_extent().y1 - 1, "the legend stands above the data"


@pytest.mark.parametrize("name", FIGURES)
def test_given_axes_are_used_and_nothing_leaks(table, name, monkeypatch):
    monkeypatch.setattr(plt, "show", lambda *_, **__: pytest.fail("a figure was shown"))
    before = dict(matplotlib.rcParams)
    figure, axes = plt.subplots(1, 2)
    assert getattr(plots, name)(table, ax=axes[1]) is axes[1]
    assert not axes[0].lines and plt.get_fignums() == [figure.number]
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("name", FIGURES)
def test_files_are_written_and_the_same_each_time(table, name, tmp_path):
    ax = getattr(plots, name)(table)
    png, svg = plots.save(ax.figure, tmp_path / "deep" / name)
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and len(png.read_bytes()) > 10_000
    assert svg.read_text().rstrip().endswith("</svg>")
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == [f"{name}.png", f"{name}.svg"]
    again = plots.save(getattr(plots, name)(table), tmp_path / "again")
    assert [path.read_bytes() for path in again] == [png.read_bytes(), svg.read_bytes()]


def test_points_are_the_summary(table):
    ax = plots.acceptance(table)
    summary = summarize(table[table.engine == "specbench"])
    for name in ("bf16", "w4a16"):
        drawn = next(c for c in ax.containers if c.get_label() == name)
        expected = summary[(summary.verifier_format == name) & (summary.k > 0)]
        np.testing.assert_allclose(drawn.lines[0].get_ydata().astype(float), expected.mean_acceptance_length)
        np.testing.assert_allclose(drawn.lines[0].get_xdata().astype(float), expected.k, atol=0.2)
        assert matplotlib.colors.to_hex(drawn.lines[0].get_color()) == FORMAT_COLOURS[name].lower()
        low = [segment[0][1] for segment in drawn.lines[2][0].get_segments()]
        np.testing.assert_allclose(low, expected.mean_acceptance_length_low)


def test_speedups_and_baselines_of_throughput(table):
    ax = plots.throughput(table)
    summary = summarize(table)
    own = summary[(summary.engine == "specbench")]
    assert {f"{x:.2f}\u00d7" for x in own[own.k > 0].speedup} <= set(texts(ax))
    plain = own[own.k == 0].decode_tokens_per_second
    other = summary[summary.engine == "transformers"].decode_tokens_per_second
    np.testing.assert_allclose(sorted(levels(ax, "y")), sorted([*plain, *other]))
    assert any("transformers" in text.get_text() for text in ax.get_legend().get_texts())


def test_time_shares_fill_the_bar(table):
    ax = plots.time_share(table)
    heights = pd.Series([bar.get_height() for bar in ax.patches]).groupby([round(bar.get_x(), 6) for bar in ax.patches]).sum()
    assert len(heights) == 8
    np.testing.assert_allclose(heights, 100)


def test_choice_of_k(table):
    assert "k = 3" in plots.acceptance_by_category(table).get_title(loc="left")
    assert "k = 5" in plots.per_position(table).get_title(loc="left")
    ax = plots.per_position(table, k=1)
    drawn = next(c for c in ax.containers if c.get_label() == "bf16, unconditional")
    rates = per_position_rates(table[(table.k == 1) & (table.verifier_format == "bf16")])
    np.testing.assert_allclose(drawn.lines[0].get_ydata().astype(float), rates.unconditional)
    with pytest.raises(DataError, match=r"k is 2, .* \[1, 3, 5\]"):
        plots.per_position(table, k=2)


def test_one_prompt_has_no_interval_but_a_point():
    table = to_frame(synthetic_rows(prompts=PROMPTS[:1], ks=(0, 2)))
    for name in FIGURES:
        assert getattr(plots, name)(table).has_data()
    drawn = plots.acceptance(table).containers[0]
    assert np.ptp([point[1] for point in drawn.lines[2][0].get_segments()[0]]) == 0


def labels_of(*verifiers):
    """Legend labels of a figure of (verifier, format) pairs."""
    tables = [
        to_frame(synthetic_rows("bf16", prompts=PROMPTS[:2], run_id=f"r{i}")).assign(verifier=verifier, verifier_format=name)
        for i, (verifier, name) in enumerate(verifiers)
    ]
    ax = plots.acceptance(pd.concat(tables))
    return {c.get_label(): matplotlib.colors.to_hex(c.lines[0].get_color()) for c in ax.containers}, caption(ax).get_text()


def test_variants_of_one_model_are_told_apart_by_format():
    colours, said = labels_of(("org/Qwen3-8B", "bf16"), ("other/Qwen3-8B-quantized.w4a16", "w4a16"), ("/a/b/Qwen3-8B-x", "w3a16"))
    assert set(colours) == {"bf16", "w4a16", "w3a16"} and len(set(colours.values())) == 3
    assert colours["bf16"] == FORMAT_COLOURS["bf16"].lower() and "Qwen3-8B, cpu" in said.replace("\n", " ")


def test_other_models_and_twice_the_same_format_are_named():
    colours, said = labels_of(("org/Qwen3-8B", "bf16"), ("org/Llama-3.1-8B", "w4a16"))
    assert set(colours) == {"Qwen3-8B, bf16", "Llama-3.1-8B, w4a16"} and "Qwen" not in said
    colours, _ = labels_of(("org/model", "bf16"), ("org/model-tuned", "bf16"))
    assert set(colours) == {"model, bf16", "model-tuned, bf16"} and len(set(colours.values())) == 1


def conditions():
    """One format in two batch sizes and at two temperatures."""
    plain = to_frame(synthetic_rows("w4a16", prompts=PROMPTS))
    batched = to_frame(synthetic_rows("w4a16", prompts=PROMPTS, seed=3, run_id="b")).assign(batch_size=4)
    batched["batch"] = range(len(batched))
    return pd.concat([plain, batched, batched.assign(temperature=0.7, seed=1)])


@pytest.mark.parametrize("name", FIGURES)
def test_conditions_are_series_of_their_own_and_fit(name):
    ax = getattr(plots, name)(conditions())
    if name == "time_share":
        assert {"w4a16, T = 0, batch 1", "w4a16, T = 0, batch 4", "w4a16, T = 0.7, batch 4"} <= set(texts(ax))
    else:
        labels = [text.get_text() for text in ax.get_legend().get_texts()]
        assert {"w4a16, T = 0.7, batch 4"} <= {label.removesuffix(", conditional") for label in labels}
    check_places(ax)


@pytest.mark.parametrize("name", FIGURES)
def test_nothing_to_draw_is_said(name):
    rows = to_frame(synthetic_rows(prompts=PROMPTS[:1], ks=(0,)))
    assert prompt_set_hash(PROMPTS[:1]) == rows.prompt_set_hash[0]
    failed = rows.assign(status="failed")
    for table in (failed, rows.iloc[:0]) if name in ("throughput", "time_share") else (rows, failed, rows.iloc[:0]):
        with pytest.raises(DataError, match="nothing to draw"):
            getattr(plots, name)(table)
        assert not plt.get_fignums(), "no half figure is left for a notebook to show"
