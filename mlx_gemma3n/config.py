"""Gemma 3n's config.json as frozen dataclasses, every field named as in transformers.

Two spellings of the rotary bases exist in the wild and both load: the Hub's `rope_theta` + `rope_local_base_freq`, and
transformers 5's nested `rope_parameters`. Nothing here imports mlx or torch, so the CUDA trainer and the memory plan
read the same file.
"""

import json
import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Optional

SLIDING, FULL = "sliding_attention", "full_attention"


class UserError(Exception):
    """The user's input is wrong. Commands print the message as one line, `error: ...`, and exit with 2."""


class DoesNotFit(Exception):
    """A run or a plan does not fit its memory. The message says what, by how much, and what would fit. Commands print
    it as one line, `error: ...`, and exit with 3."""


# Counts that may be none; all others are at least one.
_ZERO = {
    "num_kv_shared_layers",
    "pad_token_id",
    "altup_active_idx",
    "vocab_offset",
    "conf_num_hidden_layers",
    "conf_attention_context_left",
    "conf_attention_context_right",
}


def _known(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    """The values of `cls`'s fields.

    Raises:
        UserError: a number is none, or a count is not one.
    """
    known = {}
    for field_ in fields(cls):
        value = values.get(field_.name)
        if value is None:
            continue
        known[field_.name] = value
        kind = type(field_.default)
        many = value if isinstance(value, (list, tuple)) and field_.name == "intermediate_size" else [value]
        if kind in (int, float) and not all(_is_number(v, kind is int, field_.name in _ZERO) for v in many):
            least = "from 0 up" if field_.name in _ZERO else "from 1 up"
            raise UserError(
                f"{field_.name} is {value!r}; it is a {f'whole number {least}' if kind is int else 'number'}"
            )
        if kind is bool and not isinstance(value, bool):
            raise UserError(f"{field_.name} is {value!r}; it is true or false")
    return known


def _is_number(value: Any, whole: bool, zero: bool) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return False
    # What is larger than that is no size of anything here.
    return not whole or (isinstance(value, int) and (0 if zero else 1) <= value < 2**31)


def _per_layer(value: Any, layers: int, name: str) -> tuple:
    """One value for all layers, or one for each."""
    values = tuple(value) if isinstance(value, (list, tuple)) else (value,) * layers
    if len(values) != layers:
        raise UserError(f"{name} has {len(values)} values for {layers} layers")
    return values


def read_config(folder: str | Path) -> dict[str, Any]:
    """The dictionary in `folder`/config.json, as it stands there."""
    path = Path(folder) / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; is {folder} a checkpoint folder?") from None
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f"{path}: cannot be read as JSON ({e})") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds {type(values).__name__}, not an object")
    return values


