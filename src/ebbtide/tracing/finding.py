"""One thing that a report has found out about a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class Finding:
    """A reason why memory is as high as it is.

    Attributes:
        cause: short name of the reason, the same in all versions, such as ``"small tensors"``.
        sentence: what was found, in a sentence.
        evidence: the figures that it was found by.
        setting: what to change; empty if there is nothing to change.
        size_bytes: bytes of the peak that it accounts for.
    """

    cause: str
    sentence: str
    evidence: str
    setting: str
    size_bytes: int = 0
