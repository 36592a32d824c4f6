// O and LSE of sliding-window attention with sinks, with Hopper's warpgroup products: a row's scores are all in registers
// at once, so the softmax takes one pass. Grid: items * heads / GROUP blocks of 128 threads.
#include "held.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
window_forward(const bf16* __restrict__ q, const bf16* __restrict__ k, const bf16* __restrict__ v,
                      const float* __restrict__ sinks, bf16* __restrict__ o, float* __restrict__ lse,
                      const Item* __restrict__ items, int heads, float scale_log2) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 keys = shared_address(memory);                   // K, then V
    const u32 tile = keys + 2 * HELD_BYTES;                    // Q
    const Place at(items, heads);
    const WarpRows mine(heads, at);
    const int end = min(at.item.first + CHUNK, at.item.end);
    const float sink = sinks[at.row_head] * LOG2E;

    mine.load(tile, q, at.item.first, at.item.end, heads);
    hold_keys(keys, k, v, at);
    commit();
    for (int p0 = at.item.first; p0 < end; p0 += TILE) {
        wait<0>();
        publish_shared();
        if (p0 == at.item.first) __syncthreads();              // the keys are every warp's, the rows each warp's own
        else __syncwarp();
        u32 query[KSTEPS][4];
        load_left(query, tile + at.warp * WARP_ROWS * ROW_BYTES + lane_rows(at.lane));
        __syncwarp();
        if (p0 + TILE < end) mine.load(tile, q, p0 + TILE, at.item.end, heads);
        commit();

        const int first_key = p0 - HALO + SKIP;
        const u64 rows_k = describe(keys + (p0 - at.item.first + SKIP) * ROW_BYTES), rows_v = rows_k + (HELD_BYTES >> 4);
        float x[STEPS][6][4];
        warpgroup_fence();
#pragma unroll
        for (int t = 0; t < STEPS; t++) begin_rows(x[t], query, rows_k + t * (STEP * ROW_BYTES >> 4));
        float highest[2] = {fmaxf(sink, -1e30f), fmaxf(sink, -1e30f)}, total[2] = {};
        warpgroup_wait<0>();
#pragma unroll
        for (int t = 0; t < STEPS; t++) {
            settle(x[t]);
            const int key0 = first_key + t * STEP;
            auto hide = [&](auto interior) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int p = p0 + at.row_position + h * 8 / GROUP, distance = p - key0 - 2 * (at.lane & 3);
                    const u32 reach = decltype(interior)::value ? WINDOW : reach_of(at.item, p);
#pragma unroll
                    for (int j = 0; j < 6; j++)
#pragma unroll
                        for (int e = 0; e < 2; e++)
                            if (!(decltype(interior)::value && all_see(t * STEP + j * 8)) && (u32)(distance - j * 8 - e) >= reach)
                                x[t][j][2 * h + e] = -infinity();
                }
            };
            if (first_key >= at.item.start) hide(Constant<1>());
            else hide(Constant<0>());
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float most = -infinity();
#pragma unroll
            for (int t = 0; t < STEPS; t++)
#pragma unroll
                for (int j = 0; j < 6; j++) most = fmaxf(most, fmaxf(x[t][j][2 * h], x[t][j][2 * h + 1]));
            highest[h] = fmaxf(highest[h], quad_max(most) * scale_log2);
        }
        float out[8][4] = {};
        u32 p[STEPS * 3][4];
#pragma unroll
        for (int t = 0; t < STEPS; t++) {
#pragma unroll
            for (int j = 0; j < 6; j++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    x[t][j][e] = exp2_approx(fmaf(x[t][j][e], scale_log2, -highest[e >> 1]));
                    total[e >> 1] += x[t][j][e];
                }
                pack_columns(p, t * 6 + j, x[t][j]);
            }
            warpgroup_fence();
#pragma unroll
            for (int s = 3 * t; s < 3 * t + 3; s++) warpgroup_inner(out, p[s], rows_v + s * (16 * ROW_BYTES >> 4));
            warpgroup_commit();
        }
        float sum[2], inverse[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            sum[h] = quad_sum(total[h]) + exp2_approx(sink - highest[h]);
            inverse[h] = 1.f / sum[h];
        }
        store_lse(lse, highest, sum, p0 + at.row_position, at.row_head, at.item.end, heads, at.lane);
        finish<0>(out);
        store_rows(o, out, inverse, p0 + at.row_position, at.row_head, at.item.end, heads, at.lane);
    }
}
