"""Turns conversations into tokens with a loss mask, ready to train on.

    python data_tools/prepare.py --data chats.jsonl --target Qwen/Qwen3-8B --output runs/data
    slipstream prepare --data assets/gsm8k.jsonl.gz --where split=train --target assets/tiny-target --output runs/data

Invariant: every row is either kept or counted in report.json with the reason it was dropped.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from slipstream.config import run
from slipstream.data_tools.dataset import Conversation, Tokens, write_dataset
from slipstream.data_tools.options import counted, show_table
from slipstream.data_tools.rows import check_data, read_rows
from slipstream.data_tools.target_tokenizer import load_target_tokenizer
from slipstream.data_tools.tokenization import CategoryTokenizer, Outcome, RowTokenizer, tokenize_rows
from slipstream.data_tools.verb_options import PrepareConfig
from slipstream.models.files.outputs import DATASET, check_output_folder

EXAMPLES_PER_REASON = 3
SHOWN_TOKENS = 300


@dataclass(slots=True)
class Tally:
    """Counts kept, dropped and filtered rows as they pass."""

    rows: int = 0
    filtered: int = 0
    truncated: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    first: Tokens | None = None  # document that was kept

    def kept(self, outcomes: Iterable[Outcome]) -> Iterator[Conversation]:
        """Yields the documents and category of each kept row. Samples of one prompt, which follow each other, come
        together, so that they stay in one split."""
        documents: list[Tokens] = []
        category = None
        prompt_id = None
        for outcome in outcomes:
            self._count(outcome)
            if outcome.status != "kept":
                continue
            if documents and (outcome.sample_of is None or outcome.sample_of != prompt_id):
                yield Conversation(documents, category)
                documents = []
            if not documents:
                category = outcome.category
            documents += outcome.documents
            prompt_id = outcome.sample_of or outcome.id
        if documents:
            yield Conversation(documents, category)

    def _count(self, outcome: Outcome) -> None:
        self.filtered += outcome.status == "filtered"
        self.rows += outcome.status != "filtered"
        self.truncated += outcome.truncated
        if outcome.status == "kept":
            self.first = self.first or outcome.documents[0]
        elif outcome.status != "filtered":
            reason = outcome.reason or "malformed"
            self.dropped[reason] += 1
            self.examples.setdefault(reason, []).append(outcome.detail)
            del self.examples[reason][EXAMPLES_PER_REASON:]

    def check(self) -> None:
        """Raises ValueError if no row was kept."""
        if self.first is not None:
            return
        if self.rows == 0:
            hint = f"; all {self.filtered:,} rows fail --where" if self.filtered else "; the data is empty"
            raise ValueError("no row to prepare" + hint)
        reasons = counted(dict(self.dropped.most_common()))
        example = next(iter(self.examples.values()))[0]
        raise ValueError(f"none of {self.rows:,} rows could be kept ({reasons}); the first: {example}")


def prepare(config: PrepareConfig) -> None:
    """Writes the dataset that `config` asks for and prints its report and one example."""
    output = Path(config.output)
    inputs = {**config.inputs(), "heldout_data": config.heldout_data}
    check_output_folder(config.output, DATASET, inputs, overwrite=config.overwrite)
    check_data(config)
    heldout = None
    if config.heldout_data:
        heldout = dataclasses.replace(config, data=config.heldout_data)
        check_data(heldout)
    target = load_target_tokenizer(config)
    tokenizer = CategoryTokenizer(target, config)
    tally = Tally()
    if tokenizer.chat is None:
        print("The target has no chat template: conversations are refused, plain text is taken as it is.")
    else:
        print(f"Conversations are rendered with the chat template{tokenizer.chat.date_note}.")
    rows = tally.kept(tqdm(tokenize_rows(read_rows(config), tokenizer), unit=" rows", desc="prepare"))
    heldout_rows = tally.kept(tokenize_rows(read_rows(heldout), tokenizer)) if heldout is not None else None
    report = write_dataset(
        rows,
        output,
        heldout=config.heldout,
        seed=config.seed,
        describe=lambda: describe(tokenizer, tally),
        heldout_conversations=heldout_rows,
    )
    show_report(report, output)
    assert tally.first is not None
    print(f"\nOne row, its supervised tokens in brackets:\n{marked(target.tokenizer, *tally.first)}")


def describe(tokenizer: RowTokenizer, tally: Tally) -> dict[str, Any]:
    """The part of report.json on rows and target. Raises ValueError if no row was kept."""
    tally.check()
    target = tokenizer.target
    options = tokenizer.options
    frozen = tokenizer.chat is not None and tokenizer.chat.inserts_date
    return {
        "rows_in": tally.rows,
        "rows_kept": tally.rows - tally.dropped.total(),
        "rows_dropped": dict(tally.dropped.most_common()),
        "rows_filtered": tally.filtered,
        "rows_truncated": tally.truncated,
        "dropped_examples": tally.examples,
        "frozen_date": options.date if frozen else None,
        "target": options.target,
        "target_revision": options.revision,
        "tokenizer_hash": target.hash,
        "vocab_size": target.vocab_size,
        "special_ids": sorted(target.special_ids),
        "end_ids": sorted(target.end_ids),
        "options": dataclasses.asdict(options),
    }


def show_report(report: Mapping[str, Any], output: Path) -> None:
    names = ("rows_in", "rows_kept", "rows_filtered", "rows_truncated", "tokens", "supervised_tokens")
    figures: dict[str, object] = {name.replace("_", " "): report[name] for name in names}
    figures["supervised share"] = f"{report['supervised_share']:.1%}"
    figures |= {"rows dropped": counted(report["rows_dropped"]), "split rows": counted(report["split_rows"])}
    if report["weighted_rows"]:
        figures["rows with weights"] = f"{report['weighted_rows']:,}, other than 0 and 1"
    if report["heldout_categories"]:
        figures["held-out categories"] = counted(report["heldout_categories"])
    if report["copies_of_heldout"]:
        figures["copies of held-out rows"] = f"{report['copies_of_heldout']:,}, left out of training"
    print(f"{output}:")
    show_table(figures)
    for reason, places in report["dropped_examples"].items():
        print(f"  first {reason}: {places[0]}")


def marked(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray, mask: np.ndarray) -> str:
    """The row's text, supervised tokens in brackets, cut to SHOWN_TOKENS."""
    ids = ids[:SHOWN_TOKENS]
    mask = mask[:SHOWN_TOKENS]
    edges = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1), len(ids)]
    text = ""
    for start, end in zip(edges, edges[1:], strict=False):
        run_text = str(tokenizer.decode(ids[start:end]))
        text += f"⟦{run_text}⟧" if mask[start] else run_text
    return text + (" …" if len(ids) == SHOWN_TOKENS else "")


main = partial(run, prepare, PrepareConfig, "slipstream prepare")

if __name__ == "__main__":
    main()
