import time
from hypothesis import settings, given, Phase
from tests.graphs import *
from penstock.text import format_graph
@settings(deadline=None, max_examples=2500, phases=[Phase.generate], database=None)
@given(graphs())
def test_t(g):
    with open(__import__("os").environ["LAST"],"w") as f: f.write("formatting")
    text=format_graph(g)
    with open(__import__("os").environ["LAST"],"w") as f: f.write(text.encode("utf-8","replace").decode())
    b=parse_graph(text, any_op); assert_same(g,b); assert format_graph(b)==text
    with open(__import__("os").environ["LAST"],"w") as f: f.write("done")
