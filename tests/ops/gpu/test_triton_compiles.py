"""Every kernel, as it is launched, compiled for every chip on a machine without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.clients.environment import NoIndex, install
from tests.missing import missing

if TYPE_CHECKING:
    from collections.abc import Iterable

AOT = Path(__file__).with_name("aot.py")
# What the names of cases end with whose keys and values are codes, or whose weights are.
CODES = ("int8", "fp8", "int4", "nf4", "mxfp4")
PRODUCTS = ("_extend_kernel", "_split_kernel", "_grouped_linear_kernel", "_coded_linear_kernel")
# Shared memory of a block, in bytes, to which a kernel may opt in where it is more than 48 KiB.
SHARED_BYTES = {
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_89": 99 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "sm_120": 99 << 10,
    "gfx942": 64 << 10,
}
CONSUMER = ("sm_86", "sm_89", "sm_120")
WORKERS = 2


def _compile(parts: Iterable[list[str]], cache: Path, *, triton: Path | None = None) -> list[dict]:
    """One record per case, kernel and target; a process for each part. triton: the folder of
    another one than the installed."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    if triton is not None:
        environment["PYTHONPATH"] = str(triton)
    workers = [
        subprocess.Popen(
            [sys.executable, AOT, *part],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for part in parts
    ]
    records = []
    for worker in workers:
        output, errors = worker.communicate()
        assert worker.returncode == 0, errors
        records += [json.loads(line) for line in output.splitlines()]
    return records


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    parts = ([f"{part}/{WORKERS}"] for part in range(WORKERS))
    return _compile(parts, tmp_path_factory.mktemp("triton"))


def _triton(version: str) -> Path:
    """The folder of a Triton, which is kept between runs; skips where no index can be reached."""
    name = f"{version}-{sys.version_info.major}.{sys.version_info.minor}"
    folder = Path(tempfile.gettempdir()) / "loomserve-test-triton" / name
    done = folder / "installed"
    if not done.exists():
        words = ("--upgrade", "--target", str(folder), "--no-deps", "--no-compile")
        try:
            install(Path(sys.executable), *words, f"triton=={version}")
        except NoIndex as error:
            missing(f"pip cannot reach a package index: {error}")
        done.touch()
    return folder


def _table(records: list[dict]) -> str:
    lines = [f"{'case':20} {'kernel':20} {'target':7} registers shared spills"]
    lines += [
        f"{r['case']:20} {r['kernel']:20} {r['target']:7} {r['registers']:9}"
        f" {r['shared_bytes']:6} {r['spills']:6}"
        for r in records
    ]
    return "\n".join(lines)


@pytest.mark.slow
def test_every_launch_compiles_for_every_target(compiled: list[dict]) -> None:
    print(_table(compiled))
    by_target = {
        target: {r["kernel"] for r in compiled if r["target"] == target} for target in SHARED_BYTES
    }
    assert by_target["sm_90"] == {
        "_extend_kernel",
        "_split_kernel",
        "_merge_kernel",
        "_store_kv_kernel",
        "_store_codes_kernel",
        "_place_heads_kernel",
        "_rms_norm_kernel",
        "_rotary_kernel",
        "_act_and_mul_kernel",
        "_grouped_linear_kernel",
        "_combine_kernel",
        "_coded_linear_kernel",
        "_add_splits_kernel",
        "_causal_conv_kernel",
        "_gated_delta_kernel",
        "_add_bias_kernel",
        "_ban_kernel",
        "_penalty_kernel",
        "_mask_kernel",
        "_sample_kernel",
        "_top_kernel",
        "_histogram_kernel",
        "_ties_kernel",
        "_draw_kernel",
        "_finish_kernel",
    }
    for kernels in by_target.values():
        assert kernels >= {"_extend_kernel", "_split_kernel", "_merge_kernel"}
    assert set.union(*(by_target[target] for target in CONSUMER)) == by_target["sm_90"]


def _judged(records: list[dict]) -> list[dict]:
    """Those of kernels that must not spill."""
    return [
        r
        for r in records
        if r["target"] == "sm_90" or (r["target"] != "gfx942" and r["kernel"] in PRODUCTS)
    ]


@pytest.mark.slow
def test_nothing_spills_in_a_loop_on_hopper_and_no_product_elsewhere(compiled: list[dict]) -> None:
    """On NVIDIA's chips, that is. Under Triton 3.9 these cases do not outside of loops either."""
    newest = version("triton").startswith("3.9.")
    spilled = [r for r in _judged(compiled) if r["spills" if newest else "loop_spills"]]
    assert not spilled, _table(spilled)


# What has spilled outside of its loops under one of them, and what did within; and the tiles of codes
# that need the most registers.
CASES_BY_VERSION = (
    "extend_short_d256",
    "extend_d128_int8",
    "decode_d80_sinks",
    "decode_d128_window",
    "linear_many_int4",
    "linear_many_fp8",
    "linear_many_nf4",
    "linear_many_mxfp4",
    "experts_int4",
    "experts_nf4",
)


@pytest.mark.slow
@pytest.mark.parametrize("triton", ["3.6.0", "3.7.1"])
def test_nothing_spills_in_a_loop_under_the_tritons_that_torch_asks_for(
    triton: str, tmp_path: Path
) -> None:
    """Those of torch 2.11 and 2.13."""
    parts = (CASES_BY_VERSION[::2], CASES_BY_VERSION[1::2])
    records = _compile(map(list, parts), tmp_path, triton=_triton(triton))
    judged = _judged(records)
    assert {r["case"] for r in judged} == set(CASES_BY_VERSION)
    spilled = [r for r in judged if r["loop_spills"]]
    assert not spilled, _table(spilled)
    assert max(r["spills"] for r in judged) <= 72, _table(judged)


@pytest.mark.slow
def test_products_of_float32_are_exact(compiled: list[dict]) -> None:
    records = [r for r in compiled if r["case"].endswith("f32")]
    assert {r["kernel"] for r in records} >= set(PRODUCTS)
    assert not [r for r in records if r["tf32"]]


@pytest.mark.slow
def test_products_use_hoppers_tensor_cores(compiled: list[dict]) -> None:
    """All but those of float32, which the tensor cores do not have."""
    without = [
        r
        for r in compiled
        if r["target"] == "sm_90"
        and r["kernel"] in PRODUCTS
        and not r["case"].endswith("f32")
        and not r["wgmma"]
    ]
    assert not without, _table(without)


@pytest.mark.slow
def test_keys_and_values_are_copied_16_bytes_at_a_time(compiled: list[dict]) -> None:
    """A copy narrows when the compiler loses sight of an address's alignment. Those of 4 bytes fetch
    the page numbers of a later tile, or scales. Of codes, which are half as long, it may be 8."""
    copies = {
        (r["case"], r["target"]): r["copy_bytes"]
        for r in compiled
        if r["kernel"] in PRODUCTS and r["copy_bytes"] and not r["case"].endswith(("f32", *CODES))
    }
    assert len(copies) >= 2 * 15 - 1
    coded = [r for r in compiled if r["case"].endswith(CODES) and r["copy_bytes"]]
    assert coded
    assert all(max(r["copy_bytes"]) >= 8 for r in coded)
    assert {tuple(widths) for widths in copies.values()} <= {(16,), (4, 16)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int4", "int8", "fp8", "nf4", "mxfp4"])
def test_few_tokens_and_many_are_multiplied_by_the_same_instruction(
    compiled: list[dict], kind: str
) -> None:
    """But for how many tokens it takes: a token's sum is the same in both."""
    few, many = (
        {
            r["target"]: r["products"]
            for r in compiled
            if r["case"] == f"linear_{tokens}_{kind}" and r["kernel"] == "_coded_linear_kernel"
        }
        for tokens in ("few", "many")
    )
    both = set(few) & set(many) - {"gfx942"}
    assert "sm_90" in both
    for target in both:
        assert few[target] == many[target] != []


@pytest.mark.slow
def test_shared_memory_fits_every_chip(compiled: list[dict]) -> None:
    too_large = [r for r in compiled if r["shared_bytes"] > SHARED_BYTES[r["target"]]]
    assert not too_large, _table(too_large)


@pytest.mark.slow
def test_gumbel_noise_uses_an_accurate_logarithm(compiled: list[dict]) -> None:
    """lg2.approx is off by 2**-22 near 1, where the logarithm of the largest uniforms is 2**-24."""
    drawing = [r for r in compiled if r["kernel"] in ("_sample_kernel", "_draw_kernel")]
    assert drawing
    assert not [r for r in drawing if r["approximate_log"]]
