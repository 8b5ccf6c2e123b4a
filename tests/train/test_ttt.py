"""Training-time test against the draft run token by token, and its rows against the rule read out loud."""

import pytest
import torch

from slipstream.tests.naive_eagle3 import NaiveEagle3
from slipstream.tests.random_targets import target_aux_states
from slipstream.tests.train.block_cases import flat_documents, packed
from slipstream.train.ttt import find_rows


@pytest.mark.parametrize("seed", range(5))
def test_rows_follow_the_rule(seed):
    batch, documents = packed(seed)
    rows = find_rows(batch, num_steps=4)
    asking = []
    counts = {}
    for start, (ids, mask) in flat_documents(documents, batch.tokens.shape[1]):
        for t in range(len(ids)):
            supervised = [t + 1 + i < len(ids) and mask[t + 1 + i] for i in range(6)]
            if supervised[0] and supervised[1]:
                asking.append(start + t)
                for step in range(4):
                    counts[start + t, step] = all(supervised[: step + 2])
    assert rows.asking.tolist() == asking
    assert {(t, s): bool(rows.counts[s, n]) for n, t in enumerate(asking) for s in range(4)} == counts
    assert rows.asking_positions.tolist() == [int(batch.positions.flatten()[t]) for t in asking]
    assert len(set(rows.context.tolist()) & set(asking)) == 0
    assert sum(rows.num_asking) == len(asking)
    positions = batch.positions.flatten().tolist()
    visible = []
    for count, first_key, num_keys in rows.runs:  # each row sees its document up to itself
        numbers = sorted([*rows.context.tolist(), *asking])[first_key : first_key + num_keys]
        visible += [numbers[: num_keys - offset] for offset in reversed(range(count))]
    assert visible == [list(range(row - positions[row], row + 1)) for row in asking]


def test_every_state_is_the_one_of_the_chain_run_token_by_token(training, target_model):
    batch, documents = packed(0)
    naive = NaiveEagle3(training.draft, target_model.get_input_embeddings().weight)
    rows, tokens, aux_states, _ = training.read(batch, 4)
    states = torch.stack(list(training.chain(rows, tokens, aux_states, 4)))  # (4, N, H)
    index = {row: n for n, row in enumerate(rows.asking.tolist())}
    compared = 0
    for start, (ids, _) in flat_documents(documents, batch.tokens.shape[1]):
        expected = target_aux_states(target_model, ids, training.draft.config.aux_layers)
        for (t, step), state in naive.chains(expected, torch.tensor(ids), 4).items():
            n = index.get(start + t)
            if n is not None and rows.counts[step, n]:
                torch.testing.assert_close(states[step, n], state, rtol=1e-4, atol=1e-4)
                compared += 1
    assert compared == int(rows.counts.sum())
