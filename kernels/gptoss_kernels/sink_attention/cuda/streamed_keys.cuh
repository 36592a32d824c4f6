// How the kernels of full attention that own query rows (forward and dQ) meet their keys.
//
// A block takes one tile of 64 rows. The keys that its positions see pass through shared memory,
// KEYS at a time and from the sequence's start: step t is keys start + t * KEYS on. As this is
// counted from the start of the sequence, its results do not depend on what it is packed with.
//
// The forward pass copies with KeyStream (cp.async), dQ by TMA (tma.cuh).
#pragma once
#include "query_tile.cuh"
#include "warpgroup.cuh"

constexpr int KEYS = 64;
constexpr u32 KEY_BYTES = KEYS * ROW_BYTES;
constexpr u32 STAGE_BYTES = 2 * KEY_BYTES;  // K, then V

// Stages of KeyStream. While step t is computed, step t + 1 is on its way, and the product P V of
// step t - 1 may still be running: three stages.
constexpr int STAGES = 3;

struct KeyStream {
    const bf16 *k, *v;  // this thread's next 16 bytes
    u32 target;         // where its first 16 bytes go in stage 0
    int row;            // its first key of a step
    int count;          // keys that the tile sees, up to its last position
    int steps;
    int next = 0;       // step to be fetched
    int stage = 0;      // and the stage that it goes to
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

    // Begin to copy the next step, if there is one; zeros after the tile's last position. Commits a
    // group in any case, so that counting groups counts steps.
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

// Replace the elements of a step whose key comes after their row's position. The step's keys begin
// at position key0, this lane's upper row is at row_position.
__device__ __forceinline__ void mask_later_keys(float (&x)[8][4], float value, int row_position,
                                                int key0, int lane) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        // from this lane's first column to the last one that the row sees
        const int distance = row_position + h * ROW_DISTANCE - key0 - 2 * (lane & 3);
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (j * 8 + e > distance) x[j][2 * h + e] = value;
    }
}
