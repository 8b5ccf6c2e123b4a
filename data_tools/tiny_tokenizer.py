"""Tokenizer and chat template of the bundled target: byte-level BPE with room for the special tokens of later drafters.

Invariant: the tokens of a prompt are a prefix of the tokens of the whole conversation.
"""

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD, TURN_START, TURN_END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
SPECIAL_TOKENS = [PAD, TURN_START, TURN_END, MASK, *(f"<|spare_{index}|>" for index in range(16))]
MIN_VOCAB_SIZE = len(SPECIAL_TOKENS) + 256  # every byte is a token

# The generation span includes the closing <|im_end|>: a model has to learn to stop.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' -%}
{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}
{%- else -%}
{{ message['content'] + '<|im_end|>' }}
{%- endif -%}
{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""


def train_tokenizer(
    conversations: list[dict[str, Any]], vocab_size: int, max_positions: int
) -> PreTrainedTokenizerFast:
    """Byte-level BPE of exactly `vocab_size` tokens.

    Newlines and digits stand alone. So a prompt's tokens are a prefix of the whole conversation's, whatever follows the
    newline after the role, and numbers are spelled in one way only.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # The roles are part of every rendered conversation but of no message.
    texts = (message["role"] + "\n" + message["content"] for row in conversations for message in row["messages"])
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"vocab_size {vocab_size} needs more text: the data gives {tokenizer.get_vocab_size()} tokens")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=TURN_END,
        mask_token=MASK,
        extra_special_tokens=[token for token in SPECIAL_TOKENS if token not in (PAD, TURN_END, MASK)],
        clean_up_tokenization_spaces=False,
        model_max_length=max_positions,
        chat_template=CHAT_TEMPLATE,
    )


def encode(tokenizer: PreTrainedTokenizerFast, conversations: list[dict[str, Any]]) -> list[list[int]]:
    texts = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in conversations]
    return tokenizer(texts, add_special_tokens=False)["input_ids"]
