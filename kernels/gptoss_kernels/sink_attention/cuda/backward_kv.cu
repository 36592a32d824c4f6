// dK, dV and dsinks of causal attention, within a window or full. A block of four warps owns KEYS keys of one kv head; rows of Q
// and dO pass by TMA, WAVE (positions x heads) at a time.
// Grid: items of 64 keys * kv heads, blocks of 128 threads. Sums run in a fixed order, nothing is added from outside.
#include "tma.cuh"

constexpr int STAGES = 4, AHEAD = STAGES - 2;      // steps that are on their way; one is used up late
constexpr int KEYS = 64, WAVE = 64;
constexpr int WIDTH = WINDOW ? WINDOW : 1 << 30;    // keys that a row sees
constexpr int HEADS_PER_KV = GROUP * GROUPS;
constexpr int POSITIONS = WAVE / GROUP;
constexpr u32 OWN_BYTES = KEYS * ROW_BYTES, WAVE_BYTES = WAVE * ROW_BYTES, STAGE_BYTES = 2 * WAVE_BYTES;
constexpr u32 STATS_BYTES = WAVE * 8;              // (LSE * log2(e), delta) of each row
constexpr int PASS = THREADS / CHUNKS;             // rows that the block copies at once
struct Item { int start, end, first, unused; };    // sequence [start, end), this block's first key

// The block's keys and values on their way to shared memory; zeros after the sequence.
__device__ __forceinline__ void load_keys(u32 own_k, u32 own_v, const bf16* k, const bf16* v, const Item& item, int kv_head,
                                          int kv_heads, int thread) {
    const int row = thread / CHUNKS, c = thread % CHUNKS;
    const bf16* source_k = k + ((long long)(item.first + row) * kv_heads + kv_head) * D + c * 8;
    const bf16* source_v = v + (source_k - k);
#pragma unroll
    for (int i = 0; i < KEYS / PASS; i++) {
        const long long ahead = (long long)i * PASS * kv_heads * D;
        const bool inside = item.first + row + i * PASS < item.end;
        copy16(own_k + chunk_address(row, c) + i * PASS * ROW_BYTES, source_k + ahead, inside);
        copy16(own_v + chunk_address(row, c) + i * PASS * ROW_BYTES, source_v + ahead, inside);
    }
}
// The order of rows. In full attention they are visited from the last one down, with a window from a place that neighbouring
// blocks share and round about: so blocks read the same rows at the same time.
__device__ __forceinline__ int first_step(const Item& item, int steps) {
    if (!WINDOW) return steps - 1;
    constexpr int PERIOD = (KEYS + WINDOW - 1 + KEYS - 1) / KEYS * KEYS / POSITIONS;
    const int rotation = (PERIOD - (item.first - item.start) / POSITIONS % PERIOD) % PERIOD;
    return rotation < steps ? rotation : 0;
}
__device__ __forceinline__ int following(int position, const Item& item, int last) {
    if (!WINDOW) return position - POSITIONS;
    return position + POSITIONS < last ? position + POSITIONS : item.first;
}
// The statistics of a step's rows on their way, LSE first: half of the threads copy LSE, half delta.
__device__ __forceinline__ void fetch_stats(u32 target, const float2* row_stats, int position, int head0, int heads, int end,
                                            int thread) {
    const int p = position + thread % WAVE / GROUP;
    const float2* of_row = row_stats + (long long)p * heads + head0 + thread % GROUP;
    copy4(target + thread * 4, (const float*)of_row + thread / WAVE, p < end);
}
// The items' shares of the sinks' gradient are summed on the side, in a fixed order. A C++ pointer to the four warps' sums would
// keep the compiler from using uniform registers in all that follows, hence their address.
__device__ __forceinline__ void sum_shares(float* grad_sinks, const float* shares, int share_count, int heads, int thread,
                                           u32 sums) {
    for (int head = blockIdx.x; head < heads; head += gridDim.x) {
        float sum = 0.f;
        for (int i = thread; i < share_count; i += THREADS) sum += shares[(long long)i * heads + head];
#pragma unroll
        for (int lanes = 16; lanes; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
        shared_store4(sums + 4 * (thread >> 5), __float_as_uint(sum));
        __syncthreads();
        const float4 four = shared_load4f(sums);
        if (thread == 0) grad_sinks[head] = four.x + four.y + four.z + four.w;
        __syncthreads();
    }
}
// LSE * log2(e), or delta one WAVE on, of the two columns of 8j to 8j + 7 of a half that this lane has; from its first on.
__device__ __forceinline__ float2 load_stats(u32 stats, int half, int j) { return shared_load2f(stats + half * 128 + j * 32); }
// Scores of half of a step become probabilities. `distance` is from this lane's first key to the position of its first column
// of the step; if `masked`, rows before a key, or too far behind it to see it, get 0.
template <bool masked> __device__ __forceinline__ void half_probabilities(float (&x)[8][4], u32 stats, int half,
                                                                          float scale_log2, int distance) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float2 lse = load_stats(stats, half, j);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float& value = x[half * 4 + j][e];
            value = exp2_approx(fmaf(value, scale_log2, -(e & 1 ? lse.y : lse.x)));
            const int further = (half * 32 + j * 8) / GROUP + (GROUP == 1 ? e & 1 : 0) - (e >> 1) * 8;
            if (masked && (u32)(distance + further) >= (u32)WIDTH) value = 0.f;
        }
    }
}
// dS = P (dP - delta) of half of a step as a left operand; dp is overwritten.
__device__ __forceinline__ void half_score_gradients(u32 (&ds)[2][4], const float (&p)[8][4], float (&dp)[4][4], int half,
                                                     u32 stats) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float2 delta = load_stats(stats + WAVE * 4, half, j);
