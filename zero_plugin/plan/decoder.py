"""Closed formulas for the sizes and activations of a decoder-only language model, and for its training operations."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from zero_plugin.config.resolve.facts import Precision
from zero_plugin.errors import ConfigError, Problem
from zero_plugin.plan.situation import Activations, Affine, ModelSizes, ParameterSize, highest

_VOCABULARY: Final = 32_000  # Llama's and Llama 2's
_HEAD_SIZE: Final = 128  # Llama's at every size
_HIDDEN_SIZE_PER_LAYER: Final = 128  # Llama 7B: 4096 / 32; 13B: 5120 / 40
_MARGIN: Final = 0.2  # see `Activations.margin`
_INDEX_BYTES: Final = 8  # token ids and labels are int64


def decoder_sizes(
    *,
    parameters: int | None = None,
    hidden_size: int | None = None,
    layers: int | None = None,
    vocabulary: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    intermediate: int | None = None,
    head_size: int | None = None,
    tied: bool | None = None,
) -> ModelSizes:
    """Return the parameter sizes of a decoder-only model built like Llama (arXiv:2302.13971).

    It has RMSNorm, grouped-query attention, a gated MLP and no biases. Each layer has `h·(2q + 2·kv + 3m) + 2h`
    parameters, where `h` is the hidden size, `q` the total size of the queries (`h` in most models), `kv` the total
    size of the keys, and `m` the intermediate size. The embedding has `V·h` parameters. The output projection has as
    many, unless the two are tied.

    Args:
        parameters: total number of parameters; the intermediate size is computed from it. If None, the intermediate
            size is 8/3 of the hidden size.
        hidden_size, layers: if only one is given, the other is computed as hidden_size = 128 * layers; if neither is,
            both are computed from `parameters`.
        vocabulary: default: 32,000.
        heads: default: hidden_size / 128.
        kv_heads: default: `heads`.
        intermediate: the intermediate size of the MLP; if None, see `parameters`.
        head_size: the size of one query or key; default: hidden_size / heads.
        tied: whether the embedding and the output projection share one tensor. If None and `intermediate` is given, the
            choice is what is closer to `parameters`. If both are None, they are tied only if `parameters` is too small
            for two matrices.

    Raises:
        ConfigError: the size of the model is not given, or the numbers contradict each other.
    """
    if not (parameters or hidden_size or layers):
        raise _error("the model's size is not given", "Give --params, or --hidden_size and --layers.")
    hidden = hidden_size or (_HIDDEN_SIZE_PER_LAYER * layers if layers else _usual_hidden_size(parameters or 0))
    depth = layers or max(1, round(hidden / _HIDDEN_SIZE_PER_LAYER))
    words = vocabulary or _VOCABULARY
    _, query_width, kv_width = _attention_widths(hidden, heads, kv_heads, head_size)
    attention = 2 * hidden * (query_width + kv_width)

    def solved(outputs: int) -> int:
        """Return the intermediate size that the parameters leave, given the number of vocabulary matrices."""
        blocks = (parameters or 0) - outputs * words * hidden - hidden
        return (blocks // depth - attention - 2 * hidden) // (3 * hidden)

    is_tied, width = bool(tied), intermediate or 0
    if not width and parameters:
        width = solved(1 if is_tied else 2)
        if tied is None and width < hidden:
            is_tied, width = True, solved(1)
        if width < 1:
            raise _error(
                f"{parameters:,} parameters are too few for {depth} layers of size {hidden:,} and {words:,} tokens",
                "Give the model's own --hidden_size, --layers and --vocabulary.",
            )
    elif tied is None and parameters:
        is_tied = abs(width - solved(1)) < abs(width - solved(2))
    width = width or 256 * -(-8 * hidden // 768)  # 2/3 of 4h, rounded up to a multiple of 256, is Llama's own rule
    matrices = (
        ParameterSize(words * hidden, 1 if is_tied else 2),
        ParameterSize(hidden * query_width, 2 * depth),
        ParameterSize(hidden * kv_width, 2 * depth),
        ParameterSize(hidden * width, 3 * depth),
        ParameterSize(hidden, 2 * depth + 1),
    )
    given = {"params": parameters, "hidden_size": hidden_size, "layers": layers, "vocabulary": vocabulary}
    given |= {"heads": heads, "kv_heads": kv_heads, "intermediate": intermediate}
    sizes = ModelSizes(
        name=f"decoder of {hidden:,} × {depth}",
        parameters=matrices,
        largest_module=max(words, width) * hidden,
        hidden_size=hidden,
        layers=depth,
        vocabulary=words,
        heads=heads,
        source=" ".join(f"--{name} {value:,}" for name, value in given.items() if value),
    )
    if parameters and abs(sizes.elements - parameters) > 0.05 * parameters:
        raise _error(
            f"these sizes make {sizes.elements:,} parameters, not {parameters:,}",
            "Leave out --params, or correct the other sizes.",
        )
    return sizes


def decoder_activations(
    model: ModelSizes,
    sequence_length: int,
    precision: Precision = "bf16",
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    intermediate: int | None = None,
    head_size: int | None = None,
) -> Activations:
    """Return what a forward of this decoder keeps, tensor by tensor, with attention as a fused kernel.

    Counted per token and layer, with `e` bytes per element of the computation's dtype, as in Korthikanti et al. 2022
    (arXiv:2205.05198, section 4.1), for the operations of transformers' Llama:

    * each of two norms: its input in fp32 `4h`, the normalised input `e·h`, its output (the projections' input) `e·h`;
    * attention: queries and output `2·e·q`, keys and values `2·e·kv`, the soft-maxes' logarithms `4·heads` (Dao 2023,
      arXiv:2307.08691: what FlashAttention-2 keeps);
    * the gated MLP: both projections, the gate's activation, and their product: `4·e·m`.

    Counted once: the last norm, the logits in fp32 `4·V` and their log-softmax `4·V`, ids and labels. Under autocast
    the norms work in fp32, and each projection casts its input separately. Keys and values stay in the cache in fp32,
    and 16-bit copies of all matrices are kept until the backward. Three moments determine the working space: the loss's
    backward (`8·V`), the last norm's, and the last MLP's with its largest weight gradient.

    Args:
        model: with its hidden size, layers and vocabulary.
        sequence_length: tokens of one sample.
        precision: of the computation.
        heads, kv_heads, intermediate: as for `decoder_sizes`. The defaults are equal heads of size 128, and the
            intermediate size that the number of parameters leaves.
        head_size: as for `decoder_sizes`.

    Raises:
        ConfigError: the model's hidden size or layers are unknown.
    """
    if not (model.hidden_size and model.layers):
        raise _error(f"the hidden size and layers of {model.name} are unknown", "Give --hidden_size and --layers.")
    hidden, depth, words = model.hidden_size, model.layers, model.vocabulary or 0
    item = 4 if precision == "no" else 2
    query_heads, query_width, kv_width = _attention_widths(hidden, heads, kv_heads, head_size)
    embeddings = sum(p.elements * p.count for p in model.parameters if words and p.elements == words * hidden)
    blocks = max(0, model.elements - embeddings)
    width = intermediate or max(0, blocks // (depth * hidden) - 2 * (query_width + kv_width)) // 3
    inner = item * (2 * query_width + 2 * kv_width + 4 * width) + 4 * query_heads
    # 4·T·q per token and layer; the causal mask leaves half
    attention_flops = 2.0 * depth * query_width * sequence_length**2

    def regime(*, stream: int, norm: int, last_norm: int, wide: bool, autocast: bool) -> Activations:
        """Return the activations, from the bytes per token of the residual stream and of the norms."""
        ends = last_norm + 8 * words + 2 * _INDEX_BYTES
        cached = 8 * kv_width if autocast else 0
        copied, copied_output = (item * blocks, item * words * hidden) if autocast else (0, 0)
        gradient = (item + 4 * autocast) * hidden * width
        after_loss = -4 * words - last_norm
        in_mlp = stream + item * width
        again = norm + inner - (stream if wide else 0)  # a stream in fp32 is the same tensor as the first norm's input

        def per_batch(fixed: int, per_token: int) -> Affine:
            return Affine(fixed, per_token * sequence_length)

        in_loss, in_last_norm = per_batch(0, 8 * words), per_batch(0, 16 * hidden - 4 * words)
        in_block = per_batch(gradient, after_loss + in_mlp)
        recomputing = per_batch(gradient + copied // depth, after_loss + in_mlp + again)
        return Activations(
            saved=per_batch(copied + copied_output, depth * (norm + inner + cached) + ends),
            transient=highest([in_loss, in_last_norm, in_block]),
            late=highest([in_last_norm, in_block]),
            checkpointed=per_batch(copied_output, depth * stream + ends),
            checkpointed_transient=highest([in_loss, in_last_norm, recomputing]),
            checkpointed_late=highest([in_last_norm, recomputing]),
            # the forward's end: all copies, plus logits in 16 bits or the tensors inside the last MLP
            checkpointed_forward=per_batch(copied, max(2 * words, 4 * item * width - 8 * words)) if autocast else None,
            flops_per_sample=2.0 * (blocks + words * hidden) * sequence_length + attention_flops,
            sample_length=sequence_length,
            source=f"closed formula of a decoder{' under autocast' if autocast else ''}",
            margin=_MARGIN,
        )

    one = (4 + 2 * item) * hidden
    found = regime(stream=item * hidden, norm=2 * one, last_norm=one, wide=item == 4, autocast=False)
    if precision == "no":
        return found
    # In fp32: input and normalised input. In 16 bits: the inputs of three projections and of two, or of the output
    # projection.
    norm, last_norm = (16 + 5 * item) * hidden, (8 + item) * hidden
    autocast = regime(stream=4 * hidden, norm=norm, last_norm=last_norm, wide=True, autocast=True)
    return replace(found, autocast=autocast)


def training_flops_per_token(model: ModelSizes, sequence_length: int = 0, attention_width: int | None = None) -> float:
    """Return the floating-point operations of forward and backward for one token: `6N + 12·L·H·Q·T`.

    This is the count of PaLM's Model FLOPs Utilization (Chowdhery et al. 2022, arXiv:2204.02311, appendix B). The model
    has N parameters, L layers and H heads of size Q; a sequence has T tokens. Operations that activation checkpointing
    repeats do not count, and a causal mask halves nothing. Frozen parameters have no gradients of their own, which are
    2 of the 6.

    Args:
        model: with its parameters and, for the second term, layers and hidden size.
        sequence_length: T; 0 leaves attention out.
        attention_width: H·Q, if it differs from the hidden size.
    """
    width = attention_width or model.hidden_size or 0
    return 4.0 * model.elements + 2.0 * model.trainable + 12.0 * (model.layers or 0) * width * sequence_length


def _attention_widths(
    hidden: int, heads: int | None, kv_heads: int | None, head_size: int | None
) -> tuple[int, int, int]:
    """Return the number of heads, and the total size of all query heads and of all key heads.

    Raises:
        ConfigError: the given heads are impossible in any model.
    """
    if heads and not head_size and hidden % heads:
        raise _error(
            f"a hidden size of {hidden:,} does not divide among {heads} heads", "Give the model's own --heads."
        )
    heads = heads or max(1, hidden // _HEAD_SIZE)
    if kv_heads and heads % kv_heads:
        raise _error(f"{heads} heads do not divide among {kv_heads} key heads", "Give the model's own --kv_heads.")
    width = heads * head_size if head_size else hidden
    return heads, width, width * (kv_heads or heads) // heads


def _usual_hidden_size(parameters: int) -> int:
    """Return a hidden size h, a multiple of the head size, for `parameters`: 12·h² in each of h/128 layers."""
    hidden: float = (parameters * _HIDDEN_SIZE_PER_LAYER / 12) ** (1 / 3)
    return max(1, round(hidden / _HEAD_SIZE)) * _HEAD_SIZE


def _error(message: str, fix: str) -> ConfigError:
    return ConfigError([Problem("plan", "", message, fix)])
