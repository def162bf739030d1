"""Model states, buffers and their sum by the plan's arithmetic. test_live_states.py compares real engines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_plugin.plan.costs import (
    ProcessMemory,
    flat_elements,
    footprint,
    sharded_elements,
    sub_groups,
    touched_elements,
)
from zero_plugin.plan.situation import (
    CPU,
    Activations,
    Affine,
    Cluster,
    ModelSizes,
    OptimizerSizes,
    ParameterSize,
    Setup,
    Workload,
)

GIB = 2**30
ADAM = OptimizerSizes()
# 7 × 2^30 elements in matrices that divide evenly by every number of processes here, each too large to stay
# unpartitioned.
SEVEN = ModelSizes("7B", (ParameterSize(2**24, 448),), largest_module=2**24)
NONE = Activations(Affine())
A100 = Cluster(80 * GIB, 1000 * GIB, devices=8)


def per_parameter(setup: Setup, processes: int, optimizer: OptimizerSizes = ADAM) -> float:
    """Return bytes on the device for each parameter at the end of a window, without stage 3's bucket."""
    memory = ProcessMemory(SEVEN, optimizer, replace(setup, reduce_bucket=0), processes)
    states = memory.device_states()
    staged = states.pop("buckets", 0) if setup.stage not in (None, 3) else 0
    assert staged in (0, 2**24 * 2, 2**24 * 4)
    return (sum(states.values()) + memory.window_gradients()) / SEVEN.elements


@pytest.mark.parametrize(
    ("setup", "expected"),
    [
        (Setup(None, "no"), 4 + 8 + 8),  # weights, gradients in addition to DDP's buckets, two moments: all in fp32
        (Setup(None, "bf16"), 4 + 8 + 8),  # autocast does not change them
        (Setup(None, "bf16", gradient_views=True), 4 + 4 + 8),
        (Setup(0, "bf16"), 2 + 2 + 4 + 8),
        (Setup(1, "bf16"), 2 + 2 + 4 + 12 / 8),  # fp32 sums of all gradients, and the last backward's gradients
        (Setup(1, "bf16", gradient_bytes=2), 2 + 2 + 12 / 8),
        (Setup(2, "bf16"), 2 + 4 / 8 + 12 / 8),
        (Setup(2, "fp16", gradient_bytes=2), 2 + 2 / 8 + 12 / 8),
        (Setup(2, "no"), 4 + 4 / 8 + 12 / 8),  # ZeRO keeps masters of fp32 weights too
        (Setup(3, "bf16"), (2 + 4 + 12) / 8),
        (Setup(3, "fp16", gradient_bytes=2), (2 + 2 + 12) / 8),
        (Setup(2, "bf16", offload_optimizer="cpu"), 2 + 4 / 8),  # sums in fp32 stay on the device until the step
        (Setup(2, "fp16", gradient_bytes=2, offload_optimizer="cpu"), 2),
        (Setup(3, "bf16", offload_optimizer="cpu"), 2 / 8),
        (Setup(3, "bf16", offload_optimizer="nvme"), 2 / 8),
        (Setup(3, "bf16", offload_optimizer="cpu", offload_param="cpu"), 0),
        (Setup(3, "bf16", offload_param="cpu"), (4 + 12) / 8),
    ],
    ids=str,
)
def test_bytes_of_each_parameter_on_the_device(setup: Setup, expected: float) -> None:
    """On eight devices, with Adam."""
    assert per_parameter(setup, 8) == expected


