"""Loops whose processes share samples: results, random numbers, metrics, checkpoints, mistakes."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from device import DEVICE
from on_paths import on_paths
from paths import listening, raised
from sharing import LENGTH, WORDS, Case, gpt2, llama, make_samples, mistral, sharing, train_plainly
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset

from zero_plugin import DummyOptim, DummyScheduler
from zero_plugin.errors import ConfigError, LoopError
from zero_plugin.local_sgd import LocalSGD
from zero_plugin.long_context import attention, cut, gather, own_random_numbers, total

Batch = dict[str, Tensor]


def _batch(kind: str = "plain", count: int = 2, length: int = LENGTH) -> Batch:
    samples = make_samples(kind, count, length)
    return {name: torch.stack([sample[name] for sample in samples]).to(DEVICE) for name in samples[0]}


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3)


def _is_everywhere(value: Any) -> bool:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return all(one == found[0] for one in found)


def _step(path: str, model: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    """Return the weights after one step with an Accelerator whose processes share all samples."""
    with sharing(path, dist.get_world_size()) as accelerator:
        model, optimizer = accelerator.prepare(model, _sgd(model))
        accelerator.backward(loss_of(model))
        optimizer.step()
        state = [accelerator.get_state_dict(model)]
        dist.broadcast_object_list(state)
    return {name: value.to(DEVICE) for name, value in state[0].items()}


def _step_plainly(model: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    optimizer = _sgd(model)
    loss_of(model).backward()
    optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def _assert_same_step(path: str, build: Callable[[], nn.Module], loss_of: Callable[[nn.Module], Tensor]) -> None:
    found, wanted = _step(path, build(), loss_of), _step_plainly(build(), loss_of)
    for name in found.keys() & wanted.keys():
        assert (found[name] - wanted[name]).abs().max() < 1e-5, name
    assert found.keys() == wanted.keys() or any("lora_A" in name for name in found)  # adapters have no more weights


# ---- losses and results ----------------------------------------------------------------------------------------------


@on_paths("ddp", "zero2", "zero3", daily=("ddp", "zero3"))
def test_a_loss_by_hand_from_complete_logits(path: str) -> None:
    """Without labels a forward gives complete logits, also in training, and any loss of them has right gradients."""
    batch = _batch()

    def loss_of(model: nn.Module) -> Tensor:
        logits = model(input_ids=batch["input_ids"]).logits
        assert logits.shape == (2, LENGTH, WORDS)
        weights = torch.arange(1, LENGTH, device=DEVICE)[None].expand(2, -1).reshape(-1)
        losses = cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="none")
        return (losses * weights).mean() + 0.01 * logits.logsumexp(-1).square().mean()

    _assert_same_step(path, llama, loss_of)


@on_paths("zero2")
def test_arguments_by_position_and_without_positions(path: str) -> None:
    """Batches that the script makes are cut like a loader's."""
    batch = _batch("right", length=13)
    _assert_same_step(
        path, llama, lambda m: m(batch["input_ids"], batch["attention_mask"], labels=batch["labels"]).loss
    )


@on_paths("zero2")
def test_tokens_counted_by_the_script(path: str) -> None:
    """`num_items_in_batch`, by which a Trainer divides, has the same meaning as on one process."""
    batch = _batch()
    _assert_same_step(path, llama, lambda m: m(**batch, num_items_in_batch=50).loss)


@on_paths("ddp", "zero2", "zero3", daily=("ddp", "zero3"))
def test_embeddings_in_place_of_ids(path: str) -> None:
    """With embeddings as in prompt tuning, gradients reach the layers before the model."""

    class Prompted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = llama()
            torch.manual_seed(4)
            self.prompt = nn.Parameter(torch.randn(1, 3, 32, device=DEVICE))

        def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
            words = self.inner.get_input_embeddings()(input_ids)
            embedded = torch.cat([self.prompt.expand(len(words), -1, -1), words], 1)
            return self.inner(inputs_embeds=embedded, labels=pad(labels, (3, 0), value=-100))

    batch = _batch(length=13)
    _assert_same_step(path, Prompted, lambda m: m(**batch).loss)


@on_paths("ddp", "zero2", "zero3", daily=("ddp", "zero3"))
def test_gradients_of_embeddings(path: str) -> None:
    """Every process has the complete gradient of its input, as adversarial training needs."""
    batch = _batch("half")
    plain = llama()
    embedded = plain.get_input_embeddings()(batch["input_ids"]).detach()
    wanted = embedded.clone().requires_grad_()
    plain(inputs_embeds=wanted, labels=batch["labels"]).loss.backward()
    with sharing(path, dist.get_world_size()) as accelerator:
        model = llama()
        model.get_input_embeddings().requires_grad_(False)  # DDP would wait for its gradient
        model, _ = accelerator.prepare(model, _sgd(model))
        found = embedded.clone().requires_grad_()
        accelerator.backward(model(inputs_embeds=found, labels=batch["labels"]).loss)
        assert (found.grad - wanted.grad).abs().max() < 1e-6


@on_paths("zero2")
def test_another_label_that_is_ignored(path: str) -> None:
    """`ignore_index` of transformers' losses applies to padding too."""
    batch = _batch(length=13)
    labels = batch["labels"].clone()
    labels[:, :4] = 0
    _assert_same_step(path, llama, lambda m: m(batch["input_ids"], labels=labels, ignore_index=0).loss)


