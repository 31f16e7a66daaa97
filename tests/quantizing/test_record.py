"""What a search has measured, in a file."""

import pytest

import penstock as ps
from penstock.quantizing.record import FLOAT, Point, Record


def test_record_is_read_back(tmp_path):
    record = Record.at(tmp_path / "r.json", "key")
    record.ranges = {"x": (-1.0, 2.0)}
    record.errors = {"a": {"static": 0.5}}
    record.points.append(Point({"a": "static"}, 0.5, 0.1, 0.2, 0.25, 0.3, "tried"))
    record.changed()
    again = Record.at(tmp_path / "r.json", "key")
    assert again.points == record.points
    assert again.errors == record.errors
    assert [*again.ranges["x"]] == [-1.0, 2.0]
    assert again.points[0].limit == 0.25 and FLOAT.limit == 0


def test_records_of_other_searches_are_refused(tmp_path):
    path = tmp_path / "r.json"
    Record.at(path, "key").changed()
    with pytest.raises(ps.InvalidInput, match="another model"):
        Record.at(path, "other")
    path.write_text("[]")
    with pytest.raises(ps.InvalidInput, match="no measurements"):
        Record.at(path, "key")
    Record("key").changed()  # without a path, nothing is written
