"""Trains a DFLASH block draft for a target (arXiv 2602.06036).

    slipstream train dflash --config configs/dflash/tiny.yaml --optim.lr 1e-3
    accelerate launch train/dflash.py --config configs/dflash/tiny.yaml --optim.lr 1e-3

Writes step-N and best into `output`, both servable (`serve --draft OUTPUT/best`). Run again, it continues.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.config import run
from slipstream.kernels.cross_entropy import Mix
from slipstream.models.drafts.dflash import DFlash, default_block_aux_layers, default_mask_token
from slipstream.models.drafts.lattice import walk
from slipstream.models.files.weights import public_tensors
from slipstream.models.targets.frozen import FrozenTarget
from slipstream.train.acceptance import count_accepted
from slipstream.train.batches import Batch, possible_roots
from slipstream.train.block_losses import (
    mix_of,
    reads_teacher,
    scorer_losses,
    scorer_slots,
    selector_losses,
    with_labels,
)
from slipstream.train.blocks import (
    BlockAttention,
    Blocks,
    block_attention,
    decay_weights,
    default_gamma,
    dpace_weights,
    draw_anchors,
    find_blocks,
)
from slipstream.train.calibration import Calibration, Confidences, chain_error, fit_calibration
from slipstream.train.dflash_options import DFlashOptions, DraftOptions
from slipstream.train.draft_setup import train
from slipstream.train.loop import leave_processes
from slipstream.train.losses import LowRankBias, TargetHead, gathered_logits, head_losses, mixed_losses, rows_at_once
from slipstream.train.state_source import target_states
from slipstream.train.target_files import TargetFiles
from slipstream.train.text_noise import NOISE_COST
from slipstream.train.training import DraftTraining, Metrics, add

EVALUATED_AT_ONCE = 256  # blocks
SAME_NAMES = (  # options that are fields of the config
    *("sample_from_anchor", "sliding_window_non_causal", "selector_rank", "selector_top_k", "markov_rank"),
    *("markov_head_type", "confidence_head", "lilicorr"),
)


class Read(NamedTuple):
    """Inputs of the blocks from a batch of C rows, on the device."""

    tokens: Tensor  # (C,)
    attention: BlockAttention  # holds the context of every row
    context: Tensor  # (C, H)
    final: Tensor  # (C, Ht) the target's states after its final norm


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots of a batch's blocks that propose a token, M of them with a loss: they count, and the draft's vocabulary
    has their token. A confidence head also learns from those whose token is missing: they are among the M, too."""

    states: Tensor  # (M, H) the draft's
    labels: Tensor  # (M,) rows of the head, 0 where the token is missing
    previous: Tensor  # (M,) target ids of the tokens before
    taught_by: Tensor  # (M,) rows of the batch whose final state says the target's distribution
    places: Tensor  # (M,) int64 among all N * K
    is_known: Tensor  # (N, K) bool: which have a token of the draft's vocabulary
    counts: Tensor  # (N, K) bool
    stands_for: Tensor  # (N, 1) fp32 how many possible anchors a block represents; (N, K) times its tokens' weights
    whole_blocks: Tensor  # (B,) blocks whose K tokens are all known
    hidden: Tensor  # (N, K, H) states of all slots that propose
    contexts: Tensor  # (N,) rows of the batch before the anchors
    read: Read

    def spread(self, values: Tensor) -> Tensor:
        """values (M,) -> (N, K), 0 at all other slots."""
        return values.new_zeros(self.is_known.numel()).index_copy(0, self.places, values).view(self.is_known.shape)

    def gather(self, values: Tensor) -> Tensor:
        """values (N, K) -> (M,)."""
        return values.flatten()[self.places]


class TokenLosses(NamedTuple):
    """Losses of the M slots over the vocabulary."""

    total: Tensor  # weighted, summed
    entropies: Tensor  # (M,) with a gradient where nothing but `ce` is weighed and there is no Markov head
    overlaps: Tensor | None  # (M,) sum min(p, q), if it was computed
    best: Tensor  # (M,) rows of the head
    candidates: Tensor | None  # (M, k) rows of the head, best first
    weights: Tensor  # (N, K)