@on_paths("zero2")
def test_a_class_that_a_script_has_derived(path: str) -> None:
    """A derived class may pool hidden states or add to a loss: inside it, transformers gives complete ones."""
    from transformers import LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaModel, LlamaPreTrainedModel

    class Pooling(LlamaPreTrainedModel):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = LlamaModel(config)
            torch.manual_seed(4)
            self.score = nn.Linear(32, 3)

        def forward(self, input_ids: Tensor) -> Tensor:
            hidden = self.model(input_ids=input_ids).last_hidden_state
            return self.score(hidden.mean(1) + hidden[:, -1])

    class Adding(LlamaForCausalLM):
        def forward(self, **batch: Any) -> Any:
            output = super().forward(**batch)
            output["loss"] = output.loss + 0.1 * output.logits.logsumexp(-1).square().mean()
            return output

    batch, kinds = _batch(), torch.tensor([0, 2], device=DEVICE)

    def build(kind: Any) -> nn.Module:
        config = llama().config
        torch.manual_seed(3)
        return kind(config).to(DEVICE)

    _assert_same_step(path, lambda: build(Pooling), lambda m: cross_entropy(m(batch["input_ids"]), kinds))
    _assert_same_step(path, lambda: build(Adding), lambda m: m(**batch).loss)


@on_paths("zero2")
def test_a_base_model_below_another_head(path: str) -> None:
    """A model without a head gives complete hidden states, from which the script's head computes its loss."""

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = llama().model
            torch.manual_seed(4)
            self.head = nn.Linear(32, 3, device=DEVICE)

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.head(self.body(input_ids).last_hidden_state[:, -1])

    batch, kinds = _batch(), torch.tensor([0, 2], device=DEVICE)
    _assert_same_step(path, Classifier, lambda m: cross_entropy(m(batch["input_ids"]), kinds))


@on_paths("ddp", "zero2", "zero3", daily=("ddp", "zero3"))
def test_checkpointed_layers(path: str) -> None:
    """Layers that are recomputed in the backward attend as in the forward."""
    batch = _batch("packed")
    for reentrant in (False, True):

        def build(reentrant: bool = reentrant) -> nn.Module:
            model = llama()
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
            return model.train()

        _assert_same_step(path, build, lambda m: m(**batch).loss)


@on_paths("zero2", processes=(2, 4))
def test_more_processes_than_key_heads(path: str) -> None:
    """Key heads are repeated if they are fewer than the processes, or do not divide."""
    batch = _batch()
    of_two, of_four = ((1, 4), (3, 12)), ((1, 4), (2, 4), (4, 4), (2, 8), (3, 12))
    for keys, heads in of_two if dist.get_world_size() == 2 else of_four:
        sizes = {"num_key_value_heads": keys, "num_attention_heads": heads, "hidden_size": 8 * heads}
        _assert_same_step(path, lambda sizes=sizes: llama(**sizes), lambda m: m(**batch).loss)


@on_paths("zero2")
def test_values_of_another_size(path: str) -> None:
    """Heads of values may differ in size from queries and keys, as in multi-head latent attention."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
    ranks = {"q_lora_rank": 8, "kv_lora_rank": 8, "v_head_dim": 8, "use_cache": False, "first_k_dense_replace": 1}
    experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}

    def build() -> nn.Module:
        torch.manual_seed(3)
        config = DeepseekV3Config(vocab_size=WORDS, **(sizes | heads | ranks | experts))
        return DeepseekV3ForCausalLM(config).to(DEVICE)

    for kind in ("plain", "packed"):
        batch = _batch(kind, length=15)
        _assert_same_step(path, build, lambda m, batch=batch: m(**batch).loss)
    torch.manual_seed(4)
    query, key, value = (torch.randn(2, heads, 8, size, device=DEVICE) for heads, size in ((4, 4), (2, 4), (2, 6)))
    wanted = attention(query, key, value)
    with sharing(path, dist.get_world_size()):
        found = gather(attention(*(cut(tensor, 2) for tensor in (query, key, value))), 2)
    assert torch.allclose(found, wanted, atol=1e-6)


@on_paths("zero2")
def test_a_table_of_positions_that_just_suffices(path: str) -> None:
    """Padding needs no positions beyond those of the samples."""
    batch = _batch(length=15)
    _assert_same_step(path, lambda: gpt2(n_positions=15), lambda m: m(**batch).loss)


@on_paths("ddp", "zero2", "zero3", daily=("ddp", "zero3"))
def test_adapters(path: str) -> None:
    """PEFT's LoRA, which wraps the transformers model, trains alike."""
    from peft import LoraConfig, get_peft_model

    def build() -> nn.Module:
        torch.manual_seed(4)
        config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(llama(), config)
        for name, p in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(p, generator=torch.Generator().manual_seed(5))
        return model

    batch = _batch("half")
    _assert_same_step(path, build, lambda m: m(**batch).loss)


class Own(nn.Module):
    """A decoder that calls this package's functions, which do nothing on one process."""

    supports_sequence_parallel = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.words, self.positions = nn.Embedding(WORDS, 16), nn.Embedding(64, 16)
        self.qkv, self.out, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, WORDS)
        self.to(DEVICE)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = cut(self.words(ids) + self.positions.weight[: ids.shape[1]])
        heads = [part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(hidden).chunk(3, -1)]
        hidden = hidden + self.out(attention(*heads).transpose(1, 2).flatten(2))
        return gather(self.head(hidden))


