"""Build the complete launch spec from the checked document, the program and this machine.

Two steps may change the document first. If a model is named, a plan fills open fields. Inside a SLURM or MPI job, the
job's number of machines, rank and address are filled in.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal

from zero_plugin.config.check import check_document, contradictions
from zero_plugin.config.document import Document
from zero_plugin.config.keys import LaunchSettings
from zero_plugin.config.launch_settings import asks_for_cpu, asks_for_deepspeed, asks_for_tpu, launch_settings
from zero_plugin.config.parallelism import sequence_parallel_size
from zero_plugin.config.resolve.facts import Facts, MachineFacts
from zero_plugin.config.resolve.resolve import config_for_scripts, resolve
from zero_plugin.config.tree import AUTO, Entry, KeyPath, Origin
from zero_plugin.errors import ConfigError, Problem
from zero_plugin.launch.command import foreign_variables
from zero_plugin.launch.hosts import build_hosts_spec, requested_launcher
from zero_plugin.launch.spec import (
    LOOPBACK,
    STATIC_PORT,
    LaunchSpec,
    Program,
    Rendezvous,
    Request,
    Setting,
    find_problems,
)
from zero_plugin.launch.tpu import build_tpu_spec, choose_tpu
from zero_plugin.machine import hardware, network
from zero_plugin.machine.scheduler_job import KUBERNETES, Allocation, find_allocation

if TYPE_CHECKING:  # few launches have a plan
    from zero_plugin.plan.situation import Cluster


def build_spec(
    document: Document,
    program: Program,
    machine: hardware.Machine,
    environ: Mapping[str, str],
    *,
    rendezvous_endpoint: str | None = None,
) -> LaunchSpec:
    """Decide everything about a launch on this machine.

    Args:
        document: checked.
        program: what every worker runs.
        machine: what the workers will see.
        environ: this process's environment. The user's variables are kept.
        rendezvous_endpoint: `host:port` where machines meet, instead of the main process's address.

    Raises:
        ConfigError: all problems that keep the launch from running here, in one error.
    """
    document = choose_tpu(document, machine)
    settings = launch_settings(document)
    request = Request(document, settings, program, environ, rendezvous_endpoint)
    if asks_for_tpu(settings):
        return build_tpu_spec(request, machine)
    if requested_launcher(settings) != "standard":
        return build_hosts_spec(request)
    on_cpu = asks_for_cpu(settings) or not machine.gpus
    gpus = 0 if on_cpu else machine.gpus if settings.gpu_ids == "all" else len(settings.gpu_ids.split(","))
    processes, reason = _local_processes(settings, gpus)
    accelerator: Literal["cpu", "cuda"] = "cuda" if gpus else "cpu"
    resolved = request.resolve(
        find_problems(request, machine, gpus),
        accelerator=accelerator,
        processes=processes * settings.num_machines,
        bf16=_has_bf16(document, accelerator),
    )
    rendezvous = _rendezvous(settings, rendezvous_endpoint)
    environment = {
        **_environment(request, machine, processes, rendezvous, on_cpu=on_cpu),
        **foreign_variables(request, resolved, on_cpu=on_cpu),
    }
    binding = hardware.Binding((), "")
    if settings.enable_cpu_affinity:
        seen = {**environ, **{name: setting.value for name, setting in environment.items()}}
        binding = hardware.choose_cores(processes, hardware.find_gpus(processes, seen) if gpus else ())
    return LaunchSpec(
        program,
        document,
        settings,
        local_processes=processes,
        local_processes_reason=reason,
        machines=settings.num_machines,
        rendezvous=rendezvous,
        environment=environment,
        deepspeed_config=config_for_scripts(document, resolved) if request.on_deepspeed else None,
        cores=binding.cores,
        cores_reason=binding.reason,
    )


def _local_processes(settings: LaunchSettings, gpus: int) -> tuple[int, str]:
    wanted, machines = settings.num_processes, settings.num_machines
    if wanted is not None:
        return wanted // machines, f"{wanted} over {machines} machines" if machines > 1 else ""
    if settings.distributed_type == "NO":
        return 1, "distributed_type is NO"
    if gpus:
        return gpus, "one for each GPU"
    return 1, "one, since the run is on the CPU and num_processes is not given"


def _has_bf16(document: Document, accelerator: Literal["cpu", "cuda"]) -> bool:
    """Return whether the workers compute in bf16. Only `mixed_precision: auto` needs the probe, which imports torch."""
    if document.launch.value("mixed_precision") is not AUTO:
        return True
    from zero_plugin.plan.run_plan import probe_machine

    return probe_machine(accelerator).bf16


def _rendezvous(settings: LaunchSettings, endpoint: str | None) -> Rendezvous:
    pairs = (part.strip().partition("=") for part in settings.rdzv_conf.split(",") if part.strip())
    options: dict[str, str | int] = {key.strip(): value.strip() for key, _, value in pairs}
    if settings.num_machines == 1:
        return Rendezvous(LOOPBACK, f"{network.OWN_ADDRESS}:{settings.main_process_port or 0}", uuid.uuid4().hex)
    address = endpoint or f"{settings.main_process_ip}:{settings.main_process_port or STATIC_PORT}"
    if settings.rdzv_backend == "static":
        return Rendezvous("static", address, "zero_plugin", options | {"rank": settings.machine_rank})
    # torch decides whether this machine hosts the rendezvous by comparing the address only with the addresses that the
    # host name resolves to. torch would also give the host name to the other machines.
    host, port = network.host_of(address), address.rpartition(":")[2]
    chosen = settings.rdzv_backend == "c10d" and "is_host" not in options and port.isdigit()
    if chosen and network.is_own_address(host) and not network.is_loopback(host) and hardware.port_is_free(int(port)):
        options["is_host"] = "true"  # if the port is taken, another launcher on this machine is the host
    elif chosen and not network.is_loopback(host) and not network.own_name_resolves():
        options["is_host"] = "false"  # torch's comparison would raise
    return Rendezvous(
        settings.rdzv_backend, address, "zero_plugin", options, local_address=network.address_towards(host)
    )


def _environment(
    request: Request, machine: hardware.Machine, processes: int, rendezvous: Rendezvous, *, on_cpu: bool
) -> dict[str, Setting]:
    settings, environ = request.settings, request.environ
    added = request.common_environment(processes * settings.num_machines)
    if "OMP_NUM_THREADS" not in added and "OMP_NUM_THREADS" not in environ:
        threads = max(1, machine.cores // processes)
        added["OMP_NUM_THREADS"] = Setting(str(threads), f"{machine.cores} cores over {processes} processes")
    if on_cpu and "DS_ACCELERATOR" not in environ:
        why = "the run is on the CPU" if machine.gpus else "this machine has no GPU"
        added["DS_ACCELERATOR"] = Setting("cpu", f"for DeepSpeed: {why}")
    if on_cpu and machine.gpus and request.on_deepspeed:
        added["CUDA_VISIBLE_DEVICES"] = Setting("", "ZeRO on the CPU: Accelerate would use any visible GPU")
    if settings.gpu_ids != "all" and not on_cpu:
        ids = _visible_ids(settings.gpu_ids, environ.get("CUDA_VISIBLE_DEVICES"))
        added["CUDA_VISIBLE_DEVICES"] = Setting(ids, request.where("gpu_ids"))
    host = network.host_of(rendezvous.endpoint)
    reason = f"the network interface through which this machine reaches {host}"
    if rendezvous.backend == LOOPBACK:
        reason = "the run is on this machine only: other machines cannot reach any of its ports"
    variables = network.network_variables(host, nccl=not on_cpu)
    return added | {name: Setting(value, reason) for name, value in variables.items() if name not in environ}


def _visible_ids(wanted: str, seen: str | None) -> str:
    """Convert `gpu_ids`, which count this process's visible GPUs, to the driver's names. Other GPUs are other jobs'."""
    if not seen:
        return wanted
    names = [name.strip() for name in seen.split(",")]
    return ",".join(names[int(number)] for number in wanted.split(","))


