"""Scales of an FP8 KV cache where the checkpoint has none: what a prefill of given text writes into a cache of the
network's dtype tells how large the keys and values of each head become.

The same text, target and machine give the same scales. They are not kept: the log names them.
"""

import gzip
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from slipstream.kernels.kv.fp8 import LARGEST
from slipstream.models.targets.pretrained import load_tokenizer
from slipstream.serve.engine.plan import Admission, PromptChunk, PromptPhase, StepPlan
from slipstream.serve.options import EngineConfig
from slipstream.serve.request import Request, SamplingParams
from slipstream.serve.runner.kv import NetworkKV
from slipstream.serve.runner.model_runner import ModelRunner
from slipstream.serve.runner.recurrence import ENTRY, SOURCE

MOST_TOKENS = 2048  # tokens of the text that are used
CHUNK = 512  # tokens of a pass; a constant, so that neither the draft nor other options change the scales
MOST_CHARACTERS = 16 * MOST_TOKENS
# Numbers saturate at so many times the largest one in the text. That costs no precision: codes are floating point, and
# e4m3 keeps three bits down to 2**-15 of its largest number.
MARGIN = 2.0
BUNDLED = Path(__file__).parents[2] / "assets" / "gsm8k.jsonl.gz"

logger = logging.getLogger(__name__)


def read_user_text(config: EngineConfig) -> str | None:
    """Reads the user's text, if the options name one, before weights are loaded, so that a mistake shows at once.
    Raises ValueError if it cannot be read."""
    file = config.calibration_file
    return None if file is None else read_text(file)


def read_text(file: str | None) -> str:
    """Reads the text to calibrate on: the user's file, or bundled questions and answers. Raises ValueError if there is
    none."""
    if file is None:
        if not BUNDLED.exists():
            raise ValueError(f"kv_cache_dtype is fp8, and {BUNDLED} is missing; give fp8:FILE with a file of text")
        with gzip.open(BUNDLED, "rt") as lines:
            return "\n\n".join(_messages(lines))[:MOST_CHARACTERS]
    try:
        with open(file, encoding="utf-8") as stream:
            text = stream.read(MOST_CHARACTERS)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"kv_cache_dtype names {file!r}, which cannot be read ({error}); name a file of text"
        ) from None
    if not text.strip():
        raise ValueError(f"kv_cache_dtype names {file!r}, a file without text; name another, or give fp8 alone")
    return text


def _messages(lines: Iterator[str]) -> Iterator[str]:
    for line in islice(lines, 200):
        yield from (message["content"] for message in json.loads(line)["messages"])


def tokens_of(text: str, folder: Path, longest: int, trust_remote_code: bool) -> list[int]:
    """Returns the first tokens of the text, by the target's tokenizer. Raises ValueError if there are none."""
    tokenizer = load_tokenizer(folder, trust_remote_code)
    tokens: list[int] = tokenizer(text, verbose=False)["input_ids"][: min(MOST_TOKENS, longest)]
    if not tokens:
        raise ValueError("kv_cache_dtype names a file without text; name another, or give fp8 alone")
    return tokens


def prefill(runner: ModelRunner, tokens: Sequence[int], width: int, prompts_by: PromptPhase) -> None:
    """Computes the tokens as the prompt of slot 0, on pages 1, 2, ... of every group, and drafts `width` nodes after
    them. Raises ValueError where the target's logits are not finite."""
    state = runner.state
    request = Request(id="calibration", prompt=list(tokens), params=SamplingParams(max_tokens=1, temperature=0.0))
    num_groups, _, num_pages = state.pages.shape
    pages = tuple((group, 0, index, index + 1) for group in range(num_groups) for index in range(num_pages))
    if (states := runner.passes.states) is not None:
        pages = tuple(entry for entry in pages if entry[0] != states.group)
        pages += ((states.group, 0, SOURCE, 1), (states.group, 0, ENTRY, 1))
    for number, start in enumerate(range(0, len(tokens), CHUNK), 1):
        end = min(start + CHUNK, len(tokens))
        is_last = end == len(tokens)
        part = PromptChunk(0, start, list(tokens[start:end]), None if is_last else tokens[end], is_last)
        plan = StepPlan(number, chunks=(part,), segments=(0,), prompts_by=prompts_by)
        if is_last:
            plan = replace(plan, drafting=(0,), width=width)
        if number == 1:
            plan = replace(plan, admissions=(Admission(0, request, tuple(tokens)),), pages=pages)
        output = runner.launch(plan).read()
        if output.errors:
            raise ValueError(f"kv_cache_dtype fp8 cannot be calibrated: {next(iter(output.errors.values()))}")


def scales_of(kv: NetworkKV) -> list[Tensor]:
    """Returns (2, G) fp32 scales of each layer, by the numbers in its cache, not yet in FP8, after the dump page."""
    largest = [cache.pages[:, :, 1:].abs().amax(dim=(2, 3, 5)).float() for cache in kv.caches]
    scales = [MARGIN / LARGEST * largest[cache][place] for cache, place in kv.places]
    return [torch.where(scale > 0, scale, 1.0) for scale in scales]


def fill_scales(
    role: str, file_scales: Sequence[Tensor | None], calibrated: Sequence[Tensor | None], source: str
) -> list[Tensor]:
    """Returns the scales by layer, from the checkpoint's files, else from calibration on `source`. Logs them."""
    pairs = zip(file_scales, calibrated, strict=True)
    scales = [scale for stored, new in pairs if (scale := new if stored is None else stored) is not None]
    assert len(scales) == len(file_scales)
    num_stored = sum(scale is not None for scale in file_scales)
    origins = [f"of the checkpoint in {num_stored} of {len(file_scales)} layers"] if num_stored else []
    origins += [f"calibrated on {source}"] if num_stored < len(file_scales) else []
    k, v = (" ".join(f"{float(scale[part].max()):.3g}" for scale in scales) for part in (0, 1))
    message = "FP8 KV cache of the %s, scales %s. Largest by layer, of keys: %s; of values: %s"
    logger.info(message, role, " and ".join(origins), k, v)
    return scales