@on_paths("ddp", "zero2", "zero3", daily=("ddp", "zero3"))
def test_a_model_of_ones_own(path: str) -> None:
    """Parameters before, within and after the shared part get complete gradients."""
    batch = _batch()

    def loss_of(model: nn.Module) -> Tensor:
        return cross_entropy(model(batch["input_ids"])[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    _assert_same_step(path, Own, loss_of)


@on_paths("zero2")
def test_positions_of_all_rows_alike(path: str) -> None:
    """One row of positions separates every row's documents, on one process too."""
    torch.manual_seed(4)
    heads = [torch.randn(2, 4, 8, 4, device=DEVICE) for _ in range(3)]
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]], device=DEVICE)
    documents = [attention(*(part[:, :, rows] for part in heads)) for rows in (slice(0, 3), slice(3, 8))]
    wanted = torch.cat(documents, 2)
    assert torch.allclose(attention(*heads, position_ids=positions), wanted, atol=1e-6)
    with sharing(path, dist.get_world_size()):
        found = gather(attention(*(cut(part, 2) for part in heads), position_ids=positions), 2)
    assert torch.allclose(found, wanted, atol=1e-6)


class Summed(Own):
    """The same decoder with a loss that is a sum over the parts."""

    def forward(self, ids: Tensor) -> Tensor:
        hidden = cut(self.words(ids) + self.positions.weight[: ids.shape[1]])
        heads = [part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(hidden).chunk(3, -1)]
        hidden = hidden + self.out(attention(*heads, window=3, position_ids=None).transpose(1, 2).flatten(2))
        following = cut(pad(ids[:, 1:], (0, 1), value=-100))
        logits = self.head(hidden).flatten(0, 1)
        return total(cross_entropy(logits, following.flatten(), reduction="sum")) / (following != 0).numel()


@on_paths("ddp", "zero2", "zero3", daily=("ddp", "zero3"))
def test_a_loss_that_is_a_sum_of_parts(path: str) -> None:
    """`total` gives each process the loss of all, and each part its gradient."""
    ids = _batch()["input_ids"]
    size = dist.get_world_size()
    found = _step(path, Summed(), lambda m: m(ids))
    wanted = _step_plainly(Summed(), lambda m: m(ids) * size)  # with one process a part has all tokens
    for name, weight in wanted.items():
        assert (found[name] - weight).abs().max() < 1e-5, name


@on_paths("ddp", "zero2", "zero3", daily=("ddp", "zero3"))
def test_bf16(path: str) -> None:
    """The loss equals one process's in bf16, except for rounding."""
    batch = _batch("packed")
    with sharing(path, dist.get_world_size(), mixed_precision="bf16") as accelerator:
        model = llama()
        model, optimizer = accelerator.prepare(model, _sgd(model))
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
    plain = llama().to(torch.bfloat16) if path.startswith("zero") else llama()
    assert abs(loss.item() - plain(**batch).loss.item()) < 0.02


# ---- what is left as it is -------------------------------------------------------------------------------------------


@on_paths("ddp", "zero2", "zero3", daily=("ddp", "zero3"))
def test_text_is_generated_as_without(path: str) -> None:
    """A forward with a cache is complete on each process, and may differ between processes."""
    ids, how = _batch()["input_ids"][:, :5], {"do_sample": False, "pad_token_id": 0, "use_cache": True}
    wanted = llama().generate(ids, max_new_tokens=4, **how)
    with sharing(path, dist.get_world_size()) as accelerator:
        model, _ = accelerator.prepare(llama(), DataLoader(make_samples("plain"), batch_size=2))
        if path == "zero3":
            return
        found = accelerator.unwrap_model(model).generate(ids, max_new_tokens=4, **how)
        assert torch.equal(found, wanted)
        if accelerator.is_main_process:
            accelerator.unwrap_model(model).generate(ids, max_new_tokens=4, **how)


@on_paths("zero2")
def test_decoding_by_hand(path: str) -> None:
    """A forward that makes a cache is complete on each process, whether the call or the configuration requests it."""
    ids = _batch()["input_ids"][:, :5]

    def decode(model: Any, **asks: Any) -> Tensor:
        found, following, past = [], ids, None
        with torch.no_grad():
            for _ in range(3):
                output = model(following, past_key_values=past, **asks)
                past, following = output.past_key_values, output.logits[:, -1:].argmax(-1)
                found.append(output.logits[:, -1])
        return torch.stack(found)

    for config, asks in (({"use_cache": False}, {"use_cache": True}), ({"use_cache": True}, {})):
        wanted = decode(llama(**config).eval(), **asks)
        with sharing(path, dist.get_world_size()) as accelerator:
            model = llama(**config)
            model, _ = accelerator.prepare(model, _sgd(model))
            assert torch.allclose(decode(model.eval(), **asks), wanted, atol=1e-6)


@on_paths("zero2")
def test_another_model_of_the_same_configuration(path: str) -> None:
    """An unprepared model computes as before, with complete samples of its own."""
    other, batch = llama(), _batch("packed")
    first = llama()
    other.config, other.model.config = first.config, first.config
    before, kind = other(**batch).logits.detach(), other.config._attn_implementation
    with sharing(path, dist.get_world_size()) as accelerator:
        model, _ = accelerator.prepare(first, _sgd(first))
        model(**batch)
        own = {name: value + dist.get_rank() if name == "input_ids" else value for name, value in batch.items()}
        if accelerator.is_main_process:
            assert torch.equal(other(**own).logits, before)
        assert other.config._attn_implementation == kind
        assert accelerator.unwrap_model(model).config is not other.config


