"""Rows that processes share: the losses, weights and metrics are those of one process."""

from itertools import product

import pytest
import torch

from slipstream.tests.pairwise import rotating
from slipstream.tests.sources import ROOT
from slipstream.tests.train.block_cases import make_training, packed
from slipstream.tests.train.runs import assert_like_run, end_program, refusal, start_program
from slipstream.tests.train.test_block_training import DRAFTS
from slipstream.train import dflash, eagle
from slipstream.train.eagle3 import main
from slipstream.train.row_ranks import Gathering, RowGroup
from slipstream.train.training import add
from slipstream.train.ttt import find_rows

PROGRAMS = {"eagle": eagle.main, "eagle3": main, "eagle3 of two layers": main}
PROGRAMS |= dict.fromkeys(("dflash", "dflash of single blocks", "dflash with lilicorr"), dflash.main)
BLOCKS = {"draft__block_size": 4, "draft__mask_token_id": 7, "draft__num_layers": 2}
CHANGES = {
    "eagle3 of two layers": {"draft__num_layers": 2},
    "dflash": BLOCKS,
    "dflash of single blocks": BLOCKS | {"draft__anchors": 1},
    "dflash with lilicorr": BLOCKS | {"draft__lilicorr__hidden_size": 16, "draft__lilicorr__factor_dim": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_run_whose_rows_are_shared_is_that_of_one_process(name, run_flags, arguments, tmp_path):
    flags = arguments if name.startswith("eagle3") else run_flags
    changes = CHANGES.get(name, {})
    PROGRAMS[name](flags(tmp_path / "one", **changes))
    program = ROOT / "train" / f"{name.split()[0]}.py"
    end_program(start_program(program, *flags(tmp_path / "two", data__row_ranks=2, **changes), num_processes=2))
    assert_like_run(tmp_path / "two", tmp_path / "one")


@pytest.mark.parametrize(("size", "all_run"), [*product((2, 3, 8), (False, True))])
def test_parts_hold_each_row_once(size, all_run):
    for seed in range(20):
        batch, _ = packed(seed)
        batch_rows = find_rows(batch, 3, all_run=all_run)
        parts = [find_rows(batch, 3, all_run=all_run, group=RowGroup(index, size, None)) for index in range(size)]
        counted = [part.of_taught(part.asking)[part.counts[0]] for part in parts]
        assert torch.equal(torch.cat(counted), batch_rows.of_taught(batch_rows.asking)[batch_rows.counts[0]])
        owned = [torch.cat((part.context, part.asking[: part.gathering.num_own])) for part in parts]
        everything = torch.cat(owned)
        reading_order = torch.cat((batch_rows.context, batch_rows.asking))[batch_rows.keys]
        assert torch.equal(everything.sort().values, reading_order)
        documents = batch.documents.flatten()
        for index, (part, rows) in enumerate(zip(parts, owned, strict=True)):
            assert part.gathering.counts[index] == len(rows)
            keys = everything[part.keys]
            assert torch.equal(keys, reading_order[torch.isin(documents[reading_order], documents[part.asking])])
            assert [len(x) for x in keys.split(part.num_keys)] == part.num_keys
            assert sum(part.num_asking) == len(part.asking)


@pytest.mark.parametrize(("name", "size"), rotating(DRAFTS, [3, 13]))
def test_parts_of_blocks_add_up(size, name, target_model, monkeypatch):
    """More processes than blocks, too: those without any have a loss of zero that waits for the others' gradients."""
    training = make_training(target_model, **DRAFTS[name])
    training.train()
    batch, _ = packed(0)
    expected, counts = training.loss(batch)
    context = training.read(batch).context
    joined = []

    def join(_, rows, _none):
        joined.append(rows)
        return context.detach() + 0 * rows.sum()

    monkeypatch.setattr(Gathering, "join", join)
    total = torch.zeros(())
    sums = {}
    for index in range(size):
        training.row_group = RowGroup(index, size, None)
        loss, metrics = training.loss(batch)
        torch.autograd.grad(loss, [weight for weight in training.parameters() if weight.requires_grad])
        total = total + loss
        add(sums, metrics)
    assert torch.equal(torch.cat(joined), context)
    torch.testing.assert_close(total, expected)
    for metric, values in counts.items():
        torch.testing.assert_close(sums[metric].float(), values.float(), rtol=1e-4, atol=1e-4, msg=metric)


def test_ranks_that_do_not_divide_the_processes(arguments, tmp_path):
    assert "data.row_ranks is 2 and there are 1 processes" in refusal(arguments(tmp_path, data__row_ranks=2))