@pytest.mark.parametrize(
    ("setup", "expected"),
    [
        (Setup(1, offload_optimizer="cpu"), 4 + 8 + 4 + 2),  # masters, moments, gradients, weights on their way back
        (Setup(2, offload_optimizer="cpu"), 4 + 8 + 4 + 2),
        (Setup(2, "fp16", gradient_bytes=2, offload_optimizer="cpu"), 4 + 8 + 4 + 2 + 2),  # sums are in the host
        (Setup(3, offload_optimizer="cpu"), 4 + 8 + 4 + 4),
        (Setup(3, offload_optimizer="cpu", offload_param="cpu"), 4 + 8 + 4 + 4 + 2),
        (Setup(3, offload_optimizer="nvme", offload_param="nvme"), 4),  # gradients
        (Setup(3, offload_param="cpu"), 2),
        (Setup(2), 0),
    ],
    ids=str,
)
def test_bytes_of_each_parameter_in_host_memory(setup: Setup, expected: float) -> None:
    """For all processes together, without the gradient in transit and NVMe's buffers."""
    found = ProcessMemory(SEVEN, ADAM, setup, 8).host_tensors()
    passing = sum(found["staging"][1:]) if "staging" in found else 0
    assert (sum(sum(sizes) for sizes in found.values()) - passing) * 8 / SEVEN.elements == expected


@pytest.mark.parametrize(
    ("setup", "expected"),
    [
        (Setup(3, offload_optimizer="nvme"), 4 + 8 + 4),
        (Setup(3, offload_optimizer="nvme", offload_param="nvme"), 4 + 8 + 4 + 2),
        (Setup(3, offload_param="nvme"), 2),
        (Setup(3, offload_optimizer="cpu"), 0),
    ],
    ids=str,
)
def test_bytes_of_each_parameter_on_nvme(setup: Setup, expected: float) -> None:
    """For all processes together."""
    assert sum(ProcessMemory(SEVEN, ADAM, setup, 8).nvme_states().values()) * 8 / SEVEN.elements == expected


@pytest.mark.parametrize(("name", "states"), [("sgd", 0), ("lion", 1), ("adamw", 2), ("unknown", 5)])
def test_an_optimizer_counts_by_its_states(name: str, states: int) -> None:
    """Each state takes four bytes per element of the partition, on any device."""
    optimizer = OptimizerSizes(name, states)
    assert per_parameter(Setup(2), 8, optimizer) == 2 + (4 + 4 + 4 * states) / 8
    in_host = ProcessMemory(SEVEN, optimizer, Setup(2, offload_optimizer="cpu"), 8).host_tensors()
    assert sum(in_host["optimizer states"]) * 8 == 4 * states * SEVEN.elements


@pytest.mark.parametrize("stage", [0, 1, 2, 3, None])
def test_frozen_weights_cost_themselves_alone(stage: Any) -> None:
    """LoRA: they have no gradient, master or state."""
    adapter = ParameterSize(2**20, 8)
    lora = ModelSizes("lora", (*(replace(p, trainable=False) for p in SEVEN.parameters), adapter))
    alone = ModelSizes("adapter", (adapter,))
    both, trained = (ProcessMemory(model, ADAM, Setup(stage), 8) for model in (lora, alone))
    more = sum(both.device_states().values()) - sum(trained.device_states().values())
    assert more == SEVEN.elements * {None: 4, 3: 2 / 8}.get(stage, 2)
    assert both.window_gradients() == trained.window_gradients()


def test_frozen_weights_keep_their_type_without_zero() -> None:
    """In 16 bits they take two bytes and no copy under autocast. Trained weights are fp32."""
    halves = ModelSizes("lora", (ParameterSize(2**24, 448, trainable=False, width=2), ParameterSize(2**20)))
    terms = footprint(Workload(halves, NONE, ADAM), Setup(None), A100).phases["forward"]
    assert (terms["parameters"], terms["autocast copies"]) == (2 * SEVEN.elements + 4 * 2**20, 2 * 2**20)
    zero = footprint(Workload(halves, NONE, ADAM), Setup(2), A100).phases["forward"]
    assert zero["parameters"] == 2 * SEVEN.elements + 2 * 2**20


def test_padding() -> None:
    """Stages 1 and 2 pad the total to two elements per process, stage 3 each parameter to the number of processes."""
    odd = (ParameterSize(7, 3), ParameterSize(5, trainable=False))
    assert flat_elements(odd, 4) == 24
    assert sharded_elements(odd, 4, trainable=True) == 6
    assert sharded_elements(odd, 4, trainable=False) == 2
    # Partitions of 6: the second reaches from the first parameter's last element to the second's fifth.
    assert touched_elements(odd, 4) == 14
    assert touched_elements(odd, 1) == 21
    assert touched_elements((ParameterSize(3),), 4) == 3  # not all have a part