class DFlashTraining(DraftTraining):
    """The draft with its losses and its held-out walk. C rows of a batch, N blocks of S slots that propose K tokens, Vd
    draft vocabulary."""

    Network = DFlash
    drafter = "dflash"
    tokens_power = 0.75
    rates = {"muon": 0.016, "adamw": 0.003}
    fitted = ("confidence_temperatures", "confidence_biases")

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        config = self.draft.config
        self.depth = min(self.depth, config.num_proposals)
        self.losses = self.options.losses.of(config)
        if config.confidence_head and config.lilicorr is not None:
            raise ValueError("draft.confidence_head is true together with draft.lilicorr; train one of them")
        self.reads_final_state = reads_teacher(self.losses)
        self.head = TargetHead(self.target, self.target_ids)
        rows = torch.arange(len(self.target_ids), device="cpu")
        self.head_rows = torch.full((self.vocab_size,), -1, device="cpu").index_copy(0, self.target_ids, rows)  # (V,)
        # Of the confidence head, in the evaluation at hand: number of a batch's first row, and what it said there.
        self.said: list[tuple[int, Confidences]] = []

    @classmethod
    def new_draft(cls, options: DraftOptions, files: TargetFiles) -> DFlash:
        mask_token = options.mask_token_id
        source = "draft.mask_token_id"
        if mask_token is None:
            mask_token, source = default_mask_token(files.tokenizer, files.config.vocab_size)
        files.accelerator.print(f"mask token {mask_token}, {source}")
        windowed = tuple(range(options.num_layers)) if options.sliding_window is not None else ()
        layers = options.aux_layers or default_block_aux_layers(files.config.num_layers, options.num_layers)
        return files.new_draft(
            DFlash,
            options,
            num_layers=options.num_layers,
            block_size=options.block_size,
            aux_layers=layers,
            sliding_window=options.sliding_window,
            windowed_layers=windowed if options.windowed_layers is None else options.windowed_layers,
            mask_token_id=mask_token,
            conv_kernel_size=2 if options.conv else 0,
            **{name: getattr(options, name) for name in SAME_NAMES},
        )

    def start(self, *, continues: bool = False) -> None:
        if self.options.init_from_target and not continues:
            start_from_target(self.draft, self.target)

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
        weights = slots.gather(tokens.weights)
        parts: dict[str, tuple[Tensor, Tensor]] = {}  # losses, and the weights of their slots
        overlaps = tokens.overlaps
        if self.draft.selector is not None:
            by_name, overlaps = self.selector_losses(slots, tokens)
            parts |= {name: (losses, weights) for name, losses in by_name.items()}
        if self.draft.scorer is not None:
            slot_weights = tokens.weights[slots.whole_blocks]
            parts |= {name: (losses, slot_weights) for name, losses in self.scorer_losses(slots, tokens).items()}
        if self.draft.confidence is not None:
            assert overlaps is not None
            slot_weights = self.fixed_weights() * slots.counts * slots.stands_for
            parts["confidence"] = self.confidence_losses(slots, overlaps), slots.gather(slot_weights)
        for name, (losses, slot_weights) in parts.items():
            if self.losses[name]:
                total = total + self.losses[name] * (slot_weights * losses).sum()
            metrics[name] = torch.stack((losses.detach().sum(), (slot_weights > 0).sum().to(losses.dtype)))
        return total, metrics

    def backbone(self, batch: Batch) -> Slots:
        """The draft's states at blocks that are drawn from the batch, and what they are to predict."""
        config = self.draft.config
        anchors, represented = draw_anchors(batch, self.options.anchors, self.seed)
        blocks = find_blocks(batch, anchors, config.block_size, first_slot=config.first_slot)
        labels = self.head_rows[blocks.labels]  # (N, K)
        is_known = blocks.counts & (labels >= 0)
        is_taught = is_known if self.draft.confidence is None else blocks.counts
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
        columns = labels, previous, taught_by, places, is_known, stands_for, whole_blocks
        labels, previous, taught_by, places, is_known, stands_for, whole_blocks = (x.to(self.device) for x in columns)
        blocks = blocks.to(self.device)
        read = self.read(batch)
        hidden = self.states(blocks, read)[:, config.first_slot :]
        return Slots(
            states=hidden.flatten(0, 1)[places],
            labels=labels,
            previous=previous,
            taught_by=taught_by,
            places=places,
            is_known=is_known,
            counts=blocks.counts,
            stands_for=stands_for,
            whole_blocks=whole_blocks,
            hidden=hidden,
            contexts=blocks.anchors - 1,  # an anchor is never a document's first token
            read=read,
        )

    def token_losses(self, slots: Slots) -> TokenLosses:
        """The losses over the vocabulary, and the candidates that the other heads score."""
        draft = self.draft
        config = self.draft.config
        mix = mix_of(self.losses)
        shape = len(slots.states), config.num_candidates
        joins = draft.selector is not None or draft.scorer is not None
        candidates = torch.empty(shape, dtype=torch.int64, device=self.device) if joins else None
        cap = config.final_logit_softcapping
        states = slots.states
        states = states if config.output_multiplier == 1 else states * config.output_multiplier
        needs_overlap = draft.confidence is not None and draft.selector is None
        if draft.markov is None and not mix.reads_teacher and not needs_overlap:
            entropies, best = head_losses(states, self.head.rows, slots.labels, cap=cap, candidates=candidates)
            weights = self.weights(slots, entropies)
            total = mix.ce * (slots.gather(weights) * entropies).sum()
            return TokenLosses(total, entropies, None, best, candidates, weights)
        bias = None
        if draft.markov is not None:
            bias = LowRankBias(draft.markov.features(slots.states, slots.previous), draft.markov.output_rows)
        weights = self.weights(slots, lambda: self.entropies(states, slots, bias))
        reads = mix.reads_teacher or needs_overlap
        final = slots.read.final[slots.taught_by] if reads else states[:0]
        teach = (lambda part: self.head.teach(final[part])) if reads else None
        losses = mixed_losses(
            states,
            self.head.rows,
            slots.labels,
            slots.gather(weights),
            mix,
            teach,
            bias=bias,
            cap=cap,
            candidates=candidates,
        )
        overlaps = losses.overlaps if reads else None
        return TokenLosses(losses.total, losses.entropies, overlaps, losses.best, candidates, weights)

    @torch.no_grad()
    def entropies(self, states: Tensor, slots: Slots, bias: LowRankBias | None) -> Tensor:
        """(M,) cross-entropies against the text, for weights that depend on them."""
        weights = torch.ones(len(states), device=states.device)
        cap = self.draft.config.final_logit_softcapping
        return mixed_losses(states, self.head.rows, slots.labels, weights, Mix(ce=1.0), bias=bias, cap=cap).entropies

    def selector_losses(self, slots: Slots, tokens: TokenLosses) -> tuple[dict[str, Tensor], Tensor | None]:
        """By name (M,), and the overlaps (M,) of the selector's choice with the target's, if the confidence head wants
        them."""
        draft = self.draft
        assert tokens.candidates is not None
        rows, places = with_labels(tokens.candidates, slots.labels)
        unary = draft.unary(gathered_logits(slots.states, self.head.rows, rows))
        scores = draft.selector(slots.states, unary, slots.previous.unsqueeze(1), rows).squeeze(1)
        teacher = None
        overlaps = None
        if self.losses["selector_tv"] or draft.confidence is not None:
            final = slots.read.final[slots.taught_by]
            teacher = self.head.teach_candidates(final, rows)
            if draft.confidence is not None:
                target = (teacher - self.head.normalisers(final).unsqueeze(1)).exp()
                overlaps = torch.minimum(target, scores.detach().float().softmax(dim=-1)).sum(dim=-1)
        return selector_losses(scores, places, teacher), overlaps

    def scorer_losses(self, slots: Slots, tokens: TokenLosses) -> dict[str, Tensor]:
        """By name (B, K), of the B whole blocks. A candidate's log-probability keeps its gradient: the draft's layers
        learn from the scorer, too."""
        draft = self.draft
        shape = (len(slots.whole_blocks), *slots.is_known.shape[1:])
        assert tokens.candidates is not None
        numbers = torch.empty(slots.is_known.shape, dtype=torch.int64, device=self.device)
        numbers.flatten()[slots.places] = torch.arange(len(slots.places), device=self.device)
        slot_numbers = numbers[slots.whole_blocks].flatten()  # (B * K,) which of the M
        rows = tokens.candidates[slot_numbers]
        labels = slots.labels[slot_numbers]
        states = slots.states[slot_numbers]
        with_label = torch.cat((rows, labels.unsqueeze(1)), dim=1)
        logits = draft.unary(gathered_logits(states, self.head.rows, with_label))
        normalisers = self.row_entropies(slots, tokens)[slot_numbers] + logits[:, -1]
        log_probs = (logits[:, :-1] - normalisers.unsqueeze(1)).unflatten(0, shape)
        embedded = self.target.embed(self.head.ids[rows]).unflatten(0, shape)
        context = slots.read.context[slots.contexts[slots.whole_blocks]]
        start, edges = draft.scorer(embedded, log_probs, slots.hidden[slots.whole_blocks], context)
        scored_slots = scorer_slots(start, edges, rows.unflatten(0, shape), labels.view(shape))
        teacher = None
        if self.losses["scorer_regret"]:
            final = slots.read.final[slots.taught_by[slot_numbers]]
            teacher = self.head.teach_candidates(final, rows).unflatten(0, shape)
        return scorer_losses(scored_slots, teacher)

    def row_entropies(self, slots: Slots, tokens: TokenLosses) -> Tensor:
        """(M,) cross-entropies with a gradient."""
        if tokens.entropies.requires_grad or not slots.states.requires_grad:
            return tokens.entropies
        config = self.draft.config
        states = slots.states * config.output_multiplier
        return head_losses(states, self.head.rows, slots.labels, cap=config.final_logit_softcapping)[0]

    def confidence_losses(self, slots: Slots, overlaps: Tensor) -> Tensor:
        """(M,) of the head after the text's tokens; a slot whose token the draft cannot propose fails."""
        embedded = None if self.draft.markov is None else self.draft.markov.embed(slots.previous)
        logits = self.draft.confidence(slots.states, embedded).float()
        targets = torch.where(slots.gather(slots.is_known), overlaps.detach(), 0.0)
        return F.binary_cross_entropy_with_logits(logits, targets, reduction="none")

    def weights(self, slots: Slots, losses: Tensor | Callable[[], Tensor]) -> Tensor:
        """(N, K) fp32 of the slots; a block's weights sum to at most 1, so that the loss stays near that of one token,
        times the anchors that it stands for and the weights of its tokens. `losses` (M,): cross-entropies, for those
        that depend on them."""
        is_known = slots.is_known
        if self.options.loss == "dpace":
            entropies = slots.spread(losses if isinstance(losses, Tensor) else losses())
            count = is_known.shape[1]
            return dpace_weights(entropies, is_known, slots.counts) * (2 / (count * (count + 1))) * slots.stands_for
        return self.fixed_weights() * is_known * slots.stands_for

    def fixed_weights(self) -> Tensor:
        """(K,) fp32 that fall with the distance, together 1."""
        count = self.draft.config.num_proposals
        weights = decay_weights(count, self.options.gamma or default_gamma(count + 1)).to(self.device)
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
            blocks = blocks.to(self.device)
            hidden = self.states(blocks, read)[:, first:]
            noise = self.noise(batch, blocks, read)
            if self.joins:
                num_accepted, chain, sums = self.follow_lattice(blocks, hidden, read, noise)
                add(metrics, sums)
            else:
                chain = self.predictions(hidden, noise)
                num_accepted = count_accepted(chain.t(), blocks.labels.t(), blocks.counts.t())
            if self.draft.confidence is not None and self.is_new:
                self.said.append((int(batch.numbers[0]), self.confidences(blocks, hidden, chain, num_accepted, read)))
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

    @property
    def joins(self) -> bool:
        """Whether a head joins the slots."""
        return any(head is not None for head in (self.draft.selector, self.draft.markov, self.draft.scorer))

    def follow_lattice(
        self, blocks: Blocks, hidden: Tensor, read: Read, noise: Tensor | None
    ) -> tuple[Tensor, Tensor, Metrics]:
        """Tokens that the chain through the lattice has right (N,), the chain (N, K) of target ids, and sums:
        `candidate_recall`, the share of slots whose token is a candidate; `path_accept_rate`, of the tokens that some
        path has right, the share that the chain has; `block_accept_length`, the mean over blocks of the accepted
        tokens, and `slots_accept_length`, the same of each slot's best token by itself."""
        with torch.autocast(self.device.type, enabled=False):
            logits = hidden.to(self.head.rows.dtype) @ self.head.rows.t()
        context = read.context[blocks.anchors - 1]
        lattice = self.draft.lattice(
            hidden, read.tokens[blocks.anchors], logits, noise=noise, context=context, embed=self.target.embed
        )
        chain = lattice.tokens(walk(lattice))
        matches = (lattice.candidates == blocks.labels.unsqueeze(2)) & blocks.counts.unsqueeze(2)  # (N, K, k)
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

    def confidences(self, blocks: Blocks, hidden: Tensor, chain: Tensor, accepted: Tensor, read: Read) -> Confidences:
        """The confidence head's logits of the chains (N, K) of target ids, and how the chains fared."""
        before = torch.cat((read.tokens[blocks.anchors].unsqueeze(1), chain[:, :-1]), dim=1)
        embedded = None if self.draft.markov is None else self.draft.markov.embed(before)
        logits = self.draft.confidence(hidden, embedded).float()
        return Confidences(*(x.cpu() for x in (logits, accepted, blocks.counts)))  # sync

    def end_evaluation(self, gather: Callable[[list[Any]], list[Any]]) -> dict[str, float]:
        """Calibrates the confidence head. The metrics `confidence_error` and `confidence_error_before` are measured on
        the second half of the held-out chains, with what fits the first half; the draft gets what fits all. Chains are
        in the order of their rows, however many processes share them."""
        if self.draft.confidence is None:
            return {}
        parts = gather(self.said)
        self.said = []
        if not parts:
            return {}
        confidences = Confidences.joined([part for _, part in sorted(parts, key=lambda part: part[0])])
        half = len(confidences.accepted) // 2
        none = Calibration.none(confidences.logits.shape[1])
        second_half = confidences.of(slice(half, None))
        fitted = fit_calibration(confidences).padded(self.draft.config.num_proposals)
        temperatures, biases = (tuple(numbers.tolist()) for numbers in fitted)
        self.draft.config = replace(self.draft.config, confidence_temperatures=temperatures, confidence_biases=biases)
        error = chain_error(second_half, fit_calibration(confidences.of(slice(0, half))))
        return {"confidence_error": error, "confidence_error_before": chain_error(second_half, none)}

    def read(self, batch: Batch) -> Read:
        aux_states, final = target_states(self.target, batch, self.device)
        attention = block_attention(batch.positions.to(self.device).flatten(), self.rope)
        context = self.draft.fuse(aux_states.flatten(0, 1))
        self.draft.write_context(context, attention)
        return Read(batch.tokens.to(self.device).flatten(), attention, context, final.flatten(0, 1))

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
        with torch.autocast(self.device.type, enabled=False):
            logits = self.draft.unary(states.to(self.head.rows.dtype) @ self.head.rows.t())
        return self.head.ids[(logits.float() + noise).argmax(dim=-1)]


