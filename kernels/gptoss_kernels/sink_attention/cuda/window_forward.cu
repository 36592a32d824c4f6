// O and LSE of sliding-window attention with sinks.
//
// Ownership       A block owns CHUNK positions of one sequence for one group of heads. It writes
//                 their O and LSE, one tile of 64 rows at a time. A warp owns 16 rows of each tile.
// Grid            items (of CHUNK positions) times groups of heads; 128 threads.
// Shared memory   K and V of all keys in the windows of the chunk (resident_keys.cuh), loaded once.
//                 The tile of Q; each warp loads its own rows.
// Registers       Q of the tile as left operand, O of the tile, and all scores of the rows, STEPS x
//                 48 columns, so that the softmax needs one pass and no rescaling.
// Synchronization Only the first tile needs a barrier of the block, for the keys. Afterwards, warps
//                 do not wait for each other. While a tile is computed from registers, the next
//                 rows of Q are copied to its place in shared memory.
#include "resident_keys.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
window_forward(const bf16* __restrict__ q, const bf16* __restrict__ k, const bf16* __restrict__ v,
               const float* __restrict__ sinks, bf16* __restrict__ o, float* __restrict__ lse,
               const Item* __restrict__ items, int heads, float scale_log2) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 keys = shared_address(memory);  // K, then V
    const u32 tile_q = keys + 2 * RESIDENT_BYTES;

    const Work work(items, heads);
    const WarpRows warp_rows(heads, work);
    const int end = min(work.item.first + CHUNK, work.item.end);
    const float sink = sinks[work.row_head] * LOG2E;

    warp_rows.load(tile_q, q, work.item.first, work.item.end, heads);
    load_resident_keys(keys, k, v, work);
    cp_async_commit();

    for (int p0 = work.item.first; p0 < end; p0 += TILE) {
        // All warps need the keys, but each warp needs only its own rows.
        cp_async_wait<0>();
        publish_shared();
        if (p0 == work.item.first) __syncthreads();
        else __syncwarp();

        // Load Q into registers, so that its memory is free for the next tile.
        u32 query[KSTEPS][4];
        const u32 warp_rows_q = tile_q + work.warp * WARP_ROWS * ROW_BYTES;
        load_left_operand(query, warp_rows_q + left_operand_address(work.lane));
        __syncwarp();
        if (p0 + TILE < end) warp_rows.load(tile_q, q, p0 + TILE, work.item.end, heads);
        cp_async_commit();

        // S = Q K^T of all steps.
        const int first_key = p0 + FIRST_KEY;
        const u64 rows_k = tile_descriptor(keys + (p0 - work.item.first + SKIP) * ROW_BYTES);
        const u64 rows_v = rows_k + (RESIDENT_BYTES >> 4);
        float x[STEPS][6][4];
        warpgroup_fence();
#pragma unroll
        for (int t = 0; t < STEPS; t++) begin_ABt(x[t], query, rows_k + t * descriptor_rows(STEP));

        // Without a sink (-inf), the maximum must not be -inf, because -inf - -inf is NaN.
        float row_max[2] = {fmaxf(sink, -1e30f), fmaxf(sink, -1e30f)};
        float row_sum[2] = {};
        warpgroup_wait<0>();

        // Mask keys outside the window of a row. In the interior of a sequence, most blocks of
        // eight columns are in the windows of all rows, which is known at compile time.
#pragma unroll
        for (int t = 0; t < STEPS; t++) {
            fence_accumulators(x[t]);
            const int key0 = first_key + t * STEP;
            auto hide = [&](auto interior) {
                constexpr bool is_interior = decltype(interior)::value;
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int p = p0 + work.row_position + h * ROW_DISTANCE;
                    const int distance = p - key0 - 2 * (work.lane & 3);
                    const u32 reach = is_interior ? WINDOW : visible_reach(work.item, p);
#pragma unroll
                    for (int j = 0; j < 6; j++)
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            if (is_interior && all_rows_see(t * STEP + j * 8)) continue;
                            if ((u32)(distance - j * 8 - e) >= reach)
                                x[t][j][2 * h + e] = -infinity();
                        }
                }
            };
            if (first_key >= work.item.start) hide(Constant<1>());
            else hide(Constant<0>());
        }

#pragma unroll
        for (int h = 0; h < 2; h++) {
            float scores_max = -infinity();
#pragma unroll
            for (int t = 0; t < STEPS; t++)
#pragma unroll
                for (int j = 0; j < 6; j++)
                    scores_max = fmaxf(scores_max, fmaxf(x[t][j][2 * h], x[t][j][2 * h + 1]));
            row_max[h] = fmaxf(row_max[h], quad_max(scores_max) * scale_log2);
        }

        // O = P V. The products of a step run while the exponentials of the next step are computed.
        float out[8][4] = {};
        u32 p[STEPS * 3][4];
#pragma unroll
        for (int t = 0; t < STEPS; t++) {
#pragma unroll
            for (int j = 0; j < 6; j++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    x[t][j][e] = exp2_approx(fmaf(x[t][j][e], scale_log2, -row_max[e >> 1]));
                    row_sum[e >> 1] += x[t][j][e];
                }
                pack_columns(p, t * 6 + j, x[t][j]);
            }
            warpgroup_fence();
#pragma unroll
            for (int s = 3 * t; s < 3 * t + 3; s++)
                wgmma_AB_64(out, p[s], rows_v + s * descriptor_rows(16), true);
            warpgroup_commit();
        }

        // Add the sink to the sum. It has no value, so it only scales O.
        float sum[2], inverse[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            sum[h] = quad_sum(row_sum[h]) + exp2_approx(sink - row_max[h]);
            inverse[h] = 1.f / sum[h];
        }
        const int position = p0 + work.row_position;
        store_lse(lse, row_max, sum, position, work.row_head, work.item.end, heads, work.lane);
        finish_products<0>(out);
        store_rows(o, out, inverse, position, work.row_head, work.item.end, heads, work.lane);
    }
}
