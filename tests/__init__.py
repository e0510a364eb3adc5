"""One thread a process, set before torch is imported: workers and ranks run side by side. A value of yours stays."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
