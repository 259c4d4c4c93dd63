"""Random little Gemma 3n models of transformers, made to be awkward, and their weights in ours.

Every parameter is randomised: fresh norm weights are ones and fresh output scales zeros, and both hide mistakes.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from transformers import Gemma3nConfig, Gemma3nForConditionalGeneration
from transformers.models.gemma3n.configuration_gemma3n import (
    Gemma3nAudioConfig,
    Gemma3nTextConfig,
    Gemma3nVisionConfig,
)

from mlx_gemma3n.config import FULL, SLIDING
from mlx_gemma3n.loading import load_model
from mlx_gemma3n.model import Gemma3n

TEXT_IDS, VISION_IDS, AUDIO_IDS = 480, 16, 16
VOCABULARY = TEXT_IDS + VISION_IDS + AUDIO_IDS
AUDIO_TOKEN = TEXT_IDS + VISION_IDS + 1

# Between them: KV-shared layers 0, 5 and 10, irregular layer types, a window shorter than the text, a width for each
# layer, sparsity on and off, 1, 2 and 4 queries a key, 2 and 4 AltUp inputs, scale on and off, other soft caps, and
# audio encoders of other widths, chunks, contexts, reductions and kernels.
AWKWARD: dict[str, dict[str, dict[str, Any]]] = {
    "unshared": {
        "text": dict(
            num_hidden_layers=4,
            num_kv_shared_layers=0,
            layer_types=[SLIDING, FULL, FULL, SLIDING],
            intermediate_size=[192, 64, 128, 80],
            activation_sparsity_pattern=[0.95, 0.0, 0.5, 0.0],
            num_attention_heads=4,
            num_key_value_heads=4,
            altup_num_inputs=2,
            sliding_window=7,
            final_logit_softcapping=30.0,
        ),
        "audio": dict(hidden_size=32, conf_num_attention_heads=2, conf_attention_context_right=2),
    },
    "five": {
        "text": dict(
            num_hidden_layers=9,
            num_kv_shared_layers=5,
            layer_types=[FULL, SLIDING, SLIDING, FULL, SLIDING, FULL, FULL, SLIDING, SLIDING],
            intermediate_size=256,
            activation_sparsity_pattern=[0.95] * 3 + [0.0] * 6,
            num_attention_heads=4,
            num_key_value_heads=2,
            altup_num_inputs=4,
            altup_active_idx=1,
            altup_correct_scale=False,
            sliding_window=16,
            final_logit_softcapping=5.0,
        ),
        "audio": dict(
            hidden_size=48,
            conf_num_attention_heads=4,
            conf_attention_chunk_size=5,
            conf_attention_context_left=4,
            conf_reduction_factor=2,
            conf_conv_kernel_size=3,
            sscp_conv_channel_size=(6, 10),
        ),
    },
    "ten": {
        "text": dict(
            num_hidden_layers=15,
            num_kv_shared_layers=10,
            intermediate_size=[192] * 5 + [256] * 10,
            num_attention_heads=4,
            num_key_value_heads=1,
            altup_num_inputs=4,
            sliding_window=5,
            final_logit_softcapping=2.5,
            hidden_size_per_layer_input=12,
            laurel_rank=6,
        ),
        "audio": dict(
            hidden_size=64,
            conf_attention_chunk_size=3,
            conf_attention_context_left=1,
            conf_attention_context_right=1,
            conf_reduction_factor=4,
            conf_conv_kernel_size=7,
            conf_attention_logit_cap=10.0,
        ),
    },
    "wide_window": {
        "text": dict(
            num_hidden_layers=6,
            num_kv_shared_layers=3,
            layer_types=[SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL],
            intermediate_size=128,
            activation_sparsity_pattern=[0.0] * 6,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            altup_num_inputs=2,
            altup_coef_clip=0.05,
            sliding_window=512,
            rms_norm_eps=1e-5,
        ),
        "audio": dict(
            hidden_size=32,
            conf_num_attention_heads=1,
            conf_reduction_factor=1,
            conf_residual_weight=0.25,
            sscp_conv_kernel_size=((5, 3), (3, 3)),
            rms_norm_eps=1e-5,
        ),
    },
}


def reference_config(text: dict[str, Any], audio: dict[str, Any], **top: Any) -> Gemma3nConfig:
    """A whole transformers config, 64 wide, with timm's test model as its vision tower."""
    text_config = Gemma3nTextConfig(
        **{
            **dict(
                vocab_size=VOCABULARY,
                vocab_size_per_layer_input=TEXT_IDS,
                hidden_size=64,
                hidden_size_per_layer_input=16,
                head_dim=16,
                laurel_rank=8,
                max_position_embeddings=1024,
            ),
            **text,
        }
    )
    audio_config = Gemma3nAudioConfig(
        **{
            **dict(
                vocab_size=AUDIO_IDS,
                vocab_offset=TEXT_IDS + VISION_IDS,
                conf_num_hidden_layers=2,
                sscp_conv_channel_size=(8, 4),
            ),
            **audio,
        }
    )
    vision_config = Gemma3nVisionConfig(
        architecture="test_resnet", hidden_size=384, vocab_size=VISION_IDS, vocab_offset=TEXT_IDS
    )
    return Gemma3nConfig(
        text_config=text_config.to_dict(),
        audio_config=audio_config.to_dict(),
        vision_config=vision_config.to_dict(),
        **{
            **dict(
                audio_soft_tokens_per_image=20,
                audio_token_id=AUDIO_TOKEN,
                image_token_id=TEXT_IDS + 1,
                boa_token_id=8,
                eoa_token_id=TEXT_IDS + VISION_IDS,
                boi_token_id=9,
                eoi_token_id=TEXT_IDS,
            ),
            **top,
        },
    )


