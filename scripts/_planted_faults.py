"""Small mistakes to plant: in which file, what stands there, what is put in its place.

They are mistakes that people make: off by one, the wrong bound, a condition turned round, a count
not kept, something not given back. `AREAS` says which tests ought to notice.
"""

from __future__ import annotations

from dataclasses import dataclass

SCHEDULING = "runtime/scheduling"
TESTS = "tests/runtime/scheduling"
EXECUTION = "runtime/execution"
EXECUTION_TESTS = "tests/runtime/execution"


@dataclass(frozen=True, slots=True)
class Plant:
    """A mistake. old: stands in the file exactly once."""

    area: str
    file: str
    old: str
    new: str


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


def _planted(area: str, file: str, *changes: tuple[str, str]) -> list[Plant]:
    return [Plant(area, file, old, new) for old, new in changes]


PLANTS = [
    *_planted(
        "scheduler",
        f"{SCHEDULING}/admission.py",
        ("rows_missing = 1 - self._free_rows()", "rows_missing = -self._free_rows()"),
        ("> config.priority_preemption_threshold", ">= config.priority_preemption_threshold"),
        ("if len(admitted) >= rows:", "if len(admitted) > rows:"),
        ("self._credit -= price", "self._credit -= 0"),
        ("min(self._credit + step, max(AHEAD_STEPS * step, unit))", "self._credit + step"),
        ("> match_limit(request):", ">= match_limit(request):"),
    ),
    *_planted(
        "scheduler",
        f"{SCHEDULING}/prefill_adder.py",
        ("if total >= self.left_total or", "if total > self.left_total or"),
        ("self.left_input -= extend", "self.left_input -= 0"),
        ("self.taken_step += extend + self._page", "self.taken_step += extend"),
        ("self.new_requests >= cap:", "self.new_requests > cap:"),
        ("if free - left * live <= live:", "if free - left * live < 0:"),
        ("return max(most - mixed_rows, page), NO_LIMIT", "return most, NO_LIMIT"),
    ),
    *_planted(
        "scheduler",
        f"{SCHEDULING}/scheduler.py",
        ("if len(life.inflight) >= MAX_IN_FLIGHT:", "if len(life.inflight) > MAX_IN_FLIGHT:"),
        ("if victims and self._life.inflight:", "if victims and False:"),
        ("mixing = not self.config.disable_mixed_chunk", "mixing = True"),
        ("if len(batch.requests) > 1:", "if len(batch.requests) > 2:"),
    ),
    *_planted(
        "scheduler",
        f"{SCHEDULING}/nan_recovery.py",
        ("rows if row < batch.num_prefill]", "rows if row <= batch.num_prefill]"),
        ("if request.scheduling.borrows", "if not request.scheduling.borrows"),
        ("r.new_tokens > r.scheduling.borrows", "r.new_tokens > 0"),
        ("life.memory.drop(request, 0, request.scheduling.target, _verified(life))", "pass"),
    ),
    *_planted(
        "scheduler",
        f"{SCHEDULING}/lifecycle.py",
        ("if r.launched_tokens < r.max_new_tokens]", "if r.launched_tokens <= r.max_new_tokens]"),
        ("if request is None or request.ending is not None:", "if request is None:"),
        ("+ len(request.output_ids) - 1", "+ len(request.output_ids)"),
        ("record.admissions -= 1", "record.admissions -= 0"),
    ),
    *_planted(
        "scheduler",
        f"{SCHEDULING}/step_results.py",
        ("half = (len(rows) + 1) // 2 if", "half = len(rows) // 2 if"),
        ("len(ids) > request.sampling.min_tokens:", "len(ids) >= request.sampling.min_tokens:"),
        ("elif len(ids) >= request.max_new_tokens:", "elif len(ids) > request.max_new_tokens:"),
        ("if void and request in void:", "if False:"),
    ),
    *_planted(
        "scheduler",
        f"{SCHEDULING}/schedule_batch.py",
        ("[start + 1 for start in starts]", "[start for start in starts]"),
        ("record.synced_pages = last", "record.synced_pages = first"),
        ("if not request.length % size:", "if request.length % size == 1:"),
    ),
    *_planted(
        "scheduler",
        f"{SCHEDULING}/retraction.py",
        ("life.counters.retractions += len(victims)", "life.counters.retractions += 1"),
        ("oldest = min(admitted, key=_seq)", "oldest = max(admitted, key=_seq)"),
        ("max(self.value - step, self.floor)", "self.value - step"),
        ("if priority - request.priority > threshold]", "if priority - request.priority >= 0]"),
    ),
    *_planted(
        "scheduler",
        f"{SCHEDULING}/intake.py",
        ("if inputs + wanted > context_length:", "if inputs + wanted >= context_length:"),
        ("if need >= usable_tokens:", "if need > usable_tokens + 64:"),
        ("missing = waiting + len(requests) - cap", "missing = waiting + len(requests) - cap + 1"),
    ),
    *_planted(
        "scheduler",
        f"{SCHEDULING}/waiting_queue.py",
        (
            "return -request.priority, request.scheduling.seq, request",
            "return request.priority, request.scheduling.seq, request",
        ),
        (
            "record.seq < newest and request not in admitted",
            "record.seq > newest and request not in admitted",
        ),
    ),
    *_planted(
        "scheduler",
        f"{SCHEDULING}/policies.py",
        ("return [-request.max_new_tokens for", "return [request.max_new_tokens for"),
        ("weight[above] += weight[node]", "weight[above] += 1"),
    ),
    *_planted(
        "scheduler",
        f"{SCHEDULING}/prefill_delayer.py",
        (
            "if kv_usage < config.delayer_low_watermark:",
            "if kv_usage > config.delayer_low_watermark:",
        ),
        ("self._passes += 1", "self._passes += 0"),
    ),
    *_planted(
        "scheduler",
        f"{SCHEDULING}/chunk_sizer.py",
        ("align = min(max(page_size, ALIGN_TOKENS),", "align = min(max(1, 1),"),
        (
            "return a * (tokens * tokens + 2 * history * tokens) + b * tokens",
            "return a * tokens * tokens + b * tokens",
        ),
    ),
    *_planted(
        "cache",
        f"{SCHEDULING}/kv_memory.py",
        (
            "shortfall = pages - self.allocator.free_pages",
            "shortfall = pages - self.allocator.free_pages - 1",
        ),
        ("self.cache.unlock(record.node)", "pass"),
        ("self.allocator.free_after(own, record.last_step)", "self.allocator.free(own)"),
        ("record.synced_pages = min(record.synced_pages, first)", "pass"),
        ("self.allocator.free(request.pages[needed:])", "pass"),
        ("return len(record.key) // TOKEN_BYTES - 1", "return len(record.key) // TOKEN_BYTES"),
        ("self.free_rows.append(request.row)", "pass"),
        ("if made.step > step]", "if made.step >= step]"),
    ),
    *_planted(
        "cache",
        f"{SCHEDULING}/page_allocator.py",
        ("del free[-count:]", "del free[-count + 1 :]"),
        ("if step <= self.done_step:", "if step <= self.done_step + 1:"),
        ("self._num_deferred += len(pages)", "self._num_deferred += 0"),
    ),
    *_planted(
        "cache",
        f"{SCHEDULING}/radix_cache.py",
        ("node is not None and place.tokens < node.end:", "False:"),
        ("if node.locks > 1:", "if node.locks > 2:"),
        ("self.protected_tokens -= pages * self.page_size", "self.protected_tokens -= 0"),
        ("parent.hits += node.hits", "parent.hits += 0"),
        ("parent.last_used = max(parent.last_used, node.last_used)", "pass"),
        (
            "count = min(pages - freed, self.tree.last_piece(leaf))",
            "count = self.tree.last_piece(leaf)",
        ),
        ("below.dead = True", "below.dead = False"),
        ("if upper.parent is None or upper.locks or", "if upper.parent is None or"),
    ),
    *_planted(
        "cache",
        f"{SCHEDULING}/radix_tree.py",
        (
            "low, high = 0, min(len(run), end - at) // unit",
            "low, high = 0, min(len(run), end - at) // unit - 1",
        ),
        ("tokens = min(tokens, node.start)", "tokens = tokens"),
        ("del parent.children[self._first_page(node)]", "pass"),
        ("below.lost_at = self.losses", "pass"),
        ("node.lost_at = max(node.lost_at, upper.lost_at)", "pass"),
    ),
    *_planted(
        "cache",
        f"{SCHEDULING}/cache_events.py",
        ("if made.step <= step]", "if made.step < step]"),
        ("self._hashes.clear()", "pass"),
    ),
    *_planted(
        "engine",
        "server/generation/engine.py",
        (
            "if flight is not None and not await self._finish(flight, following):",
            "if flight is not None and await self._finish(flight, following) is None:",
        ),
        ("            await _drained(later.step)", "            pass"),
        ("if not (step.may_sample or step.done):", "if step.done:"),
        ("self._wake.clear()", "pass"),
        (
            "        if self.dead is not None:\n            raise self.dead",
            "        if False:\n            raise self.dead",
        ),
    ),
    *_planted(
        "engine",
        "server/generation/delivery.py",
        ("self.masked -= choice.masked", "self.masked -= 0"),
        ("if finish is not output.finish:", "if False:"),
        ("choice.stream.fail(told)", "pass"),
    ),
    *_planted(
        "engine",
        "server/generation/token_masks.py",
        ("row_bits.fill(-1)", "row_bits.fill(0)"),
        ("is not choice:", "is choice:"),
    ),
    *_planted(
        "engine",
        "server/http/connections.py",
        ("del self._open[transport]", "pass"),
        ("return len(self) >= self.most", "return len(self) > self.most"),
        ("return self._received or self._unread", "return self._received"),
        ("if self._transport.get_write_buffer_size() < unsent:", "if True:"),
    ),
    *_planted(
        "streams",
        "server/generation/output.py",
        ("self.logprobs += later.logprobs", "self.logprobs = later.logprobs"),
        ("self._unfinished -= 1", "self._unfinished -= 2"),
        (
            "cut = finish.reason is not FinishReason.STOP",
            "cut = finish.reason is FinishReason.STOP",
        ),
        (
            "self.completion_tokens < self._min_tokens:",
            "self.completion_tokens <= self._min_tokens:",
        ),
        ("delta.text += self._scanner.flush()", "pass"),
        ("if not ends_here or self._include_stop:", "if not ends_here:"),
        (
            "finish.reason is FinishReason.LENGTH) and matcher.is_terminated()",
            "False) and matcher.is_terminated()",
        ),
    ),
    *_planted(
        "streams",
        "server/generation/stop_rules.py",
        (
            "end - automaton.depth[state] > best[0]:",
            "end - automaton.depth[state] >= best[0]:",
        ),
        (
            "(other[0], -other[1]) < (best[0], -best[1])",
            "(other[0], other[1]) < (best[0], best[1])",
        ),
        ("undecided[: end if self._include_stop else start]", "undecided[:start]"),
    ),
    *_planted(
        "streams",
        "server/text/marks.py",
        ("self.length[state] or self.length[self._fallback[state]]", "self.length[state]"),
        (
            "while state and character not in self._next[state]:",
            "if state and character not in self._next[state]:",
        ),
    ),
    *_planted(
        "streams",
        "server/text/detokenizer.py",
        ('return "" if cut else self._decode(b"", True)', 'return ""'),
        ('return text.removeprefix(" ")', "return text.lstrip()"),
    ),
    *_planted(
        "streams",
        "server/generation/generator.py",
        ("timed_out=finish.reason is FinishReason.TIMEOUT", "timed_out=False"),
        ("sampling.seed + choice * SEED_STEP", "sampling.seed + SEED_STEP"),
    ),
    *_planted(
        "streams",
        "server/generation/bad_words.py",
        ("head, token = word[:-1], word[-1]", "head, token = word[1:], word[-1]"),
    ),
    *_planted(
        "parsers",
        "server/formats/tool_parser.py",
        ("self.calls = self.calls, self.calls + 1", "self.calls = self.calls, self.calls"),
        (
            "if final and not self.calls else text[:kept].rstrip()",
            "if not self.calls else text[:kept].rstrip()",
        ),
    ),
    *_planted(
        "parsers",
        "server/formats/json_calls.py",
        ('return "{}" if text in ("", "null") else text', "return text"),
        ("self.broken = not self.name", "self.broken = False"),
        ("return name in self.known", "return True"),
        ('if first and first in ";,":', 'if first and first in ",":'),
    ),
    *_planted(
        "parsers",
        "server/formats/pythonic_calls.py",
        ('None if value.startswith("*") else self._next_free()', "self._next_free()"),
        ("return -number", "return number"),
        ("if name not in self._valued), None)", "), None)"),
    ),
    *_planted(
        "parsers",
        "server/formats/thinking_budget.py",
        ("self._left -= 1", "self._left -= 0"),
        ("self._left <= 0 and self.failed is None", "self._left < 0 and self.failed is None"),
    ),
    *_planted(
        "parsers",
        "server/text/json_bounds.py",
        ("return items > MAX_ITEMS or nodes > MAX_NODES", "return items > MAX_ITEMS"),
    ),
    *_planted(
        "parsers",
        "server/grammars/compiler.py",
        ("self._taken < self.min_tokens and", "self._taken <= self.min_tokens and"),
        ("self._left_s -= seconds", "self._left_s -= 0.0"),
    ),
    *_planted(
        "parsers",
        "server/grammars/bits.py",
        ("1 << (token_ids & 31)", "1 << (token_ids & 15)"),
    ),
    *_planted(
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
    *_planted(
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
    *_planted(
        "kernels",
        "ops/reference.py",
        ("seen &= key_at > at - spec.window", "seen &= key_at >= at - spec.window"),
        ("live = slots >= 0", "live = slots > 0"),
    ),
    *_planted(
        "kernels",
        "ops/cpu/attention.py",
        ("unseen |= keys <= at - window", "unseen |= keys < at - window"),
        (
            "tiles.append(_tile(batch, b, tile_lo, tile_hi, kv_len - hi, window, dtype))",
            "tiles.append(_tile(batch, b, tile_lo, tile_hi, kv_len - hi - 1, window, dtype))",
        ),
        ("unseen = step >= counts[:, None]", "unseen = step > counts[:, None]"),
    ),
    *_planted(
        "kernels",
        "ops/gpu/decode_attention.py",
        ("seen = (key_at >= begin) & (key_at < end)", "seen = (key_at >= begin) & (key_at <= end)"),
        ("new_maximum = tl.maximum(maximum, tl.max(lse, 0))", "new_maximum = tl.max(lse, 0)"),
    ),
    *_planted(
        "kernels",
        "ops/gpu/extend_attention.py",
        ("key_at[None, :] <= at[:, None]", "key_at[None, :] < at[:, None]"),
    ),
    *_planted(
        "kernels",
        "ops/gpu/filtered_draw.py",
        ("earlier = others < tl.program_id(1)", "earlier = others <= tl.program_id(1)"),
        ("above = bins > digit", "above = bins >= digit"),
        ("kept = mass + ties *", "kept = mass + 0 * ties *"),
    ),
    *_planted(
        "kernels",
        "ops/gpu/experts.py",
        ("// BLOCK_M + middle <= tile", "// BLOCK_M + middle < tile"),
        ("live = place < end", "live = place <= end"),
        ("row = token * TOP_K + choice", "row = token + choice"),
        ("table += expert * 16", "table += expert"),
        ("inner = inner.gather(1, packed.down.order[sorted_ids])", "pass"),
    ),
    *_planted(
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
    *_planted(
        "kernels",
        "ops/gpu/store_kv.py",
        ("if slot < 0:", "if slot < -1:"),
    ),
    *_planted(
        "kernels",
        "ops/gpu/sampling.py",
        ("((word >> (token % 32)) & 1) == 0", "((word >> (token % 31)) & 1) == 0"),
        ('(tl.max(broken, 0) > 0) | (top == float("-inf"))', '(top == float("-inf"))'),
    ),
    *_planted(
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
    *_planted(
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
    *_planted(
        "gpu",
        f"{EXECUTION}/mixed_graph_runner.py",
        ("self._ints[: packed.shape[0]].copy_(packed)", "pass"),
        ("and s.prompts >= rows", ""),
    ),
    *_planted(
        "gpu",
        "ops/gpu/mixed_attention.py",
        (
            "block_table, decode_rows, decode_kv_lens,\n        sinks",
            "block_table, decode_rows, kv_lens,\n        sinks",
        ),
    ),
    *_planted(
        "gpu",
        f"{EXECUTION}/launchers.py",
        (
            "with torch.inference_mode(), self._device.on(self._stream):",
            "with torch.inference_mode():",
        ),
        ("if quick and self._handed_over == self._taken_on:", "if quick:"),
        ("if quick and self._handed_over == self._taken_on:", "if True:"),
    ),
    *_planted(
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
    *_planted(
        "gpu",
        f"{EXECUTION}/device.py",
        ("host = host.pin_memory()", "pass"),
        ("dtype=tensor.dtype, pin_memory=self.pinned)", "dtype=tensor.dtype)"),
        ("stream.wait_stream(torch.cuda.current_stream(self.torch_device))", "pass"),
        ("int(total * config.mem_fraction_static)", "int(total)"),
    ),
    *_planted(
        "gpu",
        f"{EXECUTION}/cuda_graph_runner.py",
        (
            "            for _ in range(_WARM_UPS):\n                step()",
            "            pass",
        ),
        ("self.rows[count:size].zero_()", "pass"),
        ("self.kv_lens[count:size].fill_(1)", "pass"),
    ),
    *_planted(
        "gpu",
        f"{EXECUTION}/warm_up.py",
        ("_LENGTHS = (256, 2, 1)", "_LENGTHS = (256,)"),
    ),
    *_planted(
        "gpu",
        "ops/gpu/library.py",
        ("optin >= _LARGE_SHARED_BYTES", "optin >= 0"),
    ),
    *_planted(
        "gpu",
        "ops/gpu/decode_attention.py",
        ('@step_kernel("rows", "kv_lens", "max_splits")', '@step_kernel("rows", "kv_lens")'),
        ('tl.dot(k, q_tile, input_precision="ieee")', "tl.dot(k, q_tile)"),
        (
            "base_2_scores(scores, scale, cap, HAS_CAP)",
            "base_2_scores(scores, scale, cap, HAS_CAP and not HAS_WINDOW)",
        ),
    ),
    *_planted(
        "gpu",
        "ops/gpu/extend_attention.py",
        (
            "PAGE_SIZE, BLOCK_N, True, HAS_WINDOW, HAS_CAP,",
            "PAGE_SIZE, BLOCK_N, True, HAS_WINDOW, HAS_CAP and not HAS_WINDOW,",
        ),
        ("(first_m < 0) | (first_m >= end * GROUP)", "first_m >= end * GROUP"),
        ("num_tokens - q_begin, q_len)", "q_len, q_len)"),
    ),
    *_planted(
        "gpu",
        "ops/gpu/store_kv.py",
        ('@step_kernel("slots")', "@step_kernel()"),
    ),
]
