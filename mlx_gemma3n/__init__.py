"""Gemma 3n on MLX, text and audio: the model, its processor, its adapters, and how to load them.

Names are imported when they are asked for, so that `mlx_gemma3n.config` and `mlx_gemma3n.processor` work where there
is no mlx.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_gemma3n.loading import load
    from mlx_gemma3n.model import Gemma3n
    from mlx_gemma3n.processor import Processor

__all__ = ["Gemma3n", "Processor", "load"]

_HOMES = {"Gemma3n": "model", "Processor": "processor", "load": "loading"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
