"""Pictures of pools, of a replay's course and of the prefix tree. Needs the extra `plot`.

The figures are matplotlib's; a notebook shows them as they are. Colours are those that colour-blind
readers can tell apart, and nothing is told by colour alone.
"""

try:
    from swa_jax.viz.animation import as_gif, save_animation, window_animation
    from swa_jax.viz.map_figure import page_map
    from swa_jax.viz.over_time import use_over_time
    from swa_jax.viz.picture import as_png
    from swa_jax.viz.tree_figure import prefix_tree
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "matplotlib":
        raise
    raise ImportError('swa_jax.viz needs matplotlib: pip install "swa-jax[plot]"') from error

__all__ = (
    "as_gif",
    "as_png",
    "page_map",
    "prefix_tree",
    "save_animation",
    "use_over_time",
    "window_animation",
)
