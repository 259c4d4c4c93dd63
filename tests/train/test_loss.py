"""The loss in chunks against the whole logits in torch, and the memory it takes."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import torch
from mlx.utils import tree_map

from mlx_gemma3n.config import Config
from mlx_gemma3n.model import Gemma3n
from tests.reference import relative, to_torch
from train.loss import loss_and_choice, loss_and_hidden_gradient, summed_loss, supervised_positions

HIDDEN, VOCABULARY, ROWS = 64, 512, 23
CHUNKS = [1, 7, ROWS, 1000]


def small_model(vocabulary: int = VOCABULARY, cap: float | None = 30.0, bits: int | None = None) -> Gemma3n:
    """A model with one layer, and logits that span several standard deviations of its vocabulary."""
    text = dict(
        vocab_size=vocabulary,
        vocab_size_per_layer_input=16,
        hidden_size=HIDDEN,
        hidden_size_per_layer_input=8,
        intermediate_size=64,
        num_hidden_layers=1,
        num_kv_shared_layers=0,
        final_logit_softcapping=cap,
    )
    model = Gemma3n(Config.from_dict({"model_type": "gemma3n", "text_config": text}))
    embedding = nn.Embedding(vocabulary, HIDDEN)
    embedding.weight = 0.5 * mx.random.normal((vocabulary, HIDDEN), key=mx.random.key(1))
    model.language_model.embed_tokens = embedding if bits is None else embedding.to_quantized(64, bits)
    mx.eval(model.parameters())
    return model


def rows_of(count: int, vocabulary: int = VOCABULARY) -> tuple[mx.array, mx.array]:
    """Hidden states `[count, hidden]`, and targets, of which the first two are the same token."""
    hidden = mx.random.normal((count, HIDDEN), key=mx.random.key(2))
    targets = np.random.default_rng(3).integers(0, vocabulary, count).astype(np.int32)
    targets[:2] = vocabulary - 1
    mx.eval(hidden)
    return hidden, mx.array(targets)


def table(model: Gemma3n) -> torch.Tensor:
    """The embedding in float64, `[vocabulary, hidden]`."""
    embedding = model.language_model.embed_tokens
    return to_torch(embedding(mx.arange(model.config.text_config.vocab_size)).astype(mx.float32)).double()


def reference(model: Gemma3n, hidden: mx.array, targets: mx.array) -> tuple[float, np.ndarray, np.ndarray]:
    """Loss, gradient and likeliest tokens of one `[rows, vocabulary]` array of logits, in float64."""
    x = to_torch(hidden.astype(mx.float32)).double().requires_grad_()
    logits = x @ table(model).T
    if hidden.dtype == mx.bfloat16:
        # A logit of 8 is off by up to 2^-6 in bfloat16, and a softmax by as much. That is not the gradient's mistake.
        products = model.language_model.embed_tokens.as_linear(hidden).astype(mx.float32)
        logits = logits + (to_torch(products) - logits).detach()
    if (cap := model.config.text_config.final_logit_softcapping) is not None:
        logits = torch.tanh(logits / cap) * cap
    loss = torch.nn.functional.cross_entropy(logits, to_torch(targets).long(), reduction="sum")
    loss.backward()
    return loss.item(), x.grad.numpy(), logits.argmax(-1).numpy()


@pytest.fixture(scope="module", params=[None, 4], ids=["float", "4 bits"])
def bits(request):
    return request.param


@pytest.fixture(scope="module", params=[None, 30.0, 2.5], ids=["no cap", "cap 30", "cap 2.5"])
def model(request, bits):
    return small_model(cap=request.param, bits=bits)


def test_the_caps_are_felt(model):
    """A cap that no logit comes near would test nothing: here the largest logits are beyond the smaller cap."""
    hidden, _ = rows_of(ROWS)
    plain = np.abs((to_torch(hidden).double() @ table(model).T).numpy())
    assert plain.max() > 10
    cap = model.config.text_config.final_logit_softcapping
    assert cap is None or np.abs(np.array(model.logits(hidden))).max() <= cap


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("count", [ROWS, 1])
def test_loss_and_gradient_are_those_of_the_whole_logits(model, count, chunk):
    hidden, targets = rows_of(count)
    want, slope, _ = reference(model, hidden, targets)
    loss, gradient = loss_and_hidden_gradient(model, hidden, targets, chunk)
    assert loss.dtype == mx.float32 and gradient.dtype == hidden.dtype
    assert loss.item() == pytest.approx(want, rel=1e-6)
    assert relative(gradient, slope) <= 1e-4


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("count", [ROWS, 1])
def test_the_differentiable_loss_is_the_same(model, count, chunk):
    """Also where it is a part of something, so that its cotangent is not 1."""
    hidden, targets = rows_of(count)
    want, slope, _ = reference(model, hidden, targets)
    loss, gradient = mx.value_and_grad(lambda x: 3 * summed_loss(model, x, targets, chunk))(hidden)
    assert loss.item() == pytest.approx(3 * want, rel=1e-6)
    assert relative(gradient, 3 * slope) <= 1e-4


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("count", [ROWS, 1])
def test_the_loss_without_gradient_and_the_likeliest_tokens(model, count, chunk):
    hidden, targets = rows_of(count)
    want, _, likeliest = reference(model, hidden, targets)
    loss, choice = loss_and_choice(model, hidden, targets, chunk)
    assert loss == pytest.approx(want, rel=1e-6)
    np.testing.assert_array_equal(choice, likeliest)


def test_a_gradient_in_bfloat16_is_off_by_its_rounding_only(bits):
    """The slope of the logits, the gradient, and the numbers of a quantized table: each is rounded to 8 bits."""
    model = small_model(bits=bits)
    model.update(tree_map(lambda x: x.astype(mx.bfloat16) if x.dtype == mx.float32 else x, model.parameters()))
    hidden, targets = rows_of(ROWS)
    hidden = hidden.astype(mx.bfloat16)
    _, slope, _ = reference(model, hidden, targets)
    loss, gradient = loss_and_hidden_gradient(model, hidden, targets, 7)
    assert loss.dtype == mx.float32 and gradient.dtype == mx.bfloat16
    assert relative(gradient.astype(mx.float32), slope) <= (2 if bits is None else 3) * 2**-8


def test_nothing_supervised_is_a_loss_of_zero():
    model = small_model()
    positions, targets = supervised_positions(np.full((2, 5), -100))
    assert positions.shape == targets.shape == (0,)
    hidden = mx.zeros((0, HIDDEN))
    loss, gradient = loss_and_hidden_gradient(model, hidden, mx.array(targets), 4)
    assert loss.item() == 0 and gradient.shape == (0, HIDDEN)
    loss, choice = loss_and_choice(model, hidden, mx.array(targets), 4)
    assert loss == 0 and choice.shape == (0,)


def test_a_label_is_predicted_by_the_token_before_it_in_its_own_row():
    labels = np.array([[7, -100, 5, 6], [8, 4, -100, -100], [-100] * 4])
    positions, targets = supervised_positions(labels)
    # The first column's labels, 7 and 8, are no token's next one.
    assert positions.tolist() == [1, 2, 4] and targets.tolist() == [5, 6, 4]


CHUNK, WIDE = 8, 16_384
ONE_CHUNK = CHUNK * WIDE * 4


def over_before(run) -> int:
    """Bytes at the peak of `run()` beyond those held before it."""
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    run()
    return mx.get_peak_memory() - before


def eager(model, hidden, targets):
    mx.eval(loss_and_hidden_gradient(model, hidden, targets, CHUNK))


def differentiated(model, hidden, targets):
    mx.eval(mx.value_and_grad(lambda x: summed_loss(model, x, targets, CHUNK))(hidden))


def evaluated(model, hidden, targets):
    loss_and_choice(model, hidden, targets, CHUNK)


# Arrays of a chunk's size that may be alive at once. Evaluated by the chunk, there are a few; in a graph MLX allocates
# ahead, at most for all eleven operations on a chunk's logits.
@pytest.mark.parametrize("run, arrays", [(eager, 4), (differentiated, 12), (evaluated, 4)])
def test_the_whole_logits_are_never_there(bits, run, arrays):
    model = small_model(WIDE, bits=bits)
    few, many = (over_before(lambda: run(model, *rows_of(count, WIDE))) for count in (256, 1024))
    print(f"{run.__name__}: {few / ONE_CHUNK:.2f} chunks of logits for 256 rows, {many / ONE_CHUNK:.2f} for 1024")
    # All of them would be 32 chunks.
    assert few <= arrays * ONE_CHUNK
    # With the rows only hidden states and their gradients grow, a 256th of their logits.
    assert many - few <= 4 * (1024 - 256) * HIDDEN * 4
