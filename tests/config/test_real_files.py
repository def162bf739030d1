"""Configurations that people publish and run: the verdict on each, with the reason, found by reading the file."""

# ruff: noqa: E501 - a file is a line, so the tables can be read as tables

from __future__ import annotations

import re
from pathlib import Path

import pytest

from zero_plugin.config.check import check_document
from zero_plugin.config.document import ENVIRONMENT_VARIABLE, Document, from_environment, to_environment
from zero_plugin.config.launch_settings import launch_settings
from zero_plugin.config.read import read_document
from zero_plugin.config.resolve.facts import Facts, LoopFacts, MachineFacts, ModelFacts, OptimizerFacts, SchedulerFacts
from zero_plugin.config.resolve.resolve import resolve
from zero_plugin.config.tree import AUTO, dotted
from zero_plugin.errors import ConfigError

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "configs"
FILES = {
    f"{path.parent.name}/{path.name}": path
    for path in sorted(FOLDER.glob("*/*"))
    if path.suffix in (".json", ".yaml", ".yml")
}

pytestmark = pytest.mark.skipif(not FILES, reason="the published configuration files are not next to this checkout")

# file -> why it is right that it resolves
RESOLVES = {
    # Accelerate's templates and test configurations: current, complete, with auto for values of the script
    "accelerate/examples__deepspeed_config_templates__zero_stage1_config.json": "fp16 at stage 1, torch's Adam, a schedule that is all auto: a run with placeholders has every value.",
    "accelerate/examples__deepspeed_config_templates__zero_stage2_config.json": "The same at stage 2; reduce_bucket_size is found from the model's width.",
    "accelerate/examples__deepspeed_config_templates__zero_stage2_offload_config.json": "Optimizer offload to the CPU is legal at stage 2, also with torch_adam, which DeepSpeed then ignores.",
    "accelerate/examples__deepspeed_config_templates__zero_stage3_config.json": "Stage 3 with the three buckets and the gathering at saving open, all of which have rules.",
    "accelerate/examples__deepspeed_config_templates__zero_stage3_offload_config.json": "Both offloads to the CPU belong to stage 3, and pin_memory is a key of each.",
    "accelerate/tests__deepspeed__ds_config_zero2.json": "fp16 and bf16 are both auto, which is no contradiction: the launch's mixed_precision settles them.",
    "accelerate/tests__deepspeed__ds_config_zero2_model_only.json": "Without optimizer and scheduler sections: the script brings them.",
    "accelerate/tests__deepspeed__ds_config_zero3.json": "As its stage-2 sibling, with parameters offloaded, which stage 3 has.",
    "accelerate/tests__deepspeed__ds_config_zero3_model_only.json": "Buckets of 1e9 are whole numbers however they are written, and the batch is one number, 1.",
    # DeepSpeed's examples
    "deepspeed_examples/compression__cifar__config__ds_config.json": "prescale_gradients stands at stage 0, where no reduce_scatter contradicts it; Adam with every argument given.",
    "deepspeed_examples/compression__gpt2__config__ds_config.json": "Batch 8 of micro-batches of 4 is two processes or two accumulation steps; prescaling at stage 0 is legal.",
    "deepspeed_examples/inference__sglang__ds_offload_cpu.json": "Stage 3 with parameters in host memory; stage3_max_live_parameters and buffer_size are auto and take DeepSpeed's defaults.",
    "deepspeed_examples/inference__sglang__ds_offload_nvme_aio.json": "NVMe at stage 3 with its path, and an aio section in today's names (intra_op_parallelism).",
    "deepspeed_examples/inference__sglang__ds_offload_nvme_gds.json": "The same through GPUDirect: use_gds is a key of aio, and whether the machine has it is not the file's matter.",
    "deepspeed_examples/training__BingBertSquad__deepspeed_bsz24_config.json": "Batch 24 of micro-batches of 3 is eight GPUs; bias_correction is an argument of DeepSpeed's Adam.",
    "deepspeed_examples/training__autotuning__hf__dsconfigs__ds_config_fp16_z0.json": "The micro-batch is the loader's; a zero section of stage 0 and fp16 are complete.",
    "deepspeed_examples/training__autotuning__hf__dsconfigs__ds_config_fp16_z1.json": "As above, stage 1.",
    "deepspeed_examples/training__autotuning__hf__dsconfigs__ds_config_fp16_z2.json": "As above, stage 2.",
    "deepspeed_examples/training__autotuning__hf__dsconfigs__ds_config_fp16_z3.json": "As above, stage 3.",
    "deepspeed_examples/training__autotuning__hf__dsconfigs__ds_config_z0.json": "As above in fp32, stage 0.",
    "deepspeed_examples/training__autotuning__hf__dsconfigs__ds_config_z1.json": "As above in fp32, stage 1.",
    "deepspeed_examples/training__autotuning__hf__dsconfigs__ds_config_z2.json": "As above in fp32, stage 2.",
    "deepspeed_examples/training__autotuning__hf__dsconfigs__ds_config_z3.json": "As above in fp32, stage 3.",
    "deepspeed_examples/training__bing_bert__deepspeed_bsz32k_lamb_config_seq512.json": "LAMB without ZeRO, with coefficients that DeepSpeed's FusedLamb takes.",
    "deepspeed_examples/training__data_efficiency__gpt_finetuning__config__ds_config_gpt_base_random_ltd.json": "Every random_ltd key is one that DeepSpeed reads, and the section is enabled at each of its levels.",
    "deepspeed_examples/training__data_efficiency__gpt_finetuning__config__ds_config_gpt_medium_random_ltd.json": "The same with 22 of 24 layers.",
    "deepspeed_examples/training__data_efficiency__vit_finetuning__config__ds_config_cifar_random_ltd.json": "The same for a ViT, whose model_mask_name is null, as DeepSpeed wants where there is no mask.",
    "deepspeed_examples/training__data_efficiency__vit_finetuning__config__ds_config_imagenet_random_ltd.json": "The same; batch 256 of 16 is sixteen processes or accumulation.",
    "deepspeed_examples/training__pipeline_parallelism__ds_config.json": "A plain configuration: batch, Adam, nothing of pipelines, which the script makes.",
    # TRL's launch files
    "trl/examples__accelerate_configs__alst_ulysses_4gpu.yaml": "Two groups of two processes share samples; dp_shard_size 2 is what follows.",
    "trl/examples__accelerate_configs__deepspeed_zero1.yaml": "As `accelerate config` writes it, stage 1 in bf16 on eight processes.",
    "trl/examples__accelerate_configs__deepspeed_zero2.yaml": "Stage 2 with both offloads written out as none.",
    "trl/examples__accelerate_configs__deepspeed_zero3.yaml": "Stage 3; zero3_init_flag and zero3_save_16bit_model are Accelerate's fields.",
    "trl/examples__accelerate_configs__multi_gpu.yaml": "DDP on eight GPUs, no ZeRO asked for.",
    "trl/examples__accelerate_configs__single_gpu.yaml": "NO with one process is one device.",
    "trl/tests__distributed__data__accelerate_configs__ddp.yaml": "Two lines, DDP on two.",
    "trl/trl__accelerate_configs__single_gpu.yaml": "NO is one process, as in Accelerate; a number of eight with it is a warning.",
    "trl/tests__distributed__data__accelerate_configs__zero2.yaml": "Three lines are enough for stage 2.",
    "trl/tests__distributed__data__accelerate_configs__zero3.yaml": "Three lines are enough for stage 3.",
}  # fmt: skip

