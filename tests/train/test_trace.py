"""Traced memory against what MLX says it allocated, for functions whose allocations are known."""

import gc
from typing import Any, Callable

import mlx.core as mx
import pytest

from train.trace import trace

N = 1024
MB = 1 << 20
# What a buffer may be larger than its array: small ones are not traced to the byte.
SMALL = 64 << 10


def settle() -> int:
    """Waits for what is freed after an evaluation, and gives the bytes that are left."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    return mx.get_active_memory()


def measured(function: Callable[..., Any], *inputs: mx.array, first: int = 0) -> tuple[int, int]:
    """The peak of an evaluation, and what is held once its first outputs are there, both beside its inputs."""
    mx.eval(inputs)
    outputs = function(*inputs)
    before, kept = settle(), 0
    mx.reset_peak_memory()
    if first:
        mx.eval(outputs[:first])
        mx.synchronize()
        kept = mx.get_active_memory() - before
    mx.eval(outputs)
    mx.synchronize()
    # Where nothing is allocated the peak stays at zero.
    return max(mx.get_peak_memory(), before) - before, kept


def same(traced: int, real: int) -> bool:
    return abs(traced - real) <= SMALL


@pytest.fixture(scope="module")
def arrays() -> dict[str, mx.array]:
    """4 MB each, or as the name says."""
    weight = mx.random.normal((2 * N, N))
    packed, scales, biases = mx.quantize(weight, group_size=64, bits=4)
    found = {
        "x": mx.random.normal((N, N)),
        "y": mx.random.normal((N, N)),
        "wide": weight,
        "packed": packed,
        "scales": scales,
        "biases": biases,
        "rows": mx.random.randint(0, N, (N // 2,)),
        "parts": mx.random.normal((4, 256, 8, 128)),
        "small": mx.random.normal((N // 4, N // 4)) / N,
        "square": mx.random.normal((128, 128)),
        "queries": mx.random.normal((2, 8, 512, 64)),
        "keys": mx.random.normal((2, 2, 512, 64)),
        "mask": mx.ones((2, 1, 512, 512), mx.bool_),
        "slope": mx.ones((N, 2 * N)),
    }
    mx.eval(found)
    return found


def chain(x: mx.array) -> list[mx.array]:
    for _ in range(20):
        x = mx.exp(x) * 0.5
    return [x]


def set_rows(x: mx.array, y: mx.array, rows: mx.array) -> list[mx.array]:
    x = x + 1
    x[rows] = y[: N // 2]
    return [x]


def set_slice(x: mx.array) -> list[mx.array]:
    new = mx.zeros_like(x)
    new[128:512] = x[128:512]
    return [new]


def attention(queries: mx.array, keys: mx.array, mask: mx.array) -> list[mx.array]:
    return [mx.fast.scaled_dot_product_attention(queries, keys, keys, scale=0.1, mask=mask)]


def quantized(x: mx.array, packed: mx.array, scales: mx.array, biases: mx.array) -> list[mx.array]:
    return [mx.quantized_matmul(x, packed, scales, biases, transpose=True, group_size=64, bits=4)]


def mlp_gradient(x: mx.array, y: mx.array, wide: mx.array, slope: mx.array) -> list[mx.array]:
    return mx.vjp(lambda x: [mx.sigmoid(x @ y) @ wide.T], [x], [slope])[1]


# What is computed, of which arrays, and what it allocates in MB, where that is plain to see.
CASES: dict[str, tuple] = {
    "a new array": (lambda x, y: [x + y], "x y", 4),
    "a chain hands its one buffer on": (chain, "x", 4),
    "half the size": (lambda x: [x.astype(mx.float16)], "x", 2),
    "transposed": (lambda x: [x.T], "x", 0),
    "reshaped": (lambda x: [x.reshape(-1)], "x", 0),
    "broadcast": (lambda x: [mx.broadcast_to(x[None], (64, N, N))], "x", 0),
    "exp of a broadcast computes its distinct elements": (lambda x: [mx.exp(mx.broadcast_to(x, (64, N, N)))], "x", 4),
    "a broadcast row is added": (lambda x, y: [mx.broadcast_to(x[:1], (N, N)) + y], "x y", 4),
    "unflattened": (lambda x: [mx.unflatten(x, -1, (8, 128)).transpose(1, 0, 2)], "x", 0),
    "a slice": (lambda x: [x[: N // 2]], "x", 0),
    "a sum with a slice": (lambda x: [x[: N // 2] + 1], "x", 2),
    "every second one": (lambda x: [x[::2, ::2] + 1], "x", 1),
    "a view keeps all of what it is of": (lambda x: [(x + 1)[:1]], "x", 4),
    "split": (lambda x: mx.split(x, 4, axis=0), "x", 0),
    "split rows, each computed on": (lambda x: [part + 1 for part in mx.split(x * 2, 4)], "x", 8),
    "split columns, each computed on": (lambda x: [part + 1 for part in mx.split(x * 2, 4, axis=1)], "x", 8),
    "reshaping what is transposed copies": (lambda x: [x.T.reshape(-1)], "x", 4),
    "sum": (lambda x: [mx.sum(mx.exp(x))], "x", 4),
    "divided by its sums": (lambda x: [x / mx.sum(mx.exp(x), axis=-1, keepdims=True)], "x", 8),
    "mean of squares": (lambda x: [mx.mean(mx.square(x), axis=-1)], "x", 4),
    "logsumexp": (lambda x: [mx.logsumexp(x, axis=-1)], "x", 0),
    "softmax": (lambda x: [mx.softmax(x, axis=-1)], "x", 4),
    "softmax of its own": (lambda x: [mx.softmax(x * 2, axis=-1)], "x", 4),
    "matmul": (lambda x, y: [x @ y], "x y", 4),
    "matmul reads what is transposed": (lambda x, y: [x @ y.T], "x y", 4),
    "matmul copies columns": (lambda x, y: [x[:, : N // 2] @ y[: N // 2]], "x y", 6),
    "matmul copies every second row and column": (lambda x, y: [x[:, ::2] @ y[::2]], "x y", 8),
    "matmul copies heads": (lambda parts, square: [parts.transpose(0, 2, 1, 3) @ square], "parts square", 8),
    "quantized": (quantized, "x packed scales biases", 8),
    "quantized copies what is transposed": (
        lambda x, *weight: quantized(x.T, *weight),
        "x packed scales biases",
        12,
    ),
    "rows are set in place": (set_rows, "x y rows", 4),
    "a slice is set in place": (set_slice, "x", 4),
    "rows are gathered": (lambda x, rows: [x[rows]], "x rows", 2),
    "columns are gathered": (lambda x, rows: [mx.take(x * 2, rows, axis=1)], "x rows", 6),
    "concatenated": (lambda x, y: [mx.concatenate([x, y])], "x y", 8),
    "padded": (lambda x: [mx.pad(x, ((N, 0), (0, 0)))], "x", 8),
    "where": (lambda x, y: [mx.where(x > 0, x, y)], "x y", 5),
    "cumulative sum": (lambda x: [mx.cumsum(x, axis=0)], "x", 4),
    "two that live at once": (lambda x: [x + 1, (x + 2).T], "x", 8),
    "drawn": (lambda x: [mx.random.bernoulli(0.5, (N, N)) * x], "x", None),
    "norm": (lambda x: [mx.fast.rms_norm(x, x[0], 1e-6)], "x", None),
    "rotated": (
        lambda queries: [mx.fast.rope(queries, 64, traditional=False, base=1e4, scale=1.0, offset=0)],
        "queries",
        None,
    ),
    "attention, grouped heads and a mask": (attention, "queries keys mask", None),
    "the gradient of a matrix": (mlp_gradient, "x y wide slope", None),
    "the gradient of attention": (
        lambda queries, keys, mask: mx.vjp(lambda q, k: attention(q, k, mask), [queries, keys], [queries])[1],
        "queries keys mask",
        None,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_traced_is_what_is_allocated(name, arrays):
    function, names, size = CASES[name]
    inputs = [arrays[n] for n in names.split()]
    traced = trace(function, *inputs).peak
    real, _ = measured(function, *inputs)
    assert real <= traced + SMALL, (traced / MB, real / MB)
    # Where the computation is ahead of the dispatch for once, a buffer is free again sooner than it is traced to be.
    assert same(traced, real) or any(same(traced, measured(function, *inputs)[0]) for _ in range(5))
    if size is not None:
        assert same(traced, size * MB), traced / MB


def with_products(function: Callable, x: mx.array, *others: mx.array) -> list[mx.array]:
    outputs, products = mx.vjp(lambda *xs: [function(*xs)], [x, *others], [mx.ones_like(x)])
    return [*outputs, *products]


KEPT: dict[str, tuple[Callable, int]] = {
    # The input is the function's own, the output is there: nothing else is needed for the gradient.
    "exp": (lambda x, y: with_products(mx.exp, x), 1),
    # The sigmoid and the output.
    "sigmoid and matmul": (lambda x, y: with_products(lambda x, y: mx.sigmoid(x @ y) @ y, x, y), 2),
    # Two of each layer: the sigmoid before the second product, and the sum that the next layer begins with.
    "three layers": (lambda x, y: with_products(_three, x, y), None),
}


def _three(x: mx.array, y: mx.array) -> mx.array:
    for _ in range(3):
        x = x + mx.sigmoid(x @ y) @ y
    return x


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_for_later_outputs(name, arrays):
    function, size = KEPT[name]
    x, y = arrays["x"][:, : N // 4] * 1, arrays["small"]
    traced = trace(function, x, y, first=1)
    real, kept = measured(function, x, y, first=1)
    assert same(traced.kept, kept), (traced.kept / MB, kept / MB)
    assert traced.kept <= traced.peak
    if size is not None:
        assert same(traced.kept, size * MB)
    # That the evaluation runs in two parts changes when buffers come back, so the peak is bounded only.
    assert real <= traced.peak + SMALL


def test_nothing_is_kept_where_no_first_outputs_are_named(arrays):
    assert trace(chain, arrays["x"]).kept == 0


def test_buffers_come_back_later_than_they_are_done_with(arrays):
    """Many products in a row: each needs the one before it only, but what is dispatched runs ahead."""
    x, y = arrays["x"][:, : N // 4] * 1, arrays["small"]

    def products(count: int) -> Callable:
        def function(x: mx.array, y: mx.array) -> list[mx.array]:
            for _ in range(count):
                x = x @ y
            return [x]

        return function

    short, (real, _) = trace(products(10), x, y).peak, measured(products(10), x, y)
    assert same(short, real) and same(short, 10 * MB)
    long, longer = (trace(products(count), x, y).peak for count in (100, 200))
    assert long == longer
    for count in (100, 200):
        real = max(measured(products(count), x, y)[0] for _ in range(2))
        assert 0.85 * real <= long <= 1.15 * real, (long / MB, real / MB)


def huge() -> list[mx.array]:
    """Of 100 GB each, and none of it is computed."""
    side = 158_114
    return [mx.zeros((side, side)) + 1, mx.random.normal((side, side))]


def test_nothing_is_computed():
    before = settle()
    mx.reset_peak_memory()
    x, y = huge()
    size = x.nbytes
    assert size > 99e9
    traced = trace(lambda x, y: with_products(lambda x, y: mx.sigmoid(x @ y) @ y, x, y), x, y)
    assert traced.peak >= 3 * size
    # Zero and one, which the arrays would be made of.
    assert mx.get_peak_memory() <= before + SMALL and mx.get_active_memory() <= before + SMALL
    del x, y


def test_shapes_and_types_count_and_values_do_not(arrays):
    x = arrays["x"]
    function = lambda x: [mx.softmax(x @ x.T, axis=-1)]
    assert trace(function, x) == trace(function, mx.zeros((N, N))) == trace(function, mx.full((N, N), 3.0))
    half, double = (
        trace(function, mx.zeros(shape, kind)).peak for shape, kind in (((N, N), mx.float16), ((2 * N, N), mx.float32))
    )
    assert half * 2 == trace(function, x).peak and double == 4 * trace(function, x).peak


def test_what_is_evaluated_already_is_a_constant(arrays):
    other = arrays["y"] + 1
    mx.eval(other)
    assert same(trace(lambda x: [x @ other], arrays["x"]).peak, 4 * MB)
    # What is not belongs to the graph.
    assert same(trace(lambda x: [x @ (arrays["y"] + 1)], arrays["x"]).peak, 8 * MB)
