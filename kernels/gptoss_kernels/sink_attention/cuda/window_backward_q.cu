// dQ, per row (LSE * log2(e), delta), and each item's share of dsinks, with Hopper's warpgroup products. delta is
// rowsum(dO * O); for all but dQ of long rows it is taken as the sum of P dP instead, which does not see O rounded to bf16.
// Grid: items * heads / GROUP blocks of 128 threads.
#include "held.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
window_backward_q(const bf16* __restrict__ q, const bf16* __restrict__ k, const bf16* __restrict__ v,
                         const float* __restrict__ sinks, const bf16* __restrict__ o, const float* __restrict__ lse,
                         const bf16* __restrict__ grad_o, bf16* __restrict__ grad_q, float2* __restrict__ row_stats,
                         float* __restrict__ grad_sinks, const Item* __restrict__ items, int heads, float scale) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 keys = shared_address(memory);                   // K, then V
    const u32 tile = keys + 2 * HELD_BYTES;                    // Q, dO, O
    const u32 tile_grad = tile + TILE_BYTES, tile_out = tile + 2 * TILE_BYTES;
    float* shares = (float*)(memory + 2 * HELD_BYTES + 3 * TILE_BYTES);      // of the sinks' gradient, [4 warps, 8]
    const Place at(items, heads);
    const WarpRows mine(heads, at);
    const int end = min(at.item.first + CHUNK, at.item.end);
    const float sink = sinks[at.row_head] * LOG2E, scale_log2 = scale * LOG2E;
    float sink_share = 0.f;

    auto load_rows = [&](int p0) {
        mine.load(tile, q, p0, at.item.end, heads);
        mine.load(tile_grad, grad_o, p0, at.item.end, heads);
        mine.load(tile_out, o, p0, at.item.end, heads);
    };
    float next_lse[2];
    load_rows(at.item.first);
    hold_keys(keys, k, v, at);
    commit();
    load_lse(next_lse, lse, at.item.first + at.row_position, at.row_head, at.item.end, heads);
    for (int p0 = at.item.first; p0 < end; p0 += TILE) {
        wait<0>();
        publish_shared();
        if (p0 == at.item.first) __syncthreads();              // the keys are every warp's, the rows each warp's own
        else __syncwarp();
        u32 query[KSTEPS][4], grad[KSTEPS][4];
        const u32 address = tile + at.warp * WARP_ROWS * ROW_BYTES + lane_rows(at.lane);
#pragma unroll
        for (int s = 0; s < KSTEPS; s++) {
            load4(query[s], address ^ (s << 5));
            load4(grad[s], (address ^ (s << 5)) + TILE_BYTES);
        }
        const float row_lse[2] = {next_lse[0], next_lse[1]};
        float d[2];
        row_deltas(d, tile_grad, tile_out, at.warp, at.lane);
        __syncwarp();
        if (p0 + TILE < end) {
            load_rows(p0 + TILE);
            load_lse(next_lse, lse, p0 + TILE + at.row_position, at.row_head, at.item.end, heads);
        }
        commit();
        float dq[8][4] = {};
        float exact[2] = {}, mass[2] = {};                     // sums of P dP, which is delta free of O's rounding, and of P
        const int first_key = p0 + FIRST;                      // of step 0
        const u32 offset = (p0 - at.item.first + SKIP) * ROW_BYTES;
#pragma unroll
        for (int t = 0; t < STEPS; t++) {
            const int key0 = first_key + t * STEP;
            if (key0 + STEP <= at.item.start) continue;           // before the sequence
            const u64 rows_k = describe(keys + offset + t * STEP * ROW_BYTES), rows_v = rows_k + (HELD_BYTES >> 4);
            float x[6][4], dp[6][4];
            warpgroup_fence();
            begin_rows(x, query, rows_k);
            begin_rows(dp, grad, rows_v);
            finish<1>(x);
            auto probabilities = [&](auto interior) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int p = p0 + at.row_position + h * 8 / GROUP;
                    const u32 reach = decltype(interior)::value ? WINDOW : reach_of(at.item, p);
                    const int distance = p - key0 - 2 * (at.lane & 3);
#pragma unroll
                    for (int j = 0; j < 6; j++)
#pragma unroll
                        for (int e = 2 * h; e < 2 * h + 2; e++) {
                            if (decltype(interior)::value && none_sees(t * STEP + j * 8)) {
                                x[j][e] = 0.f;
                                continue;
                            }
                            x[j][e] = exp2_approx(fmaf(x[j][e], scale_log2, -row_lse[h]));
                            if (decltype(interior)::value && all_see(t * STEP + j * 8)) continue;
                            if ((u32)(distance - j * 8 - (e & 1)) >= reach) x[j][e] = 0.f;
                        }
                }
            };
            if (first_key >= at.item.start) probabilities(Constant<1>());
            else probabilities(Constant<0>());
            finish<0>(dp);
            add_products(exact, x, dp);
            const bool complete = first_key >= at.item.start;
            if (!complete)
#pragma unroll
                for (int j = 0; j < 6; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++) mass[e >> 1] += x[j][e];
            if (t == STEPS - 1)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    exact[h] = quad_sum(exact[h]);
                    // a row whose probabilities lack something was given O and LSE of more keys than are here
                    const float lacking = 1.f - exp2_approx(sink - row_lse[h]) - quad_sum(mass[h]);
                    if (!complete && fabsf(lacking) > 1e-4f) exact[h] = d[h];
                    // with few keys dP - delta is a small difference; here all of a row's keys are in this step
                    if (key0 <= at.item.start || STEPS == 1) d[h] = exact[h];
                }
            u32 ds[3][4];
            score_gradients(ds, x, dp, d);
            begin_inner(dq, ds, rows_k, true);
        }
        store_stats(row_stats, sink_share, row_lse, exact, sink, p0 + at.row_position, at.row_head, at.item.end, heads, at.lane);
        finish<0>(dq);
        store_rows(grad_q, dq, {scale, scale}, p0 + at.row_position, at.row_head, at.item.end, heads, at.lane);
    }
    sum_shares(grad_sinks + (long long)at.number * heads + at.head0, shares, sink_share, at.thread);
}
