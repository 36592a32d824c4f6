// Layout, copies and reductions of a tile of query rows, for the kernels whose blocks own query
// rows (forward and dQ).
//
// A tile has ROWS rows: TILE consecutive positions times the GROUP heads of a group. Each of the
// four warps owns 16 rows, and loads and stores them itself. Loading therefore needs no barrier
// between warps if only the owner reads the rows. In the accumulators a lane has two rows: rows
// lane / 4 and lane / 4 + 8 of its warp (tile.cuh). GROUP divides 8, so both rows have the same
// head, and their positions differ by 8 / GROUP. They are called "this lane's two rows" below.
#pragma once
#include "tile.cuh"

constexpr int ROWS = 64;
constexpr int WARP_ROWS = ROWS / 4;
constexpr int TILE = ROWS / GROUP;            // positions of a tile
constexpr int ROW_DISTANCE = 8 / GROUP;       // positions from a lane's upper row to its lower one
constexpr int HEADS_PER_KV = GROUP * GROUPS;
constexpr u32 TILE_BYTES = ROWS * ROW_BYTES;

// Positions of one block, in one sequence. window.py:_items creates the table.
struct Item {
    int start, end;  // the sequence is positions [start, end)
    int first;       // the block's first position
    int unused;
};

// Work of a thread. The grid is items times groups of heads. Heads vary fastest, so that blocks
// that run at the same time read the same keys.
struct Work {
    int thread, warp, lane;
    int number;        // of the item
    int head0;         // first head of the group
    int kv_head, kv_heads;
    int row_position;  // of this lane's upper row, from the tile's first position on
    int row_head;      // of both of this lane's rows
    Item item;

    __device__ Work(const Item* items, int heads)
        : thread(threadIdx.x), warp(thread >> 5), lane(thread & 31) {
        const int groups = heads / GROUP;
        const int group = blockIdx.x % groups;
        number = blockIdx.x / groups;
        item = items[number];
        head0 = group * GROUP;
        kv_head = group / GROUPS;
        kv_heads = heads / HEADS_PER_KV;

        const int row = lane >> 2;
        row_position = warp * (WARP_ROWS / GROUP) + row / GROUP;
        row_head = head0 + row % GROUP;
    }
};

// -- moving rows ----------------------------------------------------------------------------------

constexpr int SPAN = 32 / CHUNKS;           // rows that a warp copies at once, 16 bytes per lane
constexpr int PASSES = WARP_ROWS / SPAN;

// Copy of a warp's 16 rows of a tile from global to shared memory. In pass i a lane copies one
// chunk of row i * SPAN + lane / CHUNKS.
struct WarpRows {
    u32 shared;         // byte offset of the lane's first chunk in a shared tile
    long long element;  // its element offset in [tokens, heads, D], for a tile at position 0
    int position;       // its position in the tile

    __device__ WarpRows(int heads, const Work& work) {
        const int row = work.lane / CHUNKS;
        const int c = work.lane % CHUNKS;
        shared = work.warp * WARP_ROWS * ROW_BYTES + chunk_address(row, c);
        position = work.warp * (WARP_ROWS / GROUP) + row / GROUP;
        element = ((long long)position * heads + work.head0 + row % GROUP) * D + c * 8;
    }

    __device__ __forceinline__ u32 address(u32 tile, int i) const {
        return ((tile + shared) ^ (swizzle(i * SPAN) << 4)) + i * SPAN * ROW_BYTES;
    }

    __device__ __forceinline__ long long source(int p0, int i, int heads) const {
        return element + ((long long)(p0 + i * SPAN / GROUP) * heads + i * SPAN % GROUP) * D;
    }

    __device__ __forceinline__ bool inside(int p0, int i, int end) const {
        return p0 + position + i * SPAN / GROUP < end;
    }

    // Start to copy this warp's rows of the tile at position p0. Rows from position `end` on are 0.
    __device__ __forceinline__ void load(u32 tile, const bf16* x, int p0, int end,
                                         int heads) const {
#pragma unroll
        for (int i = 0; i < PASSES; i++)
            cp_async_16(address(tile, i), x + source(p0, i, heads), inside(p0, i, end));
    }
};

// Store this lane's two rows, multiplied by `factors`, in a [tokens, heads, D] tensor.
//
// A lane holds 4 bytes of every chunk of a row. After a transpose within the quad, each of the four
// lanes has one whole chunk, so that the quad writes 64 consecutive bytes.
__device__ __forceinline__ void store_rows(bf16* x, const float (&c)[CHUNKS][4],
                                           const float (&factors)[2], int position, int head,
                                           int end, int heads, int lane) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int p = position + h * ROW_DISTANCE;
        uint4* target = (uint4*)(x + ((long long)p * heads + head) * D) + (lane & 3);
#pragma unroll
        for (int n = 0; n < CHUNKS; n += 4) {
            u32 word[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                word[i] = pack_bf16(c[n + i][2 * h] * factors[h], c[n + i][2 * h + 1] * factors[h]);
            transpose_quad(word, lane);
            if (p < end) target[n] = make_uint4(word[0], word[1], word[2], word[3]);
        }
    }
}

// -- one number per row ---------------------------------------------------------------------------

// Load LSE * log2(e) of this lane's two rows. Outside the sequence it is infinite, so that the
// probabilities of such rows are exp2(-inf) = 0.
__device__ __forceinline__ void load_lse(float (&row_lse)[2], const float* lse, int position,
                                         int head, int end, int heads) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int p = position + h * ROW_DISTANCE;
        row_lse[h] = p < end ? lse[(long long)p * heads + head] * LOG2E : infinity();
    }
}

