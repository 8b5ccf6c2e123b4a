"""Rows that processes share: the losses, weights and metrics are those of one process."""

from itertools import product
from pathlib import Path

import pytest
import torch

from slipstream.tests.sources import ROOT
from slipstream.tests.train.block_cases import packed
from slipstream.tests.train.runs import Arguments, assert_like_run, end_program, refusal, start_program
from slipstream.train import dflash, eagle
from slipstream.train.eagle3 import main
from slipstream.train.row_ranks import RowGroup
from slipstream.train.ttt import find_rows

PROGRAMS = {"eagle": eagle.main, "eagle3": main, "eagle3 of two layers": main}
CHANGES = {"eagle3 of two layers": {"draft__num_layers": 2}}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_run_whose_rows_are_shared_is_that_of_one_process(
    name: str, run_flags: Arguments, arguments: Arguments, tmp_path: Path
) -> None:
    flags = run_flags if name == "eagle" else arguments
    changes = CHANGES.get(name, {})
    PROGRAMS[name](flags(tmp_path / "one", **changes))
    program = ROOT / "train" / f"{name.split()[0]}.py"
    end_program(start_program(program, *flags(tmp_path / "two", data__row_ranks=2, **changes), num_processes=2))
    assert_like_run(tmp_path / "two", tmp_path / "one")


@pytest.mark.parametrize(("size", "all_run"), [*product((2, 3, 8), (False, True))])
def test_parts_hold_each_row_once(size: int, all_run: bool) -> None:
    for seed in range(20):
        batch, _ = packed(seed)
        batch_rows = find_rows(batch, 3, all_run=all_run)
        parts = [find_rows(batch, 3, all_run=all_run, group=RowGroup(index, size, None)) for index in range(size)]
        counted = [part.of_taught(part.asking)[part.counts[0]] for part in parts]
        assert torch.equal(torch.cat(counted), batch_rows.of_taught(batch_rows.asking)[batch_rows.counts[0]])
        owned = [torch.cat((part.context, part.asking[: part.gathering.num_own])) for part in parts]  # type: ignore[union-attr]
        everything = torch.cat(owned)
        reading_order = torch.cat((batch_rows.context, batch_rows.asking))[batch_rows.keys]
        assert torch.equal(everything.sort().values, reading_order)
        documents = batch.documents.flatten()
        for index, (part, rows) in enumerate(zip(parts, owned, strict=True)):
            assert part.gathering is not None
            assert part.gathering.counts[index] == len(rows)
            keys = everything[part.keys]
            assert torch.equal(keys, reading_order[torch.isin(documents[reading_order], documents[part.asking])])
            assert [len(x) for x in keys.split(part.num_keys)] == part.num_keys
            assert sum(part.num_asking) == len(part.asking)


def test_ranks_that_do_not_divide_the_processes(arguments: Arguments, run_flags: Arguments, tmp_path: Path) -> None:
    assert "data.row_ranks is 2 and there are 1 processes" in refusal(arguments(tmp_path, data__row_ranks=2))
    assert refusal(run_flags(tmp_path, data__row_ranks=2), dflash.main) == "2"
