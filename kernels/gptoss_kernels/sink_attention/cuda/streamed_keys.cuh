// Keys of full attention, for the kernels whose blocks own query rows (forward and dQ).
//
// A block processes one tile of 64 rows. The keys up to its positions pass through shared memory,
// KEYS per step. Step t starts at key start + t * KEYS. Steps are counted from the start of the
// sequence, so results do not depend on the other sequences in the row.
//
// The forward pass copies with KeyStream (cp.async), dQ with TMA (tma.cuh).
#pragma once
#include "query_tile.cuh"
#include "warpgroup.cuh"

constexpr int KEYS = 64;
constexpr u32 KEY_BYTES = KEYS * ROW_BYTES;
constexpr u32 STAGE_BYTES = 2 * KEY_BYTES;  // K, then V

// Stages of KeyStream. Three are needed: while step t is computed, step t + 1 is copied, and the
// product P V of step t - 1 may still run.
constexpr int STAGES = 3;

struct KeyStream {
    const bf16 *k, *v;  // this thread's next 16 bytes
    u32 target;         // address of this thread's first 16 bytes in stage 0
    int row;            // first key of a step that this thread copies
    int count;          // keys up to the last position of the tile
    int steps;
    int next = 0;       // step to be fetched
    int stage = 0;      // stage of this step
    long long stride;   // elements from one position to the next

    __device__ KeyStream(u32 stages, const bf16* k, const bf16* v, const Work& work)
        : row(work.thread / CHUNKS),
          count(min(work.item.first + TILE, work.item.end) - work.item.start),
          stride((long long)work.kv_heads * D) {
        const int c = work.thread % CHUNKS;
        const long long source = (work.item.start + row) * stride + work.kv_head * D + c * 8;
        this->k = k + source;
        this->v = v + source;
        target = stages + chunk_address(row, c);
        steps = (count + KEYS - 1) / KEYS;
    }

    // Start to copy the next step, if there is one. Keys after the last position of the tile are 0.
    // Always commit a group, so that the number of groups is the number of steps.
    __device__ __forceinline__ void fetch() {
        constexpr int PASS = THREADS / CHUNKS;  // keys that the block copies at once
        if (next < steps) {
            const u32 to = target + stage * STAGE_BYTES;
#pragma unroll
            for (int i = 0; i < KEYS; i += PASS) {
                const bool inside = next * KEYS + i + row < count;
                cp_async_16(to + i * ROW_BYTES, k + i * stride, inside);
                cp_async_16(to + i * ROW_BYTES + KEY_BYTES, v + i * stride, inside);
            }
            k += KEYS * stride;
            v += KEYS * stride;
            next++;
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        cp_async_commit();
    }
};

// Set elements whose key is after the position of their row to `value`. key0 is the first key of
// the step, and row_position the position of this lane's upper row.
__device__ __forceinline__ void mask_later_keys(float (&x)[8][4], float value, int row_position,
                                                int key0, int lane) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        // Distance from this lane's first column to the last column that is not masked.
        const int distance = row_position + h * ROW_DISTANCE - key0 - 2 * (lane & 3);
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (j * 8 + e > distance) x[j][2 * h + e] = value;
    }
}
