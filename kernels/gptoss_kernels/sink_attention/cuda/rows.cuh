// What the row-owning kernels share: how a tile of query rows is laid out and moved. A tile is ROWS rows, positions x
// heads of one kv head; each of four warps owns a quarter and moves it by itself.
#pragma once
#include "tile.cuh"

constexpr int ROWS = 64;
constexpr int WARP_ROWS = ROWS / 4;
constexpr int TILE = ROWS / GROUP;                  // positions of a tile
constexpr int HEADS_PER_KV = GROUP * GROUPS;
constexpr u32 TILE_BYTES = ROWS * ROW_BYTES;

struct Item { int start, end, first, unused; };     // sequence [start, end), this block's first position

// Where a thread of a row-owning kernel works. Of a tile's accumulators its lane holds two rows of head `row_head`, at
// `row_position` and 8 / GROUP on, counted from the tile's first position.
struct Place {
    int thread, warp, lane, number, head0, kv_head, kv_heads, row_position, row_head;
    Item item;
    __device__ Place(const Item* items, int heads) : thread(threadIdx.x), warp(thread >> 5), lane(thread & 31) {
        const int groups = heads / GROUP, group = blockIdx.x % groups;
        number = blockIdx.x / groups;
        item = items[number];
        head0 = group * GROUP;
        kv_head = group / GROUPS;
        kv_heads = heads / HEADS_PER_KV;
        row_position = warp * (WARP_ROWS / GROUP) + (lane >> 2) / GROUP;
        row_head = head0 + (lane >> 2) % GROUP;
    }
};

