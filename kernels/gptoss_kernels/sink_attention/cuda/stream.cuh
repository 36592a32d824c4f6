// How the row-owning kernels of full attention (forward, dQ) walk: a block of four warps takes one tile of 64 rows, and the
// keys that its positions see pass, KEYS at a time from the sequence's start. Everything is aligned to that start.
#pragma once
#include "rows.cuh"
#include "warpgroup.cuh"

constexpr int KEYS = 64, STAGES = 3;                // of which one is used up late and one is on its way
constexpr u32 KEY_BYTES = KEYS * ROW_BYTES, STAGE_BYTES = 2 * KEY_BYTES;

struct KeyStream {
    const bf16 *k, *v;                              // this thread's first 16 bytes
    u32 target;
    int row, count, steps, next = 0, stage = 0;
    long long stride;                               // of a position, in elements
    __device__ KeyStream(u32 stages, const bf16* k, const bf16* v, const Item& item, int kv_heads, int kv_head, int thread)
        : row(thread / CHUNKS), count(min(item.first + TILE, item.end) - item.start), stride((long long)kv_heads * D) {
        const long long source = (item.start + row) * stride + kv_head * D + thread % CHUNKS * 8;
        this->k = k + source;
        this->v = v + source;
        target = stages + chunk_address(row, thread % CHUNKS);
        steps = (count + KEYS - 1) / KEYS;
    }
    // The next keys and values on their way to the next stage; zeros after the tile's last position.
    __device__ __forceinline__ void fetch() {
        constexpr int PASS = THREADS / CHUNKS;
        if (next < steps) {
#pragma unroll
            for (int i = 0; i < KEYS; i += PASS) {
                const bool inside = next * KEYS + i + row < count;
                copy16(target + stage * STAGE_BYTES + i * ROW_BYTES, k + i * stride, inside);
                copy16(target + stage * STAGE_BYTES + i * ROW_BYTES + KEY_BYTES, v + i * stride, inside);
            }
            k += KEYS * stride;
            v += KEYS * stride;
            next++;
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        commit();
    }
};
