"""Pages of papers: compared numbers, and self-contained charts."""

from xml.etree import ElementTree

import pytest

from tideserve.cli.papers.bucketserve import target_ratios
from tideserve.cli.papers.bucketserve_runs import FIRST_S, Served, attained_load
from tideserve.cli.papers.page import Comparison, PaperPage, ratio, value_text
from tideserve.cli.papers.svg import HEIGHT, TOP, WIDTH, BarChart, LineChart, round_ticks

SVG = "svg"


def drawn(chart: LineChart | BarChart) -> ElementTree.Element:
    figure = ElementTree.fromstring(chart.svg())
    (element,) = figure.iter(SVG)
    return element


def test_a_line_has_a_point_for_each_value_and_higher_values_are_higher() -> None:
    chart = LineChart("a < b", "x", "y", {"up": [(0, 0), (10, 5)], "flat": [(0, 2)]}, guide=4)
    lines = drawn(chart).findall("polyline")
    assert [len(line.get("points", "").split()) for line in lines] == [2, 1]
    (_, low), (_, high) = (
        tuple(map(float, point.split(","))) for point in lines[0].get("points", "").split()
    )
    assert TOP <= high < low <= HEIGHT
    assert sum(line.get("stroke-dasharray") is not None for line in drawn(chart).iter("line")) == 1


def test_bars_are_as_high_as_their_values_and_missing_values_have_none() -> None:
    chart = BarChart("t", "y", ["a", "b"], {"one": [1.0, 2.0], "other": [None, 4.0]})
    bars = [bar for bar in drawn(chart).iter("rect") if bar.find("title") is not None]
    heights = [float(bar.get("height", "")) for bar in bars]
    assert heights[1] == pytest.approx(2 * heights[0], abs=0.2)
    assert heights[2] == pytest.approx(4 * heights[0], abs=0.4)
    assert len(heights) == 3


@pytest.mark.parametrize(("label", "heights"), [("a", 1), ("a long label", 2)])
def test_labels_that_would_overlap_alternate_between_heights(label: str, heights: int) -> None:
    groups = [f"{label} {number}" for number in range(6)]
    texts = drawn(BarChart("t", "y", groups, {"one": [1.0] * 6})).iter("text")
    assert len({text.get("y") for text in texts if text.text in groups}) == heights


def test_a_long_legend_has_several_rows_within_the_chart() -> None:
    names = [f"a rather long name {number}" for number in range(5)]
    chart = drawn(LineChart("t", "x", "y", {name: [(0.0, 1.0)] for name in names}))
    places = {t.text: t for t in chart.iter("text") if t.text in names}
    heights = {float(text.get("y", "")) for text in places.values()}
    assert len(places) == 5 and len(heights) == 3
    *_, height = map(float, chart.get("viewBox", "").split())
    assert max(heights) < height
    assert all(float(text.get("x", "")) + 6 * len(name) < WIDTH for name, text in places.items())


def test_charts_without_values_are_drawn() -> None:
    assert drawn(LineChart("t", "x", "y", {"none": []})) is not None
    assert drawn(BarChart("t", "y", [], {})) is not None


def test_a_page_has_its_numbers_and_escapes_text() -> None:
    rows = [
        Comparison("Figure 1", "gain", 2.0, 2.2),
        Comparison("Figure 2", "a < b", 2.0, 3.0, note="because"),
        Comparison("Figure 3", "unknown", None, 0.5, "%"),
    ]
    html = PaperPage("T", ["setting"], rows, [], ["left"]).html()
    assert "a &lt; b" in html and "because" in html and "left" in html
    assert html.count("<td>yes</td>") == html.count("<td>–</td>") == 1
    assert "2.2 ×" in html and "50.0%" in html
    assert "http" not in html, "it needs no other file"


def test_values_near_the_papers_count_as_reproduced() -> None:
    near = [Comparison("", "", 2.0, ours).near for ours in (1.6, 2.4, 1.59, 2.41, None)]
    assert near == [True, True, False, False, False]
    assert Comparison("", "", 0.01, 0.001, at_most=True).near
    assert not Comparison("", "", 0.01, 0.011, at_most=True).near


def test_values_are_formatted() -> None:
    assert value_text(None, "×") == "–"
    assert value_text(0.8166, "%") == "81.7%"
    assert [value_text(value, "%") for value in (0, 0.001, 0.0000342)] == [
        "0.0%",
        "0.1%",
        "0.0034%",
    ]
    assert value_text(1234.5, "") == "1,234"
    assert ratio(3.0, 0.0) is None and ratio(None, 1.0) is None and ratio(3.0, 2.0) == 1.5


def test_the_load_at_which_targets_are_met_is_between_the_points() -> None:
    points = [Served(rate, rate, share, 0, 0) for rate, share in ((1, 1.0), (2, 0.9), (3, 0.7))]
    assert attained_load(points) == pytest.approx(2.5)
    assert attained_load(points[:2]) == 2
    assert attained_load(points[2:]) is None


@pytest.mark.parametrize(
    ("least", "most", "ticks"),
    [
        (32, 1024, [250, 500, 750, 1000]),
        (1, 16, [5, 10, 15]),
        (0.2, 1.2, [0.25, 0.5, 0.75, 1.0]),
        (0, 100, [0, 25, 50, 75, 100]),
        (7, 7, [7]),
        (7.5, 7.5, [7.5]),
    ],
)
def test_ticks_are_round(least: float, most: float, ticks: list[float]) -> None:
    assert round_ticks(least, most) == pytest.approx(ticks)


def test_loads_are_compared_by_target_of_the_first_token() -> None:
    def points(*shares: float) -> list[Served]:
        within = [[0.0, *[share] * (len(FIRST_S) - 1)] for share in shares]
        return [Served(n + 1, 0, 0, 0, 0, of) for n, of in enumerate(within)]

    loads = {"BucketServe": points(1.0, 0.9, 0.7), "DistServe-like": points(0.8, 0.0, 0.0)}
    ratios = target_ratios(loads)
    assert [target_s for target_s, _ in ratios] == list(FIRST_S[1:]), "the first is never met"
    assert [value for _, value in ratios] == pytest.approx([2.5] * (len(FIRST_S) - 1))