@on_paths("zero2")
def test_copies_of_the_model(path: str) -> None:
    """A deep copy, as of a moving average, does not train and shares the samples too."""
    batch = _batch()
    with sharing(path, dist.get_world_size()) as accelerator:
        model, _ = accelerator.prepare(llama(), DataLoader(make_samples("plain"), batch_size=2))
        inner = accelerator.unwrap_model(model)
        inner.eval()
        copied = copy.deepcopy(inner)
        with torch.no_grad():
            assert torch.allclose(copied(**batch).logits, model(**batch).logits)


@on_paths("ddp", "zero2", "zero3", daily=("ddp", "zero3"))
def test_what_is_saved(folder: Path, path: str) -> None:
    """Saved weights are complete, and the configuration has no trace of this run."""
    place = [str(folder)]
    dist.broadcast_object_list(place)
    with sharing(path, dist.get_world_size()) as accelerator:
        model = llama()
        model, _ = accelerator.prepare(model, _sgd(model))
        accelerator.save_model(model, place[0])
        dist.barrier()
        from safetensors.torch import load_file

        saved = load_file(f"{place[0]}/model.safetensors")
        assert saved.keys() >= {"model.embed_tokens.weight", "model.norm.weight"}
        written = Path(place[0], "config.json")
        if written.exists():
            assert "zero_plugin" not in json.dumps(json.loads(written.read_text()))


# ---- samples, random numbers, metrics, schedules ---------------------------------------------------------------------


