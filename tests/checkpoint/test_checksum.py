"""The checksum of tensors."""

from __future__ import annotations

import pytest
import torch

from zero_plugin.checkpoint.tensor_files import sum_words


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_pieces_add_up(dtype: torch.dtype) -> None:
    """The sums of pieces, cut anywhere, add up to those of the whole, which are what the formula says."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(150_003, generator=generator).mul(100).to(dtype)  # more than one chunk, and no whole word
    whole = sum_words(values, 0)
    for cut in (0, 1, 2, 3, 1023, 1024, 131_073, 150_002, 150_003):
        assert torch.equal(sum_words(values[:cut], 0) + sum_words(values[cut:], cut), whole)
    data = values.view(torch.uint8).numpy().tobytes()
    words = [int.from_bytes(data[place : place + 8], "little") for place in range(0, len(data), 8)]
    exact = [sum(words), sum((place + 1) * word for place, word in enumerate(words))]
    assert [number % 2**64 for number in whole.tolist()] == [number % 2**64 for number in exact]


def test_finds_a_changed_word_and_a_changed_order() -> None:
    """One other bit, and two words in the other order, give other sums."""
    words = torch.arange(3000, dtype=torch.int32)
    changed, swapped = words.clone(), words.clone()
    changed[2999] ^= 1
    swapped[[0, 2000]] = words[[2000, 0]]
    assert not torch.equal(sum_words(changed, 0), sum_words(words, 0))
    assert not torch.equal(sum_words(swapped, 0), sum_words(words, 0))
