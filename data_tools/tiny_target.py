"""Trains the small Qwen3 language models that ship with Slipstream, their tokenizers included.

    python data_tools/tiny_target.py --data "[gsm8k_train.jsonl, gpteacher.jsonl]" --output assets/tiny-target
    python data_tools/tiny_target.py --moe true --data "[gsm8k_train.jsonl]" --output assets/tiny-moe-target …

The first takes about two minutes on a data-centre GPU; a CPU does the same, slowly. The second, a mixture of experts,
is small enough for a CPU; its README has all options. A draft can only learn a target that
generalises: one that memorised its data answers noise. Invariant: from the first evaluation on,
even after an interrupt, `output` holds the model with the lowest held-out loss so far. The tokens of a prompt are a
prefix of the tokens of the whole conversation.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import copy
import json
import math
import os
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from tqdm import tqdm
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    get_cosine_schedule_with_warmup,
)

from slipstream.config import parse
from slipstream.data_tools.options import check_at_least
from slipstream.data_tools.tiny_corpus import read_conversations, split

MAX_POSITIONS = 2048
BALANCE_WEIGHT = 0.01  # of the loss that keeps experts in use (Switch Transformer, arXiv 2101.03961)
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


@dataclass(frozen=True, slots=True)
class Options:
    data: list[str]
    """jsonl files whose lines hold `id` and `messages` (a list of role and content)"""
    output: str
    """folder to write the model to"""
    moe: bool = False
    """train a mixture of experts instead of a dense model"""
    vocab_size: int = 4096
    """tokens in the vocabulary, special tokens included"""
    row_length: int = 2048
    """tokens in a packed row"""
    batch_rows: int = 8
    """rows in a step"""
    passes: int = 10
    """tokens to train on, in multiples of the training conversations' tokens"""
    steps: int | None = None
    """optimizer steps; default: those of `passes`"""
    learning_rate: float = 3e-3
    """peak of the cosine, which ends at zero"""
    warmup_steps: int = 100
    """steps of linear warm-up"""
    weight_decay: float = 1.0
    """AdamW's, on matrices only"""
    evaluate_every: int = 200
    """steps between evaluations on the held-out conversations; the last step is always evaluated"""
    seed: int = 0
    """seed of the weights and of the order of the conversations"""

    def __post_init__(self) -> None:
        if self.vocab_size < MIN_VOCAB_SIZE:
            raise ValueError(
                f"vocab_size {self.vocab_size} is too small: bytes and special tokens take {MIN_VOCAB_SIZE}"
            )
        if not 2 <= self.row_length <= MAX_POSITIONS:
            raise ValueError(f"row_length {self.row_length} does not fit the model: give 2 to {MAX_POSITIONS}")
        check_at_least(self, 1, "batch_rows", "passes", "evaluate_every")


