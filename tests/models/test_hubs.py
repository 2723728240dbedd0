"""Weights from the hubs of torchvision and timm: from a server of our own, from their caches, and without a network."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from subprocess import CompletedProcess, run
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from safetensors.torch import save

from helpers.namespaces import machines, usable
from polyfed.errors import ModelError
from polyfed.models import from_torchvision, models
from polyfed.models.model_text import as_call

NETWORK = "shufflenet_v2_x0_5"
NETWORK_TEXT = f"torchvision:{NETWORK}"
ASKED = f"{NETWORK_TEXT}(pretrained=True)"
HUB_NETWORK, HUB_PLACE = "test_resnet.r160_in1k", "/timm/test_resnet.r160_in1k/resolve/main/model.safetensors"
IN_HUB = f"timm:{HUB_NETWORK}(pretrained=True)"
NOBODY = "http://127.0.0.1:9"
"""No server listens on this port."""
HANGS_AFTER = 600


@dataclass
class Hub:
    """A server with files by their paths; ``asked`` are those of the files that were fetched."""

    address: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    cut: bool = False


@pytest.fixture
def hub() -> Iterator[Hub]:
    found = Hub()

    class Answers(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            found.asked += [self.path] if self.path in found.files else []
            self.answer(with_body=True)

        def answer(self, with_body: bool) -> None:
            content = found.files.get(self.path)
            self.send_response(404 if content is None else 200)
            content = content or b""
            for name, value in (("Content-Length", str(len(content))), ("ETag", hashlib.sha256(content).hexdigest())):
                self.send_header(name, value)
            self.send_header("X-Repo-Commit", "0" * 40)
            self.end_headers()
            if with_body:
                self.wfile.write(content[: len(content) // 2] if found.cut else content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    found.address = f"http://127.0.0.1:{server.server_address[1]}"
    yield found
    server.shutdown()
    thread.join()
    server.server_close()


def built(text: str, classes: int = 3) -> torch.nn.Module:
    return models.build(as_call(text), classes=classes, input_shape=(3, 64, 64))


def same_but_for_the_head(model: torch.nn.Module, published: dict[str, torch.Tensor]) -> bool:
    own = model.state_dict()
    return all(torch.equal(own[name], published[name]) for name in own if not name.startswith("fc."))


@pytest.fixture
def torch_hub(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Hub, dict[str, torch.Tensor], str]:
    """A torchvision network whose weights are on the server, with the start of their checksum in the file name."""
    torch.manual_seed(5)
    published, content = built(NETWORK_TEXT, classes=1000).state_dict(), io.BytesIO()
    torch.save(published, content)
    path = f"/{NETWORK}-{hashlib.sha256(content.getvalue()).hexdigest()[:8]}.pth"
    hub.files[path] = content.getvalue()
    real = from_torchvision.published_weights(NETWORK)
    known = SimpleNamespace(url=hub.address + path, transforms=real.transforms)
    monkeypatch.setattr(from_torchvision, "published_weights", lambda name: known)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    return hub, published, path


def test_torchvision_fetches_weights_once(
    torch_hub: tuple[Hub, dict[str, torch.Tensor], str], capfd: pytest.CaptureFixture[str]
) -> None:
    hub, published, path = torch_hub
    assert same_but_for_the_head(built(ASKED), published)
    assert same_but_for_the_head(built(ASKED), published) and hub.asked == [path], "the second time from torch's cache"
    assert capfd.readouterr() == ("", ""), "standard output is for tables and JSON"


@pytest.mark.parametrize("manner", ["cut", "another file", "gone"])
def test_a_bad_answer_of_torchvisions_hub_gets_one_sentence_and_leaves_no_file(
    torch_hub: tuple[Hub, dict[str, torch.Tensor], str], tmp_path: Path, manner: str
) -> None:
    hub, _, path = torch_hub
    hub.cut = manner == "cut"
    if manner != "cut":
        hub.files = {path: b"something else"} if manner == "another file" else {}
    said = "HTTP Error 404" if manner == "gone" else "the checksum is wrong"
    with pytest.raises(
        ModelError, match=rf"could not download the pretrained weights from {hub.address}{path} \(.*{said}.*weights=\"FILE\""
    ):
        built(ASKED)
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


def test_a_damaged_file_in_torchs_cache_is_named(torch_hub: tuple[Hub, dict[str, torch.Tensor], str], tmp_path: Path) -> None:
    hub, _, path = torch_hub
    place = tmp_path / "torch" / "hub" / "checkpoints" / path[1:]
    place.parent.mkdir(parents=True)
    place.write_bytes(hub.files[path][:1000])
    with pytest.raises(ModelError, match=rf"the pretrained weights in {place} are damaged.*Delete the file"):
        built(ASKED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two domains of two classes."""
    root = tmp_path_factory.mktemp("images")
    for domain in ("a", "b"):
        for shade, label in ((40, "dark"), (200, "light")):
            (root / domain / label).mkdir(parents=True)
            for number in range(6):
                Image.new("RGB", (40, 40), (shade + number, shade, shade)).save(root / domain / label / f"{number}.png")
    return root