COMPRESSION = {("compression_training", "removed in DeepSpeed 0.19.7")}
CUDA = {("cuda_visible_devices", "unknown key")}
FSDP = ("distributed_type", '"FSDP" is not supported')
ONEBIT = {("optimizer.type", '"OneBit')}
AUTOTUNING = {("autotuning.enabled", "true")}

# file -> (why a person agrees, the problems: key and how the message starts)
REFUSED = {
    "accelerate/examples__alst_ulysses_sequence_parallelism__sp-alst.accelerate-config.yml": (
        "The JSON that it names is not in this folder (the names here are the repository's paths).",
        {("deepspeed_config_file", "no file")},
    ),
    "accelerate/examples__config_yaml_templates__deepspeed.yaml": (
        "It names ../deepspeed_config_templates/zero_stage1_config.json, which is not there from here.",
        {("deepspeed_config_file", "no file")},
    ),
    "deepspeed_examples/training__DeepSpeed-ZenFlow__finetuning__zf_config.json": (
        "ZenFlow's engine counts a window's backwards itself, in conflict with the loop's.",
        {("zero_optimization.zenflow", "is not supported")},
    ),
    # DeepSpeed 0.19.7 raises for compression_training with any content. The run needs this section.
    "deepspeed_examples/compression__bert__config__XTC__ds_config_W1A8_Qgroup1_fp32.json": ("1-bit weights are what the run is for, and DeepSpeed has no compression any more.", COMPRESSION),
    "deepspeed_examples/compression__bert__config__XTC__ds_config_layer_reduction_W1Q8_fp32.json": ("Layer reduction and 1-bit weights need the removed section.", COMPRESSION),
    "deepspeed_examples/compression__bert__config__XTC__ds_config_layer_reduction_fp16.json": ("Layer reduction alone needs it too.", COMPRESSION),
    "deepspeed_examples/compression__bert__config__ZeroQuant__ds_config_W48A8_Qgroup48_lkd_fp32.json": ("Weights of 4 and 8 bits by layer-wise distillation need it.", COMPRESSION),
    "deepspeed_examples/compression__bert__config__ZeroQuant__ds_config_W8A8_Qgroup48_fp32.json": ("8-bit weights and activations need it.", COMPRESSION),
    "deepspeed_examples/compression__bert__config__ds_config.json": ("Every method in it is off, but DeepSpeed refuses the section's presence; deleting it is the whole repair.", COMPRESSION),
    "deepspeed_examples/compression__bert__config__ds_config_W1A8_Qgroup64_fp16.json": ("1-bit weights need it.", COMPRESSION),
    "deepspeed_examples/compression__bert__config__ds_config_W1A8_Qgroup64_fp32.json": ("The same in fp32.", COMPRESSION),
    "deepspeed_examples/compression__bert__config__ds_config_W1or2A8_Qgroup64_fp16.json": ("Weights of 1 and 2 bits need it.", COMPRESSION),
    "deepspeed_examples/compression__cifar__config__ds_config_channel_prune.json": ("Channel pruning needs it; its sibling without the section resolves.", COMPRESSION),
    "deepspeed_examples/compression__gpt2__config__ds_config_W4or8A8_Qgroup64_fp16.json": ("Weights of 4 and 8 bits need it.", COMPRESSION),
    "deepspeed_examples/compression__gpt2__config__ds_config_W4or8A8_Qgroup64_fp32.json": ("The same in fp32.", COMPRESSION),
    "deepspeed_examples/compression__gpt2__config__ds_config_W8A8_Qgroup64_fp16.json": ("8-bit weights need it.", COMPRESSION),
    "deepspeed_examples/compression__gpt2__config__ds_config_W8A8_Qgroup64_fp32.json": ("The same in fp32.", COMPRESSION),
    # The 1-bit optimizers are gone from DeepSpeed. Another optimizer would be another training.
    "deepspeed_examples/training__BingBertSquad__1-bit_adam__mpi_ethernet__deepspeed_onebitadam_bsz96_config.json": ("OnebitAdam, in its other capitals, is gone by 0.19.7.", {("optimizer.type", '"OnebitAdam"')}),
    "deepspeed_examples/training__BingBertSquad__1-bit_adam__mpi_infiniband__deepspeed_onebitadam_bsz96_config.json": ("The same over InfiniBand.", {("optimizer.type", '"OnebitAdam"')}),
    "deepspeed_examples/training__BingBertSquad__1-bit_adam__nccl__deepspeed_onebitadam_bsz96_config.json": ("The same over NCCL.", {("optimizer.type", '"OnebitAdam"')}),
    "deepspeed_examples/training__bing_bert__01_adam__mpi_ethernet__deepspeed_bsz4k_01adam_config_seq128_mpi_ethernet.json": ("ZeroOneAdam is gone by 0.19.7.", {("optimizer.type", '"ZeroOneAdam"')}),
    "deepspeed_examples/training__bing_bert__01_adam__mpi_ethernet__deepspeed_bsz4k_01adam_config_seq512_mpi_ethernet.json": ("The same for long sequences.", {("optimizer.type", '"ZeroOneAdam"')}),
    "deepspeed_examples/training__bing_bert__1-bit_adam__mpi_ethernet__deepspeed_bsz4k_onebitadam_config_seq128_mpi_ethernet.json": ("OneBitAdam is gone by 0.19.7.", ONEBIT),
    "deepspeed_examples/training__bing_bert__1-bit_adam__mpi_infiniband__deepspeed_bsz4k_onebitadam_config_seq128_mpi_infiniband.json": ("The same over InfiniBand.", ONEBIT),
    "deepspeed_examples/training__bing_bert__1-bit_adam__nccl__deepspeed_bsz4k_onebitadam_config_seq128_nccl.json": ("The same over NCCL.", ONEBIT),
    "deepspeed_examples/training__bing_bert__1-bit_lamb__mpi_ethernet__deepspeed_bsz32k_onebitlamb_config_seq512_mpi_ethernet.json": ("OneBitLamb is gone by 0.19.7.", ONEBIT),
    "deepspeed_examples/training__bing_bert__1-bit_lamb__mpi_ethernet__deepspeed_bsz64k_onebitlamb_config_seq128_mpi_ethernet.json": ("The same for short sequences.", ONEBIT),
    "deepspeed_examples/training__bing_bert__1-bit_lamb__mpi_infiniband__deepspeed_bsz32k_onebitlamb_config_seq512_mpi_infiniband.json": ("The same over InfiniBand.", ONEBIT),
    "deepspeed_examples/training__bing_bert__1-bit_lamb__mpi_infiniband__deepspeed_bsz64k_onebitlamb_config_seq128_mpi_infiniband.json": ("The same over InfiniBand, short sequences.", ONEBIT),
    "deepspeed_examples/training__bing_bert__1-bit_lamb__nccl__deepspeed_bsz32k_onebitlamb_config_seq512_nccl.json": ("The same over NCCL.", ONEBIT),
    "deepspeed_examples/training__bing_bert__1-bit_lamb__nccl__deepspeed_bsz64k_onebitlamb_config_seq128_nccl.json": ("The same over NCCL, short sequences.", ONEBIT),
    "deepspeed_examples/training__bing_bert__deepspeed_bsz4k_progressive_layer_drop_config_seq128.json": (
        "The section is what the run is about, and DeepSpeed 0.19.8 raises for it.",
        {("progressive_layer_drop", "removed in DeepSpeed 0.19.8")},
    ),
    "deepspeed_examples/training__bing_bert__deepspeed_bsz64k_lamb_config_seq128.json": (
        "A LAMB run as its accepted sibling, but with sparse_attention, for which DeepSpeed raises since 0.19.7.",
        {("sparse_attention", "removed in DeepSpeed 0.19.7")},
    ),
    # With autotuning on, the engine leaves the process after a few steps, with exit code 0.
    "deepspeed_examples/training__autotuning__hf__bert-base__ds_config_tune.json": ("It is the template of `deepspeed --autotuning`, no training: its run ends after the profiling steps.", AUTOTUNING),
    "deepspeed_examples/training__autotuning__hf__bert-large__ds_config_tune.json": ("The same.", AUTOTUNING),
    "deepspeed_examples/training__autotuning__hf__deberta__ds_config_fp16_tune.json": ("The same in fp16.", AUTOTUNING),
    "deepspeed_examples/training__autotuning__hf__dsconfigs__ds_config_fp16_tune.json": ("The same in fp16.", AUTOTUNING),
    "deepspeed_examples/training__autotuning__hf__dsconfigs__ds_config_tune.json": ("The same in fp32.", AUTOTUNING),
    # DeepSpeed reads no such key: the author's intention fails on any release.
    "deepspeed_examples/training__imagenet__config__ds_config.json": ("cuda_visible_devices: 0 chooses no GPU; the other keys are legal.", CUDA),
    "deepspeed_examples/training__imagenet__config__ds_fp16_config.json": ("The same with fp16.", CUDA),
    "deepspeed_examples/training__imagenet__config__ds_fp16_z1_config.json": ("The same at stage 1.", CUDA),
    "deepspeed_examples/training__tensor_parallel__hf_integration__configs__ds_config.json": (
        "Four-fold tensor parallelism: the loaders here would give each of the four other samples, which is wrong for it.",
        {("tensor_parallel.autotp_size", "4")},
    ),
    "trl/examples__accelerate_configs__context_parallel_2gpu.yaml": (
        "FSDP, and a context split over two GPUs: neither is on any path here.",
        {FSDP, ("parallelism_config.parallelism_config_cp_size", "2 is not supported")},
    ),
    "trl/examples__accelerate_configs__fsdp1.yaml": ("FSDP asks for another engine; ZeRO-3 shards the same states, and the message says so.", {FSDP}),
    "trl/examples__accelerate_configs__fsdp2.yaml": ("The same with FSDP's second version.", {FSDP}),
    "trl/tests__distributed__data__accelerate_configs__fsdp2.yaml": ("The same in three lines.", {FSDP}),
}  # fmt: skip

