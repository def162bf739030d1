"""Each contradiction: the place and words of its finding, and the legal configuration next to it."""

# ruff: noqa: E501 - a case is a line, so the table can be read as one

from __future__ import annotations

from pathlib import Path

import pytest

from zero_plugin.config.check import check_document, find_problems
from zero_plugin.config.read import read_document
from zero_plugin.config.rules.training import Asked
from zero_plugin.errors import ConfigError, Problem
from zero_plugin.launch.flags import document_from_flags

ZERO = '"zero_optimization": {'
ZERO_0, ZERO_1, ZERO_2, ZERO_3 = (f'{ZERO}"stage": {stage}, ' for stage in range(4))
YAML = "distributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config:\n"
CPU = '"offload_optimizer": {"device": "cpu"}'
FLOW = '"zenflow": {"topk_ratio": 0.2'
DROPPING = (
    '"enabled": true, "total_layer_num": 2, "random_ltd_layer_num": 1, "random_ltd_schedule": {"min_value": 1, '
    '"max_value": 4, "schedule_type": "fixed_linear", "schedule_config": {"require_steps": 4, "seq_per_step": 1}}'
)

# (problem, severity, the file's text, the finding's line, a piece of the text, its legal replacement)
CONTRADICTIONS = [
    # --- precision
    ("fp16 and bf16", "error", '{"fp16": {"enabled": true}, "bf16": {"enabled": true}}', "c.json:1:38: bf16.enabled: true, and fp16.enabled is true at c.json:1:11", '"bf16": {"enabled": true}', '"bf16": {"enabled": false}'),
    ("mixed_precision against a section", "error", "mixed_precision: bf16\n" + YAML + "  fp16: {enabled: true}\n", "c.yaml:5:10: fp16.enabled: true, but mixed_precision is bf16 at c.yaml:1:1", 'fp16: {enabled: true}', 'fp16: {enabled: auto}'),
    ("no precision against a section", "error", "mixed_precision: 'no'\n" + YAML + "  bf16: {enabled: true}\n", "c.yaml:5:10: bf16.enabled: true, but mixed_precision is no at c.yaml:1:1", "mixed_precision: 'no'", 'mixed_precision: auto'),
    ("a loss scale without fp16", "warning", '{"bf16": {"enabled": true}, "fp16": {"loss_scale": 128}}', "c.json:1:38: fp16.loss_scale = 128: has no effect: fp16 is off", '"loss_scale": 128', '"loss_scale": 0'),
    ("an overflow check without bf16", "warning", '{"fp16": {"enabled": true}, "bf16": {"check_grad_overflow": false}}', "c.json:1:38: bf16.check_grad_overflow = false: has no effect: bf16 is off", 'false', 'true'),
    ("an overflow check of ZeRO in fp32", "warning", "mixed_precision: 'no'\n" + YAML + "  bf16: {check_grad_overflow: false}\n", "c.yaml:5:10: bf16.check_grad_overflow = false: has no effect: bf16 is off", "DEEPSPEED", "MULTI_GPU"),
    ("a cast of inputs to what is off", "error", '{"bf16": {"enabled": true}, "fp16": {"auto_cast": true}}', "c.json:1:38: fp16.auto_cast: true, but fp16 is off, and DeepSpeed rounds the model's inputs to fp16 all the same", '"auto_cast": true', '"auto_cast": false'),
    ("a cast in fp32", "warning", "mixed_precision: 'no'\n" + YAML + "  data_types: {buffer_dtype: fp16}\n", 'c.yaml:5:16: data_types.buffer_dtype = "fp16": has no effect: the model is in fp32, and DeepSpeed casts nothing of it', "mixed_precision: 'no'", 'mixed_precision: bf16'),
    ("dynamic scaling of a fixed scale", "warning", '{"fp16": {"enabled": true, "loss_scale": 128, "hysteresis": 4}}', "c.json:1:47: fp16.hysteresis = 4: has no effect: fp16.loss_scale is a fixed 128 at c.json:1:28", '128', '0'),
    ("a scale window of nothing", "error", '{"fp16": {"enabled": true, "loss_scale_window": 0}}', "c.json:1:28: fp16.loss_scale_window: 0, which DeepSpeed refuses while the loss scale is dynamic (fp16.loss_scale 0)", '0}', '500}'),
    ("a lowest scale of nothing", "error", '{"fp16": {"enabled": true, "min_loss_scale": 0}}', "c.json:1:28: fp16.min_loss_scale: 0, which DeepSpeed refuses while the loss scale is dynamic (fp16.loss_scale 0)", '0}', '2}'),
    ("master weights in both halves", "error", '{' + ZERO_2 + CPU + '}, "fp16": {"fp16_master_weights_and_grads": true}, "bf16": {"bf16_master_weights_and_grads": true}}', "c.json:1:135: bf16.bf16_master_weights_and_grads: true, and fp16.fp16_master_weights_and_grads is true at c.json:1:86", '"bf16_master_weights_and_grads": true', '"bf16_master_weights_and_grads": false'),
    ("master weights of the other half", "error", '{' + ZERO_2 + CPU + '}, "bf16": {"enabled": true}, "fp16": {"fp16_master_weights_and_grads": true}}', "c.json:1:113: fp16.fp16_master_weights_and_grads: true, but fp16 is off: fp16 master weights belong to a fp16 model", '"bf16": {"enabled": true}, "fp16": {', '"fp16": {"enabled": true, '),
    ("master weights without ZeRO", "error", '{"bf16": {"enabled": true, "bf16_master_weights_and_grads": true}}', "c.json:1:28: bf16.bf16_master_weights_and_grads: true needs ZeRO stage 1, 2 or 3, but the stage is 0 where none is written", '{"bf16"', '{"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}, "bf16"'),
    ("master weights without offload", "error", '{' + ZERO_2[:-2] + '}, "bf16": {"enabled": true, "bf16_master_weights_and_grads": true}}', "c.json:1:63: bf16.bf16_master_weights_and_grads: true needs the optimizer offloaded, because only DeepSpeed's CPU Adam steps 16-bit master weights", '"bf16_master_weights_and_grads": true', '"bf16_master_weights_and_grads": true, "bf16_optimizer_states": true'),
    ("master weights for another optimizer", "error", '{' + ZERO_2 + CPU + '}, "bf16": {"enabled": true, "bf16_master_weights_and_grads": true}, "optimizer": {"type": "Lion"}}', "c.json:1:157: optimizer.type: \"Lion\", but bf16.bf16_master_weights_and_grads at c.json:1:103 needs DeepSpeed's CPU Adam", 'Lion', 'AdamW'),
    ("master weights for torch's Adam", "error", '{' + ZERO_2 + CPU + '}, "bf16": {"enabled": true, "bf16_master_weights_and_grads": true}, "optimizer": {"type": "Adam", "params": {"torch_adam": true}}}', "c.json:1:184: optimizer.params.torch_adam: true, but bf16.bf16_master_weights_and_grads at c.json:1:103 needs DeepSpeed's CPU Adam", '"torch_adam": true', '"torch_adam": false'),
    ("optimizer states without master weights", "error", '{' + ZERO_2[:-2] + '}, "bf16": {"enabled": true, "bf16_optimizer_states": true}}', "c.json:1:63: bf16.bf16_optimizer_states: true, but it needs bf16.bf16_master_weights_and_grads: true", '"bf16_optimizer_states": true', '"bf16_optimizer_states": false'),
    ("parameters of another type", "error", '{"bf16": {"enabled": true}, "data_types": {"param_dtype": "fp32"}}', "c.json:1:44: data_types.param_dtype: fp32, but the model is in bf16: precision is bf16", 'fp32', 'bf16'),
    ("sums of another type without ZeRO", "error", '{' + ZERO_0[:-2] + '}, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}}', "c.json:1:79: data_types.grad_accum_dtype: fp32 with a model in bf16 needs ZeRO, but the stage is 0 at c.json:1:24", '"stage": 0', '"stage": 1'),
    ("sums of another type at stage 2", "error", '{' + ZERO_2[:-2] + '}, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp16"}}', "c.json:1:79: data_types.grad_accum_dtype: fp16 with a model in bf16, but stage 2 sums gradients in fp32 or in the model's type", 'fp16', 'fp32'),
    ("modules of an autocast without ZeRO", "warning", '{' + ZERO_0[:-2] + '}, "torch_autocast": {"enabled": true, "lower_precision_safe_modules": ["torch.nn.Linear"]}}', "c.json:1:73: torch_autocast.lower_precision_safe_modules = [\"torch.nn.Linear\"]: has no effect: only stages 1, 2 and 3 read it, and the stage is 0 at c.json:1:24", '"stage": 0', '"stage": 1'),
    ("autocast and quantized weights", "error", '{' + ZERO_3 + '"zero_quantized_weights": true}, "torch_autocast": {"enabled": true}}', "c.json:1:36: zero_optimization.zero_quantized_weights: true and torch_autocast.enabled: true at c.json:1:88", '"enabled": true', '"enabled": false'),
    # --- offload
    ("optimizer offload without ZeRO", "error", '{' + ZERO_0 + CPU + '}}', "c.json:1:58: zero_optimization.offload_optimizer.device: cpu needs ZeRO stage 1, but the stage is 0 at c.json:1:24", '"stage": 0', '"stage": 1'),
    ("parameter offload at stage 2", "error", YAML + "  zero_stage: 2\n  offload_param_device: cpu\n", "c.yaml:5:3: offload_param_device: cpu needs ZeRO stage 3, but the stage is 2 at c.yaml:4:3", 'zero_stage: 2', 'zero_stage: 3'),
    ("NVMe at stage 2", "error", '{' + ZERO_2 + '"offload_optimizer": {"device": "nvme", "nvme_path": "/n"}}}', "c.json:1:58: zero_optimization.offload_optimizer.device: nvme needs ZeRO stage 3, but the stage is 2 at c.json:1:24", '"stage": 2', '"stage": 3'),
    ("NVMe without a path", "error", YAML + "  zero_stage: 3\n  offload_param_device: nvme\n", "c.yaml:5:3: offload_param_device: nvme without a path", 'device: nvme', 'device: nvme\n  offload_param_nvme_path: /n'),
    ("a path without NVMe", "warning", '{' + ZERO_3 + '"offload_param": {"device": "cpu", "nvme_path": "/n"}}}', 'c.json:1:71: zero_optimization.offload_param.nvme_path = "/n": has no effect: the device is cpu at c.json:1:54', '"cpu"', '"nvme"'),
    ("a buffer without NVMe", "warning", '{' + ZERO_3 + '"offload_param": {"device": "cpu", "buffer_size": 1000}}}', "c.json:1:71: zero_optimization.offload_param.buffer_size = 1000: has no effect: the device is cpu at c.json:1:54", '"device": "cpu"', '"device": "nvme", "nvme_path": "/n"'),
    ("pinning of nothing", "warning", '{' + ZERO_2 + '"offload_optimizer": {"device": "none", "pin_memory": false}}}', "c.json:1:76: zero_optimization.offload_optimizer.pin_memory = false: has no effect: the device is none at c.json:1:58", 'none', 'cpu'),
    ("a ratio at stage 2", "error", '{' + ZERO_2 + '"offload_optimizer": {"device": "cpu", "ratio": 0.3}}}', "c.json:1:75: zero_optimization.offload_optimizer.ratio: 0.3 needs ZeRO stage 3, but the stage is 2 at c.json:1:24", '"ratio": 0.3', '"ratio": 1.0'),
    ("a ratio for another optimizer", "error", '{' + ZERO_3 + '"sub_group_size": 1000, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}, "optimizer": {"type": "Lion"}}', "c.json:1:99: zero_optimization.offload_optimizer.ratio: 0.3, but only DeepSpeed's own Adam steps on CPU and GPU at the same time", 'Lion', 'Adam'),
    ("a ratio of one sub-group", "warning", '{' + ZERO_3 + '"offload_optimizer": {"device": "cpu", "ratio": 0.3}}}', "c.json:1:75: zero_optimization.offload_optimizer.ratio: 0.3 splits off full sub-groups, and zero_optimization.sub_group_size is 1e9 where none is written. A smaller share per process is one group, all of which goes to the CPU", '"offload_optimizer"', '"sub_group_size": 1000, "offload_optimizer"'),
    ("a ratio of nothing", "warning", '{' + ZERO_3 + '"offload_optimizer": {"device": "none", "ratio": 0.3}}}', "c.json:1:76: zero_optimization.offload_optimizer.ratio = 0.3: has no effect: the device is none at c.json:1:58", '"device": "none", "ratio": 0.3', '"device": "none"'),
    ("a ratio of what is on nvme", "warning", '{' + ZERO_3 + '"sub_group_size": 1000, "offload_optimizer": {"device": "nvme", "nvme_path": "/n", "ratio": 0.3}}}', "c.json:1:119: zero_optimization.offload_optimizer.ratio = 0.3: has no effect: an optimizer on nvme updates all parameters on the CPU", ', "ratio": 0.3', ''),
    ("a ratio on a CPU", "warning", "use_cpu: true\n" + YAML + "  zero_optimization: {stage: 3, sub_group_size: 1000, offload_optimizer: {device: cpu, ratio: 0.3}}\n", "c.yaml:5:88: zero_optimization.offload_optimizer.ratio = 0.3: has no effect: there is no other device than the CPU, as use_cpu is true at c.yaml:1:1", 'ratio: 0.3', 'ratio: 1.0'),
    ("super offload", "error", '{' + ZERO_3 + '"offload_optimizer": {"device": "cpu", "super_offload": true}}}', "c.json:1:75: zero_optimization.offload_optimizer.super_offload: true, but its steps on the CPU begin inside backward(), before the loop asks for a step", '"super_offload": true', '"super_offload": false'),
    ("cores without super offload", "warning", '{' + ZERO_3 + '"offload_optimizer": {"device": "cpu", "cpuadam_cores_perc": 0.5}}}', "c.json:1:75: zero_optimization.offload_optimizer.cpuadam_cores_perc = 0.5: has no effect: only super_offload: true reads it, which is not supported", '"cpuadam_cores_perc": 0.5', '"pin_memory": true'),
    ("aio without NVMe", "warning", '{"aio": {"queue_depth": 32}, ' + ZERO_3 + CPU + '}}', "c.json:1:10: aio.queue_depth = 32: has no effect: nothing is offloaded to nvme", '"device": "cpu"', '"device": "nvme", "nvme_path": "/n"'),
    # --- experts and monitors
    ("experts over processes", "error", YAML + "  zero_stage: 2\n  expert_parallel: {enabled: true, autoep_size: 2}\n", "c.yaml:5:21: expert_parallel.enabled: true is not supported: DeepSpeed's layers for it have other parameters than the model's, which no checkpoint would hold", 'enabled: true', 'enabled: false'),
    ("a mode that Comet does not have", "error", '{"comet": {"enabled": true, "mode": "sometimes"}}', 'c.json:1:29: comet.mode: "sometimes" is no mode of Comet\'s', 'sometimes', 'get_or_create'),
    ("an experiment that Comet cannot have", "error", '{"comet": {"enabled": true, "experiment_key": "run-1"}}', 'c.json:1:29: comet.experiment_key: "run-1" is no key of Comet\'s: 32 to 50 letters and digits', 'run-1', 'a' * 32),
    # --- stages
    ("a key of stage 3 at stage 2", "warning", '{' + ZERO_2 + '"stage3_max_live_parameters": 1000}}', "c.json:1:36: zero_optimization.stage3_max_live_parameters = 1000: has no effect: only stage 3 reads it, and the stage is 2 at c.json:1:24", '"stage": 2', '"stage": 3'),
    ("a saved model of stage 3 at stage 2", "warning", YAML + "  zero_stage: 2\n  zero3_save_16bit_model: true\n", "c.yaml:5:3: zero3_save_16bit_model = true: has no effect: only stage 3 reads it, and the stage is 2 at c.yaml:4:3", 'zero_stage: 2', 'zero_stage: 3'),
    ("ZeRO++ at stage 2", "warning", '{' + ZERO_2 + '"zero_quantized_gradients": true}}', "c.json:1:36: zero_optimization.zero_quantized_gradients = true: has no effect: only stage 3 reads it, and the stage is 2 at c.json:1:24", 'true', 'false'),
    ("a leaf module at stage 2", "warning", '{' + ZERO_2 + '"leaf_module": {"names": ["a"]}}}', 'c.json:1:52: zero_optimization.leaf_module.names = ["a"]: has no effect: only stage 3 reads it, and the stage is 2 at c.json:1:24', '"stage": 2', '"stage": 3'),
    ("round robin at stage 3", "warning", '{' + ZERO_3 + '"round_robin_gradients": true}}', "c.json:1:36: zero_optimization.round_robin_gradients = true: has no effect: only stages 1 and 2 read it, and the stage is 3 at c.json:1:24", '"stage": 3', '"stage": 2'),
    ("overlap at stage 1", "warning", '{' + ZERO_1 + '"overlap_comm": true}}', "c.json:1:36: zero_optimization.overlap_comm = true: has no effect: only stages 2 and 3 read it, and the stage is 1 at c.json:1:24", '"stage": 1', '"stage": 2'),
    ("a bucket without ZeRO", "warning", '{' + ZERO + '"reduce_bucket_size": 1000}}', "c.json:1:24: zero_optimization.reduce_bucket_size = 1000: has no effect: only stages 1, 2 and 3 read it, and the stage is 0 where none is written", '"zero_optimization": {', '"zero_optimization": {"stage": 1, '),
    ("a key that nothing reads", "warning", '{' + ZERO_2 + '"allgather_partitions": false}}', "c.json:1:36: zero_optimization.allgather_partitions = false: has no effect: DeepSpeed parses it and never reads it", 'false', 'true'),
    ("prescaling at stage 2", "error", '{"prescale_gradients": true, ' + ZERO_2[:-2] + "}}", "c.json:1:2: prescale_gradients: true while ZeRO reduces by reduce_scatter", '"stage": 2', '"stage": 2, "reduce_scatter": false'),
    ("prescaling at stage 1", "warning", '{"prescale_gradients": true, ' + ZERO_1[:-2] + "}}", "c.json:1:2: prescale_gradients = true: has no effect: ZeRO reduces by reduce_scatter", '"stage": 1', '"stage": 1, "reduce_scatter": false'),
    ("predividing at stage 3", "error", '{"gradient_predivide_factor": 2.0, ' + ZERO_3[:-2] + "}}", "c.json:1:2: gradient_predivide_factor: 2.0 while ZeRO reduces by reduce_scatter", '2.0', '1.0'),
    ("predividing and prescaling", "warning", '{"prescale_gradients": true, "gradient_predivide_factor": 2.0}', "c.json:1:30: gradient_predivide_factor = 2.0: has no effect: prescale_gradients is true at c.json:1:2", '"prescale_gradients": true, ', ''),
    ("a sum at stage 3", "error", '{"gradient_allreduce_op": "sum", ' + ZERO_3[:-2] + "}}", "c.json:1:2: gradient_allreduce_op: sum is refused at ZeRO stage 3, and the stage is 3 at c.json:1:56", 'sum', 'mean'),
    ("a sum of shared samples", "error", '{"gradient_allreduce_op": "sum", "sequence_parallel_size": 2, ' + ZERO_2[:-2] + "}}", "c.json:1:2: gradient_allreduce_op: sum is refused with sequence_parallel_size 2: it would count each sample 2 times", '"sum"', '"mean"'),
    ("an odd bucket", "error", '{' + ZERO_2 + '"allgather_bucket_size": 1001}}', "c.json:1:36: zero_optimization.allgather_bucket_size: 1001 is odd, which DeepSpeed refuses at stage 2", '1001', '"auto"'),
    ("a bucket that nothing fills", "warning", '{' + ZERO_2 + '"allgather_bucket_size": 1000}}', "c.json:1:36: zero_optimization.allgather_bucket_size = 1000: has no effect: DeepSpeed gathers all updated parameters of a group together, in place", '1000', '"auto"'),
    ("nodes of another size", "error", YAML + "  zero_optimization: {stage: 3, zero_hpz_partition_size: 3}\n", "c.yaml:4:33: zero_optimization.zero_hpz_partition_size: 3 does not divide num_processes 4", 'size: 3', 'size: 2'),
    ("quantized gradients without scattering", "error", '{' + ZERO_3 + '"zero_quantized_gradients": true, "reduce_scatter": false}}', "c.json:1:36: zero_optimization.zero_quantized_gradients: true needs reduce_scatter, which is false at c.json:1:70", ', "reduce_scatter": false', ''),
    ("quantized weights on a CPU", "error", "use_cpu: true\n" + YAML + "  zero_optimization: {stage: 3, zero_quantized_weights: true}\n", "c.yaml:5:33: zero_optimization.zero_quantized_weights: true needs a GPU, but use_cpu is true at c.yaml:1:1", 'weights: true', 'weights: false'),
    ("no norm at stage 3", "error", '{' + ZERO_3 + '"compute_grad_norm": false}, "gradient_clipping": 0}', "c.json:1:36: zero_optimization.compute_grad_norm: false needs ZeRO stage 1 or 2, but the stage is 3 at c.json:1:24", '"stage": 3', '"stage": 2'),
    ("no norm to clip", "error", '{' + ZERO_2 + '"compute_grad_norm": false}, "gradient_clipping": 1.0}', "c.json:1:36: zero_optimization.compute_grad_norm: false but gradient_clipping is 1.0, which needs the norm", '1.0', '0'),
    ("no norm with offload", "error", '{' + ZERO_2 + '"compute_grad_norm": false, ' + CPU + '}}', "c.json:1:36: zero_optimization.compute_grad_norm: false does not go with an offloaded optimizer", '"compute_grad_norm": false', '"compute_grad_norm": true'),
    ("no norm of fp32 sums", "error", '{' + ZERO_1 + '"compute_grad_norm": false}, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}}', "c.json:1:36: zero_optimization.compute_grad_norm: false does not go with bf16 and data_types.grad_accum_dtype: fp32 at stage 1", '"stage": 1', '"stage": 2'),
    # --- zenflow
    ("zenflow", "error", '{' + ZERO_2 + CPU + ', ' + FLOW + '}}}', "c.json:1:76: zero_optimization.zenflow: is not supported: its engine decides which backwards update the weights, and here the loop does", ', ' + FLOW + '}', ''),
    ("unused parameters of an optimizer on the device", "warning", '{' + ZERO_2 + '"ignore_unused_parameters": false}}', "c.json:1:36: zero_optimization.ignore_unused_parameters = false: has no effect: parameters without gradient are found only if the optimizer is offloaded to CPU", 'false', 'true'),
    ("chosen operations beside all", "warning", '{"comms_logger": {"enabled": true, "prof_all": true, "prof_ops": ["all_reduce"]}}', "c.json:1:54: comms_logger.prof_ops = [\"all_reduce\"]: has no effect: comms_logger.prof_all is true, as it is where nothing is written, and logs every operation", '"prof_all": true', '"prof_all": false'),
    ("dropped tokens without their switch", "warning", '{"data_efficiency": {"enabled": true, "data_routing": {"enabled": true, "random_ltd": {"total_layer_num": 3}}}}', "c.json:1:88: data_efficiency.data_routing.random_ltd.total_layer_num = 3: has no effect: data_efficiency.data_routing.random_ltd.enabled is not written, and is false then", '"total_layer_num": 3', '"enabled": false, "total_layer_num": 3'),
    ("dropped tokens of a batch", "warning", '{"data_efficiency": {"enabled": true, "data_routing": {"enabled": true, "random_ltd": {"micro_batch_size": 3, ' + DROPPING + '}}}}', "c.json:1:88: data_efficiency.data_routing.random_ltd.micro_batch_size = 3: has no effect: DeepSpeed writes train_micro_batch_size_per_gpu over it", '"micro_batch_size": 3, ', ''),
    ("dropped tokens of no layers", "error", '{"data_efficiency": {"enabled": true, "data_routing": {"enabled": true, "random_ltd": {"enabled": true}}}}', "c.json:1:88: data_efficiency.data_routing.random_ltd.enabled: true without total_layer_num, random_ltd_layer_num, random_ltd_schedule.min_value, random_ltd_schedule.max_value, random_ltd_schedule.schedule_type, random_ltd_schedule.schedule_config.require_steps, random_ltd_schedule.schedule_config.seq_per_step, which DeepSpeed refuses", '"enabled": true}}}}', DROPPING + '}}}}'),
    ("a schedule of tokens", "error", '{"data_efficiency": {"enabled": true, "data_routing": {"enabled": true, "random_ltd": {"layer_token_lr_schedule": {"enabled": true}, ' + DROPPING + '}}}}', "c.json:1:116: data_efficiency.data_routing.random_ltd.layer_token_lr_schedule.enabled: true, which DeepSpeed has not implemented", 'lr_schedule": {"enabled": true', 'lr_schedule": {"enabled": false'),
    ("parts of a schedule of tokens", "warning", '{"data_efficiency": {"enabled": true, "data_routing": {"enabled": true, "random_ltd": {"layer_token_lr_schedule": {"warmup_layer_tokens": 3}, ' + DROPPING + '}}}}', "c.json:1:116: data_efficiency.data_routing.random_ltd.layer_token_lr_schedule.warmup_layer_tokens = 3: has no effect: DeepSpeed has not implemented the schedule", '{"warmup_layer_tokens": 3}', '{}'),
    ("an engine for generation on a CPU", "error", "use_cpu: true\ndeepspeed_config:\n  hybrid_engine: {enabled: true}\n", "c.yaml:3:19: hybrid_engine.enabled: true needs a GPU, but use_cpu is true at c.yaml:1:1", 'use_cpu: true', 'use_cpu: false'),
    ("dropped tokens on a CPU", "error", "use_cpu: true\ndeepspeed_config:\n  data_efficiency: {enabled: true, data_routing: {enabled: true, random_ltd: {" + DROPPING + "}}}\n", "c.yaml:3:79: data_efficiency.data_routing.random_ltd.enabled: true needs a GPU, but use_cpu is true at c.yaml:1:1", 'use_cpu: true', 'use_cpu: false'),
    ("dropped tokens of parts", "error", '{"sequence_parallel_size": 2, "data_efficiency": {"enabled": true, "data_routing": {"enabled": true, "random_ltd": {' + DROPPING + '}}}}', "c.json:1:117: data_efficiency.data_routing.random_ltd.enabled: true, but sequence_parallel_size is 2 at c.json:1:2, and layers would drop tokens of each part separately", '"sequence_parallel_size": 2', '"sequence_parallel_size": 1'),
    ("a fast start without parameters on nvme", "warning", '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "swap", "fast_init": true}}}', "c.json:1:97: zero_optimization.offload_optimizer.fast_init = true: has no effect: only parameters on NVMe are read by fast_init, and zero_optimization.offload_param.device is none", '"fast_init": true', '"fast_init": false'),
    ("lines that nobody sees", "warning", '{"steps_per_print": 10}', "c.json:1:2: steps_per_print = 10: has no effect: its lines are of level info, and log_level is warning where none is written", '{"steps', '{"log_level": "info", "steps'),
    ("calls that nobody sees", "warning", '{"log_level": "error", "comms_logger": {"enabled": true, "verbose": true}}', "c.json:1:58: comms_logger.verbose = true: has no effect: its lines are of level info, and log_level is error at c.json:1:2", '"error"', '"debug"'),
    ("a momentum of Muon's", "warning", '{' + ZERO_3 + '"save_muon_momentum_buffer_in_memory": true}, "optimizer": {"type": "AdamW"}}', "c.json:1:36: zero_optimization.save_muon_momentum_buffer_in_memory = true: has no effect: only optimizer.type: Muon reads it", 'true', 'false'),
    # --- batch
    ("batch arithmetic", "error", YAML + "  train_batch_size: 10\n  train_micro_batch_size_per_gpu: 3\n  gradient_accumulation_steps: 2\n", "c.yaml:4:3: train_batch_size: 10, but train_micro_batch_size_per_gpu 3 × gradient_accumulation_steps 2 × num_processes 4 = 24", '10', '24'),
    ("batch division", "error", '{"train_batch_size": 10, "train_micro_batch_size_per_gpu": 3}', "c.json:1:2: train_batch_size: 10 is not a multiple of train_micro_batch_size_per_gpu 3", '10', '12'),
    ("batch among processes", "error", YAML + "  train_batch_size: 10\n", "c.yaml:4:3: train_batch_size: 10 is not a multiple of num_processes 4", '10', '8'),
    # --- optimizer, schedule
    ("LBFGS", "error", '{"optimizer": {"type": "LBFGS"}}', "c.json:1:16: optimizer.type: LBFGS computes the loss itself, several times a step, and gradients come from accelerator.backward", 'LBFGS', 'SGD'),
    ("Lamb on a CPU", "error", "use_cpu: true\n" + YAML + "  zero_stage: 0\n  optimizer: {type: Lamb}\n", "c.yaml:6:15: optimizer.type: Lamb needs a GPU, but use_cpu is true at c.yaml:1:1", 'Lamb', 'Adam'),
    ("a scale that no file can hold", "warning", '{"scheduler": {"type": "CyclicLR", "params": {"base_lr": 0.1, "max_lr": 0.2, "scale_mode": "iterations"}}}', "c.json:1:78: scheduler.params.scale_mode = \"iterations\": has no effect: only scale_fn reads it, a function, which no file can hold", '"iterations"', '"cycle"'),
    ("Muon and clipping", "warning", '{' + ZERO_2[:-2] + '}, "optimizer": {"type": "Muon"}, "gradient_clipping": 0.5}', "c.json:1:68: gradient_clipping: 0.5, but the stage is 2 at c.json:1:24, where DeepSpeed clips the updates of Muon, not the gradients: the norm, not lr, then decides the length of a step", '"stage": 2', '"stage": 0'),
    ("Muon's foreach", "warning", '{"optimizer": {"type": "Muon", "params": {"foreach": true}}}', "c.json:1:43: optimizer.params.foreach: has no effect: DeepSpeed's Muon hands it to torch's Adam, with torch_adam: true", 'true', 'false'),
    ("Adagrad's amsgrad", "warning", '{' + ZERO_2 + CPU + '}, "optimizer": {"type": "Adagrad", "params": {"amsgrad": true}}}', "c.json:1:121: optimizer.params.amsgrad = true: has no effect: DeepSpeed's Adagrad on the CPU takes it and never reads it", 'true', 'false'),
    ("sparse gradients alone", "error", '{"optimizer": {"type": "SparseAdam"}}', "c.json:1:16: optimizer.type: SparseAdam only steps sparse gradients, and models that have them are refused under DeepSpeed", 'SparseAdam', 'Adam'),
    ("states of weights in fp32", "warning", '{"optimizer": {"type": "AdamW", "params": {"fp32_optimizer_states": false}}}', "c.json:1:44: optimizer.params.fp32_optimizer_states = false: has no effect: the weights that the optimizer steps are in fp32, and so are its states", 'false', 'true'),
    ("Lamb at stage 1", "error", '{' + ZERO_1[:-2] + '}, "optimizer": {"type": "Lamb"}}', "c.json:1:51: optimizer.type: Lamb scales each tensor's update by its norm, and ZeRO updates flat pieces of them; the stage is 1 at c.json:1:24. The weights would not be those of stage 0", '"stage": 1', '"stage": 0'),
    ("Lamb with a fixed scale", "error", '{"fp16": {"enabled": true, "loss_scale": 128}, "optimizer": {"type": "Lamb"}}', "c.json:1:28: fp16.loss_scale: 128, but DeepSpeed's Lamb needs a dynamic loss scale", '128', '0'),
    ("Muon scattering at stage 3", "error", '{' + ZERO_3[:-2] + '}, "optimizer": {"type": "Muon"}}', "c.json:1:51: optimizer.type: Muon at ZeRO stage 3 needs zero_optimization.reduce_scatter: false, and it is true", '"stage": 3', '"stage": 3, "reduce_scatter": false'),
    ("an untested optimizer that is not allowed", "error", '{' + ZERO_2[:-2] + '}, "zero_allow_untested_optimizer": false, "optimizer": {"type": "SGD"}}', "c.json:1:37: zero_allow_untested_optimizer: false, but DeepSpeed has not tried SGD with ZeRO and refuses it then", 'SGD', 'AdamW'),
    ("AdamW with L2 decay", "error", '{"optimizer": {"type": "AdamW", "params": {"adam_w_mode": false}}}', "c.json:1:44: optimizer.params.adam_w_mode: false, but the type is AdamW at c.json:1:16, which decays weights as AdamW does", 'AdamW', 'Adam'),
    ("clipping in the optimizer", "error", '{"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}}', "c.json:1:44: optimizer.params.max_grad_norm = 1.0: DeepSpeed refuses it here", '"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}', '"gradient_clipping": 1.0'),
    ("warm-up beyond the total", "error", '{"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10, "warmup_num_steps": 20}}}', "c.json:1:75: scheduler.params.warmup_num_steps: 20 steps of warm-up are more than the total_num_steps of 10", '20', '10'),
    ("a schedule that has begun", "error", '{"scheduler": {"type": "StepLR", "params": {"step_size": 1, "last_epoch": 3}}}', "c.json:1:61: scheduler.params.last_epoch: 3, but load_state() resumes a scheduler, in its own step", '3', '-1'),
    ("graphs on a CPU", "error", "use_cpu: true\n" + YAML + "  optimizer: {type: RMSprop, params: {capturable: true}}\n", "c.yaml:5:39: optimizer.params.capturable: true is for CUDA graphs, which need a GPU, but use_cpu is true at c.yaml:1:1", 'true}}', 'false}}'),
    ("a rate that the schedule sets", "warning", '{"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.2}}}', "c.json:1:44: optimizer.params.lr = 0.1: has no effect: the schedule sets the learning rate, up to warmup_max_lr 0.2 at c.json:1:102", '0.2', '0.1'),
    # --- parallel
    ("a rank beyond the machines", "error", "num_machines: 2\nmachine_rank: 2\nnum_processes: 4\n", "c.yaml:2:1: machine_rank: 2, but num_machines is 2 and ranks count from 0", 'rank: 2', 'rank: 1'),
    ("uneven machines", "error", "num_machines: 2\nnum_processes: 3\n", "c.yaml:2:1: num_processes: 3 processes do not divide among 2 machines", '3', '4'),
    ("fewer machines that are more", "error", "num_machines: 2\nmin_machines: 3\nrdzv_backend: c10d\nmax_restarts: 1\n", "c.yaml:2:1: min_machines: 3, but num_machines is 2", 'min_machines: 3', 'min_machines: 1'),
    ("fewer machines that met once", "error", "num_machines: 2\nmin_machines: 1\nmax_restarts: 1\n", "c.yaml:2:1: min_machines: 1 of 2, but the machines of a static rendezvous meet once", 'max_restarts', 'rdzv_backend: c10d\nmax_restarts'),
    ("fewer machines without a restart", "error", "num_machines: 2\nmin_machines: 1\nrdzv_backend: c10d\n", "c.yaml:2:1: min_machines: 1 of 2, but max_restarts is 0, and a lost machine is a failure", 'rdzv_backend', 'max_restarts: 1\nrdzv_backend'),
    ("several processes of one", "warning", "distributed_type: 'NO'\nnum_processes: 2\n", "c.yaml:2:1: num_processes: has no effect: 2, but distributed_type NO is one process", "'NO'", 'MULTI_CPU'),
    ("several machines of one", "error", "distributed_type: 'NO'\nnum_machines: 2\n", "c.yaml:2:1: num_machines: 2, but distributed_type NO is one process", "'NO'", 'MULTI_CPU'),
    ("two filters", "error", YAML + "  deepspeed_inclusion_filter: a\n  deepspeed_exclusion_filter: b\n", 'c.yaml:5:3: deepspeed_exclusion_filter = "b": deepspeed_inclusion_filter is written too, at c.yaml:4:3', '  deepspeed_exclusion_filter: b\n', '  deepspeed_hostfile: h\n'),
    ("a filter of no hostfile", "warning", YAML + "  deepspeed_inclusion_filter: a\n", 'c.yaml:4:3: deepspeed_inclusion_filter = "a": has no effect without deepspeed_hostfile', 'inclusion_filter: a', 'hostfile: h'),
    ("a hostfile for torchrun", "warning", YAML + "  deepspeed_hostfile: h\n  deepspeed_multinode_launcher: standard\n", 'c.yaml:4:3: deepspeed_hostfile = "h": has no effect: standard is torchrun, which you start on every machine', 'standard', 'pdsh'),
    ("GPUs on a CPU", "error", "distributed_type: MULTI_GPU\nuse_cpu: true\n", "c.yaml:2:1: use_cpu: true, but distributed_type is MULTI_GPU at c.yaml:1:1", 'true', 'false'),
    ("GPU ids on a CPU", "warning", "use_cpu: true\ngpu_ids: 0,1\n", "c.yaml:2:1: gpu_ids = 0,1: has no effect: the run is on the CPU", '0,1', 'all'),
    ("more processes than GPUs", "error", "num_processes: 3\ngpu_ids: [0, 1]\n", "c.yaml:1:1: num_processes: 3, but gpu_ids names 2 GPUs, and each process has one of its own", '3', '2'),
    ("tensor parallelism", "error", '{"tensor_parallel": {"autotp_size": 2}}', "c.json:1:22: tensor_parallel.autotp_size: 2 is not supported: DeepSpeed's layers for it lose the other processes' part of a gradient that is not contiguous", '2', '1'),
    ("tensor parallelism by its other name", "error", '{"tensor_parallel": {"tp": {"tp_size": 4}}}', "c.json:1:29: tensor_parallel.tp.tp_size: 4 is not supported: DeepSpeed's layers for it lose the other processes' part of a gradient that is not contiguous", '4', '1'),
    ("sequence parallelism of one process", "error", "distributed_type: NO\ndeepspeed_config:\n  sequence_parallel_size: 2\n", "c.yaml:3:3: sequence_parallel_size: 2, but distributed_type is NO at c.yaml:1:1", '2', '1'),
    ("sequence parallelism of compiled models", "error", "dynamo_config: {dynamo_backend: INDUCTOR}\n" + YAML + "  sequence_parallel_size: 2\n", "c.yaml:5:3: sequence_parallel_size: 2, but models are compiled, which the exchange among processes would break up", 'INDUCTOR', 'NO'),
    ("a batch of groups", "error", YAML + "  sequence_parallel_size: 2\n  train_batch_size: 8\n  train_micro_batch_size_per_gpu: 2\n  gradient_accumulation_steps: 1\n", "c.yaml:5:3: train_batch_size: 8, but train_micro_batch_size_per_gpu 2 × gradient_accumulation_steps 1 × groups (num_processes ÷ sequence_parallel_size) 2 = 4", 'train_batch_size: 8', 'train_batch_size: 4'),
    ("the other half of a mesh", "warning", '{"data_parallel_size": 2}', "c.json:1:2: data_parallel_size = 2: has no effect: it follows from the number of processes", '2', '"auto"'),
    ("pipeline stages", "error", '{"pipeline": {"stages": 4}}', "c.json:1:15: pipeline.stages: 4 is not supported: the engine of a PipelineModule has a loop of its own", '4', '"auto"'),
    # --- sections
    ("a monitor without its switch", "warning", '{"tensorboard": {"output_path": "runs"}}', 'c.json:1:18: tensorboard.output_path = "runs": has no effect: tensorboard.enabled is not written, and is false then', '{"output', '{"enabled": true, "output'),
    ("a profiler without its switch", "warning", '{"flops_profiler": {"profile_step": 5}}', "c.json:1:21: flops_profiler.profile_step = 5: has no effect: flops_profiler.enabled is not written, and is false then", '{"profile', '{"enabled": false, "profile'),
    ("a switch inside what is off", "warning", '{"data_efficiency": {"data_routing": {"enabled": true}}}', "c.json:1:39: data_efficiency.data_routing.enabled: has no effect: data_efficiency.enabled is not true", '{"data_routing', '{"enabled": true, "data_routing'),
    ("samples that DeepSpeed's loader picks", "warning", '{"data_efficiency": {"enabled": true, "data_sampling": {"num_epochs": 3}}}', "c.json:1:39: data_efficiency.data_sampling: has no effect: only the loader that DeepSpeed makes of training_data reads it, and the loop has one of its own", '"num_epochs": 3', ''),
    ("a curriculum without metrics", "error", '{"data_efficiency": {"enabled": true, "data_sampling": {"enabled": true, "curriculum_learning": {"enabled": true}}}}', "c.json:1:98: data_efficiency.data_sampling.curriculum_learning.enabled: true without curriculum_metrics, which DeepSpeed refuses", '"data_sampling": {"enabled": true, "curriculum_learning": {"enabled": true}}', '"data_routing": {}'),
    ("batching without a bound", "error", '{"data_efficiency": {"enabled": true, "data_sampling": {"enabled": true, "dynamic_batching": {"enabled": true}}}}', "c.json:1:95: data_efficiency.data_sampling.dynamic_batching.enabled: true without max_tokens, which DeepSpeed refuses", '"data_sampling": {"enabled": true, "dynamic_batching": {"enabled": true}}', '"data_routing": {}'),
    ("a profiler that turns the clock on", "warning", '{"flops_profiler": {"enabled": true}, "wall_clock_breakdown": false}', "c.json:1:39: wall_clock_breakdown = false: has no effect: flops_profiler is on at c.json:1:21 and turns it on", ', "wall_clock_breakdown": false', ''),
    ("contiguous checkpoints not partitioned", "error", '{"activation_checkpointing": {"contiguous_memory_optimization": true, "number_checkpoints": 4}}', "c.json:1:31: activation_checkpointing.contiguous_memory_optimization: true needs partition_activations: true", '"number', '"partition_activations": true, "number'),
    ("contiguous checkpoints not counted", "error", '{"activation_checkpointing": {"contiguous_memory_optimization": true, "partition_activations": true}}', "c.json:1:31: activation_checkpointing.contiguous_memory_optimization: true needs number_checkpoints, the number of checkpointed layers", '"partition', '"number_checkpoints": 4, "partition'),
    ("accumulation by the engine", "error", '{"managed_gradient_accumulation": true}', "c.json:1:2: managed_gradient_accumulation: true, but then DeepSpeed decides inside backward() when parameters change", 'true', 'false'),
    ("autotuning", "error", '{"autotuning": {"enabled": true}}', "c.json:1:17: autotuning.enabled: true, with which DeepSpeed's engine exits the process after a few profiled steps", 'true', 'false'),
    ("DeepCompile", "error", '{"compile": {"deepcompile": true}}', "c.json:1:14: compile.deepcompile: true, but DeepCompile decides inside backward() when parameters change", 'true', 'false'),
    ("an option of DeepCompile", "warning", '{"compile": {"offload_opt_states": true}}', "c.json:1:14: compile.offload_opt_states: has no effect: only compile.deepcompile: true reads it", 'true', 'false'),
    ("a loader of DeepSpeed's", "warning", '{"dataloader_drop_last": true}', "c.json:1:2: dataloader_drop_last = true: has no effect: the loop's own loader decides what it drops", 'true', 'false'),
    ("what only DeepSpeed's checkpoints read", "warning", '{"checkpoint": {"tag_validation": "Fail", "load_universal": true}}', "c.json:1:2: checkpoint: has no effect: only the engine's own save_checkpoint() and load_checkpoint() read it, which transformers' Trainer calls; save_state() keeps checkpoints of its own", '"tag_validation": "Fail", "load_universal": true', ''),
    ("master weights of DeepSpeed's checkpoints", "warning", '{' + ZERO_2 + '"load_from_fp32_weights": false}}', "c.json:1:36: zero_optimization.load_from_fp32_weights = false: has no effect: only the engine's own save_checkpoint() and load_checkpoint() read it, which transformers' Trainer calls; save_state() keeps checkpoints of its own", 'false', 'true'),
    ("a dtype by name", "error", '{"tensor_parallel": {"dtype": "bfloat16"}}', 'c.json:1:22: tensor_parallel.dtype = "bfloat16": DeepSpeed takes no name here, but an object of Python', '"dtype": "bfloat16"', ''),
    ("a direct disk without a GPU and without an offload", "error", "use_cpu: true\n" + YAML + '  zero_stage: 3\n  aio: {use_gds: true}\n', "c.yaml:6:9: aio.use_gds: true needs a GPU, but use_cpu is true at c.yaml:1:1", "use_gds: true", "use_gds: false"),
    ("a direct disk without a GPU", "error", "use_cpu: true\n" + YAML + '  zero_stage: 3\n  offload_optimizer_device: nvme\n  offload_optimizer_nvme_path: /nvme\n  aio: {use_gds: true}\n', "c.yaml:8:9: aio.use_gds: true needs a GPU, but use_cpu is true at c.yaml:1:1", "use_gds: true", "use_gds: false"),
    ("a number that c10d gives", "warning", "num_processes: 4\nnum_machines: 2\nmain_process_ip: 10.0.0.1\nrdzv_backend: c10d\nmachine_rank: 1\n", "c.yaml:5:1: machine_rank: has no effect: c10d at c.yaml:4:1 numbers machines as they arrive", "c10d", "static"),
    ("a meeting of one machine", "warning", "num_machines: 1\nmain_process_ip: 10.0.0.1\n", 'c.yaml:2:1: main_process_ip = "10.0.0.1": has no effect: num_machines is 1 at c.yaml:1:1', "num_machines: 1\n", "num_machines: 2\n"),
    ("a rendezvous of one machine", "warning", "num_machines: 1\nrdzv_backend: c10d\n", 'c.yaml:2:1: rdzv_backend = "c10d": has no effect: num_machines is 1 at c.yaml:1:1', "c10d", "static"),
    ("options of no rendezvous", "warning", "num_machines: 1\nrdzv_conf: timeout=60\n", 'c.yaml:2:1: rdzv_conf = "timeout=60": has no effect: num_machines is 1 at c.yaml:1:1', "num_machines: 1\n", "num_machines: 2\n"),
    ("a launcher of one machine", "warning", "num_machines: 1\n" + YAML + "  deepspeed_multinode_launcher: pdsh\n", 'c.yaml:5:3: deepspeed_multinode_launcher = "pdsh": has no effect: num_machines is 1 at c.yaml:1:1', "pdsh", "standard"),
    ("one network of machines", "warning", "num_machines: 2\nsame_network: true\n", "c.yaml:2:1: same_network = true: has no effect: machines meet at main_process_ip, in one network or in several", "num_machines: 2", "num_machines: 1"),
    ("one network of a TPU", "warning", "distributed_type: XLA\nnum_machines: 2\nsame_network: true\n", "c.yaml:3:1: same_network = true: has no effect: the runtime of a TPU finds its machines, in one network or in several", "same_network: true\n", ""),
    ("partitioned models at stage 2", "warning", YAML + "  zero_stage: 2\n  zero3_init_flag: true\n", "c.yaml:5:3: zero3_init_flag = true: has no effect: only stage 3 reads it, and the stage is 2 at c.yaml:4:3", "true", "false"),
    ("partitioned models without ZeRO", "warning", "distributed_type: MULTI_CPU\ndeepspeed_config: {zero3_init_flag: true}\n", "c.yaml:2:20: zero3_init_flag = true: has no effect: only ZeRO reads it, and the run is without ZeRO", "true", "false"),
    ("experts without ZeRO", "warning", "distributed_type: MULTI_CPU\ndeepspeed_config: {deepspeed_moe_layer_cls_names: Block}\n", 'c.yaml:2:20: deepspeed_moe_layer_cls_names = "Block": has no effect: only ZeRO reads it, and the run is without ZeRO', "deepspeed_moe_layer_cls_names: Block", ""),
    ("memory for no plan", "warning", "gpu_memory: 24GiB\n" + YAML + "  zero_stage: 2\n", 'c.yaml:1:1: gpu_memory = "24GiB": has no effect: only a plan reads it, and none of what a plan fills is auto: stage, offload devices, ratio, micro-batch', "zero_stage: 2", "zero_stage: auto"),
    ("a network that nothing passes", "warning", "num_machines: 1\nnetwork: 400Gb\n" + YAML + "  zero_stage: auto\n", 'c.yaml:2:1: network = "400Gb": has no effect: num_machines is 1 at c.yaml:1:1', "num_machines: 1", "num_machines: 2"),
    ("a network without a plan", "warning", "num_machines: 2\nnetwork: 400Gb\n" + YAML + "  zero_stage: 2\n", 'c.yaml:2:1: network = "400Gb": has no effect: only a plan reads it, and none of what a plan fills is auto: stage, offload devices, ratio, micro-batch', "zero_stage: 2", "zero_stage: auto"),
    ("CPU memory without ZeRO", "warning", "distributed_type: MULTI_GPU\nhost_memory: 64GiB\n", 'c.yaml:2:1: host_memory = "64GiB": has no effect: only a plan of ZeRO reads it, and the run is without ZeRO', "host_memory: 64GiB\n", ""),
    ("a function that nobody calls", "warning", "use_cpu: true\nmain_training_function: train\n", 'c.yaml:2:1: main_training_function = "train": has no effect: only a launch on a TPU calls it, and this one runs the script as it is', "train\n", "main\n"),
    ("a compiler's mode without the compiler", "warning", "dynamo_config: {dynamo_mode: max-autotune}\n", 'c.yaml:1:17: dynamo_mode = "max-autotune": has no effect without dynamo_backend', "{", "{dynamo_backend: INDUCTOR, "),
    ("a compiler's mode beside none", "warning", "dynamo_config: {dynamo_backend: 'no', dynamo_use_fullgraph: true}\n", "c.yaml:1:39: dynamo_use_fullgraph = true: has no effect: dynamo_backend is no", "true", "false"),
    ("a profiler of no engine", "warning", "distributed_type: MULTI_CPU\ndeepspeed_config: {flops_profiler: {enabled: true}}\n", "c.yaml:2:20: flops_profiler: has no effect: only DeepSpeed's engine reads it, and distributed_type is MULTI_CPU at c.yaml:1:1", "enabled: true", "enabled: false"),
    ("lines of no engine", "warning", "distributed_type: MULTI_GPU\ndeepspeed_config: {steps_per_print: 5}\n", "c.yaml:2:20: steps_per_print = 5: has no effect: only DeepSpeed's engine reads it, and distributed_type is MULTI_GPU at c.yaml:1:1", "steps_per_print: 5", ""),
    ("a sum of DDP's", "error", "distributed_type: MULTI_GPU\ndeepspeed_config: {gradient_allreduce_op: sum}\n", "c.yaml:2:20: gradient_allreduce_op: sum, but distributed_type is MULTI_GPU at c.yaml:1:1, and DDP averages", "sum", "mean"),
    ("an autocast of no engine", "error", "distributed_type: MULTI_GPU\ndeepspeed_config: {torch_autocast: {enabled: true}}\n", "c.yaml:2:37: torch_autocast.enabled: true, but only DeepSpeed's engine reads it, and distributed_type is MULTI_GPU at c.yaml:1:1", "true", "false"),
    ("gradients of another stage", "warning", '{' + ZERO_2[:-2] + '}, "bf16": {"enabled": true, "immediate_grad_update": true}}', "c.json:1:63: bf16.immediate_grad_update = true: has no effect: only stage 1 reads it, and the stage is 2 at c.json:1:24", '"stage": 2', '"stage": 1'),
    ("gradients of stage 0", "warning", '{' + ZERO_0[:-2] + '}, "bf16": {"enabled": true, "immediate_grad_update": true}}', "c.json:1:63: bf16.immediate_grad_update = true: has no effect: only stage 1 reads it, and the stage is 0 at c.json:1:24", 'update": true', 'update": false'),
    ("gradients of an offloaded optimizer", "warning", '{' + ZERO_1 + CPU + '}, "bf16": {"enabled": true, "immediate_grad_update": true}}', "c.json:1:103: bf16.immediate_grad_update = true: has no effect: only an optimizer on the device reads it, and it is offloaded to cpu", 'update": true', 'update": false'),
    ("sums of gradients in bf16", "warning", '{' + ZERO_1[:-2] + '}, "bf16": {"enabled": true, "immediate_grad_update": true}, "data_types": {"grad_accum_dtype": "bf16"}}', "c.json:1:63: bf16.immediate_grad_update = true: has no effect: only sums of gradients in fp32 read it, and grad_accum_dtype is bf16 at c.json:1:110", '"bf16"}}', '"fp32"}}'),
    ("an option of tensor parallelism", "warning", '{"tensor_parallel": {"preset_model": "llama"}}', 'c.json:1:22: tensor_parallel.preset_model = "llama": has no effect: only tensor_parallel.autotp_size above 1 reads it, which is not supported', '"preset_model": "llama"', ''),
    ("inference in few bits", "warning", '{"weight_quantization": {"num_bits": 4}}', "c.json:1:26: weight_quantization.num_bits = 4: has no effect: only DeepSpeed's inference reads it", '"num_bits": 4', ''),
    ("sequences that nobody splits", "warning", '{"seq_parallel_communication_data_type": "bf16"}', 'c.json:1:2: seq_parallel_communication_data_type = "bf16": has no effect: gradients of the processes that share samples are averaged with all others', 'bf16', 'fp32'),
    ("an old fused kernel with ZeRO", "warning", '{' + ZERO_1[:-2] + '}, "optimizer": {"type": "Adam", "legacy_fusion": true}}', "c.json:1:67: optimizer.legacy_fusion = true: has no effect: only fp16 at stage 0 reads it", 'true', 'false'),
    ("a pipeline of none", "warning", '{"pipeline": {"use_reentrant": false}}', "c.json:1:15: pipeline.use_reentrant = false: has no effect: only the engine of a PipelineModule reads it, and prepare() trains other models", 'false', 'true'),
]  # fmt: skip


