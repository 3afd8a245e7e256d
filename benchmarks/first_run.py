"""Time what a new user does: clone, install, the README's example, a first model of their own.

Run: ``python -m benchmarks.first_run``. It works in an empty folder with a fresh environment, and
needs what pip needs. Reading is not timed; it is given as the README's words at 200 a minute.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.record import RESULTS, save

_ROOT = RESULTS.parents[1]
_WORDS_PER_MINUTE = 200
_OWN = """\
import torch
from torch import nn

layer = nn.TransformerEncoderLayer(256, 8, batch_first=True)
model = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(4):
    loss = model(torch.randn(8, 256, 256)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
_OFFLOADED = _OWN.replace(
    "optimizer =", "import ebbtide\n\nhandle = ebbtide.offload(model)\noptimizer =", 1
) + (
    "before, now = handle.stats.unique_bytes, handle.stats.peak_device_bytes\n"
    'print(f"{before >> 20} MiB before, {now >> 20} MiB now: {now / before:.2f}")\n'
)


def main() -> None:
    """Take the steps one after the other, and write how long each took."""
    readme = (_ROOT / "README.md").read_text()
    example = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)[0]
    words = len(re.sub(r"^\[[^\]]+\]: .*$", "", readme, flags=re.MULTILINE).split())
    rows = [("read the README", 60 * words / _WORDS_PER_MINUTE, f"{words} words, not timed")]
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        clone, python = home / "ebbtide", home / "ebbtide/.venv/bin/python"
        for name, code in {"first": example, "own": _OWN, "offloaded": _OFFLOADED}.items():
            (home / f"{name}.py").write_text(code)
        steps = {
            "git clone, from this disk": ("git", "clone", "-q", str(_ROOT), str(clone)),
            "python3 -m venv": (sys.executable, "-m", "venv", str(clone / ".venv")),
            "pip install .": (str(python), "-m", "pip", "install", "-q", str(clone)),
            "the README's example": (str(python), "first.py"),
            "a model of your own, plain": (str(python), "own.py"),
            "the same with the one line": (str(python), "offloaded.py"),
            "the same, not edited: `ebbtide run`": (
                *(str(python.with_name("ebbtide")), "run", "--budget", "90%", "own.py"),
            ),
            "make demo": ("make", "-C", str(clone), "demo"),
        }
        for what, command in steps.items():
            begin_s = time.perf_counter()
            done = subprocess.run(command, cwd=home, capture_output=True, text=True, check=True)
            said = re.findall(r"\d+ MiB before, \d+ MiB now: \S+", done.stdout)
            rows.append((what, time.perf_counter() - begin_s, said[0] if said else ""))
            print(*rows[-1], sep="  ", flush=True)
    table = ["| step | time | it prints |", "| --- | --- | --- |"]
    table += [f"| {what} | {seconds:.0f} s | {said} |" for what, seconds, said in rows]
    results = {"steps": [{"step": a, "seconds": b, "prints": c} for a, b, c in rows]}
    print(save("first-run", {"words_per_minute": _WORDS_PER_MINUTE}, results, "\n".join(table)))


if __name__ == "__main__":
    main()