PLAIN_WORDS = {"BATCH_SIZE_PER_GPU", "FP16_ENABLE", "LAYER_REDUCTION_ENABLE", "WEIGHT_QUANT_ENABLE", "Q_GROUP", "QuantW_FORWARD", "W_BIT1", "W_BIT2", "ACTIVATION_QUANT_ENABLE", "A_BIT1", "A_BIT2", "SPARSE_PRUNING_ENABLE", "S_DENSE_RATIO", "ROW_PRUNING_ENABLE", "R_DENSE_RATIO", "HEAD_PRUNING_ENABLE", "H_DENSE_RATIO"}  # fmt: skip
LTD_WORDS = {"GB_SIZE", "MB_SIZE", "LTD_ENABLED", "LTD_MIN", "LTD_STEP"}
ONE_METRIC = {"DATA_EFFICIENCY_SEED", "CL_ENABLED", "DATA_SAMPLING_NUM_WORKERS", *(f"CL_1st_{word}" for word in ("MIN", "MAX", "TOTAL_STEP", "DIFF_STEP", "ROOT"))}  # fmt: skip
FIRST_TYPE = ("data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.CL_1st_METRIC_NAME.difficulty_type", '"CL_1st_DIFF_TYPE" is not legal')  # fmt: skip

# Templates that a shell script fills before DeepSpeed sees them: file -> (the words to fill, all of which are named,
# and the other problems)
TEMPLATES = {
    "deepspeed_examples/compression__bert__config__ds_config_TEMPLATE.json": (PLAIN_WORDS, COMPRESSION),
    "deepspeed_examples/compression__bert__config__ds_config_structural_pruning_TEMPLATE.json": (PLAIN_WORDS | {f"SPARSE_PRUNING_{word}" for word in ("OFFSET", "OFFSET_END", "OFFSET_STRIDE", "BLOCK_PATTERN", "EXCLUDED_MODULES")}, COMPRESSION),
    "deepspeed_examples/training__data_efficiency__gpt_finetuning__finetune__ds_config_gpt2_TEMPLATE.json": (LTD_WORDS, set()),
    "deepspeed_examples/training__data_efficiency__gpt_finetuning__finetune__ds_config_gpt2-medium_1clmetric_TEMPLATE.json": (LTD_WORDS | ONE_METRIC, {FIRST_TYPE}),
    "deepspeed_examples/training__data_efficiency__gpt_finetuning__finetune__ds_config_gpt2-medium_2clmetrics_TEMPLATE.json": (
        LTD_WORDS | ONE_METRIC | {word.replace("1st", "2nd") for word in ONE_METRIC},
        {FIRST_TYPE, (FIRST_TYPE[0].replace("1st", "2nd"), FIRST_TYPE[1].replace("1st", "2nd"))},
    ),
    "deepspeed_examples/training__tensor_parallel__hf_integration__configs__ds_config_temp.json": ({"${zero_stage}", "${autotp_size}"}, set()),
}  # fmt: skip


