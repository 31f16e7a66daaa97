"""What all tests share: a cache folder that is not the user's."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

# Measured costs would otherwise be read from, and kept in, the user's own folder. Set before
# anything is imported, and inherited by processes that tests start.
os.environ["PENSTOCK_CACHE"] = str(Path(tempfile.gettempdir(), f"penstock-tests-{os.getpid()}"))
