// dQ of sliding-window attention; per row (LSE * log2(e), delta) for backward_kv, and each item's
// share of the sinks' gradient.
//
// Who owns what   A block owns CHUNK positions of one sequence for one group of heads and writes
//                 their dQ and statistics, a tile of 64 rows after the other, and its own line of
//                 the shares. A warp owns 16 rows of each tile.
// Grid            items (of CHUNK positions) times groups of heads; 128 threads.
// Shared memory   K and V of all keys that the chunk sees (resident_keys.cuh), loaded once; the
//                 tiles of Q, dO and O, each warp's rows loaded by the warp itself; 32 floats for
//                 the shares.
// Registers       Q and dO of the tile as left operands, dQ, and of one step of 48 keys P and dP.
// What waits      As in window_forward.cu: one block-wide barrier for the keys, then every warp by
//                 itself, the next tile's rows on their way while one is computed from registers.
//
// delta is rowsum(dO * O). O has been rounded to bf16, which matters where dP - delta is a small
// difference: rows with few keys. The sum of P dP over all of a row's keys is the same number
// without O's rounding. It is known only in the last step; so it goes to the statistics (for dK),
// and to dQ where the last step is all that the rows see.
//
// A row may come with O and LSE of more keys than are given here: context parallelism calls the
// backward pass once for a run of tokens alone and once with the keys before it. Its P dP then
// lacks some of delta, and rowsum(dO * O) is taken. Only keys before the sequence can be missing,
// so only tiles whose window reaches there ask: their probabilities, the sink's included, do not
// add up to 1.
#include "resident_keys.cuh"

