"""``ebbtide.compat.transformer_engine`` and ``.megatron``: other names of those in `interop`.

The modules are the same objects, as ``os.path`` is `posixpath`.
"""

import sys

from ebbtide.interop import megatron, transformer_engine

__all__ = ["megatron", "transformer_engine"]

sys.modules[f"{__name__}.megatron"] = megatron
sys.modules[f"{__name__}.transformer_engine"] = transformer_engine
