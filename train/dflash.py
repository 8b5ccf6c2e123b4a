"""Trains a DFLASH block draft for a target (arXiv 2602.06036).

    slipstream train dflash --config configs/dflash/tiny.yaml --optim.lr 1e-3
    accelerate launch train/dflash.py --config configs/dflash/tiny.yaml --optim.lr 1e-3

Writes step-N and best into `output`, both servable (`serve --draft OUTPUT/best`). Run again, it continues.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

from slipstream.config import begin, run
from slipstream.train.dflash_options import DFlashOptions, DraftOptions

if __name__ == "__main__":
    begin(DFlashOptions, "train/dflash.py")

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.speculation.lattice import walk_lattice
from slipstream.models.drafts.dflash import DFlash, default_block_aux_layers, default_mask_token
from slipstream.models.drafts.heads.base import Head, TokenLosses
from slipstream.models.drafts.heads.confidence import ConfidenceHead
from slipstream.models.drafts.heads.table import heads_of
from slipstream.models.files.weights import public_tensors
from slipstream.models.targets.frozen import FrozenTarget, no_autocast
from slipstream.train.acceptance import count_accepted
from slipstream.train.batches import Batch, moved, possible_roots
from slipstream.train.block_slots import Networks, Read, Slots
from slipstream.train.blocks import (
    Blocks,
    block_attention,
    decay_weights,
    default_gamma,
    dpace_weights,
    draw_anchors,
    find_blocks,
)
from slipstream.train.calibration import Calibrator
from slipstream.train.draft_setup import train
from slipstream.train.loop import leave_processes
from slipstream.train.losses import Bias, TargetHead, head_losses, rows_at_once, weighted_losses
from slipstream.train.row_ranks import Gathering
from slipstream.train.state_source import target_states
from slipstream.train.target_files import TargetFiles
from slipstream.train.text_noise import NOISE_COST
from slipstream.train.training import DraftTraining, Metrics, add

EVALUATED_AT_ONCE = 256  # blocks
# Fields that no option names: those of the draft that training starts from, if there is one.
INHERITED = (
    *("tap_norms", "context_norms", "gate", "attention_bias", "num_heads", "num_kv_heads", "head_dim", "rope"),
    *("output_multiplier", "final_logit_softcapping", "input_embedding_scale"),
)


class DFlashTraining(DraftTraining):
    """The draft with its losses and its held-out walk. C rows of a batch, N blocks of S slots that propose K tokens, Vd
    draft vocabulary."""

    Network = DFlash
    tokens_power = 0.75
    copies_layers = True
    rates = {"muon": 0.016, "adamw": 0.003}

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.depth = min(self.depth, self.draft.config.num_proposals)
        join = self.draft.joining
        confidence = self.draft.head(ConfidenceHead)
        if join is not None and confidence is not None and not join.overlaps:
            raise ValueError(
                f"draft.confidence_head is true together with draft.{join.Config.option}; train one of them"
            )
        self.calibrator = None if confidence is None else Calibrator(self.draft, confidence)
        self.losses = loss_weights(self.draft.heads)
        self.reads_final_state = any(head.is_taught for head in self.draft.heads)
        self.head = TargetHead(self.target, self.target_ids)
        rows = torch.arange(len(self.target_ids), device="cpu")
        self.head_rows = torch.full((self.vocab_size,), -1, device="cpu").index_copy(0, self.target_ids, rows)  # (V,)

    @classmethod
    def new_draft(cls, options: DraftOptions, files: TargetFiles) -> DFlash:
        mask_token = options.mask_token_id
        source = "draft.mask_token_id"
        if mask_token is None:
            mask_token, source = default_mask_token(files.tokenizer, files.config.vocab_size)
        files.accelerator.print(f"mask token {mask_token}, {source}")
        has_window = options.sliding_window is not None
        layers = options.aux_layers or default_block_aux_layers(files.config.num_layers, options.num_layers)
        inherited = {} if files.start is None else {name: getattr(files.start.config, name) for name in INHERITED}
        return files.new_draft(
            DFlash,
            options,
            num_layers=options.num_layers,
            block_size=options.block_size,
            aux_layers=layers,
            sliding_window=options.sliding_window,
            windowed_layers=tuple(range(options.num_layers)) if has_window else (),
            sliding_window_non_causal=has_window,
            mask_token_id=mask_token,
            conv_kernel_size=2 if options.conv else 0,
            sample_from_anchor=options.sample_from_anchor,
            heads=heads_of(vars(options)),
            **inherited,
        )

    def start(self, *, continues: bool = False) -> str:
        return "" if continues else start_from_target(self.draft, self.target)

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Weighted losses of every counting slot, as if every possible anchor had its block.

        A slot whose token is outside the draft vocabulary has no loss but the confidence head's; it counts as missed in
        the metrics `accept_rate_i`, the agreement of proposal i with the text, given the text before it.
        """
        slots = self.backbone(batch)
        tokens = self.token_losses(slots)
        agrees = slots.spread((tokens.best == slots.labels) & slots.gather(slots.is_known))
        rates = torch.stack((agrees.sum(0), slots.counts.sum(0)), dim=1)  # (K, 2)
        metrics = {f"accept_rate_{i}": rate for i, rate in enumerate(rates)}
        total = tokens.total
        if not len(slots.places):
            total = total + 0 * slots.hidden.sum()  # processes that share rows all wait for its gradient
        for head in self.draft.heads:
            losses, overlaps = head.loss(slots, tokens, self.losses)
            tokens = tokens if overlaps is None else tokens._replace(overlaps=overlaps)
            for name, (values, weights) in losses.items():
                total = total + self.losses[name] * (weights * values).sum()
                metrics[name] = torch.stack((values.detach().sum(), (weights > 0).sum().to(values.dtype)))
        return total, metrics

    def backbone(self, batch: Batch) -> Slots:
        """The draft's states at blocks that are drawn from the batch, and what they are to predict."""
        config = self.draft.config
        anchors, represented = draw_anchors(batch, self.options.anchors, self.seed)
        part = range(len(anchors)) if self.row_group is None else self.row_group.part(len(anchors))
        first = min(part.start, len(anchors) - 1)
        stop = max(part.stop, first + 1)  # one block at least, which does not count if the part has none
        anchors = anchors[first:stop]
        represented = represented[first:stop]
        blocks = find_blocks(batch, anchors, config.block_size, first_slot=config.first_slot)
        blocks = replace(blocks, counts=blocks.counts & bool(part))
        labels = self.head_rows[blocks.labels]  # (N, K)
        is_known = blocks.counts & (labels >= 0)
        is_taught = is_known if self.calibrator is None else blocks.counts
        places = is_taught.flatten().nonzero().squeeze(1)  # (M,)
        end = batch.tokens.numel() - 1
        before = blocks.rows_before.clamp(max=end)
        stands_for = represented.unsqueeze(1)
        if batch.weights is not None:
            stands_for = stands_for * batch.weights.flatten()[(before + 1).clamp(max=end)]
        previous = batch.tokens.flatten()[before].flatten()[places]
        taught_by = before.flatten()[places]
        labels = labels.flatten()[places].clamp(min=0)
        whole_blocks = is_known.all(dim=1).nonzero().squeeze(1)
        blocks = moved(blocks, self.device)
        read = self.read(batch)
        hidden = self.states(blocks, read)[:, config.first_slot :]
        host_slots = Slots(
            states=hidden.flatten(0, 1)[places.to(self.device)],
            labels=labels,
            previous=previous,
            taught_by=taught_by,
            places=places,
            is_known=is_known,
            counts=blocks.counts,
            stands_for=stands_for,
            decay=self.decay,
            whole_blocks=whole_blocks,
            hidden=hidden,
            anchors=blocks.anchors,
            read=read,
            networks=Networks(self.draft, self.target, self.head),
        )
        slots: Slots = moved(host_slots, self.device)
        return slots

    def token_losses(self, slots: Slots) -> TokenLosses:
        """The losses over the vocabulary, and the candidates that the other heads score."""
        config = self.draft.config
        join = self.draft.joining
        scores_candidates = join is not None and join.trains_candidates
        shape = len(slots.states), config.num_candidates
        candidates = torch.empty(shape, dtype=torch.int64, device=self.device) if scores_candidates else None
        cap = config.final_logit_softcapping
        states = slots.scaled_states
        bias = None if join is None else join.bias(slots.states, slots.previous)
        reads = self.calibrator is not None and not scores_candidates
        if bias is None and not reads:
            entropies, best = head_losses(states, self.head.rows, slots.labels, cap=cap, candidates=candidates)
            weights = self.weights(slots, lambda: entropies)
            total = self.losses["ce"] * (slots.gather(weights) * entropies).sum()
            return TokenLosses(total, entropies, None, best, candidates, weights)
        weights = self.weights(slots, lambda: self.entropies(states, slots, bias))
        final = slots.read.final[slots.taught_by] if reads else states[:0]
        teach = (lambda part: self.head.teach(final[part])) if reads else None
        losses = weighted_losses(
            states,
            self.head.rows,
            slots.labels,
            self.losses["ce"] * slots.gather(weights),
            teach,
            bias=bias,
            cap=cap,
        )
        overlaps = losses.overlaps if reads else None
        return TokenLosses(losses.total, losses.entropies, overlaps, losses.best, None, weights)

    @torch.no_grad()
    def entropies(self, states: Tensor, slots: Slots, bias: Bias | None) -> Tensor:
        """(M,) cross-entropies against the text, for weights that depend on them."""
        weights = torch.ones(len(states), device=states.device)
        cap = self.draft.config.final_logit_softcapping
        return weighted_losses(states, self.head.rows, slots.labels, weights, bias=bias, cap=cap).entropies

    def weights(self, slots: Slots, losses: Callable[[], Tensor]) -> Tensor:
        """(N, K) fp32 of the slots; a block's weights sum to at most 1, so that the loss stays near that of one token,
        times the anchors that it stands for and the weights of its tokens. `losses` (M,): cross-entropies, for those
        that depend on them."""
        is_known = slots.is_known
        if self.options.loss == "dpace":
            entropies = slots.spread(losses())
            count = is_known.shape[1]
            return dpace_weights(entropies, is_known, slots.counts) * (2 / (count * (count + 1))) * slots.stands_for
        return self.decay * is_known * slots.stands_for

    @cached_property
    def decay(self) -> Tensor:
        """(K,) fp32 that fall with the distance, together 1."""
        count = self.draft.config.num_proposals
        weights = decay_weights(count, default_gamma(count + 1)).to(self.device)
        return weights / weights.sum()

    def evaluate(self, batch: Batch) -> Metrics:
        anchors = possible_roots(batch)
        first = self.draft.config.first_slot
        read = self.read(batch)
        metrics = Metrics()
        accepted = []
        share = NOISE_COST if self.temperature else 1
        blocks_at_once = min(EVALUATED_AT_ONCE, max(1, rows_at_once(self.head.rows) // self.depth // share))
        for blocks in find_blocks(batch, anchors, self.depth + first, first_slot=first).parts(blocks_at_once):
            blocks = moved(blocks, self.device)
            hidden = self.states(blocks, read)[:, first:]
            noise = self.noise(batch, blocks, read)
            if self.draft.joining is not None:
                num_accepted, chain, sums = self.follow_lattice(blocks, hidden, read, noise)
                add(metrics, sums)
            else:
                chain = self.predictions(hidden, noise)
                num_accepted = count_accepted(chain.t(), blocks.labels.t(), blocks.counts.t())
            if self.calibrator is not None and self.is_new:
                previous = torch.cat((read.tokens[blocks.anchors].unsqueeze(1), chain[:, :-1]), dim=1)
                self.calibrator.add(int(batch.numbers[0]), hidden, previous, num_accepted, blocks.counts)
            accepted.append(num_accepted)
        joined = torch.cat(accepted).cpu()  # sync
        return metrics | self.walk(batch, anchors - 1, joined)

    def noise(self, batch: Batch, blocks: Blocks, read: Read) -> Tensor | None:
        """`text_noise` (N, K, Vd) of the blocks' slots. None at temperature 0."""
        if self.temperature == 0:
            return None
        before = blocks.rows_before.clamp(max=len(read.tokens) - 1)  # (N, K)
        noise = self.text_noise(batch, before.flatten(), blocks.labels.flatten(), read.final)
        return noise.unflatten(0, before.shape)

    def follow_lattice(
        self, blocks: Blocks, hidden: Tensor, read: Read, noise: Tensor | None
    ) -> tuple[Tensor, Tensor, Metrics]:
        """Tokens that the chain through the lattice has right (N,), the chain (N, K) of target ids, and sums:
        `candidate_recall`, the share of slots whose token is a candidate; `path_accept_rate`, of the tokens that some
        path has right, the share that the chain has; `block_accept_length`, the mean over blocks of the accepted
        tokens, and `slots_accept_length`, the same of each slot's best token by itself."""
        with no_autocast(self.device):
            logits = hidden.to(self.head.rows.dtype) @ self.head.rows.t()
        context = read.context[blocks.anchors - 1]
        roots = read.tokens[blocks.anchors]
        candidates, scores = self.draft.lattice(
            hidden, roots, logits, noise=noise, context=context, embed=self.target.embed
        )
        chain = walk_lattice(scores, candidates.tokens, roots, candidates.values)[0][:, 1:].long()
        matches = (candidates.tokens == blocks.labels.unsqueeze(2)) & blocks.counts.unsqueeze(2)  # (N, K, k)
        accepted = count_accepted(chain.t(), blocks.labels.t(), blocks.counts.t())
        reachable = matches.any(dim=2).long().cumprod(dim=1).sum()
        alone = matches[:, :, 0].long().cumprod(dim=1).sum()
        count = accepted.new_tensor(len(blocks))
        sums = {
            "candidate_recall": (matches.any(dim=2).sum(), blocks.counts.sum()),
            "path_accept_rate": (accepted.sum(), reachable),
            "block_accept_length": (accepted.sum(), count),
            "slots_accept_length": (alone, count),
        }
        return accepted, chain, {name: torch.stack(pair) for name, pair in sums.items()}

    def read(self, batch: Batch) -> Read:
        aux_states, final = target_states(self.target, batch, self.device)
        attention = block_attention(batch.positions.to(self.device).flatten(), self.rope)
        if self.training and self.row_group is not None:
            parts = self.row_group.parts(len(aux_states))
            part = parts[self.row_group.index]
            rows = self.draft.fuse(aux_states[part.start : part.stop])
            context = Gathering(self.row_group, list(map(len, parts)), 0).join(rows, rows[:0])
        else:
            context = self.draft.fuse(aux_states)
        self.draft.write_context(context, attention)
        return Read(batch.tokens.to(self.device).flatten(), attention, context, final)

    def states(self, blocks: Blocks, read: Read) -> Tensor:
        """The draft's final states (N, S, H)."""
        read.attention.ask(blocks)
        tokens = self.draft.block_tokens(read.tokens[blocks.anchors], blocks.size)
        states = self.draft(self.target.embed(tokens).flatten(0, 1), read.attention, blocks.size)
        return states.view(*tokens.shape, -1)

    def predictions(self, states: Tensor, noise: Tensor | None = None) -> Tensor:
        """Target id of the best draft token by a slot's own logits, plus `noise` (..., Vd): (..., H) -> (...)."""
        if noise is None:
            return self.head.predictions(states.flatten(0, -2)).view(states.shape[:-1])
        with no_autocast(self.device):
            logits = self.draft.unary(states.to(self.head.rows.dtype) @ self.head.rows.t())
        return self.head.ids[(logits.float() + noise).argmax(dim=-1)]


def loss_weights(heads: Sequence[Head]) -> dict[str, float]:
    """Weights of the losses of a draft with these heads: those that did best (docs/dflash.md)."""
    weights = {"ce": 1.0}
    for head in heads:
        weights |= head.loss_weights
    return weights


@torch.no_grad()
def start_from_target(draft: DFlash, target: FrozenTarget) -> str:
    """The draft's layers and norm become the target's last ones, and fc passes the last aux hidden state on.
    Convolutions stay the identity. Does nothing if the target's layers do not have the draft's shapes, and returns a
    sentence that says so."""
    parameters = public_tensors(draft)
    weights = target.initial_weights(len(draft.layers))
    of_layers = {name: x for name, x in parameters.items() if name.startswith("layers.")}
    matrices = [name for name, x in of_layers.items() if x.ndim == 2 and "_conv." not in name]
    strange = [name for name in matrices if name not in weights or weights[name].shape != parameters[name].shape]
    if strange:
        return (
            f"the layers start at random: the target's last {len(draft.layers)}, of {len(target.layers)}, are not of "
            f"the draft's kind and shapes at {', '.join(strange[:3])}"
        )
    for name in parameters.keys() & weights.keys():  # a target's biases and a draft's q/k norms may have no counterpart
        parameters[name].copy_(weights[name])
    parameters["fc.weight"].zero_()[:, -draft.config.hidden_size :].copy_(torch.eye(draft.config.hidden_size))
    parameters["hidden_norm.weight"].copy_(parameters[f"layers.{len(draft.layers) - 1}.input_layernorm.weight"])
    return ""


program = partial(train, kind=DFlashTraining)
main = partial(run, program, DFlashOptions, "train/dflash.py")

if __name__ == "__main__":
    main()
    leave_processes()