@on_paths("zero2", processes=(2, 4))
def test_each_sample_counts_once(path: str) -> None:
    """Groups have separate samples. Metrics have each once, in order, with a short last batch."""
    size = 2
    groups = dist.get_world_size() // size
    data = [{"input_ids": torch.full((4,), number), "number": number} for number in range(11)]
    with sharing(path, size) as accelerator:
        loader = accelerator.prepare(DataLoader(data, batch_size=2))
        assert loader.total_batch_size == 2 * groups
        seen, numbers, ones, drawn = [], [], [], []
        for batch in loader:
            drawn.append(batch["number"].tolist())
            seen.append(accelerator.gather_for_metrics(batch["number"]))
            numbers += accelerator.gather_for_metrics(batch["number"].tolist(), use_gather_object=True)
            ones.append(accelerator.gather_for_metrics(torch.tensor(1.0, device=accelerator.device)))
        assert torch.cat(seen).tolist() == numbers == list(range(11))
        assert sum(len(one) for one in ones) == 6
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, drawn)
        assert all(found[rank] == found[rank // size * size] for rank in range(len(found)))
        assert groups == 1 or found[0] != found[size]


@on_paths("zero2")
def test_shuffled_samples_are_the_same_in_a_group(path: str) -> None:
    """A group agrees on one order, whatever its processes' random states."""
    torch.manual_seed(dist.get_rank())
    with sharing(path, dist.get_world_size()) as accelerator:
        loader = accelerator.prepare(DataLoader(list(range(20)), batch_size=3, shuffle=True))
        for _ in range(2):
            assert _is_everywhere([batch.tolist() for batch in loader])


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        yield from range(10)


@on_paths("zero2", processes=(2, 4))
def test_a_stream_is_the_same_in_a_group(path: str) -> None:
    """A stream that is equal everywhere is divided among groups. One that divides itself is refused."""
    with sharing(path, 2) as accelerator:
        loader = accelerator.prepare(DataLoader(Stream(), batch_size=2))
        seen = [accelerator.gather_for_metrics(batch) for batch in loader]
        assert torch.cat(seen).tolist() == list(range(10))
    with sharing(path, 2, shard_iterable="never") as accelerator:
        raised(
            LoopError,
            "Stream divides itself",
            "same samples",
            by=lambda: accelerator.prepare(DataLoader(Stream(), batch_size=2)),
        )


class Dropping(nn.Module):
    """A dropout layer that records which inputs are dropped."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.noted = inner, []

    def forward(self, hidden: Tensor) -> Tensor:
        kept: Tensor = self.inner(torch.ones_like(hidden))
        self.noted.append((kept != 0).tolist())
        return hidden


@on_paths("zero2", processes=(2, 4))
def test_dropout_differs_in_a_group(path: str) -> None:
    """Parts of a sample get different random numbers. Draws outside the model stay equal."""
    batch = _batch()
    torch.manual_seed(0)
    with sharing(path, dist.get_world_size()) as accelerator:
        model = gpt2(embd_pdrop=0.5)
        model.transformer.drop = noting = Dropping(nn.Dropout(0.5))
        model, optimizer = accelerator.prepare(model, _sgd(model))
        model.train()
        for _ in range(2):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
        _assert_own_numbers(noting.noted)
        model.eval()
        state = torch.get_rng_state()
        model(**batch)
        assert torch.equal(torch.get_rng_state(), state)


@on_paths("zero2")
def test_noise_differs_in_a_group(path: str) -> None:
    """All draws inside a training model differ between parts, and between steps."""
    batch = _batch()
    torch.manual_seed(0)
    with sharing(path, dist.get_world_size()) as accelerator:
        model, noted = llama(), []

        def add_noise(module: nn.Module, given: Any, output: Tensor) -> Tensor:
            noise = torch.rand_like(output)
            noted.append(noise.tolist())
            return output + 0.01 * noise

        model.get_input_embeddings().register_forward_hook(add_noise)
        model, optimizer = accelerator.prepare(model, _sgd(model))
        model.train()
        for _ in range(2):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
        _assert_own_numbers(noted)


class Drawing(Own):
    """A user's model that draws on parts, with different numbers per process, and on complete samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = Dropping(nn.Dropout(0.5)), Dropping(nn.Dropout(0.5))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = cut(self.outside(self.words(ids)))
        with own_random_numbers():
            hidden = self.inside(hidden)
        return self.head(gather(hidden))


@on_paths("zero2", processes=(2, 4))
def test_own_random_numbers_of_a_model_of_ones_own(path: str) -> None:
    """Draws on parts differ in the group, draws before `cut` are equal, and evaluation moves no generator."""
    batch = _batch()
    torch.manual_seed(0)
    with sharing(path, dist.get_world_size()) as accelerator:
        plain = Drawing()
        model, optimizer = accelerator.prepare(plain, _sgd(plain))
        for checkpointed in (False, True):
            ids = batch["input_ids"]
            logits = checkpoint(model, ids, use_reentrant=False) if checkpointed else model(ids)
            accelerator.backward(logits.square().mean())
            optimizer.step()
        _assert_own_numbers(plain.inside.noted)
        assert _is_everywhere(plain.outside.noted)
        assert plain.inside.noted[1] == plain.inside.noted[2]  # computed again for its backward
        model.eval()
        state = torch.get_rng_state()
        model(batch["input_ids"])
        assert torch.equal(torch.get_rng_state(), state)


@on_paths("zero2")
def test_wrong_arguments_of_the_functions(path: str) -> None:
    """Wrong arguments raise errors that say what to pass, on one process and on several."""
    numbers = torch.ones(2, 4)

    def call_wrongly() -> None:
        raised(LoopError, "cut(): it got a list; give a tensor", by=lambda: cut([1.0]))
        raised(LoopError, "cut(): a tensor of shape (2, 4) has no dimension 5", by=lambda: cut(numbers, 5))
        raised(LoopError, "gather(): a tensor of shape () has no dimension 1", by=lambda: gather(torch.ones(())))
        raised(LoopError, "total(): it got a float; give a tensor", by=lambda: total(1.0))

    call_wrongly()
    with sharing(path, dist.get_world_size()):
        call_wrongly()


def _assert_own_numbers(noted: list[Any]) -> None:
    """Assert that records differ between processes and steps inside the model, and not outside."""
    assert _is_everywhere(torch.rand(3).tolist())
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, noted)
    assert found[0][0] != found[1][0]
    assert found[0][0] != found[0][1]


@on_paths("zero2")
def test_a_model_that_draws_nothing_moves_no_generator(path: str) -> None:
    """Draws after a forward without draws, like a shuffle's order, equal one process's."""
    batch = _batch()
    with sharing(path, dist.get_world_size()) as accelerator:
        model, _ = accelerator.prepare(model := llama(), _sgd(model))
        before = torch.get_rng_state()
        accelerator.backward(model.train()(**batch).loss)
        assert torch.equal(torch.get_rng_state(), before)


@on_paths("ddp", "zero2", "zero3", daily="zero3", processes=(2, 4))
def test_batch_sizes_and_schedules_count_groups(path: str) -> None:
    """A group counts once in the global batch, and in the counts of schedulers."""
    size, world = 2, dist.get_world_size()
    deepspeed = {
        "train_batch_size": "auto",
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto"}},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
    }
    with sharing(path, size, deepspeed=deepspeed, counts="processes", gradient_accumulation_steps=3) as accelerator:
        model = llama()
        optimizer = DummyOptim(model.parameters())
        scheduler = DummyScheduler(optimizer, warmup_num_steps=40)
        loader = DataLoader(make_samples("plain"), batch_size=2)
        accelerator.prepare(model, optimizer, scheduler, loader)
        tree = accelerator.resolved.tree
        assert tree.value("train_batch_size") == 2 * 3 * world // size
        assert tree.value("scheduler", "params", "warmup_num_steps") == 40 * size // world
    wrong = {"train_batch_size": 6 * world, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    with sharing(path, size, deepspeed=wrong) as accelerator:
        model = llama()
        raised(
            ConfigError,
            f"{6 * world} is not",
            f"{world // size} (groups of 2 processes)",
            by=lambda: accelerator.prepare(model, _sgd(model), DataLoader(make_samples("plain"), batch_size=2)),
        )


@on_paths("ddp", "zero2", "zero3", daily="zero3", processes=(2, 4))
def test_resuming_with_groups_of_another_size(folder: Path, path: str) -> None:
    """A checkpoint loads with other groups: the same weights, and the loop resumes at the same sample."""
    place = [str(folder / "checkpoint")]
    dist.broadcast_object_list(place)
    case, world = Case(count=16), dist.get_world_size()

    def run(size: int, accumulation: int, begins: bool) -> tuple[list[list[int]], dict[str, Tensor]]:
        from zero_plugin.utils import DataLoaderConfiguration

        loading = DataLoaderConfiguration(use_stateful_dataloader=True)
        with sharing(path, size, gradient_accumulation_steps=accumulation, dataloader_config=loading) as accelerator:
            model = llama()
            model, optimizer, loader = accelerator.prepare(model, case.optimizer(model), case.loader())
            if not begins:
                accelerator.load_state(place[0])
            seen = []
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch).loss)
                    optimizer.step()
                    optimizer.zero_grad()
                seen += accelerator.gather_for_metrics(batch["input_ids"]).tolist()
                if begins and len(seen) == 8:
                    accelerator.save_state(place[0])
                    break
            state = [accelerator.get_state_dict(model)]
            dist.broadcast_object_list(state)
            return seen, {name: value.to(DEVICE) for name, value in state[0].items()}

    # Groups of 2 and of all processes: accumulation keeps the global batch.
    before, _ = run(world, world // 2, begins=True)
    after, weights = run(2, 1, begins=False)
    samples = [sample["input_ids"].tolist() for sample in make_samples("plain", 16)]
    assert [*before, *after] == samples
    _, wanted, _ = train_plainly(case, world // 2)
    for name, weight in wanted.items():
        assert (weights[name] - weight).abs().max() < 2e-5, name


@on_paths("ddp", "zero2", "zero3", daily=("ddp", "zero3"))
def test_steps_inside_no_sync(path: str) -> None:
    """Steps inside no_sync use complete gradients, of which each process has a part, under DDP and ZeRO."""
    batch, plain = _batch(), llama()
    sgd = _sgd(plain)
    for _ in range(2):
        plain(**batch).loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        sgd.step()
        sgd.zero_grad()
    with sharing(path, dist.get_world_size()) as accelerator:
        model = llama()
        model, optimizer = accelerator.prepare(model, _sgd(model))
        for _ in range(2):
            with accelerator.no_sync(model):
                accelerator.backward(model(**batch).loss)
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        found = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            for name, wanted in plain.state_dict().items():
                assert (found[name] - wanted).abs().max() < 2e-5, name


# ---- mistakes --------------------------------------------------------------------------------------------------------


@on_paths("ddp", "zero2", "zero3", daily=("ddp", "zero3"))
def test_local_sgd_is_refused(path: str) -> None:
    """LocalSGD is refused, since each process would step by its part's gradients. Disabled under DDP it is accepted."""
    with sharing(path, dist.get_world_size()) as accelerator:
        model = llama()
        model, _ = accelerator.prepare(model, _sgd(model))
        words = "sequence_parallel_size: 1" if path == "ddp" else "under DeepSpeed"
        raised(LoopError, "LocalSGD", words, by=lambda: LocalSGD(accelerator, model, 2))
        if path == "ddp":
            LocalSGD(accelerator, model, 2, enabled=False)


@on_paths("zero2")
def test_a_loss_of_a_part_is_refused(path: str) -> None:
    """A loss that differs within a group is refused, because its gradients would be wrong."""
    with sharing(path, dist.get_world_size()) as accelerator:
        model = Own()
        model, _ = accelerator.prepare(model, _sgd(model))
        logits = model(_batch()["input_ids"])
        part = cut(logits).square().mean()
        raised(LoopError, "differs among the", "total()", by=lambda: accelerator.backward(part))


@on_paths("zero2")
def test_a_small_loss_of_a_part_is_refused(path: str) -> None:
    """A term that is small next to the group's loss still has a gradient, so it is refused too."""
    with sharing(path, dist.get_world_size()) as accelerator:
        model = llama()
        model, _ = accelerator.prepare(model, _sgd(model))
        loss = model(**_batch()).loss
        part = loss * (1 + 5e-6 * dist.get_rank())
        raised(LoopError, "differs among the", by=lambda: accelerator.backward(part))


@on_paths("zero2")
def test_wrong_arguments_of_attention_are_refused(path: str) -> None:
    """Each wrong argument is refused by name: some would give other rows, or a length that a sum broadcasts."""
    part, packed = torch.randn(2, 4, 8, 4, device=DEVICE), torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]], device=DEVICE)
    is_padding = torch.zeros(2, 16, dtype=torch.bool, device=DEVICE)
    with sharing(path, 2):
        for words, given in (
            (("position_ids is of shape (2, 8)", "(2, 16)"), {"position_ids": packed.expand(2, -1)}),
            (("position_ids is of shape (3, 16)",), {"position_ids": packed.repeat(3, 2)}),
            (("position_ids is of shape (16,)",), {"position_ids": packed[0].repeat(2)}),
            (("is_padding is of shape (2, 8)",), {"is_padding": is_padding[:, :8]}),
            (("is_padding holds torch.int64", "== 0"), {"is_padding": is_padding.long()}),
            (("window=0", "None"), {"window": 0}),
            (("the key is of shape (2, 3, 8, 4)", "divide"), {"key": part[:, :3]}),
            (("the value is of shape (2, 4, 4, 4)",), {"value": part[:, :, :4]}),
            (("the query is of shape (4, 8, 4)",), {"query": part[0]}),
        ):
            arguments = {"query": part, "key": part, "value": part, **given}
            raised(LoopError, "attention(): ", *words, by=lambda arguments=arguments: attention(**arguments))
        assert attention(part, part, part, is_padding=is_padding[:1]).shape == part.shape


