"""The film of a moving window."""

import itertools

import numpy as np
import pytest
from pictures import frames_of, overlaps, texts

import swa_jax as swa
from swa_jax.viz import as_gif, page_map, save_animation, window_animation
from swa_jax.viz.examples import moving_window


@pytest.fixture(scope="module")
def moments():
    return moving_window(steps=8)


def film(moments, **options):
    states, owners = [m.state for m in moments], [m.owners for m in moments]
    captions = [m.caption for m in moments]
    return window_animation(states, owners, captions=captions, **options)


def test_the_example_keeps_the_laws_and_moves_its_windows(moments):
    for moment in moments:
        swa.check(moment.state)
        assert not any(swa.faults(moment.state).values())
    left = [moment for moment in moments if "left a window" in moment.caption]
    assert left
    assert any(moment.caption.startswith("B is done") for moment in moments)
    assert any(moment.caption.startswith("C prefills") for moment in moments)
    window_pages = 1 + 8 // 4
    for moment in moments:
        for slots in moment.owners.values():
            live = np.unique(np.asarray(swa.translate_full_to_swa(moment.state, slots)) // 4)
            # a prompt that was just granted is whole until its first token
            assert np.count_nonzero(live) <= window_pages or "prefill" in moment.caption


def test_a_gif_has_a_frame_for_each_state_and_each_differs(moments, tmp_path):
    animation = film(moments[:4], frame_ms=250)
    save_animation(animation, tmp_path / "window.gif")
    frames, duration = frames_of(tmp_path / "window.gif")
    width, height = animation.picture.get_size_inches() * animation.picture.dpi
    assert frames.shape == (4, int(height), int(width), 3)
    assert duration == 250
    for one, other in itertools.pairwise(frames):
        changed = (one != other).any(axis=-1)
        assert 0 < changed.mean() < 0.2  # nothing jumps


def test_frames_can_be_read(moments):
    moments = [moments[0], moments[-1]]
    animation = film(moments)
    figure = animation.picture
    for frame, moment in enumerate(moments):
        animation.draw(frame)
        still = texts(page_map(moment.state, moment.owners).axes[0])
        assert texts(figure.axes[0]) == [*still, moment.caption]
        assert not overlaps(figure)
    assert as_gif(animation).startswith(b"GIF8")


def test_without_captions_frames_are_counted(moments):
    animation = window_animation([m.state for m in moments[:2]])
    animation.draw(1)
    assert "2 of 2" in texts(animation.picture.axes[0])
    assert "<img" in animation._repr_html_()


def test_what_cannot_be_shown_is_refused(moments, tmp_path):
    states = [moment.state for moment in moments[:2]]
    with pytest.raises(ValueError, match="at least one state"):
        window_animation([])
    with pytest.raises(ValueError, match="one configuration"):
        window_animation([states[0], swa.init(swa.PoolConfig(8, 8))])
    with pytest.raises(ValueError, match="owners must be one for each of the 2 states, got 1"):
        window_animation(states, [{}])
    with pytest.raises(ValueError, match="captions must be one for each of 2 states, got 1"):
        window_animation(states, captions=["a"])
    with pytest.raises(ValueError, match="frame_ms must be a positive integer"):
        window_animation(states, frame_ms=0)
    animation = window_animation(states)
    with pytest.raises(ValueError, match=r"must end in \.gif"):
        save_animation(animation, tmp_path / "window.mp4")
    with pytest.raises(ValueError, match="cannot be written"):
        save_animation(animation, tmp_path / "no" / "window.gif")
    save_animation(animation, tmp_path / "window.gif")  # one that is never drawn warns


def test_rings_have_owners_in_a_film_too():
    config = swa.PoolConfig.request_ring(64, 3, page_size=4, sliding_window=8)
    state, grant = swa.ring_acquire(swa.init(config), [0, 0])
    animation = window_animation([state, state], rings=[{}, {"one": grant.rings[:1]}])
    animation.draw(0)
    assert "A" not in texts(animation.picture.axes[0])
    animation.draw(1)
    assert texts(animation.picture.axes[0]).count("A") == 1
    as_gif(animation)
