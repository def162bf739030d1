"""The file that a command reads if it names none."""

from __future__ import annotations

from pathlib import Path

import pytest

from zero_plugin.config.find import default_config_file, find_config_file


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"HF_HOME": "/hf", "XDG_CACHE_HOME": "/cache"}, "/hf"),
        ({"XDG_CACHE_HOME": "/cache"}, "/cache/huggingface"),
        ({"HF_HOME": "", "XDG_CACHE_HOME": ""}, "~/.cache/huggingface"),
        ({}, "~/.cache/huggingface"),
        ({"HF_HOME": "~/models"}, "~/models"),
    ],
    ids=str,
)
def test_the_folder_is_hugging_faces(environ: dict[str, str], folder: str) -> None:
    """`$HF_HOME`, then `$XDG_CACHE_HOME/huggingface`, then `~/.cache/huggingface`; empty counts as unset."""
    assert default_config_file(environ) == Path(folder).expanduser() / "zero_plugin" / "default_config.yaml"


def test_order(tmp_path: Path) -> None:
    """The variable's file comes first, then our default, then Accelerate's, YAML before JSON, then none."""
    environ = {"HF_HOME": str(tmp_path)}
    assert find_config_file(environ) is None
    names = ["accelerate/default_config.json", "accelerate/default_config.yml", "accelerate/default_config.yaml"]
    for name in [*names, "zero_plugin/default_config.yaml"]:
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.touch()
        assert find_config_file(environ) == file
    assert find_config_file({**environ, "ZERO_PLUGIN_CONFIG_FILE": "typed.yaml"}) == Path("typed.yaml")
