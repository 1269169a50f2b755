"""A figure told in words has the figure's numbers."""

import json

import numpy as np
import plotly.graph_objects as go
import pytest

from eagle3lib.report.spoken import describe_figure


def drawn(*traces, title="Acceptance", axis="share"):
    return go.Figure(traces).update_layout(title=title, yaxis_title=axis)


@pytest.mark.parametrize(
    ("trace", "words"),
    [
        (go.Scatter(x=[1, 2, 3], y=[0.5, 9, 0.25], name="a"), "a: 0.5 at 1 to 0.25 at 3"),
        (go.Bar(x=["only"], y=[12345.6]), "12,346 at only"),
        (go.Bar(x=[7, 8], y=["one", "two"], orientation="h"), "7 at one to 8 at two"),
        (go.Scatter(x=[1, 2, 3], y=[None, 4, float("nan")]), "4 at 2"),
        (go.Heatmap(z=[[1, 2, None], [3, 4, 5]]), "2 rows of 3, from 1 to 5"),
    ],
    ids=["curve", "one bar", "lying bars", "gaps", "colours"],
)
def test_every_kind_of_series_is_told(trace, words):
    assert describe_figure(drawn(trace)) == f"Acceptance, share. {words}"


def test_a_notebooks_packed_arrays_are_told_as_plain_lists_are():
    """Numpy's arrays are kept as base64 by plotly 6 and later."""
    steps, colours = np.arange(1, 4), np.arange(6.0).reshape(2, 3)
    figure = drawn(go.Scatter(x=steps, y=steps / 4, name="a"), go.Heatmap(z=colours))
    kept = json.loads(figure.to_json())
    assert "bdata" in json.dumps(kept)
    told = describe_figure(kept)
    assert told == describe_figure(figure)
    assert told.endswith("a: 0.25 at 1 to 0.75 at 3; 2 rows of 3, from 0 to 5")


def test_many_series_are_counted_and_markup_is_not_spoken():
    lines = [go.Scatter(x=[1], y=[i], name=f"<b>{i}</b>") for i in range(11)]
    told = describe_figure(drawn(*lines, title="One<br>two"))
    assert told.startswith("One two, share. 0: 0 at 1; ") and told.endswith("; and 3 more")


def test_an_empty_figure_is_told_too():
    assert describe_figure(go.Figure()).startswith("A figure")
