// dK and dV. A warp owns 16 keys, a block of four warps 64; rows of Q and dO stream past, WAVE at a time.
// Grid: items of 64 keys * kv heads, blocks of 128 threads. Sums run in a fixed order, nothing is added from outside.
#include "tile.cuh"

#ifndef RESIDENT
#define RESIDENT 3
#endif
#ifndef WAVE
#define WAVE 64             // rows (positions x heads) of a step
#endif
#ifndef STAGES
#define STAGES 2
#endif

constexpr int THREADS = 128, KEYS = 64;
constexpr int HEADS_PER_KV = GROUP * GROUPS;
constexpr int POSITIONS = WAVE / GROUP;
constexpr u32 WAVE_BYTES = WAVE * ROW_BYTES, STAGE_BYTES = 2 * WAVE_BYTES, STATS_BYTES = WAVE * 8;
struct Item { int start, end, first, unused; };    // sequence [start, end), this block's first key

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
window_backward_kv(const bf16* __restrict__ q, const bf16* __restrict__ k, const bf16* __restrict__ v,
                   const float2* __restrict__ row_stats, const bf16* __restrict__ grad_o, bf16* __restrict__ grad_k,
                   bf16* __restrict__ grad_v, const Item* __restrict__ items, int heads, float scale) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 stages = shared_address(memory);                 // per stage Q, dO
    const u32 own = stages + STAGES * STAGE_BYTES;             // K, V of these keys; later dK, dV
    const u32 stats = own + 2 * KEYS * ROW_BYTES;              // per stage (LSE * log2(e), delta) of each row
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    const int kv_heads = heads / HEADS_PER_KV, kv_head = blockIdx.x % kv_heads;
    const Item item = items[blockIdx.x / kv_heads];
    const float scale_log2 = scale * LOG2E;
    const int last = min(item.first + KEYS + WINDOW - 1, item.end);   // one past the last query that sees these keys
    const int steps = (last - item.first + POSITIONS - 1) / POSITIONS, all = steps * GROUPS;

    constexpr int PASS = THREADS / CHUNKS;                     // rows that the block copies at once
    const int row = thread / CHUNKS, c = thread % CHUNKS;
    const u32 row_address = chunk_address(row, c);
    {
        const bf16* source_k = k + ((long long)(item.first + row) * kv_heads + kv_head) * D + c * 8;
        const bf16* source_v = v + (source_k - k);
#pragma unroll
        for (int i = 0; i < KEYS / PASS; i++) {
            const long long ahead = (long long)i * PASS * kv_heads * D;
            const bool inside = item.first + row + i * PASS < item.end;
            copy16(own + row_address + i * PASS * ROW_BYTES, source_k + ahead, inside);
            copy16(own + KEYS * ROW_BYTES + row_address + i * PASS * ROW_BYTES, source_v + ahead, inside);
        }
    }
    const long long row_source = ((long long)(row / GROUP) * heads + kv_head * HEADS_PER_KV + row % GROUP) * D + c * 8;
    const long long pass_stride = (long long)(PASS / GROUP) * heads * D;
    // Rows are visited from a place that neighbouring blocks share, so that they read the same rows at the same time.
    constexpr int PERIOD = (KEYS + WINDOW - 1 + KEYS - 1) / KEYS * KEYS / POSITIONS;
    const int rotation = (PERIOD - (item.first - item.start) / POSITIONS % PERIOD) % PERIOD;
    const int start = rotation < steps ? rotation : 0;
    int next = 0, next_step = start, next_group = 0;           // what to fetch
    u32 next_stage = 0;
    auto fetch = [&]() {
        if (next < all) {
            const int next_position = item.first + next_step * POSITIONS;
            const long long source = row_source + ((long long)next_position * heads + next_group * GROUP) * D;
            const u32 target = stages + next_stage * STAGE_BYTES + row_address;
#pragma unroll
            for (int i = 0; i < WAVE / PASS; i++) {
                const bool inside = next_position + row / GROUP + i * (PASS / GROUP) < item.end;
                copy16(target + i * PASS * ROW_BYTES, q + source + i * pass_stride, inside);
                copy16(target + i * PASS * ROW_BYTES + WAVE_BYTES, grad_o + source + i * pass_stride, inside);
            }
            if (thread < WAVE) {
                const int p = next_position + thread / GROUP;
                copy8(stats + next_stage * STATS_BYTES + thread * 8,
                      row_stats + (long long)p * heads + kv_head * HEADS_PER_KV + next_group * GROUP + thread % GROUP,
                      p < item.end);
            }
            if (++next_step == steps) next_step = 0;
            if (next_step == start) next_group++;
            next++;
            next_stage = next_stage + 1 == STAGES ? 0 : next_stage + 1;
        }
        commit();
    };
