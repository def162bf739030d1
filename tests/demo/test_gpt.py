"""The demo's model is causal, learns, and writes the same bytes for the same seed."""

import math

import pytest
import torch
from torch import nn

from zero_plugin.demo.train import GPT, GPTConfig, generate, next_byte_loss

TINY = GPTConfig(hidden_size=32, layers=2, heads=2, block=16)


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(TINY)


def test_maps_bytes_to_logits_and_starts_near_a_uniform_guess(model: GPT) -> None:
    """`[batch, length]` bytes give `[batch, length, 256]` logits, whose loss is near log(256) before learning."""
    ids = torch.randint(256, (3, 16))
    logits = model(ids)
    assert logits.shape == (3, 16, 256)
    assert next_byte_loss(logits, ids).mean().item() == pytest.approx(math.log(256), abs=0.1)


def test_later_bytes_never_change_earlier_logits(model: GPT) -> None:
    """Attention is causal: changing byte 9 leaves the logits of bytes 0-8 as they were, and changes those of byte 9."""
    ids = torch.randint(256, (2, 16))
    changed = ids.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    before, after = model(ids), model(changed)
    torch.testing.assert_close(after[:, :9], before[:, :9], rtol=0, atol=1e-6)
    assert (after[:, 9:] - before[:, 9:]).abs().amax(-1).min() > 1e-3


def test_sees_where_bytes_stand(model: GPT) -> None:
    """Positions matter: the order of earlier bytes reaches the last logit."""
    with torch.no_grad():
        for block in model.blocks:
            nn.init.normal_(block.query_key_value.weight, std=0.5)  # fresh weights attend too evenly to show it
        ab, ba = model(torch.tensor([[1, 2, 3], [2, 1, 3]]))[:, -1]
    assert (ab - ba).abs().max() > 1e-3


def test_learns_a_repeating_text_in_twenty_steps(model: GPT) -> None:
    """Twenty optimizer steps more than halve the loss on a text that repeats."""
    text = torch.tensor(list(b"def f(): return 1\n" * 8)[: 17 * 8]).view(8, 17)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = next_byte_loss(model(text[:, :-1]), text[:, 1:]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_loss_is_one_fp32_mean_for_each_block(model: GPT) -> None:
    """Each block's loss is the mean over its own bytes, in fp32 even if the model computes in bf16."""
    ids = torch.randint(256, (2, 16))
    logits = model.bfloat16()(ids)
    loss = next_byte_loss(logits, ids)
    assert logits.dtype is torch.bfloat16
    assert loss.dtype is torch.float32
    by_hand = -logits.float().log_softmax(-1).gather(2, ids.unsqueeze(2)).mean((1, 2))
    torch.testing.assert_close(loss, by_hand)


def test_generate_continues_the_prompt_and_repeats_with_the_seed(model: GPT) -> None:
    """The prompt stays and exactly `count` bytes follow, also past the block's length. Only the seed changes them."""
    prompt = torch.tensor([[1, 2, 3]])
    longest = 0

    def forward(ids: torch.Tensor) -> torch.Tensor:
        nonlocal longest
        longest = max(longest, ids.shape[1])
        return model(ids)

    first, again = (generate(forward, prompt, 20, block=TINY.block, seed=1) for _ in range(2))
    other = generate(model, prompt, 20, block=TINY.block, seed=2)
    assert first.shape == (1, 23)
    assert first[:, :3].equal(prompt)
    assert first.equal(again)
    assert not first.equal(other)
    assert longest == TINY.block


def test_generate_with_one_candidate_is_greedy(model: GPT) -> None:
    """`top_k=1` takes the most likely byte at each position."""
    written = generate(model, torch.tensor([[65]]), 5, block=TINY.block, top_k=1)
    assert written[0, 1:].equal(model(written)[0, :-1].argmax(-1))


def test_width_that_does_not_split_into_heads_is_refused() -> None:
    """Rotary heads need an even width; the message says which widths are legal."""
    with pytest.raises(ValueError, match="multiple of 8"):
        GPTConfig(hidden_size=36, heads=4)
