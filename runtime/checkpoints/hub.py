"""Models by their names on the Hugging Face hub, fetched into its cache (`HF_HOME`).

The huggingface_hub library fetches: it goes on with what was broken off, takes what the cache has
where the hub cannot be reached, and shows its own bars on a terminal.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME = re.compile(r"(?P<model>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w./-]+))?")
# Config, tokenizer, templates and weights; not the weights' other forms beside them.
_WANTED = ["*.json", "*.jinja", "*.safetensors"]
_NOT_WANTED = ["*/*.json", "*/*.safetensors", "consolidated*"]


def hub_name(model: str) -> str | None:
    """The model's name on the hub, without a revision; None where it is a path of this machine.

    Args: model: as the option has it: a path, or "owner/name", or "owner/name@revision".
    """
    named = _NAME.fullmatch(model)
    return None if named is None or Path(model).expanduser().exists() else named["model"]


def fetch(model: str, progress: Callable[[str], None]) -> Path:
    """The folder in the hub's cache of a model that has a `hub_name`.

    Raises: ModelError: the hub does not give it; says what to do.
    """
    # Imported here so that a start from a folder does not pay for it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    named = _NAME.fullmatch(model)
    assert named is not None
    name, revision = named["model"], named["revision"]
    progress(f"looking for {model} on the Hugging Face hub")
    try:
        return Path(
            snapshot_download(
                name, revision=revision, allow_patterns=_WANTED, ignore_patterns=_NOT_WANTED
            )
        )
    except GatedRepoError:
        raise ModelError(
            f"{model}: its terms must be accepted at https://huggingface.co/{name}, then"
            " `hf auth login` on this machine"
        ) from None
    except RevisionNotFoundError:
        raise ModelError(f"{model}: the model has no revision {revision!r}") from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"{model}: no such folder, and no such model on the Hugging Face hub, or one that asks"
            " for a token (`hf auth login`)"
        ) from None
    except LocalEntryNotFoundError:
        raise ModelError(
            f"{model}: no such folder; the Hugging Face hub cannot be reached, and its cache does"
            f" not have it. Where there is a network: hf download {name} --local-dir FOLDER, then"
            " name the folder"
        ) from None
    except (OSError, ValueError) as error:  # the library's other errors are kinds of these
        reason = str(error).strip().partition("\n")[0][:300]
        raise ModelError(f"{model}: the Hugging Face hub did not give it ({reason})") from None
