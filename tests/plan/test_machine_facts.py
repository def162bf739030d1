import pytest
import torch

from zero_plugin.plan.run_plan import probe_machine


def test_this_machine():
    """The facts have torch's device and the given number of processes."""
    facts = probe_machine(processes=3)
    assert facts.accelerator == ("cuda" if torch.cuda.is_available() else "cpu")
    assert facts.processes == 3


@pytest.mark.parametrize(("kind", "fp16"), [("cpu", False), ("xla", False), ("cuda", True)])
def test_fp16_runs_on_gpus_only(kind, fp16):
    """DeepSpeed refuses fp16 on a CPU, and a TPU has none."""
    assert probe_machine(kind).fp16 is fp16
