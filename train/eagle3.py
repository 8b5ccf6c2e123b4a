"""Trains an EAGLE3 draft for a target (arXiv 2503.01840).

    accelerate launch train/eagle3.py --config configs/eagle3/tiny.yaml --optim.lr 1e-3

Writes step-N and best into `output`, both servable (`serve --draft OUTPUT/best`). Run again, it continues.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoTokenizer

from slipstream.config import parse
from slipstream.models.checkpoint import resolve, tokenizer_hash, weights_fingerprint
from slipstream.models.config import ModelConfig, check_feature_layers, default_feature_layers
from slipstream.models.eagle3 import Eagle3, Eagle3Config
from slipstream.models.eagle3_checkpoint import save_eagle3
from slipstream.models.frozen_target import FrozenTarget, load_frozen_target
from slipstream.models.layers import RotaryEmbedding
from slipstream.models.token_map import TokenMap
from slipstream.train.acceptance import count_accepted, walk_answers
from slipstream.train.batches import Batch, PackedRows, load_prepared
from slipstream.train.checkpoints import provenance
from slipstream.train.loop import fit, start
from slipstream.train.options import RunOptions
from slipstream.train.training import DraftTraining, Metrics
from slipstream.train.ttt import Rows, TTTAttention, find_rows


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    vocabulary: str | None = None
    """token map (slipstream frequency-map) of the tokens that the draft can propose; default: all of the target's"""
    feature_layers: tuple[int, ...] | None = None
    """target states that the draft reads: 0..n-1 is a layer's output, n after the final norm; default: by depth"""
    intermediate_size: int | None = None
    """width of the draft's MLP; default: the target's"""
    init_from_target: bool = True
    """start with the target's head, final norm and last MLP, and pass the last feature through"""
    ttt_steps: int = 7
    """steps of training-time test"""
    ttt_decay: float = 0.8
    """weight of a step's loss relative to the step before"""


@dataclass(frozen=True, kw_only=True)
class Eagle3Options(RunOptions):
    target: str
    """target model: folder or hub id"""
    revision: str | None = None
    """hub revision of the target"""
    trust_remote_code: bool = False
    """run Python code that comes with the target"""
    draft: DraftOptions = field(default_factory=DraftOptions)

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)
        if self.draft.ttt_steps < 1 or self.draft.ttt_decay <= 0:
            steps, decay = self.draft.ttt_steps, self.draft.ttt_decay
            raise ValueError(f"draft.ttt_steps is {steps} and draft.ttt_decay {decay}; give at least 1 and above 0")


class Eagle3Training(DraftTraining):
    """The draft with its loss and its held-out walk. N asking rows of a batch (see ttt.py), Vd draft vocabulary."""

    def __init__(
        self, draft: Eagle3, target: FrozenTarget, rope: RotaryEmbedding, options: DraftOptions, depth: int
    ) -> None:
        super().__init__()
        self.draft = draft
        self.target = target
        self.rope = rope
        self.options = options
        self.depth = depth
        self.target_ids = draft.target_ids.cpu()

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Cross-entropy of every counting (row, step) against the target's distribution over the draft vocabulary.

        Where the target's best token is outside that vocabulary there is nothing to learn; such a row counts as missed
        in the metrics `accept_rate_i`, the agreement with the target's best token at step i.
        """
        steps, decay = self.options.ttt_steps, self.options.ttt_decay
        rows, tokens, features, final = self.read(batch, steps)
        teacher_logits, best = self.target.logits(final[rows.asking + 1], self.target_ids)
        teacher = teacher_logits.softmax(dim=-1)  # (N, Vd) fp32; step s of row n is taught by entry n + s
        is_known = self.draft.t2d[best]  # (N,)
        loss, metrics = teacher.new_zeros(()), Metrics()
        for step, state in enumerate(self.chain(rows, tokens, features, steps)):
            length = len(state) - step
            logits = self.draft.logits(state[:length]).float()
            counts = rows.counts[step, :length]
            losses = F.cross_entropy(logits, teacher[step:], reduction="none")  # (N - step,)
            loss = loss + decay**step * (losses * (counts & is_known[step:])).sum()
            agrees = (self.predictions(logits) == best[step:]) & counts
            metrics[f"accept_rate_{step}"] = torch.stack((agrees.sum(), counts.sum()))
        return loss, metrics

    def evaluate(self, batch: Batch) -> Metrics:
        rows, tokens, features, _ = self.read(batch, self.depth)
        chain = self.chain(rows, tokens, features, self.depth)
        predicted = torch.stack([self.predictions(self.draft.logits(state)) for state in chain])  # (depth, N)
        text = torch.stack([token_at(tokens, rows.asking + 2 + step) for step in range(self.depth)])
        accepted = count_accepted(predicted, text, rows.counts)
        return walk_answers(batch, rows.asking.cpu(), accepted.cpu(), self.depth)  # sync

    def read(self, batch: Batch, num_steps: int) -> tuple[Rows, Tensor, Tensor, Tensor]:
        """Rows, and flattened over the batch: tokens (B * S,), features (B * S, K * Ht), final states (B * S, Ht)."""
        device = self.draft.d2t.device
        rows = find_rows(batch, num_steps).to(device)
        tokens = batch.tokens.to(device)
        features, final = self.target.features(tokens, batch.positions.to(device))
        return rows, tokens.flatten(), features.flatten(0, 1), final.flatten(0, 1)

    def chain(self, rows: Rows, tokens: Tensor, features: Tensor, num_steps: int) -> Iterator[Tensor]:
        """The draft's states (N, H) of each step, before its norm; from step 1 on it reads its own."""
        attention = TTTAttention(rows, self.rope)
        context = self.target.embed(token_at(tokens, rows.context + 1))
        self.draft.write_context(context, self.draft.fuse(features[rows.context]), attention)
        state = self.draft.fuse(features[rows.asking])
        for step in range(num_steps):
            state = self.draft(self.target.embed(token_at(tokens, rows.asking + 1 + step)), state, attention)
            yield state
            attention.next_step()

    def predictions(self, logits: Tensor) -> Tensor:
        """Target id of the best draft token: (N, Vd) -> (N,)."""
        best = logits.argmax(dim=-1)
        return best + self.draft.d2t[best]

    def write(self, state: Mapping[str, Tensor], folder: Path, run: Mapping[str, Any]) -> None:
        save_eagle3(self.draft, {name.removeprefix("draft."): tensor for name, tensor in state.items()}, folder, run)


