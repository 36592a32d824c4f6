// dQ, per row (LSE * log2(e), delta), and each item's share of dsinks, of full causal attention, as in window_backward_q.cu.
// Grid: items (8 positions with 8 heads to a tile) * heads / GROUP, blocks of 128 threads.
#include "stream.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 3)
full_backward_q(const bf16* __restrict__ q, const bf16* __restrict__ k, const bf16* __restrict__ v,
                const float* __restrict__ sinks, const bf16* __restrict__ o, const float* __restrict__ lse,
                const bf16* __restrict__ grad_o, bf16* __restrict__ grad_q, float2* __restrict__ row_stats,
                float* __restrict__ grad_sinks, const Item* __restrict__ items, int heads, float scale) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 stages = shared_address(memory);                 // per stage K, V; O in the last one before its first use
    const u32 tile = stages + STAGES * STAGE_BYTES, tile_grad = tile + TILE_BYTES;     // Q, dO
    const u32 tile_out = stages + (STAGES - 1) * STAGE_BYTES;
    float* shares = (float*)(memory + STAGES * STAGE_BYTES + 2 * TILE_BYTES);          // of dsinks, [4 warps, 8]
    const Place at(items, heads);
    const WarpRows mine(heads, at);
    const float sink = sinks[at.row_head] * LOG2E, scale_log2 = scale * LOG2E;
    const int row_position = at.item.first + at.row_position;

    mine.load(tile, q, at.item.first, at.item.end, heads);
    mine.load(tile_grad, grad_o, at.item.first, at.item.end, heads);
    mine.load(tile_out, o, at.item.first, at.item.end, heads);
    KeyStream keys(stages, k, v, at);
    keys.fetch();
    float row_lse[2], d[2], exact[2] = {};                     // exact: the sum of P dP, which is delta
    load_lse(row_lse, lse, row_position, at.row_head, at.item.end, heads);
    const u64 query = describe(tile), grad = describe(tile_grad);
    float dq[8][4];                                            // set by the first products
    for (int t = 0, stage_number = 0; t < keys.steps; t++) {
        wait<0>();
        publish_shared();
        __syncthreads();                                       // step t has landed, and step t - 2 is used up
        if (t == 0) row_deltas(d, tile_grad, tile_out, at.warp, at.lane);
        keys.fetch();
        const u64 rows_k = describe(stages + stage_number * STAGE_BYTES), rows_v = rows_k + (KEY_BYTES >> 4);
        float x[8][4], dp[8][4];
        warpgroup_fence();
        begin_rows(x, query, rows_k);
        begin_rows(dp, grad, rows_v);
        warpgroup_wait<1>();                                   // and so the last step's products
        settle(x);
        settle(dq);
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) x[j][e] = exp2_approx(fmaf(x[j][e], scale_log2, -row_lse[e >> 1]));
        const int key0 = at.item.start + t * KEYS;
        if (key0 + KEYS - 1 > at.item.first) hide_later(x, 0.f, row_position, key0, at.lane);
        warpgroup_wait<0>();
        settle(dp);
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) exact[e >> 1] = fmaf(x[j][e], dp[j][e], exact[e >> 1]);
        if (t == keys.steps - 1)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                exact[h] = quad_sum(exact[h]);
                if (t == 0) d[h] = exact[h];                   // with few keys dP - delta is a small difference
            }
        u32 ds[4][4];
        score_gradients(ds, x, dp, d);
        warpgroup_fence();
#pragma unroll
        for (int s = 0; s < 4; s++) warpgroup_inner(dq, ds[s], rows_k + s * (16 * ROW_BYTES >> 4), t > 0 || s > 0);
        warpgroup_commit();
        stage_number = stage_number + 1 == STAGES ? 0 : stage_number + 1;
    }
    float sink_share = 0.f;
    store_stats(row_stats, sink_share, row_lse, exact, sink, row_position, at.row_head, at.item.end, heads, at.lane);
    warpgroup_wait<0>();
    settle(dq);
    const float scales[2] = {scale, scale};
    store_rows(grad_q, dq, scales, row_position, at.row_head, at.item.end, heads, at.lane);
    sum_shares(grad_sinks + (long long)at.number * heads + at.head0, shares, sink_share, at.thread);
}
