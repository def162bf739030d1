"""Losses and layers in chunks give the complete ones' numbers: ZeRO, shared samples, accumulation."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from device import DEVICE
from on_paths import on_paths, on_rows, row
from paths import raised, running
from sharing import LENGTH, MODELS, WORDS, Case, gpt2, llama, make_samples, sharing, train_plainly, train_shared
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from zero_plugin.errors import LoopError
from zero_plugin.long_context import chunk_layer, chunk_loss

CASES = {
    "tied": Case(model="gpt2", accumulation=4),
    "a-chunk-without-labels": Case(samples="half", accumulation=4, clip=0.1),
    "padded": Case(samples="right", accumulation=2, length=15),
}


def _alike(found: Any, wanted: Any, count: int) -> None:
    off = [abs(one - other) for one, other in zip(found[0], wanted[0], strict=True)]
    assert max(off) < 2e-5, off
    for name, weight in wanted[1].items():
        assert (found[1][name] - weight).abs().max() < 2e-5, name
    assert found[2].shape == wanted[2].shape
    assert len(found[2]) == count


# Each case runs on DDP and stage 3, one also on further stages. Daily, each runs once on both.
_DAILY = {
    "ddp": (("tied", 1, "late"), ("a-chunk-without-labels", 2, "late"), ("padded", 2, "early")),
    "zero3": (("tied", 2, "early"), ("a-chunk-without-labels", 1, "early"), ("padded", 1, "late")),
    "zero0": (("a-chunk-without-labels", 1, "early"),),
    "zero2": (("a-chunk-without-labels", 2, "early"),),
    "zero3-cpu": (("a-chunk-without-labels", 1, "early"),),
}
_ROWS = [
    row(path, 2, name, size, when, daily=(name, size, when) in daily)
    for path, daily in _DAILY.items()
    for name in CASES
    for size in (1, 2)
    for when in ("early", "late")
    if path in ("ddp", "zero3") or (name == "a-chunk-without-labels" and when == "early")
]


@on_rows(("name", "size", "when"), _ROWS)
def test_a_loss_in_chunks(path: str, name: str, size: int, when: str) -> None:
    """Losses, weights and logits equal one process's, with `chunk_loss` before or after `prepare`."""
    case = CASES[name]
    wanted = train_plainly(case, dist.get_world_size() // size)
    start = (lambda **more: sharing(path, size, **more)) if size > 1 else (lambda **more: running(path, **more))
    with start(gradient_accumulation_steps=case.accumulation) as accelerator:
        model = MODELS[case.model]()
        if when == "early":
            chunk_loss(model, 3)
            found = train_shared(accelerator, case, model)
        else:
            prepare = accelerator.prepare

            def prepare_and_chunk(*objects: Any) -> Any:
                prepared = prepare(*objects)
                chunk_loss(prepared[0], 3)
                return prepared

            accelerator.prepare = prepare_and_chunk
            found = train_shared(accelerator, case, model)
    _alike(found, wanted, case.count)


@on_paths("ddp", "zero3")
def test_logits_are_made_in_chunks(path: str) -> None:
    """The head gets a third of the tokens at a time, twice. The model returns logits only in evaluation."""
    batch = {
        name: torch.stack([s[name] for s in make_samples("plain", 3)]).to(DEVICE) for name in ("input_ids", "labels")
    }
    with running(path) as accelerator:
        model = llama()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sizes: list[int] = []
        model.lm_head.register_forward_pre_hook(lambda _, given: sizes.append(given[0].shape[:-1].numel()))
        chunk_loss(model, 3)
        model, optimizer = accelerator.prepare(model, optimizer)
        output = model(**batch)
        assert output.logits is None
        accelerator.backward(output.loss)
        assert sizes == [LENGTH] * 6
        sizes.clear()
        with torch.no_grad():
            assert model(**batch).logits.shape == (3, LENGTH, WORDS)
        assert sizes == [3 * LENGTH]
        inner = accelerator.unwrap_model(model)
        assert inner.get_output_embeddings() is inner.lm_head
        chunk_loss(model, 1)
        assert model(**batch).logits is not None


@on_paths("ddp", "zero3")
def test_a_failed_forward_leaves_the_model_whole(path: str) -> None:
    """The head is restored after an error in a forward."""
    with running(path) as accelerator:
        model = llama()
        chunk_loss(model)
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        inner = accelerator.unwrap_model(model)
        head = inner.lm_head
        wrong = torch.full((1, 4), WORDS + 3, device=DEVICE)
        if DEVICE == "cpu":
            raised(IndexError, by=lambda: inner(input_ids=wrong, labels=wrong))
            assert inner.lm_head is head


@on_paths("ddp")
def test_what_cannot_be_chunked_is_refused(path: str) -> None:
    """A model without this loss, zero chunks, and logits changed before the loss are refused."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    raised(LoopError, "chunk_loss()", "none in it", by=lambda: chunk_loss(nn.Linear(2, 2)))
    raised(LoopError, "chunk_loss()", "none in it", by=lambda: chunk_loss(llama().model))
    raised(LoopError, "chunks=0", by=lambda: chunk_loss(llama(), 0))
    raised(LoopError, "chunks=0", by=lambda: chunk_layer(nn.Linear(2, 2), 0))
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    capped = Gemma2ForCausalLM(
        Gemma2Config(vocab_size=WORDS, num_key_value_heads=2, head_dim=8, final_logit_softcapping=30.0, **sizes)
    ).to(DEVICE)
    chunk_loss(capped)
    ids = torch.ones(1, 4, dtype=torch.long, device=DEVICE)
    raised(LoopError, "changes its logits", by=lambda: capped(input_ids=ids, labels=ids))
    plain = llama()
    chunk_loss(plain)
    raised(LoopError, "chunk_loss()", "return_dict=False", by=lambda: plain(ids, labels=ids, return_dict=False))
    assert plain(ids, return_dict=False)[0].shape == (1, 4, WORDS)
    with running(path):
        pass


@on_paths("ddp", "zero3")
def test_layers_in_chunks(path: str) -> None:
    """MLPs over thirds of the sequence give complete numbers, also inside both kinds of checkpoints."""
    case = Case(accumulation=2)
    wanted = train_plainly(case, dist.get_world_size())
    for checkpoints in ({}, {"use_reentrant": False}, {"use_reentrant": True}):
        with running(path, gradient_accumulation_steps=2) as accelerator:
            model = llama()
            seen: list[int] = []
            for layer in model.model.layers:
                chunk_layer(layer.mlp, 5)
                chunk_layer(layer.mlp, 3)
                layer.mlp.gate_proj.register_forward_pre_hook(
                    lambda _, given, seen=seen: seen.append(given[0].shape[1])
                )
            if checkpoints:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpoints)
            found = train_shared(accelerator, case, model)
            assert set(seen[:6]) == {6, 4}  # 16 in three
        _alike(found, wanted, case.count)


@on_paths("ddp")
def test_experts_in_chunks(path: str) -> None:
    """A mixture's layer, which takes a matrix of tokens, is chunked with several samples."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    shared = {"vocab_size": WORDS, "num_key_value_heads": 2, "num_local_experts": 4, "use_cache": False}
    torch.manual_seed(3)
    model = MixtralForCausalLM(MixtralConfig(**(sizes | shared))).to(DEVICE)
    batch = {
        name: torch.stack([s[name] for s in make_samples("plain", 3)]).to(DEVICE) for name in ("input_ids", "labels")
    }
    wanted = model(**batch).loss
    wanted.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    chunk_layer(model.model.layers[0].mlp, 3)
    found = model(**batch).loss
    found.backward()
    assert torch.allclose(found, wanted, atol=1e-6)
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.allclose(p.grad, gradient, atol=1e-6)
    with running(path):
        pass


@on_paths("ddp")
def test_layers_that_mix_tokens_are_refused(path: str) -> None:
    """Attention, convolutions and recurrent layers are refused, because chunks would change their numbers."""
    for block in (gpt2().transformer.h[0], llama().model.layers[0], nn.TransformerEncoderLayer(4, 2)):
        raised(
            LoopError,
            "chunk_layer()",
            type(block).__name__,
            "block's MLP",
            by=lambda block=block: chunk_layer(block, 2),
        )
    raised(LoopError, "Conv1d", by=lambda: chunk_layer(nn.Sequential(nn.Conv1d(4, 4, 3)), 2))
    raised(LoopError, "LSTM", by=lambda: chunk_layer(nn.LSTM(4, 4), 2))
    chunk_layer(gpt2().transformer.h[0].mlp, 2)
    with running(path):
        pass


@on_paths("ddp")
def test_dropout_of_layers_in_chunks(path: str) -> None:
    """A layer inside a checkpoint of the older kind repeats its dropout in the recomputation."""
    layer = nn.Sequential(nn.Dropout(0.5))
    chunk_layer(layer, 3)
    hidden = torch.ones(2, 7, 4, device=DEVICE, requires_grad=True)
    kept = checkpoint(layer, hidden, use_reentrant=True)
    kept.sum().backward()
    assert torch.equal(kept, hidden.grad)
    with running(path):
        pass


@on_paths("ddp")
def test_a_copy_of_layers_in_chunks(path: str) -> None:
    """A deep copy has separate weights, and a pickle holds the original layer."""
    model = llama()
    for layer in model.model.layers:
        chunk_layer(layer.mlp, 3)
    copied, ids = copy.deepcopy(model), torch.ones(1, 6, dtype=torch.long, device=DEVICE)
    with torch.no_grad():
        for p in copied.model.layers.parameters():
            p.zero_()
    wanted = llama()
    wanted.load_state_dict(copied.state_dict())
    assert torch.allclose(copied(ids).logits, wanted(ids).logits)
    loaded = pickle.loads(pickle.dumps(model.model.layers[0].mlp))
    x = torch.ones(1, 6, 32, device=DEVICE)
    assert torch.allclose(loaded(x), llama().model.layers[0].mlp(x))
    layer = nn.Linear(2, 2)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    raised(LoopError, "has been replaced already", by=lambda: chunk_layer(layer, 2))
    with running(path):
        pass


@on_paths("ddp", "zero3")
def test_saved_on_the_cpu(path: str) -> None:
    """Checkpoints of blocks in CPU memory, by torch's own context, change nothing."""
    case = Case()
    wanted = train_plainly(case, dist.get_world_size())
    with running(path) as accelerator:
        model = llama()
        model.gradient_checkpointing_enable()
        chunk_loss(model)
        with torch.autograd.graph.save_on_cpu():
            found = train_shared(accelerator, case, model)
    _alike(found, wanted, case.count)


@on_paths("ddp")
def test_a_loss_of_ones_own(path: str) -> None:
    """torch's own function takes hidden states, as the error of `chunk_loss` recommends."""
    from torch.nn import functional

    linear_cross_entropy: Callable[..., Tensor] | None = getattr(functional, "linear_cross_entropy", None)
    if linear_cross_entropy is None:
        return  # torch before 2.12
    torch.manual_seed(0)
    hidden, head = torch.randn(6, 4, requires_grad=True), torch.randn(5, 4)
    labels = torch.tensor([0, 4, -100, 2, 1, 3])
    found = linear_cross_entropy(hidden, head, labels)
    assert torch.allclose(found, cross_entropy(hidden @ head.T, labels))
    with running(path):
        pass
