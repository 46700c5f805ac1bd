"""No field of the known servers is unknown here: it is served, refused by name, or ignored."""

from __future__ import annotations

import types
import typing

import pytest
import typing_extensions
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_message_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from server.api.chat import ChatBody
from server.api.completions import CompletionBody
from server.api.fields.bodies import Record, Served, Tagged
from server.api.fields.kinds import Checked, Either, Items
from server.api.generate import GenerateBody, NativeSampling
from server.api.messages import CountTokensBody, MessageBody
from server.api.responses import ResponseBody
from server.generation.params import ApiLimits

OFFICIAL = {
    "chat": (ChatBody, chat_create_params.CompletionCreateParamsStreaming),
    "completions": (CompletionBody, completion_create_params.CompletionCreateParamsStreaming),
    "responses": (ResponseBody, response_create_params.ResponseCreateParamsStreaming),
    "messages": (MessageBody, message_create_params.MessageCreateParamsStreaming),
    "beta messages": (MessageBody, beta_message_create_params.MessageCreateParamsStreaming),
    "count_tokens": (CountTokensBody, message_count_tokens_params.MessageCountTokensParams),
}


@pytest.mark.parametrize("name", OFFICIAL)
def test_every_field_of_the_official_clients_is_known_at_any_depth(name):
    body, official = OFFICIAL[name]
    seen: set[str] = set()
    assert sorted(set(unknown(body, official, name, seen))) == []
    assert len(seen) >= {"completions": 2}.get(name, 9), "what is inside was compared too"


def unknown(body, official, where, seen):
    """Names in a typed dict that a body does not know, and in what is inside both."""
    if (body, official) in seen:
        return
    seen.add((body, official))
    for name, hint in typing_extensions.get_type_hints(official).items():
        declared = body.declared.get(name)
        if declared is None:
            if not body.open:
                yield f"{where}.{name}"
        elif isinstance(declared, Served):
            yield from inside(declared.kind, hint, f"{where}.{name}", seen)


def inside(kind, hint, where, seen):
    """The same for the objects that a value may be or hold."""
    for one in arms(hint):
        listed = isinstance(one, tuple)
        one = one[0] if listed else one
        for body in bodies(kind, one, listed):
            yield from unknown(body, one, where, seen)


def arms(hint):
    """The typed dicts that a hint allows; in a tuple where a list of them is meant."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType, typing.Annotated, typing_extensions.Required):
        args = args[:1] if origin is typing.Annotated else args
        for arg in args:
            yield from arms(arg)
    elif typing_extensions.is_typeddict(hint):
        yield hint
    elif args and getattr(origin, "__name__", "") in ("list", "Iterable"):
        for arm in arms(args[0]):
            if not isinstance(arm, tuple):
                yield (arm,)


def bodies(kind, official, listed):
    """The declared bodies that read such a typed dict; none where its kind is refused."""
    if isinstance(kind, Checked):
        yield from bodies(kind.kind, official, listed)
    elif isinstance(kind, Either):
        for one in kind.kinds:
            yield from bodies(one, official, listed)
    elif isinstance(kind, Items):
        if listed:
            yield from bodies(kind.kind, official, False)
    elif isinstance(kind, Record):
        if not listed and takes(kind.body, official):
            yield kind.body
    elif isinstance(kind, Tagged) and not listed:
        hint = typing_extensions.get_type_hints(official).get(kind.tag)
        for tag in literals(hint) if hint is not None else (kind.default,):
            if tag is not None and tag in kind.bodies:
                yield kind.bodies[tag]


def takes(body, official):
    """A record with a type of its own takes typed dicts of that type alone."""
    declared = body.declared.get("type")
    hint = typing_extensions.get_type_hints(official).get("type")
    if not isinstance(declared, Served) or hint is None:
        return True
    return any(
        tag in declared.kind.schema(ApiLimits("m", 100, 1000))["enum"] for tag in literals(hint)
    )


def literals(hint):
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    return tuple(value for arg in typing.get_args(hint) for value in literals(arg))


VLLM = """
    add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template
    chat_template_kwargs continue_final_message documents echo ec_transfer_params
    frequency_penalty ignore_eos include_reasoning include_stop_str_in_output kv_transfer_params
    length_penalty logit_bias logprob_token_ids logprobs max_tokens media_io_kwargs min_p
    min_tokens mm_processor_kwargs model n parallel_tool_calls presence_penalty priority
    prompt_logprobs reasoning_effort repetition_detection repetition_penalty request_id
    response_format return_mm_kwargs return_prompt_text return_token_ids return_token_offsets
    return_tokens_as_token_ids routed_experts_prompt_start seed session_id skip_special_tokens
    spaces_between_special_tokens stop stop_token_ids stream stream_interval stream_options
    structured_outputs temperature thinking_token_budget tool_choice tools top_k top_logprobs top_p
    truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs watermarking
    guided_json guided_regex guided_choice guided_grammar guided_decoding_backend
    guided_whitespace_pattern structural_tag