def randomize(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Fills every parameter: matrices at the scale that keeps activations near 1, vectors around 1.

    The norms that end a branch are smaller, as in a trained model: else each layer multiplies float32's rounding until
    the reference differs from its own float64. For the same reason the sparse MLPs of `AWKWARD` are wide: where 0.95 of
    64 channels are cut, now and then nothing is left, and the norm after it divides by rounding.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "embed_tokens" in name or "embedding.weight" in name:
                parameter.copy_(noise * 0.3)
            elif "_coefs" in name:
                parameter.copy_(noise * 0.1)
            elif parameter.dim() > 1:
                parameter.copy_(noise / np.sqrt(parameter[0].numel()))
            elif "language_model" in name and "post_" in name:
                parameter.copy_(0.3 + 0.1 * noise)
            else:
                parameter.copy_(1.0 + 0.3 * noise)
    return model


def reference_model(config: Gemma3nConfig, seed: int = 0) -> Gemma3nForConditionalGeneration:
    """A randomised transformers model in float32 with eager attention, in eval mode."""
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = Gemma3nForConditionalGeneration._from_config(config, attn_implementation="eager")
    return randomize(model.float(), seed).eval()


def awkward_model(name: str, seed: int = 0, **top: Any) -> Gemma3nForConditionalGeneration:
    return reference_model(reference_config(**AWKWARD[name], **top), seed)


def save_reference(model: Gemma3nForConditionalGeneration, folder: Path, **options: Any) -> Path:
    """A Hugging Face checkpoint folder of `model`."""
    model.save_pretrained(folder, **options)
    return folder


def port(model: Gemma3nForConditionalGeneration) -> Gemma3n:
    """Our model with the weights of `model`, by way of a checkpoint folder on disk."""
    with tempfile.TemporaryDirectory() as folder:
        save_reference(model, Path(folder))
        return load_model(folder, dtype=mx.float32)


@dataclass
class MixedBatch:
    """Clips of different lengths: one in the first row, none in the second, two in the third, padded on the right."""

    input_ids: np.ndarray
    attention_mask: np.ndarray
    input_features: np.ndarray
    input_features_mask: np.ndarray

    def torch(self) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(value) for name, value in vars(self).items()}

    def mlx(self) -> dict[str, mx.array]:
        return {name: mx.array(value) for name, value in vars(self).items()}


def mixed_batch(config: Gemma3nConfig, seed: int = 0) -> MixedBatch:
    rng = np.random.default_rng(seed)
    audio = config.audio_config
    most = config.audio_soft_tokens_per_image * 4 * audio.conf_reduction_factor
    frames = [most - 3, int(most * 0.37), int(most * 0.71)]
    clip = [config.boa_token_id] + [config.audio_token_id] * config.audio_soft_tokens_per_image + [config.eoa_token_id]
    text = lambda n: rng.integers(10, TEXT_IDS, n).tolist()  # noqa: E731
    rows = [text(5) + clip + text(9), text(17), text(3) + clip + text(4) + clip + text(6)]
    length = max(map(len, rows))
    features = rng.normal(0, 2, (3, max(frames), audio.input_feat_size)).astype(np.float32)
    return MixedBatch(
        input_ids=np.array([row + [0] * (length - len(row)) for row in rows]),
        attention_mask=np.array([[1] * len(row) + [0] * (length - len(row)) for row in rows]),
        input_features=features,
        input_features_mask=np.arange(max(frames))[None] < np.array(frames)[:, None],
    )


def to_torch(x: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(x))


def worst(a: Any, b: Any) -> float:
    """The largest absolute difference of two arrays of the same shape."""
    a, b = (np.array(x.detach() if isinstance(x, torch.Tensor) else x, dtype=np.float64) for x in (a, b))
    assert a.shape == b.shape, (a.shape, b.shape)
    return float(np.abs(a - b).max())


def relative(a: Any, b: Any) -> float:
    """|a - b| / |b| in the 2-norm."""
    a, b = (np.array(x.detach() if isinstance(x, torch.Tensor) else x, dtype=np.float64) for x in (a, b))
    assert a.shape == b.shape, (a.shape, b.shape)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))
