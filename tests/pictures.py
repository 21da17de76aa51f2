"""Looking into pictures: what was drawn, where, and in which colour."""

import io

import numpy as np
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_rgb
from PIL import Image, ImageSequence

from swa_jax.viz import as_png


def cells(axes):
    """How many outlines there are of each label."""
    found = {}
    for part in axes.collections:
        label = str(part.get_label())
        if isinstance(part, PolyCollection) and not label.startswith("_"):
            found[label] = found.get(label, 0) + len(part.get_paths())
    return found


def lines(axes, label):
    """The segments of the lines with this label."""
    found = [
        part.get_segments()
        for part in axes.collections
        if isinstance(part, LineCollection) and part.get_label() == label
    ]
    return [segment for segments in found for segment in segments]


def texts(axes):
    return [text.get_text() for text in axes.texts]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def frames_of(file):
    """uint8[frames, height, width, 3], and milliseconds of a frame."""
    with Image.open(file) as image:
        every = [np.asarray(frame.convert("RGB")) for frame in ImageSequence.all_frames(image)]
        return np.stack(every), image.info["duration"]


def pixels(figure):
    """uint8[height, width, 3] as the PNG file has them."""
    return np.asarray(Image.open(io.BytesIO(as_png(figure))).convert("RGB"))


def colour_at(figure, image, axes, x, y):
    """The pixel at a point of the axes."""
    column, row = axes.transData.transform((x, y))
    return tuple(image[round(image.shape[0] - row), round(column)].tolist())


def rgb(colour):
    return tuple(round(255 * part) for part in to_rgb(colour))


def share_of(image, colour):
    """The part of all pixels that have this colour."""
    return float((image == np.array(rgb(colour))).all(axis=-1).mean())


def overlaps(figure):
    """Pairs of texts that lie on each other, and texts that leave the figure."""
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    every = [text for axes in figure.axes for text in axes.texts] + figure.texts
    every += [text for box in figure.legends for text in box.get_texts()]
    drawn = [(text.get_text(), text.get_window_extent(renderer)) for text in every]
    drawn = [(text, box) for text, box in drawn if text.strip()]
    width, height = figure.canvas.get_width_height()
    wrong = [
        text for text, box in drawn if box.x0 < 0 or box.y0 < 0 or box.x1 > width or box.y1 > height
    ]
    for place, (text, box) in enumerate(drawn):
        wrong += [
            (text, other)
            for other, beside in drawn[place + 1 :]
            if min(box.x1, beside.x1) - max(box.x0, beside.x0) > 1
            and min(box.y1, beside.y1) - max(box.y0, beside.y0) > 1
        ]
    return wrong
