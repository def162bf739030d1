"""Traced activations are those that a real run keeps for its backward."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from zero_plugin.errors import ConfigError
from zero_plugin.long_context import chunk_layer, chunk_loss
from zero_plugin.plan import live_bytes
from zero_plugin.plan.activations import trace_activations, trace_changes
from zero_plugin.plan.blocks import repeated_blocks
from zero_plugin.plan.live_bytes import LiveBytes
from zero_plugin.plan.situation import Activations
from zero_plugin.tensors.nested import list_leaves, map_leaves, to_fp32

BATCH, TOKENS = 4, 96


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
        )

    def forward(self, image: Tensor) -> Tensor:
        return F.relu(image + self.body(image))


class Classifier(nn.Module):
    """A model that returns its loss, as this package trains it."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.body(inputs)
        return {"loss": F.cross_entropy(logits.float(), labels), "logits": logits}


def _perceptron() -> tuple[nn.Module, dict[str, Any]]:
    rows = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)]
    inputs = {"inputs": torch.randn(BATCH, 64), "labels": torch.zeros(BATCH, dtype=torch.int64)}
    return Classifier(nn.Sequential(nn.Sequential(*rows), nn.Linear(64, 10))), inputs


def _convolutions() -> tuple[nn.Module, dict[str, Any]]:
    rows = nn.Sequential(*(Residual(16) for _ in range(3)))
    body = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), rows, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return Classifier(body), {"inputs": torch.randn(BATCH, 3, 32, 32), "labels": torch.zeros(BATCH, dtype=torch.int64)}


def _gpt2() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    return _language(GPT2LMHeadModel, GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=512, **NO_DROPOUT_GPT2))


def _bert() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 256}
    return _language(BertForMaskedLM, BertConfig(vocab_size=512, **sizes, **NO_DROPOUT_BERT))


def _t5() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 64, "d_ff": 256, "d_kv": 16, "num_heads": 4, "num_layers": 2, "vocab_size": 512}
    model, inputs = _language(T5ForConditionalGeneration, T5Config(dropout_rate=0.0, use_cache=False, **sizes))
    for name, parameter in model.named_parameters():  # with its gradient the CPU's fused kernel could not run
        parameter.requires_grad_("relative_attention_bias" not in name)
    return model, {**inputs, "decoder_input_ids": inputs["input_ids"]}


def _llama() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    return _language(LlamaForCausalLM, LlamaConfig(**DECODER))


