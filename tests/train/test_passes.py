"""The passes where a text is longer than a block of queries, what their attention costs, and what they draw."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx.utils import tree_flatten

from mlx_gemma3n import lora
from mlx_gemma3n.config import FULL, SLIDING, TextConfig
from mlx_gemma3n.text import QUERY_BLOCK, DecoderLayer, attend, query_blocks
from tests.reference import (
    TEXT_IDS,
    awkward_model,
    mixed_batch,
    port,
    reference_config,
    reference_model,
    relative,
    worst,
)
from tests.train.test_loss import over_before
from tests.train.test_step import (
    TARGETS,
    TOLERANCE,
    as_batch,
    clips_of,
    labels_of,
    ours_with,
    peft_model,
    reference_gradients,
)
from train.loss import supervised_positions
from train.passes import Attended
from train.piece import own_randomness
from train.step import Pieces, accumulate, hidden_states, loss_and_gradients
from train.trained_audio import TrainedAudio

# --- against transformers and PEFT ------------------------------------------------------------------------------------

LENGTHS = (600, 430)


@dataclass
class LongBatch:
    """Text alone: two rows of unlike length, neither a multiple of a block or a piece, padded on the right."""

    input_ids: np.ndarray
    attention_mask: np.ndarray

    def torch(self) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(value) for name, value in vars(self).items()}


def long_batch() -> LongBatch:
    real = np.arange(max(LENGTHS))[None] < np.array(LENGTHS)[:, None]
    ids = np.random.default_rng(0).integers(10, TEXT_IDS, real.shape)
    return LongBatch(np.where(real, ids, 0), real.astype(np.int64))


def no_audio(model, batch):
    return None


@pytest.fixture(scope="module")
def long_trained():
    """Layers of either kind; of each kind one that two later layers share keys and values with."""
    text = dict(
        num_hidden_layers=8,
        num_kv_shared_layers=4,
        layer_types=[FULL, SLIDING, SLIDING, FULL, SLIDING, FULL, SLIDING, FULL],
        intermediate_size=192,
        activation_sparsity_pattern=[0.95, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0],
        num_attention_heads=4,
        num_key_value_heads=2,
        altup_num_inputs=3,
        sliding_window=100,
        final_logit_softcapping=20.0,
    )
    model = reference_model(reference_config(text, dict(hidden_size=32)))
    wrapped = peft_model(model, TARGETS)
    ours, _ = ours_with(model, wrapped)
    long = long_batch()
    labels = labels_of(long)
    return wrapped, ours, long, labels, *reference_gradients(wrapped, long, labels)


def test_long_logits_are_transformers(long_trained):
    wrapped, ours, long, *_ = long_trained
    with torch.no_grad():
        want = wrapped(**long.torch()).logits.numpy()
    got = np.array(ours(mx.array(long.input_ids), attention_mask=mx.array(long.attention_mask)))
    real = long.attention_mask == 1
    assert worst(got[real], want[real]) <= 1e-4


@pytest.mark.parametrize("tokens", [64, 1000])
def test_long_logits_piece_by_piece_are_transformers(long_trained, tokens):
    wrapped, ours, long, labels, *_ = long_trained
    positions, _ = supervised_positions(labels)
    with torch.no_grad():
        want = wrapped(**long.torch()).logits.numpy()
    got = ours.logits(hidden_states(ours, as_batch(long, labels), no_audio, Pieces(tokens=tokens)))
    assert worst(got, want.reshape(-1, want.shape[-1])[positions]) <= 1e-4


@pytest.mark.parametrize("pieces", [Pieces(tokens=64), Pieces(tokens=1000), Pieces(False)], ids=str)
def test_long_gradients_are_pefts(long_trained, pieces):
    _, ours, long, labels, want_loss, want = long_trained
    loss, tokens, gradients = accumulate(ours, [as_batch(long, labels)], no_audio, pieces)
    got = dict(tree_flatten(gradients))
    assert loss / tokens == pytest.approx(want_loss, abs=1e-4)
    assert got.keys() == want.keys()
    errors = {name: relative(got[name], want[name]) for name in want}
    name = max(errors, key=errors.get)
    print(f"{pieces}: {errors[name]:.1e} at {name}")
    assert errors[name] <= TOLERANCE, name


# --- which keys a query meets -----------------------------------------------------------------------------------------


def may_attend(tokens: int, keys: int, window: int | None) -> np.ndarray:
    """bool `[tokens, keys]`, of the definition: a query is the token `keys - tokens` further on than its index."""
    query, key = np.arange(tokens)[:, None] + keys - tokens, np.arange(keys)[None]
    return (key <= query) & (True if window is None else key > query - window)


def attended(tokens: int, keys: int, window: int | None, attention_mask: np.ndarray | None = None) -> np.ndarray:
    """What `attend` does, as bool `[batch, tokens, keys]`: with equal scores and one value for each key, a query's
    output is its weights."""
    batch = 1 if attention_mask is None else len(attention_mask)
    values = mx.broadcast_to(mx.eye(keys)[None, None], (batch, 1, keys, keys))
    zeros = mx.zeros((batch, 1, keys, keys))
    mask = None if attention_mask is None else mx.array(attention_mask)
    weights = np.array(attend(zeros[:, :, :tokens], zeros, values, window, mask))[:, 0]
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
    return weights > 0


SIZES = [1, 2, QUERY_BLOCK - 1, QUERY_BLOCK, QUERY_BLOCK + 1, 600]
OFFSETS = [0, 1, 5, 299, 300]
WINDOWS = [1, 7, QUERY_BLOCK, 300, None]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("offset", OFFSETS)
def test_blocks_hold_every_pair_that_may_attend(offset, window):
    for tokens in SIZES:
        may = may_attend(tokens, offset + tokens, window)
        times = np.zeros(may.shape, int)
        for q, k in query_blocks(tokens, offset + tokens, window):
            assert 0 <= q.start < q.stop <= tokens and 0 <= k.start < k.stop <= offset + tokens
            times[q, k] += 1
            # And no key that none of the block's queries sees.
            assert may[q, k].any(0).all()
            assert q.stop - q.start <= QUERY_BLOCK
        assert (times[may] == 1).all() and times.max() == 1


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("offset", OFFSETS)
def test_a_query_attends_as_the_whole_mask_says(offset, window):
    for tokens in SIZES:
        np.testing.assert_array_equal(
            attended(tokens, offset + tokens, window)[0], may_attend(tokens, offset + tokens, window)
        )


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("offset", [0, 300])
def test_padding_is_seen_by_itself_alone(offset, window):
    """The mask may cover more than the keys: a sliding cache has dropped the oldest ones."""
    tokens, dropped = 2 * QUERY_BLOCK + 20, 9
    keys = offset + tokens
    mask = np.ones((2, dropped + keys), np.int32)
    mask[1, -QUERY_BLOCK - 3 :] = 0
    may = may_attend(tokens, keys, window)
    itself = np.eye(tokens, keys, offset, dtype=bool)
    got = attended(tokens, keys, window, mask)
    for row in range(2):
        np.testing.assert_array_equal(got[row], may & (mask[row, dropped:] == 1)[None] | itself)


# --- what attention costs ---------------------------------------------------------------------------------------------

HEADS, KV_HEADS, HEAD_DIM, WINDOW = 8, 2, 32, 128
LONG = (1024, 2048, 4096)
# Arrays of one block's scores: they, their softmax, its gradient and theirs; and less than one more for the rest.
BLOCK_ARRAYS = 5


def scores(queries: int, keys: int) -> int:
    return HEADS * queries * keys * 4


def results(tokens: int) -> int:
    """Bytes of queries, keys and values."""
    return (HEADS + 2 * KV_HEADS) * tokens * HEAD_DIM * 4


def assert_linear(peaks: list[int]) -> None:
    """Twice the tokens take twice the memory at most; with the scores of all pairs it would rise four times as fast."""
    assert peaks[1] <= 2.1 * peaks[0] and peaks[2] <= 2.1 * peaks[1]
    assert peaks[2] - peaks[1] <= 2.5 * (peaks[1] - peaks[0])
    assert peaks[2] <= scores(LONG[2], LONG[2]) / 8


def test_sliding_attention_takes_memory_by_the_token():
    """In one graph the scores of all blocks may be alive together: of each token, those with its window and block."""
    peaks = []
    for tokens in LONG:
        heads = lambda n, seed: mx.random.normal((1, n, tokens, HEAD_DIM), key=mx.random.key(seed))
        queries, keys, values = heads(HEADS, 0), heads(KV_HEADS, 1), heads(KV_HEADS, 2)
        mask = mx.ones((1, tokens), mx.int32)
        mx.eval(queries, keys, values, mask)
        peaks.append(over_before(lambda: mx.eval(attend(queries, keys, values, WINDOW, mask))))
        assert peaks[-1] <= scores(tokens, QUERY_BLOCK + WINDOW) + 3 * queries.nbytes
    print("attend:", *(f"{p / 1e6:.1f} MB" for p in peaks), f"of {scores(tokens, tokens) / 1e6:.1f} MB of scores")
    assert_linear(peaks)


def backward_peak(layer_type: str, tokens: int) -> int:
    text = TextConfig(
        vocab_size=16,
        vocab_size_per_layer_input=16,
        hidden_size=64,
        hidden_size_per_layer_input=16,
        intermediate_size=64,
        num_hidden_layers=1,
        num_kv_shared_layers=0,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        altup_num_inputs=2,
        sliding_window=WINDOW,
        layer_types=(layer_type,),
    )
    streams = mx.random.normal((2, 1, tokens, 64), key=mx.random.key(0))
    layer = Attended(DecoderLayer(text, 0), streams, mx.ones((1, tokens), mx.int32), None, 0, 128)
    cotangent = mx.random.normal(layer.out.shape, key=mx.random.key(1))
    mx.eval(cotangent)
    return over_before(lambda: mx.eval(layer.backward(cotangent)))


def test_the_gradient_of_sliding_attention_has_the_scores_of_one_block():
    peaks = [backward_peak(SLIDING, tokens) for tokens in LONG]
    print("backward:", *(f"{p / 1e6:.1f} MB, {results(t) / 1e6:.1f} of it results;" for p, t in zip(peaks, LONG)))
    assert_linear(peaks)
    for peak, tokens in zip(peaks, LONG):
        assert peak <= results(tokens) + BLOCK_ARRAYS * scores(QUERY_BLOCK, QUERY_BLOCK + WINDOW)


def test_the_gradient_of_full_attention_too():
    tokens = LONG[1]
    peak = backward_peak(FULL, tokens)
    print(f"backward: {peak / 1e6:.1f} MB of {scores(tokens, tokens) / 1e6:.1f} MB of scores")
    assert peak <= results(tokens) + BLOCK_ARRAYS * scores(QUERY_BLOCK, tokens)


# --- what is drawn ----------------------------------------------------------------------------------------------------


def with_dropout(targets) -> tuple:
    """A model with adapters of dropout 0.5, their config and weights, and a batch of three clips."""
    model = awkward_model("five")
    ours = port(model)
    config = lora.AdapterConfig(lora.resolve_targets(ours, targets), r=4, lora_alpha=8, lora_dropout=0.5)
    lora.attach(ours, config).train()
    mx.random.seed(3)
    weights = {n: 0.1 * mx.random.normal(w.shape) for n, w in lora.adapter_weights(ours).items()}
    lora.load_weights(ours, config, weights, "random")
    mixed = mixed_batch(model.config)
    return ours, config, weights, as_batch(mixed, labels_of(mixed)), clips_of(mixed)


@pytest.fixture(scope="module")
def dropping():
    return with_dropout("language+audio")


def slope_error(dropping, tokens: int, part: str) -> float:
    """How far the loss's slope along the gradient of a part's adapters is from that gradient's squared norm, which no
    other mask's gradient gives; relative."""
    ours, config, weights, batch, clips = dropping

    def at(step: float, direction: dict) -> tuple[float, dict]:
        lora.load_weights(ours, config, {n: w + step * direction.get(n, 0) for n, w in weights.items()}, "moved")
        mx.random.seed(11)
        return loss_and_gradients(ours, batch, clips, Pieces(tokens=tokens))

    _, gradients = at(0.0, {})
    gradients = {name: g for name, g in gradients.items() if name.startswith(part)}
    slope = sum((g * g).sum().item() for g in gradients.values())
    # Short, for the kinks of many ReLUs; the loss is rounded to less than 1e-3 of its rise.
    step = 0.001 / slope**0.5
    rise = at(step, gradients)[0] - at(-step, gradients)[0]
    lora.load_weights(ours, config, weights, "as they were")
    print(f"{part}, {tokens}: {rise / (2 * step) / slope - 1:+.1e} of {slope:.1e}")
    return rise / (2 * step) / slope - 1


