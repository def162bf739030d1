"""Models that stage 3 partitions from the start: values, dtypes, and exceptions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from on_paths import in_processes
from paths import listening, running, same
from small import (
    VOCABULARY,
    assert_losses,
    assert_trains_alike,
    bert,
    build,
    gpt2,
    is_partitioned,
    mixtral,
    sgd,
    stored,
    t5,
    train,
    train_plain,
    whole,
)
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralForCausalLM,
    Trainer,
    TrainingArguments,
)

from zero_plugin import Accelerator, DeepSpeedPlugin
from zero_plugin.config import installed
from zero_plugin.errors import LoopError
from zero_plugin.strategies.deepspeed.guards.group_shapes import refuse_groups_by_empty_shape


class Plain(nn.Module):
    """A user's own module that initialises its children, ties, draws, and keeps buffers in its constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 8, bias=False)
        self.last = nn.Linear(8, 16)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.randn(8))
        self.register_buffer("table", torch.linspace(0, 1, 5) / 3)
        self.apply(self._initialize)

    @staticmethod
    def _initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.3)


@in_processes(2)
def test_the_plugins_context(folder: Path) -> None:
    """`zero3_init_context_manager` decides whether models built inside are partitioned, whatever the run's setting."""
    place = stored(gpt2, folder / "gpt2")
    with running("zero3") as accelerator:
        plugin = accelerator.state.deepspeed_plugin
        assert plugin.is_zero3_init_enabled()
        with plugin.zero3_init_context_manager(enable=False):
            assert not plugin.is_zero3_init_enabled()
            assert not is_partitioned(GPT2LMHeadModel.from_pretrained(place))
        assert is_partitioned(GPT2LMHeadModel.from_pretrained(place))
    with running("zero3", deepspeed={"zero3_init_flag": False}) as accelerator:
        plugin = accelerator.state.deepspeed_plugin
        assert not is_partitioned(GPT2LMHeadModel.from_pretrained(place))
        with plugin.zero3_init_context_manager(enable=True):
            assert is_partitioned(GPT2LMHeadModel.from_pretrained(place))


@in_processes(2)
def test_the_selected_plugin(folder: Path) -> None:
    """The plugin that is selected at construction decides whether a model is partitioned."""
    place = stored(gpt2, folder / "gpt2")
    plugins = {"student": DeepSpeedPlugin(zero_stage=2), "teacher": DeepSpeedPlugin(zero_stage=3)}
    accelerator = Accelerator(cpu=True, deepspeed_plugins=plugins)
    another = Accelerator()
    try:
        for name, partitioned in (("student", False), ("teacher", True), ("student", False)):
            accelerator.state.select_deepspeed_plugin(name)
            assert is_partitioned(GPT2LMHeadModel.from_pretrained(place)) is partitioned
            with another.init_model():
                assert is_partitioned(nn.Linear(64, 64)) is partitioned
    finally:
        another.end_training()
        accelerator.end_training()


@in_processes(2)
def test_pretrained(folder: Path) -> None:
    """`from_pretrained` after Accelerator() gives partitioned stored values and trains as in plain torch."""
    place = stored(gpt2, folder / "gpt2")
    with running("zero3") as accelerator:
        model = GPT2LMHeadModel.from_pretrained(place)
        assert is_partitioned(model)
        assert same(whole(model), dict(build(gpt2).named_parameters()))
        assert_trains_alike(accelerator, model, build(gpt2))
    assert not is_partitioned(GPT2LMHeadModel.from_pretrained(place))  # the run has ended


@in_processes(2)
def test_pretrained_with_stored_experts(folder: Path) -> None:
    """A file's single experts become the model's stacked ones, partitioned."""
    place = stored(mixtral, folder / "mixtral")
    with running("zero3") as accelerator:
        model = MixtralForCausalLM.from_pretrained(place)
        assert is_partitioned(model)
        assert_trains_alike(accelerator, model, build(mixtral))