@dataclass(frozen=True)
class Program:
    """``polyfed run`` in a separate process, with separate caches."""

    images: Path
    place: Path

    def __call__(self, model: str, out: str = "r", machine: Sequence[str] = (), **variables: str) -> CompletedProcess[str]:
        words = ["run", f'image_folder(root="{self.images}", size=64)', "--model", model, "--rounds", "1", "--local-steps", "1"]
        words += ["--batch-size", "4", "--out", str(self.place / out), "-q", "--json"]
        own = {name: value for name, value in os.environ.items() if "proxy" not in name.lower() and not name.startswith("HF_")}
        caches = {name: str(self.place / name) for name in ("HF_HOME", "TORCH_HOME", "POLYFED_CACHE")}
        return run(
            [*machine, sys.executable, "-m", "polyfed", *words],
            env={**own, **caches, "OMP_NUM_THREADS": "1", **variables},
            capture_output=True,
            text=True,
            timeout=HANGS_AFTER,
            check=False,
        )


@pytest.fixture
def program(folder: Path, tmp_path: Path) -> Program:
    return Program(folder, tmp_path)


def digest(ended: CompletedProcess[str]) -> str:
    assert ended.returncode == 0, ended.stderr
    return str(json.loads(ended.stdout)["digest"])


def one_sentence(ended: CompletedProcess[str]) -> str:
    assert ended.returncode == 2 and ended.stdout == "", ended
    (line,) = ended.stderr.splitlines()
    assert line.startswith("polyfed: ") and 'weights="FILE"' in line and "pretrained=False" in line
    return line


@pytest.mark.slow
def test_timm_fetches_weights_from_the_hub_and_then_from_its_cache(program: Program, hub: Hub, tmp_path: Path) -> None:
    timm = pytest.importorskip("timm", reason="needs the extra polyfed[models]")
    torch.manual_seed(6)
    hub.files[HUB_PLACE] = save(timm.create_model("test_resnet").state_dict())
    (tmp_path / "w.safetensors").write_bytes(hub.files[HUB_PLACE])
    fetched = digest(program(IN_HUB, "fetched", HF_ENDPOINT=hub.address))
    assert hub.asked == [HUB_PLACE]
    assert digest(program(IN_HUB, "cached", HF_ENDPOINT=NOBODY)) == fetched and hub.asked == [HUB_PLACE]
    from_file = f'timm:{HUB_NETWORK}(weights="{tmp_path / "w.safetensors"}")'
    assert digest(program(from_file, "from-file")) == fetched


@pytest.mark.slow
@pytest.mark.parametrize("text", [IN_HUB, "resnet18(pretrained=True)"])
def test_behind_a_proxy_that_nobody_answers_there_is_one_sentence(program: Program, text: str) -> None:
    if text == IN_HUB:
        pytest.importorskip("timm", reason="needs the extra polyfed[models]")
    assert "refused" in one_sentence(program(text, HTTPS_PROXY=NOBODY, HTTP_PROXY=NOBODY))


@pytest.mark.slow
@pytest.mark.skipif(not usable(), reason="needs root, to make a machine without a network")
def test_without_a_network_there_is_one_sentence_and_files_in_torchs_cache_are_used(program: Program, tmp_path: Path) -> None:
    pytest.importorskip("timm", reason="needs the extra polyfed[models]")
    with machines(["alone"]) as found:
        alone = found["alone"].command([])
        assert "cannot reach huggingface.co" in one_sentence(program(IN_HUB, machine=alone))
        said = one_sentence(program(ASKED, machine=alone))
        place = Path(re.search(r"copy the file to (\S+\.pth)", said)[1])  # type: ignore[index]
        assert place.is_relative_to(tmp_path / "TORCH_HOME")
        torch.save(built(NETWORK_TEXT, classes=1000).state_dict(), place)
        from_file = f'{NETWORK_TEXT}(weights="{place}")'
        assert digest(program(ASKED, "cached", alone)) == digest(program(from_file, "from-file", alone))
