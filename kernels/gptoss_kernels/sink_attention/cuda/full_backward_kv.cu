// dK, dV and dsinks of full causal attention. A block of four warps owns 64 keys; rows of Q and dO pass by TMA, 64 at a time.
// Grid: items of 64 keys * kv heads, blocks of 128 threads. Sums run in a fixed order, nothing is added from outside.
#include "columns.cuh"
#include "tma.cuh"

constexpr int STAGES = 4, AHEAD = STAGES - 2;      // steps that are on their way; one is used up late

extern "C" __global__ void __launch_bounds__(THREADS, 3)
full_backward_kv(const __grid_constant__ TensorMap map_q, const bf16* __restrict__ k, const bf16* __restrict__ v,
                 const float2* __restrict__ row_stats, const __grid_constant__ TensorMap map_grad, bf16* __restrict__ grad_k,
                 bf16* __restrict__ grad_v, const Item* __restrict__ items, const float* __restrict__ shares, int share_count,
                 float* __restrict__ grad_sinks, int heads, float scale, float scale_log2) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 stages = shared_address(memory);                 // per stage Q, dO; later dK, dV
    const u32 own = stages + STAGES * STAGE_BYTES;             // K of these keys
    const u32 own_v = own - STAGE_BYTES;                       // V, before that stage's first use
    const u32 stats = own + OWN_BYTES;                         // per stage LSE * log2(e) of each row, then delta
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    const int kv_heads = heads / HEADS_PER_KV, kv_head = blockIdx.x % kv_heads;
    const Item item = items[blockIdx.x / kv_heads];
    const int from = item.first + (item.end - item.first - 1) / POSITIONS * POSITIONS;

    load_keys(own, own_v, k, v, item, kv_head, kv_heads, thread);
    commit();
    Ring<STAGES> ring(stages, stats + STAGES * STATS_BYTES);
    sum_shares(grad_sinks, shares, share_count, heads, thread, [&](float sum) {
        // a C++ pointer to these would keep the compiler from using uniform registers in all that follows
        shared_store4(stats + 4 * warp, __float_as_uint(sum));
        __syncthreads();
        const float4 sums = shared_load4f(stats);
        return sums.x + sums.y + sums.z + sums.w;
    });
    // Rows are visited from the sequence's last one down, so that its blocks read the same rows at the same time.
    int head0 = kv_head * HEADS_PER_KV;
    auto fetch = [&](int position) {
        if (position >= item.first) {
            load_split_stats(stats + ring.next * STATS_BYTES, row_stats, position, head0, heads, item.end, thread);
            ring.fetch(&map_q, &map_grad, head0, position);
        }
        commit();
    };
    __syncthreads();                                           // the barriers are there
#pragma unroll
    for (int i = 0; i < AHEAD; i++) fetch(from - i * POSITIONS);
    wait<AHEAD>();                                             // K, V
    publish_shared();
    __syncthreads();
    u32 value[KSTEPS][4];
    load_left(value, own_v + warp * 16 * ROW_BYTES + lane_rows(lane));
    float dk[8][4], dv[8][4];                                  // set by the first products
    const int key0 = item.first + warp * 16;
    const u64 key = describe(own);
    bool add = false;                                          // to what dk and dv hold
#pragma unroll 1
    for (int group = 0; group < GROUPS; group++) {
        if (group) {
            head0 += GROUP;
            finish<0>(dv, dk);
            __syncthreads();                                   // all stages are used up
#pragma unroll
            for (int i = 0; i < AHEAD; i++) fetch(from - i * POSITIONS);
        }
        if (from + POSITIONS > item.end) {
            ring.wait();
            zero_rows(ring.tiles(), (item.end - from) * GROUP, thread);
        }
        for (int p0 = from; p0 >= item.first; p0 -= POSITIONS) {
            wait<AHEAD - 1>();
            __syncthreads();                                   // step t's statistics have landed, and step t - 2 is used up
            fetch(p0 - AHEAD * POSITIONS);
            ring.wait();
            const u64 rows_q = describe(ring.tiles()), rows_g = rows_q + (WAVE_BYTES >> 4);
            const SplitStats step_stats{stats + (lane & 3) * 8 + ring.number * STATS_BYTES};
            constexpr u32 HALF = 32 * ROW_BYTES >> 4;          // the step's second 32 rows, in a descriptor
            float x[8][4], dp[4][4];
            u32 p[2][4], ds[2][4];
            // from this lane's first key to the position of its first column
            const int distance = p0 + 2 * (lane & 3) / GROUP - key0 - (lane >> 2);
            auto probabilities = [&](int half) {
                if (p0 + half * 32 / GROUP >= key0 + 15) half_probabilities<0>(x, step_stats, half, scale_log2, distance);
                else half_probabilities<FULL>(x, step_stats, half, scale_log2, distance);
            };
            // The last step's products end before S begins, else the compiler runs all products one by one: there are not
            // enough registers for dS beside S. Within a step one half's products run beside the other's probabilities.
            finish<0>(dv, dk);
            warpgroup_fence();
            begin_rows(x, key, rows_q);
            begin_rows(dp, value, rows_g);
            finish<1>(x);
            probabilities(0);
            finish<0>(dp);
            pack_half(p, x, 0);
            begin_inner(dv, p, rows_g, add);
            column_score_gradients(ds, x, dp, 0, step_stats);
            begin_inner(dk, ds, rows_q, add);
            warpgroup_fence();
            begin_rows(dp, value, rows_g + HALF);
            probabilities(1);
            warpgroup_wait<1>();                               // P and dS of the first half are used up
            pack_half(p, x, 1);
            begin_inner(dv, p, rows_g + HALF, true);
            finish<1>(dp);
            column_score_gradients(ds, x, dp, 1, step_stats);
            begin_inner(dk, ds, rows_q + HALF, true);
            add = true;
            ring.advance();
        }
    }
    finish<0>(dv, dk);
    store_keys(grad_k, grad_v, dk, dv, scale, stages, item, kv_head, kv_heads, warp, lane);
}
