"""Builds the inputs of a decode step on the device, from one packed copy of what the host knows.

The buffers are those that a captured graph reads. A token that the host has not read yet is named by -1 - its
row in the last draw.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["num_rows", "packed_row", "width", "skip"])
def _lay_out(
    token_ids,
    positions,
    seq_lens,
    slot_offsets,
    slot_blocks,
    tables,
    packed,
    last_ids,
    num_rows,
    packed_row,
    skip,
    width,
    table_row,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    if row < num_rows:
        own = packed + row * packed_row
        token = tl.load(own)
        seq_len = tl.load(own + 1)
        position = seq_len - 1
        if token < 0:
            tl.store(token_ids + row, tl.load(last_ids - 1 - token))
        else:
            tl.store(token_ids + row, token.to(tl.int64))
        tl.store(positions + row, position.to(tl.int64))
        tl.store(seq_lens + row, seq_len.to(tl.int64))
        tl.store(slot_offsets + row, (position % BLOCK_SIZE).to(tl.int64))
        tl.store(slot_blocks + row, tl.load(own + skip + position // BLOCK_SIZE).to(tl.int64))
        for start in range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            entry = tl.load(own + skip + at, mask=at < width, other=0)
            tl.store(tables + row.to(tl.int64) * table_row + at, entry, mask=at < width)
    else:
        nothing = tl.full([], 0, tl.int64)
        tl.store(token_ids + row, nothing)
        tl.store(positions + row, nothing)
        tl.store(seq_lens + row, nothing)
        tl.store(slot_offsets + row, nothing)
        tl.store(slot_blocks + row, nothing - 1)


def lay_out(
    token_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    slot_offsets: Tensor,
    slot_blocks: Tensor,
    tables: Tensor,
    packed: Tensor,
    last_ids: Tensor,
    skip: int,
    width: int,
    block_size: int,
) -> None:
    """Fill the buffers [rows] and tables [rows, W] of one layer group from packed [used, 3 + widths] int32.

    A packed row is its token (or -1 - its row in last_ids [R]), its length with that token, the block tables
    of all groups, and its adapter; this group's table begins at `skip` and is `width` long. Rows beyond those
    used get length 0 and block -1.
    """
    _lay_out[(len(token_ids),)](
        token_ids,
        positions,
        seq_lens,
        slot_offsets,
        slot_blocks,
        tables,
        packed,
        last_ids,
        len(packed),
        packed.stride(0),
        skip,
        width,
        tables.stride(0),
        BLOCK_SIZE=block_size,
        BLOCK=128,
        num_warps=4,
    )
