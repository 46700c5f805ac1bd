"""Fields of vLLM, SGLang and llama.cpp that no endpoint serves: refused by name, or ignored.

A field is refused where an answer without it would not be what was asked for, and ignored where the
answer is the same. A value that asks for nothing is never refused. What only one protocol has
stands with its body.
"""

from __future__ import annotations

from server.api.fields.bodies import ignored, refused

SAMPLING = (
    *refused(
        "this server samples by temperature, top_p, top_k, min_p and penalties",
        "adaptive_target",
        "custom_logit_processor",
        "custom_params",
        "logits_processors",
        "watermarking",
        dry_multiplier=0,
        dynatemp_range=0,
        mirostat=0,
        top_n_sigma=-1,
        typical_p=1,
        xtc_probability=0,
    ),
    *ignored(
        "tunes a way of sampling that is not served",
        "adaptive_decay",
        "dry_allowed_length",
        "dry_base",
        "dry_penalty_last_n",
        "dry_sequence_breakers",
        "dynatemp_exponent",
        "mirostat_eta",
        "mirostat_tau",
        "xtc_threshold",
    ),
    *refused(
        "penalties count the whole output and prompt",
        repeat_last_n=-1,
    ),
    *refused("there is no beam search", "use_beam_search", length_penalty=1, early_stopping=False),
    *refused(
        "use logit_bias to favour tokens and bad_words to ban them",
        "allowed_token_ids",
        min_keep=0,
    ),
    *refused("samplers run in one order", "samplers"),
    *refused(
        "use repetition_penalty, or stop_regex to end at a pattern",
        "repetition_detection",
    ),
    *refused(
        "reasoning is bounded in conversations alone, where it is told apart",
        "max_thinking_tokens",
        thinking_token_budget=-1,
        thinking_budget_tokens=-1,
        reasoning_budget_tokens=-1,
    ),
    *refused("text is not indented", n_indent=0),
    *refused("use the timeout field", t_max_predict_ms=-1),
    *ignored("ids become text without added blanks", "spaces_between_special_tokens"),
    *ignored(
        "grammars are enforced from the first token by one engine",
        "backend_sampling",
        "grammar_lazy",
        "grammar_triggers",
        "guided_decoding_backend",
        "preserved_tokens",
    ),
    *refused("the grammar allows a line break and indentation", "guided_whitespace_pattern"),
)

PROMPT = (
    *refused(
        "prompts that do not fit are refused, not cut",
        "truncation_side",
        n_keep=0,
        n_discard=0,
        truncate_prompt_tokens=-1,
    ),
    *refused(
        "the model reads text alone",
        "audio_data",
        "image_data",
        "images_config",
        "input_embeds",
        "media_io_kwargs",
        "mm_content_hashes",
        "mm_hashes",
        "mm_processor_kwargs",
        "multimodal_data",
        "positional_embed_overrides",
        "prompt_embeds",
        "use_audio_in_video",
        "video_config",
        "video_data",
    ),
    *ignored(
        "rules how images are cut, and there are none",
        "image_max_dynamic_patch",
        "max_dynamic_patch",
        "min_dynamic_patch",
        "return_mm_kwargs",
        "video_max_dynamic_patch",
    ),
)

ANSWER = (
    *refused(
        "/generate answers with output_ids, and /tokenize with a prompt's ids",
        "return_prompt_token_ids",
        "return_token_ids",
        "return_token_offsets",
        "return_tokens",
        "return_tokens_as_token_ids",
    ),
    *refused(
        "log-probabilities are of the sampled tokens and the likeliest",
        "logprob_token_ids",
        "post_sampling_probs",
        "return_entropy",
        "return_sampling_mask",
        "token_ids_logprob",
        n_probs=0,
    ),
    *refused(
        "the model's inner state is not shown",
        "return_hidden_states",
        "return_indexer_topk",
        "return_routed_experts",
    ),
    *ignored(
        "rules what is shown of experts, and none are",
        "routed_experts_prompt_start",
        "routed_experts_start_len",
    ),
    *refused(
        "the answer has one form",
        "return_meta_info",
        "return_progress",
        "response_fields",
        "timings_per_token",
    ),
    *ignored("usage tells cached tokens", "return_cached_tokens_details"),
    *ignored("every token is sent as it is made", "stream_interval"),
    *refused("/tokenize with messages shows the prompt's tokens", "return_prompt_text"),
)

SERVING = (
    *refused("there are no adapters", "lora", "lora_id", "lora_path"),
    *refused(
        "nothing is stored between requests; send the whole conversation",
        "session_params",
        n_cache_reuse=0,
    ),
    *refused("use cache_salt, which keeps prefixes apart", "extra_key"),
    *refused(
        "this server computes prompt and answer in one process",
        "bootstrap_host",
        "bootstrap_pair_key",
        "bootstrap_port",
        "bootstrap_room",
        "decode_tp_size",
        "ec_transfer_params",
        "kv_transfer_params",
    ),
    *ignored(
        "there is one worker to choose",
        "conversation_id",
        "data_parallel_rank",
        "disagg_prefill_dp_rank",
        "id_slot",
        "kv_router_hint",
        "ngram_corpus_id",
        "routed_dp_rank",
        "routing_key",
        "session_id",
        "speculative.n_max",
        "speculative.n_min",
        "speculative.p_min",
        "speculative.type",
    ),
    *refused("no custom extensions are loaded", "vllm_xargs"),
    *ignored("prefixes are always cached; the answer is the same", "cache_prompt"),
    *ignored(
        "metrics and logs are the same for every request",
        "custom_labels",
        "external_trace_header",
        "log_metrics",
        "no_logs",
        "received_time",
    ),
    *ignored("names nobody to this server; /abort_request goes by request_id", "user"),
)