"""
SGLANG = """
    bootstrap_host bootstrap_port bootstrap_room cache_salt chat_template_kwargs
    continue_final_message custom_logit_processor custom_params data_parallel_rank
    disagg_prefill_dp_rank ebnf extra_key frequency_penalty ignore_eos images_config input_ids
    logit_bias logprobs lora_path max_completion_tokens max_dynamic_patch max_tokens
    min_dynamic_patch min_p min_tokens model n ngram_corpus_id no_stop_trim parallel_tool_calls
    presence_penalty priority reasoning_effort regex repetition_penalty response_format
    return_cached_tokens_details return_hidden_states return_meta_info return_prompt_token_ids
    return_routed_experts return_token_ids rid routed_dp_rank routed_experts_start_len seed
    separate_reasoning session_id session_params skip_special_tokens stop stop_regex
    stop_token_ids stream stream_options stream_reasoning task temperature tool_choice tools top_k
    top_logprobs top_p use_audio_in_video user
"""
LLAMA_CPP = """
    adaptive_decay adaptive_target backend_sampling cache_prompt chat_format chat_template_kwargs
    dry_allowed_length dry_base dry_multiplier dry_penalty_last_n dry_sequence_breakers
    dynatemp_exponent dynatemp_range frequency_penalty generation_prompt grammar grammar_lazy
    grammar_triggers id_slot ignore_eos json_schema logit_bias logprobs lora max_tokens min_keep
    min_p mirostat mirostat_eta mirostat_tau n n_cache_reuse n_cmpl n_discard n_indent n_keep
    n_predict n_probs parse_tool_calls post_sampling_probs presence_penalty preserved_tokens
    reasoning_format reasoning_in_content repeat_last_n repeat_penalty response_fields
    return_progress return_tokens samplers seed speculative.n_max speculative.n_min
    speculative.p_min speculative.type stop stream stream_options t_max_predict_ms temperature
    thinking_forced_open timings_per_token top_k top_n_sigma top_p typical_p xtc_probability
    xtc_threshold
"""
# Fields of conversations, which /v1/completions need not know.
OF_CHATS = """
    add_generation_prompt chat_format chat_template chat_template_kwargs continue_final_message
    documents generation_prompt include_reasoning input_ids max_completion_tokens
    parallel_tool_calls parse_tool_calls reasoning_effort reasoning_format reasoning_in_content
    separate_reasoning stream_reasoning task thinking_forced_open tool_choice tools top_logprobs
"""
NATIVE = """
    audio_data background bootstrap_host bootstrap_pair_key bootstrap_port bootstrap_room
    cache_salt conversation_id custom_labels custom_logit_processor data_parallel_rank
    decode_tp_size disagg_prefill_dp_rank encoder_urls external_trace_header extra_key
    http_worker_ipc image_data image_max_dynamic_patch images_config input_embeds input_ids
    kv_router_hint log_metrics logprob_start_len lora_id lora_path max_dynamic_patch
    max_thinking_tokens min_dynamic_patch mm_content_hashes mm_hashes modalities
    multi_item_delimiter_indices need_wait_for_mm_inputs no_logs num_items_assigned
    positional_embed_overrides priority received_time require_reasoning return_bytes
    return_entropy return_flat_raw_top_logprobs return_flat_raw_top_logprobs_b64
    return_hidden_states return_indexer_topk return_logprob return_prompt_token_ids
    return_routed_experts return_sampling_mask return_text_in_logprobs rid routed_dp_rank
    routed_experts_start_len routing_key sampling_params session_id session_params stream text
    token_ids_logprob top_logprobs_num use_audio_in_video video_config video_data
    video_max_dynamic_patch
"""
NATIVE_SAMPLING = """
    custom_params ebnf frequency_penalty ignore_eos json_schema logit_bias max_new_tokens min_new_tokens
    min_p n no_stop_trim presence_penalty regex repetition_penalty sampling_seed
    skip_special_tokens spaces_between_special_tokens stop stop_regex stop_token_ids
    stream_interval structural_tag temperature top_k top_p
"""


@pytest.mark.parametrize(
    ("body", "names"),
    [
        pytest.param(ChatBody, VLLM, id="chat, vLLM"),
        pytest.param(ChatBody, SGLANG, id="chat, SGLang"),
        pytest.param(ChatBody, LLAMA_CPP, id="chat, llama.cpp"),
        pytest.param(CompletionBody, VLLM, id="completions, vLLM"),
        pytest.param(CompletionBody, SGLANG, id="completions, SGLang"),
        pytest.param(CompletionBody, LLAMA_CPP, id="completions, llama.cpp"),
        pytest.param(GenerateBody, NATIVE, id="generate, SGLang"),
        pytest.param(NativeSampling, NATIVE_SAMPLING, id="sampling_params, SGLang"),
    ],
)
def test_every_field_of_other_servers_is_known(body, names):
    asked = set(names.split())
    if body is CompletionBody:
        asked -= set(OF_CHATS.split())
    assert sorted(asked - set(body.declared)) == []
