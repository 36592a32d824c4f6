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
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    const int groups = heads / GROUP, number = blockIdx.x / groups, group = blockIdx.x % groups;
    const Item item = items[number];
    const int head0 = group * GROUP, kv_head = group / GROUPS, kv_heads = heads / HEADS_PER_KV;
    const float sink = sinks[head0 + (lane >> 2) % GROUP] * LOG2E, scale_log2 = scale * LOG2E;
    const WarpRows mine(heads, head0, warp, lane);
    const int row_position = item.first + warp * (WARP_ROWS / GROUP) + (lane >> 2) / GROUP;
    const int row_head = head0 + (lane >> 2) % GROUP;

    mine.load(tile, q, item.first, item.end, heads);
    mine.load(tile_grad, grad_o, item.first, item.end, heads);
    mine.load(tile_out, o, item.first, item.end, heads);
    KeyStream keys(stages, k, v, item, kv_heads, kv_head, thread);
    keys.fetch();
    float row_lse[2], d[2], exact[2] = {};                     // exact: the sum of P dP, which is delta
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int p = row_position + h * 8 / GROUP;
        row_lse[h] = p < item.end ? lse[(long long)p * heads + row_head] * LOG2E : infinity();
    }
    const u64 query = describe(tile), grad = describe(tile_grad);
    float dq[8][4];                                            // set by the first products
    for (int t = 0, stage_number = 0; t < keys.steps; t++) {
        wait<0>();
        publish_shared();
        __syncthreads();                                       // step t has landed, and step t - 2 is used up
        if (t == 0) row_deltas(d, tile_grad, tile_out, warp, lane);
        keys.fetch();
        const u64 rows_k = describe(stages + stage_number * STAGE_BYTES), rows_v = rows_k + (KEY_BYTES >> 4);
        float x[8][4], dp[8][4];
        warpgroup_fence();
#pragma unroll
        for (int s = 0; s < KSTEPS; s++) warpgroup_rows(x, query + 2 * s, rows_k + 2 * s, s > 0);
        warpgroup_commit();
#pragma unroll
        for (int s = 0; s < KSTEPS; s++) warpgroup_rows(dp, grad + 2 * s, rows_v + 2 * s, s > 0);
        warpgroup_commit();
        warpgroup_wait<1>();                                   // and so the last step's products
        settle(x);
        settle(dq);
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) x[j][e] = exp2_approx(fmaf(x[j][e], scale_log2, -row_lse[e >> 1]));
        const int key0 = item.start + t * KEYS;
        if (key0 + KEYS - 1 > item.first)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int distance = row_position + h * 8 / GROUP - key0 - 2 * (lane & 3);
#pragma unroll
                for (int j = 0; j < 8; j++)
#pragma unroll
                    for (int e = 0; e < 2; e++)
                        if (j * 8 + e > distance) x[j][2 * h + e] = 0.f;
            }
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
#pragma unroll
        for (int j = 0; j < 8; j++) {
#pragma unroll
            for (int e = 0; e < 4; e++) dp[j][e] = x[j][e] * (dp[j][e] - d[e >> 1]);
            ds[j / 2][j % 2 * 2] = pack(dp[j][0], dp[j][1]);
            ds[j / 2][j % 2 * 2 + 1] = pack(dp[j][2], dp[j][3]);
        }
        warpgroup_fence();
#pragma unroll
        for (int s = 0; s < 4; s++) warpgroup_inner(dq, ds[s], rows_k + s * (16 * ROW_BYTES >> 4), t > 0 || s > 0);
        warpgroup_commit();
        stage_number = stage_number + 1 == STAGES ? 0 : stage_number + 1;
    }
    float sink_share = 0.f;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int p = row_position + h * 8 / GROUP;
        if (p < item.end) {
            sink_share -= exp2_approx(sink - row_lse[h]) * exact[h];
            if ((lane & 3) == 0) row_stats[(long long)p * heads + row_head] = make_float2(row_lse[h], exact[h]);
        }
    }
    warpgroup_wait<0>();
    settle(dq);
    const float scales[2] = {scale, scale};
    store_rows(grad_q, dq, scales, row_position, row_head, item.end, heads, lane);
    sum_shares(grad_sinks + (long long)number * heads + head0, shares, sink_share, thread);
}
