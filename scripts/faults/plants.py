"""Small mistakes to plant: in which file, what stands there, what is put in its place.

They are mistakes that people make: off by one, the wrong bound, a condition turned round, a count
not kept, something not given back. `AREAS` says which tests ought to notice.
Those in kernels and in what runs them stand here, the others in files of their own.
"""

from __future__ import annotations

from scripts.faults.plant import EXECUTION, planted
from scripts.faults.scheduling import IN_SCHEDULING
from scripts.faults.serving import IN_SERVING

TESTS = "tests/runtime/scheduling"
EXECUTION_TESTS = "tests/runtime/execution"

# The tests of each area, those that notice most first; a folder stands for the rest of it.
AREAS = {
    "scheduler": (
        f"{TESTS}/test_scheduler_rules.py",
        f"{TESTS}/test_intake.py",
        f"{TESTS}/test_retraction.py",
        f"{TESTS}/test_prefill_adder.py",
        f"{TESTS}/test_step_failures.py",
        f"{TESTS}/test_nan_rows.py",
        f"{TESTS}/test_preemption.py",
        f"{TESTS}/test_prefill_share.py",
        f"{TESTS}/test_queue_order.py",
        f"{TESTS}/test_chunk_sizer.py",
        TESTS,
    ),
    "cache": (
        f"{TESTS}/test_radix_cache.py",
        f"{TESTS}/test_radix_reference.py",
        f"{TESTS}/test_step_failures.py",
        f"{TESTS}/test_nan_rows.py",
        f"{TESTS}/test_cache_events.py",
        f"{TESTS}/test_scheduler_rules.py",
        TESTS,
    ),
    "engine": (
        "tests/server/generation/test_token_masks.py",
        "tests/world/test_world.py",
        "tests/world/test_faults_found.py",
        "tests/server/generation/test_engine.py",
        "tests/server/generation/test_step_retries.py",
        "tests/server/generation/test_request_faults.py",
        "tests/server/http/test_connections.py",
        "tests/server/http/test_limits.py",
    ),
    "streams": (
        "tests/server/generation/test_stop_rules.py",
        "tests/server/text/test_marks.py",
        "tests/server/text/test_detokenizer.py",
        "tests/server/generation/test_output.py",
        "tests/world/test_world.py",
        "tests/server/generation/test_generation_features.py",
        "tests/server/generation/test_seeded_answers.py",
        "tests/server/grammars/test_grammars.py",
        "tests/server/generation/test_token_masks.py",
        "tests/server/api/test_completion_endpoints.py",
    ),
    "parsers": (
        "tests/server/formats/test_tool_parsers.py",
        "tests/server/formats/test_thinking_budget.py",
        "tests/server/formats/test_random_chats.py",
        "tests/server/formats/test_reasoning.py",
        "tests/server/formats/test_one_call.py",
        "tests/server/text/test_bounds.py",
        "tests/server/grammars/test_grammars.py",
        "tests/server/grammars/test_grammar_limits.py",
        "tests/server/grammars/test_grammar_waiting.py",
        "tests/server/generation/test_token_masks.py",
        "tests/server/api/test_hostile_bodies.py",
    ),
    "sampler": (
        "tests/runtime/execution/test_sampler.py",
        "tests/ops/test_reference_sampling.py",
        "tests/runtime/execution/test_forward_batch.py",
        "tests/runtime/execution/test_paths.py",
    ),
    "kernels": (
        "tests/ops/test_reference_ops.py",
        "tests/ops/test_cpu_torch_ops.py",
        "tests/ops/test_experts.py",
        "tests/ops/gpu/test_triton_attention.py",
        "tests/ops/gpu/test_triton_elementwise.py",
        "tests/ops/gpu/test_triton_sampling.py",
        "tests/ops/gpu/test_triton_coded_linear.py",
        "tests/ops/gpu/test_triton_attention_faults.py",
    ),
    "gpu": (
        f"{EXECUTION_TESTS}/test_device.py",
        f"{EXECUTION_TESTS}/test_cuda_recorder.py",
        f"{EXECUTION_TESTS}/test_forward_batch.py",
        f"{EXECUTION_TESTS}/test_queue_order.py",
        f"{EXECUTION_TESTS}/test_step_times.py",
        f"{EXECUTION_TESTS}/test_kv_sizing.py",
        f"{EXECUTION_TESTS}/test_cuda_graph_runner.py",
        f"{EXECUTION_TESTS}/test_mixed_graph_runner.py",
        f"{EXECUTION_TESTS}/test_launchers.py",
        "tests/ops/test_mixed_attention.py",
        "tests/ops/gpu/test_warm_up_covers.py",
        "tests/ops/gpu/test_triton_attention_faults.py",
        "tests/ops/gpu/test_triton_sources.py",
    ),
}

