"""Prints the answers that litellm gets from a server, as JSON.

python litellm_program.py URL QUESTION LOGIT_BIAS
"""

import json
import sys

import litellm

TOOL = {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}


def main(url: str, question: str, bias: str):
    settings = {"api_base": f"{url}/v1", "api_key": "any", "temperature": 0}
    messages = [{"role": "user", "content": question}]
    chat = {"model": "openai/byte-model", "messages": messages, "max_tokens": 20, "seed": 1, **settings}
    response = {"model": "openai/byte-model", "input": question, "max_output_tokens": 20, **settings}
    answer = litellm.completion(**chat, logprobs=True, top_logprobs=1)
    stream = litellm.completion(**chat, stream=True, stream_options={"include_usage": True})
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    tools = [{"type": "function", "function": TOOL}]
    calling = litellm.completion(
        **{**chat, "max_tokens": 200}, tools=tools, tool_choice="required", logit_bias=json.loads(bias)
    )
    text = litellm.text_completion(
        model="text-completion-openai/byte-model", prompt=question[:20], max_tokens=20, **settings
    )
    events = list(litellm.responses(**response, stream=True))
    report = {
        "chat": answer.choices[0].message.content,
        "logprobs": [entry.logprob for entry in answer.choices[0].logprobs.content],
        "stream": "".join(pieces),
        "call": [calling.choices[0].message.tool_calls[0].function.name, calling.choices[0].finish_reason],
        "hosted": litellm.completion(**{**chat, "model": "hosted_vllm/byte-model"}).choices[0].message.content,
        "text": text.choices[0].text,
        "response": litellm.responses(**response).output[0].content[0].text,
        "response stream": "".join(event.delta for event in events if event.type == "response.output_text.delta"),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
