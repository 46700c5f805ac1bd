"""Models by their hub names: from the library's cache without a network, and what is said if not."""

from __future__ import annotations

import fnmatch
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from runtime.checkpoints.hub import fetch, hub_name
from runtime.checkpoints.open_checkpoint import open_checkpoint
from runtime.errors import ModelError
from tests.runtime.checkpoints.tiny_models import make_llama, write_folder

if TYPE_CHECKING:
    from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def quiet(_: str) -> None:
    pass


@pytest.mark.parametrize("revision", ["main", "v1.5"])
def test_what_the_cache_has_is_served_without_a_network(cache: Path, revision: str) -> None:
    at = cache / "models--org--a-tiny.model"
    (at / "refs").mkdir(parents=True)
    (at / "refs" / revision).write_text(COMMIT)
    write_folder(make_llama(), at / "snapshots" / COMMIT)
    name = "org/a-tiny.model" + ("" if revision == "main" else f"@{revision}")
    assert hub_name(name) == "org/a-tiny.model"
    checkpoint = open_checkpoint(fetch(name, quiet))
    assert checkpoint.config["model_type"] == "llama"
    with pytest.raises(ModelError, match=r"org/a-tiny\.model@other: no such folder; the Hugging"):
        fetch("org/a-tiny.model@other", quiet)


def test_what_it_does_not_have_is_explained() -> None:
    with pytest.raises(ModelError, match=r"cache does not have it.*hf download org/other --local"):
        fetch("org/other", quiet)


def test_paths_of_this_machine_are_no_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "here").mkdir(parents=True)
    names = ["org/here", "/org/model", "./org/model", "../model", "model", "a/b/c", "org/", ".a/b"]
    assert [hub_name(name) for name in names] == [None] * len(names)
    assert hub_name("Qwen/Qwen3-0.6B@refs/pr/3") == "Qwen/Qwen3-0.6B"


RESPONSE: Any = SimpleNamespace(headers={}, request=None, status_code=404, text="")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.RepositoryNotFoundError("no", response=RESPONSE), "no such model on the"),
        (errors.GatedRepoError("no", response=RESPONSE), "terms must be accepted"),
        (errors.RevisionNotFoundError("no", response=RESPONSE), "has no revision 'v2'"),
        (OSError("disk full\nand more"), r"did not give it \(disk full\)$"),
    ],
    ids=["unknown", "gated", "revision", "disk"],
)
def test_each_refusal_of_the_hub_is_one_sentence(
    error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelError, match=message) as raised:
        fetch("org/model@v2", quiet)
    assert str(raised.value).startswith("org/model@v2: ")
    assert "\n" not in str(raised.value)


def test_weights_in_other_forms_are_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **options: asked.update(options) or name
    )
    fetch("org/model", quiet)

    def wanted(file: str) -> bool:
        return any(fnmatch.fnmatch(file, p) for p in asked["allow_patterns"]) and not any(
            fnmatch.fnmatch(file, p) for p in asked["ignore_patterns"]
        )

    files = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    files += ["tokenizer.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"]
    assert all(map(wanted, files))
    others = ["pytorch_model.bin", "original/consolidated.00.pth", "consolidated.safetensors"]
    others += ["onnx/model.onnx", "original/params.json", "model.gguf", "README.md"]
    assert not any(map(wanted, others))