class Shift(nn.Module):
    """A module that mixes each token with the previous one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden + pad(hidden[:, :-1], (0, 0, 1, 0)))


@on_paths("zero2")
def test_what_may_look_along_a_sequence_is_named(path: str) -> None:
    """prepare names the script's modules and hooks inside a model, once, because they get parts."""
    from peft import LoraConfig, get_peft_model
    from transformers.integrations.neftune import neftune_post_forward_hook

    shifting, noisy = llama(), llama()
    for layer in shifting.model.layers:
        layer.mlp = Shift(layer.mlp)
    shifting.model.norm.register_forward_pre_hook(functools.partial(_note, []))
    noisy.get_input_embeddings().register_forward_hook(neftune_post_forward_hook)
    ordinary = llama()
    ordinary.gradient_checkpointing_enable()
    ordinary.enable_input_require_grads()
    ordinary.register_forward_hook(lambda *_: None)  # the model itself gives complete results
    adapted = get_peft_model(ordinary, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    named = {
        ("Shift (model.layers.0.mlp)", "_note (model.norm)"): shifting,
        ("neftune_post_forward_hook (model.embed_tokens)",): noisy,
        (): adapted,
    }
    for names, model in named.items():
        with sharing(path, dist.get_world_size()) as accelerator, listening() as messages:
            accelerator.prepare(model, _sgd(model))
        found = [message for message in messages if "get a part of each sequence" in message]
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, found)
        assert sum(map(len, everywhere)) == bool(names), everywhere
        assert all(name in message for message in found for name in names), found