def found(text: str) -> list[Problem]:
    path = Path("c.json" if text.startswith("{") else "c.yaml")
    path.write_text(text)
    return [problem for problem in find_problems(read_document(path)) if problem.severity != "note"]


@pytest.fixture(autouse=True)
def _working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("severity", "text", "headline", "old", "new"), [c[1:] for c in CONTRADICTIONS], ids=[c[0] for c in CONTRADICTIONS]
)
def test_contradiction(severity: str, text: str, headline: str, old: str, new: str) -> None:
    """It is the only finding, at its key, with a fix. The legal text next to it has none."""
    (problem,) = found(text)
    assert (problem.headline, problem.severity) == (headline, severity)
    assert problem.fix.endswith(".")
    assert text.count(old) == 1
    assert found(text.replace(old, new)) == []


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (
            "rdzv_backend: c10d\n",
            'rdzv_backend = "c10d": counts with several machines, and num_machines is not written',
        ),
        ("gpu_memory: 24GiB\n", 'gpu_memory = "24GiB": counts with a plan of ZeRO, and no ZeRO is requested here'),
        (
            "main_training_function: f\n",
            'main_training_function = "f": counts on a TPU: any other launch runs the script',
        ),
    ],
    ids=["machines", "a plan", "a TPU"],
)
def test_what_a_job_a_plugin_or_a_machine_settles_is_a_note(text: str, note: str) -> None:
    """If the document leaves open whether a key counts, a note is logged instead of a warning."""
    Path("c.yaml").write_text(text)
    (problem,) = find_problems(read_document("c.yaml"))
    assert problem.severity == "note"
    assert problem.headline.startswith(f"c.yaml:1:1: {note}")


