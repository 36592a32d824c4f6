// How the window's kernels that own query rows (forward and dQ) hold their keys.
//
// A block takes CHUNK consecutive positions of one sequence for one group of heads, and loads every
// key that these see, K and V, into shared memory once. Its tiles of 64 rows (TILE positions) then
// pass one after the other, without a wait for keys.
//
//     keys in shared memory, from position first - HALO on (first: the chunk's first position)
//     |<------- HALO ------->|<----------- CHUNK ----------->|
//     |SKIP|                  tile 0  tile 1  ...
//          |<- STEP ->|<- STEP ->|<- STEP ->|                    what tile 0 multiplies with
//                  |<- STEP ->|<- STEP ->|<- STEP ->|            what tile 1 does, TILE further on
//
// All of it is aligned to the start of the sequence and not of the pack: a sequence's rows meet the
// same keys in the same products whatever it is packed with, so its results have the same bits.
#pragma once
#include "query_tile.cuh"
#include "warpgroup.cuh"

constexpr int BLOCKS_PER_SM = 3;  // resident on a multiprocessor: 168 registers per thread

// Keys held before the chunk: the WINDOW - 1 that its first position sees, rounded up.
constexpr int HALO = (WINDOW - 1 + 15) / 16 * 16;

// Of these, the first ones that not even a tile's first position sees because of the rounding.
// Eight or none: a descriptor points at multiples of eight rows.
constexpr int SKIP = (HALO - WINDOW + 1) / 8 * 8;

// Keys of one product, and how many such a tile needs for the keys that it sees. A row's scores of
// all steps are in registers at once in the forward pass, so window.py takes windows up to three
// steps.
constexpr int STEP = 48;
constexpr int STEPS = (HALO - SKIP + TILE + STEP - 1) / STEP;

// Keys held: the halo and the chunk, or as far as the last tile's last step reaches.
constexpr int LAST_STEP_END = (CHUNK - TILE + SKIP + STEPS * STEP + 7) / 8 * 8;
constexpr int RESIDENT_KEYS = LAST_STEP_END > HALO + CHUNK ? LAST_STEP_END : HALO + CHUNK;
constexpr u32 RESIDENT_BYTES = RESIDENT_KEYS * ROW_BYTES;

// Begin to copy K, and V behind it; zeros outside the sequence.
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

// -- which keys a row sees ------------------------------------------------------------------------

// How many keys a row at position p sees, itself included. With distance = p - key, the test
// (u32)distance < reach also excludes later keys, whose distance is negative and thus a huge u32.
__device__ __forceinline__ u32 visible_reach(const Item& item, int p) {
    return min(WINDOW, p - item.start + 1);
}

// For a tile whose keys are all in the sequence ("interior"), what is known at compile time about
// eight columns, `column` to `column` + 7 of all its steps: whether every row of the tile sees
// them, or none does. Then no element needs a test.
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
