// dK, dV and the gradient of the sinks, for full and for sliding-window causal attention.
//
// Ownership       A block owns KEYS keys of one kv head and writes their dK and dV. Warp w has keys
//                 16w to 16w + 15. The block iterates over the rows of Q and dO of all query heads
//                 of this kv head, group by group. A step has STEP_ROWS rows (POSITIONS positions
//                 times GROUP heads). Sums have a fixed order, and no other block adds to them, so
//                 results are bitwise reproducible.
// Grid            items (of KEYS positions) times kv heads, kv heads fastest; 128 threads.
// Shared memory   STAGES stages of Q and dO, and K. TMA copies the stages. Each stage has the
//                 statistics of its rows and a barrier. The last stage first holds V. At the end,
//                 the first two tiles hold dK and dV before they are written.
// Registers       V as left operand, dK and dV (64 columns each), and P^T (64 rows) and dP^T (32
//                 rows at a time) of the current step.
//
// All products are transposed in comparison with the other kernels: their rows are keys.
//     S^T = K Q^T      P^T = exp(S^T - LSE)      dV += P^T dO
//     dP^T = V dO^T    dS^T = P^T (dP^T - delta)  dK += dS^T Q
// LSE and delta therefore belong to columns. The kernel of dQ has written them before.
//
// Element e of block j of a lane's accumulators is for key lane / 4 + 8 (e >> 1) of its warp, and
// for row 8j + 2 (lane & 3) + (e & 1) of the step.
#include "tma.cuh"

constexpr int KEYS = 64;
constexpr int STEP_ROWS = 64;
constexpr int HALF_ROWS = STEP_ROWS / 2;
constexpr int POSITIONS = STEP_ROWS / GROUP;        // positions per step
constexpr int HEADS_PER_KV = GROUP * GROUPS;
constexpr int WIDTH = WINDOW ? WINDOW : 1 << 30;    // keys that a row sees

// One stage is in use, products of the previous step may still read one, and AHEAD stages are being
// copied.
constexpr int STAGES = 4;
constexpr int AHEAD = STAGES - 2;

constexpr u32 KEYS_BYTES = KEYS * ROW_BYTES;
constexpr u32 ROWS_BYTES = STEP_ROWS * ROW_BYTES;
constexpr u32 STAGE_BYTES = 2 * ROWS_BYTES;         // Q, then dO
constexpr u32 STATS_BYTES = STEP_ROWS * 8;          // LSE * log2(e) of each row, then delta of each

// Keys of one block, in one sequence. window.py:_items creates the table.
struct Item {
    int start, end;  // the sequence is positions [start, end)
    int first;       // the block's first key
    int unused;
};

// -- loading --------------------------------------------------------------------------------------

// Start to copy the keys and values of the block. Rows after the sequence are 0.
__device__ __forceinline__ void load_keys(u32 tile_k, u32 tile_v, const bf16* k, const bf16* v,
                                          const Item& item, int kv_head, int kv_heads, int thread) {
    constexpr int PASS = THREADS / CHUNKS;  // rows that the block copies at once
    const int row = thread / CHUNKS;
    const int c = thread % CHUNKS;
    const bf16* source_k = k + ((long long)(item.first + row) * kv_heads + kv_head) * D + c * 8;
    const bf16* source_v = v + (source_k - k);
#pragma unroll
    for (int i = 0; i < KEYS / PASS; i++) {
        const long long ahead = (long long)i * PASS * kv_heads * D;
        const bool inside = item.first + row + i * PASS < item.end;
        const u32 offset = chunk_address(row, c) + i * PASS * ROW_BYTES;
        cp_async_16(tile_k + offset, source_k + ahead, inside);
        cp_async_16(tile_v + offset, source_v + ahead, inside);
    }
}

// Start to copy the statistics of a step's rows. Half of the threads copy LSE, the others delta.
__device__ __forceinline__ void fetch_stats(u32 target, const float2* row_stats, int position,
                                            int head0, int heads, int end, int thread) {
    const int which = thread / STEP_ROWS;  // 0: LSE, 1: delta
    const int p = position + thread % STEP_ROWS / GROUP;
    const float2* stats = row_stats + (long long)p * heads + head0 + thread % GROUP;
    cp_async_4(target + thread * 4, (const float*)stats + which, p < end);
}

