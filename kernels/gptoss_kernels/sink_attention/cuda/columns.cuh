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
// The rows of a step on their way, from this thread's sixteen bytes of the first PASS on; zeros after the sequence.
__device__ __forceinline__ void load_rows(u32 target, const bf16* q, const bf16* grad_o, long long pass_stride, int position,
                                          int end, int row) {
#pragma unroll
    for (int i = 0; i < WAVE / PASS; i++) {
        const bool inside = position + row / GROUP + i * (PASS / GROUP) < end;
        copy16(target + i * PASS * ROW_BYTES, q + i * pass_stride, inside);
        copy16(target + i * PASS * ROW_BYTES + WAVE_BYTES, grad_o + i * pass_stride, inside);
    }
}
// The statistics of a step's rows on their way, LSE first: half of the threads copy LSE, half delta.
__device__ __forceinline__ void load_split_stats(u32 target, const float2* row_stats, int position, int head0, int heads,
                                                 int end, int thread) {
    const int p = position + thread % WAVE / GROUP;
    const float2* of_row = row_stats + (long long)p * heads + head0 + thread % GROUP;
    copy4(target + thread * 4, (const float*)of_row + thread / WAVE, p < end);
}
// The items' shares of the sinks' gradient are summed on the side, in a fixed order; add_warps(sum) adds the four warps' sums.
template <class AddWarps> __device__ __forceinline__ void sum_shares(float* grad_sinks, const float* shares, int share_count,
                                                                     int heads, int thread, AddWarps add_warps) {
    for (int head = blockIdx.x; head < heads; head += gridDim.x) {
        float sum = 0.f;
        for (int i = thread; i < share_count; i += THREADS) sum += shares[(long long)i * heads + head];
#pragma unroll
        for (int lanes = 16; lanes; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
        const float whole = add_warps(sum);
        if (thread == 0) grad_sinks[head] = whole;
        __syncthreads();
    }
}
// Where a step's (LSE * log2(e), delta) lie in shared memory, from this lane's columns on: beside each other, or all LSE
// first. Of columns 8j to 8j + 7 of a half a lane has two.
struct PairedStats {
    u32 at;
    __device__ __forceinline__ float4 load(int half, int j) const { return shared_load4f(at + half * 256 + j * 64); }
    __device__ __forceinline__ float2 lse(int half, int j) const {
        const float4 pair = load(half, j);
        return make_float2(pair.x, pair.z);
    }
    __device__ __forceinline__ float2 delta(int half, int j) const {
        const float4 pair = load(half, j);
        return make_float2(pair.y, pair.w);
    }
};
struct SplitStats {
    u32 at;
    __device__ __forceinline__ float2 lse(int half, int j) const { return shared_load2f(at + half * 128 + j * 32); }
    __device__ __forceinline__ float2 delta(int half, int j) const {
        return shared_load2f(at + WAVE * 4 + half * 128 + j * 32);
    }
};
// Scores of a half's columns 8j to 8j + 7 become probabilities. `distance` is from this lane's first key to the position of
// its first column of the step; with a WIDTH, rows before a key, or that far or farther after it, get 0.
constexpr int FULL = 1 << 30;                      // a WIDTH that is never reached
template <int WIDTH, class Stats> __device__ __forceinline__ void column_probabilities(
    float (&x)[8][4], const Stats& stats, int half, int j, float scale_log2, int distance) {
    const float2 lse = stats.lse(half, j);
#pragma unroll
    for (int e = 0; e < 4; e++) {
        float& value = x[half * 4 + j][e];
        value = exp2_approx(fmaf(value, scale_log2, -(e & 1 ? lse.y : lse.x)));
        const int further = (half * 32 + j * 8) / GROUP + (GROUP == 1 ? e & 1 : 0) - (e >> 1) * 8;
        if (WIDTH && (u32)(distance + further) >= (u32)WIDTH) value = 0.f;
    }
}
// All of a half; the second form packs P as a left operand on the way, the third is for a half that sees nothing.
template <int WIDTH, class Stats> __device__ __forceinline__ void half_probabilities(
    float (&x)[8][4], const Stats& stats, int half, float scale_log2, int distance) {
#pragma unroll
    for (int j = 0; j < 4; j++) column_probabilities<WIDTH>(x, stats, half, j, scale_log2, distance);
}
template <int WIDTH, class Stats> __device__ __forceinline__ void half_probabilities(
    float (&x)[8][4], u32 (&packed)[2][4], const Stats& stats, int half, float scale_log2, int distance) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        column_probabilities<WIDTH>(x, stats, half, j, scale_log2, distance);
        pack_columns(packed, j, x[half * 4 + j]);
    }
}
__device__ __forceinline__ void no_probabilities(float (&x)[8][4], u32 (&packed)[2][4], int half) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        packed[j / 2][j % 2 * 2] = packed[j / 2][j % 2 * 2 + 1] = 0;
#pragma unroll
        for (int e = 0; e < 4; e++) x[half * 4 + j][e] = 0.f;
    }
}
// dS = P (dP - delta) of half of a step as a left operand; dp is overwritten.
template <class Stats> __device__ __forceinline__ void column_score_gradients(u32 (&ds)[2][4], const float (&p)[8][4],
                                                                              float (&dp)[4][4], int half, const Stats& stats) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float2 delta = stats.delta(half, j);
#pragma unroll
        for (int e = 0; e < 4; e++) dp[j][e] = p[half * 4 + j][e] * (dp[j][e] - (e & 1 ? delta.y : delta.x));
        pack_columns(ds, j, dp[j]);
    }
}
// P of half of a step as a left operand.
__device__ __forceinline__ void pack_half(u32 (&packed)[2][4], const float (&p)[8][4], int half) {
#pragma unroll
    for (int j = 0; j < 4; j++) pack_columns(packed, j, p[half * 4 + j]);
}
// Accumulated dK (times scale) and dV of this warp's sixteen keys, by way of shared memory that all warps are done with.
__device__ __forceinline__ void store_keys(bf16* grad_k, bf16* grad_v, const float (&dk)[8][4], const float (&dv)[8][4],
                                           float scale, u32 own, const Item& item, int kv_head, int kv_heads, int warp,
                                           int lane) {
    const u32 mine = own + warp * 16 * ROW_BYTES;
    __syncthreads();
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
