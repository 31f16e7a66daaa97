"""Names of devices. The tables are what TensorFlow 2.21 says of the same names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.ir.device_name import DeviceName, local

# As tf.DeviceSpec.from_string has it: job, replica, task, kind, index, and its text again.
PARSED = {
    "/job:worker/replica:0/task:1/device:CPU:0": (
        ("worker", 0, 1, "CPU", 0),
        "/job:worker/replica:0/task:1/device:CPU:0",
    ),
    "/job:worker/task:1": (("worker", None, 1, None, None), "/job:worker/task:1"),
    "cpu:0": ((None, None, None, "CPU", 0), "/device:CPU:0"),
    "/cpu:0": ((None, None, None, "CPU", 0), "/device:CPU:0"),
    "/gpu:1": ((None, None, None, "GPU", 1), "/device:GPU:1"),
    "/device:GPU:*": ((None, None, None, "GPU", None), "/device:GPU:*"),
    "/cpu": ((None, None, None, "CPU", None), "/device:CPU:*"),
    "/CPU:*": ((None, None, None, "CPU", None), "/device:CPU:*"),
    "/task:0": ((None, None, 0, None, None), "/task:0"),
    "": ((None, None, None, None, None), ""),
    "/device:cpu:3": ((None, None, None, "CPU", 3), "/device:CPU:3"),
    "/job:a/cpu:1/task:2": (("a", None, 2, "CPU", 1), "/job:a/task:2/device:CPU:1"),
    "/device:XLA_CPU:0": ((None, None, None, "XLA_CPU", 0), "/device:XLA_CPU:0"),
    "/job:w//cpu:0": (("w", None, None, "CPU", 0), "/job:w/device:CPU:0"),
    "CPU:0": ((None, None, None, "CPU", 0), "/device:CPU:0"),
    "/job:localhost/replica:0/task:0/device:CPU:0": (
        ("localhost", 0, 0, "CPU", 0),
        "/job:localhost/replica:0/task:0/device:CPU:0",
    ),
}
# What it takes for no name, and names that only we refuse: they say something twice, or less than 0.
REFUSED = ["/device:CPU", "/Device:CPU:0", "/replica:x", "/cpu:0/gpu:1", "/gpu:", "/foo:1"]
REFUSED += ["/device:GPU:1:2", "/job:w/job:x", "/task:-1", "nonsense", "/job:", "/device::1"]
# Those of our own: * for anything.
OPEN = {
    "*": "",
    "/job:*/task:3": "/task:3",
    "/task:*": "",
    "/device:*:*": "",
    "/device:*:2": "/device:*:2",
}
# First, second, and tf.DeviceSpec.make_merged_spec of the two, where they do not differ.
MERGED = [
    ("/job:worker/task:1", "/device:CPU:0", "/job:worker/task:1/device:CPU:0"),
    ("/device:CPU:0", "/task:3", "/task:3/device:CPU:0"),
    ("/job:w/cpu:0", "/cpu:*", "/job:w/device:CPU:0"),
    ("/device:GPU:*", "/gpu:4", "/device:GPU:4"),
    ("", "/job:a", "/job:a"),
]
DIFFERENT = [("/job:a", "/job:b"), ("/device:CPU:0", "/device:GPU:*"), ("/cpu:0", "/cpu:1")]


@pytest.mark.parametrize("text", PARSED)
def test_parse_reads_names_as_tensorflow_does(text):
    fields, again = PARSED[text]
    assert DeviceName.parse(text) == DeviceName(*fields)
    assert str(DeviceName.parse(text)) == again


@pytest.mark.parametrize("text", OPEN)
def test_parse_of_a_star_leaves_the_part_open(text):
    assert str(DeviceName.parse(text)) == OPEN[text]


@pytest.mark.parametrize("text", REFUSED)
def test_parse_of_an_invalid_name_is_refused(text):
    with pytest.raises(ps.InvalidModel, match="device"):
        DeviceName.parse(text)


@pytest.mark.parametrize(("first", "second", "both"), MERGED)
def test_merge_has_the_parts_of_both_names(first, second, both):
    for a, b in ((first, second), (second, first)):
        assert str(DeviceName.parse(a).merge(DeviceName.parse(b))) == both


@pytest.mark.parametrize(("first", "second"), DIFFERENT)
def test_merge_of_different_names_is_refused(first, second):
    a, b = DeviceName.parse(first), DeviceName.parse(second)
    assert not a.allows(b)
    with pytest.raises(ps.InvalidModel) as caught:
        a.merge(b)
    assert str(a) in str(caught.value)
    assert str(b) in str(caught.value)


def test_over_keeps_the_parts_of_the_first_name():
    name = DeviceName.parse("/job:w/cpu:1").over(DeviceName.parse("/job:a/task:2/gpu:0"))
    assert str(name) == "/job:w/task:2/device:CPU:1"


numbers = st.none() | st.integers(0, 9)
names = st.builds(
    DeviceName,
    st.none() | st.sampled_from("ab"),
    numbers,
    numbers,
    st.none() | st.just("CPU"),
    numbers,
)


@given(names)
def test_str_of_a_name_parses_to_the_name(name):
    assert DeviceName.parse(str(name)) == name


@given(names, names, names)
def test_merge_is_a_union_of_parts(a, b, c):
    assert a.allows(b) == b.allows(a)
    assert a.merge(a) == a
    if a.allows(b):
        both = a.merge(b)
        assert both == b.merge(a) == a.over(b)
        assert both.allows(a)
        assert both.allows(b)
        # A name that fits both fits each, and the other way around.
        assert both.allows(c) == (a.allows(c) and b.allows(c))
        assert both.full == (None not in (both.job, both.replica, both.task, both.kind, both.index))


def test_local_returns_full_names_of_devices():
    here = "/job:localhost/replica:0/task:0/device:CPU:"
    assert local(2) == (f"{here}0", f"{here}1")
    assert local(["cpu:1", "/device:CPU:7", f"{here}0"]) == (f"{here}1", f"{here}7", f"{here}0")
    other = "/job:worker/replica:0/task:1/device:CPU:0"
    assert local([other, "gpu:0"]) == (other, f"{here.replace('CPU', 'GPU')}0")


@pytest.mark.parametrize(
    "devices", [0, -1, [], "cpu:0", ["cpu"], ["cpu:0", "/device:CPU:0"], ["x"], ["/job:w"]]
)
def test_local_refuses_what_does_not_name_devices(devices):
    with pytest.raises(ValueError, match="devices"):
        local(devices)