def test_sub_groups() -> None:
    """A parameter that reaches the size closes its sub-group. If all are smaller, one sub-group exists."""
    sizes = (ParameterSize(10, 5), ParameterSize(3), ParameterSize(100, trainable=False))
    assert sub_groups(sizes, 1, 20) == (20, 20, 13)
    assert sub_groups(sizes, 1, 15) == (20, 20, 13)
    assert sub_groups(sizes, 2, 5) == (5, 5, 5, 5, 5, 2)
    assert sub_groups(sizes, 1, 53) == (53,)


@pytest.mark.parametrize(("ratio", "on_device"), [(1.0, 0), (0.9, 0), (0.75, 1), (0.5, 2), (0.0, 4)])
def test_ratio_acts_on_whole_sub_groups(ratio: float, on_device: int) -> None:
    """The first of four sub-groups stay on the device, rounded down, with masters, states and gradients."""
    model = ModelSizes("four", (ParameterSize(2**20, 4),))
    setup = Setup(3, offload_optimizer="cpu", ratio=ratio, sub_group_size=2**17, reduce_bucket=0)
    memory = ProcessMemory(model, ADAM, setup, 8)
    states = memory.device_states()
    assert sum(states.values()) == 4 * 2**17 * 2 + on_device * 2**17 * (4 + 8 + 4)
    in_host = memory.host_tensors()
    assert len(in_host["master weights"]) == 4 - on_device


@pytest.mark.parametrize(
    ("live", "reuse", "prefetch", "measured"),
    [
        (30_000, 30_000, 0, 15_015),
        (30_000, 30_000, 9_000, 36_140),
        (30_000, 10**9, 9_000, 175_565),
        (10**9, 30_000, 0, 15_015),
        (10**9, 30_000, 9_000, 175_565),
        (60_000, 180_000, 9_000, 91_065),
    ],
)
def test_gathered_parameters_bound_what_was_measured(live: int, reuse: int, prefetch: int, measured: int) -> None:
    """The most elements that DeepSpeed 0.19.8 had gathered, on two processes, of 40 layers of 65 × 65."""
    layers = (ParameterSize(65 * 65, 40), ParameterSize(65, 42), ParameterSize(101 * 65))
    model = ModelSizes("layers", layers)
    setup = Setup(3, prefetch_bucket=prefetch, max_live_parameters=live, max_reuse_distance=reuse)
    setup = replace(setup, persistence_threshold=200)
    in_flight = prefetch + 101 * 65
    held = ProcessMemory(model, ADAM, setup, 2).gathered_parameters() / 2 - in_flight
    assert measured <= held <= measured + 2 * 101 * 65


def test_experts_of_a_layer_are_gathered_together() -> None:
    """One of two layers of 8 experts is gathered in a flat buffer, and copied out of the buffer."""
    experts = ModelSizes("moe", (ParameterSize(2**20, 16, expert=True), ParameterSize(2**18, 2)), layers=2)
    setup = Setup(3, prefetch_bucket=0, max_reuse_distance=0)
    assert ProcessMemory(experts, ADAM, setup, 8).gathered_parameters() == 2 * (8 * 2**20 + 8 * 2**20)


def test_nothing_is_gathered_on_one_device() -> None:
    """One device gathers only if the weights are elsewhere."""
    assert ProcessMemory(SEVEN, ADAM, Setup(3), 1).gathered_parameters() == 0
    assert ProcessMemory(SEVEN, ADAM, Setup(3, offload_param="cpu"), 1).gathered_parameters() > 0


def test_swapping_weights_takes_room_for_whole_parameters() -> None:
    """Room for partitions is not enough: one sub-group of everything would lock all 14 GiB in each process."""
    everything = Setup(3, offload_param="nvme", param_buffer=0)
    assert ProcessMemory(SEVEN, ADAM, everything, 8).swap_buffers() == 2 * SEVEN.elements
    small = replace(everything, sub_group_size=2**24)
    assert ProcessMemory(SEVEN, ADAM, small, 8).swap_buffers() == 2 * 8 * 2**24


