"""Random block drafts in training, and random packed rows, for the tests of DFLASH."""

from typing import Any

import torch
from transformers import PreTrainedModel

from slipstream.models.drafts.dflash import DFlash
from slipstream.tests.train.conftest import AUX_STATE_LAYERS, Document, documents, random_parts
from slipstream.train.batches import Batch, collate
from slipstream.train.dflash import DFlashTraining, DraftOptions

BLOCK_SIZE = 5
MAX_LENGTH = 32
MASK_TOKEN = 7


def make_training(
    target: PreTrainedModel, ids: torch.Tensor | None = None, options: DraftOptions | None = None, **fields: Any
) -> DFlashTraining:
    """A random draft of two layers; `ids` are its vocabulary, `fields` override its config's."""
    shape = {"num_layers": 2, "block_size": BLOCK_SIZE, "mask_token_id": MASK_TOKEN, "aux_layers": AUX_STATE_LAYERS}
    parts = random_parts(DFlash, target, ids, **shape | fields)
    return DFlashTraining(*parts, options or DraftOptions(anchors=6, loss="decay"), depth=63, seed=11)


def packed(seed: int) -> tuple[Batch, list[list[Document]]]:
    rows = documents(seed)
    return collate(rows, MAX_LENGTH), rows


def flat_documents(rows: list[list[Document]], width: int) -> list[tuple[int, Document]]:
    """Each document, cut as it is packed, with the row of the flattened batch where it begins."""
    cut_documents = []
    for number, row in enumerate(rows):
        start = number * width
        for tokens, mask in row:
            cut_documents.append((start, (tokens[:MAX_LENGTH], mask[:MAX_LENGTH])))
            start += len(cut_documents[-1][1][0])
    return cut_documents