def _note(notes: list[Any], module: nn.Module, given: Any) -> None:
    notes.append(given)


@on_paths("zero2")
def test_other_samples_in_a_group_are_refused(path: str) -> None:
    """Samples that differ in content or length within a group are refused, because they would be mixed."""
    with sharing(path, dist.get_world_size()) as accelerator:
        model, _ = accelerator.prepare(llama(), DataLoader(make_samples("plain"), batch_size=2))
        batch, rank = _batch(), dist.get_rank()
        for other in (
            {**batch, "input_ids": (batch["input_ids"] + rank) % WORDS},
            {name: value[:, : LENGTH - rank] for name, value in batch.items()},
            {**batch, "labels": batch["labels"].roll(rank)},
            {"input_ids": batch["input_ids"], **({} if rank else {"labels": batch["labels"]})},
            {"inputs_embeds": torch.full((2, LENGTH, 32), 1.0 + 0.01 * rank, device=DEVICE)},
            {
                "inputs_embeds": torch.linspace(-1, 1, LENGTH, device=DEVICE)[None, :, None].expand(2, -1, 32)
                * (1 - 2 * rank)
            },
        ):
            raised(
                LoopError,
                "got different samples",
                "set_seed",
                "on all processes, not under",
                by=lambda other=other: model(**other),
            )
        assert torch.isfinite(model(**batch).loss)


@on_paths("zero2")
def test_arguments_that_cannot_be_cut_are_refused(path: str) -> None:
    """Each uncuttable argument is refused by name, on all processes."""
    batch = _batch()
    with sharing(path, dist.get_world_size()) as accelerator:
        model, _ = accelerator.prepare(llama(), DataLoader(make_samples("plain"), batch_size=2))
        mask = torch.ones(2, 1, LENGTH, LENGTH, device=DEVICE)
        for name, given in (
            ("attention_mask", {"attention_mask": mask}),
            ("output_hidden_states", {"output_hidden_states": True}),
            ("return_dict", {"return_dict": False}),
            ("something", {"something": mask}),
            ("labels has 3", {"labels": batch["labels"][:, :3]}),
            ("input_ids have to be a tensor of shape (batch, sequence)", {"input_ids": batch["input_ids"][0]}),
            ("input_ids have to be a tensor", {"input_ids": batch["input_ids"].tolist()}),
            ("both input_ids and inputs_embeds", {"inputs_embeds": torch.ones(2, LENGTH, 32, device=DEVICE)}),
            (
                f"input_ids are from 1 to {WORDS}",
                {"input_ids": batch["input_ids"].clone().fill_(1).index_fill_(1, torch.tensor(0), WORDS)},
            ),
            ("labels are from -7", {"labels": batch["labels"].index_fill(1, torch.tensor(15), -7)}),
        ):
            raised(LoopError, "LlamaForCausalLM", name, by=lambda given=given: model(**{**batch, **given}))
        inner = accelerator.unwrap_model(model)
        for name in ("output_hidden_states", "return_dict"):
            before = getattr(inner.config, name)
            setattr(inner.config, name, not before)
            raised(LoopError, "LlamaForCausalLM", name, by=lambda: model(**batch))
            setattr(inner.config, name, before)
        assert model(**batch, logits_to_keep=0).loss is not None
        with torch.no_grad():
            assert model(batch["input_ids"], logits_to_keep=2).logits.shape[1] == 2


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=4, intermediate_size=16, vocab_size=16)
    return BertForMaskedLM(config)


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4, vocab_size=16))


def _bloom() -> nn.Module:
    from transformers import BloomConfig, BloomForCausalLM

    return BloomForCausalLM(BloomConfig(hidden_size=16, n_layer=1, n_head=4, vocab_size=16))


def _roberta() -> nn.Module:
    from transformers import RobertaConfig, RobertaForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 16}
    return RobertaForCausalLM(RobertaConfig(vocab_size=16, is_decoder=True, **sizes))


def _opt() -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    return OPTForCausalLM(
        OPTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=4, ffn_dim=16, vocab_size=16)
    )


def _double_heads() -> nn.Module:
    from transformers import GPT2Config, GPT2DoubleHeadsModel

    return GPT2DoubleHeadsModel(GPT2Config(vocab_size=16, n_embd=16, n_layer=1, n_head=4, num_labels=1))


def _classifier() -> nn.Module:
    from transformers import LlamaForSequenceClassification

    return LlamaForSequenceClassification(llama().config)


def _mamba() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=16, state_size=4))


