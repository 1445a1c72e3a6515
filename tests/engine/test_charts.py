"""Charts: valid SVG that holds the right numbers, in bounded size, with words for those who do not see it."""

import re
from xml.etree import ElementTree

import pytest

from engine.telemetry import MOST_KEPT, Series
from engine.web import charts

MIB = 2**20
STATS = {
    "seconds": 10.0,
    "stages": [
        {"name": "text", "started": 0.0, "seconds": 0.05, "peaks": {}},
        {"name": "denoise", "started": 1.0, "seconds": 6.0, "peaks": {}},
        {"name": "decode", "started": 7.5, "seconds": 2.5, "peaks": {}},
    ],
    "memory": {
        "seconds": [0.0, 2.5, 5.0, 10.0],
        "host": [100 * MIB, 200 * MIB, 400 * MIB, 300 * MIB],
        "cuda:0": [None, 1024 * MIB, 2048 * MIB, 512 * MIB],
    },
    "step_seconds": [1.0, 0.5, 0.25],
}


def pictures(html):
    """The SVG parts of a fragment, parsed strictly, by their title."""
    found = [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", html, re.DOTALL)]
    return {svg.find("title").text: svg for svg in found}


def rects(svg, name):
    return [rect for rect in svg.iter("rect") if rect.get("class") == name]


def test_the_stage_bar_is_to_scale_and_says_the_shares():
    html = charts.figures(STATS, "job")
    bar = pictures(html)["Time by stage"]
    (denoise,) = rects(bar, "denoise")
    assert (float(denoise.get("x")), float(denoise.get("width"))) == (100.0, 600.0)
    (decode,) = rects(bar, "decode")
    assert (float(decode.get("x")), float(decode.get("width"))) == (750.0, 250.0)
    assert bar.find("desc").text == "Prompt 50 ms, under 1 %; Denoise 6.0 s, 60 %; Decode 2.5 s, 25 %"


def test_every_device_has_a_lane_over_the_same_seconds_and_bands():
    drawn = pictures(charts.figures(STATS, "job"))
    host, cuda = drawn["Memory over time: This process on the host"], drawn["Memory over time: cuda:0"]
    points = [tuple(map(float, pair.split(","))) for pair in host.find("polyline").get("points").split()]
    assert [x for x, _ in points] == [0, 250, 500, 1000]
    heights = [charts.HEIGHT - y for _, y in points]
    assert [height / heights[2] for height in heights] == pytest.approx([0.25, 0.5, 1, 0.75], abs=0.01)
    assert len(cuda.find("polyline").get("points").split()) == 3
    for lane in (host, cuda):
        assert [float(rects(lane, "denoise")[0].get(key)) for key in ("x", "width")] == [100, 600]
    assert host.find("desc").text == "From 100.0 MiB at the start to 300.0 MiB; the most is 400.0 MiB."
    assert "2.0 GiB" in cuda.find("desc").text


def test_steps_are_bars_and_those_to_come_have_their_place():
    bars = rects(pictures(charts.figures(STATS, "job", steps=4))["Seconds of each step"], "denoise")
    assert [float(bar.get("x")) for bar in bars] == [0, 250, 500]
    assert [float(bar.get("height")) for bar in bars] == [100, 50, 25]
    assert all(float(bar.get("y")) + float(bar.get("height")) == charts.HEIGHT for bar in bars)


def test_a_stage_that_runs_lasts_until_now():
    running = STATS | {"stages": [{"name": "denoise", "started": 4.0, "seconds": None, "peaks": {}}]}
    (denoise,) = rects(pictures(charts.figures(running, "job"))["Time by stage"], "denoise")
    assert (float(denoise.get("x")), float(denoise.get("width"))) == (400, 600)


@pytest.mark.parametrize("stats", [{}, {"seconds": 0.0, "stages": []}, {"seconds": 1.0}])
def test_nothing_is_drawn_of_nothing(stats):
    assert charts.figures(stats, "job") == ""


def test_a_job_of_an_older_version_still_has_its_stage_bar():
    html = charts.figures({key: STATS[key] for key in ("seconds", "stages")}, "job")
    assert list(pictures(html)) == ["Time by stage"]


def test_ids_are_unique_and_every_picture_is_labelled():
    html = charts.figures(STATS, "one") + charts.figures(STATS, "two")
    ids = re.findall(r' id="([^"]+)"', html)
    assert len(ids) == len(set(ids)) == 16
    assert re.findall(r'aria-labelledby="([^"]+)"', html) == [
        f"{a} {b}" for a, b in zip(ids[::2], ids[1::2], strict=True)
    ]


def test_names_are_escaped():
    evil = STATS | {"memory": {"seconds": [0, 1], "<script>": [1, 2]}}
    html = charts.figures(evil, '"><script>')
    assert "<script>" not in html
    assert "Memory over time: <script>" in pictures(html)


def test_a_long_request_keeps_a_bounded_number_of_samples_evenly():
    series = Series()
    for tick in range(40_000):
        series.add(0.2 * tick, {"host": tick})
    kept = series.to_json()
    assert MOST_KEPT / 2 <= len(kept["seconds"]) <= MOST_KEPT and len(kept["host"]) == len(kept["seconds"])
    gaps = [b - a for a, b in zip(kept["seconds"], kept["seconds"][1:], strict=False)]
    assert max(gaps) < 2.5 * min(gaps) and kept["seconds"][-1] > 0.98 * 8000
    assert kept["host"] == pytest.approx([5 * moment for moment in kept["seconds"]], abs=0.1)


def test_a_device_that_came_later_has_gaps_before():
    series = Series()
    series.add(0.0, {"host": 1})
    series.add(0.1, {"host": 9})
    series.add(1.0, {"host": 2, "cuda:0": 5})
    assert series.to_json() == {"seconds": [0.0, 1.0], "cuda:0": [None, 5], "host": [1, 2]}


def test_every_device_has_a_lane_of_what_it_did_and_waited():
    lane = {"name": "rank 1 (cuda:1) <b>", "busy_seconds": 4.0, "waiting_share": 0.25, "bytes_sent": 2**20}
    lane["spans"] = [["start", 0.0, 0.5], ["denoise", 1.0, 4.0], ["decode", 4.0, 5.0]]
    stages = [{"name": "denoise", "started": 1.0, "seconds": 3.0, "peaks": {}}]
    drawn = charts.figures({"seconds": 10.0, "stages": stages, "devices": [lane]}, "job")
    assert "25% of it waiting for others; sent 1.0 MiB" in drawn and "<b>rank 1 (cuda:1) &lt;b&gt;</b>" in drawn
    bar = drawn[drawn.index("job-busy-") :]
    assert 'class="denoise" x="100.0" width="300.0"' in bar and 'class="decode" x="400.0" width="100.0"' in bar
    assert 'class="start"' not in drawn
    ids = [part.split('"')[0] for part in drawn.split(' id="')[1:]]
    assert all(" " not in name for name in ids) and len(set(ids)) == len(ids)
    assert "job-busy-" not in charts.figures({"seconds": 10.0, "stages": stages, "devices": []}, "job")