def _mixture() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import MixtralConfig, MixtralForCausalLM

    return _language(MixtralForCausalLM, MixtralConfig(num_local_experts=4, **DECODER))


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
DECODER = {"hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 160, "vocab_size": 512, **HEADS}
NO_DROPOUT_GPT2 = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
NO_DROPOUT_BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ATTENDING = {"gpt2": _gpt2, "bert": _bert, "t5": _t5, "llama": _llama, "mixture": _mixture}
MODELS = {"perceptron": _perceptron, "convolutions": _convolutions, **ATTENDING}
CAMPAIGN = pytest.mark.campaign
LIKE = ("perceptron", "gpt2", "bert")  # others of these cases contain all their layers


def _language(kind: Callable[[Any], nn.Module], config: Any) -> tuple[nn.Module, dict[str, Any]]:
    tokens = torch.randint(3, 500, (BATCH, TOKENS))
    return kind(config).train(), {"input_ids": tokens, "labels": tokens}


def _forward(model: nn.Module, inputs: dict[str, Any], regime: str) -> Any:
    """Run the forward as this package does: 16-bit weights and inputs, or autocast; outputs in fp32."""
    if regime == "bf16":
        model.bfloat16()
        inputs = map_leaves(lambda t: t.bfloat16() if t.is_floating_point() else t, inputs)
    with torch.autocast("cpu", torch.bfloat16) if regime == "autocast" else nullcontext():
        outputs = model(**inputs)
    return map_leaves(to_fp32, outputs)


def _checkpoint_blocks(model: nn.Module, given: list[Any]) -> None:
    for block in repeated_blocks(model):

        def run(*args: Any, _forward: Callable[..., Any] = block.forward, **kwargs: Any) -> Any:
            given.append((args, kwargs))
            return checkpoint(_forward, *args, use_reentrant=False, **kwargs)

        block.forward = run


def _saved_bytes(model: nn.Module, inputs: dict[str, Any], regime: str, checkpointed: bool) -> tuple[int, set[str]]:
    """Count the storages of autograd, checkpoints, inputs and outputs without parameters; return the graph too."""
    kept: weakref.WeakSet[Any] = weakref.WeakSet()
    given: list[Any] = []

    class Kept:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor
            kept.add(self)

    if checkpointed:
        _checkpoint_blocks(model, given)
    with saved_tensors_hooks(Kept, lambda holder: holder.tensor):
        outputs = _forward(model, inputs, regime)
    tensors = [holder.tensor for holder in kept] + [
        t for t in list_leaves((given, inputs, outputs)) if isinstance(t, Tensor)
    ]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    for parameter in model.parameters():
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(storages.values()), set(_nodes(outputs["loss"].grad_fn))


def _nodes(root: Any) -> Iterator[str]:
    seen, waiting = {root}, [root]
    while waiting:
        node = waiting.pop()
        yield type(node).__name__
        following = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= following
        waiting += following


@pytest.fixture
def cpu_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace autocast as on a CPU, which leaves some functions in 16 bits that a GPU runs in fp32."""
    monkeypatch.setattr(live_bytes, "_WIDE", frozenset())


@pytest.mark.usefixtures("cpu_autocast")
@pytest.mark.parametrize("name", [pytest.param(name, marks=CAMPAIGN) if name in LIKE else name for name in MODELS])
def test_saved_bytes_are_those_of_a_real_run(name: str) -> None:
    """They are within 5 % of autograd's hooks on a CPU, in each compute mode, with and without checkpointed blocks.

    Attention runs fused there. The models drop nothing: the CPU keeps other masks than a GPU, and has no fused
    attention with dropout.
    """
    model, inputs = MODELS[name]()
    narrow = trace_activations(model, inputs, "bf16")
    for regime, found in {
        "fp32": trace_activations(model, inputs, "no"),
        "bf16": narrow,
        "autocast": narrow.autocast,
    }.items():
        assert found is not None
        assert found.checkpointed is not None
        for checkpointed, line in ((False, found.saved), (True, found.checkpointed)):
            model, inputs = MODELS[name]()
            real, nodes = _saved_bytes(model, inputs, regime, checkpointed)
            assert line.at(BATCH) == pytest.approx(real, rel=0.05), (regime, checkpointed)
            if name in ATTENDING:
                assert found.sample_length == TOKENS
                assert checkpointed or "ScaledDotProductFlashAttentionForCpuBackward0" in nodes


def test_masks_of_older_transformers_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """4.57 finds packed samples in every forward without a mask, and builds a mask of `tokens²` for no padding."""
    from transformers import masking_utils

    def find(position_ids: Tensor) -> Tensor:
        return (torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", find)
    found = trace_activations(*_llama(), "no").saved.at(BATCH)
    real, _ = _saved_bytes(*_llama(), "fp32", False)
    assert found == pytest.approx(real, rel=0.01)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **settings: Any) -> None:
        super().__init__()
        self.body = kind(48, 64, num_layers=2, batch_first=True, **settings)

    def forward(self, rows: Tensor) -> Any:
        last = self.body(rows)[0].float()
        return {"loss": last.square().mean(), "last": last}


# Daily each kind, and each setting, once.
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        pytest.param(kind, settings, marks=[] if kind_number == number else [pytest.mark.campaign])
        for kind_number, kind in enumerate((nn.LSTM, nn.RNN, nn.GRU))
        for number, settings in enumerate(({"bidirectional": True}, {"bias": False}, {}))
    ],
)
def test_recurrent_layers_keep_their_workspace(kind: type[nn.RNNBase], settings: dict[str, Any]) -> None:
    """Within 5 % on a CPU: there an LSTM in fp32 is one kernel with a workspace, and all others are many operations.

    A processor with instructions for bf16 also has one kernel for a bf16 LSTM, which keeps less than is counted.
    """
    for regime, precision in (("fp32", "no"), ("bf16", "bf16")):
        inputs = {"rows": torch.randn(BATCH, 8, 48)}
        found = trace_activations(Recurrent(kind, **settings), inputs, precision)  # type: ignore[arg-type]
        real, nodes = _saved_bytes(Recurrent(kind, **settings), inputs, regime, False)
        if regime == "bf16" and "MkldnnRnnLayerBackward0" in nodes:
            assert real < found.saved.at(BATCH) < 1.5 * real
        else:
            assert found.saved.at(BATCH) == pytest.approx(real, rel=0.05), regime


def test_a_bias_with_a_gradient_is_fused_on_a_gpu_alone() -> None:
    """The first attention of each T5 stack has no fused kernel on a CPU, which keeps its scores, three times in fp32.

    So a run there keeps up to 40 % more than on a GPU, whose kernel takes this bias.
    """
    model, inputs = _t5()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    found = trace_activations(model, inputs, "no").saved.at(BATCH)
    real, nodes = _saved_bytes(model, inputs, "fp32", False)
    scores = 4 * BATCH * 4 * TOKENS**2
    assert "SafeSoftmaxBackward0" in nodes
    assert real - found == pytest.approx(3 * scores, rel=0.05)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", ["convolutions", "llama"])
def test_the_peak_is_that_of_a_real_run(name: str, checkpointed: bool) -> None:
    """Saved bytes plus working space equal the most that is alive on a CPU in both passes, within 3 %."""
    model, inputs = MODELS[name]()
    found = trace_activations(model, inputs, "bf16")
    if checkpointed:
        assert found.checkpointed is not None
        spaces = (found.checkpointed_transient, found.checkpointed_forward)
        traced = found.checkpointed.at(BATCH) + max(space.at(BATCH) for space in spaces if space)
        _checkpoint_blocks(model, [])
    else:
        traced = found.saved.at(BATCH) + found.transient.at(BATCH)
    _, peak, _ = _measure(model, inputs)
    assert traced == pytest.approx(peak, rel=0.03)


class Elsewhere(save_on_cpu):
    """torch's own context, for which a tape sees only the returned tensors, in their own memory as on a GPU.

    Attributes:
        taken: for each tensor that was taken, its storage in CPU memory.
    """

    def __init__(self) -> None:
        super().__init__(pin_memory=True)  # otherwise it copies nothing on a CPU
        self.taken: list[weakref.ref[Any]] = []
        take = self.pack_hook

        def unseen(tensor: Tensor) -> Any:
            with _disable_current_modes():
                packed = take(tensor)
            self.taken.append(weakref.ref(packed[1].untyped_storage()))
            return packed

        self.pack_hook, self.unpack_hook = unseen, lambda packed: packed[1].clone()


class Under(nn.Module):
    """A model whose forward runs under a context."""

    def __init__(self, model: nn.Module, context: AbstractContextManager[Any]) -> None:
        super().__init__()
        self.model, self.context = model, context

    def forward(self, **inputs: Any) -> Any:
        with self.context:
            return self.model(**inputs)


def _measure(model: nn.Module, inputs: dict[str, Any], moving: Elsewhere | None = None) -> tuple[int, int, int]:
    """Measure a step's bytes in bf16: after its forward, at its peak, and in CPU memory after the forward."""
    model.bfloat16()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda own: setattr(own, "grad", None))
    with LiveBytes([*model.parameters(), *model.buffers()]) as tape:
        batch = map_leaves(torch.clone, inputs)
        outputs = _forward(model, batch, "bf16")
        saved, taken = tape.live, [storage() for storage in (moving.taken if moving else ())]
        moved = sum(storage.nbytes() for storage in taken if storage is not None)
        del taken
        outputs["loss"].backward()
    return saved, max(tape.after), moved


