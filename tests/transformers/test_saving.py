"""Saved transformers and PEFT models load with their own `from_pretrained`, from every path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import zero
from on_paths import in_processes, on_paths, on_rows, row
from paths import raised, running, same
from peft import (
    LoraConfig,
    PeftModel,
    PromptTuningConfig,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from safetensors.torch import load_file, save_file
from small import VOCABULARY, bert, build, gpt2, mixtral, sgd, stored, t5, train
from torch import Tensor
from transformers import GPT2LMHeadModel

from zero_plugin.distributed import collectives
from zero_plugin.errors import LoopError, StrategyError

MODELS = {"gpt2": gpt2, "bert": bert, "t5": t5, "mixtral": mixtral}
FOLDERS = (  # path, model, whether it runs daily
    *(("zero3", name, name in ("gpt2", "mixtral")) for name in MODELS),
    ("zero2", "gpt2", False),
    ("ddp", "t5", True),
)
LORA = LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)


def _trained(accelerator: Any, model: Any) -> tuple[Any, dict[str, Tensor] | None]:
    model, optimizer = accelerator.prepare(model, sgd(model))
    train(accelerator, model, optimizer)
    return model, accelerator.get_state_dict(model)


def _save_both(accelerator: Any, model: Any, state: dict[str, Tensor] | None, folder: Path) -> None:
    """Save by `save_model`, and by PEFT's own function like Accelerate's users."""
    accelerator.save_model(model, folder / "saved")
    accelerator.unwrap_model(model).save_pretrained(
        folder / "called", is_main_process=accelerator.is_main_process, state_dict=state
    )


def _assert_adapters(place: Path, folder: Path, state: dict[str, Tensor]) -> None:
    for written in ("saved", "called"):
        loaded = PeftModel.from_pretrained(GPT2LMHeadModel.from_pretrained(place), folder / written)
        assert same({name: loaded.state_dict()[name] for name in state}, state)


@on_rows(("name",), [row(path, 2, name, daily=daily) for path, name, daily in FOLDERS])
def test_folders(path: str, name: str, folder: Path) -> None:
    """`save_model`, and `save_pretrained` as Accelerate's users call it, write a complete folder at any stage.

    Tied weights are stored once. Models whose files use other names (stacked experts) load too.
    """
    make = MODELS[name]
    with running(path) as accelerator:
        model, state = _trained(accelerator, build(make))
        given = state and dict(state)  # save_pretrained() removes tied weights from it
        accelerator.save_model(model, folder / "saved")
        accelerator.save_model(model, folder / "halved", dtype="bf16")
        accelerator.unwrap_model(model).save_pretrained(
            folder / "called",
            is_main_process=accelerator.is_main_process,
            save_function=accelerator.save,
            state_dict=given,
        )
    if state is None:
        return
    for written in ("saved", "called"):
        loaded, report = type(build(make)).from_pretrained(folder / written, output_loading_info=True)
        assert not any(report.values()), report
        assert same(loaded.state_dict(), state), written
        if make is not mixtral:  # whose file has each expert separately
            kept = {tensor.data_ptr() for tensor in loaded.state_dict().values()}
            assert len(load_file(folder / written / "model.safetensors")) == len(kept)
    loaded = type(build(make)).from_pretrained(folder / "halved", dtype="auto")
    assert loaded.config.dtype == torch.bfloat16
    assert same(loaded.state_dict(), {name: tensor.bfloat16() for name, tensor in state.items()})


@in_processes(2)
def test_save_pretrained_alone(folder: Path) -> None:
    """Without weights, save_pretrained raises on the main process and writes nothing on the others.

    Inside `whole_weights` it writes them, like a script whose weights are an average (EMA) for a while.
    """
    with running("zero3") as accelerator:
        model, state = _trained(accelerator, build(gpt2))
        module = accelerator.unwrap_model(model)
        if accelerator.is_main_process:
            raised(LoopError, "accelerator.save_model", by=lambda: module.save_pretrained(folder / "empty"))
        else:
            module.save_pretrained(folder / "empty")  # as it would without is_main_process
        assert not (folder / "empty").exists()
        module.save_pretrained(folder / "whole", state_dict=state)  # on every process, without is_main_process
        with accelerator.whole_weights(model):
            if accelerator.is_main_process:
                module.save_pretrained(folder / "inside")
    if state is not None:
        assert same(
            load_file(folder / "inside" / "model.safetensors"), load_file(folder / "whole" / "model.safetensors")
        )
    saved = load_file(folder / "whole" / "model.safetensors")
    assert saved["transformer.wte.weight"].shape == (VOCABULARY, 32)


@on_paths("ddp", "zero2", "zero3", daily=("ddp", "zero3"))
def test_adapters(path: str, folder: Path) -> None:
    """Only the adapters are gathered and written, in PEFT's layout. PeftModel.from_pretrained reads them."""
    place = stored(gpt2, folder / "gpt2")
    with running(path) as accelerator:
        model, state = _trained(accelerator, get_peft_model(GPT2LMHeadModel.from_pretrained(place), LORA))
        _save_both(accelerator, model, state, folder)
    if state is None:
        return
    assert len(state) == 4  # two layers, A and B
    for written in ("saved", "called"):
        files = {file.name for file in (folder / written).iterdir()}
        assert {"adapter_config.json", "adapter_model.safetensors"} <= files
        assert not any(name.startswith("model") for name in files)
    _assert_adapters(place, folder, state)


