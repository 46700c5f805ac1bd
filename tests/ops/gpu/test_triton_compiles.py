"""Every kernel, as it is launched, compiled for every chip on a machine without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

AOT = Path(__file__).with_name("aot.py")
# What the names of cases end with whose keys and values are codes, or whose weights are.
CODES = ("int8", "fp8", "int4")
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


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """One record per case, kernel and target, compiled by two processes."""
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
    }
    workers = [
        subprocess.Popen(
            [sys.executable, AOT, f"{part}/{WORKERS}"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for part in range(WORKERS)
    ]
    records = []
    for worker in workers:
        output, errors = worker.communicate()
        assert worker.returncode == 0, errors
        records += [json.loads(line) for line in output.splitlines()]
    return records


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


@pytest.mark.slow
def test_nothing_spills_on_hopper_and_no_product_elsewhere(compiled: list[dict]) -> None:
    """On NVIDIA's chips, that is."""
    spilled = [
        r
        for r in compiled
        if r["spills"]
        and (r["target"] == "sm_90" or (r["target"] != "gfx942" and r["kernel"] in PRODUCTS))
    ]
    assert not spilled, _table(spilled)


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
@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
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