def _traced(found: Activations) -> tuple[int, int, int]:
    saved, space, *_ = found.at(BATCH, checkpointing=False)
    return saved, saved + space, found.moved.at(BATCH)


def _saving_llama(*ways: str) -> tuple[Any, dict[str, Any]]:
    model: Any
    model, inputs = _llama()
    if "checkpoints" in ways:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # transformers 5.23 has another name for it
            model.gradient_checkpointing_enable()
    if "MLPs in chunks" in ways:
        for block in model.model.layers:
            chunk_layer(block.mlp, 4)
    if "loss in chunks" in ways:
        chunk_loss(model, 8)
    return model, inputs


class Calling(nn.Module):
    """A model with a custom loop over its blocks that puts `checkpoint` around a block's call."""

    def __init__(self, *, every: int) -> None:
        super().__init__()
        self.first, self.every = nn.Linear(64, 64), every
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Tanh()) for _ in range(12)
        )

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        x = self.first(inputs)
        for index, block in enumerate(self.blocks):
            x = block(x) if index % self.every else checkpoint(block, x, use_reentrant=False)
        return {"loss": x.float().square().mean()}


@pytest.mark.parametrize("every", [1, 2, 3])
def test_blocks_within_checkpoints_are_checkpointed(every: int) -> None:
    """With all blocks, every second or every third, the bytes equal a real run's, at its peak too, within 1 %."""
    inputs = {"inputs": torch.randn(512, 64)}
    found = trace_activations(Calling(every=every), inputs, "bf16")
    saved, space, *_ = found.at(512, checkpointing=False)
    assert (saved, saved + space) == pytest.approx(_measure(Calling(every=every), inputs)[:2], rel=0.01)


