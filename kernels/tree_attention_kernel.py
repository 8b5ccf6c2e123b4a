"""The kernel of `tree_attention`: flash-decoding of a tile of query rows over one part of a paged context."""

import triton
import triton.language as tl

from slipstream.kernels.grid_sync import barrier_wait, is_last_done


@triton.jit(do_not_specialize=["N", "first_node", "table_width", "min_part"])
def attend_kernel(
    q_ptr, keys_ptr, values_ptr, pages_ptr, rows_ptr, lengths_ptr, ancestors_ptr, out_ptr, lse_ptr,
    partial_ptr, partial_lse_ptr, counters_ptr, scale, N, first_node, table_width, min_part,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, SHARE: tl.constexpr, AT_ONCE: tl.constexpr, WAIT: tl.constexpr,
    MASK: tl.constexpr, WINDOW: tl.constexpr, PREFIX: tl.constexpr, PRECISION: tl.constexpr, WORD: tl.constexpr,
    OFFSET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows of one KV head and request (axes 1 and 2) over one part of its context (axis 0); scale is for exp2.

    SHARE, AT_ONCE, WAIT: how programs that share rows merge, see _merge; SHARE is ROWS where axis 0 has one program.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(2)
    row_tiles = tl.num_programs(1) // G
    head = tl.program_id(1) // row_tiles
    length = tl.load(lengths_ptr + request).to(tl.int32)
    table = pages_ptr + tl.load(rows_ptr + request) * table_width
    end = length + first_node + N
    begin = 0
    if not PREFIX:
        begin = length // TOKENS * TOKENS
    elif WINDOW is not None:  # the tile in which the first query's window begins
        begin = tl.maximum(length + first_node + 1 - WINDOW, 0) // TOKENS * TOKENS
    tiles = tl.cdiv(end - begin, TOKENS)
    tiles_each = tl.cdiv(tiles, tl.minimum(tl.num_programs(0), tl.cdiv(end - begin, min_part)))
    parts = tl.cdiv(tiles, tiles_each)
    first = tl.program_id(0) * tiles_each
    first_row = tl.program_id(1) % row_tiles * ROWS
    num_rows = tl.minimum(N * GROUP - first_row, ROWS)
    if (first >= tiles) & ((parts == 1) | (not WAIT) | (tl.program_id(0) * SHARE >= num_rows)):
        return  # others without a part help to merge

    row, dims = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    clipped = first_row + tl.minimum(row, num_rows - 1)  # rows beyond the last repeat it and are not stored
    query = clipped // GROUP
    cells = _row_of(request, N, head, clipped, G, GROUP).to(tl.int64)[:, None] * D + dims[None, :]
    q = tl.load(q_ptr + cells, mask=(dims < D)[None, :], other=0.0)
    seen = _seen_nodes(ancestors_ptr, request * N + query, first_node + query, MASK, WORD)
    acc, log_sum = _attend_tokens(
        q, seen, keys_ptr, values_ptr, table, head, begin + first * TOKENS,
        tl.minimum(begin + (first + tiles_each) * TOKENS, end), length, end, scale,
        length + first_node + query - WINDOW if WINDOW is not None else None,
        G, D, BLOCK_D, PAGE, ROWS, TOKENS, PREFIX, PRECISION, OFFSET,
    )  # fmt: skip
    if PDL:  # not before: programs of the next kernel would hold places that this one's still wait for
        tl.extra.cuda.gdc_launch_dependents()
    if SHARE < ROWS:
        tile = request * tl.num_programs(1) + tl.program_id(1)
        if parts > 1:
            partial = tile.to(tl.int64) * tl.num_programs(0) * ROWS
            _merge(
                acc, log_sum, partial_ptr + partial * BLOCK_D, partial_lse_ptr + partial, counters_ptr + tile, parts,
                out_ptr, lse_ptr, request, N, head, first_row, num_rows,
                G, D, BLOCK_D, GROUP, ROWS, SHARE, AT_ONCE, WAIT,
            )  # fmt: skip
            num_rows = 0
    _store(out_ptr, lse_ptr, acc, log_sum, request, N, head, first_row, row, num_rows, G, D, BLOCK_D, GROUP)


@triton.jit
def _attend_tokens(
    q, seen, keys_ptr, values_ptr, table, head, start, stop, length, end, scale, before,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, PREFIX: tl.constexpr, PRECISION: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Attention of q (ROWS, BLOCK_D) to the tokens start..stop - 1, and its log2-sum-exp2 (ROWS,).

    start is a multiple of TOKENS, so that a tile is whole pages, or part of one. before (ROWS,): the last position that
    a row's window leaves out; None without a window.
    """
    dims, token = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, TOKENS)
    in_page = (token % PAGE * G + head)[:, None] * D + dims  # the same cells in every tile: few instructions are left
    top = tl.full((ROWS,), -1e30, tl.float32)  # finite: exp2(-inf - top) is 0 also where a row sees nothing yet
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    page = _load_pages(table, start, end, PAGE, TOKENS)
    for tile_start in range(start, stop, TOKENS):
        first_cell = page.to(OFFSET) * (PAGE * G * D)
        if PAGE > TOKENS:
            first_cell += tile_start % PAGE * (G * D)
        kv_cells = first_cell[:, None] + in_page
        inside = (token < end - tile_start)[:, None] & (dims < D)
        page = _load_pages(table, tile_start + TOKENS, end, PAGE, TOKENS)  # the next tile's, ahead of its use
        k = tl.load(keys_ptr + kv_cells, mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if before is not None:
            position = tile_start + token
            visible = (seen[:, None] & _node_bit(position, length, end, PREFIX, seen.dtype)[None, :]) != 0
            scores = tl.where(visible & (position[None, :] > before[:, None]), scores, float("-inf"))
        elif tile_start + TOKENS > length or not PREFIX:  # not among committed tokens alone, which all rows see
            bit = _node_bit(tile_start + token, length, end, PREFIX, seen.dtype)
            scores = tl.where((seen[:, None] & bit[None, :]) != 0, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
        weights = tl.exp2(scores * scale - new_top[:, None])
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(weights, axis=1)
        v = tl.load(values_ptr + kv_cells, mask=inside, other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        top = new_top
    total = tl.where(total > 0, total, 1.0)  # 0: a row that sees nothing in this part, which then weighs exp2(-1e30)
    return acc / total[:, None], top + tl.log2(total)


@triton.jit
def _load_pages(table, start, end, PAGE: tl.constexpr, TOKENS: tl.constexpr):
    """(TOKENS,) int32 page ids of the tokens from start on, each page's read once; 0 beyond the end."""
    COUNT: tl.constexpr = max(TOKENS // PAGE, 1)
    index = tl.arange(0, COUNT)
    ids = tl.load(table + start // PAGE + index, mask=start + index * PAGE < end, other=0).to(tl.int32)
    return tl.reshape(tl.broadcast_to(ids[:, None], (COUNT, TOKENS // COUNT)), (TOKENS,))


@triton.jit
def _seen_nodes(ancestors_ptr, row, node, MASK: tl.constexpr, WORD: tl.constexpr):
    """Bit j of a row says that its node sees node j; never 0, so that `seen & -1` lets it see committed tokens."""
    if MASK == "tree":
        seen = tl.load(ancestors_ptr + row).to(WORD)
    elif MASK == "causal":
        own = tl.full(node.shape, 1, WORD) << node.to(WORD)
        seen = own | (own - 1)
    else:
        seen = tl.full(node.shape, -1, WORD)
    return seen


@triton.jit
def _node_bit(position, length, end, PREFIX: tl.constexpr, WORD: tl.constexpr):
    """The bit of the node at each position; committed tokens: all bits (without PREFIX none); beyond the end: none."""
    shift = (position - length) & (WORD.primitive_bitwidth - 1)
    bit = tl.full(position.shape, 1, WORD) << shift.to(WORD)
    return tl.where(position < length, -1 if PREFIX else 0, tl.where(position < end, bit, 0))


@triton.jit
def _merge(
    acc, log_sum, partial_ptr, partial_lse_ptr, counter_ptr, parts, out_ptr, lse_ptr,
    request, N, head, first_row, num_rows,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    SHARE: tl.constexpr, AT_ONCE: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Stores the merged rows of the first `parts` programs along axis 0, those that have a part.

    WAIT: each of the first programs merges SHARE rows as soon as all parts have come; it may be one without a part.
    They are next to each other in the grid, so that all of them run. Else the last one to come merges all rows.
    AT_ONCE: parts whose loads do not wait for each other.
    """
    row, dims = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    own = tl.program_id(0) * ROWS + row
    kept = row < tl.where(tl.program_id(0) < parts, num_rows, 0)
    tl.store(partial_ptr + own[:, None] * BLOCK_D + dims[None, :], acc, mask=kept[:, None])
    tl.store(partial_lse_ptr + own, log_sum, mask=kept)
    if WAIT:
        start, step = tl.program_id(0) * SHARE, ROWS
        comers = tl.maximum(parts, tl.cdiv(num_rows, SHARE))
        barrier_wait(counter_ptr, tl.program_id(0) == 0, comers, start < num_rows)
    else:
        start, step = tl.where(is_last_done(counter_ptr, parts), 0, ROWS), SHARE
    for first in range(start, num_rows, step):
        shared = first + tl.arange(0, SHARE)
        top = tl.full((SHARE,), -1e30, tl.float32)
        total = tl.zeros((SHARE,), tl.float32)
        merged = tl.zeros((SHARE, BLOCK_D), tl.float32)
        for begin in range(0, parts, AT_ONCE):
            for index in tl.static_range(AT_ONCE):
                there = shared < tl.where(begin + index < parts, num_rows, 0)
                cells = (begin + index) * ROWS + shared
                lse = tl.load(partial_lse_ptr + cells, mask=there, other=-1e30, cache_modifier=".cg")
                cells = cells[:, None] * BLOCK_D + dims[None, :]
                result = tl.load(partial_ptr + cells, mask=there[:, None], other=0.0, cache_modifier=".cg")
                new_top = tl.maximum(top, lse)
                weight, rescale = tl.exp2(lse - new_top), tl.exp2(top - new_top)
                total = total * rescale + weight
                merged = merged * rescale[:, None] + result * weight[:, None]
                top = new_top
        merged = merged / total[:, None]
        lse = top + tl.log2(total)
        _store(out_ptr, lse_ptr, merged, lse, request, N, head, first_row, shared, num_rows, G, D, BLOCK_D, GROUP)


@triton.jit
def _store(
    out_ptr, lse_ptr, result, log_sum, request, N, head, first_row, row, num_rows,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """result (R, BLOCK_D) and log_sum (R,) are those of the tile's rows `row` (R,); the first num_rows are stored."""
    dims = tl.arange(0, BLOCK_D)
    out_row = _row_of(request, N, head, first_row + row, G, GROUP)
    kept = row < num_rows
    cells = out_row.to(tl.int64)[:, None] * D + dims[None, :]
    tl.store(out_ptr + cells, result.to(out_ptr.dtype.element_ty), mask=kept[:, None] & (dims < D)[None, :])
    if lse_ptr is not None:
        tl.store(lse_ptr + out_row, log_sum * 0.6931471805599453, mask=kept)


@triton.jit
def _row_of(request, N, head, row, G: tl.constexpr, GROUP: tl.constexpr):
    """Of q and the result: queries by request, node, head. Row = node * GROUP + head within the group."""
    return (request * N + row // GROUP) * (G * GROUP) + head * GROUP + row % GROUP
