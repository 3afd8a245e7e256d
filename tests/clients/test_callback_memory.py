"""With a callback, the memory of a training process is lower, as with the two lines by hand.

The programs are those of the clients, with the callback in the place of `ebbtide.offload(model)`.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from compare import PROGRAMS, Outcome, _finish, _read, problems

# Before which line of the program, in the call that makes its Trainer, the callbacks are added.
PLACES = {
    "transformers_trainer.py": "    train_dataset=[",
    "lightning_module.py": "    max_steps=3,",
}
RUN = """
import json, sys
from pathlib import Path
import ebbtide
from ebbtide.interop.{framework} import OffloadCallback
from run_program import Measurement, _record_warnings, weights_digest

mode, folder = sys.argv[1:]
callback = OffloadCallback()
callbacks = [callback] if mode == "offloaded" else []
printed, measurement = _record_warnings(), Measurement()
{program}
outcome = measurement.finish()
outcome["losses"] = [float(loss).hex() for loss in losses]
outcome["weights"] = weights_digest(model)
outcome["printed"] = printed
if callbacks:
    stats = callback.handle.stats
    outcome["stats"] = {{"offloaded_bytes": stats.offloaded_bytes}}
(Path(folder) / (mode + "_0.json")).write_text(json.dumps(outcome))
"""


def run(name: str, mode: str, folder: Path) -> Outcome:
    framework = "lightning" if "lightning" in name else "transformers"
    program = (PROGRAMS / name).read_text()
    place = PLACES[name]
    assert place in program
    program = program.replace("handle = ebbtide.offload(model)", "measurement.begin()")
    program = program.replace(place, "    callbacks=callbacks,\n" + place)
    script = folder / f"{mode}_{name}"
    script.write_text(RUN.format(framework=framework, program=program))
    here = str(Path(__file__).parent)
    code = f"import sys, runpy; sys.path.insert(0, {here!r}); runpy.run_path({str(script)!r})"
    returncode, stderr = _finish([sys.executable, "-c", code, mode, str(folder)], folder)
    assert returncode == 0, stderr[-3000:]
    return _read(folder / f"{mode}_0.json")


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACES)
def test_memory_is_lower(name: str, tmp_path: Path) -> None:
    package = "lightning" if "lightning" in name else "transformers"
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"it trains with {package}")
    if package == "transformers":
        reason = "the Trainer cannot be imported here"
        pytest.importorskip("transformers.trainer", exc_type=ImportError, reason=reason)
    plain, offloaded = (run(name, mode, tmp_path) for mode in ("plain", "offloaded"))
    print(plain.above_idle_bytes, offloaded.above_idle_bytes)
    assert not problems([plain], [offloaded])