# Daily all variants together; each smaller group in the campaign.
WAYS = [
    pytest.param(("MLPs in chunks",), marks=CAMPAIGN),
    pytest.param(("checkpoints", "MLPs in chunks"), marks=CAMPAIGN),
    ("loss in chunks", "checkpoints", "MLPs in chunks"),
]


@pytest.mark.parametrize("ways", WAYS, ids="+".join)
def test_what_a_model_saves_by_itself_is_seen(ways: tuple[str, ...]) -> None:
    """MLPs and losses in chunks, and checkpointed blocks, keep a real run's bytes, at its peak too, within 1 %."""
    found = trace_activations(*_saving_llama(*ways), "bf16")
    assert _traced(found) == pytest.approx(_measure(*_saving_llama(*ways)), rel=0.01)


@pytest.mark.parametrize("ways", [(), *WAYS], ids="+".join)
def test_what_save_on_cpu_takes_is_in_cpu_memory(ways: tuple[str, ...]) -> None:
    """The bytes on the device and in CPU memory equal a real run's within 1 %.

    Each tensor counts as often as it is saved, weights too, and is back on the device when the backward needs it.
    """
    model, inputs = _saving_llama(*ways)
    found = trace_activations(Under(model, save_on_cpu()), inputs, "bf16")
    assert found.checkpointed is None
    moving = Elsewhere()
    measured = _measure(Under(_saving_llama(*ways)[0], moving), inputs, moving)
    assert _traced(found) == pytest.approx(measured, rel=0.01)
    assert found.moved.per_sample > 0
    assert found.autocast is not None
    assert found.autocast.moved.per_sample > 0


def test_changes_of_a_model_are_what_they_save() -> None:
    """Suggested changes keep the bytes of a run with these changes, within 1 %. The model stays unchanged."""
    model, inputs = _llama()
    attributes = [dict(vars(module)) for module in model.modules()]
    found = trace_changes(model, lambda: trace_activations(model, inputs, "bf16"))
    assert attributes == [vars(module) for module in model.modules()]
    chunked, moved = found.values()
    assert [what.split("(")[0] for what in found] == [
        "chunk_layer",
        "activation checkpointing under torch.autograd.graph.save_on_cpu",
    ]
    assert _traced(chunked) == pytest.approx(_measure(*_saving_llama("MLPs in chunks")), rel=0.01)
    moving = Elsewhere()
    measured = _measure(Under(_saving_llama("checkpoints")[0], moving), inputs, moving)
    assert _traced(moved) == pytest.approx(measured, rel=0.01)
    checkpointing, inputs = _saving_llama("checkpoints")
    *_, moved = trace_changes(checkpointing, lambda: trace_activations(checkpointing, inputs, "bf16")).values()
    assert _traced(moved) == pytest.approx(measured, rel=0.01)