def token_at(tokens: Tensor, index: Tensor) -> Tensor:
    """tokens[index], the last one beyond the end: rows that no longer count still have to read something."""
    return tokens[index.clamp(max=len(tokens) - 1)]


def build_draft(options: Eagle3Options, config: ModelConfig, path: Path, hash_of_tokenizer: str) -> Eagle3:
    draft = options.draft
    token_map = None if draft.vocabulary is None else TokenMap.read(Path(draft.vocabulary))
    if token_map is not None and token_map.vocab_size != config.vocab_size:
        raise ValueError(
            f"draft.vocabulary {draft.vocabulary} was counted over {token_map.vocab_size} tokens, the target has "
            f"{config.vocab_size}; make a map for this target"
        )
    if token_map is not None and token_map.metadata.get("tokenizer_hash", hash_of_tokenizer) != hash_of_tokenizer:
        raise ValueError(
            f"draft.vocabulary {draft.vocabulary} was counted with another tokenizer; make a map for this target"
        )
    layers = draft.feature_layers or default_feature_layers(config.num_layers)
    check_feature_layers(layers, config.num_layers)
    ids = torch.arange(config.vocab_size) if token_map is None else token_map.ids
    module = Eagle3(
        Eagle3Config.from_target(
            config,
            draft_vocab_size=len(ids),
            feature_layers=layers,
            intermediate_size=draft.intermediate_size or config.intermediate_size,
            target=str(path.resolve()) if Path(options.target).is_dir() else options.target,
            target_revision=options.revision,
            target_fingerprint=weights_fingerprint(path),
            tokenizer_hash=hash_of_tokenizer,
        )
    )
    module.set_vocabulary(ids)
    return module


def train(options: Eagle3Options) -> None:
    accelerator = start(options)
    path = resolve(options.target, options.revision)
    config = ModelConfig.from_hf(AutoConfig.from_pretrained(path, trust_remote_code=options.trust_remote_code))
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=options.trust_remote_code)
    data = load_prepared(Path(options.data.path), tokenizer_hash(tokenizer))
    train_rows = PackedRows(data.train, options.data.max_length)
    heldout_rows = PackedRows(data.heldout, options.data.max_length, limit=options.evaluation.documents)
    draft = build_draft(options, config, path, tokenizer_hash(tokenizer))
    target = load_frozen_target(path, draft.config.feature_layers, accelerator.device, options.trust_remote_code)
    if options.draft.init_from_target:
        draft.init_from_target(*target.initial_weights())
    num_positions = options.data.max_length + max(options.draft.ttt_steps, options.evaluation.depth)
    rope = RotaryEmbedding(config.rope, draft.config.head_dim, num_positions).to(accelerator.device)
    training = Eagle3Training(draft, target, rope, options.draft, options.evaluation.depth)
    describe(accelerator, train_rows, heldout_rows, draft)
    identity = {"target_fingerprint": draft.config.target_fingerprint, "data_hash": data.report["data_hash"]}
    progress = fit(
        accelerator, training, train_rows, heldout_rows, options, identity, provenance(data.report["data_hash"])
    )
    accelerator.print(
        f"best accept length {progress.best_accept_length:.3f} at step {progress.best_step}: {options.output}/best"
    )


def describe(accelerator: Accelerator, train_rows: PackedRows, heldout_rows: PackedRows, draft: Eagle3) -> None:
    config = draft.config
    size = sum(parameter.numel() for parameter in draft.parameters())
    accelerator.print(
        f"draft: {size / 1e6:.1f}M parameters, vocabulary {config.draft_vocab_size} of {config.vocab_size}, target "
        f"states {list(config.feature_layers)}"
    )
    for name, rows in (("train", train_rows), ("heldout", heldout_rows)):
        accelerator.print(
            f"{name}: {rows.num_supervised} supervised tokens in {len(rows)} rows of {rows.max_length}, "
            f"{rows.num_dropped} documents left out for having no two in a row"
        )


def main(argv: list[str] | None = None) -> None:
    options = parse(Eagle3Options, argv, prog="train/eagle3.py", description="Trains an EAGLE3 draft for a target.")
    try:
        train(options)
    except ValueError as error:
        raise SystemExit(f"train/eagle3.py: error: {error}") from error


if __name__ == "__main__":
    main()
