"""The team of threads is given to other libraries, unless users have tuned theirs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.host.native import library
from tests.backends.native.test_team import COMPILER, SOURCE, check

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or library() is None, reason="the team is of Linux and compiled"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """The library, compiled."""
    if COMPILER is None:
        pytest.skip("there is no gcc")
    folder = tmp_path_factory.mktemp("team")
    source, target = folder / "regions.c", folder / "regions.so"
    source.write_text(SOURCE)
    options = ["-O1", "-fopenmp", "-shared", "-fPIC", "-Wl,-z,now", "-o", str(target)]
    subprocess.run([COMPILER, *options, str(source)], check=True)
    return target


def test_team_of_another_thread_is_libgomps(made):
    check(
        made,
        """
wrong = []
def client():
    for _ in range(200):
        wrong.append(made.barriers(2, 2) or made.spins(2) != 2 or made.nested(2) != 200)
clients = [threading.Thread(target=client) for _ in range(3)]
[c.start() for c in clients]
[c.join() for c in clients]
assert len(wrong) == 600 and not any(wrong)
""",
    )


def test_team_is_left_alone_where_the_user_has_tuned_the_runtime():
    code = """
from penstock.host.native import library as native
from penstock.backends.onednn.library import library
loaded = library()
assert loaded is None or loaded.team is (sys.argv[1] == "team"), loaded.team
"""
    for name, value, team in (("OMP_WAIT_POLICY", "passive", "none"), ("UNRELATED", "1", "team")):
        variables = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
        command = [sys.executable, "-c", "import sys" + code, team]
        subprocess.run(command, check=True, env=variables | {name: value}, timeout=120)


def test_library_that_has_no_functions_of_libgomp_is_not_adopted(made):
    code = """
libc = ctypes.CDLL(None)
assert not functions.adopt(ctypes.cast(libc.getpid, ctypes.c_void_p).value)
assert not functions.adopt(0)
"""
    check(made, code)