// Load LSE * log2(e) of this lane's two columns of block j of half a step. `stats` is the address
// of the lane's first column of the step. At stats + STEP_ROWS * 4, the same call loads delta.
__device__ __forceinline__ float2 load_stats(u32 stats, int half, int j) {
    return shared_load2f(stats + half * (HALF_ROWS * 4) + j * 32);
}

// -- the order of the steps -----------------------------------------------------------------------
//
// Neighboring blocks of a sequence need mostly the same rows. They find them in L2 if they read
// them at the same time. Therefore the order depends on the position in the sequence, not on the
// block.
//
// Full attention: from the last rows of the sequence, which all blocks need, down to the block's.
// Window: from the first step whose number in the sequence is a multiple of PERIOD up to the
// block's last rows, then from the block's first rows on. PERIOD is the number of steps of a block,
// rounded up to whole blocks. A block near the end of the sequence may have no such step. It starts
// with its first rows.

// Return the index of the block's step that is processed first.
__device__ __forceinline__ int first_step(const Item& item, int steps) {
    if (!WINDOW) return steps - 1;
    constexpr int PERIOD = (KEYS + WINDOW - 1 + KEYS - 1) / KEYS * KEYS / POSITIONS;
    const int own_step = (item.first - item.start) / POSITIONS;
    const int rotation = (PERIOD - own_step % PERIOD) % PERIOD;
    return rotation < steps ? rotation : 0;
}

// Return the position of the step after the step at `position`. `last` is the end of the rows.
__device__ __forceinline__ int following(int position, const Item& item, int last) {
    if (!WINDOW) return position - POSITIONS;
    return position + POSITIONS < last ? position + POSITIONS : item.first;
}

// -- one step -------------------------------------------------------------------------------------
//
// A step is computed in two halves of 32 rows, because registers for S, dK, dV and for dP and dS of
// a whole step do not suffice.

// Replace the scores of half a step by probabilities. `distance` is the distance from this lane's
// first key to the position of its first column of the step. If `masked`, rows before a key and
// rows whose window ends after it get 0: as u32, a negative distance is a huge number.
template <bool masked>
__device__ __forceinline__ void half_probabilities(float (&x)[8][4], u32 stats, int half,
                                                   float scale_log2, int distance) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float2 lse = load_stats(stats, half, j);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float& value = x[half * 4 + j][e];
            value = exp2_approx(fmaf(value, scale_log2, -(e & 1 ? lse.y : lse.x)));

            // Difference of this element's distance to `distance`. In columns, heads vary fastest.
            const int columns = (half * HALF_ROWS + j * 8) / GROUP + (GROUP == 1 ? e & 1 : 0);
            const int further = columns - (e >> 1) * 8;
            if (masked && (u32)(distance + further) >= (u32)WIDTH) value = 0.f;
        }
    }
}

// Compute dS = P (dP - delta) of half a step as a left operand; dp is overwritten.
__device__ __forceinline__ void half_score_gradients(u32 (&ds)[2][4], const float (&p)[8][4],
                                                     float (&dp)[4][4], int half, u32 stats) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float2 delta = load_stats(stats + STEP_ROWS * 4, half, j);
#pragma unroll
        for (int e = 0; e < 4; e++)
            dp[j][e] = p[half * 4 + j][e] * (dp[j][e] - (e & 1 ? delta.y : delta.x));
        pack_columns(ds, j, dp[j]);
    }
}

// Pack P of half a step as a left operand.
__device__ __forceinline__ void pack_half(u32 (&packed)[2][4], const float (&p)[8][4], int half) {
#pragma unroll
    for (int j = 0; j < 4; j++) pack_columns(packed, j, p[half * 4 + j]);
}

// -- results --------------------------------------------------------------------------------------

