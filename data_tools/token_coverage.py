"""The coverage of a token map and its cost in accept length, as a table and a plot.

The model: a draft cannot propose a token outside the map, so the accepted chain ends there. If position k
is reached with probability a_k without a map, and a share c of the tokens lies in the map whatever their position,

    accept length = 1 + sum over k of a_k * c**k = 1 + sum over k of the product of p_i * c, i = 1..k

with p_i = a_i / a_(i-1), the rate at position i once it is reached.

The model assumes that tokens outside the map are as easy to draft as others. They are rare words, which a draft often
misses anyway, so the real loss is smaller: docs/token_map.md compares it with published figures.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from slipstream.data_tools.verb_options import ACCEPT_RATES
from slipstream.models.drafts.token_map import TokenMap, coverage_curve
from slipstream.models.files.atomic import atomic_file

SOFTWARE = "slipstream frequency-map"  # in the file's metadata, by which is_coverage_plot knows it
BAR_WIDTH = 30
PLOTTED_SIZES = 400
BLUE = "#1f6feb"
GREY = "#9aa5b1"


def expected_accept_length(accept_rates: Sequence[float], coverage: float) -> float:
    """Tokens per round with a map that covers this share of the answer tokens, the target's own token included.

    `accept_rates`: share of rounds that accept position 1, 2, ... of a draft with the whole vocabulary.
    """
    return 1.0 + sum(rate * coverage**position for position, rate in enumerate(accept_rates, 1))


def coverage_table(token_map: TokenMap, accept_rates: Sequence[float] = ACCEPT_RATES) -> str:
    """The coverage curve with bars, what each size costs in accept length, and what the chosen size covers."""
    size = len(token_map.ids)
    metadata = token_map.metadata
    full = expected_accept_length(accept_rates, 1.0)
    lines = [f"    tokens  coverage  {'':{BAR_WIDTH}}  accept length"]
    for name, share in metadata["coverage"].items():
        mark = "  <- this map" if int(name) == size else ""
        length = expected_accept_length(accept_rates, share)
        bar = f"{'#' * round(BAR_WIDTH * share):<{BAR_WIDTH}}"
        lines.append(f"{int(name):10,}  {share:8.2%}  {bar}  {length:5.2f}  {length / full:6.1%}{mark}")
    lines.append(
        f"{size:,} of {token_map.vocab_size:,} tokens ({size / token_map.vocab_size:.0%} of the vocabulary) cover "
        f"{token_map.coverage:.2%} of {metadata['tokens_seen']:,} answer tokens"
    )
    rates = " ".join(f"{rate:g}" for rate in accept_rates)
    lines.append(
        f"accept length: 1 + sum of a_k * coverage^k, at accept rates a_k of {rates} with the whole vocabulary;\n"
        "assumes that tokens outside the map are as easy to draft as others; the real loss is smaller"
    )
    return "\n".join(lines)


def plot_coverage(token_map: TokenMap, path: Path, accept_rates: Sequence[float] = ACCEPT_RATES) -> None:
    """Writes a PNG: share of the answer tokens covered and of the accept length kept, by size of the map."""
    curve = coverage_curve(token_map.counts, token_map.kept_ids)
    size = len(token_map.ids)
    smallest = max(len(token_map.kept_ids), token_map.vocab_size // 256, 1)
    sizes = np.unique(np.geomspace(smallest, token_map.vocab_size, PLOTTED_SIZES).astype(np.int64))
    full = expected_accept_length(accept_rates, 1.0)
    lengths = np.array([expected_accept_length(accept_rates, share) / full for share in curve[sizes]])
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(sizes, curve[sizes], color=BLUE, label="answer tokens covered")
    axes.plot(sizes, lengths, color=GREY, linestyle="--", label="accept length kept (by the model)")
    axes.plot([size], [curve[size]], "o", color=BLUE, label=f"{size:,} tokens cover {curve[size]:.1%}")
    axes.axvline(size, color=BLUE, linewidth=0.8, linestyle=":")
    axes.set(xlabel="tokens in the map", ylabel="share", xlim=(sizes[0], sizes[-1]), ylim=(0.0, 1.08))
    axes.set_title(f"{token_map.metadata['tokens_seen']:,} answer tokens, vocabulary {token_map.vocab_size:,}")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.legend(loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    with atomic_file(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png", metadata={"Software": SOFTWARE})


def is_coverage_plot(path: Path) -> bool:
    """Whether `plot_coverage` drew this file."""
    with path.open("rb") as file:
        start = file.read(1024)
    return start.startswith(b"\x89PNG") and SOFTWARE.encode() in start