def test_a_step_at_stage_3_works_on_one_sub_group() -> None:
    """It flattens the sub-group's gradients, casts 16-bit ones, and updates."""
    whole = Setup(3)
    assert sum(ProcessMemory(SEVEN, ADAM, whole, 8).step_moments()[-1].values()) == SEVEN.elements // 8 * (4 + 4)
    small = replace(whole, sub_group_size=2**21)
    assert sum(ProcessMemory(SEVEN, ADAM, small, 8).step_moments()[-1].values()) == 2**21 * (4 + 4)
    made, updated = ProcessMemory(SEVEN, ADAM, replace(small, gradient_bytes=2), 8).step_moments()
    assert (sum(made.values()), sum(updated.values())) == (2**21 * (2 + 4), 2**21 * (4 + 4))


def test_terms_of_the_peak() -> None:
    """The footprint's device is its largest phase. torch allocates this without context and fragmentation."""
    activations = Activations(Affine(GIB, 2 * GIB), Affine(0, GIB // 2))
    found = footprint(Workload(SEVEN, activations, ADAM), Setup(2, micro_batch=3), A100)
    sums = {name: sum(terms.values()) for name, terms in found.phases.items()}
    assert set(sums) == {"initialisation", "forward", "reduction", "backward", "step"}
    assert found.device_bytes == max(sums.values()) == sums[found.device_phase]
    assert found.phases["forward"]["activations"] == 7 * GIB
    assert found.allocated_bytes < found.device_bytes
    small = footprint(Workload(SEVEN, NONE, ADAM), Setup(2, micro_batch=3), A100)
    assert small.device_phase == "step"


def test_checkpointed_activations() -> None:
    """They replace both, if the model has blocks; otherwise nothing changes."""
    setup = Setup(2, activation_checkpointing=True)
    plain = Activations(Affine(0, 100 * GIB), Affine(0, GIB))
    less = replace(plain, checkpointed=Affine(0, 3 * GIB), checkpointed_transient=Affine(0, 2 * GIB))
    terms = footprint(Workload(SEVEN, less, ADAM), setup, A100).phases["forward"]
    assert (terms["activations"], terms["transient"]) == (3 * GIB, 2 * GIB)
    assert footprint(Workload(SEVEN, plain, ADAM), setup, A100).phases["forward"]["activations"] == 100 * GIB


def test_offloaded_gradients_pass_the_device() -> None:
    """Each norm is computed there, in fp64. For NVMe they go by sub-groups, which gather there in fp32."""
    largest = max(p.elements for p in SEVEN.parameters) // 8
    ways = {device: Setup(3, offload_optimizer=device, sub_group_size=2**28) for device in ("cpu", "nvme")}
    moments = {name: ProcessMemory(SEVEN, ADAM, setup, 8).step_moments()[0] for name, setup in ways.items()}
    assert moments["cpu"] == {"gradients": 0, "step transient": largest * (4 + 8)}
    assert moments["nvme"] == {"gradients": 2**28 * 4, "step transient": largest * (4 + 8)}


@pytest.mark.parametrize("stage", [2, 3])
def test_buckets_come_with_the_first_gradient(stage: int) -> None:
    """Then the loss's working space is free. A full bucket is copied when its part of the backward is over.

    On an H100 GPT-2 of 774 million parameters had, with buckets of 500 million elements, the peak of its loss's
    backward without them (benchmarks/RESULTS.md).
    """
    setup = Setup(stage, reduce_bucket=SEVEN.elements // 4)
    found = Activations(Affine(0, 100 * GIB), Affine(0, 9 * GIB), late=Affine(0, -8 * GIB))
    phases = footprint(Workload(SEVEN, found, ADAM), setup, A100).phases
    bucket = SEVEN.elements // 4 * 2
    assert "reduction buffers" not in phases["forward"]
    assert (phases["forward"]["activations"], phases["forward"]["transient"]) == (100 * GIB, 9 * GIB)
    assert phases["reduction"]["activations"] == 92 * GIB
    assert phases["reduction"].get("reduction buffers", 0) == (bucket if stage == 2 else 0)
    assert "transient" not in phases["reduction"]
    short = footprint(Workload(SEVEN, Activations(Affine(0, 4 * GIB)), ADAM), setup, A100).phases["reduction"]
    assert short["activations"] == 3 * GIB
    # At stage 2 the bucket, its copy, and all sums; at stage 3 the copy, and the bucket's own gradients in fp32.
    assert short["reduction buffers"] == bucket * 2 if stage == 2 else bucket + SEVEN.elements // 4 // 8 * 4
    assert short.get("gradients", 0) == (SEVEN.elements // 8 * 4 if stage == 2 else phases["step"].get("gradients", 0))


def test_gradients_of_one_micro_batch_come_as_activations_go() -> None:
    """Only with accumulation do the last backward's activations coexist with the gradients of all parameters."""
    once, twice = (
        footprint(Workload(SEVEN, NONE, ADAM), Setup(None, "no", accumulation=n), replace(A100, devices=1))
        for n in (1, 2)
    )
    assert "gradients" not in {name for name, size in once.phases["forward"].items() if size}
    assert twice.phases["forward"]["gradients"] == 4 * SEVEN.elements
    # DDP's buckets exist throughout. Before the last backward gradients accumulate next to them.
    ddp = Setup(None, "no", gradient_views=True)
    once, twice = (footprint(Workload(SEVEN, NONE, ADAM), replace(ddp, accumulation=n), A100) for n in (1, 2))
    assert once.phases["forward"]["gradients"] == 4 * SEVEN.elements
    assert twice.phases["forward"]["gradients"] == 8 * SEVEN.elements


def test_flat_copy_is_made_where_it_fits() -> None:
    """DeepSpeed flattens on the device while the parameters are still there; if they do not fit, in CPU memory."""
    room = footprint(Workload(SEVEN, NONE, ADAM), Setup(2), A100)
    assert room.phases["initialisation"]["flat copy"] == 2 * SEVEN.elements
    tight = footprint(Workload(SEVEN, NONE, ADAM), Setup(2), replace(A100, device_bytes=20 * GIB))
    assert "flat copy" not in tight.phases["initialisation"]


def test_host_memory_is_of_a_node() -> None:
    """Its processes count together. Page-locked tensors take powers of two, and NVMe's buffers count for memlock."""
    setup = Setup(3, offload_optimizer="cpu", pin_memory=False)
    one = footprint(Workload(SEVEN, NONE, ADAM), setup, A100)
    two = footprint(Workload(SEVEN, NONE, ADAM), setup, replace(A100, nodes=2))
    states = 20 * SEVEN.elements
    assert one.host_bytes - one.host["processes"] == states == 2 * (two.host_bytes - two.host["processes"])
    assert (one.pinned, one.locked) == (0, 0)
    pinned = footprint(Workload(SEVEN, NONE, ADAM), replace(setup, pin_memory=True), A100)
    # 7/8 × 2^30 elements of each process become 2^30: the gradients, twice. The optimizer pins nothing.
    assert pinned.host["gradients"] == 8 * 2 * 4 * 2**30 == 8 * pinned.pinned
    assert pinned.host["master weights"] + pinned.host["optimizer states"] == 12 * SEVEN.elements
    # Each of the 448 partitions of 4 MiB was pinned separately, before all of them were in one.
    both = footprint(Workload(SEVEN, NONE, ADAM), replace(setup, pin_memory=True, offload_param="cpu"), A100)
    assert both.pinned - pinned.pinned == 2 * 2**30 + 448 * 4 * 2**20
    swapping = footprint(Workload(SEVEN, NONE, ADAM), replace(setup, offload_optimizer="nvme"), A100)
    assert swapping.locked == swapping.pinned == 4 * 4 * SEVEN.elements // 8


@st.composite
def models(draw: st.DrawFn) -> ModelSizes:
    """Draw models with small and large, trained and frozen parameters."""
    size = st.builds(ParameterSize, st.integers(1, 2**24), st.integers(1, 4), st.booleans(), st.just(value=False))
    trained = ParameterSize(draw(st.integers(1, 2**24)))
    return ModelSizes("drawn", (*draw(st.lists(size, max_size=6)), trained))


@given(models(), st.sampled_from(["no", "bf16", "fp16"]), st.sampled_from([1, 2, 4, 8, 64]))
def test_a_higher_stage_never_keeps_more(model: ModelSizes, precision: Any, processes: int) -> None:
    """This holds for stages 1 to 3, between steps and at a window's end, except for padding and stage 3's extras."""
    gradient_bytes = 2 if precision == "fp16" else 4
    kept = []
    for stage in (1, 2, 3):
        setup = Setup(stage, precision, gradient_bytes=gradient_bytes, reduce_bucket=0, persistence_threshold=0)
        padding = 24 * (len(model.parameters) * 4 + 2 * processes)
        # Stage 2 keeps gradients in 16 bits unpartitioned if a partition begins or ends inside of them.
        memory = ProcessMemory(model, ADAM, setup, processes)
        kept.append(sum(memory.device_states().values()) + memory.window_gradients())
        if len(kept) > 1:
            assert kept[-1] <= kept[-2] + padding


@given(models(), st.sampled_from([1, 2, 3]), st.sampled_from(["no", "bf16", "fp16"]), st.sampled_from([1, 2, 8]))
def test_offload_moves_states(model: ModelSizes, stage: Any, precision: Any, processes: int) -> None:
    """The device never keeps more with it. Masters and optimizer states are the same bytes on the other side."""
    here = Setup(stage, precision, gradient_bytes=2 if precision == "fp16" else 4)
    there = replace(here, offload_optimizer="cpu")
    on_device, left = (ProcessMemory(model, ADAM, setup, processes).device_states() for setup in (here, there))
    in_host = ProcessMemory(model, ADAM, there, processes).host_tensors()
    for term in ("master weights", "optimizer states"):
        assert on_device[term] == sum(in_host[term])
        assert not left.get(term)
    assert left["parameters"] == on_device["parameters"]


@given(models(), st.sampled_from([None, 0, 1, 2, 3]), st.integers(1, 64), st.integers(1, 64))
def test_more_processes_never_need_more_of_each(model: ModelSizes, stage: Any, few: int, many: int) -> None:
    """From two on (one gathers and reduces nothing), the need of each never grows by more than padding."""
    few, many = sorted((few + 1, many + 1))
    setup = Setup(stage, persistence_threshold=0)
    less, more = (sum(ProcessMemory(model, ADAM, setup, n).device_states().values()) for n in (many, few))
    assert less <= more + 24 * (4 * len(model.parameters) + 2 * many)


def test_a_cpu_has_no_context_and_no_empty_buckets() -> None:
    """On a CPU a bucket of 5e8 elements takes only the sixtieth that a model of 8 million fills.

    On a GPU it takes all.
    """
    model = ModelSizes("small", (ParameterSize(8_000, 1000),))
    setup = Setup(stage=1, precision="no", gradient_bytes=4, reduce_bucket=500_000_000)
    work = Workload(model, Activations(Affine()), OptimizerSizes())
    gpu = Cluster(80 * 2**30, 2**40)
    cpu = footprint(work, setup, replace(gpu, device_name=CPU))
    assert not {"context", "fragmentation"} & cpu.device.keys()
    assert cpu.device_bytes == 7 * 32_000_000
    assert footprint(work, setup, gpu).device_bytes > 2e9


def test_activations_in_cpu_memory() -> None:
    """They are in the machine's, for all its processes. If the device is a CPU, they are in the device's."""
    setup, moving = Setup(2, micro_batch=3), Activations(Affine(0, GIB), moved=Affine(100, 1000))
    work = Workload(SEVEN, moving, ADAM)
    found = footprint(work, setup, A100)
    assert found.host["activations"] == 8 * (100 + 3000)
    assert found.phases["forward"]["activations"] == 3 * GIB
    on_cpus = footprint(work, setup, replace(A100, device_name=CPU))
    assert "activations" not in on_cpus.host
    assert on_cpus.phases["forward"]["activations"] == 3 * GIB + 3100
