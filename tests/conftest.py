"""What holds for all tests. pytest reads it before any test file, and so before torch."""

import os

# By default threads of OpenMP spin at every barrier. Where other processes want the cores too, a
# spinning thread takes the time that the thread it waits for needs, and small operations take ten
# times as long. Processes that tests start inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# `make test` has a process for each core.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
