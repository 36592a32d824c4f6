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
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    const int groups = heads / GROUP, number = blockIdx.x / groups, group = blockIdx.x % groups;
    const Item item = items[number];
    const int head0 = group * GROUP, kv_head = group / GROUPS, kv_heads = heads / HEADS_PER_KV;
    const int end = min(item.first + CHUNK, item.end);
    const float sink = sinks[head0 + (lane >> 2) % GROUP] * LOG2E;
    const WarpRows mine(heads, head0, warp, lane);
    const int row_position = warp * (WARP_ROWS / GROUP) + (lane >> 2) / GROUP, row_head = head0 + (lane >> 2) % GROUP;

    mine.load(tile, q, item.first, item.end, heads);
    hold_keys(keys, k, v, item, kv_heads, kv_head, thread);
    commit();
    for (int p0 = item.first; p0 < end; p0 += TILE) {
        wait<0>();
        publish_shared();
        if (p0 == item.first) __syncthreads();                 // the keys are every warp's, the rows each warp's own
        else __syncwarp();
        u32 query[KSTEPS][4];
        const u32 address = tile + warp * WARP_ROWS * ROW_BYTES + lane_rows(lane);
#pragma unroll
        for (int s = 0; s < KSTEPS; s++) load4(query[s], address ^ (s << 5));
        __syncwarp();
        if (p0 + TILE < end) mine.load(tile, q, p0 + TILE, item.end, heads);
        commit();

        const int first_key = p0 - HALO + SKIP;
        const u64 rows_k = describe(keys + (p0 - item.first + SKIP) * ROW_BYTES), rows_v = rows_k + (HELD_BYTES >> 4);
        float x[STEPS][6][4];
        warpgroup_fence();
#pragma unroll
        for (int t = 0; t < STEPS; t++) {
#pragma unroll
            for (int s = 0; s < KSTEPS; s++) warpgroup_rows_48(x[t], query[s], rows_k + t * (STEP * ROW_BYTES >> 4) + 2 * s, s > 0);
            warpgroup_commit();
        }
        float highest[2] = {fmaxf(sink, -1e30f), fmaxf(sink, -1e30f)}, total[2] = {};
        warpgroup_wait<0>();
#pragma unroll
        for (int t = 0; t < STEPS; t++) {
            settle(x[t]);
            const int key0 = first_key + t * STEP;
            auto hide = [&](auto interior) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int p = p0 + row_position + h * 8 / GROUP, distance = p - key0 - 2 * (lane & 3);
                    const u32 reach = decltype(interior)::value ? WINDOW : reach_of(item, p);
#pragma unroll
                    for (int j = 0; j < 6; j++)
#pragma unroll
                        for (int e = 0; e < 2; e++)
                            if (!(decltype(interior)::value && all_see(t * STEP + j * 8)) && (u32)(distance - j * 8 - e) >= reach)
                                x[t][j][2 * h + e] = -infinity();
                }
            };
            if (first_key >= item.start) hide(Constant<1>());
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
                p[t * 3 + j / 2][j % 2 * 2] = pack(x[t][j][0], x[t][j][1]);
                p[t * 3 + j / 2][j % 2 * 2 + 1] = pack(x[t][j][2], x[t][j][3]);
            }
            warpgroup_fence();
#pragma unroll
            for (int s = 3 * t; s < 3 * t + 3; s++) warpgroup_inner(out, p[s], rows_v + s * (16 * ROW_BYTES >> 4));
            warpgroup_commit();
        }
        float inverse[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float sum = quad_sum(total[h]) + exp2_approx(sink - highest[h]);
            inverse[h] = 1.f / sum;
            const int position = p0 + row_position + h * 8 / GROUP;
            if ((lane & 3) == 0 && position < item.end)
                lse[(long long)position * heads + row_head] = (highest[h] + log2_approx(sum)) * LN2;
        }
        warpgroup_wait<0>();
        settle(out);
        store_rows(o, out, inverse, p0 + row_position, row_head, item.end, heads, lane);
    }
}
