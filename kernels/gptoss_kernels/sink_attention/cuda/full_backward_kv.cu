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
    const u32 barriers = stats + STAGES * STATS_BYTES;         // of each stage
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    const int kv_heads = heads / HEADS_PER_KV, kv_head = blockIdx.x % kv_heads;
    const Item item = items[blockIdx.x / kv_heads];
    const int from = item.first + (item.end - item.first - 1) / POSITIONS * POSITIONS;

    load_keys(own, own_v, k, v, item, kv_head, kv_heads, thread);
    commit();
    if (thread == 0) start_barriers<STAGES>(barriers);
    for (int head = blockIdx.x; head < heads; head += gridDim.x) {         // on the side
        // a C++ pointer to these would keep the compiler from using uniform registers in all that follows
        shared_store4(stats + 4 * warp, __float_as_uint(sum_shares(shares, share_count, head, heads, thread)));
        __syncthreads();
        const float4 sums = shared_load4f(stats);
        if (thread == 0) grad_sinks[head] = sums.x + sums.y + sums.z + sums.w;
        __syncthreads();
    }
    // Rows are visited from the sequence's last one down, so that its blocks read the same rows at the same time.
    int next_stage = 0, head0 = kv_head * HEADS_PER_KV;
    auto fetch = [&](int position) {
        if (position >= item.first) {
            const int p = position + thread % WAVE / GROUP;    // half of the threads copy LSE, half delta
            copy4(stats + next_stage * STATS_BYTES + thread * 4,
                  (const float*)(row_stats + (long long)p * heads + head0 + thread % GROUP) + thread / WAVE, p < item.end);
            const u32 target = stages + next_stage * STAGE_BYTES;
            if (thread == 0) copy_pair(target, &map_q, &map_grad, head0, position, barriers + 8 * next_stage);
            next_stage = next_stage + 1 == STAGES ? 0 : next_stage + 1;
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
#pragma unroll
    for (int s = 0; s < KSTEPS; s++) load4(value[s], (own_v + warp * 16 * ROW_BYTES + lane_rows(lane)) ^ (s << 5));
    float dk[8][4], dv[8][4];                                  // set by the first products
    const int key0 = item.first + warp * 16;
    const u32 at_stats = stats + (lane & 3) * 8;
    const u64 key = describe(own);
    int stage_number = 0;
    u32 phase = 0;
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
            wait_full(barriers + 8 * stage_number, phase);
            zero_rows(stages + stage_number * STAGE_BYTES, (item.end - from) * GROUP, thread);
        }
        for (int p0 = from; p0 >= item.first; p0 -= POSITIONS) {
            wait<AHEAD - 1>();
            __syncthreads();                                   // step t's statistics have landed, and step t - 2 is used up
            fetch(p0 - AHEAD * POSITIONS);
            wait_full(barriers + 8 * stage_number, phase);
            const u64 rows_q = describe(stages + stage_number * STAGE_BYTES), rows_g = rows_q + (WAVE_BYTES >> 4);
            const u32 stage_stats = at_stats + stage_number * STATS_BYTES;
            constexpr u32 HALF = 32 * ROW_BYTES >> 4;          // the step's second 32 rows, in a descriptor
            float x[8][4], dp[4][4];
            u32 p[2][4], ds[2][4];
            auto grad_probabilities = [&](int half) { begin_rows(dp, value, rows_g + half * HALF); };
            auto probabilities_where = [&](int half, auto masked) {
                // from this lane's first key to the position of its first column
                const int distance = p0 + 2 * (lane & 3) / GROUP - key0 - (lane >> 2);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float2 pair = shared_load2f(stage_stats + half * 128 + j * 32);
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        float& value_of = x[half * 4 + j][e];
                        value_of = exp2_approx(fmaf(value_of, scale_log2, -(e & 1 ? pair.y : pair.x)));
                        const int further = (half * 32 + j * 8) / GROUP + (GROUP == 1 ? e & 1 : 0) - (e >> 1) * 8;
                        if (decltype(masked)::value && distance + further < 0) value_of = 0.f;
                    }
                }
            };
            auto probabilities = [&](int half) {
                if (p0 + half * 32 / GROUP >= key0 + 15) probabilities_where(half, Constant<0>());
                else probabilities_where(half, Constant<1>());
            };
            auto add_to_dv = [&](int half) {
#pragma unroll
                for (int j = 0; j < 4; j++) pack_columns(p, j, x[half * 4 + j]);
                begin_inner(dv, p, rows_g + half * HALF, add || half > 0);
            };
            auto add_to_dk = [&](int half) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float2 pair = shared_load2f(stage_stats + WAVE * 4 + half * 128 + j * 32);
#pragma unroll
                    for (int e = 0; e < 4; e++) dp[j][e] = x[half * 4 + j][e] * (dp[j][e] - (e & 1 ? pair.y : pair.x));
                    pack_columns(ds, j, dp[j]);
                }
                begin_inner(dk, ds, rows_q + half * HALF, add || half > 0);
            };
            // The last step's products end before S begins, else the compiler runs all products one by one: there are not
            // enough registers for dS beside S. Within a step one half's products run beside the other's probabilities.
            finish<0>(dv, dk);
            warpgroup_fence();
            begin_rows(x, key, rows_q);
            grad_probabilities(0);
            finish<1>(x);
            probabilities(0);
            finish<0>(dp);
            add_to_dv(0);
            add_to_dk(0);
            warpgroup_fence();
            grad_probabilities(1);
            probabilities(1);
            warpgroup_wait<1>();                               // P and dS of the first half are used up
            add_to_dv(1);
            finish<1>(dp);
            add_to_dk(1);
            add = true;
            stage_number = stage_number + 1 == STAGES ? 0 : stage_number + 1;
            phase ^= stage_number == 0;
        }
    }
    finish<0>(dv, dk);
    __syncthreads();
    store_keys(grad_k, grad_v, dk, dv, scale, stages, item, kv_head, kv_heads, warp, lane);
}
