// How the row-owning kernels (forward, dQ) walk: a block of four warps takes `chunk` positions of one sequence and one
// group of heads, TILE positions at a time. A tile is 128 rows (positions x heads); each warp owns 32 of them. Keys lie in
// a ring of 16-key blocks in shared memory: every step adds the new ones and the products run over the ring in place.
// Everything is aligned to the start of the sequence, so a sequence's bits do not depend on what it is packed with.
#pragma once
#include "rows.cuh"

constexpr int NEW = TILE / 16;                      // key blocks a tile adds
constexpr int HALO = (WINDOW - 1 + 15) / 16;        // key blocks before the tile
constexpr int BLOCKS = HALO + NEW;                  // key blocks a tile sees
constexpr int RING = BLOCKS + NEW;                  // with those of the next tile on their way
constexpr u32 BLOCK_BYTES = 16 * ROW_BYTES, RING_BYTES = RING * BLOCK_BYTES;

// Key blocks [from, to), counted from the sequence's start, into their ring slots.
__device__ __forceinline__ void load_keys(u32 ring, const bf16* k, const bf16* v, const Item& item, int from, int to,
                                          int kv_heads, int kv_head, int thread) {
    constexpr int PASS = THREADS / CHUNKS;          // rows that the block copies at once
    const int row = thread / CHUNKS, c = thread % CHUNKS;
    const u32 target = ring + chunk_address(row % 16, c);
    for (int block = from + row / 16; block < to; block += PASS / 16) {
        const int p = item.start + block * 16 + row % 16;
        const long long source = ((long long)p * kv_heads + kv_head) * D + c * 8;
        const u32 slot = target + block % RING * BLOCK_BYTES;
        copy16(slot, k + source, p < item.end);
        copy16(slot + RING_BYTES, v + source, p < item.end);
    }
}
// Ring slot of a tile's block b, given that of its block 0.
__device__ __forceinline__ u32 slot_offset(int slot0, int b) {
    const int slot = slot0 + b;
    return (slot < RING ? slot : slot - RING) * BLOCK_BYTES;
}
// Whether block b of a tile can hold a key that some row of the tile must not see: too late, or too early.
__device__ constexpr bool too_late(int b) { return b >= HALO; }
__device__ constexpr bool too_early(int b) { return (b - HALO) * 16 <= TILE - 1 - WINDOW; }
// Whether this warp's positions see anything of block b (always, when a tile is as long as a key block).
__device__ __forceinline__ bool concerns(int b, int warp) {
    if constexpr (NEW == 1) return true;
    const int first = warp * (TILE / 4), last = first + TILE / 4 - 1, key = (b - HALO) * 16;
    return key <= last && key + 15 > first - WINDOW;
}
// ahead: the row's position minus this lane's first column, both counted from the tile; key: the block's column less that.
__device__ __forceinline__ bool visible(int b, int ahead, int key) {
    return (!too_late(b) || key <= ahead) && (!too_early(b) || key > ahead - WINDOW);
}
