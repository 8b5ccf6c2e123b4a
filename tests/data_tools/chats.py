"""Chat templates, a small tokenizer and the tokens that they must give, put together by hand."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = [
    "<s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|head|>",
    "<|/head|>",
    "<|eot|>",
    "<think>",
    "</think>",
    "<|channel>",
    "<channel|>",
]
TEXTS = ["user assistant system Hello there", "How are you? I am fine, thank you.", "What is 2 + 2? It is four."] * 3

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_TAGGED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% if strftime_now is defined %}{{ '<|head|>system<|/head|>Today: ' + strftime_now('%d %b %Y') "
    "+ '<|eot|>' }}{% endif %}{% for m in messages %}{{ '<|head|>' + m['role'] + '<|/head|>\\n\\n' "
    "+ m['content'] | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\\n\\n' }}{% endif %}"
)
# Like Qwen3's: thinking is removed from all answers but those after the last question.
THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% set content = m['content'] %}"
    "{% if m['role'] == 'assistant' and loop.index0 < ns.last %}{% set content = content.split('</think>')[-1] %}"
    "{% endif %}{{ '<|im_start|>' + m['role'] + '\\n' + content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Like GLM-4.6's: the next message ends an answer. Thinking is removed from all answers but the last.
GLM = (
    "{% set heads = {'user': '<|head|>', 'tool': '<|eot|>', 'assistant': '<|/head|>'} %}"
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ heads[m.role] }}{% if m.role == 'assistant' %}"
    "{{ '\n<think>' + (m.reasoning_content or '' if loop.index0 > ns.last else '') + '</think>' }}{% endif %}"
    "{{ '\n' + m.content }}{% for c in m.tool_calls or [] %}{{ '\n' + c.function.name }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|/head|>' }}{% endif %}"
)
# Like Gemma 4's: the prompt alone has the empty thinking, and answers have none.
GEMMA4 = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if not enable_thinking %}{{ '<|channel>thought\n<channel|>' }}{% endif %}{% endif %}"
)

Pieces = Sequence[tuple[str, bool]]  # text that begins or ends at a special token or newline, and: supervised?


def build_tokenizer(template: str | None, end_token: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """Byte-level BPE in which newlines stand alone, so that pieces cut at them tokenise as they do in the whole."""
    tokenizer = Tokenizer(models.BPE())
    newlines = pre_tokenizers.Split("\n", "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([newlines, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token=end_token)
    wrapped.chat_template = template
    return wrapped


def join(tokenizer: PreTrainedTokenizerFast, pieces: Pieces) -> tuple[list[int], list[bool]]:
    """Token ids and mask of `pieces`, each tokenised by itself."""
    ids = []
    mask = []
    for text, supervised in pieces:
        piece = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += piece
        mask += [supervised] * len(piece)
    return ids, mask


def chat(*turns: str) -> list[dict[str, str]]:
    """Turns of a user and an assistant, in alternation."""
    return [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(turns)]


def write_jsonl(path: Path, rows: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
