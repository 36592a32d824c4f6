// O and LSE of full causal attention with sinks, with Hopper's warpgroup products and an online softmax: made for short
// sequences. Grid: items (8 positions with 8 heads to a tile) * heads / GROUP, blocks of 128 threads.
#include "stream.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 4)
full_forward(const bf16* __restrict__ q, const bf16* __restrict__ k, const bf16* __restrict__ v,
             const float* __restrict__ sinks, bf16* __restrict__ o, float* __restrict__ lse,
             const Item* __restrict__ items, int heads, float scale_log2) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 stages = shared_address(memory), tile = stages + STAGES * STAGE_BYTES;   // per stage K, V; Q
    const Place at(items, heads);
    const WarpRows mine(heads, at);
    const float sink = sinks[at.row_head] * LOG2E;
    const int row_position = at.item.first + at.row_position;

    mine.load(tile, q, at.item.first, at.item.end, heads);
    KeyStream keys(stages, k, v, at);
    keys.fetch();
    const u64 query = describe(tile);
    float out[8][4];                                           // set by the first products
    float highest[2] = {fmaxf(sink, -1e30f), fmaxf(sink, -1e30f)};
    const float of_sink = (at.lane & 3) == 0 ? exp2_approx(sink - highest[0]) : 0.f;
    float total[2] = {of_sink, of_sink};
    for (int t = 0, stage_number = 0; t < keys.steps; t++) {
        wait<0>();
        publish_shared();
        __syncthreads();                                       // step t has landed, and step t - 2 is used up
        keys.fetch();
        const u64 rows_k = describe(stages + stage_number * STAGE_BYTES), rows_v = rows_k + (KEY_BYTES >> 4);
        float x[8][4];
        warpgroup_fence();
        begin_rows(x, query, rows_k);
        finish<0>(x, out);                                     // and so the last step's products
        const int key0 = at.item.start + t * KEYS;
        if (key0 + KEYS - 1 > at.item.first) hide_later(x, -infinity(), row_position, key0, at.lane);
        float decay[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float most = -infinity();
#pragma unroll
            for (int j = 0; j < 8; j++) most = fmaxf(most, fmaxf(x[j][2 * h], x[j][2 * h + 1]));
            const float top = fmaxf(highest[h], quad_max(most) * scale_log2);
            decay[h] = exp2_approx(highest[h] - top);
            highest[h] = top;
            total[h] *= decay[h];
        }
        u32 p[4][4];
#pragma unroll
        for (int j = 0; j < 8; j++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                x[j][e] = exp2_approx(fmaf(x[j][e], scale_log2, -highest[e >> 1]));
                total[e >> 1] += x[j][e];
            }
            pack_columns(p, j, x[j]);
        }
        if (t > 0 && __any_sync(0xffffffffu, fminf(decay[0], decay[1]) < 1.f))
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) out[j][e] *= decay[e >> 1];
        begin_inner(out, p, rows_v, t > 0);
        stage_number = stage_number + 1 == STAGES ? 0 : stage_number + 1;
    }
    finish<0>(out);
    const float sum[2] = {quad_sum(total[0]), quad_sum(total[1])}, inverse[2] = {1.f / sum[0], 1.f / sum[1]};
    store_lse(lse, highest, sum, row_position, at.row_head, at.item.end, heads, at.lane);
    store_rows(o, out, inverse, row_position, at.row_head, at.item.end, heads, at.lane);
}
