// dK, dV and dsinks with Hopper's warpgroup products. A block of four warps owns 64 keys; rows of Q and dO stream past,
// 64 at a time.
// Grid: items of 64 keys * kv heads, blocks of 128 threads. Sums run in a fixed order, nothing is added from outside.
#include "columns.cuh"

constexpr int STAGES = 3;                          // of which two are used up late

extern "C" __global__ void __launch_bounds__(THREADS, 2)   // three fit; asked for, the compiler orders its code worse
window_backward_kv(const bf16* __restrict__ q, const bf16* __restrict__ k, const bf16* __restrict__ v,
                   const float2* __restrict__ row_stats, const bf16* __restrict__ grad_o, bf16* __restrict__ grad_k,
                   bf16* __restrict__ grad_v, const Item* __restrict__ items, const float* __restrict__ shares,
                   int share_count, float* __restrict__ grad_sinks, int heads, float scale) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 stages = shared_address(memory);                 // per stage Q, dO
    const u32 own = stages + STAGES * STAGE_BYTES;             // K, V of these keys; later dK, dV
    const u32 stats = own + 2 * OWN_BYTES;                     // per stage (LSE * log2(e), delta) of each row
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    const int kv_heads = heads / HEADS_PER_KV, kv_head = blockIdx.x % kv_heads;
    const Item item = items[blockIdx.x / kv_heads];
    const float scale_log2 = scale * LOG2E;
    const int last = min(item.first + KEYS + WINDOW - 1, item.end);   // one past the last query that sees these keys
    const int steps = (last - item.first + POSITIONS - 1) / POSITIONS, all = steps * GROUPS;

    const int row = thread / CHUNKS, c = thread % CHUNKS;
    const u32 row_address = chunk_address(row, c);
    load_keys(own, own + OWN_BYTES, k, v, item, kv_head, kv_heads, thread);
    sum_shares(grad_sinks, shares, share_count, heads, thread, [&](float sum) {
        __shared__ float sums[4];
        if (lane == 0) sums[warp] = sum;
        __syncthreads();
        return thread == 0 ? sums[0] + sums[1] + sums[2] + sums[3] : 0.f;
    });
    const long long row_source = ((long long)(row / GROUP) * heads + kv_head * HEADS_PER_KV + row % GROUP) * D + c * 8;
    const long long pass_stride = (long long)(PASS / GROUP) * heads * D;
    // Rows are visited from a place that neighbouring blocks share, so that they read the same rows at the same time.
    constexpr int PERIOD = (KEYS + WINDOW - 1 + KEYS - 1) / KEYS * KEYS / POSITIONS;
    const int rotation = (PERIOD - (item.first - item.start) / POSITIONS % PERIOD) % PERIOD;
    const int start = rotation < steps ? rotation : 0;
    int next = 0, next_step = start, next_group = 0;           // what to fetch
    u32 next_stage = 0;
    auto fetch = [&]() {
        if (next < all) {
            const int next_position = item.first + next_step * POSITIONS;
            const long long source = row_source + ((long long)next_position * heads + next_group * GROUP) * D;
            const u32 target = stages + next_stage * STAGE_BYTES + row_address;
            load_rows(target, q + source, grad_o + source, pass_stride, next_position, item.end, row);
            if (thread < WAVE) {
                const int p = next_position + thread / GROUP;
                copy8(stats + next_stage * STATS_BYTES + thread * 8,
                      row_stats + (long long)p * heads + kv_head * HEADS_PER_KV + next_group * GROUP + thread % GROUP,
                      p < item.end);
            }
            if (++next_step == steps) next_step = 0;
            if (next_step == start) next_group++;
            next++;
            next_stage = next_stage + 1 == STAGES ? 0 : next_stage + 1;
        }
        commit();
    };
    fetch();

    float dk[8][4], dv[8][4];                                  // set by the first products
    const int key0 = item.first + warp * 16;
    const u32 at_stats = stats + (lane & 3) * 16;
    const u64 key = describe(own), value = describe(own + OWN_BYTES);
    int step = start, stage_number = 0;
    for (int t = 0; t < all; t++) {
        wait<0>();
        publish_shared();
        __syncthreads();                                       // step t has landed, and step t - 2 is used up
        fetch();
        const int p0 = item.first + step * POSITIONS;
        const u64 rows_q = describe(stages + stage_number * STAGE_BYTES), rows_g = rows_q + (WAVE_BYTES >> 4);
        const PairedStats step_stats{at_stats + stage_number * STATS_BYTES};
        constexpr u32 HALF = 32 * ROW_BYTES >> 4;              // the step's second 32 rows, in a descriptor
        // from this lane's first key to the position of its first column
        const int distance = p0 + 2 * (lane & 3) / GROUP - key0 - (lane >> 2);
        float x[8][4], dp[4][4];
        u32 p[2][4], ds[2][4];
        auto probabilities = [&](int half) {
            const int from = p0 + half * 32 / GROUP, to = p0 + (half * 32 + 31) / GROUP;
            if (from >= key0 + 15 && to - key0 < WINDOW) half_probabilities<0>(x, p, step_stats, half, scale_log2, distance);
            else if (to >= key0 && from < key0 + 15 + WINDOW)
                half_probabilities<WINDOW>(x, p, step_stats, half, scale_log2, distance);
            else no_probabilities(x, p, half);
        };
        // The tensor cores work on one half's products while this warp turns the other half's scores into probabilities,
        // and on the last products of a step while it waits for the next one's rows.
        warpgroup_fence();
        begin_rows(x, key, rows_q);
        begin_rows(dp, value, rows_g);
        finish<1>(dv, dk, x);                                  // and so the last step's products
        probabilities(0);
        finish<0>(dp);
        begin_inner(dv, p, rows_g, t > 0);
        column_score_gradients(ds, x, dp, 0, step_stats);
        begin_inner(dk, ds, rows_q, t > 0);
        begin_rows(dp, value, rows_g + HALF);
        probabilities(1);
        begin_inner(dv, p, rows_g + HALF, true);
        finish<1>(dp);
        column_score_gradients(ds, x, dp, 1, step_stats);
        begin_inner(dk, ds, rows_q + HALF, true);
        if (++step == steps) step = 0;
        stage_number = stage_number + 1 == STAGES ? 0 : stage_number + 1;
    }
    finish<0>(dv, dk);
    store_keys(grad_k, grad_v, dk, dv, scale, own, item, kv_head, kv_heads, warp, lane);
}