@in_processes(2)
def test_types(folder: Path) -> None:
    """In bf16 parameters are bf16, whatever the file or code says, and buffers of positions stay fp32."""
    config = LlamaConfig(
        num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=48, vocab_size=VOCABULARY
    )
    place = stored(lambda: LlamaForCausalLM(config), folder / "llama")
    with running("zero3", mixed_precision="bf16") as accelerator:
        for model in (
            LlamaForCausalLM.from_pretrained(place),
            AutoModelForCausalLM.from_config(config),
            LlamaForCausalLM.from_pretrained(place, dtype=torch.float32),
        ):
            assert is_partitioned(model)
            assert {p.ds_tensor.dtype for p in model.parameters()} == {torch.bfloat16}
        model = accelerator.prepare(model)
        assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
    with running("zero3") as accelerator:
        model = LlamaForCausalLM.from_pretrained(place, dtype=torch.bfloat16)
        assert {p.ds_tensor.dtype for p in model.parameters()} == {torch.float32}


def draws_of_16_bits_are_rounded() -> bool:
    """Return whether this torch draws 16-bit numbers like 32-bit ones. Before 2.10 only short tensors are drawn so."""
    drawn = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        drawn.append(torch.empty(16, dtype=dtype).normal_().bfloat16())
    return torch.equal(*drawn)


@in_processes(2)
def test_a_model_that_is_not_prepared(folder: Path) -> None:
    """An unprepared reward model or text encoder raises an error that says to prepare it. Prepared, it computes.

    The same applies to a call of its inner model, and to `generate`.
    """
    ids = torch.arange(6).view(1, 6)
    place = stored(gpt2, folder / "stored")
    with torch.no_grad():
        wanted = build(gpt2)(ids).logits
    with running("zero3") as accelerator, torch.no_grad():
        student = nn.Linear(4, 1)
        accelerator.prepare(student, sgd(student))
        read = GPT2LMHeadModel.from_pretrained(place)
        for model in (read, GPT2LMHeadModel._from_config(read.config)):
            for call in (model, model.transformer, model.generate):
                with pytest.raises(LoopError, match=r"a GPT2\w+ that is not prepared.*\n.*prepare\(model\)"):
                    call(ids)
        with accelerator.whole_weights(read):
            assert torch.allclose(read(ids).logits, wanted, atol=1e-5)
        assert torch.allclose(accelerator.prepare(read)(ids).logits, wanted, atol=1e-5)


@in_processes(2)
def test_init_model(folder: Path) -> None:
    """A model made in `init_model` equals one made outside bitwise, and leaves the same random state.

    A transformers model does too, which initialises its weights again when they are partitioned.
    """
    makers: dict[str, tuple[Callable[[], Any], ...]] = {"no": (bert, t5), "bf16": (Plain, gpt2, mixtral)}
    for precision, dtype in (("no", torch.float32), ("bf16", torch.bfloat16)):
        with running("zero3", mixed_precision=precision) as accelerator:
            for make in makers[precision]:
                reference = build(make)
                drawn = torch.randn(3)
                with accelerator.init_model():
                    model = build(make)
                assert torch.equal(torch.randn(3), drawn), make
                assert is_partitioned(model), make
                wanted = {name: p.detach().to(dtype) for name, p in reference.named_parameters()}
                if precision == "no" or draws_of_16_bits_are_rounded():
                    assert same(whole(model), wanted), make
                assert same(dict(model.named_buffers()), dict(reference.named_buffers())), make
    for path in ("zero2", "ddp"):
        with running(path) as accelerator, accelerator.init_model():
            assert not is_partitioned(Plain())


@in_processes(2)
def test_init_model_with_transformers_ways(folder: Path) -> None:
    """In `init_model`, `from_config` gives its values without ZeRO, and `from_pretrained` the stored ones.

    Later random draws are the same too.
    """
    place = stored(gpt2, folder / "gpt2")
    reference = build(gpt2)
    following = torch.rand(3)
    with running("zero3") as accelerator:
        alone = build(lambda: AutoModelForCausalLM.from_config(reference.config))
        assert torch.equal(torch.rand(3), following)
        with accelerator.init_model():
            made = build(lambda: AutoModelForCausalLM.from_config(reference.config))
            read = GPT2LMHeadModel.from_pretrained(place)
        for model in (alone, made, read):
            assert is_partitioned(model)
            assert same(whole(model), dict(reference.named_parameters()))


@in_processes(2)
def test_new_weights(folder: Path) -> None:
    """A head that the file lacks, and `from_config`, get values of the usual size, also in `init_model`."""
    place = stored(gpt2, folder / "gpt2")
    read = dict(build(gpt2).named_parameters())
    with running("zero3") as accelerator:
        for entered in (nullcontext, accelerator.init_model):
            with entered():
                headed = GPT2ForSequenceClassification.from_pretrained(place, num_labels=3)
                made = AutoModelForCausalLM.from_config(build(gpt2).config)
            found = whole(headed)
            assert 0.01 < found.pop("score.weight").std() < 0.03, entered
            assert same(found, {name: read[name] for name in found}), entered
            assert 0.01 < whole(made)["transformer.wte.weight"].std() < 0.03, entered