@dataclass(frozen=True)
class TextConfig:
    """The text decoder (transformers' `Gemma3nTextConfig`)."""

    vocab_size: int = 262_400
    vocab_size_per_layer_input: int = 262_144
    hidden_size: int = 2048
    hidden_size_per_layer_input: int = 256
    intermediate_size: tuple[int, ...] = 16_384  # type: ignore[assignment]
    num_hidden_layers: int = 35
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 256
    hidden_activation: str = "gelu_pytorch_tanh"
    rms_norm_eps: float = 1e-6
    pad_token_id: int = 0
    attention_bias: bool = False
    sliding_window: int = 512
    layer_types: tuple[str, ...] = ()
    final_logit_softcapping: Optional[float] = 30.0
    altup_active_idx: int = 0
    altup_coef_clip: Optional[float] = 120.0
    altup_correct_scale: bool = True
    altup_num_inputs: int = 4
    num_kv_shared_layers: int = 15
    laurel_rank: int = 64
    activation_sparsity_pattern: tuple[float, ...] = ()
    rope_theta: float = 1_000_000.0
    rope_local_base_freq: float = 10_000.0
    max_position_embeddings: int = 32_768

    def __post_init__(self) -> None:
        layers = self.num_hidden_layers
        types = self.layer_types or tuple(FULL if (i + 1) % 5 == 0 else SLIDING for i in range(layers))
        sparsity = self.activation_sparsity_pattern or tuple(
            0.95 if i < 10 and layers > 10 else 0.0 for i in range(layers)
        )
        set_ = object.__setattr__
        set_(self, "layer_types", _per_layer(types, layers, "layer_types"))
        set_(self, "intermediate_size", _per_layer(self.intermediate_size, layers, "intermediate_size"))
        set_(
            self,
            "activation_sparsity_pattern",
            _per_layer(sparsity, layers, "activation_sparsity_pattern"),
        )
        for name, value in (("rms_norm_eps", self.rms_norm_eps), ("rope_theta", self.rope_theta)):
            if value <= 0:
                raise UserError(f"{name} is {value}; it is more than 0")
        if not all(_is_number(s, False, True) and 0 <= s < 1 for s in self.activation_sparsity_pattern):
            raise UserError("activation_sparsity_pattern has a share that is not from 0 to below 1")
        if self.altup_active_idx >= self.altup_num_inputs:
            raise UserError(f"altup_active_idx {self.altup_active_idx} of {self.altup_num_inputs} streams")
        if layers > 1000 or self.altup_num_inputs > 64:
            raise UserError(f"{layers} layers of {self.altup_num_inputs} streams; no Gemma 3n is like that")
        if unknown := set(self.layer_types) - {SLIDING, FULL}:
            raise UserError(f"layer_types has {sorted(unknown)}; known are {SLIDING} and {FULL}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if not 0 <= self.num_kv_shared_layers < layers:
            raise UserError(f"num_kv_shared_layers {self.num_kv_shared_layers} of {layers} layers")
        if self.num_kv_shared_layers and (
            lost := set(self.layer_types) - set(self.layer_types[: self.first_kv_shared_layer])
        ):
            raise UserError(f"no layer before {self.first_kv_shared_layer} computes the K/V of type {sorted(lost)}")
        if self.hidden_activation != "gelu_pytorch_tanh":
            raise UserError(f"hidden_activation {self.hidden_activation!r}; only gelu_pytorch_tanh is known")
        if self.attention_bias:
            raise UserError("attention_bias true is not supported; no Gemma 3n checkpoint has it")

    @property
    def first_kv_shared_layer(self) -> int:
        return self.num_hidden_layers - self.num_kv_shared_layers

    def is_kv_shared(self, layer: int) -> bool:
        return layer >= self.first_kv_shared_layer

    def kv_donor(self, layer: int) -> int:
        """The layer whose keys and values `layer` attends to: itself, or the last unshared layer of the same type."""
        if not self.is_kv_shared(layer):
            return layer
        own = self.layer_types[layer]
        return max(i for i in range(self.first_kv_shared_layer) if self.layer_types[i] == own)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TextConfig":
        values = dict(values)
        ropes = values.get("rope_parameters") or {}
        for layer_type, name in ((FULL, "rope_theta"), (SLIDING, "rope_local_base_freq")):
            rope = ropes.get(layer_type) or {}
            if rope.get("rope_type", "default") != "default":
                raise UserError(
                    f"rope_parameters.{layer_type}: rope_type {rope['rope_type']!r}; only 'default' is known"
                )
            if "rope_theta" in rope:
                values[name] = rope["rope_theta"]
        if values.get("rope_scaling"):
            raise UserError("rope_scaling is not supported; no Gemma 3n checkpoint has it")
        # null is a value of its own here: no cap, no clip.
        explicit = {
            k: None for k in ("final_logit_softcapping", "altup_coef_clip") if k in values and values[k] is None
        }
        return cls(**_known(cls, values), **explicit)


@dataclass(frozen=True)
class AudioConfig:
    """The USM conformer encoder (transformers' `Gemma3nAudioConfig`)."""

    vocab_size: int = 128
    vocab_offset: int = 262_272
    input_feat_size: int = 128
    hidden_size: int = 1536
    rms_norm_eps: float = 1e-6
    gradient_clipping: float = 1e10
    conf_attention_chunk_size: int = 12
    conf_attention_context_left: int = 13
    conf_attention_context_right: int = 0
    conf_attention_logit_cap: float = 50.0
    conf_num_attention_heads: int = 8
    conf_num_hidden_layers: int = 12
    conf_conv_kernel_size: int = 5
    conf_reduction_factor: int = 4
    conf_residual_weight: float = 0.5
    sscp_conv_channel_size: tuple[int, int] = (128, 32)
    sscp_conv_group_norm_eps: float = 1e-3
    sscp_conv_kernel_size: tuple[tuple[int, int], ...] = ((3, 3), (3, 3))
    sscp_conv_stride_size: tuple[tuple[int, int], ...] = ((2, 2), (2, 2))

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        for name in ("sscp_conv_channel_size", "sscp_conv_kernel_size", "sscp_conv_stride_size"):
            if len(getattr(self, name)) != 2:
                raise UserError(f"{name} is {list(getattr(self, name))}; it is of two convolutions")
        set_(self, "sscp_conv_channel_size", tuple(self.sscp_conv_channel_size))
        for name in ("sscp_conv_kernel_size", "sscp_conv_stride_size"):
            set_(self, name, tuple(tuple(pair) for pair in getattr(self, name)))
        if self.hidden_size % self.conf_num_attention_heads:
            raise UserError(
                f"audio hidden_size {self.hidden_size} is not a multiple of "
                f"conf_num_attention_heads {self.conf_num_attention_heads}"
            )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "AudioConfig":
        return cls(**_known(cls, values))


@dataclass(frozen=True)
class VisionConfig:
    """What the language model needs to know of the vision tower: its token ids and the width of its embeddings."""

    vocab_size: int = 128
    vocab_offset: int = 262_144
    hidden_size: int = 2048
    rms_norm_eps: float = 1e-6

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "VisionConfig":
        return cls(**_known(cls, values))


def check_quantization(values: Optional[dict[str, Any]]) -> None:
    """Of a config.json: its defaults, and those of single modules.

    Raises:
        UserError: a width or a group size that MLX does not have.
    """
    if values is None:
        return
    for name, part in [("quantization", values), *((k, v) for k, v in values.items() if isinstance(v, dict))]:
        for key, allowed in (("bits", (2, 3, 4, 5, 6, 8)), ("group_size", (16, 32, 64, 128))):
            if key not in part and name == "quantization":
                raise UserError(f"quantization has no {key}; it is one of {', '.join(map(str, allowed))}")
            if key in part and (isinstance(part[key], bool) or part[key] not in allowed):
                raise UserError(f"{name}: {key} is {part[key]!r}; it is one of {', '.join(map(str, allowed))}")


@dataclass(frozen=True)
class Config:
    """A whole Gemma 3n checkpoint (transformers' `Gemma3nConfig`, or `Gemma3nTextConfig` for a text-only one)."""

    text_config: TextConfig = field(default_factory=TextConfig)
    audio_config: Optional[AudioConfig] = None
    vision_config: Optional[VisionConfig] = None
    audio_soft_tokens_per_image: int = 188
    audio_token_id: int = 262_273
    image_token_id: int = 262_145
    eos_token_id: tuple[int, ...] = (1,)
    quantization: Optional[dict[str, Any]] = None

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Config":
        """
        Args:
            values: config.json of a `gemma3n` or `gemma3n_text` checkpoint, or of one of ours (the same with
                `quantization`).

        Raises:
            UserError: it is another model's, or a field has a value no Gemma 3n has.
        """
        kind = values.get("model_type")
        if kind not in ("gemma3n", "gemma3n_text"):
            raise UserError(f"model_type is {kind!r}; a Gemma 3n checkpoint has 'gemma3n' or 'gemma3n_text'")
        for name in ("text_config", "audio_config", "vision_config", "quantization"):
            if not isinstance(values.get(name), (dict, type(None))):
                raise UserError(f"{name} is {values[name]!r}; it is an object")
        check_quantization(values.get("quantization"))
        nested = kind == "gemma3n"
        text = values.get("text_config") or {} if nested else values
        eos = values.get("eos_token_id", text.get("eos_token_id", 1))
        return cls(
            text_config=TextConfig.from_dict(text),
            audio_config=AudioConfig.from_dict(values["audio_config"]) if values.get("audio_config") else None,
            vision_config=VisionConfig.from_dict(values["vision_config"]) if values.get("vision_config") else None,
            eos_token_id=tuple(eos) if isinstance(eos, (list, tuple)) else (eos,),
            quantization=values.get("quantization"),
            **_known(
                cls, {k: values.get(k) for k in ("audio_soft_tokens_per_image", "audio_token_id", "image_token_id")}
            ),
        )

    @classmethod
    def load(cls, folder: str | Path) -> "Config":
        """Reads `folder`/config.json.

        Raises:
            UserError: no such file, not JSON, or not a Gemma 3n config; the message names the file.
        """
        values = read_config(folder)
        try:
            return cls.from_dict(values)
        except (UserError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as e:
            raise UserError(f"{Path(folder) / 'config.json'}: {e}") from None
