"""A dispatched model computes the plain model's values, wherever its parts are."""

from __future__ import annotations

import copy
import logging
import pickle
from collections import UserDict

import pytest
import torch
from torch import Tensor, nn

from zero_plugin import cpu_offload, disk_offload, dispatch_model, init_empty_weights
from zero_plugin.hooks import AlignDevicesHook, ModelHook, add_hook_to_module, remove_hook_from_submodules
from zero_plugin.utils import find_tied_parameters, get_state_dict_offloaded_model, has_offloaded_params

MAPS = {
    "disk": {"": "disk"},
    "disk, and a block on the CPU": {"": "disk", "blocks.0": "cpu"},
    "a block on disk": {"embedding": "cpu", "head": "cpu", "blocks.0": "disk", "blocks.1": "cpu"},
    "tied weights apart": {"embedding": "cpu", "blocks": "cpu", "head": "disk"},
    "single tensors": {"": "cpu", "blocks.1.scale": "disk", "blocks.0.inner.weight": "disk"},
}


@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("places", MAPS.values(), ids=MAPS)
def test_values_are_the_plain_models(make, tokens, tmp_path, places, offload_buffers) -> None:
    """Forwards are bitwise equal. Between them the disk parts use no memory. The device map is available."""
    expected = make()(tokens, temperature=2.0)["logits"]
    model = dispatch_model(make(), places, offload_dir=tmp_path, offload_buffers=offload_buffers)
    for _ in range(2):
        assert torch.equal(model(tokens, temperature=2.0)["logits"], expected)
        on_disk = [name for name, p in model.named_parameters(remove_duplicate=False) if p.is_meta]
        assert on_disk
        assert all(
            "disk" in (places.get(name), *(places.get(name.rsplit(".", n)[0]) for n in (1, 2)), places.get(""))
            for name in on_disk
        )
    assert model.hf_device_map == places
    assert model.blocks[0].norm.running_mean.is_meta == (
        offload_buffers and places.get("blocks.0", places.get("")) == "disk"
    )
    assert not model.blocks[0].shift.is_meta


def test_all_on_one_device(make, tokens) -> None:
    """A model on one device is the plain model, without hooks unless requested."""
    expected = make()(tokens)["logits"]
    model = dispatch_model(make(), {"": "cpu"})
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())
    model = dispatch_model(make(), {"": "cpu"}, force_hooks=True)
    assert isinstance(model._hf_hook, AlignDevicesHook)
    assert torch.equal(model(tokens)["logits"], expected)
    assert model.embedding.weight is model.head.weight
    model.to("cpu")


def test_tied_weights_are_one(make, tokens, tmp_path) -> None:
    """Tied weights stay one: on disk, on the meta device, used together, and after the hooks are removed."""
    expected = make()(tokens)["logits"]
    model = dispatch_model(make(), {"": "disk"}, offload_dir=tmp_path)
    assert (tmp_path / "embedding.weight.dat").exists() != (tmp_path / "head.weight.dat").exists()
    assert find_tied_parameters(model) == [["embedding.weight", "head.weight"]]
    seen = []
    whole = make()
    whole.register_forward_hook(lambda *_: None)
    whole.blocks[0].inner.register_forward_hook(lambda *_: seen.append(whole.embedding.weight is whole.head.weight))
    dispatch_model(whole, {"": "disk"}, offload_dir=tmp_path / "whole", preload_module_classes=["Model"])
    assert torch.equal(whole(tokens)["logits"], expected)
    assert seen == [True]
    remove_hook_from_submodules(model)
    assert model.embedding.weight is model.head.weight
    assert torch.equal(model(tokens)["logits"], expected)


def test_weights_leave_when_a_forward_raises(make, tokens, tmp_path) -> None:
    """Weights leave when a forward raises, and the next one works."""
    model = dispatch_model(make(), {"": "disk"}, offload_dir=tmp_path)
    with pytest.raises(IndexError):
        model(tokens + 100)
    assert all(p.is_meta for p in model.parameters())
    assert torch.equal(model(tokens)["logits"], make()(tokens)["logits"])


def test_no_gradients_for_what_comes_in(make, tokens, tmp_path) -> None:
    """Loaded weights get no gradients, so no graph keeps them in memory. Permanent parameters get theirs."""
    model = dispatch_model(make(), {"": "disk", "blocks.1": "cpu"}, offload_dir=tmp_path)
    model(tokens)["logits"].sum().backward()
    assert model.blocks[1].inner.weight.grad is not None
    assert model.head.weight.requires_grad
    assert model.head.weight.grad is None


