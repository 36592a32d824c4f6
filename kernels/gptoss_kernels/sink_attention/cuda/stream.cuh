// How the row-owning kernels of full attention (forward, dQ) walk: a block of four warps takes one tile of 64 rows, and the
// keys that its positions see pass, KEYS at a time from the sequence's start. Everything is aligned to that start. The
// forward pass copies with KeyStream, dQ by TMA.
#pragma once
#include "rows.cuh"
#include "warpgroup.cuh"

constexpr int KEYS = 64;
constexpr u32 KEY_BYTES = KEYS * ROW_BYTES, STAGE_BYTES = 2 * KEY_BYTES;

constexpr int STAGES = 3;                           // of KeyStream: one is used up late, one is on its way
struct KeyStream {
    const bf16 *k, *v;                              // this thread's first 16 bytes
    u32 target;
    int row, count, steps, next = 0, stage = 0;
    long long stride;                               // of a position, in elements
    __device__ KeyStream(u32 stages, const bf16* k, const bf16* v, const Place& at)
        : row(at.thread / CHUNKS), count(min(at.item.first + TILE, at.item.end) - at.item.start),
          stride((long long)at.kv_heads * D) {
        const long long source = (at.item.start + row) * stride + at.kv_head * D + at.thread % CHUNKS * 8;
        this->k = k + source;
        this->v = v + source;
        target = stages + chunk_address(row, at.thread % CHUNKS);
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
// Scores of KEYS keys from `key0` on that lie behind this lane's rows become `value`.
__device__ __forceinline__ void hide_later(float (&x)[8][4], float value, int row_position, int key0, int lane) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int distance = row_position + h * 8 / GROUP - key0 - 2 * (lane & 3);
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (j * 8 + e > distance) x[j][2 * h + e] = value;
    }
}
