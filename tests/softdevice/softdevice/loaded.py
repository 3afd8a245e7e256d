"""Importing this module loads the device, in the order that SOFTDEVICE_ORDER names.

It is for programs that take the name of a module to import first:
``python -m benchmarks.gpu --import softdevice.loaded``. Without SOFTDEVICE_ORDER in the environment
the order is "threads".
"""

import os

import softdevice

softdevice.load(os.environ.get("SOFTDEVICE_ORDER", "threads"))
