"""Fields of OpenAI and other servers that are not implemented, with the values that ask for nothing; null always does.

Clients send them by default. Any other value is refused by name.
"""

from typing import Any

Neutral = dict[str, tuple[Any, ...] | None]  # None: no value changes anything here

NEUTRAL: Neutral = {
    "metadata": None,
    "parallel_tool_calls": None,
    "prompt_cache_key": None,
    "prompt_cache_retention": None,
    "safety_identifier": None,
    "service_tier": None,
    "store": None,
    "user": None,
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
    # vLLM's and SGLang's
    "allowed_token_ids": (),
    "bad_words": ([],),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": (),
    "ebnf": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "min_tokens": (0,),
    "no_stop_trim": (False,),
    "priority": (0,),
    "prompt_logprobs": (),
    "regex": (),
    "repetition_penalty": (1,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "stop_regex": ([],),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
NEUTRAL_IN_STREAM_OPTIONS: Neutral = {
    "continuous_usage_stats": (False,),
    "include_obfuscation": (False,),
}
