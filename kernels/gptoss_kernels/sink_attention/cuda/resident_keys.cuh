// Keys in shared memory, for the window kernels whose blocks own query rows (forward and dQ).
//
// A block processes CHUNK consecutive positions of one sequence for one group of heads. It loads K
// and V of all keys in their windows into shared memory once. It then processes its tiles of 64
// rows (TILE positions) in sequence, without waiting for keys.
//
//     keys in shared memory, from position first - HALO on (first: the chunk's first position)
//     |<------- HALO ------->|<----------- CHUNK ----------->|
//     |SKIP|                  tile 0  tile 1  ...
//          |<- STEP ->|<- STEP ->|<- STEP ->|                    keys of tile 0
//                  |<- STEP ->|<- STEP ->|<- STEP ->|            keys of tile 1, TILE further
//
// Chunks, tiles and steps are aligned to the start of the sequence, not of the packed row. The
// results of a sequence are therefore bitwise independent of the other sequences in the row.
#pragma once
#include "query_tile.cuh"
#include "warpgroup.cuh"

constexpr int BLOCKS_PER_SM = 3;  // resident on a multiprocessor: 168 registers per thread

// Keys held before the chunk: the WINDOW - 1 that its first position sees, rounded up.
constexpr int HALO = (WINDOW - 1 + 15) / 16 * 16;

// Keys at the start of the halo that are outside the window of a tile's first position, because of
// the rounding. 8 or 0, because a descriptor needs a multiple of eight rows.
constexpr int SKIP = (HALO - WINDOW + 1) / 8 * 8;

// Keys per product, and number of products for the keys of a tile. The forward pass holds the
// scores of all steps in registers, so window.py supports windows of up to three steps.
constexpr int STEP = 48;
constexpr int STEPS = (HALO - SKIP + TILE + STEP - 1) / STEP;

// Keys in shared memory: halo and chunk, or up to the end of the last step of the last tile.
constexpr int LAST_STEP_END = (CHUNK - TILE + SKIP + STEPS * STEP + 7) / 8 * 8;
constexpr int RESIDENT_KEYS = LAST_STEP_END > HALO + CHUNK ? LAST_STEP_END : HALO + CHUNK;
constexpr u32 RESIDENT_BYTES = RESIDENT_KEYS * ROW_BYTES;

// Start to copy K, and V after it. Keys outside the sequence are 0.
__device__ __forceinline__ void load_resident_keys(u32 keys, const bf16* k, const bf16* v,
                                                   const Work& work) {
    constexpr int PASS = THREADS / CHUNKS;  // keys that the block copies at once
    const int row = work.thread / CHUNKS;
    const int c = work.thread % CHUNKS;
    const Item& item = work.item;
    const int first_key = item.first - HALO + row;
    const u32 target = keys + chunk_address(row, c);
    const long long source = ((long long)first_key * work.kv_heads + work.kv_head) * D + c * 8;
#pragma unroll 4
    for (int r = 0; r < RESIDENT_KEYS; r += PASS) {
        const int p = first_key + r;
        const bool inside = p >= item.start && p < item.end;
        const long long element = source + (long long)r * work.kv_heads * D;
        if (RESIDENT_KEYS % PASS == 0 || row + r < RESIDENT_KEYS) {
            cp_async_16(target + r * ROW_BYTES, k + element, inside);
            cp_async_16(target + r * ROW_BYTES + RESIDENT_BYTES, v + element, inside);
        }
    }
}

// -- keys in the window of a row ------------------------------------------------------------------

// Return the number of keys that a row at position p attends to, including itself. With distance =
// p - key, the test (u32)distance < reach also excludes later keys, because their negative distance
// is a huge number as u32.
__device__ __forceinline__ u32 visible_reach(const Item& item, int p) {
    return min(WINDOW, p - item.start + 1);
}

// In an interior tile, all keys are in the sequence. The next functions tell at compile time if the
// eight columns from `column` on are in the windows of all rows of the tile, or of none. Their
// elements then need no test.
constexpr int FIRST_KEY = SKIP - HALO;  // the key of column 0, from the tile's first position on

__device__ constexpr bool all_rows_see(int column) {
    const int first = FIRST_KEY + column;
    const bool not_after_first_row = first + 7 <= 0;
    const bool in_window_of_last_row = first > TILE - 1 - WINDOW;
    return not_after_first_row && in_window_of_last_row;
}

__device__ constexpr bool no_row_sees(int column) {
    const int first = FIRST_KEY + column;
    const bool after_last_row = first >= TILE;
    const bool before_window_of_first_row = first + 7 <= -WINDOW;
    return after_last_row || before_window_of_first_row;
}
