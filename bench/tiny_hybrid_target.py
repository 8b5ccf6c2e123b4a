"""Trains the small hybrid that ships with Slipstream: Qwen3.5's text model, and its MTP layer.

    python bench/tiny_hybrid_target.py --data "[gsm8k_train.jsonl, gpteacher.jsonl]" \
        --output assets/tiny-hybrid-target

Tokenizer, chat template and the rule of what is held out are those of assets/tiny-target. transformers computes gated
delta nets chunk after chunk; `chunked_delta` here solves all chunks at once. Invariant: `output` holds the trunk of
the lowest held-out loss, rounded to bf16, and an MTP layer that was trained on exactly that trunk.
Letters: B rows, T tokens of each, N chunks of C, A key heads and H value heads, K and V their dims, D the hidden size.
"""

import slipstream.runtime  # noqa: F401, I001  before torch, for which it sets the thread policy

import copy
import hashlib
import json
import math
import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoTokenizer, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from slipstream.config import parse
from slipstream.data_tools.conversations import to_example
from slipstream.data_tools.options import ConversationOptions, check_at_least
from slipstream.data_tools.rows import read_rows

ASSETS = Path(__file__).parents[1] / "assets"
TOKENIZER = ASSETS / "tiny-target"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
HELD_OUT_SHARE = 0.05
PAD = 0
CHUNK = 64
EPS = 1e-6
Rope = tuple[Tensor, Tensor]  # cosines and sines (T, 1, R)
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 192,
    "initializer_range": 0.02,
    "intermediate_size": 192,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 32,
    "max_position_embeddings": 2048,
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_hidden_layers": 8,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": EPS,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [3, 3, 2],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000.0,
        "rope_type": "default",
    },
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": 4096,
}


@dataclass(frozen=True, slots=True)
class Options:
    data: list[str]
    """jsonl files whose lines hold `id` and `messages` (a list of role and content)"""
    output: str
    """folder to write the model to"""
    row_length: int = 2048
    """tokens in a packed row, a multiple of 64"""
    batch_rows: int = 8
    """rows in a step"""
    steps: int = 837
    """optimizer steps of the trunk"""
    learning_rate: float = 5e-3
    """peak of the trunk's cosine, which ends at zero"""
    weight_decay: float = 0.5
    """AdamW's, on the trunk's matrices"""
    mtp_steps: int = 634
    """optimizer steps of the MTP layer"""
    evaluate_every: int = 200
    """steps between evaluations on the held-out conversations; the last step is always evaluated"""
    seed: int = 0
    """seed of the weights and of the order of the conversations"""

    def __post_init__(self) -> None:
        if self.row_length % CHUNK:
            raise ValueError(f"row_length is {self.row_length}; give a multiple of {CHUNK}")
        check_at_least(self, 1, "row_length", "batch_rows", "steps", "mtp_steps", "evaluate_every")


