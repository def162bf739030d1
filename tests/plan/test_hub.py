"""A model is found by its name on the Hugging Face hub: here a server that answers as the hub does."""

from __future__ import annotations

import hashlib
import json
import struct
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.plan.test_model_source import LLAMA
from zero_plugin.errors import ConfigError
from zero_plugin.plan.model_source import ModelSource, open_model

pytest.importorskip("huggingface_hub")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SHAPES = {"model.embed_tokens.weight": [100, 16], "model.layers.0.mlp.up_proj.weight": [40, 16], "norm.weight": [16]}


def safetensors_bytes() -> bytes:
    """Build a file of weights. Only its header should be read."""
    header, end = {}, 0
    for name, shape in SHAPES.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


FILES = {"/lab/llama/config.json": json.dumps(LLAMA).encode(), "/lab/bare/model.safetensors": safetensors_bytes()}


class Hub(BaseHTTPRequestHandler):
    """A hub with models, files and byte ranges of them. `lab/gated` is listed, but no request may read it."""

    read: list[int] = []  # noqa: RUF012 - one server at a time

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0].replace(f"/resolve/{COMMIT}/", "/").replace("/resolve/main/", "/")
        if path.startswith("/api/models/"):
            owner, name = path.split("/")[3:5]
            files = [key.split("/")[3] for key in FILES if key.startswith(f"/{owner}/{name}/")]
            found = [{"rfilename": file} for file in files]
            body = json.dumps({"id": f"{owner}/{name}", "sha": COMMIT, "siblings": found, "tags": []}).encode()
            files += ["config.json"] * (name == "gated")
            self._send(200 if files else 404, body, with_body, {} if files else {"X-Error-Code": "RepoNotFound"})
        elif path.startswith("/lab/gated/"):
            self._send(403, b"", with_body, {"X-Error-Code": "GatedRepo"})
        elif path in FILES:
            body, status, more = FILES[path], 200, {"Accept-Ranges": "bytes"}
            if wanted := self.headers.get("Range"):
                first, last = wanted.removeprefix("bytes=").split("-")
                status, end = 206, min(int(last), len(body) - 1) if last else len(body) - 1
                more["Content-Range"] = f"bytes {first}-{end}/{len(body)}"
                body = body[int(first) : end + 1]
            if with_body:
                self.read.append(len(body))
            tag = hashlib.sha1(FILES[path]).hexdigest()
            self._send(status, body, with_body, {"X-Repo-Commit": COMMIT, "ETag": f'"{tag}"', **more})
        else:
            known = any(key.startswith("/".join(path.split("/")[:3]) + "/") for key in FILES)
            self._send(404, b"", with_body, {"X-Error-Code": "EntryNotFound" if known else "RepoNotFound"})

    def _send(self, status: int, body: bytes, with_body: bool, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    from huggingface_hub import constants, hf_api

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(hf_api.api, "endpoint", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    Hub.read.clear()
    yield server
    server.shutdown()
    server.server_close()


def test_a_model_with_a_configuration(hub: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It equals the same `config.json` here. Later its copy in the cache suffices, without a network."""
    from huggingface_hub import constants

    sizes, activations = open_model(ModelSource("lab/llama", trace=False), 128)
    assert (sizes.name, sizes.hidden_size, sizes.layers) == ("LlamaForCausalLM", 512, 4)
    hub.shutdown()
    hub.server_close()
    assert open_model(ModelSource("lab/llama", trace=False), 128) == (sizes, activations)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert open_model(ModelSource("lab/llama", trace=False), 128) == (sizes, activations)


def test_a_model_without_one(hub: ThreadingHTTPServer) -> None:
    """Headers of its weights are read by ranges, and no weight."""
    sizes, _ = open_model(ModelSource("lab/bare", heads=2), 128)
    assert sizes.elements == 100 * 16 + 40 * 16 + 16
    assert (sizes.name, sizes.hidden_size, sizes.vocabulary) == ("bare", 16, 100)
    assert Hub.read


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("lab/absent", "the Hugging Face hub has no such model"),
        ("lab/gated", "needs access that you do not have\n *Type `hf auth login`"),
        ("no such name", "neither a file, nor a folder, nor module:function\n"),
        ("lab/absent/config.json", "neither a file, nor a folder, nor module:function\n"),
    ],
)
def test_names_of_nothing(hub: ThreadingHTTPServer, name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        open_model(ModelSource(name), 128)


def test_offline(hub: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says so, and what to give instead, without trying again."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    waits: list[float] = []
    monkeypatch.setattr(_http.time, "sleep", waits.append)
    told = r"the hub does not answer(?s:.*)Name .*--params, --hidden_size and --layers"

    hub.shutdown()
    hub.server_close()
    for offline in (False, True):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        with pytest.raises(ConfigError, match=told):
            open_model(ModelSource("lab/llama"), 128)
    assert not waits  # a wrong name is a usual mistake