def test_modules_that_read_weights_inside(tmp_path) -> None:
    """torch's attention and encoder layers are recognised. Other modules that read weights inside are named."""

    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.dense.weight

    def build() -> nn.Module:
        torch.manual_seed(0)
        encoder = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0)
        return nn.Sequential(encoder, nn.LSTM(4, 4), nn.Identity()).eval()

    x = torch.randn(2, 3, 4)
    with torch.no_grad():
        expected = build()(x)[0]
        model = dispatch_model(build(), {"": "disk"}, offload_dir=tmp_path / "a")
        assert all(p.is_meta for p in model.parameters())
        assert torch.equal(model(x)[0], expected)
    torch.manual_seed(0)
    direct = Direct()
    expected = direct(x)
    dispatch_model(direct, {"": "disk"}, offload_dir=tmp_path / "b", preload_module_classes=["Direct"])
    assert torch.equal(direct(x), expected)


def test_cpu_offload(make, tokens) -> None:
    """Weights have one copy in CPU memory, and are on the meta device between forwards."""
    expected = make()(tokens)["logits"]
    plain = make()
    address = plain.embedding.weight.data_ptr()
    model = cpu_offload(plain, execution_device="cpu")
    assert all(p.is_meta for p in model.parameters())
    assert has_offloaded_params(model.blocks[0].inner)
    assert torch.equal(model(tokens)["logits"], expected)
    assert get_state_dict_offloaded_model(model)["head.weight"].data_ptr() == address
    remove_hook_from_submodules(model)
    assert model.embedding.weight is model.head.weight
    assert model.head.weight.data_ptr() == address
    assert model.head.weight.requires_grad


def test_disk_offload(make, tokens, tmp_path) -> None:
    """Weights are in the folder, and a model without values finds them there."""
    expected = make()(tokens)["logits"]
    model = disk_offload(make(), tmp_path, offload_buffers=True)
    assert model.blocks[0].norm.running_mean.is_meta
    assert torch.equal(model(tokens)["logits"], expected)
    with init_empty_weights():
        empty = make()
    empty.blocks[0].norm, empty.blocks[1].norm = (make().blocks[i].norm for i in (0, 1))
    disk_offload(empty, tmp_path, execution_device="cpu")
    assert all(p.is_meta for p in empty.parameters())
    assert torch.equal(empty(tokens)["logits"], expected)


def test_the_state_dict_of_a_dispatched_model(make, tmp_path) -> None:
    """The state dict has all values, those on disk memory-mapped."""
    model = dispatch_model(make(), {"": "disk", "blocks.0": "cpu"}, offload_dir=tmp_path)
    state = get_state_dict_offloaded_model(model)
    expected = make().state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_copies(make, tokens, tmp_path) -> None:
    """A deep copy, or one by pickle, streams its own weights."""
    model = dispatch_model(make(), {"": "disk"}, offload_dir=tmp_path)
    expected = model(tokens)["logits"]
    other = copy.deepcopy(model)
    assert torch.equal(other(tokens)["logits"], expected)
    assert all(p.is_meta for p in other.parameters())
    other.blocks[0].scale = nn.Parameter(torch.zeros(6))
    assert not torch.equal(other(tokens)["logits"], expected)
    assert torch.equal(model(tokens)["logits"], expected)


def test_a_users_hook_stays(make, tokens, tmp_path) -> None:
    """A user's hook stays, before the hook that loads the weights."""

    class Louder(ModelHook):
        def post_forward(self, module: nn.Module, output: Tensor) -> Tensor:
            return output * 2

    model = make()
    add_hook_to_module(model.blocks[1], Louder())
    expected = model(tokens)["logits"]
    dispatch_model(model, {"": "disk"}, offload_dir=tmp_path)
    assert torch.equal(model(tokens)["logits"], expected)


def test_it_is_not_moved(make, tmp_path, caplog) -> None:
    """Moving a model with parts without values is refused. With all values a warning says what is wrong."""
    model = dispatch_model(make(), {"": "disk"}, offload_dir=tmp_path)
    for move in (lambda: model.to("cpu"), model.cuda):
        with pytest.raises(RuntimeError, match="You can't move a model that has some modules offloaded"):
            move()
    model = dispatch_model(make(), {"": "cpu"}, force_hooks=True)
    with caplog.at_level(logging.WARNING):
        model.to(torch.float64)
    assert "You shouldn't move a model that is dispatched" in caplog.text
    assert model.head.weight.dtype == torch.float64


