// How the row-owning kernels (forward, dQ) walk: a block of four warps takes CHUNK positions of one sequence and one
// group of heads, TILE positions at a time. A tile is 128 rows (positions x heads); each warp owns 32 of them. Keys lie in
// a ring of 16-key blocks in shared memory: every step adds the new ones and the products run over the ring in place.
// Everything is aligned to the start of the sequence, so a sequence's bits do not depend on what it is packed with.
#pragma once
#include "tile.cuh"

constexpr int ROWS = 128, THREADS = 128;
constexpr int TILE = ROWS / GROUP;                  // positions of a tile
constexpr int NEW = TILE / 16;                      // key blocks a tile adds
constexpr int HALO = (WINDOW - 1 + 15) / 16;        // key blocks before the tile
constexpr int BLOCKS = HALO + NEW;                  // key blocks a tile sees
constexpr int RING = BLOCKS + NEW;                  // with those of the next tile on their way
constexpr int HEADS_PER_KV = GROUP * GROUPS;

struct Item { int start, end, first, unused; };     // sequence [start, end), this block's first position

__device__ __forceinline__ int tile_position(int row) { return row / GROUP; }

__device__ __forceinline__ void load_rows(bf16* tile, const bf16* x, int p0, int end, int heads, int head0, int thread) {
#pragma unroll
    for (int i = 0; i < ROWS * CHUNKS / THREADS; i++) {
        int index = i * THREADS + thread, row = index / CHUNKS, c = index % CHUNKS;
        int p = p0 + tile_position(row);
        bool inside = p < end;
        copy16(tile + swizzled(row, c), x + ((long long)(inside ? p : p0) * heads + head0 + row % GROUP) * D + c * 8, inside);
    }
}
// Key blocks [from, to), counted from the sequence's start, into their ring slots.
__device__ __forceinline__ void load_keys(bf16* ring_k, bf16* ring_v, const bf16* k, const bf16* v, const Item& item, int from,
                                          int to, int kv_heads, int kv_head, int thread) {
    for (int index = thread; index < (to - from) * 16 * CHUNKS; index += THREADS) {
        int block = from + index / (16 * CHUNKS), row = index / CHUNKS % 16, c = index % CHUNKS;
        int p = item.start + block * 16 + row;
        bool inside = p < item.end;
        long long source = ((long long)(inside ? p : item.start) * kv_heads + kv_head) * D + c * 8;
        int slot = swizzled(block % RING * 16 + row, c);
        copy16(ring_k + slot, k + source, inside);
        copy16(ring_v + slot, v + source, inside);
    }
}
// Whether block b of a tile can hold a key that some row of the tile must not see.
__device__ constexpr bool needs_mask(int b) { return b >= HALO || (b - HALO) * 16 <= TILE - 1 - WINDOW; }
// Whether this warp's positions see anything of block b (always, when a tile is as long as a key block).
__device__ __forceinline__ bool concerns(int b, int warp) {
    if constexpr (NEW == 1) return true;
    int first = warp * (TILE / 4), last = first + TILE / 4 - 1, key = (b - HALO) * 16;
    return key <= last && key + 15 > first - WINDOW;
}
// Hide what the mask hides. x[e]: rows row and row + 8, columns column and column + 1 of block b.
__device__ __forceinline__ bool visible(int row, int key) { return (u32)(tile_position(row) - key) < (u32)WINDOW; }

// 32 rows of this warp from shared memory to x.
__device__ __forceinline__ void store_rows(bf16* x, const bf16* tile, int p0, int end, int heads, int head0, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        int index = i * 32 + lane, row = warp * 32 + index / CHUNKS, c = index % CHUNKS;
        int p = p0 + tile_position(row);
        if (p < end)
            *(uint4*)(x + ((long long)p * heads + head0 + row % GROUP) * D + c * 8) = *(const uint4*)(tile + swizzled(row, c));
    }
}