@in_processes(2)
def test_releases_that_load_other_weights(folder: Path) -> None:
    """transformers 5.0 to 5.2 get one warning at stage 3, where a run may load a model with them."""
    for release, path, times in (("5.2.0", "zero3", 1), ("5.3.0", "zero3", 0), ("5.2.0", "zero2", 0)):

        def found(package: str, release: str = release) -> str:
            return release if package == "transformers" else version(package)

        with patch.object(installed, "installed_version", found), listening() as messages, running(path):
            pass
        told = [message for message in messages if message.startswith(f"from_pretrained() of transformers {release}")]
        assert len(told) == (times if dist.get_rank() == 0 else 0), (release, path, messages)


@in_processes(2)
def test_mixed(folder: Path) -> None:
    """Modules added to a partitioned model later are partitioned by prepare, and train."""
    with running("zero3") as accelerator:
        with accelerator.init_model():
            model = build(gpt2)
        reference = build(gpt2)
        for grown in (model, reference):
            torch.manual_seed(9)
            grown.lm_head = nn.Linear(32, VOCABULARY)
        assert_trains_alike(accelerator, model, reference)


@in_processes(2)
def test_init_flag(folder: Path) -> None:
    """With `zero3_init_flag: false`, from_pretrained does not partition. prepare partitions, and the model trains."""
    place = stored(gpt2, folder / "gpt2")
    with running("zero3", deepspeed={"zero3_init_flag": False}) as accelerator:
        model = GPT2LMHeadModel.from_pretrained(place)
        assert not is_partitioned(model)
        model = assert_trains_alike(accelerator, model, build(gpt2))
        assert is_partitioned(accelerator.unwrap_model(model))


@in_processes(2)
def test_resized_embeddings(folder: Path) -> None:
    """Embeddings resized before prepare are gathered for it, tied again, trained, and saved unpartitioned."""
    place = stored(gpt2, folder / "gpt2")
    with running("zero3") as accelerator:
        model = GPT2LMHeadModel.from_pretrained(place)
        reference = build(gpt2)
        for resized in (model, reference):
            torch.manual_seed(7)
            resized.resize_token_embeddings(VOCABULARY + 6, mean_resizing=False)
        assert model.lm_head.weight is model.transformer.wte.weight
        model = assert_trains_alike(accelerator, model, reference)
        accelerator.save_model(model, folder / "saved")
    accelerator.wait_for_everyone()
    loaded = GPT2LMHeadModel.from_pretrained(folder / "saved")
    assert loaded.config.vocab_size == len(loaded.lm_head.weight) == VOCABULARY + 6


@in_processes(2)
def test_offloaded_parameters(folder: Path) -> None:
    """from_pretrained fills partitions in CPU memory like those on the device."""
    place = stored(gpt2, folder / "gpt2")
    zero = {"stage": 3, "offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": 0}
    with running("zero3", deepspeed={"zero_optimization": zero}) as accelerator:
        model, reference = GPT2LMHeadModel.from_pretrained(place), build(gpt2)
        assert is_partitioned(model)
        wanted = train_plain(reference, sgd(reference))
        model, optimizer = accelerator.prepare(model, sgd(model))
        assert_losses(train(accelerator, model, optimizer), wanted)


@in_processes(2)
def test_the_groups_of_the_trainer_pass(folder: Path) -> None:
    """The guard of groups by shape accepts the groups of transformers' `Trainer`, with LoRA too.

    A Llama has no trained vector without decay except its norms, so with LoRA one group of the Trainer is empty.
    """
    with running("zero3") as accelerator:
        for adapts in (False, True):
            torch.manual_seed(0)
            with accelerator.init_model():
                sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
                net: Any = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
            if adapts:
                peft = pytest.importorskip("peft")
                net = peft.get_peft_model(net, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
            trainer = Trainer(net, TrainingArguments(str(folder), weight_decay=0.1, use_cpu=True, report_to="none"))
            optimizer = trainer.create_optimizer()
            empty = [group for group in optimizer.param_groups if not group["params"]]
            assert bool(empty) is adapts
            refuse_groups_by_empty_shape(optimizer, net)
