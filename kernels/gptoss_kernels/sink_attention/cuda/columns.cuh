// What the kernels that own keys (dK, dV) share. A block of four warps owns KEYS keys of one kv head and one item; rows of Q
// and dO pass, WAVE (positions x heads) at a time.
#pragma once
#include "warpgroup.cuh"

constexpr int KEYS = 64, WAVE = 64;
constexpr int HEADS_PER_KV = GROUP * GROUPS;
constexpr int POSITIONS = WAVE / GROUP;
constexpr u32 OWN_BYTES = KEYS * ROW_BYTES, WAVE_BYTES = WAVE * ROW_BYTES, STAGE_BYTES = 2 * WAVE_BYTES;
constexpr u32 STATS_BYTES = WAVE * 8;              // (LSE * log2(e), delta) of each row
constexpr int PASS = THREADS / CHUNKS;             // rows that the block copies at once
struct Item { int start, end, first, unused; };    // sequence [start, end), this block's first key

// The block's keys and values on their way to shared memory; zeros after the sequence.
__device__ __forceinline__ void load_keys(u32 own_k, u32 own_v, const bf16* k, const bf16* v, const Item& item, int kv_head,
                                          int kv_heads, int thread) {
    const int row = thread / CHUNKS, c = thread % CHUNKS;
    const bf16* source_k = k + ((long long)(item.first + row) * kv_heads + kv_head) * D + c * 8;
    const bf16* source_v = v + (source_k - k);
#pragma unroll
    for (int i = 0; i < KEYS / PASS; i++) {
        const long long ahead = (long long)i * PASS * kv_heads * D;
        const bool inside = item.first + row + i * PASS < item.end;
        copy16(own_k + chunk_address(row, c) + i * PASS * ROW_BYTES, source_k + ahead, inside);
        copy16(own_v + chunk_address(row, c) + i * PASS * ROW_BYTES, source_v + ahead, inside);
    }
}
// This warp's part of the sum, in a fixed order, of the items' shares of a sink's gradient.
__device__ __forceinline__ float sum_shares(const float* shares, int share_count, int head, int heads, int thread) {
    float sum = 0.f;
    for (int i = thread; i < share_count; i += THREADS) sum += shares[(long long)i * heads + head];
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    return sum;
}
// Accumulated dK (times scale) and dV of this warp's sixteen keys, by way of shared memory that nobody reads any more.
__device__ __forceinline__ void store_keys(bf16* grad_k, bf16* grad_v, const float (&dk)[8][4], const float (&dv)[8][4],
                                           float scale, u32 own, const Item& item, int kv_head, int kv_heads, int warp,
                                           int lane) {
    const u32 mine = own + warp * 16 * ROW_BYTES;
    stage(mine, dk, scale, scale, lane);
    stage(mine + OWN_BYTES, dv, 1.f, 1.f, lane);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < CHUNKS / 2; i++) {
        const int r = i * (32 / CHUNKS) + lane / CHUNKS, p = item.first + warp * 16 + r;
        const u32 address = mine + chunk_address(r, lane % CHUNKS);
        if (p < item.end) {
            const long long target = ((long long)p * kv_heads + kv_head) * D + lane % CHUNKS * 8;
            *(uint4*)(grad_k + target) = shared_load16(address);
            *(uint4*)(grad_v + target) = shared_load16(address + OWN_BYTES);
        }
    }
}