@torch.no_grad()
def start_from_target(draft: DFlash, target: FrozenTarget) -> None:
    """The draft's layers and norm become the target's last ones, and fc passes the last aux hidden state on.
    Convolutions stay the identity.

    Raises ValueError if the target's layers do not have the draft's shapes.
    """
    parameters = public_tensors(draft)
    weights = target.initial_weights(len(draft.layers))
    of_layers = {name: x for name, x in parameters.items() if name.startswith("layers.")}
    matrices = [name for name, x in of_layers.items() if x.ndim == 2 and "_conv." not in name]
    strange = [name for name in matrices if name not in weights or weights[name].shape != parameters[name].shape]
    if strange:
        raise ValueError(
            "draft.init_from_target needs a target with at least as many layers as the draft, of the same kind and "
            f"shapes; it has {len(target.layers)} and differs at {', '.join(strange[:3])}; set draft.init_from_target "
            "to false"
        )
    for name in parameters.keys() & weights.keys():  # a target's biases and a draft's q/k norms may have no counterpart
        parameters[name].copy_(weights[name])
    parameters["fc.weight"].zero_()[:, -draft.config.hidden_size :].copy_(torch.eye(draft.config.hidden_size))
    parameters["hidden_norm.weight"].copy_(parameters[f"layers.{len(draft.layers) - 1}.input_layernorm.weight"])


program = partial(train, kind=DFlashTraining)


def main(argv: list[str] | None = None) -> None:
    run(program, DFlashOptions, argv, "train/dflash.py")


if __name__ == "__main__":
    main()
    leave_processes()
