"""Pictures of a run, by matplotlib, which is optional."""

import numpy as np


class PlotsError(RuntimeError):
    """A picture that cannot be drawn, and what to install."""


def equity_png(path, date, curves):
    """Draw equity curves over time.

    Args:
        path: the PNG to write.
        date: time of each point in seconds since 1970-01-01 UTC.
        curves: {label: equity at each point}, 1 at the start.

    Raises:
        PlotsError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise PlotsError("equity.png needs matplotlib: pip install lowgpu[plots]") from None
    # A figure with its own canvas: pyplot would choose a backend for the whole process.
    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    when = np.asarray(date).astype("datetime64[s]")
    for label, equity in curves.items():
        axes.plot(when, equity, label=label, linewidth=1.2)
    axes.axhline(1, color="0.7", linewidth=0.8)
    axes.set_ylabel("equity, 1 at the start")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, format="png")
