"""One table: a tensor's name and layout in transformers, and in ours.

Ours are transformers' names without the leading `model.`; only convolutions are laid out differently, channels last. A few
tensors of a checkpoint have no place of their own here: `lm_head` is the token table again, and Google's files carry key
and value projections of the KV-shared layers that nothing reads. The vision tower's pass through under their own names.
"""

import re
from typing import Optional

from mlx_gemma3n.config import TextConfig

PARTS = ("language_model", "audio_tower", "embed_audio", "embed_vision", "vision_tower")
VISION_TOWER = "vision_tower."
# Axes that bring transformers' layout to ours.
CONV2D = (0, 2, 3, 1)  # [out, in, height, width] -> [out, height, width, in]
CONV1D = (0, 2, 1)  # [out, 1, kernel] -> [out, kernel, 1]

_DEAD = re.compile(r"language_model\.layers\.(\d+)\.self_attn\.(?:k_proj|v_proj|k_norm)\.")


def to_mlx(name: str) -> Optional[str]:
    """Our name of the tensor (or module) that a checkpoint calls `name`; None for `lm_head`.

    Understands transformers' names (`model.language_model.…`), those of a text-only checkpoint (`model.layers.…`), the
    older order that mlx-vlm keeps (`language_model.model.…`), and ours.
    """
    if name.split(".")[0] == "lm_head" or name.startswith("language_model.lm_head"):
        return None
    if name.startswith("language_model.model."):
        return "language_model." + name[len("language_model.model.") :]
    if name.startswith("model."):
        name = name[len("model.") :]
    return name if name.split(".")[0] in PARTS else f"language_model.{name}"


def to_hf(path: str, text_only: bool = False) -> str:
    """transformers' name of our tensor or module `path`.

    Args:
        text_only: the name in a `Gemma3nForCausalLM` instead of a `Gemma3nForConditionalGeneration`.
    """
    if text_only:
        return "model." + path.removeprefix("language_model.")
    return f"model.{path}"


def is_dead(path: str, config: TextConfig) -> bool:
    """Whether our tensor `path` is a key or value weight of a KV-shared layer, which nothing reads."""
    match = _DEAD.match(path)
    return bool(match) and config.is_kv_shared(int(match[1]))


def transposition(path: str) -> Optional[tuple[int, ...]]:
    """The axes that bring transformers' layout of our tensor `path` to ours, or None where they agree."""
    if not path.startswith("audio_tower."):
        return None
    if path.endswith(".conv.weight"):
        return CONV2D
    if path.endswith(".depthwise_conv1d.weight"):
        return CONV1D
    return None


def inverse(axes: tuple[int, ...]) -> tuple[int, ...]:
    """The axes that undo the transposition `axes`."""
    return tuple(axes.index(i) for i in range(len(axes)))