// This warp's rows of a tile; SPAN rows at a time, 16 bytes per lane.
constexpr int SPAN = 32 / CHUNKS, PASSES = WARP_ROWS / SPAN;
struct WarpRows {
    u32 shared;                                     // byte offset in a shared tile
    long long element;                              // element offset in a [tokens, heads, D] tensor, for position 0
    int position;
    __device__ WarpRows(int heads, const Place& at) {
        const int row = at.lane / CHUNKS, c = at.lane % CHUNKS;
        shared = at.warp * WARP_ROWS * ROW_BYTES + chunk_address(row, c);
        position = at.warp * (WARP_ROWS / GROUP) + row / GROUP;
        element = ((long long)position * heads + at.head0 + row % GROUP) * D + c * 8;
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
};
// Accumulated rows, times a factor each, to a [tokens, heads, D] tensor: 64 bytes of a row per four lanes.
__device__ __forceinline__ void store_rows(bf16* x, const float (&c)[CHUNKS][4], const float (&factors)[2], int position,
                                           int head, int end, int heads, int lane) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int p = position + h * 8 / GROUP;
        uint4* target = (uint4*)(x + ((long long)p * heads + head) * D) + (lane & 3);
#pragma unroll
        for (int n = 0; n < CHUNKS; n += 4) {
            u32 word[4];
#pragma unroll
            for (int i = 0; i < 4; i++) word[i] = pack(c[n + i][2 * h] * factors[h], c[n + i][2 * h + 1] * factors[h]);
            transpose_quad(word, lane);
            if (p < end) target[n] = make_uint4(word[0], word[1], word[2], word[3]);
        }
    }
}
// LSE * log2(e) of this lane's two rows; outside the sequence infinite, so that their probabilities are 0.
__device__ __forceinline__ void load_lse(float (&row_lse)[2], const float* lse, int position, int head, int end, int heads) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int p = position + h * 8 / GROUP;
        row_lse[h] = p < end ? lse[(long long)p * heads + head] * LOG2E : infinity();
    }
}
// LSE of this lane's two rows, from the highest score * log2(e) and the sum of what it is over 2 to.
__device__ __forceinline__ void store_lse(float* lse, const float (&highest)[2], const float (&sum)[2], int position, int head,
                                          int end, int heads, int lane) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int p = position + h * 8 / GROUP;
        if ((lane & 3) == 0 && p < end) lse[(long long)p * heads + head] = (highest[h] + log2_approx(sum[h])) * LN2;
    }
}
// (LSE * log2(e), delta) of this lane's two rows, and their part of the sink's gradient.
__device__ __forceinline__ void store_stats(float2* row_stats, float& share, const float (&row_lse)[2],
                                            const float (&delta)[2], float sink, int position, int head, int end, int heads,
                                            int lane) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int p = position + h * 8 / GROUP;
        if (p < end) {
            share -= exp2_approx(sink - row_lse[h]) * delta[h];
            if ((lane & 3) == 0) row_stats[(long long)p * heads + head] = make_float2(row_lse[h], delta[h]);
        }
    }
}
// Scores become probabilities.
__device__ __forceinline__ void row_probabilities(float (&x)[8][4], float scale_log2, const float (&row_lse)[2]) {
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) x[j][e] = exp2_approx(fmaf(x[j][e], scale_log2, -row_lse[e >> 1]));
}
// The sums of P dP of this lane's two rows,
__device__ __forceinline__ void add_products(float (&sum)[2], const float (&p)[6][4], const float (&dp)[6][4]) {
#pragma unroll
    for (int j = 0; j < 6; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) sum[e >> 1] = fmaf(p[j][e], dp[j][e], sum[e >> 1]);
}
// and of more keys at a time in four chains that do not wait for each other.
__device__ __forceinline__ void add_products(float (&sum)[2], const float (&p)[8][4], const float (&dp)[8][4]) {
    float part[4] = {sum[0], 0.f, sum[1], 0.f};
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) part[e] = fmaf(p[j][e], dp[j][e], part[e]);
    sum[0] = part[0] + part[1];
    sum[1] = part[2] + part[3];
}
// dS = P (dP - delta) as a left operand; dp is overwritten.
template <int N> __device__ __forceinline__ void score_gradients(u32 (&ds)[N / 2][4], const float (&p)[N][4], float (&dp)[N][4],
                                                                 const float (&delta)[2]) {
#pragma unroll
    for (int j = 0; j < N; j++) {
#pragma unroll
        for (int e = 0; e < 4; e++) dp[j][e] = p[j][e] * (dp[j][e] - delta[e >> 1]);
        pack_columns(ds, j, dp[j]);
    }
}
// rowsum(dO * O) of this lane's two rows, from tiles in shared memory. It is the diagonal of dO O^T: of the two 8 x 8 blocks
// on it, a row's element is in one lane of its four.
__device__ __forceinline__ void row_deltas(float (&d)[2], u32 tile_grad, u32 tile_out, int warp, int lane) {
    float upper[4] = {}, lower[4] = {};
    const u32 grad_address = tile_grad + warp * WARP_ROWS * ROW_BYTES + lane_rows(lane);
    const u32 out_address = tile_out + warp * WARP_ROWS * ROW_BYTES + lane_columns(lane);
#pragma unroll
    for (int s = 0; s < KSTEPS; s++) {
        u32 grad[4], out[4];
        load4(grad, grad_address ^ (s << 5));
        load4(out, out_address ^ (s << 5));
        multiply(upper, grad, out[0], out[1]);
        multiply(lower, grad, out[2], out[3]);
    }
    const int row = lane >> 2, owner = (lane & ~3) | row >> 1;
    d[0] = __shfl_sync(0xffffffffu, row & 1 ? upper[1] : upper[0], owner);
    d[1] = __shfl_sync(0xffffffffu, row & 1 ? lower[3] : lower[2], owner);
}
// The block's sum for each head of the group, in a fixed order. Lanes 4i (and 4i+1..3, which hold copies) carry head i % GROUP.
__device__ __forceinline__ void sum_shares(float* target, float* shares, float share, int thread) {
    __syncthreads();
    if ((thread & 3) == 0) shares[thread >> 2] = share;
    __syncthreads();
    if (thread < GROUP) {
        float sum = 0.f;
        for (int i = thread; i < 32; i += GROUP) sum += shares[i];
        target[thread] = sum;
    }
}