// Store LSE = ln(sum of exp) of this lane's two rows, from the maximum of score * log2(e) and the
// sum of exp2(score * log2(e) - maximum). Both include the sink.
__device__ __forceinline__ void store_lse(float* lse, const float (&row_max)[2],
                                          const float (&row_sum)[2], int position, int head,
                                          int end, int heads, int lane) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int p = position + h * ROW_DISTANCE;
        if ((lane & 3) == 0 && p < end)
            lse[(long long)p * heads + head] = (row_max[h] + log2_approx(row_sum[h])) * LN2;
    }
}

// Store the statistics of this lane's two rows for backward_kv, (LSE * log2(e), delta). Add the
// share of the rows in the sink's gradient, -exp(sink - LSE) delta, to `sink_share`. All arguments
// are in units of log2.
__device__ __forceinline__ void store_stats(float2* row_stats, float& sink_share,
                                            const float (&row_lse)[2], const float (&delta)[2],
                                            float sink, int position, int head, int end, int heads,
                                            int lane) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int p = position + h * ROW_DISTANCE;
        if (p < end) {
            sink_share -= exp2_approx(sink - row_lse[h]) * delta[h];
            if ((lane & 3) == 0)
                row_stats[(long long)p * heads + head] = make_float2(row_lse[h], delta[h]);
        }
    }
}

// Sum the shares of the sinks' gradient over the block, per head of the group and in a fixed order,
// and store the sums. The four lanes of a quad have the same share. Quad i of the block has head i
// % GROUP. `shares` is shared memory for 32 floats.
__device__ __forceinline__ void sum_shares(float* target, float* shares, float sink_share,
                                           int thread) {
    __syncthreads();
    if ((thread & 3) == 0) shares[thread >> 2] = sink_share;
    __syncthreads();
    if (thread < GROUP) {
        float sum = 0.f;
        for (int i = thread; i < 32; i += GROUP) sum += shares[i];
        target[thread] = sum;
    }
}

// -- the backward pass ----------------------------------------------------------------------------
//
// With P = exp(S - LSE) and delta = rowsum(dO * O):  dP = dO V^T,  dS = P (dP - delta),  dQ = dS K.
// (FlashAttention-2, arXiv 2307.08691, section 3.1.2. The sink changes only LSE and O, see
// reference.py.) delta is also the sum of P dP over all keys of a row, because O = P V.

// Replace scores by probabilities.
__device__ __forceinline__ void row_probabilities(float (&x)[8][4], float scale_log2,
                                                  const float (&row_lse)[2]) {
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            x[j][e] = exp2_approx(fmaf(x[j][e], scale_log2, -row_lse[e >> 1]));
}

// Add P dP of this lane's columns to the sums of its two rows.
__device__ __forceinline__ void add_products(float (&sum)[2], const float (&p)[6][4],
                                             const float (&dp)[6][4]) {
#pragma unroll
    for (int j = 0; j < 6; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) sum[e >> 1] = fmaf(p[j][e], dp[j][e], sum[e >> 1]);
}

// The same for 64 keys, in four independent chains of additions.
__device__ __forceinline__ void add_products(float (&sum)[2], const float (&p)[8][4],
                                             const float (&dp)[8][4]) {
    float part[4] = {sum[0], 0.f, sum[1], 0.f};
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) part[e] = fmaf(p[j][e], dp[j][e], part[e]);
    sum[0] = part[0] + part[1];
    sum[1] = part[2] + part[3];
}

// Compute dS = P (dP - delta) as a left operand; dp is overwritten.
template <int N>
__device__ __forceinline__ void score_gradients(u32 (&ds)[N / 2][4], const float (&p)[N][4],
                                                float (&dp)[N][4], const float (&delta)[2]) {
#pragma unroll
    for (int j = 0; j < N; j++) {
#pragma unroll
        for (int e = 0; e < 4; e++) dp[j][e] = p[j][e] * (dp[j][e] - delta[e >> 1]);
        pack_columns(ds, j, dp[j]);
    }
}

// Compute delta = rowsum(dO * O) of this lane's two rows from tiles in shared memory.
//
// delta is the diagonal of dO O^T, so the tensor cores compute it. A warp computes only the two
// 8 x 8 blocks on the diagonal of its 16 x 16 product. Element (r, r) of a block is in register
// r % 2 of lane r / 2 of its quad. A shuffle gives it to all four lanes.
__device__ __forceinline__ void row_deltas(float (&delta)[2], u32 tile_grad, u32 tile_out, int warp,
                                           int lane) {
    float upper[4] = {};  // rows 0-15, columns 0-7: the block is rows 0-7, registers 0 and 1
    float lower[4] = {};  // rows 0-15, columns 8-15: the block is rows 8-15, registers 2 and 3
    const u32 warp_offset = warp * WARP_ROWS * ROW_BYTES;
    const u32 grad_address = tile_grad + warp_offset + left_operand_address(lane);
    const u32 out_address = tile_out + warp_offset + right_operand_address(lane);
#pragma unroll
    for (int s = 0; s < KSTEPS; s++) {
        u32 grad[4], out[4];
        ldmatrix_x4(grad, grad_address ^ (s << 5));
        ldmatrix_x4(out, out_address ^ (s << 5));
        mma_m16n8k16(upper, grad, out[0], out[1]);
        mma_m16n8k16(lower, grad, out[2], out[3]);
    }

    const int row = lane >> 2;
    const int owner = (lane & ~3) | row >> 1;
    delta[0] = __shfl_sync(0xffffffffu, row & 1 ? upper[1] : upper[0], owner);
    delta[1] = __shfl_sync(0xffffffffu, row & 1 ? lower[3] : lower[2], owner);
}