#pragma unroll
    for (int t = 0; t < STAGES - 1; t++) fetch();

    u32 key[KSTEPS][4], value[KSTEPS][4];
    float dk[CHUNKS][4] = {}, dv[CHUNKS][4] = {};
    const int key0 = item.first + warp * 16;
    const u32 at_columns = stages + lane_columns(lane), at_rows = stages + lane_rows(lane), at_stats = stats + (lane & 3) * 16;
    int step = start, stage_number = 0;
    for (int t = 0; t < all; t++) {
        wait<STAGES - 2>();
        __syncthreads();                                       // step t has landed, and step t - 1 is used up
        fetch();
        if (t == 0)
#pragma unroll
            for (int s = 0; s < KSTEPS; s++) {
                const u32 address = (own + warp * 16 * ROW_BYTES + lane_rows(lane)) ^ (s << 5);
                load4(key[s], address);
                load4(value[s], address + KEYS * ROW_BYTES);
            }
        const int p0 = item.first + step * POSITIONS;
        // from this lane's first key to the position of its first column
        const int distance = p0 + 2 * (lane & 3) / GROUP - key0 - (lane >> 2);
        const u32 stage_offset = stage_number * STAGE_BYTES;
        auto differentiate = [&](auto masked) {
#pragma unroll
            for (int r = 0; r < WAVE; r += 16) {
                float x[2][4] = {}, dp[2][4] = {};
                const u32 columns = at_columns + stage_offset + r * ROW_BYTES, inner = at_rows + stage_offset + r * ROW_BYTES;
#pragma unroll
                for (int s = 0; s < KSTEPS; s++) {
                    u32 a[4], g[4];
                    load4(a, columns ^ (s << 5));
                    load4(g, (columns ^ (s << 5)) + WAVE_BYTES);
                    multiply(x[0], key[s], a[0], a[1]);
                    multiply(x[1], key[s], a[2], a[3]);
                    multiply(dp[0], value[s], g[0], g[1]);
                    multiply(dp[1], value[s], g[2], g[3]);
                }
                u32 p[4], ds[4];
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    // (LSE, delta) of this lane's two columns
                    const float4 pair = shared_load4f(at_stats + stage_number * STATS_BYTES + (r + n * 8) * 8);
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        float probability = exp2_approx(fmaf(x[n][e], scale_log2, -(e & 1 ? pair.z : pair.x)));
                        if (decltype(masked)::value) {
                            const int further = (r + n * 8) / GROUP + (GROUP == 1 ? e & 1 : 0) - (e >> 1) * 8;
                            if ((u32)(distance + further) >= (u32)WINDOW) probability = 0.f;
                        }
                        x[n][e] = probability;
                        dp[n][e] = probability * (dp[n][e] - (e & 1 ? pair.w : pair.y));
                    }
                    p[2 * n] = pack(x[n][0], x[n][1]);
                    p[2 * n + 1] = pack(x[n][2], x[n][3]);
                    ds[2 * n] = pack(dp[n][0], dp[n][1]);
                    ds[2 * n + 1] = pack(dp[n][2], dp[n][3]);
                }
#pragma unroll
                for (int n = 0; n < KSTEPS; n++) {
                    u32 a[4], g[4];
                    load4_transposed(g, (inner ^ (n << 5)) + WAVE_BYTES);
                    load4_transposed(a, inner ^ (n << 5));
                    multiply(dv[2 * n], p, g[0], g[1]);
                    multiply(dv[2 * n + 1], p, g[2], g[3]);
                    multiply(dk[2 * n], ds, a[0], a[1]);
                    multiply(dk[2 * n + 1], ds, a[2], a[3]);
                }
            }
        };
        if (p0 >= key0 + 15 && p0 + POSITIONS - 1 - key0 < WINDOW) differentiate(Constant<0>());
        else if (p0 + POSITIONS > key0 && p0 < key0 + 15 + WINDOW) differentiate(Constant<1>());
        if (++step == steps) step = 0;
        stage_number = stage_number + 1 == STAGES ? 0 : stage_number + 1;
    }
    const u32 mine = own + warp * 16 * ROW_BYTES;
    __syncwarp();
    stage(mine, dk, scale, scale, lane);
    stage(mine + KEYS * ROW_BYTES, dv, 1.f, 1.f, lane);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < CHUNKS / 2; i++) {
        const int r = i * (32 / CHUNKS) + lane / CHUNKS, p = item.first + warp * 16 + r;
        const u32 address = mine + chunk_address(r, lane % CHUNKS);
        if (p < item.end) {
            const long long target = ((long long)p * kv_heads + kv_head) * D + lane % CHUNKS * 8;
            *(uint4*)(grad_k + target) = shared_load16(address);
            *(uint4*)(grad_v + target) = shared_load16(address + KEYS * ROW_BYTES);
        }
    }
}