def test_changes_that_a_model_does_not_take_are_left_out() -> None:
    """Experts, MLPs in chunks already, and a model without blocks are examples."""
    for model, inputs in (_mixture(), _saving_llama("MLPs in chunks"), _perceptron()):
        found = trace_changes(model, lambda: trace_activations(model, inputs, "no"))  # noqa: B023
        assert [what.split()[0] for what in found] == ["activation"]
    linear = nn.Linear(4, 4)
    assert trace_changes(linear, lambda: trace_activations(linear, torch.zeros(2, 4), "no")) == {}


def test_operations_are_counted() -> None:
    """Matrices, convolutions and attention count two per multiplication and addition.

    Causal attention computes half.
    """

    class Attending(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(self.product(x), x, x, is_causal=True)

        def __init__(self) -> None:
            super().__init__()
            self.product = nn.Linear(8, 8, bias=False)

    found = trace_activations(Attending(), torch.zeros(5, 2, 16, 8), "no")
    assert found.flops_per_sample == 2 * 2 * 16 * 8 * 8 + 2 * 2 * 2 * 16 * 16 * 8 / 2


def test_dropout_keeps_what_a_gpu_keeps() -> None:
    """It keeps one byte per element and nothing of dropped attention, in torch's own modules too."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    still = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    rows = torch.zeros(2, 64, 32)
    dropped, kept = (trace_activations(module, rows, "no").saved.per_sample for module in (layer, still))
    masks, activation = 32 + 64 + 32, 4 * 64  # the activation is kept before and after dropout
    assert dropped - kept == 64 * (masks + activation)

    class Functional(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = self.product(x)
            return F.scaled_dot_product_attention(y, y, y, dropout_p=0.5)

        def __init__(self) -> None:
            super().__init__()
            self.product = nn.Linear(32, 32)

    scores = 4 * 4 * 512 * 512  # bytes, in fp32
    assert trace_activations(Functional(), torch.zeros(2, 4, 512, 32), "no").saved.per_sample < scores / 3


class Attending(nn.Module):
    """Attention whose queries have the memory layout `layout`, followed by joined heads."""

    def __init__(self, layout: str, key_heads: int) -> None:
        super().__init__()
        self.layout, self.key_heads = layout, key_heads
        self.query, self.key, self.out = nn.Linear(32, 32), nn.Linear(32, 8 * key_heads), nn.Linear(32, 32)

    def forward(self, rows: Tensor) -> dict[str, Tensor]:
        query, key = (layer(rows).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.query, self.key))
        if self.layout == "heads first":  # part of each head is rotated, and the parts are joined
            query = torch.cat([query[..., :4], query[..., 4:]], -1)
        attended = F.scaled_dot_product_attention(query, key, key, is_causal=True)
        return {"loss": self.out(attended.transpose(1, 2).flatten(2)).square().sum()}


@pytest.mark.parametrize(("layout", "key_heads"), [("tokens first", 4), ("heads first", 4), ("tokens first", 1)])
def test_attention_is_laid_out_as_its_queries(layout: str, key_heads: int) -> None:
    """So joining its heads costs a copy or none. No fused kernel alone takes fewer heads of keys."""
    inputs = {"rows": torch.randn(BATCH, TOKENS, 32)}
    found = trace_activations(Attending(layout, key_heads), inputs, "no")
    real, nodes = _saved_bytes(Attending(layout, key_heads), inputs, "fp32", False)
    assert found.saved.at(BATCH) == pytest.approx(real, rel=0.005)
    assert ("ScaledDotProductFlashAttentionForCpuBackward0" in nodes) == (key_heads == 4)


def test_a_mask_becomes_a_bias_of_every_call() -> None:
    """Attention under a boolean mask keeps the mask again in the compute dtype, as its kernels take it."""

    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            y = self.product(x)
            return F.scaled_dot_product_attention(y, y, y, attn_mask=mask)

        def __init__(self) -> None:
            super().__init__()
            self.product = nn.Linear(32, 32)

    x = torch.randn(BATCH, 1, 128, 32)
    mask = torch.ones(BATCH, 1, 128, 128, dtype=torch.bool)
    plain, masked = (trace_activations(Masked(), (x, given), "no").saved.per_sample for given in (None, mask))
    assert masked - plain == 128 * 128 * (1 + 4)


def test_autocast_computes_in_fp32_what_a_gpu_does() -> None:
    """`pow` and dependent results keep four bytes per element under autocast, as on CUDA.

    In a bf16 model they keep two.
    """

    class Cube(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return self.product(x).pow(3).sum()

        def __init__(self) -> None:
            super().__init__()
            self.product = nn.Linear(64, 64, bias=False)

    found = trace_activations(Cube(), torch.zeros(2, 64), "bf16")
    assert found.autocast is not None
    assert found.saved.per_sample == 64 * (4 + 2 + 2)  # the batch, in bf16, and the cubed batch
    assert found.autocast.saved.per_sample == 64 * (4 + 2 + 4)
    assert found.autocast.saved.fixed - found.saved.fixed == 0  # the batch needs no gradient, so no weight is kept


@pytest.mark.parametrize("mask", [False, True])
def test_attention_grows_with_tokens_not_their_square(mask: bool) -> None:
    """If no sample is padded, as in training, a transformers model builds no mask of tokens × tokens."""
    model, _ = _llama()
    saved = []
    for tokens in (512, 1024):
        ids = torch.zeros(2, tokens, dtype=torch.int64)
        given = {"attention_mask": torch.ones_like(ids)} if mask else {}
        saved.append(trace_activations(model, {"input_ids": ids, "labels": ids, **given}, "no").saved.per_sample)
    assert saved[1] == pytest.approx(2 * saved[0], rel=1e-3)


def test_gradients_of_parameters_are_left_out() -> None:
    """The working space holds one of the weights' gradients at a time."""
    deep = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(6)))
    found = trace_activations(deep, torch.zeros(2, 256), "no")
    assert 256 * 256 * 4 <= found.transient.at(1) < 1.5 * 256 * 256 * 4


