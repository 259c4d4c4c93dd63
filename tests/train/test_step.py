"""LoRA gradients against PEFT on the transformers model, tensor by tensor, and accumulation against one batch."""

import copy

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import peft
import pytest
import torch
from mlx.utils import tree_flatten

from mlx_gemma3n import lora
from tests.reference import AWKWARD, MixedBatch, awkward_model, mixed_batch, port, relative
from train.batching import Batch
from train.step import Pieces, accumulate, apply, loss_and_gradients
from train.trained_audio import TrainedAudio

TOLERANCE = 1e-3
TARGETS = r"model\.language_model\.layers\.\d+\.(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj"
AUDIO_TARGETS = r"model\.audio_tower\..*\.(q_proj|k_proj|v_proj|post|ffw_layer_1|ffw_layer_2|linear_start|linear_end)"


def peft_model(model, targets: str, seed: int = 0):
    """`model` with PEFT's adapters, A and B random and not zero, in training mode."""
    config = peft.LoraConfig(r=4, lora_alpha=6, lora_dropout=0.0, target_modules=targets)
    wrapped = peft.get_peft_model(copy.deepcopy(model), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return wrapped.train()


def adapter_tensors(wrapped, gradients: bool = False) -> dict[str, np.ndarray]:
    """PEFT's tensors, or their gradients, under our names and in our layout."""
    tensors = {}
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            ours = name.replace("base_model.model.model.", "").replace(".default.weight", "")
            value = parameter.grad if gradients else parameter.detach()
            tensors[ours.replace("lora_A", "lora_a").replace("lora_B", "lora_b")] = value.numpy().T
    return tensors


def ours_with(model, wrapped):
    ours = port(model)
    tensors = adapter_tensors(wrapped)
    config = lora.AdapterConfig(target_modules=tuple({name.rpartition(".")[0] for name in tensors}), r=4, lora_alpha=6)
    lora.attach(ours, config)
    lora.load_weights(
        ours, config, {n: mx.array(np.ascontiguousarray(t)) for n, t in tensors.items()}, "PEFT's tensors"
    )
    return ours.train(), config


def labels_of(mixed: MixedBatch, seed: int = 5) -> np.ndarray:
    """A third of the real text tokens."""
    chosen = np.random.default_rng(seed).random(mixed.input_ids.shape) < 1 / 3
    text = (mixed.attention_mask == 1) & (mixed.input_ids < 480)
    return np.where(chosen & text, mixed.input_ids, -100)


def rows(mixed: MixedBatch, row: int | None) -> MixedBatch:
    """The whole batch, or its row 2 alone with its two clips."""
    if row is None:
        return mixed
    return MixedBatch(
        mixed.input_ids[2:], mixed.attention_mask[2:], mixed.input_features[1:], mixed.input_features_mask[1:]
    )


def as_batch(mixed: MixedBatch, labels: np.ndarray) -> Batch:
    return Batch(
        input_ids=mixed.input_ids.astype(np.int32),
        attention_mask=mixed.attention_mask.astype(np.int32),
        labels=labels.astype(np.int32),
        examples=(),
    )


def clips_of(mixed: MixedBatch):
    return TrainedAudio(lambda batch: [(mixed.input_features, mixed.input_features_mask)])


def reference_gradients(wrapped, mixed: MixedBatch, labels: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
    wrapped.zero_grad()
    logits = wrapped(**mixed.torch()).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), torch.from_numpy(labels[:, 1:].reshape(-1)), ignore_index=-100
    )
    loss.backward()
    return loss.item(), adapter_tensors(wrapped, gradients=True)


@pytest.fixture(scope="module", params=AWKWARD)
def trained(request):
    model = awkward_model(request.param)
    wrapped = peft_model(model, TARGETS)
    return model, wrapped, *ours_with(model, wrapped)


