// dQ of sliding-window attention. Also writes the statistics (LSE * log2(e), delta) of each row for
// backward_kv, and the share of each item in the gradient of the sinks.
//
// Ownership       A block owns CHUNK positions of one sequence for one group of heads. It writes
//                 their dQ and statistics, one tile of 64 rows at a time, and one line of the
//                 shares. A warp owns 16 rows of each tile.
// Grid            items (of CHUNK positions) times groups of heads; 128 threads.
// Shared memory   K and V of all keys in the windows of the chunk (resident_keys.cuh), loaded once.
//                 The tiles of Q, dO and O; each warp loads its own rows. 32 floats for the shares.
// Registers       Q and dO of the tile as left operands, dQ, and P and dP of one step of 48 keys.
// Synchronization As in window_forward.cu: one barrier of the block for the keys, then none. While
//                 a tile is computed from registers, the rows of the next tile are copied.
//
// delta is rowsum(dO * O). O was rounded to bf16. For rows with few keys this matters, because dP -
// delta is then a small difference. The sum of P dP over all keys of a row equals delta without
// this rounding, but it is known only in the last step. The statistics (for dK) therefore use the
// sum. dQ uses it if the last step contains all keys of the rows.
//
// O and LSE of a row may include keys that are not passed to this call: context parallelism calls
// the backward pass once for a span of tokens alone, and once with the keys before it. The sum of P
// dP is then less than delta, so rowsum(dO * O) is used. Only keys before the sequence can be
// missing. Therefore only tiles whose windows reach before the sequence check it: the probabilities
// of their rows, including the sink, do not sum to 1.
#include "resident_keys.cuh"

constexpr float LACKING = 1e-4f;  // missing probability above which keys are missing

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

    float next_lse[2];  // LSE of the next tile
    load_tiles(work.item.first);
    load_resident_keys(keys, k, v, work);
    cp_async_commit();
    load_lse(next_lse, lse, work.item.first + work.row_position, work.row_head, work.item.end,
             heads);

    for (int p0 = work.item.first; p0 < end; p0 += TILE) {
        // All warps need the keys, but each warp needs only its own rows.
        cp_async_wait<0>();
        publish_shared();
        if (p0 == work.item.first) __syncthreads();
        else __syncwarp();

        // Load Q, dO and delta into registers, so that their memory is free for the next tile.
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

            // S = Q K^T and dP = dO V^T. The probabilities are computed while dP is in flight.
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
            // No key of an interior tile is before the start of the sequence.
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