def facts_for(document: Document) -> Facts:
    """Return the facts of a fitting script: as many processes as its batch needs, arguments for open values."""
    training = document.deepspeed
    processes = document.launch.value("num_processes", default=1)
    total, micro, steps = (
        value if isinstance(value := training.value(key), int) else None
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    if total and micro:
        processes = total // (micro * (steps or 1))
    open_arguments = {"lr": 1e-4} if training.value("optimizer", "params", "lr") is AUTO else {}
    return Facts(
        loop=LoopFacts(micro or (total or 4 * processes) // (processes * (steps or 1)), "the loader's batch_size"),
        machine=MachineFacts("cuda", processes, bf16=True, fp16=True),
        model=ModelFacts(1024, "model.config.hidden_size", largest_parameter=50_000_000, parameters=350_000_000),
        optimizer=OptimizerFacts(given=open_arguments, placeholder=True),
        scheduler=SchedulerFacts(placeholder=True, total_num_steps=1000, warmup_num_steps=100),
    )


def refusal(name: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        check_document(read_document(FILES[name]))
    return caught.value


def test_every_file_has_one_verdict() -> None:
    """No file is without a verdict, or has two."""
    assert sorted([*RESOLVES, *REFUSED, *TEMPLATES]) == sorted(FILES)


@pytest.mark.parametrize("name", RESOLVES)
def test_resolves(name: str) -> None:
    """The file is accepted, is handed over unchanged, and a fitting script's facts settle every value."""
    document = read_document(FILES[name])
    notes = check_document(document)
    launch_settings(document)
    assert from_environment({ENVIRONMENT_VARIABLE: to_environment(document)}) == document
    resolved = resolve(document, facts_for(document))
    assert "auto" not in repr(resolved.deepspeed_config()).replace("'zenflow'", "")
    logged = [*resolved.logged, *(note.remark for note in notes)]
    for path, entry in document.deepspeed.entries.items():
        kept = entry.value is AUTO or resolved.tree.value(*path) == entry.value
        assert kept or any(dotted(path) in sentence for sentence in logged)


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_for_what_is_wrong_with_it(name: str) -> None:
    """Exactly the problems that a person finds are reported, each at its place, with the fix."""
    _, expected = REFUSED[name]
    found = refusal(name).problems
    assert all(re.fullmatch(re.escape(str(FILES[name])) + r":\d+:\d+", p.where) and p.fix for p in found)
    unmatched = [p for p in found if not any(p.key == k and p.message.startswith(start) for k, start in expected)]
    assert unmatched == []
    assert len(found) == len(expected)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_names_every_word_to_fill(name: str) -> None:
    """One report names all words that stand for values, and the other problems."""
    words, others = TEMPLATES[name]
    found = refusal(name).problems
    fills = {p: p.message.split("`")[1] for p in found if "where a value is expected" in p.message}
    assert set(fills.values()) == words
    assert {(p.key, p.message) for p in found if p not in fills} == {
        (p.key, p.message) for p in found if any(p.key == k and p.message.startswith(start) for k, start in others)
    }
    assert len(found) == len(fills) + len(others)