constexpr float LACKING = 1e-4f;  // missing probability from which on keys are missing, not digits

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
window_backward_q(const bf16* __restrict__ q, const bf16* __restrict__ k,
                  const bf16* __restrict__ v, const float* __restrict__ sinks,
                  const bf16* __restrict__ o, const float* __restrict__ lse,
                  const bf16* __restrict__ grad_o,
                  bf16* __restrict__ grad_q, float2* __restrict__ row_stats,
                  float* __restrict__ grad_sinks, const Item* __restrict__ items, int heads,
                  float scale) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 keys = shared_address(memory);  // K, then V
    const u32 tile_q = keys + 2 * RESIDENT_BYTES;
    const u32 tile_grad = tile_q + TILE_BYTES;
    const u32 tile_out = tile_q + 2 * TILE_BYTES;
    float* shares = (float*)(memory + 2 * RESIDENT_BYTES + 3 * TILE_BYTES);

    const Work work(items, heads);
    const WarpRows warp_rows(heads, work);
    const int end = min(work.item.first + CHUNK, work.item.end);
    const float sink = sinks[work.row_head] * LOG2E;
    const float scale_log2 = scale * LOG2E;
    float sink_share = 0.f;

    auto load_tiles = [&](int p0) {
        warp_rows.load(tile_q, q, p0, work.item.end, heads);
        warp_rows.load(tile_grad, grad_o, p0, work.item.end, heads);
        warp_rows.load(tile_out, o, p0, work.item.end, heads);
    };

    float next_lse[2];  // of the tile to come
    load_tiles(work.item.first);
    load_resident_keys(keys, k, v, work);
    cp_async_commit();
    load_lse(next_lse, lse, work.item.first + work.row_position, work.row_head, work.item.end,
             heads);

    for (int p0 = work.item.first; p0 < end; p0 += TILE) {
        // The keys are every warp's, the rows each warp's own.
        cp_async_wait<0>();
        publish_shared();
        if (p0 == work.item.first) __syncthreads();
        else __syncwarp();

        // Q, dO and delta to registers; then their place is free for the next tile's rows.
        u32 query[KSTEPS][4], grad[KSTEPS][4];
        const u32 warp_rows_q = tile_q + work.warp * WARP_ROWS * ROW_BYTES;
        const u32 address = warp_rows_q + left_operand_address(work.lane);
#pragma unroll
        for (int s = 0; s < KSTEPS; s++) {
            ldmatrix_x4(query[s], address ^ (s << 5));
            ldmatrix_x4(grad[s], (address ^ (s << 5)) + TILE_BYTES);
        }
        const float row_lse[2] = {next_lse[0], next_lse[1]};
        float delta[2];
        row_deltas(delta, tile_grad, tile_out, work.warp, work.lane);
        __syncwarp();
        if (p0 + TILE < end) {
            load_tiles(p0 + TILE);
            load_lse(next_lse, lse, p0 + TILE + work.row_position, work.row_head, work.item.end,
                     heads);
        }
        cp_async_commit();

        float dq[8][4] = {};
        float sum_p_dp[2] = {};
        float sum_p[2] = {};
        const int first_key = p0 + FIRST_KEY;
        const u32 offset = (p0 - work.item.first + SKIP) * ROW_BYTES;
#pragma unroll
        for (int t = 0; t < STEPS; t++) {
            const int key0 = first_key + t * STEP;
            if (key0 + STEP <= work.item.start) continue;

            // S = Q K^T and dP = dO V^T. The probabilities are computed while dP is under way.
            const u64 rows_k = tile_descriptor(keys + offset + t * STEP * ROW_BYTES);
            const u64 rows_v = rows_k + (RESIDENT_BYTES >> 4);
            float x[6][4], dp[6][4];
            warpgroup_fence();
            begin_ABt(x, query, rows_k);
            begin_ABt(dp, grad, rows_v);
            finish_products<1>(x);

            auto probabilities = [&](auto interior) {
                constexpr bool is_interior = decltype(interior)::value;
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int p = p0 + work.row_position + h * ROW_DISTANCE;
                    const u32 reach = is_interior ? WINDOW : visible_reach(work.item, p);
                    const int distance = p - key0 - 2 * (work.lane & 3);
#pragma unroll
                    for (int j = 0; j < 6; j++)
#pragma unroll
                        for (int e = 2 * h; e < 2 * h + 2; e++) {
                            if (is_interior && no_row_sees(t * STEP + j * 8)) {
                                x[j][e] = 0.f;
                                continue;
                            }
                            x[j][e] = exp2_approx(fmaf(x[j][e], scale_log2, -row_lse[h]));
                            if (is_interior && all_rows_see(t * STEP + j * 8)) continue;
                            if ((u32)(distance - j * 8 - (e & 1)) >= reach) x[j][e] = 0.f;
                        }
                }
            };
            // no key of an interior tile is before the sequence
            if (first_key >= work.item.start) probabilities(Constant<1>());
            else probabilities(Constant<0>());
            finish_products<0>(dp);

            add_products(sum_p_dp, x, dp);
            const bool interior_tile = first_key >= work.item.start;
            if (!interior_tile)
#pragma unroll
                for (int j = 0; j < 6; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++) sum_p[e >> 1] += x[j][e];

            if (t == STEPS - 1)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    sum_p_dp[h] = quad_sum(sum_p_dp[h]);
                    const float of_sink = exp2_approx(sink - row_lse[h]);
                    const float lacking = 1.f - of_sink - quad_sum(sum_p[h]);
                    if (!interior_tile && fabsf(lacking) > LACKING) sum_p_dp[h] = delta[h];

                    const bool only_step = key0 <= work.item.start || STEPS == 1;
                    if (only_step) delta[h] = sum_p_dp[h];
                }

            u32 ds[3][4];
            score_gradients(ds, x, dp, delta);
            begin_AB(dq, ds, rows_k, true);  // dQ += dS K
        }

        const int position = p0 + work.row_position;
        store_stats(row_stats, sink_share, row_lse, sum_p_dp, sink, position, work.row_head,
                    work.item.end, heads, work.lane);
        finish_products<0>(dq);
        store_rows(grad_q, dq, {scale, scale}, position, work.row_head, work.item.end, heads,
                   work.lane);
    }

    float* target = grad_sinks + (long long)work.number * heads + work.head0;
    sum_shares(target, shares, sink_share, work.thread);
}
