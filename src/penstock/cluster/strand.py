"""Jobs that run one at a time and in their order, on whichever thread has brought the next one.

A worker runs its parts in this way: the thread that reads a link notes what a message asks for, and
does it, while another thread reads on::

    link 0, thread a:  read  note  |  run the part ... its jobs ... and those noted meanwhile
            thread b:                 read  note   read  note   ...

To wake a thread for each message would take about as long as to copy one of 300 KB.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from penstock.host.threads import Workers, report_thread_exception

Job = Callable[[], object]


class Strand:
    """``submit`` notes a job. A thread that has called ``drain`` once calls it after all that it
    submits; jobs of other threads, such as those that watch deadlines, run on one of the strand's
    own."""

    def __init__(self, name: str) -> None:
        self._jobs: deque[Job] = deque()
        self._lock = threading.Lock()
        self._busy = False
        self._drains = threading.local()
        self._pool = Workers(name, 1)

    def submit(self, job: Job) -> None:
        """Note a job."""
        self._jobs.append(job)  # before the check: a busy thread checks again at its end
        if not self._busy and not getattr(self._drains, "here", False):
            self._pool.submit(self.drain)

    def drain(self) -> None:
        """Run all jobs, unless another thread does."""
        self._drains.here = True
        while True:
            with self._lock:
                if self._busy or not self._jobs:
                    return
                self._busy = True
            while self._jobs:
                self._run(self._jobs.popleft())
            self._busy = False

    def _run(self, job: Job) -> None:
        try:
            job()
        except BaseException:
            report_thread_exception()