def test_warnings_stop_no_run() -> None:
    """A document with warnings passes. With an additional error it raises the error alone."""
    Path("c.json").write_text('{"dataloader_drop_last": true}')
    check_document(read_document("c.json"))
    Path("c.json").write_text('{"dataloader_drop_last": true, "managed_gradient_accumulation": true}')
    with pytest.raises(ConfigError) as caught:
        check_document(read_document("c.json"))
    assert [problem.key for problem in caught.value.problems] == ["managed_gradient_accumulation"]


def test_short_fields_against_the_named_file() -> None:
    """A YAML field may repeat a value of the JSON that the YAML names, but not contradict it."""
    Path("ds.json").write_text('{"zero_optimization": {"stage": 3}, "gradient_clipping": 1.0}')
    named = f"{YAML}  deepspeed_config_file: ds.json\n"
    assert found(f"{named}  zero_stage: 3\n  gradient_clipping: 1\n") == []
    (problem,) = found(f"{named}  zero_stage: 2\n")
    assert problem.headline == "c.yaml:5:3: zero_stage: 2 here, but 3 at ds.json:1:24"


def test_an_open_field_contradicts_nothing() -> None:
    """With every scalar `auto`, no configuration of the table contradicts itself."""
    everything = (
        '{"zero_optimization": {"stage": "auto", "reduce_scatter": "auto", "offload_param": {"device": "auto"},'
        ' "offload_optimizer": {"device": "auto", "ratio": "auto"}, "stage3_max_live_parameters": 5},'
        ' "fp16": {"enabled": "auto", "loss_scale": "auto", "hysteresis": 3}, "bf16": {"enabled": "auto"},'
        ' "prescale_gradients": true, "gradient_allreduce_op": "sum", "train_batch_size": "auto",'
        ' "train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "Lamb"}}'
    )
    assert found(everything) == []


