"""The picture of a replay's course."""

import dataclasses

import numpy as np
import pytest
from replays import RESULT, made_up_run, made_up_trace

from swa_jax.viz import as_png, use_over_time

PNG = b"\x89PNG\r\n\x1a\n"


def labels(figure):
    return [[text.get_text() for text in axes.get_legend().get_texts()] for axes in figure.axes]


def drawn(axes):
    return np.asarray(axes.lines[0].get_ydata()).tolist()


def test_panels_of_a_model_with_both_kinds_of_layer():
    figure = use_over_time(made_up_run())
    assert labels(figure) == [
        ["in use", "peak, 64", "pool, 100"],
        ["in use", "peak, 22", "pool, 100"],
        ["full layers", "SWA layers", "without SWA,\npeak 4 GiB"],
        ["running", "waiting"],
    ]
    full, swa, memory, requests = figure.axes
    assert drawn(full) == [60, 30, 0]
    assert drawn(swa) == [20, 10, 0]
    assert drawn(requests) == [2, 1, 0]
    # 60 pages of 16 tokens, 48 KiB a token where all layers keep it
    assert drawn(memory)[0] == pytest.approx(60 * 16 * 48 / 2**20)


def test_panels_of_a_model_without_full_layers():
    figure = use_over_time(made_up_run("mistral-7b-v0.1"))
    assert labels(figure) == [
        ["in use", "peak, 22", "pool, 500"],
        ["SWA layers", "without SWA,\npeak 4 GiB"],
        ["running", "waiting"],
    ]
    assert drawn(figure.axes[1]) == [4, 4]


@pytest.mark.parametrize("samples", [0, 1])
def test_png_of_any_number_of_samples(samples):
    run = made_up_run(timeline=RESULT.timeline[:samples])
    assert as_png(use_over_time(run)).startswith(PNG)


@pytest.mark.parametrize("name", [r"\frac$", "\x1b\udcff"])
def test_any_name_can_be_a_title(name):
    run = dataclasses.replace(made_up_run(), trace=made_up_trace(name=name))
    assert as_png(use_over_time(run)).startswith(PNG)