# What takes minutes, or compares two runs of the same code.
LEFT_OUT = (
    "tests/world/test_world.py::test_two_thousand_worlds",
    "tests/world/test_world.py::test_a_seed_gives_the_same_run_again_whatever_hashes_are",
)

PLANTS = [
    *IN_SCHEDULING,
    *IN_SERVING,
    *planted(
        "sampler",
        "runtime/execution/sampler.py",
        (
            "if batch.output_counts[i] >= self.state.min_tokens[row]:",
            "if batch.output_counts[i] > self.state.min_tokens[row]:",
        ),
        ("return not left.any()", "return bool(left.any())"),
        ("self._prompt_mask[state] = False", "pass"),
        ("return ((seed + 2**63) % 2**64) - 2**63", "return seed % 2**63"),
    ),
    *planted(
        "sampler",
        "ops/reference.py",
        ("rank < s.top_k[:, None]", "rank <= s.top_k[:, None]"),
        ("before < s.top_p[:, None].double()", "before <= s.top_p[:, None].double() + 0.05"),
        (
            "torch.where(logits > 0, logits / repetition, logits * repetition)",
            "logits / repetition",
        ),
        ("p.presence[:, None] * (counts > 0)", "p.presence[:, None] * counts"),
        ("keep &= probs >= s.min_p[:, None] * probs[:, :1]", "keep &= probs >= s.min_p[:, None]"),
        ("chosen = torch.where(bad, -1, chosen)", "pass"),
    ),
    *planted(
        "kernels",
        "ops/reference.py",
        ("seen &= key_at > at - spec.window", "seen &= key_at >= at - spec.window"),
        ("live = slots >= 0", "live = slots > 0"),
    ),
    *planted(
        "kernels",
        "ops/cpu/attention.py",
        ("unseen |= keys <= at - window", "unseen |= keys < at - window"),
        (
            "tiles.append(_tile(batch, b, tile_lo, tile_hi, kv_len - hi, window, dtype))",
            "tiles.append(_tile(batch, b, tile_lo, tile_hi, kv_len - hi - 1, window, dtype))",
        ),
        ("unseen = step >= counts[:, None]", "unseen = step > counts[:, None]"),
    ),
    *planted(
        "kernels",
        "ops/gpu/decode_attention.py",
        ("seen = (key_at >= begin) & (key_at < end)", "seen = (key_at >= begin) & (key_at <= end)"),
        ("new_maximum = tl.maximum(maximum, tl.max(lse, 0))", "new_maximum = tl.max(lse, 0)"),
    ),
    *planted(
        "kernels",
        "ops/gpu/extend_attention.py",
        ("key_at[None, :] <= at[:, None]", "key_at[None, :] < at[:, None]"),
    ),
    *planted(
        "kernels",
        "ops/gpu/filtered_draw.py",
        ("earlier = others < tl.program_id(1)", "earlier = others <= tl.program_id(1)"),
        ("above = bins > digit", "above = bins >= digit"),
        ("kept = mass + ties *", "kept = mass + 0 * ties *"),
    ),
    *planted(
        "kernels",
        "ops/gpu/experts.py",
        ("// BLOCK_M + middle <= tile", "// BLOCK_M + middle < tile"),
        ("live = place < end", "live = place <= end"),
        ("row = token * TOP_K + choice", "row = token + choice"),
        ("table += expert * 16", "table += expert"),
        ("inner = inner.gather(1, packed.down.order[sorted_ids])", "pass"),
    ),
    *planted(
        "kernels",
        "ops/gpu/coded_linear.py",
        ("(both >> 4) & 15 if half else", "(both >> 4) & 15 if not half else"),
        ("word = word & -256", "word = word & -128"),
        ("sign = (bits & 8) << 12", "sign = (bits & 8) << 11"),
        ("* 16384.0", "* 8192.0"),
        ("x = x.index_select(1, p.order)", "pass"),
        (
            "tl.where(third, _of_four(odd, second, levels, 12)",
            "tl.where(third, _of_four(odd, second, levels, 4)",
        ),
        ("tl.minimum(begin + SPLIT, k)", "begin + SPLIT"),
        ("row += tl.program_id(2).to(tl.int64) * num_tokens", "pass"),
    ),
    *planted(
        "kernels",
        "ops/gpu/store_kv.py",
        ("if slot < 0:", "if slot < -1:"),
    ),
    *planted(
        "kernels",
        "ops/gpu/sampling.py",
        ("((word >> (token % 32)) & 1) == 0", "((word >> (token % 31)) & 1) == 0"),
        ('(tl.max(broken, 0) > 0) | (top == float("-inf"))', '(top == float("-inf"))'),
    ),
    *planted(
        "gpu",
        f"{EXECUTION}/forward_batch.py",
        (
            "SampledRows(rows.long(), positions.long())",
            "SampledRows(positions.long(), rows.long())",
        ),
        (
            "SampledRows(rows_d.long(), kv_lens_d.long())",
            "SampledRows(kv_lens_d.long(), rows_d.long())",
        ),
        ("self._fences[which].synchronize()", "pass"),
        ("self._next = 1 - which", "self._next = which"),
        ("torch.int32, pin_memory=self._device.pinned)", "torch.int32)"),
    ),
    *planted(
        "gpu",
        f"{EXECUTION}/packed_step.py",
        (
            "step.decode_rows[:decoding] = rows[count:]",
            "step.decode_rows[:decoding] = rows[:decoding]",
        ),
        ("parts.decode_kv_lens.fill(1)", "pass"),
        ("step.qo_indptr[count + 1 :] = end", "pass"),
        ("prompt_tokens + decoding", "prompt_tokens"),
    ),
    *planted(
        "gpu",
        f"{EXECUTION}/mixed_graph_runner.py",
        ("self._ints[: packed.shape[0]].copy_(packed)", "pass"),
        ("and s.prompts >= rows", ""),
    ),
    *planted(
        "gpu",
        "ops/gpu/mixed_attention.py",
        (
            "block_table, decode_rows, decode_kv_lens,\n        sinks",
            "block_table, decode_rows, kv_lens,\n        sinks",
        ),
    ),
    *planted(
        "gpu",
        f"{EXECUTION}/launchers.py",
        (
            "with torch.inference_mode(), self._device.on(self._stream):",
            "with torch.inference_mode():",
        ),
        ("if quick and self._handed_over == self._taken_on:", "if quick:"),
        ("if quick and self._handed_over == self._taken_on:", "if True:"),
    ),
    *planted(
        "gpu",
        f"{EXECUTION}/model_runner.py",
        (
            """            self._sampled.to_host(runner.device)
        if self._prompt is not None:
            self._prompt = self._prompt.to_host(runner.device)
        self._fences[3].record()
""",
            """            self._fences[3].record()
            self._sampled.to_host(runner.device)
        if self._prompt is not None:
            self._prompt = self._prompt.to_host(runner.device)
""",
        ),
    ),
    *planted(
        "gpu",
        f"{EXECUTION}/device.py",
        ("host = host.pin_memory()", "pass"),
        ("dtype=tensor.dtype, pin_memory=self.pinned)", "dtype=tensor.dtype)"),
        ("stream.wait_stream(torch.cuda.current_stream(self.torch_device))", "pass"),
        ("int(total * config.mem_fraction_static)", "int(total)"),
    ),
    *planted(
        "gpu",
        f"{EXECUTION}/cuda_graph_runner.py",
        (
            "            for _ in range(_WARM_UPS):\n                step()",
            "            pass",
        ),
        ("self.rows[count:size].zero_()", "pass"),
        ("self.kv_lens[count:size].fill_(1)", "pass"),
    ),
    *planted(
        "gpu",
        f"{EXECUTION}/warm_up.py",
        ("_LENGTHS = (256, 2, 1)", "_LENGTHS = (256,)"),
    ),
    *planted(
        "gpu",
        "ops/gpu/library.py",
        ("optin >= _LARGE_SHARED_BYTES", "optin >= 0"),
    ),
    *planted(
        "gpu",
        "ops/gpu/decode_attention.py",
        ('@step_kernel("rows", "kv_lens", "max_splits")', '@step_kernel("rows", "kv_lens")'),
        ('tl.dot(k, q_tile, input_precision="ieee")', "tl.dot(k, q_tile)"),
        (
            "base_2_scores(scores, scale, cap, HAS_CAP)",
            "base_2_scores(scores, scale, cap, HAS_CAP and not HAS_WINDOW)",
        ),
    ),
    *planted(
        "gpu",
        "ops/gpu/extend_attention.py",
        (
            "PAGE_SIZE, BLOCK_N, True, HAS_WINDOW, HAS_CAP,",
            "PAGE_SIZE, BLOCK_N, True, HAS_WINDOW, HAS_CAP and not HAS_WINDOW,",
        ),
        ("(first_m < 0) | (first_m >= end * GROUP)", "first_m >= end * GROUP"),
        ("num_tokens - q_begin, q_len)", "q_len, q_len)"),
    ),
    *planted(
        "gpu",
        "ops/gpu/store_kv.py",
        ('@step_kernel("slots")', "@step_kernel()"),
    ),
]
