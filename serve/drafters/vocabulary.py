"""The tokens that a draft with the target's head may propose: all, those of a token map, or those and recent ones.

The head's rows of a static map are copied into one matrix, most frequent first, so any prefix of it is a map, too. With
recent tokens the rows are read in place, through ids that change between steps (kernels/gemm/gathered_head.py).
Letters: V target and Vd draft vocabulary, T tokens, B requests.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.gemm.gathered_head import DraftHead
from slipstream.models.drafts.base import DraftNetwork
from slipstream.models.drafts.token_map import check_tokenizer, read_token_map
from slipstream.models.files.checkpoint import tokenizer_hash
from slipstream.models.layers.linear import derive
from slipstream.models.targets.decoder import Target
from slipstream.serve.request import Request
from slipstream.serve.runner.batch import PassRows

HALF_LIFE = 8192  # prompt and answer tokens after which an occurrence counts half


class RecentTokens:
    """Fills the end of `ids` (Vd,) with the most frequent recent tokens outside the map, -1 padded. All of it lives on
    the device, without waiting for the host."""

    def __init__(self, ids: Tensor, num_static: int, vocab_size: int) -> None:
        self.ids = ids[num_static:]
        self.scores = torch.zeros(vocab_size, device=ids.device)  # (V,) occurrences, decayed; 0 in the map
        self.is_outside = torch.ones(vocab_size, dtype=torch.bool, device=ids.device)
        self.is_outside[ids[:num_static]] = False

    def add(self, tokens: Tensor, counts: Tensor) -> None:
        """Counts those of tokens (T,) int64 for which counts (T,) bool is set."""
        tokens = tokens.clamp(min=0)
        self.scores *= torch.exp2(counts.sum() / -HALF_LIFE)
        self.scores.index_add_(0, tokens, (counts & self.is_outside[tokens]).float())
        best = self.scores.topk(len(self.ids), sorted=False)
        self.ids.copy_(torch.where(best.values > 0, best.indices, -1))

    def forget(self) -> None:
        self.scores.zero_()
        self.ids.fill_(-1)


class DraftVocabulary:
    """`head`: the matrix that turns the draft's states into logits."""

    def __init__(self, head: DraftHead, recent: RecentTokens | None = None) -> None:
        self.head = head
        self.recent = recent
        self.num_tokens = head.size - (0 if recent is None else len(recent.ids))  # always available

    @property
    def fixed_ids(self) -> frozenset[int] | None:
        """Target ids that it has whatever other requests use; None: all that it has."""
        if self.recent is None:
            return None
        assert self.head.ids is not None
        return frozenset(self.head.ids[: self.num_tokens].tolist())

    def target_ids(self, columns: Tensor) -> Tensor:
        """Target ids (...) of columns (...) of the head's logits."""
        return columns if self.head.ids is None else self.head.ids[columns]

    def check(self, request: Request) -> None:
        """Raises ValueError for a request with a namespace, since recent tokens come from all requests."""
        if self.recent is not None and request.namespace:
            raise ValueError(
                "cache_salt is set, but this server's drafter learns tokens from all requests; leave cache_salt "
                "out, or start the server without --drafter.token-map-dynamic"
            )

    def observe(self, rows: PassRows) -> None:
        """Counts the tokens that a pass has read or emitted, without padding."""
        if self.recent is not None:
            self.recent.add(rows.next_tokens.long(), rows.next_tokens >= 0)


def find_vocabulary(module: DraftNetwork, target: Target, options: Any) -> DraftVocabulary:
    """The draft's own head, or the rows of the target's that it uses: those of its trained vocabulary, or by the
    options (TokenMapOptions).

    Raises ValueError for a map of another tokenizer or vocabulary, and for one that lacks end-of-text tokens.
    """
    ids = None if module.target_ids is None else derive(module, lambda: expect(module.target_ids))
    lm_head = getattr(module, "lm_head", None)
    if lm_head is not None:
        if getattr(options, "token_map", None) is not None:
            raise ValueError(
                f"drafter.token_map is {options.token_map}, but this draft has an output head of its own; leave the "
                "option out"
            )
        return DraftVocabulary(lm_head.whole(ids))
    if options.token_map is None:
        return DraftVocabulary(target.lm_head.whole() if ids is None else target.lm_head.cut(ids, module))
    if ids is not None:
        raise ValueError(
            f"drafter.token_map is {options.token_map}, but this draft has a vocabulary of its own of {len(ids)} "
            "tokens (d2t); leave the option out"
        )
    map_ids = _read_ids(target, options.token_map, options.token_map_size).to(target.device)
    if not options.token_map_dynamic:
        return DraftVocabulary(target.lm_head.cut(map_ids))
    vocab_size = target.config.vocab_size
    if len(map_ids) + options.token_map_dynamic > vocab_size:
        raise ValueError(
            f"drafter.token_map_dynamic is {options.token_map_dynamic}; beside the {len(map_ids)} tokens of the map "
            f"there are {vocab_size - len(map_ids)}"
        )
    places = torch.cat((map_ids, map_ids.new_full((options.token_map_dynamic,), -1)))
    return DraftVocabulary(target.lm_head.gathered(places), RecentTokens(places, len(map_ids), vocab_size))


def expect(ids: Tensor | None) -> Tensor:
    """Returns the ids of a draft that has a vocabulary of its own."""
    assert ids is not None
    return ids


def _read_ids(target: Target, path: str, size: int | None) -> Tensor:
    """(Vd,) int64, most frequent first, special and end tokens before them."""
    token_map = read_token_map(Path(path), target.config.vocab_size)
    if "tokenizer_hash" in token_map.metadata and target.tokenizer is not None:  # public files do not say
        check_tokenizer(token_map, tokenizer_hash(target.tokenizer), f"drafter.token_map {path}")
    try:
        return token_map.ids_by_frequency(size, target.end_ids)
    except ValueError as error:
        raise ValueError(f"drafter.token_map {path}: {error}") from error