class Norm(nn.Module):
    """RMS norm that multiplies by 1 + weight."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), 1.0 + self.weight, EPS)


class GatedNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, EPS) * F.silu(gate.float())


def chunked_delta(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """q, k (B, H, T, K), v (B, H, T, V), decay in logs and beta (B, H, T), fp32 -> (B, H, T, V).

    Within a chunk that begins with state S, the updates u solve (I + L) u = beta (v - e^G S^T k), where G sums the
    decays and L_ti = beta_t e^(G_t - G_i) k_t k_i for i < t: u = values - recall S. So a chunk takes S to keep S +
    write, and chunks are joined in log2(N) rounds.
    """
    q, k, v, decay, beta = (x.unflatten(2, (-1, CHUNK)) for x in (q, k, v, decay, beta))
    total = decay.cumsum(-1)
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~causal, -math.inf).exp()
    weighted = k * beta[..., None]
    system = (weighted @ k.transpose(-1, -2) * between).tril(-1) + torch.eye(CHUNK, device=q.device)
    right = torch.cat((v * beta[..., None], weighted * total.exp()[..., None]), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, recall = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    late = (k * (total[..., -1:] - total).exp()[..., None]).transpose(-1, -2)
    keep = total[..., -1].exp()[..., None, None] * torch.eye(k.shape[-1], device=q.device) - late @ recall
    write = late @ values
    step = 1
    while step < keep.shape[2]:
        later = keep[:, :, step:]
        write = torch.cat((write[:, :, :step], later @ write[:, :, :-step] + write[:, :, step:]), dim=2)
        keep = torch.cat((keep[:, :, :step], later @ keep[:, :, :-step]), dim=2)
        step *= 2
    state = F.pad(write[:, :, :-1], (0, 0, 0, 0, 1, 0))  # before each chunk
    updates = values - recall @ state
    return ((q * total.exp()[..., None]) @ state + (q @ k.transpose(-1, -2) * between) @ updates).flatten(2, 3)


class DeltaNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_keys = CONFIG["linear_num_key_heads"]
        self.num_values = CONFIG["linear_num_value_heads"]
        self.key_dim = CONFIG["linear_key_head_dim"]
        self.value_dim = CONFIG["linear_value_head_dim"]
        hidden = CONFIG["hidden_size"]
        taps = CONFIG["linear_conv_kernel_dim"]
        self.sizes = (*[self.num_keys * self.key_dim] * 2, self.num_values * self.value_dim)
        channels = sum(self.sizes)
        self.conv1d = nn.Conv1d(channels, channels, taps, groups=channels, bias=False, padding=taps - 1)
        steps = torch.exp(torch.empty(self.num_values).uniform_(math.log(0.001), math.log(0.1)))
        self.dt_bias = nn.Parameter(steps + torch.log(-torch.expm1(-steps)))  # softplus of it is `steps`
        self.A_log = nn.Parameter(torch.empty(self.num_values).uniform_(1, 16).log())
        self.norm = GatedNorm(self.value_dim)
        self.in_proj_qkv = nn.Linear(hidden, channels, bias=False)
        self.in_proj_z = nn.Linear(hidden, self.sizes[2], bias=False)
        self.in_proj_b = nn.Linear(hidden, self.num_values, bias=False)
        self.in_proj_a = nn.Linear(hidden, self.num_values, bias=False)
        self.out_proj = nn.Linear(self.sizes[2], hidden, bias=False)

    def forward(self, x: Tensor, rope: Rope) -> Tensor:  # noqa: ARG002
        inputs = self.in_proj_qkv(x)
        beta = self.in_proj_b(x)
        steps = self.in_proj_a(x)
        gate = self.in_proj_z(x).unflatten(-1, (self.num_values, -1))
        with torch.autocast(x.device.type, enabled=False):
            weight = self.conv1d.weight[:, 0]  # (channels, taps)
            padded = F.pad(inputs.float(), (0, 0, weight.shape[1] - 1, 0))
            taps = [padded[:, tap : tap + x.shape[1]] * weight[:, tap] for tap in range(weight.shape[1])]
            q, k, v = F.silu(torch.stack(taps).sum(0)).split(self.sizes, dim=-1)
            decay = -self.A_log.exp() * F.softplus(steps.float() + self.dt_bias)
            values = v.unflatten(-1, (self.num_values, -1)).transpose(1, 2)
            beta = beta.float().sigmoid().transpose(1, 2)
            q = self.heads(q) * self.key_dim**-0.5
            out = chunked_delta(q, self.heads(k), values, decay.transpose(1, 2), beta)
            out = self.norm(out.transpose(1, 2), gate).flatten(-2)
        return self.out_proj(out)

    def heads(self, x: Tensor) -> Tensor:
        """(B, T, A * K) -> (B, H, T, K) of length 1."""
        x = x.unflatten(-1, (self.num_keys, -1))
        x = x * (x.square().sum(-1, keepdim=True) + EPS).rsqrt()
        return x.repeat_interleave(self.num_values // self.num_keys, dim=2).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        hidden = CONFIG["hidden_size"]
        dim = CONFIG["head_dim"]
        self.num_heads = CONFIG["num_attention_heads"]
        self.num_kv_heads = CONFIG["num_key_value_heads"]
        self.q_proj = nn.Linear(hidden, 2 * self.num_heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.num_kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.num_kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * dim, hidden, bias=False)
        self.q_norm = Norm(dim)
        self.k_norm = Norm(dim)

    def forward(self, x: Tensor, rope: Rope) -> Tensor:
        q, gate = self.q_proj(x).unflatten(-1, (self.num_heads, -1)).chunk(2, dim=-1)
        k, v = (projection(x).unflatten(-1, (self.num_kv_heads, -1)) for projection in (self.k_proj, self.v_proj))
        q = rotate(self.q_norm(q), rope).to(v.dtype).transpose(1, 2)
        k = rotate(self.k_norm(k), rope).to(v.dtype).transpose(1, 2)
        group = self.num_heads // self.num_kv_heads
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v.transpose(1, 2)))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.o_proj((out * gate.sigmoid()).flatten(-2))


def rotate(x: Tensor, rope: Rope) -> Tensor:
    cos, sin = rope
    first, second, rest = x.split((cos.shape[-1] // 2, cos.shape[-1] // 2, x.shape[-1] - cos.shape[-1]), dim=-1)
    return torch.cat((torch.cat((first, second), -1) * cos + torch.cat((-second, first), -1) * sin, rest), dim=-1)


def rope_of(length: int, device: torch.device) -> Rope:
    size = int(CONFIG["head_dim"] * CONFIG["partial_rotary_factor"])
    frequencies = CONFIG["rope_parameters"]["rope_theta"] ** -(torch.arange(0, size, 2, device=device).float() / size)
    angles = torch.arange(length, device=device)[:, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)[:, None]
    return angles.cos(), angles.sin()


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        hidden = CONFIG["hidden_size"]
        inner = CONFIG["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.name = {"linear_attention": "linear_attn", "full_attention": "self_attn"}[kind]
        setattr(self, self.name, DeltaNet() if kind == "linear_attention" else Attention())
        self.mlp = MLP()
        self.input_layernorm = Norm(CONFIG["hidden_size"])
        self.post_attention_layernorm = Norm(CONFIG["hidden_size"])

    def forward(self, x: Tensor, rope: Rope) -> Tensor:
        x = x + getattr(self, self.name)(self.input_layernorm(x), rope)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    """Tensors are called as in files, after "model."."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(CONFIG["vocab_size"], CONFIG["hidden_size"])
        self.layers = nn.ModuleList(Layer(kind) for kind in CONFIG["layer_types"])
        self.norm = Norm(CONFIG["hidden_size"])
        initialise(self)

    def forward(self, rows: Tensor) -> Tensor:
        """rows (B, T) -> states after the final norm (B, T, D) fp32."""
        x = self.embed_tokens(rows)
        rope = rope_of(rows.shape[1], rows.device)
        for layer in self.layers:
            x = layer(x, rope)
        return self.norm(x)

    def logits(self, states: Tensor) -> Tensor:
        return F.linear(states, self.embed_tokens.weight)


