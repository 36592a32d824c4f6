// How Hopper's row-owning kernels (forward, dQ) hold their keys: a block of four warps takes CHUNK positions of one sequence
// and one group of heads, with every key that those positions see in shared memory; tiles of 64 rows pass. Products take
// STEP keys at a time. Everything is aligned to the start of the sequence.
#pragma once
#include "rows.cuh"
#include "warpgroup.cuh"

constexpr int RESIDENT = 3;                                    // blocks per multiprocessor
constexpr int HALO = (WINDOW - 1 + 15) / 16 * 16;              // keys held before the chunk
constexpr int SKIP = (HALO - WINDOW + 1) / 8 * 8;              // of those, invisible to a tile's first position
constexpr int STEP = 48;                                       // keys of a product
constexpr int STEPS = (HALO - SKIP + TILE + STEP - 1) / STEP;
constexpr int HELD = (CHUNK - TILE + SKIP + STEPS * STEP + 7) / 8 * 8 > HALO + CHUNK
                         ? (CHUNK - TILE + SKIP + STEPS * STEP + 7) / 8 * 8 : HALO + CHUNK;
constexpr u32 HELD_BYTES = HELD * ROW_BYTES;

// The chunk's keys and values; zeros outside the sequence.
__device__ __forceinline__ void hold_keys(u32 keys, const bf16* k, const bf16* v, const Place& at) {
    constexpr int PASS = THREADS / CHUNKS;                 // keys that the block copies at once
    const int row = at.thread / CHUNKS, c = at.thread % CHUNKS;
    const Item& item = at.item;
    const u32 target = keys + chunk_address(row, c);
    const long long source = ((long long)(item.first - HALO + row) * at.kv_heads + at.kv_head) * D + c * 8;
#pragma unroll 4
    for (int r = 0; r < HELD; r += PASS) {
        const int p = item.first - HALO + row + r;
        const bool inside = p >= item.start && p < item.end;
        const long long ahead = source + (long long)r * at.kv_heads * D;
        if (HELD % PASS == 0 || row + r < HELD) {
            copy16(target + r * ROW_BYTES, k + ahead, inside);
            copy16(target + r * ROW_BYTES + HELD_BYTES, v + ahead, inside);
        }
    }
}
// A row at position p sees the keys less than `reach` behind it.
__device__ __forceinline__ u32 reach_of(const Item& item, int p) { return min(WINDOW, p - item.start + 1); }
// Of a tile's columns `at` to `at` + 7 (of all its steps), where no key lies before the sequence: those that every row
// sees, and those that none does.
constexpr int FIRST = SKIP - HALO;                             // of column 0's key, counted from the tile's first position
__device__ constexpr bool all_see(int at) { return FIRST + at + 7 <= 0 && FIRST + at > TILE - 1 - WINDOW; }
__device__ constexpr bool none_sees(int at) { return FIRST + at >= TILE || FIRST + at + 7 <= -WINDOW; }