// Store dK (times scale) and dV of this warp's 16 keys. They pass through shared memory, which no
// warp uses at this point, so that whole rows of 128 bytes are written.
__device__ __forceinline__ void store_keys(bf16* grad_k, bf16* grad_v, const float (&dk)[8][4],
                                           const float (&dv)[8][4], float scale, u32 staging,
                                           const Item& item, int kv_head, int kv_heads, int warp,
                                           int lane) {
    const u32 warp_rows = staging + warp * 16 * ROW_BYTES;
    __syncthreads();
    stage_rows(warp_rows, dk, scale, scale, lane);
    stage_rows(warp_rows + KEYS_BYTES, dv, 1.f, 1.f, lane);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < CHUNKS / 2; i++) {
        const int row = i * (32 / CHUNKS) + lane / CHUNKS;
        const int p = item.first + warp * 16 + row;
        const u32 address = warp_rows + chunk_address(row, lane % CHUNKS);
        if (p < item.end) {
            const long long target = ((long long)p * kv_heads + kv_head) * D + lane % CHUNKS * 8;
            *(uint4*)(grad_k + target) = shared_load16(address);
            *(uint4*)(grad_v + target) = shared_load16(address + KEYS_BYTES);
        }
    }
}

// Sum the shares of the items in the gradient of the sinks, [share_count, heads], in a fixed order,
// while K and V are copied. Block b sums heads b, b + gridDim.x, ... `sums` is the address of
// shared memory for the sums of the four warps. With a C++ pointer, the compiler would not use
// uniform registers in the following code.
__device__ __forceinline__ void sum_shares(float* grad_sinks, const float* shares, int share_count,
                                           int heads, int thread, u32 sums) {
    for (int head = blockIdx.x; head < heads; head += gridDim.x) {
        float sum = 0.f;
        for (int i = thread; i < share_count; i += THREADS)
            sum += shares[(long long)i * heads + head];
#pragma unroll
        for (int lanes = 16; lanes; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
        shared_store4(sums + 4 * (thread >> 5), __float_as_uint(sum));
        __syncthreads();
        const float4 of_warps = shared_load4f(sums);
        if (thread == 0) grad_sinks[head] = of_warps.x + of_warps.y + of_warps.z + of_warps.w;
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 3)
backward_kv(const __grid_constant__ TensorMap map_q, const bf16* __restrict__ k,
            const bf16* __restrict__ v, const float2* __restrict__ row_stats,
            const __grid_constant__ TensorMap map_grad, bf16* __restrict__ grad_k,
            bf16* __restrict__ grad_v, const Item* __restrict__ items,
            const float* __restrict__ shares, int share_count, float* __restrict__ grad_sinks,
            int heads, float scale, float scale_log2) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 stages = shared_address(memory);
    const u32 tile_k = stages + STAGES * STAGE_BYTES;
    const u32 tile_v = tile_k - STAGE_BYTES;  // the last stage, before its first use
    const u32 stats = tile_k + KEYS_BYTES;
    const u32 barriers = stats + STAGES * STATS_BYTES;

    const int thread = threadIdx.x;
    const int warp = thread >> 5;
    const int lane = thread & 31;
    const int kv_heads = heads / HEADS_PER_KV;
    const int kv_head = blockIdx.x % kv_heads;
    const Item item = items[blockIdx.x / kv_heads];

    // The windows of positions item.first to `last` contain keys of this block. first_step() and
    // following() define the order.
    const int last = WINDOW ? min(item.first + KEYS + WINDOW - 1, item.end) : item.end;
    const int steps = (last - item.first + POSITIONS - 1) / POSITIONS;
    const int begin = item.first + first_step(item, steps) * POSITIONS;

    load_keys(tile_k, tile_v, k, v, item, kv_head, kv_heads, thread);
    cp_async_commit();
    Ring<STAGES> ring(stages, barriers);
    sum_shares(grad_sinks, shares, share_count, heads, thread, stats);

    // Fetch the next step of the current group, if there is one: Q and dO by TMA, the statistics by
    // cp.async. Always commit a group, so that the number of groups is the number of steps.
    int head0 = kv_head * HEADS_PER_KV;
    int steps_to_fetch, next_position;
    auto fetch = [&]() {
        if (steps_to_fetch > 0) {
            const u32 target = stats + ring.next * STATS_BYTES;
            fetch_stats(target, row_stats, next_position, head0, heads, item.end, thread);
            ring.fetch(&map_q, &map_grad, head0, next_position);
            next_position = following(next_position, item, last);
            steps_to_fetch--;
        }
        cp_async_commit();
    };

    steps_to_fetch = steps;
    next_position = begin;
    __syncthreads();  // for the barriers of the ring
#pragma unroll
    for (int i = 0; i < AHEAD; i++) fetch();

    cp_async_wait<AHEAD>();  // for K and V, the first group
    publish_shared();
    __syncthreads();
    u32 value[KSTEPS][4];
    load_left_operand(value, tile_v + warp * 16 * ROW_BYTES + left_operand_address(lane));

    float dk[8][4], dv[8][4];  // set by the first step's products
    bool add = false;          // whether to add to dk and dv
    const int key0 = item.first + warp * 16;
    const u64 key = tile_descriptor(tile_k);
#pragma unroll 1
    for (int group = 0; group < GROUPS; group++) {
        if (group) {
            // Start the next group of heads over the same positions when all stages have been used.
            head0 += GROUP;
            finish_products<0>(dv, dk);
            __syncthreads();
            steps_to_fetch = steps;
            next_position = begin;
#pragma unroll
            for (int i = 0; i < AHEAD; i++) fetch();
        }

        int p0 = begin;
        for (int t = 0; t < steps; t++, p0 = following(p0, item, last)) {
            // After this barrier, the statistics of step t are visible to all warps, and no warp
            // uses step t - 2, whose stage the next fetch fills.
            cp_async_wait<AHEAD - 1>();
            __syncthreads();
            fetch();
            ring.wait();
            if (p0 + POSITIONS > item.end) {
                zero_rows(ring.tiles(), (item.end - p0) * GROUP, thread);
                __syncthreads();
            }

            const u64 rows_q = tile_descriptor(ring.tiles());
            const u64 rows_grad = rows_q + (ROWS_BYTES >> 4);
            constexpr u32 HALF = descriptor_rows(HALF_ROWS);  // to the step's second half
            const u32 step_stats = stats + (lane & 3) * 8 + ring.current * STATS_BYTES;
            float x[8][4], dp[4][4];
            u32 p[2][4], ds[2][4];

            // Rows need no mask if all keys of this warp are in their windows.
            const int distance = p0 + 2 * (lane & 3) / GROUP - key0 - (lane >> 2);
            auto probabilities = [&](int half) {
                const int first = p0 + half * HALF_ROWS / GROUP;
                const int final = p0 + (half * HALF_ROWS + HALF_ROWS - 1) / GROUP;
                if (first >= key0 + 15 && (!WINDOW || final - key0 < WINDOW))
                    half_probabilities<false>(x, step_stats, half, scale_log2, distance);
                else half_probabilities<true>(x, step_stats, half, scale_log2, distance);
            };

            // Finish the products of the previous step before S. Otherwise registers do not suffice
            // for dS and S, and the compiler serializes all products. Within a step, the products
            // of one half run while the probabilities of the other half are computed.
            finish_products<0>(dv, dk);
            warpgroup_fence();
            begin_ABt(x, key, rows_q);           // S, both halves
            begin_ABt(dp, value, rows_grad);     // dP, first half
            finish_products<1>(x);
            probabilities(0);
            finish_products<0>(dp);

            pack_half(p, x, 0);
            begin_AB(dv, p, rows_grad, add);
            half_score_gradients(ds, x, dp, 0, step_stats);
            begin_AB(dk, ds, rows_q, add);

            warpgroup_fence();
            begin_ABt(dp, value, rows_grad + HALF);  // dP, second half
            probabilities(1);
            warpgroup_wait<1>();                 // P and dS of the first half have been read
            pack_half(p, x, 1);
            begin_AB(dv, p, rows_grad + HALF, true);
            finish_products<1>(dp);
            half_score_gradients(ds, x, dp, 1, step_stats);
            begin_AB(dk, ds, rows_q + HALF, true);

            add = true;
            ring.advance();
        }
    }

    finish_products<0>(dv, dk);
    store_keys(grad_k, grad_v, dk, dv, scale, stages, item, kv_head, kv_heads, warp, lane);
}