def with_plan(document: Document, facts: Facts, model: str | None, sequence_length: int | None) -> Facts:
    """Add a plan to the facts if the document waits for one and a model is named.

    A plan also needs a GPU here or a stated `gpu_memory`. Without these conditions the facts are returned unchanged.

    Args:
        document: checked.
        facts: what is known about the run.
        model: see `ModelSource.model`.
        sequence_length: tokens of one sample; None: `usual_length`.

    Raises:
        ConfigError: the model does not exist, or no setup fits.
    """
    on_gpu = facts.machine.accelerator == "cuda" and hardware.has_gpu_driver()
    if model is None or not (on_gpu or launch_settings(document).gpu_memory is not None):
        return facts
    return _plan(document, facts, model, sequence_length)


def plan_launch(
    document: Document, model: str, sequence_length: int | None, gpus: int
) -> tuple[Document, Sequence[str]]:
    """Fill the document's open fields with a plan's choices. Return the document, and a sentence on each choice.

    Args:
        document: checked.
        model: see `ModelSource`.
        sequence_length: tokens of one sample; None: `usual_length`.
        gpus: GPUs of this machine that the workers would see.

    Raises:
        ConfigError: the model does not exist, or no setup fits.
    """
    from zero_plugin.plan.run_plan import lay_plan

    settings = launch_settings(document)
    on_gpu = bool(gpus) and not asks_for_cpu(settings)
    processes = settings.num_processes or (gpus if on_gpu else 1) * settings.num_machines
    shared = sequence_parallel_size(document)
    machine = MachineFacts("cuda" if on_gpu else "cpu", processes // shared, fp16=on_gpu, shared_by=shared)
    facts = _plan(document, Facts(machine=machine, complete=False), model, sequence_length)
    if not facts.planned:
        return document, [f"--model {model}: a plan has no open field to fill"]
    logged = resolve(document, facts).logged
    return lay_plan(document, facts.planned), [line for line in logged if "by the plan" in line]


def _plan(document: Document, facts: Facts, model: str, sequence_length: int | None) -> Facts:
    """Add a plan to the facts if ZeRO is requested and waits for one."""
    from zero_plugin.plan.model_source import ModelSource
    from zero_plugin.plan.run_plan import plan_before_run, waits_for_plan

    settings = launch_settings(document)
    if not asks_for_deepspeed(document, settings) or not waits_for_plan(document, facts):
        return facts
    cluster = _find_cluster(document, settings, facts.machine.all_processes)
    planned = plan_before_run(document, facts, ModelSource(model), sequence_length, cluster)
    return replace(facts, planned=planned)


def _find_cluster(document: Document, settings: LaunchSettings, processes: int) -> Cluster:
    """Return the machines of a launch, with the stated memory. Without it, measure this machine and assume all alike.

    Args:
        document: names the folder of NVMe offload.
        settings: the document's launch part.
        processes: on all machines together.
    """
    from zero_plugin.plan.machines import state_cluster
    from zero_plugin.plan.run_plan import nvme_folder

    nodes = settings.num_machines
    each = max(1, processes // nodes)
    folder = nvme_folder(document.deepspeed)
    if settings.gpu_memory is not None and folder is None:
        host = settings.host_memory or hardware.available_cpu_memory()
        return state_cluster(
            gpu_memory=settings.gpu_memory, host_memory=host, gpus=each, nodes=nodes, network=settings.network
        )
    from zero_plugin.plan.speeds import measure_cluster  # imports torch

    here = measure_cluster(each, nodes, folder)
    return state_cluster(
        gpu_memory=settings.gpu_memory, host_memory=settings.host_memory, network=settings.network, here=here
    )


_JOB: Final = "the job"
_OF_THE_JOB: Final = ("machine_rank", "num_processes")  # a file serves all machines, and other jobs too


def fill_from_job(
    document: Document, environ: Mapping[str, str], rendezvous_endpoint: str | None = None
) -> tuple[Document, list[str]]:
    """Take the number of machines, this machine's rank and the meeting address from the job around this launcher.

    Flags override the job. A file overrides the job too, except for two keys. `machine_rank` comes from the job because
    all machines read the same file. `num_processes` comes from the job if the job states another number.

    Args:
        document: checked.
        environ: this process's environment.
        rendezvous_endpoint: `--rdzv_endpoint` if given. The machines then meet there.

    Returns:
        The document, and a note for each key of the file that the job overrides.

    Raises:
        ConfigError: the job would start several runs instead of one, or started the launcher on some machines only.
    """
    job = find_allocation(environ)
    typed = document.launch.get("num_machines")
    if job is None and typed is None and ":" in (machines := environ.get(KUBERNETES.machines, "")):
        fix = (
            "Start the script with `torchrun`, which reads it; or add --num_machines, --min_machines, --rdzv_backend "
            "c10d and --rdzv_endpoint; or --num_machines 1, to use this container alone."
        )
        raise ConfigError(
            [Problem(KUBERNETES.machines, "", f"{machines}: this job has a changing number of machines", fix)]
        )
    if job is None or (typed is not None and typed.origin.kind in ("flag", "code") and typed.value == 1):
        return document, []
    if problems := list(_problems(document, job)):
        raise ConfigError(problems)
    if job.machines == 1:
        return document, []
    known: dict[str, tuple[Any, str]] = {"num_machines": (job.machines, job.sources["machines"])}
    if document.launch.value("rdzv_backend") in (None, AUTO, "static"):
        known["machine_rank"] = (job.machine_rank, job.sources["rank"])
    if job.main_address and not rendezvous_endpoint:
        known["main_process_ip"] = (job.main_address, f"the first of {job.sources['address']}")
        known["main_process_port"] = (job.port, "derived from the job's number or variables")
    if job.processes is not None:
        known["num_processes"] = (job.processes, job.sources["processes"])
    filled: dict[KeyPath, Entry] = {}
    notes = []
    for key, (value, source) in known.items():
        entry = document.launch.get(key)
        gives_way = key in _OF_THE_JOB and entry is not None and entry.origin.kind == "file"
        if entry is None or entry.value in (None, AUTO) or gives_way:
            filled[key,] = Entry(value, Origin("rule", source, f"of {_JOB}"))
        if gives_way and entry is not None and entry.value not in (None, AUTO, value):
            notes.append(f"{key}: using {value} from {source} instead of {entry.value} at {entry.origin.where}")
    before = {(problem.where, problem.key, problem.message) for problem in contradictions(document)}
    kept = tuple(note for note in document.notes if (note.where, note.key, note.message) not in before)
    document = replace(document.lay(filled), notes=kept)
    return replace(document, notes=check_document(document)), notes


def _problems(document: Document, job: Allocation) -> Iterator[Problem]:
    typed = document.launch.get("num_machines")
    where, machines = job.sources["machines"], f"{job.machines} machine{'s' if job.machines > 1 else ''}"
    if job.machine_rank is None:
        fix = (
            "Write `srun --ntasks-per-node=1 zero-plugin launch …`; or add --num_machines 1, to use this machine alone."
        )
        yield Problem(where, "", f"this job has {machines}, and the launcher was started on one of them only", fix)
    elif job.launchers_here > 1:
        fix = (
            "Start one launcher per machine (srun --ntasks-per-node=1, mpirun --map-by ppr:1:node), which starts the "
            "processes; or start the script itself this often, without zero-plugin launch. For separate runs add "
            "--num_machines 1."
        )
        yield Problem(where, "", f"{_JOB} started {job.launchers_here} launchers on this machine", fix)
    elif typed is not None and typed.value not in (None, AUTO, job.machines):
        message = f"{typed.value}, but {_JOB} started this on {machines} ({where})"
        fix = "Delete it; or add --num_machines 1, for a separate run on each machine."
        yield Problem(typed.origin.where, "num_machines", message, fix)
