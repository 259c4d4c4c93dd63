"""One table: a tensor's name and layout in transformers, and in ours.

Ours are transformers' names without the leading `model.`; only convolutions are laid out differently, channels last. A
few tensors of a checkpoint have no place of their own here: `lm_head` is the token table again, and Google's files
carry key and value projections of the KV-shared layers that nothing reads. The vision tower's pass through under their
own names.
"""

import re
from typing import Optional

from mlx_gemma3n.config import AudioConfig, Config, TextConfig, VisionConfig

Shape = tuple[int, ...]

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


def _text_shapes(config: TextConfig) -> dict[str, Shape]:
    size, per_layer, layers = config.hidden_size, config.hidden_size_per_layer_input, config.num_hidden_layers
    inputs, rank, head = config.altup_num_inputs, config.laurel_rank, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    shapes = {
        "embed_tokens": (config.vocab_size, size),
        "embed_tokens_per_layer": (config.vocab_size_per_layer_input, layers * per_layer),
        "per_layer_model_projection": (layers * per_layer, size),
        "per_layer_projection_norm": (per_layer,),
    }
    for name in ("altup_projections", "altup_unembed_projections"):
        shapes |= {f"{name}.{i}": (size, size) for i in range(inputs - 1)}
    for i, width in enumerate(config.intermediate_size):
        layer = {
            "self_attn.q_proj": (queries, size),
            "self_attn.k_proj": (keys, size),
            "self_attn.v_proj": (keys, size),
            "self_attn.o_proj": (size, queries),
            "self_attn.q_norm": (head,),
            "self_attn.k_norm": (head,),
            "mlp.gate_proj": (width, size),
            "mlp.up_proj": (width, size),
            "mlp.down_proj": (size, width),
            "laurel.linear_left": (rank, size),
            "laurel.linear_right": (size, rank),
            "laurel.post_laurel_norm": (size,),
            "altup.correction_coefs": (inputs, inputs),
            "altup.prediction_coefs": (inputs**2, inputs),
            "altup.modality_router": (inputs, size),
            "altup.router_norm": (size,),
            "input_layernorm": (size,),
            "post_attention_layernorm": (size,),
            "pre_feedforward_layernorm": (size,),
            "post_feedforward_layernorm": (size,),
            "per_layer_input_gate": (per_layer, size),
            "per_layer_projection": (size, per_layer),
            "post_per_layer_input_norm": (size,),
        }
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["norm"] = (size,)
    weights = {f"language_model.{name}.weight": shape for name, shape in shapes.items()}
    weights |= {f"language_model.layers.{i}.altup.correct_output_scale": (size,) for i in range(layers)}
    return {name: shape for name, shape in weights.items() if not is_dead(name, config)}


def _audio_shapes(config: AudioConfig) -> dict[str, Shape]:
    size, channels, kernels = config.hidden_size, config.sscp_conv_channel_size, config.sscp_conv_kernel_size
    bins = config.input_feat_size
    shapes: dict[str, Shape] = {}
    for i, (before, after) in enumerate(zip((1, *channels), channels)):
        shapes[f"subsample_conv_projection.conv_{i}.conv"] = (after, *kernels[i], before)
        shapes[f"subsample_conv_projection.conv_{i}.norm"] = (after,)
        bins = (bins + 2 - kernels[i][1]) // config.sscp_conv_stride_size[i][1] + 1
    shapes["subsample_conv_projection.input_proj_linear"] = (size, bins * channels[-1])
    block: dict[str, Shape] = {
        "attention.pre_attn_norm": (size,),
        "attention.attn.relative_position_embedding.pos_proj": (size, size),
        "attention.attn.q_proj": (size, size),
        "attention.attn.k_proj": (size, size),
        "attention.attn.v_proj": (size, size),
        "attention.post": (size, size),
        "attention.post_norm": (size,),
        "lconv1d.pre_layer_norm": (size,),
        "lconv1d.linear_start": (2 * size, size),
        "lconv1d.depthwise_conv1d": (size, config.conf_conv_kernel_size, 1),
        "lconv1d.conv_norm": (size,),
        "lconv1d.linear_end": (size, size),
        "norm": (size,),
    }
    for name in ("ffw_layer_start", "ffw_layer_end"):
        block |= {
            f"{name}.pre_layer_norm": (size,),
            f"{name}.ffw_layer_1": (4 * size, size),
            f"{name}.ffw_layer_2": (size, 4 * size),
            f"{name}.post_layer_norm": (size,),
        }
    blocks = range(config.conf_num_hidden_layers)
    shapes |= {f"conformer.{i}.{name}": shape for i in blocks for name, shape in block.items()}
    weights = {f"audio_tower.{name}.weight": shape for name, shape in shapes.items()}
    head = (size // config.conf_num_attention_heads,)
    return weights | {f"audio_tower.conformer.{i}.attention.attn.per_dim_scale": head for i in blocks}


def _embedder_shapes(part: str, config: AudioConfig | VisionConfig, text_hidden_size: int) -> dict[str, Shape]:
    return {
        f"{part}.embedding.weight": (config.vocab_size, config.hidden_size),
        f"{part}.hard_embedding_norm.weight": (config.hidden_size,),
        f"{part}.soft_embedding_norm.weight": (config.hidden_size,),
        f"{part}.embedding_projection.weight": (text_hidden_size, config.hidden_size),
    }


def expected_shapes(config: Config) -> dict[str, Shape]:
    """Name and shape of every tensor of `Gemma3n(config)`, before quantization and without the vision tower.

    From the config's arithmetic alone, so that a checkpoint can be checked (and its memory planned) without a model.
    """
    shapes = _text_shapes(config.text_config)
    for part, modality in (("embed_vision", config.vision_config), ("embed_audio", config.audio_config)):
        if modality is not None:
            shapes |= _embedder_shapes(part, modality, config.text_config.hidden_size)
    if config.audio_config is not None:
        shapes |= _audio_shapes(config.audio_config)
    return shapes