#pragma unroll
        for (int e = 0; e < 4; e++) dp[j][e] = p[half * 4 + j][e] * (dp[j][e] - (e & 1 ? delta.y : delta.x));
        pack_columns(ds, j, dp[j]);
    }
}
// P of half of a step as a left operand.
__device__ __forceinline__ void pack_half(u32 (&packed)[2][4], const float (&p)[8][4], int half) {
#pragma unroll
    for (int j = 0; j < 4; j++) pack_columns(packed, j, p[half * 4 + j]);
}
// Accumulated dK (times scale) and dV of this warp's sixteen keys, by way of shared memory that all warps are done with.
__device__ __forceinline__ void store_keys(bf16* grad_k, bf16* grad_v, const float (&dk)[8][4], const float (&dv)[8][4],
                                           float scale, u32 own, const Item& item, int kv_head, int kv_heads, int warp,
                                           int lane) {
    const u32 mine = own + warp * 16 * ROW_BYTES;
    __syncthreads();
    stage(mine, dk, scale, scale, lane);
    stage(mine + OWN_BYTES, dv, 1.f, 1.f, lane);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < CHUNKS / 2; i++) {
        const int r = i * (32 / CHUNKS) + lane / CHUNKS, p = item.first + warp * 16 + r;
        const u32 address = mine + chunk_address(r, lane % CHUNKS);
        if (p < item.end) {
            const long long target = ((long long)p * kv_heads + kv_head) * D + lane % CHUNKS * 8;
            *(uint4*)(grad_k + target) = shared_load16(address);
            *(uint4*)(grad_v + target) = shared_load16(address + OWN_BYTES);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 3)
backward_kv(const __grid_constant__ TensorMap map_q, const bf16* __restrict__ k, const bf16* __restrict__ v,
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
    const int last = WINDOW ? min(item.first + KEYS + WINDOW - 1, item.end) : item.end;   // no row from here on sees the keys
    const int steps = (last - item.first + POSITIONS - 1) / POSITIONS;
    const int from = item.first + first_step(item, steps) * POSITIONS;

    load_keys(own, own_v, k, v, item, kv_head, kv_heads, thread);
    commit();
    Ring<STAGES> ring(stages, stats + STAGES * STATS_BYTES);
    sum_shares(grad_sinks, shares, share_count, heads, thread, stats);
    int head0 = kv_head * HEADS_PER_KV, left, ahead;           // steps to fetch, position of the next
    auto fetch = [&]() {
        if (left > 0) {
            fetch_stats(stats + ring.next * STATS_BYTES, row_stats, ahead, head0, heads, item.end, thread);
            ring.fetch(&map_q, &map_grad, head0, ahead);
            ahead = following(ahead, item, last);
            left--;
        }
        commit();
    };
    left = steps, ahead = from;
    __syncthreads();                                           // the barriers are there
#pragma unroll
    for (int i = 0; i < AHEAD; i++) fetch();
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
            left = steps, ahead = from;
#pragma unroll
            for (int i = 0; i < AHEAD; i++) fetch();
        }
        int p0 = from;
        for (int t = 0; t < steps; t++, p0 = following(p0, item, last)) {
            wait<AHEAD - 1>();
            __syncthreads();                                   // step t's statistics have landed, and step t - 2 is used up
            fetch();
            ring.wait();
            if (p0 + POSITIONS > item.end) {
                zero_rows(ring.tiles(), (item.end - p0) * GROUP, thread);
                __syncthreads();
            }
            const u64 rows_q = describe(ring.tiles()), rows_g = rows_q + (WAVE_BYTES >> 4);
            const u32 step_stats = stats + (lane & 3) * 8 + ring.number * STATS_BYTES;
            constexpr u32 HALF = 32 * ROW_BYTES >> 4;          // the step's second 32 rows, in a descriptor
            float x[8][4], dp[4][4];
            u32 p[2][4], ds[2][4];
            // from this lane's first key to the position of its first column
            const int distance = p0 + 2 * (lane & 3) / GROUP - key0 - (lane >> 2);
            auto probabilities = [&](int half) {
                const int first = p0 + half * 32 / GROUP, final = p0 + (half * 32 + 31) / GROUP;
                if (first >= key0 + 15 && (!WINDOW || final - key0 < WINDOW))
                    half_probabilities<false>(x, step_stats, half, scale_log2, distance);
                else half_probabilities<true>(x, step_stats, half, scale_log2, distance);
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
            half_score_gradients(ds, x, dp, 0, step_stats);
            begin_inner(dk, ds, rows_q, add);
            warpgroup_fence();
            begin_rows(dp, value, rows_g + HALF);
            probabilities(1);
            warpgroup_wait<1>();                               // P and dS of the first half are used up
            pack_half(p, x, 1);
            begin_inner(dv, p, rows_g + HALF, true);
            finish<1>(dp);
            half_score_gradients(ds, x, dp, 1, step_stats);
            begin_inner(dk, ds, rows_q + HALF, true);
            add = true;
            ring.advance();
        }
    }
    finish<0>(dv, dk);
    store_keys(grad_k, grad_v, dk, dv, scale, stages, item, kv_head, kv_heads, warp, lane);
}
