// O and LSE of full causal attention with sinks. A block has one tile, so that a short sequence has
// many blocks.
//
// Ownership       A block owns one tile of 64 rows (query_tile.cuh) and writes their O and LSE. Its
//                 four warps compute each product together, with 16 rows per warp.
// Grid            items (of TILE positions) times groups of heads; 128 threads.
// Shared memory   Three stages of K and V (streamed_keys.cuh), then the tile of Q.
// Registers       O of the tile (`out`), and the scores of the current step, which are replaced by
//                 probabilities.
//
// Online softmax as in FlashAttention-2 (arXiv 2307.08691): O and the sum are relative to the
// largest score so far, and are rescaled when a step has a larger score. The sink is treated as a
// key without a value before the first step: it is in the maximum and in the sum, but not in O.
#include "streamed_keys.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 4)
full_forward(const bf16* __restrict__ q, const bf16* __restrict__ k, const bf16* __restrict__ v,
             const float* __restrict__ sinks, bf16* __restrict__ o, float* __restrict__ lse,
             const Item* __restrict__ items, int heads, float scale_log2) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 stages = shared_address(memory);
    const u32 tile_q = stages + STAGES * STAGE_BYTES;

    const Work work(items, heads);
    const WarpRows warp_rows(heads, work);
    const float sink = sinks[work.row_head] * LOG2E;
    const int row_position = work.item.first + work.row_position;

    warp_rows.load(tile_q, q, work.item.first, work.item.end, heads);
    KeyStream keys(stages, k, v, work);
    keys.fetch();  // closes one group with Q

    const u64 query = tile_descriptor(tile_q);
    float out[8][4];  // set by the first step's products

    // Without a sink (-inf), the maximum must not be -inf, because -inf - -inf is NaN.
    float row_max[2] = {fmaxf(sink, -1e30f), fmaxf(sink, -1e30f)};

    // Each lane sums its own columns, and the quad is summed at the end. Therefore only one lane of
    // the quad includes the sink.
    const float of_sink = (work.lane & 3) == 0 ? exp2_approx(sink - row_max[0]) : 0.f;
    float row_sum[2] = {of_sink, of_sink};

    for (int t = 0, stage = 0; t < keys.steps; t++) {
        // After this barrier, step t is visible to all warps, and no warp uses step t - 2, whose
        // stage the next fetch fills.
        cp_async_wait<0>();
        publish_shared();
        __syncthreads();
        keys.fetch();

        // S = Q K^T. Groups finish in order, so this also waits for P V of the previous step.
        const u64 rows_k = tile_descriptor(stages + stage * STAGE_BYTES);
        const u64 rows_v = rows_k + (KEY_BYTES >> 4);
        float x[8][4];
        warpgroup_fence();
        begin_ABt(x, query, rows_k);
        finish_products<0>(x, out);

        const int key0 = work.item.start + t * KEYS;
        const bool reaches_diagonal = key0 + KEYS - 1 > work.item.first;
        if (reaches_diagonal) mask_later_keys(x, -infinity(), row_position, key0, work.lane);

        float rescale[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float step_max = -infinity();
#pragma unroll
            for (int j = 0; j < 8; j++)
                step_max = fmaxf(step_max, fmaxf(x[j][2 * h], x[j][2 * h + 1]));
            const float new_max = fmaxf(row_max[h], quad_max(step_max) * scale_log2);
            rescale[h] = exp2_approx(row_max[h] - new_max);
            row_max[h] = new_max;
            row_sum[h] *= rescale[h];
        }

        u32 p[4][4];
#pragma unroll
        for (int j = 0; j < 8; j++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                x[j][e] = exp2_approx(fmaf(x[j][e], scale_log2, -row_max[e >> 1]));
                row_sum[e >> 1] += x[j][e];
            }
            pack_columns(p, j, x[j]);
        }

        // Most steps have no larger score. If no row of the warp has one, all factors are exactly
        // 1, and the multiplications are skipped.
        if (t > 0 && __any_sync(0xffffffffu, fminf(rescale[0], rescale[1]) < 1.f))
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) out[j][e] *= rescale[e >> 1];

        begin_AB(out, p, rows_v, t > 0);  // O += P V, which continues during the next step
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }

    finish_products<0>(out);
    const float sum[2] = {quad_sum(row_sum[0]), quad_sum(row_sum[1])};
    const float inverse[2] = {1.f / sum[0], 1.f / sum[1]};
    const int end = work.item.end;
    store_lse(lse, row_max, sum, row_position, work.row_head, end, heads, work.lane);
    store_rows(o, out, inverse, row_position, work.row_head, end, heads, work.lane);
}
