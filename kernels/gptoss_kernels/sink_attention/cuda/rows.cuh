// What the row-owning kernels share: how a tile of query rows is laid out and moved. A tile is ROWS rows, positions x
// heads of one kv head; each of four warps owns a quarter and moves it by itself.
#pragma once
#include "tile.cuh"

constexpr int ROWS = 64;
constexpr int THREADS = 128, WARP_ROWS = ROWS / 4;
constexpr int TILE = ROWS / GROUP;                  // positions of a tile
constexpr int HEADS_PER_KV = GROUP * GROUPS;
constexpr u32 TILE_BYTES = ROWS * ROW_BYTES;

struct Item { int start, end, first, unused; };     // sequence [start, end), this block's first position

// This warp's rows of a tile; SPAN rows at a time, 16 bytes per lane.
constexpr int SPAN = 32 / CHUNKS, PASSES = WARP_ROWS / SPAN;
struct WarpRows {
    u32 shared;                                     // byte offset in a shared tile
    long long element;                              // element offset in a [tokens, heads, D] tensor, for position 0
    int position;
    __device__ WarpRows(int heads, int head0, int warp, int lane) {
        const int row = lane / CHUNKS, c = lane % CHUNKS;
        shared = warp * WARP_ROWS * ROW_BYTES + chunk_address(row, c);
        position = warp * (WARP_ROWS / GROUP) + row / GROUP;
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
        for (int i = 0; i < PASSES; i++) copy16(address(tile, i), x + source(p0, i, heads), inside(p0, i, end));
    }
    __device__ __forceinline__ void store(bf16* x, u32 tile, int p0, int end, int heads) const {
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
            const uint4 value = shared_load16(address(tile, i));
            if (inside(p0, i, end)) *(uint4*)(x + source(p0, i, heads)) = value;
        }
    }
};