def test_the_model_stays_as_it_is() -> None:
    """Parameters, modes, hooks and forwards of a live model are the same after a trace."""
    model, inputs = _llama()
    model.eval()
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    trace_activations(model, inputs)
    assert not any(module.training for module in model.modules())
    assert hooks == [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    for name, parameter in model.named_parameters():
        assert (id(parameter), parameter.grad) == (before[name][0], None)
        assert torch.equal(parameter, before[name][1])


def test_any_number_of_samples_tells_of_any() -> None:
    """The example's own number of samples does not matter. A function of the number works as well."""
    model, inputs = _llama()
    one = {name: tensor[:1] for name, tensor in inputs.items()}
    found = trace_activations(model, inputs, "no")
    assert trace_activations(model, one, "no") == found

    def make(samples: int) -> dict[str, Tensor]:
        return {name: tensor[:1].expand(samples, -1) for name, tensor in inputs.items()}

    assert trace_activations(model, make, "no") == found


def test_wrong_shapes_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """torch logs an operation's failure with a traceback.

    Here only the error appears, and the logger works afterwards.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(caplog.handler)  # torch's loggers do not propagate
    try:
        with pytest.raises(ConfigError, match="Linear cannot be traced: RuntimeError"):
            trace_activations(nn.Linear(4, 4), torch.zeros(2, 3), "no")
    finally:
        logger.removeHandler(caplog.handler)
    assert not caplog.records
    assert not logger.disabled


def test_what_cannot_be_traced_is_said() -> None:
    """Wrong inputs and a forward that looks at values are errors that name the model and the reason."""
    model, inputs = _perceptron()
    with pytest.raises(ConfigError, match="Classifier cannot be traced: TypeError"):
        trace_activations(model, {"wrong": inputs["inputs"]})

    class Looking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return self.product(x) if x.sum().item() > 0 else x

        def __init__(self) -> None:
            super().__init__()
            self.product = nn.Linear(4, 4)

    with pytest.raises(ConfigError, match="Looking cannot be traced: DataDependentOutputException"):
        trace_activations(Looking(), torch.zeros(2, 4))
