"""The report, as data and as a page."""

import re
from xml.etree import ElementTree

from penstock.quantizing.report import curve, report_of_layers

POINT = {
    "note": "a <b>",
    "time": 0.5,
    "size": 0.25,
    "error": 0.01,
    "error_held_out": 0.02,
    "error_limit": 0.03,
}
DOCUMENT = {
    "model": "m.onnx",
    "goal": {"max_error": 0.05, "time": None, "size": None},
    "samples": {"chosen_by": 6, "held_out": 2},
    "ms_before": 2.0,
    "ms_after": 1.0,
    "time": 0.5,
    "size": 0.25,
    "error": 0.02,
    "error_limit": 0.03,
    "outputs": [{"name": "y", "rms": 0.02, "largest": 0.1}],
    "clipping": "entropy",
    "learned": {"layers": 3, "seconds": 1.25},
    "layers": [
        {
            "name": "c<1>",
            "operation": "Conv",
            "weights": [8, 3, 3, 3],
            "type": "static",
            "ms_before": 2.0,
            "ms_after": 1.0,
            "error": None,
            "why": "faster",
        }
    ],
    "points": [{**POINT, "chosen": True}, {**POINT, "time": 1.0, "chosen": False}],
}


def test_page_shows_layers_and_points_and_escapes_names():
    text = report_of_layers(DOCUMENT)
    assert "c&lt;1&gt;" in text and "<b>" not in text
    assert "a &lt;b&gt; (chosen)" in text
    assert "of 3 layers, in 1.2 s" in text
    assert "<td>0.03, allowed are 0.05</td>" in text and "<th>limit</th>" in text
    assert "8x3x3x3" in text and "default-src 'none'" in text
    assert not re.search(r"https?://", text)


def test_curve_has_a_mark_for_each_point_and_the_bound():
    picture = ElementTree.fromstring(curve(DOCUMENT))
    assert len(picture.findall("circle")) == 2
    dashed = [path for path in picture.findall("path") if path.get("stroke") == "#b00"]
    assert len(dashed) == 1
    chosen, other = picture.findall("circle")
    assert float(chosen.get("cx")) < float(other.get("cx"))
    endless = {**DOCUMENT, "points": [{**POINT, "error_limit": None, "chosen": False}]}
    assert "infinite" in report_of_layers(endless)
    assert ElementTree.fromstring(curve(endless)).findall("circle") == []
