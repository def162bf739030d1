"""Wrong inputs, one fault each: the exact place, the key line of the message, and a fix that works."""

# ruff: noqa: E501 - a case is a line, so the tables can be read as tables

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from zero_plugin.config.check import check_document, find_problems
from zero_plugin.config.read import read_document
from zero_plugin.config.tree import AUTO
from zero_plugin.errors import ConfigError, Problem

SECONDS = 2.0  # of the processor, so other load does not count; a hundred times what the slowest needs
YAML = "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n"
ZERO2 = '"zero_optimization": {"stage": 2, '
ZERO3 = '"zero_optimization": {"stage": 3, '
N = "num_processes: 2\n"

# (problem, file, its content, line:column, key and message as they start, fix as it starts)
WRONG: list[tuple[str, str, str | bytes, str, str, str]] = [
    # --- the file itself
    ("an empty YAML", "c.yaml", "", "1:1", "the file is empty", "Write a launch YAML (num_processes: 2, …) or a DeepSpeed JSON."),
    ("an empty JSON", "c.json", " \n", "1:1", "the file is empty", "Write a launch YAML (num_processes: 2, …) or a DeepSpeed JSON."),
    ("comments only", "c.yaml", "# nothing\n\n", "1:1", "the file is empty", "Write a launch YAML (num_processes: 2, …) or a DeepSpeed JSON."),
    ("a byte order mark only", "c.yaml", b"\xef\xbb\xbf", "1:1", "the file is empty", "Write a launch YAML (num_processes: 2, …) or a DeepSpeed JSON."),
    ("null", "c.json", "null", "1:1", "the file is empty", "Write a launch YAML (num_processes: 2, …) or a DeepSpeed JSON."),
    ("a document end only", "c.yaml", "---\n...\n", "2:1", "the file is empty", "Write a launch YAML (num_processes: 2, …) or a DeepSpeed JSON."),
    ("a list at the top", "c.yaml", "- zero_stage: 2\n", "1:1", "holds a list, not keys", "Write a launch YAML (num_processes: 2, …) or a DeepSpeed JSON."),
    ("a JSON list at the top", "c.json", "[1, 2]", "1:1", "holds a list, not keys", "Write a launch YAML (num_processes: 2, …) or a DeepSpeed JSON."),
    ("a single word", "c.yaml", "zero2\n", "1:1", "holds a single value, not keys", "Write a launch YAML (num_processes: 2, …) or a DeepSpeed JSON."),
    ("a single number", "c.json", "3", "1:1", "holds a single value, not keys", "Write a launch YAML (num_processes: 2, …) or a DeepSpeed JSON."),
    ("a string at the top", "c.json", '"zero2"', "1:1", "holds a single value, not keys", "Write a launch YAML (num_processes: 2, …) or a DeepSpeed JSON."),
    ("text of another encoding", "c.json", b'{"a": "\xff"}', "1:8", "is not UTF-8 text: byte 0xff", "Give a text file, saved as UTF-8."),
    ("UTF-16", "c.json", '{"a": 1}'.encode("utf-16"), "1:1", "is not UTF-8 text: byte 0xff", "Give a text file, saved as UTF-8."),
    ("UTF-16 without its mark", "c.yaml", N.encode("utf-16-le"), "1:2", "holds a character that YAML forbids: U+0000", "Delete it, or save the file as UTF-8 text."),
    ("UTF-32", "c.yaml", N.encode("utf-32"), "1:1", "is not UTF-8 text: byte 0xff", "Give a text file, saved as UTF-8."),
    ("a picture", "c.json", b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00", "1:1", "is not UTF-8 text: byte 0x89", "Give a text file, saved as UTF-8."),
    ("a pickle", "c.yaml", b"\x80\x04\x95\x0f\x00\x00\x00\x00\x00\x00\x00}\x94\x8c\x01a\x94K\x01s.", "1:1", "is not UTF-8 text: byte 0x80", "Give a text file, saved as UTF-8."),
    ("a zip archive", "c.yaml", b"PK\x03\x04\x14\x00\x00\x00\x08\x00", "1:3", "holds a character that YAML forbids: U+0003", "Delete it, or save the file as UTF-8 text."),
    ("a megabyte of blanks", "c.json", " " * (1 << 20) + " {}", "", "is larger than 1048576 bytes", "This is no configuration; check the path."),
    ("ten megabytes of nesting", "c.yaml", "[" * 10_000_000, "", "is larger than 1048576 bytes", "This is no configuration; check the path."),
    ("a Python script", "c.yaml", "import torch\nconfig = {'zero_stage': 2}\n", "2:23", "not YAML: a colon that belongs to no key", "Write one `key: value` on a line, also on the line before;"),
    ("a shell script", "c.yaml", "#!/bin/sh\nzero-plugin launch train.py\n", "2:1", "holds a single value, not keys", "Write a launch YAML (num_processes: 2, …) or a DeepSpeed JSON."),
    ("TOML", "c.yaml", "[zero_optimization]\nstage = 2\n", "2:1", "not YAML: text that belongs to no key", "Write `key: value`."),
    ("INI", "c.yaml", "stage = 2\n", "1:1", "holds a single value, not keys", "Write a launch YAML (num_processes: 2, …) or a DeepSpeed JSON."),
    ("an HTML page", "c.json", "<!DOCTYPE html>\n<html><body>404</body></html>\n", "1:1", "holds a single value, not keys", "Write a launch YAML (num_processes: 2, …) or a DeepSpeed JSON."),
    ("a merge conflict", "c.yaml", "num_processes: 2\n<<<<<<< HEAD\nmixed_precision: bf16\n=======\nmixed_precision: fp16\n>>>>>>> other\n", "2:1", "not YAML: a line without a colon", "Write `key: value`."),
    ("a merge conflict in JSON", "c.json", '{\n<<<<<<< HEAD\n"steps_per_print": 1\n=======\n"steps_per_print": 2\n>>>>>>> other\n}', "2:1", "`<` where a key is expected", 'Write "key": value, in double quotes.'),
    # --- YAML syntax
    ("a tab as indentation", "c.yaml", "deepspeed_config:\n\tzero_stage: 2\n", "2:1", "not YAML: a tab", "Indent with spaces: YAML does not allow tabs."),
    ("a tab after spaces", "c.yaml", "deepspeed_config:\n  \tzero_stage: 2\n  gradient_clipping: 1\n", "2:3", "not YAML: a tab", "Indent with spaces: YAML does not allow tabs."),
    ("a missing colon", "c.yaml", "num_processes 2\nmixed_precision: bf16\n", "2:16", "not YAML: a colon that belongs to no key", "Write one `key: value` on a line, also on the line before;"),
    ("a missing blank after the colon", "c.yaml", "num_processes:2\nmixed_precision: bf16\n", "2:16", "not YAML: a colon that belongs to no key", "Write one `key: value` on a line, also on the line before;"),
    ("no blank after any colon", "c.yaml", "num_processes:2\n", "1:1", "holds a single value, not keys", "Write a launch YAML (num_processes: 2, …) or a DeepSpeed JSON."),
    ("two keys on a line", "c.yaml", "num_processes: 2 mixed_precision: bf16\n", "1:33", "not YAML: a colon that belongs to no key", "Write one `key: value` on a line, also on the line before;"),
    ("an indentation that fits nothing", "c.yaml", "deepspeed_config:\n    zero_stage: 2\n  gradient_clipping: 1\n", "3:3", "not YAML: an indentation that fits no key above", "Indent the keys of one section alike."),
    ("a key deeper than its neighbours", "c.yaml", "num_processes: 2\n  mixed_precision: bf16\n", "2:18", "not YAML: a colon that belongs to no key", "Write one `key: value` on a line, also on the line before;"),
    ("an open bracket", "c.yaml", "gpu_ids: [0, 1\nuse_cpu: true\n", "1:10", "not YAML: a bracket that is not closed", "Close it, or add the comma that is missing in it."),
    ("an open brace", "c.yaml", "deepspeed_config: {zero_stage: 2\n", "1:19", "not YAML: a bracket that is not closed", "Close it, or add the comma that is missing in it."),
    ("an unclosed quote", "c.yaml", "mixed_precision: 'bf16\nnum_processes: 2\n", "1:18", "not YAML: a quote that is not closed", "Close the quote."),
    ("an unclosed double quote", "c.yaml", 'mixed_precision: "bf16\n', "1:18", "not YAML: a quote that is not closed", "Close the quote."),
    ("an unknown escape", "c.yaml", 'log_dir: "C:\\logs"\n', "1:14", "not YAML: an unknown escape", "Write \\ as \\\\, or take single quotes."),
    ("a percent sign first", "c.yaml", "log_dir: %HOME%\n", "1:10", "not YAML: a character that no value starts with", "Put quotes around the value."),
    ("an at sign first", "c.yaml", "log_dir: @here\n", "1:10", "not YAML: a character that no value starts with", "Put quotes around the value."),
    ("a duplicate key", "c.yaml", "num_processes: 2\nnum_processes: 4\n", "2:1", "num_processes: written twice; the first is at c.yaml:1:1", "Keep one of the two."),
    ("a duplicate key below", "c.yaml", YAML + "  zero_stage: 2\n  zero_stage: 2\n", "5:3", "deepspeed_config.zero_stage: written twice; the first is at c.yaml:4:3", "Keep one of the two."),
    ("a duplicate section", "c.yaml", YAML + "  fp16: {enabled: true}\n  fp16: {enabled: true}\n", "5:3", "deepspeed_config.fp16: written twice; the first is at c.yaml:4:3", "Keep one of the two."),
    ("a duplicate in other quotes", "c.yaml", "num_processes: 2\n'num_processes': 2\n", "2:1", "num_processes: written twice; the first is at c.yaml:1:1", "Keep one of the two."),
    ("two documents", "c.yaml", "num_processes: 2\n---\nnum_processes: 4\n", "2:1", "a second YAML document starts here", "Keep one document in the file."),
    ("a second document of nothing", "c.yaml", "num_processes: 2\n...\n---\n", "3:1", "a second YAML document starts here", "Keep one document in the file."),
    ("a tag", "c.yaml", "num_processes: !!python/object:os.system 2\n", "1:16", "the tag !!python/object:os.system is not understood", "Delete the tag; write plain values."),
    ("a tag that calls", "c.yaml", "num_processes: !!python/object/apply:os.system ['false']\n", "1:16", "the tag !!python/object/apply:os.system is not understood", "Delete the tag; write plain values."),
    ("a harmless tag", "c.yaml", "num_processes: !!int '2'\n", "1:16", "the tag !!int is not understood", "Delete the tag; write plain values."),
    ("a tag of a set", "c.yaml", "deepspeed_config: !!set {zero_stage, fp16}\n", "1:19", "the tag !!set is not understood", "Delete the tag; write plain values."),
    ("a tag of the application", "c.yaml", "num_processes: !env WORLD_SIZE\n", "1:16", "the tag !env is not understood", "Delete the tag; write plain values."),
    ("an undefined alias", "c.yaml", "num_processes: *n\n", "1:16", "*n has no anchor before it", "Define &n first."),
    ("an alias to itself", "c.yaml", "deepspeed_config: &a\n  fp16: *a\n", "2:9", "*a has no anchor before it", "Define &a first."),
    ("a merge of a value", "c.yaml", "_a: &a 1\ndeepspeed_config:\n  <<: *a\n", "3:3", "<< merges mappings only", "Point it at an anchor of a mapping."),
    ("a list as key", "c.yaml", "[a, b]: 1\n", "1:1", "a key must be plain text", "Write `key: value`."),
    ("a mapping as key", "c.yaml", "? {a: b}\n: 1\n", "1:3", "a key must be plain text", "Write `key: value`."),
    ("an alias as key", "c.yaml", "_a: &a num_processes\n*a : 2\n", "2:1", "a key must be plain text", "Write `key: value`."),
    ("a directive of another YAML", "c.yaml", "%YAML 3.0\n---\nnum_processes: 2\n", "1:1", "not YAML: found incompatible YAML document (version 1.* is required)", "Look at this place and the line before it: indentation,"),
    ("a NUL byte", "c.yaml", "num_processes: 2\x00\n", "1:17", "holds a character that YAML forbids: U+0000", "Delete it, or save the file as UTF-8 text."),
    ("an escape sequence", "c.yaml", "mixed_precision: \x1b[1mbf16\n", "1:18", "holds a character that YAML forbids: U+001B", "Delete it, or save the file as UTF-8 text."),
    ("a billion laughs", "c.yaml", "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)), "5:10", "holds more than 2000 values", "No configuration is so long; check aliases."),
    ("deep YAML", "c.yaml", "num_processes: " + "[" * 5000, "1:66", "nested deeper than 50 levels", "No setting is so deep; flatten it."),
    ("deep YAML by indentation", "c.yaml", "".join(" " * n + f"k{n}:\n" for n in range(60)), "52:52", "nested deeper than 50 levels", "No setting is so deep; flatten it."),
    ("deep YAML by dashes", "c.yaml", "num_processes:\n" + "- " * 500 + "1\n", "2:101", "nested deeper than 50 levels", "No setting is so deep; flatten it."),
    ("too many YAML values", "c.yaml", "".join(f"k{n}: 1\n" for n in range(9000)), "2000:8", "holds more than 2000 values", "No configuration is so long; check aliases."),
    # --- JSON syntax
    ("an unclosed brace", "c.json", '{"train_batch_size": 8', "1:23", "the end of the file where `}` is expected", "Close the bracket of 1:1, or one inside it."),
    ("an unclosed inner brace", "c.json", '{"fp16": {"enabled": true,\n"train_batch_size": 8}', "2:23", "the end of the file where `}` is expected", "Close the bracket of 1:1, or one inside it."),
    ("a brace too many", "c.json", '{"train_batch_size": 8}}', "1:24", "there is text after the end of the JSON", "Delete it, or close the braces later."),
    ("a bracket for a brace", "c.json", '{"fp16": {"enabled": true]}', "1:26", "`]` where `,` or `}` is expected", "Add the comma or bracket."),
    ("an open comment", "c.json", '{"train_batch_size": 8 /* why }', "1:24", "`/` where `,` or `}` is expected", "Close the comment with */."),
    ("a missing comma", "c.json", '{"steps_per_print": 1 "train_batch_size": 2}', "1:23", '`"` where `,` or `}` is expected', "Add the comma or bracket."),
    ("two commas", "c.json", '{"steps_per_print": 1,, "train_batch_size": 2}', "1:23", "`,` where a key is expected", "Delete it."),
    ("a comma first", "c.json", '{, "steps_per_print": 1}', "1:2", "`,` where a key is expected", "Delete it."),
    ("a semicolon", "c.json", '{"steps_per_print": 1; "train_batch_size": 2}', "1:22", "`;` where `,` or `}` is expected", "Add the comma or bracket."),
    ("an equals sign", "c.json", '{"steps_per_print" = 1}', "1:20", 'a colon is missing after "steps_per_print"', 'Write "steps_per_print": value.'),
    ("no colon", "c.json", '{"fp16" true}', "1:9", 'a colon is missing after "fp16"', 'Write "fp16": value.'),
    ("no value", "c.json", '{"steps_per_print": , "train_batch_size": 2}', "1:21", "`,` where a value is expected", "Write a number, true, false, null or a quoted text."),
    ("a key without a value", "c.json", '{"steps_per_print"}', "1:19", 'a colon is missing after "steps_per_print"', 'Write "steps_per_print": value.'),
    ("a number as key", "c.json", "{1: 2}", "1:2", "`1` where a key is expected", 'Write "key": value, in double quotes.'),
    ("a string without an end", "c.json", '{"a": "b\n}', "1:9", "a text that is not closed on its line", "Close the quotes."),
    ("an unescaped backslash", "c.json", '{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "D:\\swap"}}}', "1:88", "an unknown escape in a text", "Write \\ as \\\\."),
    ("curly quotes", "c.json", "{“fp16”: {}}", "1:2", "`“` where a key is expected", 'Write "key": value, in double quotes.'),
    ("Python's True", "c.json", '{"fp16": {"enabled": True}}', "1:22", "fp16.enabled: `True` where a value is expected", "Write true, as JSON spells it."),
    ("Python's None", "c.json", '{"steps_per_print": None}', "1:21", "steps_per_print: `None` where a value is expected", "Write null, as JSON spells it."),
    ("an Hjson text", "c.json", "{\n  zero_optimization: {\n    stage: 3\n    offload_param: {\n      device: cpu\n    }\n  }\n}", "5:15", "zero_optimization.offload_param.device: `cpu` where a value is expected", "Write a number, true, false, null or a quoted text."),
    ("an Hjson block text", "c.json", "{\n  wandb: {\n    project: '''\n    x\n    '''\n  }\n}", "3:16", "`'` where `,` or `}` is expected", "Add the comma or bracket."),
    ("a template", "c.json", '{"train_batch_size": ${bs}}', "1:22", "train_batch_size: `${bs}` where a value is expected", "Write a number, true, false, null or a quoted text."),
    ("a Jinja template", "c.json", '{"train_batch_size": {{ batch_size }}}', "1:23", "`{` where a key is expected", 'Write "key": value, in double quotes.'),
    ("a calculation", "c.json", '{"train_batch_size": 8 * 4}', "1:24", "`*` where `,` or `}` is expected", "Add the comma or bracket."),
    ("a hexadecimal number", "c.json", '{"train_batch_size": 0x10}', "1:22", "train_batch_size: `0x10` where a value is expected", "Write a number, true, false, null or a quoted text."),
    ("digits in groups", "c.json", '{"train_batch_size": 1_000}', "1:22", "train_batch_size: `1_000` where a value is expected", "Write a number, true, false, null or a quoted text."),
    ("a fraction without a zero", "c.json", '{"gradient_clipping": .5}', "1:23", "gradient_clipping: `.5` where a value is expected", "Write 0.5, as JSON spells it."),
    ("text after the end", "c.json", "{}\nend", "2:1", "there is text after the end of the JSON", "Delete it, or close the braces later."),
    ("two objects", "c.json", "{}\n{}", "2:1", "there is text after the end of the JSON", "Delete it, or close the braces later."),
    ("not a number", "c.json", '{"gradient_clipping": NaN}', "1:23", "gradient_clipping: `NaN` where a value is expected", "Write a number, true, false, null or a quoted text."),
    ("infinity", "c.json", '{"steps_per_print": Infinity}', "1:21", "steps_per_print: `Infinity` where a value is expected", "Write a number, true, false, null or a quoted text."),
    ("minus infinity", "c.json", '{"gradient_clipping": -Infinity}', "1:23", "gradient_clipping: `-Infinity` where a value is expected", "Write a number, true, false, null or a quoted text."),
    ("a JSON duplicate", "c.json", '{"fp16": {},\n"fp16": {}}', "2:1", "fp16: written twice; the first is at c.json:1:2", "Keep one of the two."),
    ("a JSON duplicate below", "c.json", '{"fp16": {"enabled": true, "enabled": true}}', "1:28", "fp16.enabled: written twice; the first is at c.json:1:11", "Keep one of the two."),
    ("an endless number", "c.json", '{"gradient_clipping": 1e999}', "1:23", "gradient_clipping: `1e999` where a value is expected", "Write a number, true, false, null or a quoted text."),
    ("an endless integer", "c.json", '{"train_batch_size": ' + "9" * 5000 + "}", "1:22", "train_batch_size: `9999999999999999999999999999999999999999` where a value is expected", "Write a number, true, false, null or a quoted text."),
    ("too many values", "c.json", "{" + ",".join(f'"k{n}": 1' for n in range(9000)) + "}", "1:20890", "holds more than 2000 values", "No configuration is so long; check the path."),
    ("deep JSON", "c.json", '{"fp16":' * 5000, "1:409", "nested deeper than 50 levels", "No setting is so deep; flatten it."),
    ("a NUL byte in JSON", "c.json", '{"fp16": \x00}', "1:10", "U+0000 where a value is expected", "Write a number, true, false, null or a quoted text."),
    ("a broken JSON called YAML", "c.yaml", '{"fp16": {"enabled": true}', "1:1", "not YAML: a bracket that is not closed", "Close it, or add the comma that is missing in it."),
    ("a broken YAML called JSON", "c.json", "num_processes 2\nuse_cpu: true\n", "2:8", "not YAML: a colon that belongs to no key", "Write one `key: value` on a line, also on the line before;"),
    # --- unknown keys, at every depth
    ("a typo at the top of a JSON", "c.json", '{"zero_optimisation": {"stage": 2}}', "1:2", "zero_optimisation: unknown key", "Did you mean zero_optimization?"),
    ("a key in capitals", "c.json", '{"FP16": {"enabled": true}}', "1:2", "FP16: unknown key", "Did you mean fp16?"),
    ("a dash for an underscore", "c.json", '{"train-batch-size": 8}', "1:2", "train-batch-size = 8: unknown key", "Did you mean train_batch_size?"),
    ("a blank in a key", "c.json", '{"train_batch_size ": 8}', "1:2", '"train_batch_size " = 8: unknown key', "Did you mean train_batch_size?"),
    ("a look-alike key", "c.json", '{"train_bаtch_size": 8}', "1:2", '"train_b\\u0430tch_size" = 8: unknown key', "Did you mean train_batch_size?"),
    ("an invisible character in a key", "c.json", '{"train_batch\u200b_size": 8}', "1:2", '"train_batch\\u200b_size" = 8: unknown key', "Did you mean train_batch_size?"),
    ("an empty key", "c.json", '{"": 8}', "1:2", '"" = 8: unknown key', "Delete it; a comment key starts with _."),
    ("a key of another tool", "c.json", '{"cuda_visible_devices": 0}', "1:2", "cuda_visible_devices = 0: unknown key", "Delete it; a comment key starts with _."),
    ("a typo in a section", "c.json", '{"zero_optimization": {"stge": 2}}', "1:24", "zero_optimization.stge = 2: unknown key", "Did you mean stage?"),
    ("a typo in fp16", "c.json", '{"fp16": {"enable": true}}', "1:11", "fp16.enable = true: unknown key", "Did you mean enabled?"),
    ("a typo two levels down", "c.json", "{" + ZERO3 + '"offload_param": {"devise": "cpu"}}}', "1:54", 'zero_optimization.offload_param.devise = "cpu": unknown key', "Did you mean device?"),
    ("a typo three levels down", "c.json", '{"data_efficiency": {"data_routing": {"random_ltd": {"enable": false}}}}', "1:54", "data_efficiency.data_routing.random_ltd.enable = false: unknown key", "Did you mean enabled?"),
    ("a typo in an unread section", "c.json", '{"aio": {"queue_dept": 8}}', "1:10", "aio.queue_dept = 8: unknown key", "Did you mean queue_depth?"),
    ("a typo in activation checkpointing", "c.json", '{"activation_checkpointing": {"partition_activation": true}}', "1:31", "activation_checkpointing.partition_activation = true: unknown key", "Did you mean partition_activations?"),
    ("a typo in the profiler", "c.json", '{"flops_profiler": {"enabled": true, "profile_steps": 3}}', "1:38", "flops_profiler.profile_steps = 3: unknown key", "Did you mean profile_step?"),
    ("params where there are none", "c.json", '{"autotuning": {"params": {"lr": 1}}}', "1:17", "autotuning.params: unknown key", "It belongs in optimizer"),
    ("a typo in a monitor", "c.json", '{"tensorboard": {"enabled": true, "output_dir": "logs"}}', "1:35", 'tensorboard.output_dir = "logs": unknown key', "Legal here: enabled, output_path, job_name."),
    ("a misplaced key", "c.json", '{"offload_optimizer": {"device": "cpu"}}', "1:2", "offload_optimizer: unknown key", "It belongs in zero_optimization."),
    ("a stage at the top", "c.json", '{"stage": 2}', "1:2", "stage = 2: unknown key", "It belongs in zero_optimization."),
    ("an unknown parameter", "c.json", '{"optimizer": {"type": "adamw", "params": {"betta": [0.9, 0.99]}}}', "1:44", "optimizer.params.betta = [0.9, 0.99]: unknown key", "Did you mean betas?"),
    ("a parameter beside params", "c.json", '{"optimizer": {"type": "Adam", "lr": 1e-5, "params": {}}}', "1:32", "optimizer.lr = 1e-05: unknown key", "It belongs in optimizer.params."),
    ("another optimizer's parameter", "c.json", '{"optimizer": {"type": "Adam", "params": {"momentum": 0.9}}}', "1:43", "optimizer.params.momentum = 0.9: unknown key", "Delete it, or write another optimizer.type, that has it: Muon,"),
    ("another schedule's parameter", "c.json", '{"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 9}}}', "1:47", "scheduler.params.total_num_steps = 9: unknown key", "Delete it, or write another scheduler.type, that has it:"),
    ("loss scaling in bf16", "c.json", '{"bf16": {"enabled": true, "loss_scale": 0}}', "1:28", "bf16.loss_scale = 0: only fp16 has it: bf16 needs no scaling of the loss", "Delete it."),
    ("a launch key in a JSON", "c.json", '{"fp16": {}, "bf16": {}, "mixed_precision": "bf16"}', "1:26", 'mixed_precision = "bf16": a key of the launch YAML', "Write it at the top level of the launch YAML."),
    ("a short field in a JSON", "c.json", '{"fp16": {}, "zero_stage": 2}', "1:14", "zero_stage = 2: a field of the launch YAML", "Write zero_optimization.stage here."),
    ("a typo in a launch key", "c.yaml", "num_procesess: 2\nuse_cpu: true\n", "1:1", "num_procesess = 2: unknown key", "Did you mean num_processes?"),
    ("a launch key in capitals", "c.yaml", "NUM_PROCESSES: 2\nuse_cpu: true\n", "1:1", "NUM_PROCESSES = 2: unknown key", "Did you mean num_processes?"),
    ("a short field at the top", "c.yaml", "num_processes: 2\nzero_stage: 2\n", "2:1", "zero_stage = 2: unknown key", "Write it below deepspeed_config: {zero_stage: …}."),
    ("a section at the top", "c.yaml", "num_processes: 2\nfp16: {enabled: true}\n", "2:1", "fp16: unknown key", "Write it below deepspeed_config: {fp16: …}."),
    ("a typo in a short field", "c.yaml", YAML + "  zero_stag: 2\n", "4:3", "zero_stag = 2: unknown key", "Did you mean zero_stage?"),
    ("a typo in an inline key", "c.yaml", YAML + "  zero_optimization:\n    stage: 3\n    overlap_com: true\n", "6:5", "zero_optimization.overlap_com = true: unknown key", "Did you mean overlap_comm?"),
    ("a launch key in the section", "c.yaml", YAML + "  zero_stage: 2\n  mixed_precision: bf16\n", "5:3", 'mixed_precision = "bf16": a key of the launch YAML', "Write it at the top level of the launch YAML."),
    ("a typo of the section", "c.yaml", "num_processes: 2\ndeepspeed_confg:\n  zero_stage: 2\n", "2:1", "deepspeed_confg: unknown key", "Did you mean deepspeed_config?"),
    ("a typo of the file's key", "c.yaml", YAML + "  deepspeed_config_fil: other.json\n", "4:3", 'deepspeed_config_fil = "other.json": unknown key', "Did you mean deepspeed_config_file?"),
    ("a merged typo", "c.yaml", "_base: &b {stge: 3}\nuse_cpu: true\ndeepspeed_config:\n  zero_optimization:\n    <<: *b\n", "1:12", "zero_optimization.stge = 3: unknown key", "Did you mean stage?"),
    # --- keys and values that DeepSpeed dropped
    ("a removed section", "c.json", '{"amp": {"enabled": false}}', "1:2", "amp: removed in DeepSpeed 0.19.8, even when disabled", 'Delete it; write "bf16": {"enabled": true}.'),
    ("compression", "c.json", '{"compression_training": {}}', "1:2", "compression_training = {}: removed in DeepSpeed 0.19.7, even when disabled", "Delete it; nothing replaces it."),
    ("elasticity", "c.json", '{"elasticity": {"enabled": true}}', "1:2", "elasticity: removed in DeepSpeed 0.19.8, even when disabled", "Delete it; write the batch sizes out."),
    ("the old curriculum", "c.json", '{"curriculum_learning": {"enabled": true}}', "1:2", "curriculum_learning: removed in DeepSpeed 0.19.8, even when disabled", "Delete it, and choose samples in a sampler of the script's DataLoader."),
    ("a removed zero key", "c.json", "{" + ZERO3 + '"mics_shard_size": 8}}', "1:36", "zero_optimization.mics_shard_size = 8: removed in DeepSpeed 0.19.7", "Delete it; zero_hpz_partition_size keeps a copy of the"),
    ("a key of the documentation only", "c.json", "{" + ZERO3 + '"grad_hooks": true}}', "1:36", "zero_optimization.grad_hooks = true: no key of DeepSpeed, although its pages show it", "Delete it; nothing replaces it."),
    ("a pinning that is dropped", "c.json", "{" + ZERO3 + '"cpu_offload_use_pin_memory": true}}', "1:36", "zero_optimization.cpu_offload_use_pin_memory = true: DeepSpeed drops its value", "Write pin_memory inside offload_optimizer or offload_param."),
    ("legacy stage 1", "c.json", "{" + ZERO2 + '"legacy_stage1": true}}', "1:36", "zero_optimization.legacy_stage1: true is not legal here", "Write false (default false)."),
    ("torch.compile in the JSON", "c.json", '{"compile": {"backend": "inductor"}}', "1:14", 'compile.backend = "inductor": DeepSpeed\'s `compile` section no longer has it', "Delete it; call torch.compile in the script."),
    ("a launch file of another program", "c.yaml", "num_processes: 2\ndeepspeed: z3.json\n", "2:1", 'deepspeed = "z3.json": unknown key', "If this file is another program's, check and launch with the DeepSpeed file"),
    ("another program's batch", "c.yaml", "num_processes: 2\nper_device_train_batch_size: 1\n", "2:1", "per_device_train_batch_size = 1: unknown key", "Write it below deepspeed_config: {train_micro_batch_size_per_gpu: …}."),
    ("another program's rate", "c.yaml", "num_processes: 2\nlearning_rate: 0.001\n", "2:1", "learning_rate = 0.001: unknown key", "Delete it; a comment key starts with _."),
    ("a training file of another program", "c.json", '{"deepspeed": "z3.json"}', "1:2", 'deepspeed = "z3.json": unknown key', "If this file is another program's, check and launch with the DeepSpeed file"),
    ("another library's word", "c.json", '{"optimizer": {"type": "AdamW", "params": {"learning_rate": 1}}}', "1:44", "optimizer.params.learning_rate = 1: unknown key", "Did you mean lr?"),
    ("transformers' word", "c.json", '{"max_grad_norm": 1.0}', "1:2", "max_grad_norm = 1.0: unknown key", "Did you mean gradient_clipping?"),
    ("a removed optimizer", "c.json", '{"optimizer": {"type": "OneBitAdam"}}', "1:16", 'optimizer.type: "OneBitAdam" is not supported', "DeepSpeed removed it by 0.19.7. Write AdamW (or Lamb)."),
    ("a kernel as optimizer", "c.json", '{"optimizer": {"type": "FusedAdam"}}', "1:16", 'optimizer.type: "FusedAdam" is not supported', "Write AdamW: DeepSpeed uses its fused kernel automatically."),
    ("max_grad_norm", "c.json", '{"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1}}}', "1:44", "optimizer.params.max_grad_norm = 1: DeepSpeed refuses it here", "Delete it; write gradient_clipping."),
    # --- values
    ("stage 4", "c.yaml", YAML + "  zero_stage: 4\n", "4:3", "zero_stage: 4 is not legal here", "Write an integer from 0 to 3 or auto (default 0)."),
    ("a negative stage", "c.json", '{"zero_optimization": {"stage": -1}}', "1:24", "zero_optimization.stage: -1 is not legal here", "Write an integer from 0 to 3 or auto (default 0)."),
    ("half a stage", "c.json", '{"zero_optimization": {"stage": 2.5}}', "1:24", "zero_optimization.stage: 2.5 is not legal here", "Write an integer from 0 to 3 or auto (default 0)."),
    ("a stage as words", "c.json", '{"zero_optimization": {"stage": "zero2"}}', "1:24", 'zero_optimization.stage: "zero2" is not legal here', "Write an integer from 0 to 3 or auto (default 0)."),
    ("a stage that is true", "c.json", '{"zero_optimization": {"stage": "on"}}', "1:24", 'zero_optimization.stage: "on" is not legal here', "Write an integer from 0 to 3 or auto (default 0)."),
    ("a list of stages", "c.json", '{"zero_optimization": {"stage": [2, 3]}}', "1:24", "zero_optimization.stage: [2, 3] is not legal here", "Write an integer from 0 to 3 or auto (default 0)."),
    ("a section of stages", "c.json", '{"zero_optimization": {"stage": {"value": 2}}}', "1:24", 'zero_optimization.stage: {"value": 2} is not legal here', "Write an integer from 0 to 3 or auto (default 0)."),
    ("an offload without its braces", "c.json", "{" + ZERO3 + '"offload_param": "cpu"}}', "1:36", 'zero_optimization.offload_param: "cpu" is not legal here', 'Write "offload_param": {"device": "cpu"}.'),
    ("a device that is none", "c.yaml", YAML + "  offload_optimizer_device: gpu\n", "4:3", 'offload_optimizer_device: "gpu" is not legal here', 'Write none, cpu, nvme or auto (default "none").'),
    ("a misspelt device", "c.json", "{" + ZERO3 + '"offload_param": {"device": "cup"}}}', "1:54", 'zero_optimization.offload_param.device: "cup" is not legal here', 'Write none, cpu, nvme or auto (default "none").'),
    ("a fraction of an integer", "c.json", "{" + ZERO3 + '"stage3_prefetch_bucket_size": 15099494.4}}', "1:36", "zero_optimization.stage3_prefetch_bucket_size: 15099494.4 is not legal here", "Write an integer of at least 0 or auto (default 50000000)."),
    ("a number with a unit", "c.json", "{" + ZERO3 + '"reduce_bucket_size": "500MB"}}', "1:36", 'zero_optimization.reduce_bucket_size: "500MB" is not legal here', "Write an integer above 0 or auto (default 500000000)."),
    ("a number with commas", "c.json", "{" + ZERO3 + '"reduce_bucket_size": "500,000,000"}}', "1:36", 'zero_optimization.reduce_bucket_size: "500,000,000" is not legal here', "Write an integer above 0 or auto (default 500000000)."),
    ("a bucket of nothing", "c.json", "{" + ZERO3 + '"reduce_bucket_size": 0}}', "1:36", "zero_optimization.reduce_bucket_size: 0 is not legal here", "Write an integer above 0 or auto (default 500000000)."),
    ("a YAML infinity", "c.yaml", YAML + "  gradient_clipping: .inf\n", "4:3", 'gradient_clipping: ".inf" is not legal here', "Write a number of at least 0, null or auto (default 1.0)."),
    ("no number in YAML", "c.yaml", YAML + "  gradient_clipping: .nan\n", "4:3", 'gradient_clipping: ".nan" is not legal here', "Write a number of at least 0, null or auto (default 1.0)."),
    ("a negative norm", "c.yaml", YAML + "  gradient_clipping: -1\n", "4:3", "gradient_clipping: -1 is not legal here", "Write a number of at least 0, null or auto (default 1.0)."),
    ("a norm in words", "c.yaml", YAML + "  gradient_clipping: one\n", "4:3", 'gradient_clipping: "one" is not legal here', "Write a number of at least 0, null or auto (default 1.0)."),
    ("a batch of zero", "c.json", '{"train_batch_size": 0}', "1:2", "train_batch_size: 0 is not legal here", "Write an integer above 0, null or auto."),
    ("a negative batch", "c.json", '{"train_micro_batch_size_per_gpu": -4}', "1:2", "train_micro_batch_size_per_gpu: -4 is not legal here", "Write an integer above 0, null or auto."),
    ("a boolean batch", "c.json", '{"train_batch_size": true}', "1:2", "train_batch_size: true is not legal here", "Write an integer above 0, null or auto."),
    ("half a batch", "c.json", '{"train_batch_size": 8.5}', "1:2", "train_batch_size: 8.5 is not legal here", "Write an integer above 0, null or auto."),
    ("a list of batches", "c.json", '{"train_batch_size": [8]}', "1:2", "train_batch_size: [8] is not legal here", "Write an integer above 0, null or auto."),
    ("accumulation of zero", "c.yaml", YAML + "  gradient_accumulation_steps: 0\n", "4:3", "gradient_accumulation_steps: 0 is not legal here", "Write an integer above 0, null or auto."),
    ("a section that is a value", "c.json", '{"fp16": true}', "1:2", "fp16: true is not legal here", 'Write "fp16": {"enabled": true}.'),
    ("a section that is a list", "c.json", '{"fp16": [{"enabled": true}]}', "1:2", 'fp16: [{"enabled": true}] is not legal here', "Write a mapping of keys."),
    ("an open section", "c.json", '{"fp16": "auto"}', "1:2", 'fp16: "auto" is not legal here', 'Write "fp16": {"enabled": "auto"}.'),
    ("a switch that is a number", "c.json", '{"fp16": {"enabled": 2}}', "1:11", "fp16.enabled: 2 is not legal here", "Write true, false or auto (default false)."),
    ("a switch that is a word", "c.json", '{"fp16": {"enabled": "maybe"}}', "1:11", 'fp16.enabled: "maybe" is not legal here', "Write true, false or auto (default false)."),
    ("a loss scale below zero", "c.json", '{"fp16": {"enabled": true, "loss_scale": -1}}', "1:28", "fp16.loss_scale: -1 is not legal here", "Write a number of at least 0 or auto (default 0)."),
    ("one beta", "c.json", '{"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}}', "1:43", "optimizer.params.betas: [0.9] is not legal here", "Write a list of 2 values (each a number of at least 0 and"),
    ("three betas", "c.json", '{"optimizer": {"type": "Adam", "params": {"betas": [0.9, 0.9, 0.9]}}}', "1:43", "optimizer.params.betas: [0.9, 0.9, 0.9] is not legal here", "Write a list of 2 values (each a number of at least 0 and"),
    ("a beta above one", "c.json", '{"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1.5]}}}', "1:43", "optimizer.params.betas: [0.9, 1.5] is not legal here", "Write a list of 2 values (each a number of at least 0 and"),
    ("an open beta beside one above one", "c.json", '{"optimizer": {"type": "Adam", "params": {"betas": ["auto", 1.5]}}}', "1:43", 'optimizer.params.betas: ["auto", 1.5] is not legal here', "Write a list of 2 values (each a number of at least 0 and"),
    ("betas without brackets", "c.yaml", YAML + "  optimizer: {type: AdamW, params: {betas: 0.9 0.95}}\n", "4:37", 'optimizer.params.betas: "0.9 0.95" is not legal here', "Write a list of 2 values (each a number of at least 0 and"),
    ("a learning rate of words", "c.json", '{"optimizer": {"type": "Adam", "params": {"lr": "small"}}}', "1:43", 'optimizer.params.lr: "small" is not legal here', "Write a number of at least 0 or auto (default 0.001)."),
    ("a negative learning rate", "c.json", '{"optimizer": {"type": "Adam", "params": {"lr": -1e-3}}}', "1:43", "optimizer.params.lr: -0.001 is not legal here", "Write a number of at least 0 or auto (default 0.001)."),
    ("an unknown optimizer", "c.json", '{"optimizer": {"type": "AdmW"}}', "1:16", 'optimizer.type: "AdmW" is not legal here', "Did you mean AdamW? Write Adam, AdamW, Adagrad, Lamb, Lion,"),
    ("an optimizer without its braces", "c.json", '{"optimizer": "AdamW"}', "1:2", 'optimizer: "AdamW" is not legal here', 'Write "optimizer": {"type": "AdamW"}.'),
    ("an optimizer without type", "c.json", '{"optimizer": {"params": {"lr": 0.1}}}', "1:2", "optimizer.type: is missing", "Write type: Adam, AdamW, Adagrad, Lamb, Lion, Muon, SGD,"),
    ("an unknown scheduler", "c.json", '{"scheduler": {"type": "WarmupDecay"}}', "1:16", 'scheduler.type: "WarmupDecay" is not legal here', "Did you mean WarmupDecayLR? Write WarmupLR, WarmupDecayLR,"),
    ("an unknown warm-up", "c.json", '{"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cosine"}}}', "1:47", 'scheduler.params.warmup_type: "cosine" is not legal here', 'Write log, linear or auto (default "log").'),
    ("a negative warm-up", "c.json", '{"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": -5}}}', "1:47", "scheduler.params.warmup_num_steps: -5 is not legal here", "Write an integer of at least 0 or auto (default 1000)."),
    ("a ratio above one", "c.json", "{" + ZERO3 + '"offload_optimizer": {"device": "cpu", "ratio": 2}}}', "1:75", "zero_optimization.offload_optimizer.ratio: 2 is not legal here", "Write a number from 0 to 1 or auto (default 1.0)."),
    ("a ratio in percent", "c.json", "{" + ZERO3 + '"offload_optimizer": {"device": "cpu", "ratio": "30%"}}}', "1:75", 'zero_optimization.offload_optimizer.ratio: "30%" is not legal here', "Write a number from 0 to 1 or auto (default 1.0)."),
    ("a type of data", "c.json", '{"communication_data_type": "float16"}', "1:2", 'communication_data_type: "float16" is not legal here', "Write fp16, bf16, fp32, null or auto."),
    ("a negative interval", "c.json", '{"steps_per_print": -3}', "1:2", "steps_per_print: -3 is not legal here", "Write an integer of at least 1, null or auto."),
    ("no interval", "c.json", '{"steps_per_print": 0}', "1:2", "steps_per_print: 0 is not legal here", "Write an integer of at least 1, null or auto."),
    ("no processes", "c.yaml", "num_processes: 0\n", "1:1", "num_processes: 0 is not legal here", "Write an integer of at least 1 or null."),
    ("a word for a count", "c.yaml", "num_processes: two\n", "1:1", 'num_processes: "two" is not legal here', "Write an integer of at least 1 or null."),
    ("half a process", "c.yaml", "num_processes: 1.5\n", "1:1", "num_processes: 1.5 is not legal here", "Write an integer of at least 1 or null."),
    ("digits in groups in YAML", "c.yaml", "num_processes: 1_000\n", "1:1", 'num_processes: "1_000" is not legal here', "Write an integer of at least 1 or null."),
    ("a binary number", "c.yaml", "num_processes: 0b11\n", "1:1", 'num_processes: "0b11" is not legal here', "Write an integer of at least 1 or null."),
    ("a number by the clock", "c.yaml", "num_processes: 1:30\n", "1:1", 'num_processes: "1:30" is not legal here', "Write an integer of at least 1 or null."),
    ("a number with a comma", "c.yaml", YAML + "  gradient_clipping: 1,5\n", "4:3", 'gradient_clipping: "1,5" is not legal here', "Write a number of at least 0, null or auto (default 1.0)."),
    ("a number with a comment at once", "c.yaml", "num_processes: 2# two\n", "1:1", 'num_processes: "2# two" is not legal here', "Write an integer of at least 1 or null."),
    ("a port too high", "c.yaml", "main_process_port: 70000\n", "1:1", "main_process_port: 70000 is not legal here", "Write an integer from 0 to 65535 or null."),
    ("a port with its address", "c.yaml", "main_process_port: 10.0.0.1:29500\n", "1:1", 'main_process_port: "10.0.0.1:29500" is not legal here', "Write an integer from 0 to 65535 or null."),
    ("a rank below zero", "c.yaml", "machine_rank: -1\n", "1:1", "machine_rank: -1 is not legal here", "Write an integer of at least 0 (default 0)."),
    ("a rendezvous option without a value", "c.yaml", "num_processes: 2\nrdzv_conf: timeout\n", "2:1", 'rdzv_conf: "timeout" is not legal here', "Write text such as timeout=60,read_timeout=60."),
    ("a rendezvous option without a name", "c.yaml", "num_processes: 2\nrdzv_conf: a=1,=2\n", "2:1", 'rdzv_conf: "a=1,=2" is not legal here', "Write text such as timeout=60,read_timeout=60."),
    ("an unknown rendezvous", "c.yaml", "rdzv_backend: c10\n", "1:1", 'rdzv_backend: "c10" is not legal here', 'Did you mean c10d? Write static, c10d, etcd or etcd-v2 (default "static").'),
    ("an unknown precision", "c.yaml", "mixed_precision: bf61\n", "1:1", 'mixed_precision: "bf61" is not legal here', "Did you mean bf16? Write no, fp16, bf16, auto or null."),
    ("a precision by torch's name", "c.yaml", "mixed_precision: bfloat16\n", "1:1", 'mixed_precision: "bfloat16" is not supported', "Write bf16."),
    ("a precision that is on", "c.yaml", "mixed_precision: on\n", "1:1", 'mixed_precision: "on" is not legal here', "Write no, fp16, bf16, auto or null."),
    ("fp8", "c.yaml", "mixed_precision: fp8\n", "1:1", 'mixed_precision: "fp8" is not supported', "Write bf16: DeepSpeed ZeRO has no fp8."),
    ("a misspelt type", "c.yaml", "distributed_type: DEEP_SPEED\n", "1:1", 'distributed_type: "DEEP_SPEED" is not legal here', "Did you mean DEEPSPEED? Write NO, MULTI_CPU, MULTI_GPU,"),
    ("FSDP", "c.yaml", "distributed_type: FSDP\n", "1:1", 'distributed_type: "FSDP" is not supported', "Write DEEPSPEED with zero_stage: 3, which shards the same"),
    ("Megatron", "c.yaml", "distributed_type: MEGATRON_LM\n", "1:1", 'distributed_type: "MEGATRON_LM" is not supported', "Write DEEPSPEED; tensor and pipeline parallelism are not supported."),
    ("another device", "c.yaml", "distributed_type: MULTI_NPU\n", "1:1", 'distributed_type: "MULTI_NPU" is not supported', "Write NO, MULTI_CPU, MULTI_GPU, DEEPSPEED, TPU or XLA; this"),
    ("SageMaker", "c.yaml", "compute_environment: AMAZON_SAGEMAKER\n", "1:1", 'compute_environment: "AMAZON_SAGEMAKER" is not supported', "Only LOCAL_MACHINE is supported; delete the key."),
    ("a compiler that is none", "c.yaml", "use_cpu: true\ndynamo_config:\n  dynamo_backend: INDUKTOR\n", "3:3", 'dynamo_config.dynamo_backend: "INDUKTOR" is not legal here', "Did you mean inductor? Write no, eager,"),
    ("context parallelism", "c.yaml", "parallelism_config:\n  parallelism_config_cp_size: 2\n", "2:3", "parallelism_config.parallelism_config_cp_size: 2 is not supported", "Write 1, or delete it: processes share samples (sp_size),"),
    ("sequence parallelism of another library", "c.yaml", "parallelism_config:\n  parallelism_config_sp_size: 2\n  parallelism_config_sp_backend: torch\n", "3:3", 'parallelism_config.parallelism_config_sp_backend: "torch" is not legal here', "Write deepspeed."),
    ("sequences in groups that do not divide", "c.yaml", YAML + "  sequence_parallel_size: 3\n", "4:3", "sequence_parallel_size: 3 does not divide the 2 processes", "Write 1 or 2, or start another number of processes."),
    ("half a process for a sequence", "c.yaml", YAML + "  sequence_parallel_size: 0\n", "4:3", "sequence_parallel_size: 0 is not legal here", "Write an integer above 0"),
    ("an unknown launcher", "c.yaml", YAML + "  deepspeed_multinode_launcher: psdh\n", "4:3", 'deepspeed_multinode_launcher: "psdh" is not legal here', "Did you mean pdsh? Write standard, pdsh, openmpi, slurm,"),
    ("a switch that is text", "c.yaml", "use_cpu: maybe\n", "1:1", 'use_cpu: "maybe" is not legal here', "Write true or false (default false)."),
    ("a path for the section", "c.yaml", "deepspeed_config: zero3.json\n", "1:1", 'deepspeed_config: "zero3.json" is not a mapping of keys', "Write a path as deepspeed_config: {deepspeed_config_file:"),
    ("a list for the section", "c.yaml", "deepspeed_config: [zero3.json]\n", "1:1", 'deepspeed_config: ["zero3.json"] is not a mapping of keys', "Write a path as deepspeed_config: {deepspeed_config_file:"),
    ("a missing named file", "c.yaml", YAML + "  deepspeed_config_file: ds.json\n", "4:3", "deepspeed_config_file: no file ds.json", "Check the path: the working directory holds no such name."),
    ("a list of named files", "c.yaml", YAML + "  deepspeed_config_file: [a.json, b.json]\n", "4:3", 'deepspeed_config_file: ["a.json", "b.json"] is not a path', "Write the path of a DeepSpeed JSON."),
    ("the file itself named", "c.yaml", YAML + "  deepspeed_config_file: c.yaml\n", "4:3", "deepspeed_config_file: c.yaml is a launch config, not a DeepSpeed configuration", "Name a DeepSpeed JSON here."),
    ("a home of nobody", "c.yaml", YAML + "  deepspeed_config_file: ~nobody-here/ds.json\n", "4:3", "deepspeed_config_file: no file ~nobody-here/ds.json", "The folder ~nobody-here does not exist or cannot be read; check the path."),
    ("a name beyond any length", "c.yaml", YAML + f"  deepspeed_config_file: {'x' * 5000}.json\n", "4:3", "deepspeed_config_file: no file xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx", "Check the path: the working directory holds no such name."),
    ("a NUL in a name", "c.yaml", YAML + '  deepspeed_config_file: "a\\0/b.json"\n', "4:3", "deepspeed_config_file: no file a\x00/b.json", "The folder a\x00 does not exist or cannot be read; check the path."),
    # --- contradictions
    ("fp16 against its successor", "c.yaml", N + "fp16: true\nmixed_precision: bf16\n", "2:1", 'fp16: true, but mixed_precision is "bf16" at c.yaml:3:1', "Delete it."),
    ("fp16 and bf16", "c.json", '{"fp16": {"enabled": true},\n"bf16": {"enabled": true}}', "2:10", "bf16.enabled: true, and fp16.enabled is true at c.json:1:11", "Enable one of them."),
    ("fp16 and bf16 by other spellings", "c.json", '{"fp16": {"enabled": 1},\n"bfloat16": {"enabled": "true"}}', "2:14", "bfloat16.enabled: true, and fp16.enabled is true at c.json:1:11", "Enable one of them."),
    ("precision against a section", "c.yaml", "mixed_precision: bf16\n" + YAML + "  fp16: {enabled: true}\n", "5:10", "fp16.enabled: true, but mixed_precision is bf16 at c.yaml:1:1", 'Write "auto" here, or false.'),
    ("precision against one that is off", "c.yaml", "mixed_precision: bf16\n" + YAML + "  bf16: {enabled: false}\n", "5:10", "bf16.enabled: false, but mixed_precision is bf16 at c.yaml:1:1", 'Write "auto" here, or true.'),
    ("no precision against a section", "c.yaml", "mixed_precision: 'no'\n" + YAML + "  bf16: {enabled: true}\n", "5:10", "bf16.enabled: true, but mixed_precision is no at c.yaml:1:1", 'Write "auto" here, or false.'),
    ("an offload without a stage", "c.yaml", YAML + "  offload_param_device: cpu\n", "4:3", "offload_param_device: cpu needs ZeRO stage 3, but the stage is 2 where none is written", "Write zero_stage: 3, or offload to none instead."),
    ("parameter offload at stage 2", "c.yaml", YAML + "  zero_stage: 2\n  offload_param_device: cpu\n", "5:3", "offload_param_device: cpu needs ZeRO stage 3, but the stage is 2 at c.yaml:4:3", "Write 3 at c.yaml:4:3, or offload to none instead."),
    ("parameter offload without any stage", "c.json", '{"zero_optimization": {"offload_param": {"device": "cpu"}}}', "1:42", "zero_optimization.offload_param.device: cpu needs ZeRO stage 3, but the stage is 0 where none is written", "Write zero_optimization.stage: 3, or offload to none instead."),
    ("NVMe at stage 2", "c.json", "{" + ZERO2 + '"offload_optimizer": {"device": "nvme", "nvme_path": "/n"}}}', "1:58", "zero_optimization.offload_optimizer.device: nvme needs ZeRO stage 3, but the stage is 2 at c.json:1:24", "Write 3 at c.json:1:24, or offload to none or cpu instead."),
    ("NVMe without a path", "c.yaml", YAML + "  zero_stage: 3\n  offload_param_device: nvme\n  offload_param_nvme_path: none\n", "5:3", "offload_param_device: nvme without a path", "Write offload_param_nvme_path: a local folder."),
    ("a ratio at stage 2", "c.json", "{" + ZERO2 + '"offload_optimizer": {"device": "cpu", "ratio": 0.3}}}', "1:75", "zero_optimization.offload_optimizer.ratio: 0.3 needs ZeRO stage 3, but the stage is 2 at c.json:1:24", "Write 3 at c.json:1:24, or delete it."),
    ("super offload", "c.json", "{" + ZERO2 + '"offload_optimizer": {"super_offload": true}}}', "1:58", "zero_optimization.offload_optimizer.super_offload: true, but its steps on the CPU begin inside backward(), before the loop asks for a step", "Delete it; offload_optimizer without it updates the weights in optimizer.step()."),
    ("batch arithmetic", "c.yaml", YAML + "  train_batch_size: 10\n  train_micro_batch_size_per_gpu: 3\n  gradient_accumulation_steps: 2\n", "4:3", "train_batch_size: 10, but train_micro_batch_size_per_gpu 3 × gradient_accumulation_steps 2 × num_processes 2 = 12", "Write 12, or auto, or delete it: it follows from the others."),
    ("batch division", "c.json", '{"train_batch_size": 10, "train_micro_batch_size_per_gpu": 3}', "1:2", "train_batch_size: 10 is not a multiple of train_micro_batch_size_per_gpu 3", "Write a multiple of 3, e.g. 9."),
    ("warm-up beyond the total", "c.json", '{"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10, "warmup_num_steps": 20}}}', "1:75", "scheduler.params.warmup_num_steps: 20 steps of warm-up are more than the total_num_steps of 10", "Write at most 10, or raise total_num_steps."),
    ("clipping in two places", "c.json", '{"gradient_clipping": 1, "optimizer": {"type": "AdamW", "params": {"max_grad_norm": 2}}}', "1:68", "optimizer.params.max_grad_norm = 2: DeepSpeed refuses it here", "Delete it; write gradient_clipping."),
    ("prescaling", "c.json", '{"prescale_gradients": true, ' + ZERO2[:-2] + "}}", "1:2", "prescale_gradients: true while ZeRO reduces by reduce_scatter", "Delete it, or write zero_optimization.reduce_scatter: false."),
    ("predividing", "c.json", '{"gradient_predivide_factor": 2.0, ' + ZERO2[:-2] + "}}", "1:2", "gradient_predivide_factor: 2.0 while ZeRO reduces by reduce_scatter", "Delete it, or write zero_optimization.reduce_scatter: false."),
    ("a rank beyond the machines", "c.yaml", "num_machines: 2\nmachine_rank: 2\nnum_processes: 4\n", "2:1", "machine_rank: 2, but num_machines is 2 and ranks count from 0", "Write at most 1."),
    ("uneven machines", "c.yaml", "num_machines: 2\nnum_processes: 3\n", "2:1", "num_processes: 3 processes do not divide among 2 machines", "Write a multiple of 2."),
    ("two filters", "c.yaml", YAML + "  deepspeed_inclusion_filter: a\n  deepspeed_exclusion_filter: b\n", "5:3", 'deepspeed_exclusion_filter = "b": deepspeed_inclusion_filter is written too, at c.yaml:4:3', "Keep one of the two."),
    ("a short field against an inline one", "c.yaml", YAML + "  zero_stage: 2\n  zero_optimization: {stage: 3}\n", "4:3", "zero_stage: 2 here, but 3 at c.yaml:5:23", "Keep one of the two, or write auto in the DeepSpeed JSON."),
]  # fmt: skip

# The replacement that follows the fix's words in the rows above: (row, old text, new text)
MENDED = [
    ("a list at the top", "- zero_stage: 2", "num_processes: 2"),
    ("a merge conflict in JSON", '<<<<<<< HEAD\n"steps_per_print": 1\n=======\n"steps_per_print": 2\n>>>>>>> other\n', '"steps_per_print": 1'),
    ("a tab as indentation", "\t", "  "),
    ("a missing colon", "num_processes 2", "num_processes: 2"),
    ("a missing blank after the colon", "num_processes:2", "num_processes: 2"),
    ("two keys on a line", " mixed", "\nmixed"),
    ("an indentation that fits nothing", "    zero", "  zero"),
    ("a key deeper than its neighbours", "  mixed", "mixed"),
    ("an open bracket", "[0, 1", "[0, 1]"),
    ("an open brace", "2\n", "2}\n"),
    ("an unclosed quote", "'bf16", "'bf16'"),
    ("an unknown escape", "C:\\logs", "C:\\\\logs"),
    ("a percent sign first", "%HOME%", '"%HOME%"'),
    ("a duplicate key", "num_processes: 2\n", ""),
    ("two documents", "num_processes: 2\n---\n", ""),
    ("a harmless tag", "!!int ", ""),
    ("an undefined alias", "num_processes: *n", "_n: &n 2\nnum_processes: *n"),
    ("a NUL byte", "\x00", ""),
    ("an unclosed brace", "8", "8}"),
    ("an unclosed inner brace", "true,", "true},"),
    ("a brace too many", "}}", "}"),
    ("an open comment", "why", "why */"),
    ("a missing comma", "1 ", "1, "),
    ("two commas", ",,", ","),
    ("an equals sign", "=", ":"),
    ("no colon", ' true', ': {"enabled": true}'),
    ("a number as key", "{1: 2}", '{"steps_per_print": 2}'),
    ("an unescaped backslash", "D:\\swap", "D:\\\\swap"),
    ("curly quotes", "“fp16”", '"fp16"'),
    ("an Hjson text", "cpu", '"cpu"'),
    ("a template", "${bs}", "8"),
    ("text after the end", "\nend", ""),
    ("not a number", "NaN", "1.0"),
    ("a misplaced key", '{"offload_optimizer": {"device": "cpu"}}', '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}'),
    ("a stage at the top", '{"stage": 2}', '{"zero_optimization": {"stage": 2}}'),
    ("a parameter beside params", '"lr": 1e-5, "params": {}', '"params": {"lr": 1e-5}'),
    ("another optimizer's parameter", '"Adam"', '"SGD"'),
    ("another schedule's parameter", "WarmupLR", "WarmupDecayLR"),
    ("a short field in a JSON", '"zero_stage": 2', '"zero_optimization": {"stage": 2}'),
    ("a short field at the top", "zero_stage: 2", "deepspeed_config: {zero_stage: 2}"),
    ("a launch key in the section", "  mixed", "mixed"),
    ("a removed section", '"amp": {"enabled": false}', '"bf16": {"enabled": true}'),
    ("the old curriculum", '"curriculum_learning": {"enabled": true}', ''),
    ("legacy stage 1", "true", "false"),
    ("torch.compile in the JSON", '{"compile": {"backend": "inductor"}}', '{"steps_per_print": 1}'),
    ("a kernel as optimizer", "FusedAdam", "AdamW"),
    ("max_grad_norm", '"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1}}', '"gradient_clipping": 1'),
    ("stage 4", "zero_stage: 4", "zero_stage: 3"),
    ("a section that is a value", '"fp16": true', '"fp16": {"enabled": true}'),
    ("an offload without its braces", '"offload_param": "cpu"', '"offload_param": {"device": "cpu"}'),
    ("one beta", "[0.9]", "[0.9, 0.999]"),
    ("an optimizer without type", '"params"', '"type": "AdamW", "params"'),
    ("FSDP", "FSDP\n", "DEEPSPEED\ndeepspeed_config: {zero_stage: 3}\n"),
    ("a path for the section", "deepspeed_config: zero3.json", "deepspeed_config: {deepspeed_config_file: other.json}"),
    ("a missing named file", "ds.json", "other.json"),
    ("fp16 and bf16", '"bf16": {"enabled": true}', '"bf16": {"enabled": false}'),
    ("precision against a section", "{enabled: true}", "{enabled: auto}"),
    ("parameter offload at stage 2", "zero_stage: 2", "zero_stage: 3"),
    ("parameter offload without any stage", '"offload_param"', '"stage": 3, "offload_param"'),
    ("an offload without a stage", "  offload", "  zero_stage: 3\n  offload"),
    ("NVMe at stage 2", '"nvme", "nvme_path": "/n"', '"cpu"'),
    ("NVMe without a path", "nvme_path: none", "nvme_path: /nvme"),
    ("a ratio at stage 2", '"stage": 2', '"stage": 3'),
    ("batch arithmetic", "size: 10", "size: 12"),
    ("batch division", "10", "9"),
    ("warm-up beyond the total", "20", "10"),
    ("prescaling", '"prescale_gradients": true, ', ""),
    ("predividing", '"stage": 2', '"stage": 2, "reduce_scatter": false'),
    ("a rank beyond the machines", "rank: 2", "rank: 1"),
    ("uneven machines", "processes: 3", "processes: 4"),
    ("two filters", "  deepspeed_exclusion_filter: b\n", ""),
    ("a short field against an inline one", "  zero_stage: 2\n", ""),
]  # fmt: skip

ZERO_YAML = "deepspeed_config:\n  zero_optimization:\n    stage: 3\n    sub_group_size: "
SUB_GROUP = ("zero_optimization", "sub_group_size")
LR = ("optimizer", "params", "lr")

# Values that other readers misread, and their meaning here: (name, file, content, training or launch path, value)
READ: list[tuple[str, str, str | bytes, tuple[str, ...], Any]] = [
    ("an exponent for an integer", "c.yaml", ZERO_YAML + "2e8\n", SUB_GROUP, 200_000_000),
    ("a signed exponent", "c.yaml", ZERO_YAML + "+2E+8\n", SUB_GROUP, 200_000_000),
    ("an exponent in quotes", "c.yaml", ZERO_YAML + "'2e8'\n", SUB_GROUP, 200_000_000),
    ("a whole fraction for an integer", "c.yaml", ZERO_YAML + "200000000.0\n", SUB_GROUP, 200_000_000),
    ("a hexadecimal number", "c.yaml", ZERO_YAML + "0xBEBC200\n", SUB_GROUP, 200_000_000),
    ("an octal number", "c.yaml", "num_processes: 0o17\n", ("num_processes",), 15),
    ("a leading zero", "c.yaml", "num_processes: 010\n", ("num_processes",), 10),
    ("a small number", "c.yaml", "optimizer: {type: AdamW, params: {lr: 5e-5}}\n", LR, 5e-5),
    ("a number without a zero", "c.yaml", "optimizer: {type: AdamW, params: {lr: .1E-4}}\n", LR, 1e-5),
    ("a number that ends in a dot", "c.yaml", "gradient_clipping: 1.\n", ("gradient_clipping",), 1.0),
    ("a number in JSON's quotes", "c.json", '{"optimizer": {"type": "adamw", "params": {"lr": "1e-3"}}}', LR, 1e-3),
    ("no", "c.yaml", "mixed_precision: no\n", ("mixed_precision",), "no"),
    ("fp16, before mixed_precision", "c.yaml", "distributed_type: MULTI_GPU\nfp16: true\n", ("mixed_precision",), "fp16"),
    ("no fp16, before mixed_precision", "c.yaml", "distributed_type: MULTI_GPU\nfp16: false\n", ("mixed_precision",), "no"),
    ("fp16 beside its successor", "c.yaml", N + "fp16: true\nmixed_precision: FP16\n", ("mixed_precision",), "fp16"),
    ("no fp16 beside another precision", "c.yaml", N + "fp16: false\nmixed_precision: bf16\n", ("mixed_precision",), "bf16"),
    ("yes for a switch", "c.yaml", "use_cpu: yes\n", ("use_cpu",), True),
    ("off for a switch", "c.yaml", "use_cpu: off\n", ("use_cpu",), False),
    ("no for a switch", "c.yaml", "same_network: 'no'\n", ("same_network",), False),
    ("on for a switch", "c.yaml", YAML + "  fp16: {enabled: on}\n", ("fp16", "enabled"), True),
    ("True in YAML", "c.yaml", "use_cpu: True\n", ("use_cpu",), True),
    ("true in quotes", "c.json", '{"fp16": {"enabled": "true"}}', ("fp16", "enabled"), True),
    ("1 for a switch", "c.json", '{"fp16": {"enabled": 1}}', ("fp16", "enabled"), True),
    ("AUTO", "c.json", '{"fp16": {"enabled": "AUTO"}}', ("fp16", "enabled"), AUTO),
    ("auto without quotes", "c.yaml", "num_processes: auto\n", ("num_processes",), AUTO),
    ("a device in capitals", "c.json", "{" + ZERO3 + '"offload_param": {"device": "CPU"}}}', ("zero_optimization", "offload_param", "device"), "cpu"),
    ("a precision in capitals", "c.yaml", "mixed_precision: BF16\n", ("mixed_precision",), "bf16"),
    ("an optimizer in small letters", "c.json", '{"optimizer": {"type": "adamw"}}', ("optimizer", "type"), "AdamW"),
    ("a time of day", "c.yaml", "main_process_ip: 1:30\n", ("main_process_ip",), "1:30"),
    ("a date", "c.yaml", "log_dir: 2024-01-01\n", ("log_dir",), "2024-01-01"),
    ("digits for text", "c.yaml", "log_dir: '5'\n", ("log_dir",), "5"),
    ("a tilde for nothing", "c.yaml", "main_process_ip: ~\n", ("main_process_ip",), None),
    ("a GPU number", "c.yaml", "gpu_ids: 0\n", ("gpu_ids",), 0),
    ("a NVMe path of none", "c.yaml", YAML + "  offload_param_nvme_path: none\n", ("zero_optimization", "stage"), 2),
    ("the boolean ZeRO", "c.json", '{"zero_optimization": true}', ("zero_optimization", "stage"), 1),
    ("no boolean ZeRO", "c.json", '{"zero_optimization": false}', ("zero_optimization", "stage"), 0),
    ("the old name of a number of threads", "c.json", '{"aio": {"thread_count": 2}}', ("aio", "intra_op_parallelism"), 2),
    ("a byte order mark", "c.yaml", b"\xef\xbb\xbf" + N.encode(), ("num_processes",), 2),
    ("CRLF", "c.yaml", N.replace("\n", "\r\n") + "use_cpu: true\r\n", ("use_cpu",), True),
    ("old line ends", "c.yaml", N.replace("\n", "\r") + "use_cpu: true\r", ("use_cpu",), True),
    ("no line end", "c.yaml", "num_processes: 2", ("num_processes",), 2),
    ("marks around a document", "c.yaml", "%YAML 1.2\n---\nnum_processes: 2\n...\n", ("num_processes",), 2),
    ("a key with a question mark", "c.yaml", "? num_processes\n: 2\n", ("num_processes",), 2),
    ("an anchor", "c.yaml", "_n: &n 2\nnum_processes: *n\n", ("num_processes",), 2),
    ("a merge", "c.yaml", "_b: &b {stage: 1, sub_group_size: 7}\nzero_optimization: {<<: *b, stage: 3}\n", ("zero_optimization", "stage"), 3),
    ("a merge of several", "c.yaml", "_a: &a {stage: 1}\n_b: &b {stage: 2}\nzero_optimization: {<<: [*a, *b]}\n", ("zero_optimization", "stage"), 1),
    ("a comment key", "c.json", '{"_comment": {"any": ["thing"]}, "steps_per_print": 1}', ("steps_per_print",), 1),
    ("JSON called YAML, with tabs", "c.yaml", '{\n\t"steps_per_print": 1\n}', ("steps_per_print",), 1),
    ("YAML called JSON", "c.json", "zero_optimization:\n  stage: 2\n", ("zero_optimization", "stage"), 2),
    ("bare keys in a YAML of braces", "c.yaml", "{steps_per_print: 1}", ("steps_per_print",), 1),
    ("comments in JSON", "c.json", '// a\n{"steps_per_print": 1, # b\n/* c */}', ("steps_per_print",), 1),
    ("a comma too many in JSON", "c.json", '{"steps_per_print": 1,}', ("steps_per_print",), 1),
    ("bare keys in JSON", "c.json", "{steps_per_print: 1}", ("steps_per_print",), 1),
    ("single quotes in JSON", "c.json", "{'steps_per_print': 1, 'fp16': {'enabled': false}}", ("steps_per_print",), 1),
    ("line ends for commas in JSON", "c.json", '{"steps_per_print": 1\n "dump_state": true}', ("dump_state",), True),
    ("an escape in JSON", "c.json", '{"steps\\u005fper_print": 1}', ("steps_per_print",), 1),
    ("a stage of a fraction that is whole", "c.json", '{"zero_optimization": {"stage": 2.0}}', ("zero_optimization", "stage"), 2),
    ("null for a section", "c.json", "{" + ZERO3 + '"offload_param": null}}', ("zero_optimization", "offload_param"), None),
]  # fmt: skip

by_name = {row[0]: row for row in WRONG}


@pytest.fixture(autouse=True)
def _working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.json").write_text('{"steps_per_print": 1}')


def problems_of(name: str, content: str | bytes) -> tuple[Problem, ...]:
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    start = time.process_time()
    try:
        check_document(read_document(name))
    except ConfigError as error:
        return error.problems
    finally:
        assert time.process_time() - start < SECONDS
    return ()


def test_the_table_is_long_and_without_repetition() -> None:
    """At least 150 wrong inputs, no two the same."""
    assert len({(row[1], row[2]) for row in WRONG}) == len(by_name) == len(WRONG) >= 150


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("name", "content", "place", "headline", "fix"), [w[1:] for w in WRONG], ids=list(by_name))
def test_one_fault_is_one_located_problem(name: str, content: str | bytes, place: str, headline: str, fix: str) -> None:
    """The one problem has its place, its message in one line, and the right value."""
    found = problems_of(name, content)
    assert [p.headline for p in found][1:] == []
    (problem,) = found
    assert problem.where == (f"{name}:{place}" if place else name)
    assert problem.headline.removeprefix(f"{problem.where}: ").startswith(headline)
    assert problem.fix.startswith(fix)
    assert "\n" not in problem.headline + problem.fix


# Rows whose fix is one word. The test writes the word at the problem's place.
SUGGESTED = [row[0] for row in WRONG if row[5].startswith("Did you mean ") or "as JSON spells it" in row[5]]


@pytest.mark.parametrize("row", SUGGESTED)
def test_what_is_suggested_mends(row: str) -> None:
    """The fix's word, put at the problem's place, leaves no problem."""
    _, name, content, *_ = by_name[row]
    assert isinstance(content, str)
    (problem,) = problems_of(name, content)
    line, column = (int(number) for number in problem.where.split(":")[1:])
    at = sum(map(len, content.splitlines(keepends=True)[: line - 1])) + column - 1
    if problem.message == "unknown key":
        old = next(
            k for k in (problem.key.rpartition(".")[2], json.loads(f'"{problem.key.strip(chr(34))}"')) if k in content
        )
    else:
        old = problem.message.split(" is not legal")[0].split(" where a value")[0].strip('"`')
    new = problem.fix.removeprefix("Did you mean ").removeprefix("Write ").split("?")[0].split(",")[0]
    assert problems_of(name, content[:at] + content[at:].replace(old, new, 1)) == ()


@pytest.mark.parametrize(("row", "old", "new"), MENDED, ids=[m[0] for m in MENDED])
def test_following_the_fix_mends(row: str, old: str, new: str) -> None:
    """The fix, followed by hand, leaves no problem."""
    _, name, content, *_ = by_name[row]
    assert isinstance(content, str)
    assert content.count(old) == 1
    assert problems_of(name, content.replace(old, new)) == ()


@pytest.mark.parametrize(("name", "content", "path", "value"), [r[1:] for r in READ], ids=[r[0] for r in READ])
def test_traps_that_are_legal(name: str, content: str | bytes, path: tuple[str, ...], value: Any) -> None:
    """Spellings that other readers misread have one meaning, of the key's type, and no error."""
    assert problems_of(name, content) == ()
    document = read_document(name)
    entry = document.launch.get(*path) or document.deepspeed.get(*path)
    assert entry is not None
    assert (entry.value, type(entry.value)) == (value, type(value))


def test_hjson_is_read_with_a_warning() -> None:
    """Text that Accelerate and transformers could not read is one warning, at its start. Strict JSON has none."""
    Path("c.json").write_text("{\n  'train_batch_size': 1\n  memory_breakdown: true\n}")
    warnings = [p for p in find_problems(read_document("c.json")) if p.severity == "warning"]
    assert [(p.where, p.message.split(",")[0]) for p in warnings] == [("c.json:2:3", "Hjson")]
    Path("c.json").write_text('{\n  "train_batch_size": 1, // one\n  "memory_breakdown": true,\n}')
    assert find_problems(read_document("c.json")) == []


def test_all_words_of_a_template_come_together() -> None:
    """Reading continues past words without a value, so one report has them all and the other problems."""
    found = problems_of(
        "c.json", '{"train_batch_size": BATCH_SIZE,\n"steps_per_print": ${n},\n"fp16": {"enable": True}}'
    )
    assert [(p.where, p.key) for p in found] == [
        ("c.json:1:22", "train_batch_size"),
        ("c.json:2:20", "steps_per_print"),
        ("c.json:3:10", "fp16.enable"),
        ("c.json:3:20", "fp16.enable"),
    ]


def test_what_was_found_before_the_text_broke_is_told() -> None:
    """A duplicate key and a bare word above the point where reading stops are in the same report."""
    found = problems_of("c.json", '{"fp16": {}, "fp16": {},\n"steps_per_print": N,\n"dump_state" true}')
    assert [p.where for p in found] == ["c.json:1:14", "c.json:2:20", "c.json:3:14"]


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    """The error names a folder, a loop of links, a file for a folder, or a name that no system takes."""
    Path("loop.yaml").symlink_to("loop.yaml")
    for path, message in {
        str(tmp_path): "cannot be read: is a directory",
        "missing.yaml": "no such file",
        "loop.yaml": "cannot be read: too many levels of symbolic links",
        "other.json/c.yaml": "cannot be read: not a directory",
        "x" * 5000: "cannot be read: file name too long",
        "a\0b.yaml": "cannot be read: embedded null byte",
        "/dev/zero": "is larger than",
        "/dev/null": "the file is empty",
    }.items():
        with pytest.raises(ConfigError) as caught:
            read_document(path)
        (problem,) = caught.value.problems
        assert problem.where.startswith(path)
        assert problem.message.startswith(message)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission() -> None:
    """The error says that the file may not be read."""
    Path("other.json").chmod(0)
    with pytest.raises(ConfigError, match="cannot be read: permission denied"):
        read_document("other.json")


def test_the_configuration_of_another_tool() -> None:
    """A file with only foreign keys gets one finding for the file. One foreign key next to ours gets its own."""
    (problem,) = problems_of("pl.yaml", "trainer: {max_epochs: 3}\nmodel: {hidden: 3}\ndata: {path: x}\n")
    assert problem.headline == (
        "pl.yaml: holds no key of a launch config or of a DeepSpeed configuration, but trainer, model, data"
    )
    assert "`zero-plugin config` writes a launch config" in problem.fix
    (problem,) = problems_of("one.yaml", "trainer: {max_epochs: 3}\nnum_processes: 2\n")
    assert problem.headline == "one.yaml:1:1: trainer: unknown key"
