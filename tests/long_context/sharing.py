"""Models, samples and training loops: in plain torch on one process, and with an Accelerator that shares samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from device import DEVICE
from paths import running
from torch import Tensor, nn
from torch.utils.data import DataLoader

from zero_plugin import Accelerator

WORDS, LENGTH = 64, 16


def llama(**changes: Any) -> nn.Module:
    """Create two layers with four heads, of which two share keys."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    shared = {"vocab_size": WORDS, "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False}
    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(**(sizes | shared | changes))).to(DEVICE)


def gpt2(**changes: Any) -> nn.Module:
    """Create two layers with four heads, and embeddings tied to the head."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "use_cache": False}
    drops = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(3)
    return GPT2LMHeadModel(GPT2Config(**(sizes | drops | changes))).to(DEVICE)


def mistral(**changes: Any) -> nn.Module:
    """Create two layers that attend to five positions."""
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    shared = {"vocab_size": WORDS, "num_key_value_heads": 4, "max_position_embeddings": 64, "use_cache": False}
    torch.manual_seed(3)
    return MistralForCausalLM(MistralConfig(**(sizes | shared | {"sliding_window": 5} | changes))).to(DEVICE)


MODELS: dict[str, Callable[..., nn.Module]] = {"llama": llama, "gpt2": gpt2, "mistral": mistral}


def make_samples(kind: str, count: int = 16, length: int = LENGTH) -> list[dict[str, Tensor]]:
    """Create samples of one kind.

    Args:
        kind: `plain`; `right` or `left`, padded to one length without labels in the padding; `labelled`, padded at
            the
            left with labels in the padding; `packed`, two documents in each; `half`, no labels in the second half.
        count: number of samples.
        length: length of each sample.
    """
    generator = torch.Generator().manual_seed(7)
    samples = []
    for number in range(count):
        ids = torch.randint(1, WORDS, (length,), generator=generator)
        sample = {"input_ids": ids, "labels": ids.clone()}
        if kind in ("right", "left", "labelled"):
            mask = torch.ones(length, dtype=torch.long)
            padded = number % 5
            mask[length - padded :] = 0
            sample["attention_mask"] = mask if kind == "right" else mask.flip(0)
            if kind != "labelled":
                sample["labels"][sample["attention_mask"] == 0] = -100
        if kind == "packed":
            first = 3 + number % 7
            sample["position_ids"] = torch.cat([torch.arange(first), torch.arange(length - first)])
        if kind == "half":
            sample["labels"][length // 2 :] = -100
        samples.append(sample)
    return samples


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        model: a name of `MODELS`.
        samples: a kind of `make_samples`.
        accumulation: micro-batches per step.
        clip: largest gradient norm.
        length: length of the samples.
        count: number of samples.
        adam: AdamW, otherwise SGD, whose steps are as exact as the gradients.
    """

    model: str = "llama"
    samples: str = "plain"
    accumulation: int = 1
    clip: float | None = None
    length: int = LENGTH
    count: int = 16
    adam: bool = False

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Create the training's optimizer."""
        if self.adam:
            return torch.optim.AdamW(model.parameters(), lr=1e-3)
        return torch.optim.SGD(model.parameters(), lr=0.3)

    def loader(self, groups: int = 1) -> DataLoader[Any]:
        """Create a loader of all samples in order. Several groups complete their last step from the first samples."""
        samples = make_samples(self.samples, self.count, self.length)
        repeated = samples[: -self.count % (2 * groups)] if groups > 1 else []
        return DataLoader(samples + repeated, batch_size=2)


def train_plainly(case: Case, groups: int) -> tuple[list[float], dict[str, Tensor], Tensor]:
    """Train on one process. Return each step's loss, the final weights, and then the logits of all samples.

    Args:
        case: the training.
        groups: number of micro-batches that the compared training computes together.
    """
    model = MODELS[case.model]()
    optimizer = case.optimizer(model)
    batches = [{name: value.to(DEVICE) for name, value in batch.items()} for batch in case.loader(groups)]
    losses, window = [], case.accumulation * groups
    for start in range(0, len(batches), window):
        step = batches[start : start + window]
        parts = [model(**batch).loss for batch in step]
        for part in parts:
            (part / len(step)).backward()
        if case.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(part.item() for part in parts) / len(step))
    model.eval()
    with torch.no_grad():
        logits = torch.cat([model(**batch).logits for batch in batches])[: case.count]
    return losses, {name: value.detach() for name, value in model.state_dict().items()}, logits


def train_shared(
    accelerator: Accelerator, case: Case, model: nn.Module | None = None
) -> tuple[list[float], dict[str, Tensor], Tensor]:
    """Train over `accelerator` with a usual loop. Return the same three results."""
    model = MODELS[case.model]() if model is None else model
    model, optimizer, loader = accelerator.prepare(model, case.optimizer(model), case.loader())
    losses, window = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            window.append(loss.detach())
            if accelerator.sync_gradients:
                if case.clip is not None:
                    accelerator.clip_grad_norm_(model.parameters(), case.clip)
                losses.append(accelerator.gather(torch.stack(window)).mean().item())
                window.clear()
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        gathered = [accelerator.gather_for_metrics(model(**batch).logits) for batch in loader]
    state = [accelerator.get_state_dict(model)]
    dist.broadcast_object_list(state)
    return losses, {name: value.to(DEVICE) for name, value in state[0].items()}, torch.cat(gathered)


@contextmanager
def sharing(
    path: str, size: int, *, deepspeed: dict[str, Any] | None = None, **arguments: Any
) -> Iterator[Accelerator]:
    """Create an Accelerator on `path` with groups of `size` processes, and end it after the test."""
    with running(path, deepspeed={"sequence_parallel_size": size, **(deepspeed or {})}, **arguments) as accelerator:
        yield accelerator


def assert_trains_alike(path: str, size: int, case: Case, tolerance: float = 2e-5) -> None:
    """Assert one process's losses, weights and logits. One group has half the samples, so as many steps as two."""
    groups = dist.get_world_size() // size
    case = replace(case, count=case.count * groups // 2)
    wanted = train_plainly(case, groups)
    with sharing(path, size, gradient_accumulation_steps=case.accumulation) as accelerator:
        found = train_shared(accelerator, case)
    assert len(found[0]) == len(wanted[0])
    off = [abs(one - other) for one, other in zip(found[0], wanted[0], strict=True)]
    assert max(off) < tolerance, f"losses differ by {off}"
    assert found[1].keys() == wanted[1].keys()
    for name, weight in wanted[1].items():
        assert (found[1][name] - weight).abs().max() < tolerance, name
    assert found[2].shape == wanted[2].shape
    is_real = torch.cat([batch.get("attention_mask", batch["labels"] != 0) for batch in case.loader()]).bool()
    assert (found[2] - wanted[2])[is_real].abs().max() < 10 * tolerance
