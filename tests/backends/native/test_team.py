"""Teams of threads: with Linux's own way to sleep, and with the one for other systems."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock.host.native import library

# That of Python's own processor: others may run on this one (tools/aarch64.py).
COMPILERS = [(sysconfig.get_config_var("CC") or "cc").split()[0], "cc", "gcc"]
COMPILER = next(filter(None, map(shutil.which, COMPILERS)), None)
RUNTIME = Path(penstock.__file__).parent / "host" / "c"

pytestmark = pytest.mark.skipif(
    sys.platform == "win32" or COMPILER is None, reason="needs a C compiler and POSIX threads"
)

# Regions whose parts count themselves, and work in stages whose pieces each add to a cell, of which
# no piece may begin before all of the stage before have ended.
SOURCE = r"""
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>
#include "stages.h"
#include "team.h"

enum { MOST = 64 };

typedef struct { atomic_int seen[MOST], wrong; } counted;

static void part(void *data)
{
    counted *own = data;
    atomic_fetch_add(&own->seen[team_part()], 1);
    if (team_begin(part, data, 2)) /* within a region there are no others */
        atomic_fetch_add(&own->wrong, 1);
}

/* The regions of `count` that did not run each of their parts once, or -1 if none began. */
int regions(int parts, int count)
{
    int wrong = 0;
    for (int i = 0; i < count; i++) {
        counted work = {0};
        if (!team_begin(part, &work, parts))
            return -1;
        part(&work);
        team_end();
        for (int k = 0; k < parts; k++)
            wrong += atomic_load(&work.seen[k]) != 1;
        wrong += atomic_load(&work.wrong);
    }
    return wrong;
}

static atomic_int met;

static void meet(void *data)
{
    atomic_fetch_add(&met, 1);
    for (int i = 0; atomic_load(&met) < *(int *)data && i < 2000; i++)
        usleep(1000);
}

/* Whether regions of two threads were open at once: all their parts meet. */
int meets(int parts, int all)
{
    if (!team_begin(meet, &all, parts))
        return 0;
    meet(&all);
    team_end();
    return atomic_load(&met) >= all;
}

static int piece(const void *arguments, int64_t stage, int64_t from, int64_t to)
{
    atomic_int *cells = (atomic_int *)arguments;
    for (int64_t i = from; i < to; i++)
        if (atomic_fetch_add(&cells[i], 1) != stage)
            return 1;
    return 0;
}

/* The status of work in `stages` stages of 40 pieces. */
int staged(int threads, int stages)
{
    atomic_int cells[40] = {0};
    staged_work work;
    stages_prepare(&work, piece, cells, 0, stages, 40, threads);
    if (!team_begin(stages_run, &work, threads))
        return -1;
    stages_run(&work);
    team_end();
    for (int i = 0; i < 40; i++)
        if (atomic_load(&cells[i]) != stages)
            return 2;
    return atomic_load(&work.status);
}

int forked(void)
{
    int child = fork();
    if (!child)
        _exit(regions(3, 10) != 0);
    return child;
}
"""


@pytest.fixture(scope="module", params=["own calls", "portable"])
def made(request, tmp_path_factory) -> ctypes.CDLL:
    """The team, compiled by itself."""
    folder = tmp_path_factory.mktemp("team")
    source, target = folder / "regions.c", folder / "regions.so"
    source.write_text(SOURCE)
    files = [source, *[RUNTIME / f"{name}.c" for name in ("team", "stages", "waiting")]]
    options = ["-O2", "-std=gnu11", "-shared", "-fPIC", "-pthread", "-Wall", "-Werror"]
    folders = [f"-I{RUNTIME}", f"-I{sysconfig.get_path('include')}", f"-I{np.get_include()}"]
    portable = ["-DPENSTOCK_PORTABLE"] if request.param == "portable" else []
    command = [COMPILER, *options, *portable, *folders, *map(str, files), "-o", str(target)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(target))


@pytest.mark.parametrize("parts", [2, 3, 9])
def test_each_part_of_a_region_runs_once(made, parts):
    assert made.regions(parts, 300) == 0


def test_threads_that_begin_regions_at_once_have_a_team_each(made):
    found: list[int] = []

    def begin() -> None:
        found.append(made.meets(2, 6))

    threads = [threading.Thread(target=begin) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [1, 1, 1]


def test_many_threads_begin_many_regions(made):
    wrong: list[int] = []
    threads = [
        threading.Thread(target=lambda n=n: wrong.append(made.regions(n, 200))) for n in (2, 3, 4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0, 0, 0]


@pytest.mark.parametrize("threads", [2, 5])
def test_no_piece_of_a_stage_begins_before_the_stage_before_has_ended(made, threads):
    for stages in (1, 2, 50):
        assert made.staged(threads, stages) == 0


def test_forked_child_has_threads_of_its_own(made):
    import os

    assert made.regions(3, 10) == 0
    _, status = os.waitpid(made.forked(), 0)
    assert status == 0
    assert made.regions(3, 10) == 0


@pytest.mark.skipif(library() is None, reason="there are no compiled kernels")
def test_module_needs_no_other_runtime_of_threads():
    bytes_ = Path(library().path).read_bytes()
    assert b"libgomp" not in bytes_ and b"libomp" not in bytes_