# Apart, for the text's gradients are the larger ones and would hide a wrong mask of the audio's.
@pytest.mark.parametrize("part", ["language_model", "audio_tower.conformer.0", "audio_tower.conformer.1"])
@pytest.mark.parametrize("tokens", [24, 1000])
def test_the_gradient_under_dropout_is_the_slope_of_the_loss(dropping, tokens, part):
    assert abs(slope_error(dropping, tokens, part)) <= 0.01


def state() -> list[int]:
    return mx.random.state[0].tolist()


def test_a_step_draws_one_number(dropping):
    ours, _, _, batch, clips = dropping
    mx.random.seed(5)
    mx.random.randint(0, 2**30)
    want = state()
    mx.random.seed(5)
    loss_and_gradients(ours, batch, clips)
    assert state() == want


def test_an_evaluation_draws_none(dropping):
    ours, _, _, batch, clips = dropping
    mx.random.seed(5)
    before = state()
    hidden = hidden_states(ours.eval(), batch, clips, Pieces())
    assert state() == before
    again = hidden_states(ours, batch, clips, Pieces())
    ours.train()
    assert worst(hidden, again) == 0


@pytest.mark.parametrize("seed", [0, 2**31, 2**32 - 1, 2**63, 2**64 - 1])
def test_randomness_of_its_own_leaves_any_state_as_it_was(seed):
    mx.random.seed(seed)
    before = state()
    with own_randomness():
        mx.random.seed(1)
        mx.eval(mx.random.normal((3,)))
    assert state() == before
    with pytest.raises(KeyError), own_randomness():
        mx.random.seed(1)
        raise KeyError
    assert state() == before