@pytest.mark.parametrize("stage", [-1, 4])
def test_a_stage_that_is_not_legal_contradicts_nothing(stage: int) -> None:
    """The stage is refused at its key, and no other key is reported as without effect because of it."""
    (problem,) = found(f'{{"zero_optimization": {{"stage": {stage}, "reduce_bucket_size": 9, "sub_group_size": 9}}}}')
    assert problem.key == "zero_optimization.stage"


def test_every_stage_below_three_is_said_where_it_is_written() -> None:
    """The message has the stage's own place, or says that no file sets the stage."""
    Path("c.json").write_text("{" + ZERO_2[:-2] + "}}")
    assert Asked(read_document("c.json")).stage_said == "the stage is 2 at c.json:1:24"
    Path("c.yaml").write_text("distributed_type: DEEPSPEED\n")
    assert Asked(read_document("c.yaml")).stage_said == "the stage is 2 where none is written"


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("{" + ZERO_0 + CPU + "}}", "Write 1 at c.json:1:24, or offload to none instead."),
        ("{" + ZERO + CPU + "}}", "Write zero_optimization.stage: 1, or offload to none instead."),
        (f"{YAML}  offload_param_device: cpu\n", "Write zero_stage: 3, or offload to none instead."),
        (f"{YAML}  zero_stage: 2\n  offload_param_device: cpu\n", "Write 3 at c.yaml:4:3, or offload to none instead."),
    ],
    ids=["written", "not written", "not written in a YAML", "written in a YAML"],
)
def test_the_fix_is_said_where_it_is_written(text: str, fix: str) -> None:
    """The fix changes an existing stage in its place. A missing one gets its name in this kind of file."""
    (problem,) = found(text)
    assert problem.fix == fix


def test_a_key_of_another_stage_says_how_to_get_there() -> None:
    """The fix lists the stages that read the key, at the place of the stage."""
    (problem,) = found("{" + ZERO_1 + '"overlap_comm": true}}')
    assert problem.fix == "Delete it, or write 2 or 3 at c.json:1:24."


def test_what_flags_do_is_mended_with_flags() -> None:
    """A contradiction made by a flag is reported at the flag, with the flag that ends it."""
    with pytest.raises(ConfigError) as caught:
        document_from_flags({"zero_stage": "0", "offload_optimizer_device": "cpu"})
    (problem,) = caught.value.problems
    assert problem.where == "--offload_optimizer_device"
    assert problem.fix.startswith("Give --zero_stage 1")
