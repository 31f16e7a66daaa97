"""A strand: a queue of jobs that run one at a time, in order, on the threads that submit them.

A worker runs its parts in this way. The thread that reads a message from a link queues a job and
then runs the queued jobs, while another thread reads from the link::

    link 0, thread a:  read  queue |  run the part ... its jobs ... and those queued meanwhile
            thread b:                 read  queue  read  queue  ...

To wake a thread for each message would take about as long as to copy a message of 300 KB.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from penstock.host.threads import Workers, report_thread_exception

Job = Callable[[], object]


class Strand:
    """A queue of jobs. A thread that has called ``drain`` once must call it again after all that it
    submits. Jobs of other threads, such as the watchdog's, run on a thread of the strand."""

    def __init__(self, name: str) -> None:
        self._jobs: deque[Job] = deque()
        self._lock = threading.Lock()
        self._busy = False
        self._drains = threading.local()
        self._pool = Workers(name, 1)

    def submit(self, job: Job) -> None:
        """Queue a job."""
        self._jobs.append(job)  # before the check, since a busy thread checks again at its end
        if not self._busy and not getattr(self._drains, "here", False):
            self._pool.submit(self.drain)

    def drain(self) -> None:
        """Run all queued jobs, unless another thread is running them."""
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