def train_tokenizer(
    conversations: list[dict[str, Any]], vocab_size: int, max_positions: int
) -> PreTrainedTokenizerFast:
    """Byte-level BPE of exactly `vocab_size` tokens.

    Newlines and digits are tokens of their own. So a prompt's tokens are a prefix of the conversation's, whatever
    follows the newline after the role, and a number has one spelling.
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


def pack(documents: list[list[int]], row_length: int, pad_id: int) -> Tensor:  # (R, row_length) int64
    """Concatenates documents into rows, in order.

    Every row begins with a document, as every prompt does; the end of a document that does not fit is dropped.
    """
    rows: list[list[int]] = []
    row: list[int] = []
    for document in documents:
        row = row + document
        if len(row) >= row_length:
            rows.append(row[:row_length])
            row = []
    if row:
        rows.append(row + [pad_id] * (row_length - len(row)))
    return torch.tensor(rows)


def batches(documents: list[list[int]], options: Options, pad_id: int) -> Iterator[Tensor]:  # (batch_rows, row_length)
    """Endless passes over the documents, each in a new order; the last rows of a pass are dropped if too few."""
    shuffler = random.Random(options.seed)
    while True:
        rows = pack(shuffler.sample(documents, len(documents)), options.row_length, pad_id)
        if len(rows) < options.batch_rows:
            raise ValueError(f"batch_rows {options.batch_rows}: the data fills only {len(rows)} rows; lower it")
        yield from (batch for batch in rows.split(options.batch_rows) if len(batch) == options.batch_rows)


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int, moe: bool = False) -> PreTrainedModel:
    """6.6M parameters at a vocabulary of 4,096; with `moe` 3.1M at 2,048, of which a token uses 1.4M."""
    torch.manual_seed(seed)
    end_id, pad_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    shared: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": None,
        "eos_token_id": end_id,
        "pad_token_id": pad_id,
    }
    model = Qwen3MoeForCausalLM(moe_config(shared)) if moe else Qwen3ForCausalLM(dense_config(shared))
    model.generation_config = GenerationConfig(
        eos_token_id=[end_id, pad_id], pad_token_id=pad_id, do_sample=True, temperature=0.3
    )
    return model


def dense_config(shared: dict[str, Any]) -> Qwen3Config:
    return Qwen3Config(
        **shared,
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        head_dim=128,
        intermediate_size=768,
    )


def moe_config(shared: dict[str, Any]) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        **shared | {"head_dim": 64},  # which the class's signature lacks
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=3,
        intermediate_size=384,
        moe_intermediate_size=128,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    )


def token_losses(model: PreTrainedModel, rows: Tensor, pad_id: int) -> tuple[Tensor, Tensor | None]:
    """Loss of each next token of `rows` (B, row_length) under causal attention over the whole row, (B, row_length - 1)
    fp32 in nats, 0 at padding; and of a mixture of experts the loss () that is 2 if all experts get as many tokens."""
    experts = {"output_router_logits": True} if isinstance(model, Qwen3MoeForCausalLM) else {}
    with torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.device.type == "cuda"):
        output = model(rows, use_cache=False, **experts)
    logits = output.logits[:, :-1].float().transpose(1, 2)
    losses = F.cross_entropy(logits, rows[:, 1:], ignore_index=pad_id, reduction="none")
    return losses, output.aux_loss if experts else None


@torch.no_grad()
def evaluate(model: PreTrainedModel, rows: Tensor, batch_rows: int, pad_id: int) -> dict[str, Any]:
    """Mean loss in nats per token over `rows`, whole and by the predicted token's position (0-127, 128-255, 256-511 …).

    Ranges of padding alone are left out.
    """
    device = model.device
    losses = torch.cat([token_losses(model, batch.to(device), pad_id)[0].cpu() for batch in rows.split(batch_rows)])
    real = rows[:, 1:] != pad_id
    by_position = {}
    for start, end in position_ranges(rows.shape[1]):
        columns = slice(max(start - 1, 0), end - 1)  # column i predicts position i + 1
        if real[:, columns].any():
            by_position[f"{start}-{end - 1}"] = round((losses[:, columns].sum() / real[:, columns].sum()).item(), 4)
    return {"held_out_loss": round((losses.sum() / real.sum()).item(), 4), "by_position": by_position}


def position_ranges(row_length: int) -> Iterator[tuple[int, int]]:
    """Half-open ranges that cover [0, row_length): the first 128 positions, then each up to twice as far."""
    start, end = 0, 128
    while start < row_length:
        yield start, min(end, row_length)
        start, end = end, 2 * end


def build_optimizer(model: PreTrainedModel, options: Options) -> torch.optim.AdamW:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95), fused=True)


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Writes weights (bfloat16), configs and tokenizer into `output`, each file whole or not at all."""
    with tempfile.TemporaryDirectory(dir=output, prefix=".saving-") as folder:
        copy.deepcopy(model).bfloat16().save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for path in Path(folder).iterdir():
            os.replace(path, output / path.name)


def train(options: Options) -> None:
    training, held_out = split(read_conversations(options.data))
    tokenizer = train_tokenizer(training, options.vocab_size, MAX_POSITIONS)
    documents, pad_id = encode(tokenizer, training), tokenizer.pad_token_id
    held_out_rows = pack(encode(tokenizer, held_out), options.row_length, pad_id)
    tokens_per_step = options.batch_rows * options.row_length
    num_steps = options.steps or max(1, options.passes * sum(map(len, documents)) // tokens_per_step)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(tokenizer, options.seed, options.moe)
    model.to(device)  # type: ignore[arg-type]  # transformers hides torch's own signature
    optimizer = build_optimizer(model, options)
    scheduler = get_cosine_schedule_with_warmup(optimizer, min(options.warmup_steps, num_steps // 2), num_steps)
    output = Path(options.output)
    output.mkdir(parents=True, exist_ok=True)
    log = output / "training_log.jsonl"
    log.unlink(missing_ok=True)
    best_loss, losses = math.inf, []
    progress = tqdm(islice(batches(documents, options, pad_id), num_steps), total=num_steps, desc="training")
    for step, rows in enumerate(progress, 1):
        losses.append(train_step(model, optimizer, rows.to(device), pad_id))
        scheduler.step()
        if step % options.evaluate_every and step != num_steps:
            continue
        scores = evaluate(model, held_out_rows, options.batch_rows, pad_id)
        train_loss = round(torch.stack(losses).mean().item(), 4)
        losses = []
        line = json.dumps({"step": step, "tokens": step * tokens_per_step, "train_loss": train_loss, **scores})
        progress.write(line)
        with log.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        if scores["held_out_loss"] < best_loss:
            best_loss = scores["held_out_loss"]
            save(model, tokenizer, output)


def train_step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, rows: Tensor, pad_id: int) -> Tensor:
    """One update; returns the mean loss per token, still on the device."""
    optimizer.zero_grad()
    losses, balance = token_losses(model, rows, pad_id)
    loss = losses.sum() / (rows[:, 1:] != pad_id).sum()
    (loss if balance is None else loss + BALANCE_WEIGHT * balance).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def main(argv: list[str] | None = None) -> None:
    train(parse(Options, argv, prog="tiny_target", description="Train the bundled target model."))


if __name__ == "__main__":
    main()