class MTP(nn.Module):
    """Tensors are called as in files, after "mtp."."""

    def __init__(self) -> None:
        super().__init__()
        hidden = CONFIG["hidden_size"]
        self.pre_fc_norm_embedding = Norm(hidden)
        self.pre_fc_norm_hidden = Norm(hidden)
        self.norm = Norm(hidden)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([Layer("full_attention")])
        initialise(self)

    def forward(self, embeds: Tensor, states: Tensor) -> Tensor:
        """Embeddings of tokens t + 1 and states at t (B, T, D) -> states whose logits are of tokens t + 2."""
        x = self.fc(torch.cat((self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(states)), dim=-1))
        return self.norm(self.layers[0](x, rope_of(x.shape[1], x.device)))


def initialise(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.02)


def read_documents(paths: list[str]) -> dict[str, list[list[int]]]:
    """Tokens of the conversations, by whether they are held out, which the id alone decides."""
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    documents: dict[str, list[list[int]]] = {"train": [], "held_out": []}
    for row in read_rows(ConversationOptions(data=tuple(paths))):
        example = to_example(row, row.columns())
        digest = hashlib.sha256(str(example.id).encode()).digest()[:8]
        split = "held_out" if int.from_bytes(digest, "big") < HELD_OUT_SHARE * 2**64 else "train"
        text = tokenizer.apply_chat_template(example.messages, tokenize=False)
        documents[split].append(tokenizer(text, add_special_tokens=False)["input_ids"])
    return documents


