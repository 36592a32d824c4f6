// dQ of full causal attention. Also writes the statistics (LSE * log2(e), delta) of each row for
// backward_kv, and the share of each item in the gradient of the sinks.
//
// Ownership       A block owns one tile of 64 rows (query_tile.cuh). It writes their dQ and
//                 statistics, and one line of the shares. No two blocks write to the same place.
// Grid            items (of TILE positions) times groups of heads; 128 threads.
// Shared memory   Two stages of K and V, copied by TMA; the tiles of Q and dO; two barriers. The
//                 second stage first holds the tile of O, which is needed only to compute delta.
//                 The memory of Q is later used to sum the shares.
// Registers       dQ of the tile, and P and dP of the current step. dS replaces dP.
// Synchronization Two stages are enough: the product of dQ in step t - 1 finishes before the
//                 barrier after which step t + 1 is copied to the same stage.
//
// delta is rowsum(dO * O). O was rounded to bf16. For rows with few keys this matters, because dP -
// delta is then a small difference. The sum of P dP equals delta without this rounding, but it is
// known only after the last step. The statistics (for dK) therefore use the sum. dQ uses it if the
// tile has only one step.
#include "streamed_keys.cuh"
#include "tma.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 4)
full_backward_q(const bf16* __restrict__ q, const __grid_constant__ TensorMap map_k,
                const __grid_constant__ TensorMap map_v, const float* __restrict__ sinks,
                const bf16* __restrict__ o, const float* __restrict__ lse,
                const bf16* __restrict__ grad_o, bf16* __restrict__ grad_q,
                float2* __restrict__ row_stats, float* __restrict__ grad_sinks,
                const Item* __restrict__ items, int heads, float scale, float scale_log2) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 stages = shared_address(memory);
    const u32 tile_q = stages + 2 * STAGE_BYTES;
    const u32 tile_grad = tile_q + TILE_BYTES;
    const u32 barriers = tile_q + 2 * TILE_BYTES;
    const u32 tile_out = stages + STAGE_BYTES;  // until that stage's first use

    const Work work(items, heads);
    const WarpRows warp_rows(heads, work);
    const int row_position = work.item.first + work.row_position;

    warp_rows.load(tile_q, q, work.item.first, work.item.end, heads);
    warp_rows.load(tile_grad, grad_o, work.item.first, work.item.end, heads);
    warp_rows.load(tile_out, o, work.item.first, work.item.end, heads);
    cp_async_commit();
    const int last = (min(work.item.first + TILE, work.item.end) - work.item.start - 1) / KEYS;
    Ring<2> ring(stages, barriers);
    ring.fetch(&map_k, &map_v, work.kv_head, work.item.start);

    float row_lse[2], delta[2];
    float sum_p_dp[2] = {};
    load_lse(row_lse, lse, row_position, work.row_head, work.item.end, heads);
    cp_async_wait<0>();
    __syncwarp();  // a warp reads only rows that it has loaded itself
    row_deltas(delta, tile_grad, tile_out, work.warp, work.lane);

    const u64 query = tile_descriptor(tile_q);
    const u64 grad = tile_descriptor(tile_grad);
    float dq[8][4];  // set by the first step's products
    publish_shared();
    for (int t = 0; t <= last; t++) {
        // After this barrier, no warp uses step t - 1 (or O, before step 0), so the next step can
        // be copied to its stage.
        finish_products<0>(dq);
        __syncthreads();
        const int key0 = work.item.start + t * KEYS;
        if (t < last) ring.fetch(&map_k, &map_v, work.kv_head, key0 + KEYS);

        ring.wait();
        if (key0 + KEYS > work.item.end) {
            zero_rows(ring.tiles(), work.item.end - key0, work.thread);
            __syncthreads();
        }

        // S = Q K^T and dP = dO V^T. The probabilities are computed while dP is in flight.
        const u64 rows_k = tile_descriptor(ring.tiles());
        const u64 rows_v = rows_k + (KEY_BYTES >> 4);
        float x[8][4], dp[8][4];
        warpgroup_fence();
        begin_ABt(x, query, rows_k);
        begin_ABt(dp, grad, rows_v);
        finish_products<1>(x);
        row_probabilities(x, scale_log2, row_lse);
        if (t == last) mask_later_keys(x, 0.f, row_position, key0, work.lane);
        finish_products<0>(dp);

        add_products(sum_p_dp, x, dp);
        if (last == 0)
#pragma unroll
            for (int h = 0; h < 2; h++) delta[h] = quad_sum(sum_p_dp[h]);

        u32 ds[4][4];
        score_gradients(ds, x, dp, delta);
        begin_AB(dq, ds, rows_k, t > 0);  // dQ += dS K
        ring.advance();
    }

    float sink_share = 0.f;
    const float sink = sinks[work.row_head] * LOG2E;
#pragma unroll
    for (int h = 0; h < 2; h++) sum_p_dp[h] = quad_sum(sum_p_dp[h]);
    const int end = work.item.end;
    store_stats(row_stats, sink_share, row_lse, sum_p_dp, sink, row_position, work.row_head, end,
                heads, work.lane);

    finish_products<0>(dq);
    store_rows(grad_q, dq, {scale, scale}, row_position, work.row_head, end, heads, work.lane);

    float* shares = (float*)(memory + 2 * STAGE_BYTES);  // where Q was
    float* target = grad_sinks + (long long)work.number * heads + work.head0;
    sum_shares(target, shares, sink_share, work.thread);
}