def test_micro_batches_draw_masks_of_their_own(dropping):
    ours, _, _, batch, clips = dropping
    mx.random.seed(7)
    first, _ = loss_and_gradients(ours, batch, clips)
    second, _ = loss_and_gradients(ours, batch, clips)
    assert abs(first - second) > 1e-3 * first
    mx.random.seed(7)
    both, *_ = accumulate(ours, [batch, batch], clips)
    assert both == pytest.approx(first + second, rel=1e-6)
    mx.random.seed(7)
    assert loss_and_gradients(ours, batch, clips)[0] == first


def test_the_clips_of_a_batch_draw_masks_of_their_own(dropping):
    ours, _, _, batch, clips = dropping
    features, mask = clips.clips(batch)[0]
    twice = TrainedAudio(lambda batch: [(features[:1].repeat(2, 0), mask[:1].repeat(2, 0))])
    first, second = twice.forward(ours, twice.decoded(batch), 0)
    assert relative(first, second) > 1e-2
    first, second = twice.forward(ours.eval(), twice.decoded(batch), 0)
    ours.train()
    assert worst(first, second) == 0


@pytest.mark.parametrize(
    "path",
    [
        "embed_audio.embedding_projection",
        "language_model.altup_projections.0",
        "language_model.per_layer_model_projection",
        "language_model.altup_unembed_projections.0",
        "audio_tower.subsample_conv_projection.input_proj_linear",
    ],
)
def test_also_of_modules_outside_the_layers(path):
    assert abs(slope_error(with_dropout([path]), 24, path)) <= 0.01
