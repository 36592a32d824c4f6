// How the row-owning kernels (forward, dQ) walk: a block of four warps takes `chunk` positions of one sequence and one
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
constexpr u32 BLOCK_BYTES = 16 * ROW_BYTES, RING_BYTES = RING * BLOCK_BYTES, TILE_BYTES = ROWS * ROW_BYTES;

struct Item { int start, end, first, unused; };     // sequence [start, end), this block's first position

// The 32 rows of a tile that belong to this warp; SPAN rows at a time, 16 bytes per lane.
constexpr int SPAN = 32 / CHUNKS;
struct WarpRows {
    u32 shared;                                     // byte offset in a shared tile
    long long element;                              // element offset in a [tokens, heads, D] tensor, for position 0
    int position;
    __device__ WarpRows(int heads, int head0, int warp, int lane) {
        const int row = lane / CHUNKS, c = lane % CHUNKS;
        shared = warp * 32 * ROW_BYTES + chunk_address(row, c);
        position = warp * (32 / GROUP) + row / GROUP;
        element = ((long long)position * heads + head0 + row % GROUP) * D + c * 8;
    }
    __device__ __forceinline__ u32 address(u32 tile, int i) const {
        return ((tile + shared) ^ (swizzle(i * SPAN) << 4)) + i * SPAN * ROW_BYTES;
    }
    __device__ __forceinline__ long long source(int p0, int i, int heads) const {
        return element + ((long long)(p0 + i * SPAN / GROUP) * heads + i * SPAN % GROUP) * D;
    }
    __device__ __forceinline__ bool inside(int p0, int i, int end) const { return p0 + position + i * SPAN / GROUP < end; }
    __device__ __forceinline__ void load(u32 tile, const bf16* x, int p0, int end, int heads) const {
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) copy16(address(tile, i), x + source(p0, i, heads), inside(p0, i, end));
    }
    __device__ __forceinline__ void store(bf16* x, u32 tile, int p0, int end, int heads) const {
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            const uint4 value = shared_load16(address(tile, i));
            if (inside(p0, i, end)) *(uint4*)(x + source(p0, i, heads)) = value;
        }
    }
};
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
