"""The team of threads: each part of a region is run once, whichever threads come, and however late."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.host.native import library

COMPILER = shutil.which("gcc")


pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or library() is None, reason="the team is of Linux and compiled"
)


# A library that calls libgomp in all the ways that oneDNN does, in its old form and its new one.
SOURCE = r"""
#include <omp.h>
void GOMP_parallel_start(void (*)(void *), void *, unsigned);
void GOMP_parallel_end(void);
_Bool GOMP_loop_static_start(long, long, long, long, long *, long *);
_Bool GOMP_loop_static_next(long *, long *);
void GOMP_loop_end_nowait(void);

/* Each part counts itself; behind a barrier all have. Returns how many parts saw another number. */
int barriers(int parts, int rounds)
{
    int count = 0, wrong = 0;
    #pragma omp parallel num_threads(parts)
    for (int round = 1; round <= rounds; round++) {
        __atomic_fetch_add(&count, 1, __ATOMIC_SEQ_CST);
        #pragma omp barrier
        if (__atomic_load_n(&count, __ATOMIC_SEQ_CST) != round * parts || !omp_in_parallel())
            __atomic_fetch_add(&wrong, 1, __ATOMIC_SEQ_CST);
        #pragma omp barrier
    }
    return wrong;
}

/* Parts that wait for one another without a call. */
int spins(int parts)
{
    int count = 0;
    #pragma omp parallel num_threads(parts)
    {
        __atomic_fetch_add(&count, 1, __ATOMIC_SEQ_CST);
        while (__atomic_load_n(&count, __ATOMIC_SEQ_CST) < parts)
            ;
    }
    return count;
}

typedef struct { long start, end, step, chunk; int *seen; } loop;

static void run_loop(void *data)
{
    loop *l = data;
    long from, to;
    if (GOMP_loop_static_start(l->start, l->end, l->step, l->chunk, &from, &to))
        do
            for (long i = from; l->step > 0 ? i < to : i > to; i += l->step)
                __atomic_fetch_add(&l->seen[i], 1, __ATOMIC_SEQ_CST);
        while (GOMP_loop_static_next(&from, &to));
    GOMP_loop_end_nowait();
}

/* The old form: the caller runs its part between start and end. */
void loops(int parts, long start, long end, long step, long chunk, int *seen)
{
    loop l = {start, end, step, chunk, seen};
    GOMP_parallel_start(run_loop, &l, parts);
    run_loop(&l);
    GOMP_parallel_end();
}

/* Regions within parts have one part. Returns the sum of what those saw. */
int nested(int parts)
{
    int sum = 0;
    #pragma omp parallel num_threads(parts)
    {
        int outer = omp_get_thread_num();
        #pragma omp parallel num_threads(3)
        __atomic_fetch_add(&sum, 100 * omp_get_num_threads() + omp_get_thread_num(), __ATOMIC_SEQ_CST);
        if (omp_get_thread_num() != outer || omp_get_num_threads() != parts)
            __atomic_fetch_add(&sum, 100000, __ATOMIC_SEQ_CST);
    }
    return sum;
}
"""


BEGIN = """
import ctypes, os, sys, threading
from penstock.host.native import library
made = ctypes.CDLL(sys.argv[1])
functions = library().functions
assert functions.adopt(ctypes.cast(made.barriers, ctypes.c_void_p).value)
def regions():
    now = functions.team_counts()
    return now[0] + now[1]
"""


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


def check(made: Path, code: str, **environment: str) -> None:
    """Run ``code`` in a process with ``made``, whose threads are those of the team."""
    unset = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_PROC_BIND", "OMP_PLACES")
    variables = {k: v for k, v in os.environ.items() if k not in unset} | environment
    command = [sys.executable, "-c", BEGIN + code, str(made)]
    subprocess.run(command, check=True, env=variables, timeout=120)


@pytest.mark.parametrize("cores", ["all", "one"])
def test_team_runs_each_part_once_on_any_number_of_cores(made, cores):
    check(
        made,
        f"""
if {cores == "one"}:
    os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})
for parts in (2, 5):
    before = regions()
    assert made.barriers(parts, 3) == 0
    assert made.spins(parts) == parts
    assert made.nested(parts) == 100 * parts
    assert regions() - before == 3 * (parts - 1)
for parts in (2, 3, 7):
    for start, end, step, chunk in [
        (0, 50, 1, 0), (0, 50, 1, 3), (3, 50, 4, 2), (49, -1, -1, 0), (48, 2, -5, 1), (5, 5, 1, 0), (0, 2, 1, 0)
    ]:
        seen = (ctypes.c_int * 50)()
        bounds = [ctypes.c_long(x) for x in (start, end, step, chunk)]
        before = regions()
        made.loops(parts, *bounds, seen)
        assert list(seen) == [int(i in range(start, end, step)) for i in range(50)]
        assert regions() - before == parts - 1
""",
    )


def test_team_starts_anew_in_a_forked_child(made):
    check(
        made,
        """
assert made.barriers(3, 2) == 0
child = os.fork()
if not child:
    os._exit(made.barriers(3, 2) + (made.spins(3) != 3))
assert os.waitpid(child, 0)[1] == 0
assert made.barriers(3, 2) == 0
""",
    )
