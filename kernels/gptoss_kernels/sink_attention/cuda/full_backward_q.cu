// dQ, per row (LSE * log2(e), delta), and each item's share of dsinks, of full causal attention, as in window_backward_q.cu.
// Grid: items (8 positions with 8 heads to a tile) * heads / GROUP, blocks of 128 threads.
#include "stream.cuh"
#include "tma.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 4)
full_backward_q(const bf16* __restrict__ q, const __grid_constant__ TensorMap map_k, const __grid_constant__ TensorMap map_v,
                const float* __restrict__ sinks, const bf16* __restrict__ o, const float* __restrict__ lse,
                const bf16* __restrict__ grad_o, bf16* __restrict__ grad_q, float2* __restrict__ row_stats,
                float* __restrict__ grad_sinks, const Item* __restrict__ items, int heads, float scale, float scale_log2) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 stages = shared_address(memory);                 // K, V of two steps
    const u32 tile = stages + 2 * STAGE_BYTES, tile_grad = tile + TILE_BYTES;          // Q (later shares of dsinks), dO
    const u32 tile_out = stages + STAGE_BYTES;                                         // O, before that stage's first use
    const Place at(items, heads);
    const WarpRows mine(heads, at);
    const int row_position = at.item.first + at.row_position;

    mine.load(tile, q, at.item.first, at.item.end, heads);
    mine.load(tile_grad, grad_o, at.item.first, at.item.end, heads);
    mine.load(tile_out, o, at.item.first, at.item.end, heads);
    commit();
    const int last = (min(at.item.first + TILE, at.item.end) - at.item.start - 1) / KEYS;
    Ring<2> ring(stages, tile + 2 * TILE_BYTES);
    ring.fetch(&map_k, &map_v, at.kv_head, at.item.start);
    float row_lse[2], d[2], exact[2] = {};                     // exact: the sum of P dP, which is delta
    load_lse(row_lse, lse, row_position, at.row_head, at.item.end, heads);
    wait<0>();
    __syncwarp();
    row_deltas(d, tile_grad, tile_out, at.warp, at.lane);
    const u64 query = describe(tile), grad = describe(tile_grad);
    float dq[8][4];                                            // set by the first products
    publish_shared();
    for (int t = 0; t <= last; t++) {
        finish<0>(dq);                                         // the last step's products
        __syncthreads();                                       // step t - 1 is used up
        const int key0 = at.item.start + t * KEYS;
        if (t < last) ring.fetch(&map_k, &map_v, at.kv_head, key0 + KEYS);
        ring.wait();
        if (key0 + KEYS > at.item.end) {
            zero_rows(ring.tiles(), at.item.end - key0, at.thread);
            __syncthreads();
        }
        const u64 rows_k = describe(ring.tiles()), rows_v = rows_k + (KEY_BYTES >> 4);
        float x[8][4], dp[8][4];
        warpgroup_fence();
        begin_rows(x, query, rows_k);
        begin_rows(dp, grad, rows_v);
        finish<1>(x);
        row_probabilities(x, scale_log2, row_lse);
        if (t == last) hide_later(x, 0.f, row_position, key0, at.lane);
        finish<0>(dp);
        add_products(exact, x, dp);
        if (last == 0)
#pragma unroll
            for (int h = 0; h < 2; h++) d[h] = quad_sum(exact[h]);   // with few keys dP - delta is a small difference
        u32 ds[4][4];
        score_gradients(ds, x, dp, d);
        begin_inner(dq, ds, rows_k, t > 0);
        ring.advance();
    }
    float sink_share = 0.f, sink = sinks[at.row_head] * LOG2E;
#pragma unroll
    for (int h = 0; h < 2; h++) exact[h] = quad_sum(exact[h]);
    store_stats(row_stats, sink_share, row_lse, exact, sink, row_position, at.row_head, at.item.end, heads, at.lane);
    finish<0>(dq);
    store_rows(grad_q, dq, {scale, scale}, row_position, at.row_head, at.item.end, heads, at.lane);
    sum_shares(grad_sinks + (long long)at.number * heads + at.head0, (float*)(memory + 2 * STAGE_BYTES), sink_share, at.thread);
}
