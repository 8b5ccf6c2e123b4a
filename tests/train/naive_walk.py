"""A server that answers a given text in rounds: the oracle of the simulated accept length, for any draft."""

from collections.abc import Callable
from functools import cache

import torch
from transformers import PreTrainedModel

from slipstream.tests.naive_dflash import NaiveDFlash
from slipstream.tests.naive_eagle3 import NaiveEagle3
from slipstream.tests.random_targets import target_aux_states
from slipstream.tests.train.conftest import Document, documents
from slipstream.train.batches import collate
from slipstream.train.training import DraftTraining
from slipstream.train.ttt import ChainTraining

Propose = Callable[[list[int], int], list[int]]  # prefix that ends in the root, depth -> drafted tokens


@torch.no_grad()
def check_walk(
    training: DraftTraining,
    naive: NaiveEagle3 | NaiveDFlash,
    target: PreTrainedModel,
    seed: int,
    depth: int,
):
    """Compares evaluation with a server's counts on documents, some of whose answers the draft can predict. At a
    smaller depth the server proposes the first tokens of the same chains or blocks."""

    @cache
    def chain(prefix):
        aux_states = target_aux_states(target, list(prefix[:-1]), training.draft.config.aux_layers)
        return naive.greedy(aux_states, list(prefix), depth)

    def propose(prefix, limit):
        return chain(tuple(prefix))[:limit]

    def propose_with_target_states(prefix, limit):
        tokens = list(prefix)
        while len(tokens) < len(prefix) + limit:
            tokens.append(chain(tuple(tokens))[0])
        return tokens[len(prefix) :]

    rows = [
        [half_predictable(propose, document, n, depth) for n, document in enumerate(row)] for row in documents(seed)
    ]
    walks = [naive_walk(propose, document, depth) for row in rows for document in row]
    loss, metrics = training.eval()(collate(rows, 64))
    emitted = sum(walk[0] for walk in walks)
    rounds = sum(walk[1] for walk in walks)
    assert float(loss) == 0.0
    assert metrics["accept_length"].tolist() == [emitted, rounds]
    for position in range(depth):
        assert metrics[f"accept_rate_{position}"].tolist() == [sum(walk[2][position] for walk in walks), rounds]
    assert int(metrics[f"accept_rate_{depth - 1}"][0]) > 0  # whole drafts are accepted somewhere
    if isinstance(training, ChainTraining):
        walks = [naive_walk(propose_with_target_states, document, depth) for row in rows for document in row]
        bound = [sum(walk[0] for walk in walks), sum(walk[1] for walk in walks)]
        assert metrics["accept_length_with_target_states"].tolist() == bound
    lengths = {name for name in metrics if name.startswith("accept_length_at")}
    assert lengths == {f"accept_length_at_depth_{limit}" for limit in range(1, depth + 1)}
    for limit in range(1, depth + 1):
        counts = [naive_walk(propose, document, limit) for row in rows for document in row]
        assert metrics[f"accept_length_at_depth_{limit}"].tolist() == [emitted, sum(count[1] for count in counts)]


def half_predictable(propose: Propose, document: Document, seed: int, depth: int) -> Document:
    """The document with chains of 0 to `depth` of the draft's own proposals written into its answers."""
    generator = torch.Generator().manual_seed(seed)
    tokens = list(document[0])
    mask = document[1]
    position = 2
    while position < len(tokens):
        length = int(torch.randint(0, depth + 2, (), generator=generator)) if mask[position] else 0
        chain = propose(tokens[:position], depth)[:length] if length else []
        for token in chain:
            if position < len(tokens) and mask[position]:
                tokens[position] = token
                position += 1
        position += 1
    return tokens, mask


def naive_walk(propose: Propose, document: Document, depth: int) -> tuple[int, int, list[int]]:
    """Emitted tokens after the first, rounds, and rounds by accepted position, of a server that answers this text."""
    tokens, mask = document
    emitted = rounds = 0
    accepted_by_position = [0] * depth
    first = 0
    while first < len(tokens):
        if not mask[first]:
            first += 1
            continue
        last = first
        while last + 1 < len(tokens) and mask[last + 1]:
            last += 1
        root = first
        while root < last:
            proposed = propose(tokens[: root + 1], depth)
            num_accepted = 0
            while num_accepted < depth and root + 1 + num_accepted <= last:
                if proposed[num_accepted] != tokens[root + 1 + num_accepted]:
                    break
                accepted_by_position[num_accepted] += 1
                num_accepted += 1
            new_root = min(root + num_accepted + 1, last)
            emitted = emitted + new_root - root
            rounds = rounds + 1
            root = new_root
        first = last + 1
    return emitted, rounds, accepted_by_position