def test_the_meta_device_as_a_gpu(make, tokens) -> None:
    """Inputs go to the main device, where CPU parts are loaded, and the output returns to the input's device."""
    model = dispatch_model(make().requires_grad_(False), {"": "meta", "blocks": "cpu"})
    assert model.blocks[0].inner.weight.is_meta
    assert has_offloaded_params(model.blocks[0].inner)
    with pytest.raises(NotImplementedError, match="meta"):  # the values of a meta tensor, to the CPU
        model(tokens)
    assert model(tokens.to("meta"))["logits"].shape == (5, 11)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"embedding": "cpu", "blocks": "cpu"}, "does not give any device for .*: head.weight, head.bias"),
        ({"": "cpu", "head": 7}, r"device_map sends 'head' to 7, but this machine has no GPU 7: "),
        ({"": "gpu"}, "device_map sends 'the model' to 'gpu', but this machine has no device 'gpu'"),
        ({"": "disk"}, "device_map has embedding.weight on disk; pass an offload_dir to write it to"),
    ],
)
def test_maps_that_cannot_be(make, places, message) -> None:
    """The message for an impossible map names its entry, or the tensor."""
    with pytest.raises(ValueError, match=message):
        dispatch_model(make(), places)


def test_tensors_without_values(make, tmp_path) -> None:
    """Tensors without values are named."""
    with init_empty_weights():
        empty = make()
    with pytest.raises(ValueError, match=r"embedding.weight, blocks.*are on the meta device and have no values"):
        dispatch_model(empty, {"": "cpu"})
    with pytest.raises(ValueError, match=r"embedding.weight is on the meta device, and neither offload_dir nor"):
        dispatch_model(empty, {"": "disk"}, offload_dir=tmp_path)
    with init_empty_weights(include_buffers=True):
        hollow = make()
    with pytest.raises(ValueError, match=r"shift of Block: .* build the model with include_buffers=False"):
        dispatch_model(hollow, {"": "disk"}, offload_index={name: {} for name in make().state_dict()})
    with pytest.raises(ValueError, match=r"weight of Embedding: a tensor on the meta device has no values"):
        dispatch_model(empty, {"": "cpu"}, force_hooks=True)


def test_another_main_device(make, tokens) -> None:
    """A model on the CPU alone runs on its main device."""
    model = dispatch_model(make(), {"": "cpu"}, main_device="meta")
    assert all(has_offloaded_params(block.inner) for block in model.blocks)
    assert model(tokens.to("meta"))["logits"].is_meta


def test_compiled(tmp_path) -> None:
    """Weights are loaded and released outside the compiled part."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).eval(), torch.randn(2, 4)
    expected = model(x)
    compiled = torch.compile(dispatch_model(model, {"": "disk"}, offload_dir=tmp_path), backend="eager")
    for _ in range(3):
        assert torch.equal(compiled(x), expected)
        assert all(p.is_meta for p in model.parameters())


def test_pickled(make, tokens, tmp_path) -> None:
    """A hooked module survives pickle, bound to itself."""
    layer = nn.Linear(2, 2)
    add_hook_to_module(layer, ModelHook())
    again = pickle.loads(pickle.dumps(layer))
    assert again.forward.args[0] is again


class Stored(nn.Parameter):
    """A tensor that records its storage place, which makes it a larger object."""

    __slots__ = ("end", "file", "start")


class Read(UserDict):
    """A state dict that makes a new tensor on each access, often at the address of a freed one."""

    def __getitem__(self, name: str) -> Tensor:
        return super().__getitem__(name).clone().as_subclass(Stored)


def test_values_that_are_read_when_asked_for(make) -> None:
    """Each name has its own values, even if a new tensor has a freed tensor's address."""
    shapes = {name: p.shape for name, p in make().named_parameters()}
    places = {"": "cpu"} | dict.fromkeys(shapes, "meta")
    model = dispatch_model(make(), places, main_device="cpu", state_dict=Read(make().state_dict()))
    for name, shape in shapes.items():
        owner, _, key = name.rpartition(".")
        assert model.get_submodule(owner)._hf_hook.weights_map[key].shape == shape, name


def test_a_tied_weight_is_copied_once(make, monkeypatch) -> None:
    """A tied weight is copied once, not once per name."""
    model, move, copied = make(), Tensor.to, []
    monkeypatch.setattr(Tensor, "to", lambda self, *to, **how: (copied.append(self), move(self, *to, **how))[1])
    places = {"": "cpu", "embedding.weight": "meta", "head.weight": "meta"}
    weight = model.head.weight
    dispatch_model(model, places, main_device="cpu")
    assert sum(each is weight for each in copied) == 1