def pack(documents: list[list[int]], length: int) -> Tensor:  # (R, length) int64
    """Every row begins with a document; the end of one that does not fit is dropped."""
    rows: list[list[int]] = []
    row: list[int] = []
    for document in documents:
        row = row + document
        if len(row) >= length:
            rows.append(row[:length])
            row = []
    if row:
        rows.append(row + [PAD] * (length - len(row)))
    return torch.tensor(rows)


def batches(documents: list[list[int]], options: Options, seed: int) -> Iterator[Tensor]:
    """Endless passes over the documents, each in a new order."""
    shuffler = random.Random(seed)
    while True:
        rows = pack(shuffler.sample(documents, len(documents)), options.row_length)
        yield from (batch for batch in rows.split(options.batch_rows) if len(batch) == options.batch_rows)


def autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def token_losses(trunk: Trunk, rows: Tensor) -> Tensor:
    """(B, T - 1) fp32 in nats, 0 at padding."""
    with autocast(rows.device):
        logits = trunk.logits(trunk(rows)[:, :-1])
    return F.cross_entropy(logits.float().transpose(1, 2), rows[:, 1:], ignore_index=PAD, reduction="none")


def mtp_losses(trunk: Trunk, mtp: MTP, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy with the trunk's own probabilities of each token after the next, (B, T - 2) fp32 and 0 at padding;
    and whether both have the same best token."""
    with autocast(rows.device):
        with torch.no_grad():
            states = trunk(rows)
            target = trunk.logits(states[:, 1:-1]).float()
        logits = trunk.logits(mtp(trunk.embed_tokens(rows[:, 1:]), states[:, :-1])[:, :-1]).float()
    is_real = rows[:, 2:] != PAD
    losses = -(target.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    return losses * is_real, (logits.argmax(-1) == target.argmax(-1)) & is_real


@torch.no_grad()
def evaluate(trunk: Trunk, rows: Tensor, options: Options) -> dict[str, Any]:
    """Mean loss in nats per token, whole and by the predicted token's position: the first 128, then twice as far."""
    losses = torch.cat([token_losses(trunk, batch).cpu() for batch in rows.split(options.batch_rows)])
    real = rows[:, 1:].cpu() != PAD
    by_position = {}
    start = 0
    while start < rows.shape[1]:
        end = min(max(128, 2 * start), rows.shape[1])
        columns = slice(max(start - 1, 0), end - 1)
        mean = losses[:, columns].sum() / real[:, columns].sum()
        by_position[f"{start}-{end - 1}"] = round(mean.item(), 4)
        start = end
    return {"held_out_loss": round((losses.sum() / real.sum()).item(), 4), "by_position": by_position}


@torch.no_grad()
def evaluate_mtp(trunk: Trunk, mtp: MTP, rows: Tensor, options: Options) -> dict[str, Any]:
    """Mean loss and the share of rows whose best token is the trunk's."""
    pairs = [mtp_losses(trunk, mtp, batch) for batch in rows.split(options.batch_rows)]
    count = (rows[:, 2:] != PAD).sum()
    losses, hits = (torch.stack([pair[part].sum() for pair in pairs]).sum() / count for part in (0, 1))
    return {"held_out_loss": round(losses.item(), 4), "agreement": round(hits.item(), 4)}


def fit(
    module: nn.Module,
    loss_of: Callable[[Tensor], Tensor],
    stream: Iterator[Tensor],
    look: Callable[[dict[str, Any]], None],
    options: Options,
    *,
    steps: int,
    peak: float,
    decay: float,
    warmup: int,
) -> None:
    """AdamW with a cosine that ends at zero; `look` gets the step and the mean loss since the last look."""
    matrices = [parameter for parameter in module.parameters() if parameter.ndim == 2]
    vectors = [parameter for parameter in module.parameters() if parameter.ndim != 2]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    device = matrices[0].device
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=device.type == "cuda")
    losses = []
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = peak * min(1, step / warmup) * 0.5 * (1 + math.cos(math.pi * step / steps))
        loss = loss_of(next(stream).to(device, non_blocking=True))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
        if step % options.evaluate_every == 0 or step == steps:
            look({"step": step, "train_loss": round(torch.stack(losses).mean().item(), 4)})
            losses = []


