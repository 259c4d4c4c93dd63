"""Batches by property: nothing lost, nothing twice, little padding, the same again from the same seed."""

from dataclasses import dataclass

import numpy as np
import pytest

from train.batching import batches, collate


def random_lengths(seed: int) -> tuple[np.ndarray, int]:
    rng = np.random.default_rng(seed)
    count, batch_size = int(rng.integers(1, 300)), int(rng.integers(1, 12))
    kind = seed % 4
    if kind == 0:
        return np.exp(rng.normal(5.5, 0.6, count)).astype(int) + 1, batch_size
    if kind == 1:
        return np.full(count, int(rng.integers(1, 500))), batch_size
    if kind == 2:
        return rng.choice([40, 230, 2000], count), batch_size
    return rng.integers(1, 4000, count), batch_size


def padded_tokens(lengths: np.ndarray, groups: list[list[int]], multiple: int = 32) -> int:
    return sum(len(group) * (-(-max(lengths[group]) // multiple) * multiple) for group in groups)


@pytest.mark.parametrize("seed", range(60))
def test_every_example_once_and_only_one_batch_is_smaller(seed):
    lengths, batch_size = random_lengths(seed)
    groups = batches(lengths.tolist(), batch_size, seed, epoch=seed % 3)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    sizes = sorted(map(len, groups))
    assert sizes[1:] == [batch_size] * (len(sizes) - 1) or len(sizes) == 1
    assert len(groups) == -(-len(lengths) // batch_size)
    assert all(type(i) is int for group in groups for i in group)


def test_an_epoch_comes_again_from_its_seed_and_no_other():
    lengths, _ = random_lengths(4)
    orders = {(s, e): batches(lengths, 4, s, e) for s in range(4) for e in range(4)}
    assert all(batches(lengths.tolist(), 4, s, e) == order for (s, e), order in orders.items())
    assert len({str(order) for order in orders.values()}) == len(orders)


def test_epochs_group_other_examples_not_only_other_batches():
    lengths = np.exp(np.random.default_rng(0).normal(5.5, 0.5, 988)).astype(int)
    pairs = [
        {frozenset((a, b)) for group in batches(lengths, 4, 0, epoch) for a in group for b in group if a < b}
        for epoch in (0, 1)
    ]
    assert len(pairs[0] & pairs[1]) < 0.1 * len(pairs[0])


def test_equal_lengths_are_shuffled():
    first, second = (batches([7] * 64, 4, 0, epoch) for epoch in (0, 1))
    assert {frozenset(g) for g in first}.isdisjoint({frozenset(g) for g in second})


@pytest.mark.parametrize("batch_size", [2, 4, 8])
def test_padding_is_near_the_least_and_far_below_shuffled_batches(batch_size):
    rng = np.random.default_rng(batch_size)
    lengths = np.exp(rng.normal(5.5, 0.5, 988)).astype(int)

    def in_order(order: np.ndarray) -> int:
        return padded_tokens(lengths, [order[i : i + batch_size].tolist() for i in range(0, 988, batch_size)])

    ours = padded_tokens(lengths, batches(lengths, batch_size, 0, 0))
    assert ours < 1.1 * in_order(np.argsort(lengths))
    padding = lambda total: total - lengths.sum()  # noqa: E731
    assert padding(ours) < 0.35 * padding(in_order(rng.permutation(988)))


def test_batches_do_not_come_in_order_of_length():
    lengths = np.arange(1, 401)
    longest = [max(lengths[group]) for group in batches(lengths, 4, 0, 0)]
    assert abs(np.corrcoef(longest, np.arange(len(longest)))[0, 1]) < 0.3


def test_nothing_to_batch():
    assert batches([], 4, 0, 0) == []


@dataclass
class Row:
    input_ids: np.ndarray
    labels: np.ndarray


def row(length: int, supervised: int) -> Row:
    ids = np.arange(1, length + 1, dtype=np.int32)
    return Row(ids, np.where(np.arange(length) >= length - supervised, ids, -100).astype(np.int32))


def test_collate_pads_on_the_right():
    rows = [row(3, 1), row(33, 33), row(20, 5)]
    batch = collate(rows, pad_token_id=9)
    assert batch.input_ids.shape == batch.attention_mask.shape == batch.labels.shape == (3, 64)
    assert {a.dtype for a in (batch.input_ids, batch.attention_mask, batch.labels)} == {np.dtype(np.int32)}
    for i, r in enumerate(rows):
        n = len(r.input_ids)
        assert (batch.input_ids[i, :n] == r.input_ids).all() and (batch.input_ids[i, n:] == 9).all()
        assert (batch.labels[i, :n] == r.labels).all() and (batch.labels[i, n:] == -100).all()
        assert batch.attention_mask[i].tolist() == [1] * n + [0] * (64 - n)
    assert batch.examples == tuple(rows)
    # A label in the first column is no token's next one.
    assert batch.supervised_tokens == 1 + 32 + 5


def test_collate_rounds_up_to_the_multiple_only():
    assert collate([row(32, 1)], 0).input_ids.shape == (1, 32)
    assert collate([row(33, 1)], 0, multiple=1).input_ids.shape == (1, 33)
