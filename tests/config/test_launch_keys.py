"""Launch keys that are accepted and not followed, and refused ones."""

from __future__ import annotations

import pytest

from zero_plugin.config.check import check_document
from zero_plugin.config.read import document_from_mapping
from zero_plugin.errors import ConfigError


def test_keys_without_meaning_are_left_out() -> None:
    """Accelerate's TPU-pod and FSDP keys do no harm. A key with a value is noted."""
    boilerplate = {"tpu_env": [], "tpu_use_cluster": False, "downcast_bf16": "no", "main_training_function": "main"}
    quiet = document_from_mapping({"num_processes": 1, **boilerplate}, "code")
    assert quiet.notes == ()
    spoken = document_from_mapping({"num_processes": 1, "fsdp_config": {"fsdp_version": 2}}, "code")
    (note,) = spoken.notes
    assert (note.headline, note.severity) == ("code: fsdp_config: has no meaning here (FSDP only)", "warning")


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [
        ("tpu_name", "pod-1", "gcloud compute tpus tpu-vm ssh NAME --zone=ZONE --worker=all"),
        ("tpu_zone", "us-central1-a", "--worker=all"),
        ("tpu_vm", ["a", "b"], "--worker=all"),
        ("commands", ["pip install x"], "--command='…'"),
        ("command_file", "setup.sh", "--command='…'"),
        ("tpu_env", ["A=1"], "NAME=value before the command"),
        ("tpu_use_sudo", True, "sudo before the command"),
        ("downcast_bf16", "yes", "mixed_precision: bf16"),
    ],
)
def test_keys_of_a_clouds_command_line_say_what_to_do(key: str, value: object, fix: str) -> None:
    """The message names options that Accelerate passes to gcloud, with the command that does it."""
    (note,) = document_from_mapping({"num_processes": 1, key: value}, "code").notes
    assert (note.key, note.severity) == (key, "warning")
    assert fix in note.fix


def test_a_pod_is_not_started_from_one_machine() -> None:
    """`tpu_use_cluster` starts all machines. Starting one alone would wait for the others, so it is an error."""
    with pytest.raises(ConfigError, match=r"tpu_use_cluster: true is not supported\n.*--worker=all"):
        check_document(document_from_mapping({"num_processes": 1, "tpu_use_cluster": True}, "code"))


def test_keys_that_are_followed_are_not_noted() -> None:
    """`zero3_init_flag` has a note only about how it was read."""
    assert document_from_mapping({"deepspeed_config": {"zero3_init_flag": True}}, "code").notes == ()
    off = document_from_mapping({"deepspeed_config": {"zero3_init_flag": "false"}}, "code")
    assert [note.headline for note in off.notes] == ['code: zero3_init_flag: read "false" as false']


@pytest.mark.parametrize("nothing", [None, False, "no", "", {}, "auto"], ids=str)
def test_a_refused_key_that_asks_for_nothing_is_legal(nothing: object) -> None:
    """A value without an effect is legal for every key whose effect is missing here."""
    check_document(document_from_mapping({"num_processes": 1, "compute_environment": nothing}, "code"))
    with pytest.raises(ConfigError, match="compute_environment"):
        check_document(document_from_mapping({"num_processes": 1, "compute_environment": "AMAZON_SAGEMAKER"}, "code"))
