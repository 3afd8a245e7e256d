"""Reads what a user says to `ebbtide plan`: the model, the machine and the budget."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Final

from ebbtide.errors import PolicyError
from ebbtide.planning.hardware import Hardware
from ebbtide.studies.models.built_in_models import NAMES, ModelOptions, build_family
from ebbtide.studies.models.user_models import load_family
from ebbtide.studies.tasks import TaskFamily
from ebbtide.units import parse_size_bytes

_PERCENT: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")


def read_model(name: str, options: ModelOptions) -> TaskFamily:
    """Return the training step of a built-in model or of ``module:function``.

    Raises:
        PolicyError: there is no such model, or an option is wrong.
        ImportError: the model needs a package that is not installed.
    """
    if name.lower() in NAMES:
        return build_family(name.lower(), options)
    if ":" in name:
        return load_family(name, options)
    near = difflib.get_close_matches(name.lower(), NAMES, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise PolicyError(
        f"there is no model {name!r}{hint} Give one of {', '.join(NAMES)}, or module:function for "
        f"your own"
        if hint
        else f"there is no model {name!r}; give one of {', '.join(NAMES)}, or module:function for "
        f"your own"
    )


def read_hardware(text: str) -> Hardware:
    """Return a preset, or what a file of ``ebbtide doctor --json`` says.

    Raises:
        PolicyError: there is neither such a preset nor such a file, or the file is something else.
    """
    path = Path(text)
    if path.suffix == ".json" or path.is_file():
        try:
            content = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise PolicyError(
                f"--hardware {text} cannot be read ({error}); `ebbtide doctor --json > {text}` "
                f"writes such a file"
            ) from None
        try:
            return Hardware.from_json(content)
        except PolicyError as error:
            raise PolicyError(f"--hardware {text}: {error}") from None
    return Hardware.named(text, achievable=True)


def read_budget_bytes(text: str, hardware: Hardware) -> int:
    """Return a budget such as ``"24GiB"``, or ``"90%"`` of the device's memory, in bytes.

    Raises:
        PolicyError: it cannot be read, or is more than the device has.
    """
    device_bytes = hardware.device_memory_bytes
    match = _PERCENT.fullmatch(text)
    if match is not None:
        share = float(match[1]) / 100
        if not 0 < share <= 1:
            raise PolicyError(f"--budget {text} must be more than 0% and no more than 100%")
        return int(share * device_bytes)
    if re.fullmatch(r"\s*\d+(\.\d+)?\s*", text):
        raise PolicyError(f"--budget {text} has no unit; write {text.strip()}GiB or 90%")
    size_bytes = parse_size_bytes(text, name="--budget")
    if not size_bytes:
        raise PolicyError("--budget must be more than 0; write a size such as 24GiB")
    if size_bytes > device_bytes:
        raise PolicyError(
            f"--budget {text} is more than {hardware.name} has ({device_bytes / 1e9:g} GB, "
            f"{device_bytes / 2**30:.1f} GiB); give less, or other --hardware"
        )
    return size_bytes
