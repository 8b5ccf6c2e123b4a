"""Prints the answers that langchain-openai gets from a server, as JSON.

python langchain_program.py URL QUESTION LOGIT_BIAS
"""

import json
import sys
from typing import Any, Literal

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": NOTHING}}


class Verdict(BaseModel):
    is_right: bool
    unit: Literal["eggs", "boxes"]


def texts(message: Any) -> str:
    parts = [message.content] if isinstance(message.content, str) else message.content
    return "".join(part if isinstance(part, str) else part.get("text", "") for part in parts)


def main(url: str, question: str, bias: str):
    settings = {"model": "byte-model", "base_url": f"{url}/v1", "api_key": "any", "temperature": 0}
    chat = ChatOpenAI(**settings, max_tokens=20)
    response = ChatOpenAI(**settings, max_tokens=20, use_responses_api=True)
    brief = {"extra_body": {"logit_bias": json.loads(bias)}}
    scored = ChatOpenAI(**settings, max_tokens=20, logprobs=True, top_logprobs=1).invoke(question)
    report = {
        "chat": chat.invoke(question).content,
        "batch": [message.content for message in chat.batch([question, question])],
        "logprobs": [entry["logprob"] for entry in scored.response_metadata["logprobs"]["content"]],
        "stream": "".join(texts(piece) for piece in chat.stream(question)),
        "text": OpenAI(**settings, max_tokens=20).invoke(question[:20]),
        "response": texts(response.invoke(question)),
        "response stream": "".join(texts(piece) for piece in response.stream(question)),
        "calls": {},
        "parsed": {},
    }
    for name, kind in (("chat", {}), ("response", {"use_responses_api": True})):
        model = ChatOpenAI(**settings, **brief, **kind, max_tokens=200)
        called = model.bind_tools([TOOL], tool_choice="required").invoke(question)
        [call] = called.tool_calls
        turns = [HumanMessage(question), called, ToolMessage("noon", tool_call_id=call["id"]), AIMessage("It is noon.")]
        report["calls"][name] = [
            call["name"],
            texts(ChatOpenAI(**settings, **kind, max_tokens=8).invoke([*turns, "So?"])),
        ]
        report["parsed"][name] = model.with_structured_output(Verdict).invoke(question).model_dump()
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