@on_paths("zero2")
def test_models_that_cannot_are_refused(path: str) -> None:
    """`prepare` refuses unsupported models with key and reason, before any training."""
    world = dist.get_world_size()
    stretched = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    models: dict[str, Callable[[], nn.Module]] = {
        "BertForMaskedLM": _bert,
        "T5ForConditionalGeneration": _t5,
        "BloomForCausalLM": _bloom,
        "LlamaForSequenceClassification": _classifier,
        "how a RobertaForCausalLM numbers positions": _roberta,
        "how a OPTForCausalLM numbers positions": _opt,
        "GPT2DoubleHeadsModel": _double_heads,
        "MambaForCausalLM": _mamba,
        "3 attention heads": lambda: llama(num_attention_heads=3, num_key_value_heads=1, hidden_size=24),
        "dynamic": lambda: llama(rope_parameters=stretched),
        "a Linear computes": lambda: nn.Linear(2, 2),
    }
    for reason, build in models.items():
        with sharing(path, world) as accelerator:
            model = build()
            raised(
                ConfigError,
                f"sequence_parallel_size: {world}, but",
                reason,
                by=lambda model=model: accelerator.prepare(model, _sgd(model)),
            )


@on_paths("zero2")
def test_a_gradient_of_a_gradient_is_refused(path: str) -> None:
    """A gradient of a gradient is refused, because torch would silently omit parts of it."""
    with sharing(path, dist.get_world_size()) as accelerator:
        model = Own()
        model, _ = accelerator.prepare(model, _sgd(model))
        weight = accelerator.unwrap_model(model).head.weight
        loss = model(_batch()["input_ids"]).square().mean()
        (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
        raised(RuntimeError, "once_differentiable", by=lambda: gradient.square().sum().backward())


@on_paths("zero2")
def test_a_loss_function_of_the_script_is_refused(path: str) -> None:
    """A script's loss function would get parts, so it is refused. If set later, the first forward notices it."""
    with sharing(path, dist.get_world_size()) as accelerator:
        model = llama()
        model.loss_function = lambda logits, labels, **_: logits.mean()
        raised(LoopError, "loss_function", "logits", by=lambda: accelerator.prepare(model, _sgd(model)))
        model = llama()
        model, _ = accelerator.prepare(model, _sgd(model))
        accelerator.unwrap_model(model).loss_function = lambda logits, labels, **_: logits.mean()
        raised(LoopError, "computes its own loss", by=lambda: model(**_batch()))


@on_paths("zero2")
def test_a_model_that_reads_its_mask_is_refused(path: str) -> None:
    """A model that reads its mask is refused in its first forward, when the mask is no tensor."""
    from transformers import DogeConfig, DogeForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
    with sharing(path, dist.get_world_size()) as accelerator:
        model = DogeForCausalLM(DogeConfig(vocab_size=WORDS, intermediate_size=16, **sizes)).to(DEVICE)
        model, _ = accelerator.prepare(model, _sgd(model))
        raised(LoopError, "reads the mask", by=lambda: model(**_batch()))


@on_paths("zero2")
def test_loaders_that_cannot_are_refused(path: str) -> None:
    """A loader that process 0 reads for all is refused, since some processes need the same samples."""
    from zero_plugin.utils import DataLoaderConfiguration

    with sharing(path, 2, dataloader_config=DataLoaderConfiguration(dispatch_batches=True)) as accelerator:
        raised(
            ConfigError, "dispatch_batches", by=lambda: accelerator.prepare(DataLoader(list(range(8)), batch_size=2))
        )


@on_paths("zero2")
def test_a_sampler_of_all_processes_is_refused(path: str) -> None:
    """torch's DistributedSampler is refused, because it gives each process separate samples."""
    from torch.utils.data import DistributedSampler

    data = list(range(16))
    with sharing(path, dist.get_world_size()) as accelerator:
        loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data))
        raised(LoopError, "DistributedSampler takes part", by=lambda: accelerator.prepare(loader))


@on_paths("zero2", processes=(2, 4))
def test_groups_that_do_not_divide_are_refused(path: str) -> None:
    """A group size that does not divide the processes is refused before prepare, with legal sizes."""

    def start() -> None:
        with sharing(path, 3):
            pass

    raised(ConfigError, "sequence_parallel_size: 3 does not divide the", "Write 1 or 2", by=start)


@on_paths("zero2", processes=(2, 4))
def test_the_run_says_what_it_does(path: str) -> None:
    """One line at the start describes the run."""
    world = dist.get_world_size()
    with listening() as messages, sharing(path, 2):
        pass
    assert dist.get_rank() or any(
        f"{world // 2} groups of 2 processes share samples" in message for message in messages
    )


@on_paths("zero2", processes=(2, 4))
def test_parallelism_config(path: str) -> None:
    """Accelerate's ParallelismConfig in code means the same."""
    from paths import running

    from zero_plugin.utils import ParallelismConfig

    with running(path, parallelism_config=ParallelismConfig(sp_size=2)) as accelerator:
        loader = accelerator.prepare(DataLoader(list(range(8)), batch_size=2))
        assert loader.total_batch_size == dist.get_world_size()
    raised(
        ConfigError,
        "tp_size",
        by=lambda: running(path, parallelism_config=ParallelismConfig(tp_size=2)).__enter__(),
    )


@on_paths("zero2")
def test_a_window_that_sees_no_difference(path: str) -> None:
    """A window as long as the sequence counts as no window."""
    batch = _batch()
    _assert_same_step(path, lambda: mistral(sliding_window=LENGTH), lambda m: m(**batch).loss)


# Tests for several paths run daily on DDP and stage 3.