def rounded(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().bfloat16().float() for name, tensor in module.state_dict().items()}


def train(options: Options) -> None:
    documents = read_documents(options.data)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    held_out = pack(documents["held_out"], options.row_length).to(device)
    output = Path(options.output)
    output.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()

    def note(name: str, line: dict[str, Any]) -> None:
        print(f"{time.perf_counter() - began:.0f} s: {json.dumps(line)}", flush=True)
        with (output / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    for name in ("training_log.jsonl", "mtp_log.jsonl"):
        (output / name).unlink(missing_ok=True)
    torch.manual_seed(options.seed)
    trunk = Trunk().to(device)
    best: dict[str, Any] = {"loss": math.inf, "weights": {}}

    def look(line: dict[str, Any]) -> None:
        scores = evaluate(trunk, held_out, options)
        note("training_log.jsonl", line | scores)
        if scores["held_out_loss"] < best["loss"]:
            best.update(loss=scores["held_out_loss"], weights=copy.deepcopy(trunk.state_dict()))

    def loss_of(rows: Tensor) -> Tensor:
        return token_losses(trunk, rows).sum() / (rows[:, 1:] != PAD).sum()

    rows = batches(documents["train"], options, options.seed)
    rates = {"peak": options.learning_rate, "decay": options.weight_decay, "warmup": 100}
    fit(trunk, loss_of, rows, look, options, steps=options.steps, **rates)
    trunk.load_state_dict(best["weights"])
    trunk.load_state_dict(rounded(trunk))
    trunk.requires_grad_(False)
    torch.manual_seed(options.seed + 1)
    mtp = MTP().to(device)

    def mtp_loss_of(rows: Tensor) -> Tensor:
        return mtp_losses(trunk, mtp, rows)[0].sum() / (rows[:, 2:] != PAD).sum()

    def look_at_mtp(line: dict[str, Any]) -> None:
        note("mtp_log.jsonl", line | evaluate_mtp(trunk, mtp, held_out, options))

    rows = batches(documents["train"], options, options.seed + 1)
    rates = {"peak": 3e-3, "decay": 0.1, "warmup": 50}
    fit(mtp, mtp_loss_of, rows, look_at_mtp, options, steps=options.mtp_steps, **rates)
    save(trunk, mtp, output)
    print(f"largest difference from transformers' logits: {difference(trunk, held_out[:2, :512]):.1e}")


def save(trunk: Trunk, mtp: MTP, output: Path) -> None:
    tensors = {f"model.{name}": tensor for name, tensor in trunk.state_dict().items()}
    tensors |= {f"mtp.{name}": tensor for name, tensor in mtp.state_dict().items()}
    tensors = {name: tensors[name].detach().cpu().bfloat16().contiguous() for name in sorted(tensors)}
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    (output / "config.json").write_text(json.dumps(CONFIG, indent=2, sort_keys=True) + "\n")
    for name in TOKENIZER_FILES:
        shutil.copy(TOKENIZER / name, output)


@torch.no_grad()
def difference(trunk: Trunk, rows: Tensor) -> float:
    """Compares logits in fp32 with transformers' code."""
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**CONFIG)).float().eval()
    tensors = {f"model.{name}": tensor for name, tensor in trunk.state_dict().items()}
    model.load_state_dict(tensors | {"lm_head.weight": trunk.embed_tokens.weight})
    expected = model.to(rows.device)(rows, use_cache=False).logits
    return (trunk.logits(trunk(rows)) - expected).abs().max().item()


def main(argv: list[str] | None = None) -> None:
    train(parse(Options, argv, prog="tiny_hybrid_target", description="Train the bundled hybrid."))


if __name__ == "__main__":
    main()
