// O and LSE of full causal attention with sinks, with Hopper's warpgroup products and an online softmax: made for short
// sequences. Grid: items (8 positions with 8 heads to a tile) * heads / GROUP, blocks of 128 threads.
#include "stream.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 4)
full_forward(const bf16* __restrict__ q, const bf16* __restrict__ k, const bf16* __restrict__ v,
             const float* __restrict__ sinks, bf16* __restrict__ o, float* __restrict__ lse,
             const Item* __restrict__ items, int heads, float scale_log2) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 stages = shared_address(memory), tile = stages + STAGES * STAGE_BYTES;   // per stage K, V; Q
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    const int groups = heads / GROUP, group = blockIdx.x % groups;
    const Item item = items[blockIdx.x / groups];
    const int head0 = group * GROUP, kv_head = group / GROUPS, kv_heads = heads / HEADS_PER_KV;
    const float sink = sinks[head0 + (lane >> 2) % GROUP] * LOG2E;
    const WarpRows mine(heads, head0, warp, lane);
    const int row_position = item.first + warp * (WARP_ROWS / GROUP) + (lane >> 2) / GROUP;
    const int row_head = head0 + (lane >> 2) % GROUP;

    mine.load(tile, q, item.first, item.end, heads);
    KeyStream keys(stages, k, v, item, kv_heads, kv_head, thread);
    keys.fetch();
    const u64 query = describe(tile);
    float out[8][4];                                           // set by the first products
    float highest[2] = {fmaxf(sink, -1e30f), fmaxf(sink, -1e30f)};
    const float of_sink = (lane & 3) == 0 ? exp2_approx(sink - highest[0]) : 0.f;
    float total[2] = {of_sink, of_sink};
    for (int t = 0, stage_number = 0; t < keys.steps; t++) {
        wait<0>();
        publish_shared();
        __syncthreads();                                       // step t has landed, and step t - 2 is used up
        keys.fetch();
        const u64 rows_k = describe(stages + stage_number * STAGE_BYTES), rows_v = rows_k + (KEY_BYTES >> 4);
        float x[8][4];
        warpgroup_fence();
#pragma unroll
        for (int s = 0; s < KSTEPS; s++) warpgroup_rows(x, query + 2 * s, rows_k + 2 * s, s > 0);
        warpgroup_commit();
        warpgroup_wait<0>();                                   // and so the last step's products
        settle(x);
        settle(out);
        const int key0 = item.start + t * KEYS;
        if (key0 + KEYS - 1 > item.first)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int distance = row_position + h * 8 / GROUP - key0 - 2 * (lane & 3);
#pragma unroll
                for (int j = 0; j < 8; j++)
#pragma unroll
                    for (int e = 0; e < 2; e++)
                        if (j * 8 + e > distance) x[j][2 * h + e] = -infinity();
            }
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
            p[j / 2][j % 2 * 2] = pack(x[j][0], x[j][1]);
            p[j / 2][j % 2 * 2 + 1] = pack(x[j][2], x[j][3]);
        }
        if (t > 0 && __any_sync(0xffffffffu, fminf(decay[0], decay[1]) < 1.f))
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) out[j][e] *= decay[e >> 1];
        warpgroup_fence();
#pragma unroll
        for (int s = 0; s < 4; s++) warpgroup_inner(out, p[s], rows_v + s * (16 * ROW_BYTES >> 4), t > 0 || s > 0);
        warpgroup_commit();
        stage_number = stage_number + 1 == STAGES ? 0 : stage_number + 1;
    }
    warpgroup_wait<0>();
    settle(out);
    float inverse[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float sum = quad_sum(total[h]);
        const int position = row_position + h * 8 / GROUP;
        inverse[h] = 1.f / sum;
        if ((lane & 3) == 0 && position < item.end)
            lse[(long long)position * heads + row_head] = (highest[h] + log2_approx(sum)) * LN2;
    }
    store_rows(o, out, inverse, row_position, row_head, item.end, heads, lane);
}