@pytest.mark.parametrize("checkpointing, tokens, logits", [(False, 1, 5), (True, 1000, 1000), (True, 24, 7)])
@pytest.mark.parametrize("row", [None, 2], ids=["batch of 3", "batch of 1"])
def test_every_gradient_is_pefts(trained, row, checkpointing, tokens, logits):
    model, wrapped, ours, _ = trained
    mixed = rows(mixed_batch(model.config), row)
    labels = labels_of(mixed)
    want_loss, want = reference_gradients(wrapped, mixed, labels)
    batch = as_batch(mixed, labels)
    loss, tokens, gradients = accumulate(ours, [batch], clips_of(mixed), Pieces(checkpointing, tokens, logits))
    got = dict(tree_flatten(gradients))
    assert tokens == (labels[:, 1:] != -100).sum()
    assert loss / tokens == pytest.approx(want_loss, abs=1e-4)
    assert got.keys() == want.keys()
    errors = {name: relative(got[name], want[name]) for name in want}
    worst_name = max(errors, key=errors.get)
    assert errors[worst_name] <= TOLERANCE, (worst_name, errors[worst_name])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_of_audio_adapters_are_pefts(checkpointing):
    model = awkward_model("five")
    wrapped = peft_model(model, f"({TARGETS})|({AUDIO_TARGETS})")
    ours, config = ours_with(model, wrapped)
    assert set(lora.resolve_targets(ours, "language+audio")) == set(config.target_modules)
    mixed = mixed_batch(model.config)
    labels = labels_of(mixed)
    _, want = reference_gradients(wrapped, mixed, labels)
    _, _, gradients = accumulate(ours, [as_batch(mixed, labels)], clips_of(mixed), Pieces(checkpointing))
    got = dict(tree_flatten(gradients))
    assert got.keys() == want.keys()
    for name in want:
        assert relative(got[name], want[name]) <= TOLERANCE, name


def test_accumulating_rows_equals_the_batch(trained):
    model, _, ours, _ = trained
    mixed = mixed_batch(model.config)
    labels = labels_of(mixed)
    labels[1] = -100  # rows of unlike shares of the supervised tokens
    labels[1, 3] = mixed.input_ids[1, 3]
    _, tokens, whole = accumulate(ours, [as_batch(mixed, labels)], clips_of(mixed))
    clips = [slice(0, 1), slice(0, 0), slice(1, 3)]
    parts = [
        MixedBatch(
            mixed.input_ids[i : i + 1],
            mixed.attention_mask[i : i + 1],
            mixed.input_features[c],
            mixed.input_features_mask[c],
        )
        for i, c in enumerate(clips)
    ]
    features = iter(parts)

    def encode(model, batch):
        return clips_of(next(features))(model, batch)

    batches = [as_batch(part, labels[i : i + 1]) for i, part in enumerate(parts)]
    _, added, summed = accumulate(ours, batches, encode)
    assert added == tokens
    for (name, a), (_, b) in zip(tree_flatten(summed), tree_flatten(whole)):
        assert relative(a, b) <= 1e-5, name


def test_the_step_leaves_the_base_alone_and_the_model_usable(trained):
    model, _, ours, _ = trained
    mixed = mixed_batch(model.config)
    batch = as_batch(mixed, labels_of(mixed))
    frozen = {n: np.array(v) for n, v in tree_flatten(ours.parameters()) if "lora_" not in n}
    before = {n: np.array(v) for n, v in tree_flatten(ours.trainable_parameters())}
    assert before and all("lora_" in n for n in before)
    optimizer = optim.AdamW(1e-3, bias_correction=True)
    loss, tokens, gradients = accumulate(ours, [batch], clips_of(mixed))
    norm = apply(ours, optimizer, gradients, 1e-2, max_grad_norm=1.0)
    assert norm > 0
    after = dict(tree_flatten(ours.parameters()))
    assert all((np.array(after[n]) == v).all() for n, v in frozen.items())
    assert all((np.array(after[n]) != v).any() for n, v in before.items())
    value, _ = loss_and_gradients(ours, batch, clips_of(mixed))
    assert np.isfinite(value)
    lora.load_weights(ours, trained[3], {n: mx.array(v) for n, v in before.items()}, "before")


def test_dropout_draws_the_same_masks_when_a_layer_is_computed_again():
    """Along a random direction the gradient under checkpointing is the slope of the loss it belongs to."""
    model = awkward_model("five")
    ours = port(model)
    config = lora.AdapterConfig(lora.resolve_targets(ours, "language"), r=4, lora_alpha=8, lora_dropout=0.5)
    lora.attach(ours, config).train()
    mx.random.seed(3)
    weights = {n: 0.1 * mx.random.normal(w.shape) for n, w in lora.adapter_weights(ours).items()}
    lora.load_weights(ours, config, weights, "random")
    mixed = mixed_batch(model.config)
    batch = as_batch(mixed, labels_of(mixed))

    def loss_at(step: float, direction: dict) -> tuple[float, dict]:
        moved = {n: w + step * direction[n] for n, w in weights.items()}
        lora.load_weights(ours, config, moved, "moved")
        mx.random.seed(11)
        value, gradients = loss_and_gradients(ours, batch, clips_of(mixed))
        return value, gradients

    # Along the gradient the slope is its squared norm, which no other mask's gradient gives.
    _, gradients = loss_at(0.0, weights)
    slope = sum((g * g).sum().item() for g in gradients.values())
    step = 0.01 / slope**0.5
    rise = loss_at(step, gradients)[0] - loss_at(-step, gradients)[0]
    assert rise / (2 * step) == pytest.approx(slope, rel=0.01)
