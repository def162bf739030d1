"""Run DeepSpeed's other training modes under this package on CPUs: each key, at each stage, in a real run.

    python benchmarks/modes.py
    python benchmarks/modes.py --only muon zero_hpz_partition_size

Two processes train a small decoder for six micro-batches, accumulated by three and clipped, with the mode and without
it. A cell contains one of three results: the distance of the weights from those without the mode, as a fraction of what
was learned; the kind of error; or, after `–`, the reason for a refusal. A mode that changes numbers on purpose, like
quantized weights, differs by its loss of accuracy. Another optimizer is compared with itself at stage 0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

MODES: dict[str, dict[str, Any]] = {
    "sequence_parallel_size": {"sequence_parallel_size": 2},
    "torch_autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "muon": {
        "optimizer": {"type": "Muon", "params": {"lr": 0.02}},
        "zero_optimization": {"reduce_scatter": False},
    },
    "hybrid_engine": {"hybrid_engine": {"enabled": True}},
    "zero_hpz_partition_size": {"zero_optimization": {"zero_hpz_partition_size": 2}},
    "zero_quantized_weights": {"zero_optimization": {"zero_quantized_weights": True}},
    "zero_quantized_gradients": {"zero_optimization": {"zero_quantized_gradients": True}},
    "overlap_comm": {"zero_optimization": {"overlap_comm": True}},
    "expert_parallel": {"expert_parallel": {"enabled": True, "autoep_size": 2}},
    "tensor_parallel": {"tensor_parallel": {"autotp_size": 2}},
    "deepcompile": {"compile": {"deepcompile": True}},
    "zenflow": {"zero_optimization": {"zenflow": {"topk_ratio": 0.1, "update_interval": 2}}},
    "super_offload": {"zero_optimization": {"offload_optimizer": {"device": "cpu", "super_offload": True}}},
    "pipeline": {"pipeline": {"stages": 2}},
    "random_ltd": {
        "data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": {"enabled": True}}}
    },
    "coalesce_grad_reduction": {"zero_optimization": {"coalesce_grad_reduction": True}},
}
STAGES = (0, 1, 2, 3)


def make_model() -> nn.Module:
    """Build a Llama of two layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, use_cache=False, bos_token_id=0, **sizes))


def train(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights after two steps, on every process."""
    from zero_plugin import Accelerator, DummyOptim

    samples = torch.randint(64, (24, 16), generator=torch.Generator().manual_seed(1))
    described = "optimizer" in config
    base = {"distributed_type": "DEEPSPEED", "use_cpu": True, "num_processes": 2}
    accelerator = Accelerator(
        config={**base, "deepspeed_config": {**config, "gradient_accumulation_steps": 3, "gradient_clipping": 1.0}}
    )
    model = make_model()
    optimizer = DummyOptim(model.parameters()) if described else torch.optim.AdamW(model.parameters(), lr=1e-2)
    # Only half as many groups exist if processes share samples. They take the same global batch in twice the samples.
    size = 2 * config.get("sequence_parallel_size", 1)
    loader = torch.utils.data.DataLoader(samples, batch_size=size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for ids in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=ids, labels=ids).loss)
            optimizer.step()
            optimizer.zero_grad()
    state = [accelerator.get_state_dict(model)]
    dist.broadcast_object_list(state)
    accelerator.end_training()
    return {name: value.float() for name, value in state[0].items()}


def merged(config: dict[str, Any], mode: dict[str, Any]) -> dict[str, Any]:
    """Merge both configurations, section by section."""
    found = dict(config)
    for key, value in mode.items():
        found[key] = merged(found.get(key, {}), value) if isinstance(value, dict) else value
    return found


def outcome(mode: dict[str, Any], stage: int) -> str:
    """Return the result of the mode at a stage."""
    from zero_plugin.errors import ConfigError, ZeroPluginError

    plain: dict[str, Any] = {"zero_optimization": {"stage": stage}}
    start = {name: value.detach().float() for name, value in make_model().state_dict().items()}
    wanted = train(merged({"zero_optimization": {"stage": 0}}, mode) if "optimizer" in mode else plain)
    try:
        found = train(merged(plain, mode))
    except ConfigError as error:
        problem = error.problems[0]
        return f"–: {problem.key} {problem.message}"
    except ZeroPluginError as error:
        return f"–: {str(error).splitlines()[0]}"
    except Exception as error:  # noqa: BLE001 - the table shows whatever DeepSpeed raises
        return f"fails: {type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
    learned = sum(float((wanted[name] - start[name]).square().sum()) for name in wanted) ** 0.5
    apart = sum(float((wanted[name] - found[name]).square().sum()) for name in wanted) ** 0.5
    return f"{apart / learned:.1g}"


def run(name: str, stage: int) -> str:
    """Return the outcome of a mode at a stage, from two new processes."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        command += [__file__, "--worker", file.name, name, str(stage)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
        except subprocess.TimeoutExpired:
            return "does not end"
        text = Path(file.name).read_text()
        if done.returncode and not text:
            lines = [line for line in done.stderr.splitlines() if "Error" in line]
            return f"ends the process: {lines[-1][:160] if lines else done.returncode}"
        return str(json.loads(text))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--stages", nargs="+", type=int, choices=STAGES, default=list(STAGES))
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        file, name, stage = options.worker
        found = outcome(MODES[name], int(stage))
        if os.environ["RANK"] == "0":
            Path(file).write_text(json.dumps(found))
        return
    print(f"| mode | {' | '.join(f'stage {stage}' for stage in options.stages)} |\n|---|{'---|' * len(options.stages)}")
    for name in options.only:
        print(f"| {name} | {' | '.join(run(name, stage) for stage in options.stages)} |", flush=True)


if __name__ == "__main__":
    main()