@in_processes(2)
def test_the_base_of_adapters_stays_partitioned(folder: Path) -> None:
    """At stage 3 `get_state_dict` and `save_model` gather only adapters, so the base may be larger than memory."""
    gathered: list[str] = []
    elements: list[int] = []
    gather = zero.GatheredParameters.__init__

    def record(self: Any, params: Any, *args: Any, **kwargs: Any) -> None:
        listed = [params] if isinstance(params, Tensor) else list(params)
        gathered.extend(names[id(p)] for p in listed)
        gather(self, listed, *args, **kwargs)

    with running("zero3") as accelerator, pytest.MonkeyPatch.context() as patch:
        model = get_peft_model(build(gpt2), LORA)
        names = {id(p): name for name, p in model.named_parameters()}
        prepared, optimizer = accelerator.prepare(model, sgd(model))
        train(accelerator, prepared, optimizer)
        patch.setattr(zero.GatheredParameters, "__init__", record)
        gather_all = collectives.gather
        patch.setattr(collectives, "gather", lambda tree: elements.append(tree.numel()) or gather_all(tree))
        accelerator.get_state_dict(prepared)
        assert sorted(gathered) == sorted(name for name in names.values() if "lora_" in name)
        gathered.clear()
        accelerator.save_model(prepared, folder)
        assert gathered == []
        assert len(elements) == 4  # two layers, A and B


@on_paths("ddp", "zero2", "zero3", daily=("ddp", "zero3"))
def test_modules_saved_beside_adapters(path: str, folder: Path) -> None:
    """PEFT's `modules_to_save`, e.g. an embedding, are saved with the adapters.

    `save_model` writes them, and so does `save_pretrained` as Accelerate's users call it.
    """
    config = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, modules_to_save=["wte"])
    place = stored(gpt2, folder / "gpt2")
    with running(path) as accelerator:
        model, state = _trained(accelerator, get_peft_model(GPT2LMHeadModel.from_pretrained(place), config))
        _save_both(accelerator, model, state, folder)
    if state is not None:
        assert any(name.endswith("wte.modules_to_save.default.weight") for name in state)
        _assert_adapters(place, folder, state)


@in_processes(2)
def test_added_adapter(folder: Path) -> None:
    """An adapter that transformers added is saved as an adapter, in PEFT's layout too."""
    place = stored(gpt2, folder / "gpt2")
    with running("zero3") as accelerator:
        model = GPT2LMHeadModel.from_pretrained(place)
        model.add_adapter(LORA)
        model, state = _trained(accelerator, model)
        accelerator.save_model(model, folder / "saved")
    if state is not None:
        saved = load_file(folder / "saved" / "adapter_model.safetensors")
        assert not (folder / "saved" / "model.safetensors").exists()
        assert len(saved) == 4
        assert all("lora" in name for name in saved)


@on_paths("ddp", "zero2", "zero3", daily="zero3")
def test_adapters_in_hooks(path: str, folder: Path) -> None:
    """Hooks as in diffusers' LoRA scripts store only the adapters, and load them with PEFT's own function."""

    def save(models: list[Any], states: list[dict[str, Tensor]], output: str) -> None:
        if states[0]:
            save_file(get_peft_model_state_dict(models[0]), f"{output}/lora.safetensors")
            states.pop()

    def load(models: list[Any], source: str) -> None:
        found = set_peft_model_state_dict(models.pop(), load_file(f"{source}/lora.safetensors"))
        assert not found.unexpected_keys

    with running(path) as accelerator:
        model, saved = _trained(accelerator, get_peft_model(build(gpt2), LORA))
        accelerator.register_save_state_pre_hook(save)
        accelerator.register_load_state_pre_hook(load)
        accelerator.save_state(folder / "state")
        after = accelerator.unwrap_model(model)
        with accelerator.whole_weights(model), torch.no_grad():
            for p in after.parameters():
                if p.requires_grad:
                    p.zero_()
        accelerator.load_state(folder / "state")
        state = accelerator.get_state_dict(model)
    assert saved is None or same(state, saved)


@in_processes(2)
def test_prompts_are_refused(folder: Path) -> None:
    """prepare refuses trained prompts at stage 3, because PEFT bypasses the state dict and would store nothing."""
    model = get_peft_model(build(gpt2), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with running("zero3") as accelerator:
        raised(StrategyError, "PROMPT_TUNING", "stage 2", by=lambda: accelerator.prepare(model, sgd(model)))
