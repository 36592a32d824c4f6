// dK and dV. A warp owns 16 keys, a block of four warps 64; rows of Q and dO stream past, WAVE at a time.
// Grid: items of 64 keys * kv heads, blocks of 128 threads. Sums run in a fixed order and nothing is added from outside the block.
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
struct Item { int start, end, first, unused; };    // sequence [start, end), this block's first key

struct Stage {
    bf16 q[WAVE * D], grad[WAVE * D];
    float lse[WAVE], delta[WAVE];
};

__device__ __forceinline__ void load_stage(Stage& stage, const bf16* q, const bf16* grad, const float* lse, const float* delta,
                                           int p0, int end, int heads, int head0, int thread) {
#pragma unroll
    for (int i = 0; i < WAVE * CHUNKS / THREADS; i++) {
        const int index = i * THREADS + thread, row = index / CHUNKS, c = index % CHUNKS, p = p0 + row / GROUP;
        const bool inside = p < end;
        const long long source = ((long long)(inside ? p : p0) * heads + head0 + row % GROUP) * D + c * 8;
        copy16(stage.q + swizzled(row, c), q + source, inside);
        copy16(stage.grad + swizzled(row, c), grad + source, inside);
    }
    for (int row = thread; row < WAVE; row += THREADS) {
        const int p = p0 + row / GROUP;
        const bool inside = p < end;
        const long long source = (long long)(inside ? p : p0) * heads + head0 + row % GROUP;
        copy4(stage.lse + row, lse + source, inside);
        copy4(stage.delta + row, delta + source, inside);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
window_backward_kv(const bf16* __restrict__ q, const bf16* __restrict__ k, const bf16* __restrict__ v,
                   const float* __restrict__ lse, const float* __restrict__ delta, const bf16* __restrict__ grad_o,
                   bf16* __restrict__ grad_k, bf16* __restrict__ grad_v, const Item* __restrict__ items, int heads,
                   float scale) {
    extern __shared__ __align__(128) unsigned char memory[];
    Stage* stages = (Stage*)memory;
    bf16* own_k = (bf16*)(stages + STAGES);                    // [KEYS, D], later dK
    bf16* own_v = own_k + KEYS * D;
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    const int kv_heads = heads / HEADS_PER_KV, kv_head = blockIdx.x % kv_heads;
    const Item item = items[blockIdx.x / kv_heads];
    const float scale_log2 = scale * LOG2E;
    const int last = min(item.first + KEYS + WINDOW - 1, item.end);   // one past the last query that sees these keys
    const int steps = (last - item.first + POSITIONS - 1) / POSITIONS, all = steps * GROUPS;

#pragma unroll
    for (int i = 0; i < KEYS * CHUNKS / THREADS; i++) {
        const int index = i * THREADS + thread, row = index / CHUNKS, c = index % CHUNKS, p = item.first + row;
        const bool inside = p < item.end;
        const long long source = ((long long)(inside ? p : item.first) * kv_heads + kv_head) * D + c * 8;
        copy16(own_k + swizzled(row, c), k + source, inside);
        copy16(own_v + swizzled(row, c), v + source, inside);
    }
    auto fetch = [&](int t) {
        if (t < all)
            load_stage(stages[t % STAGES], q, grad_o, lse, delta, item.first + t % steps * POSITIONS, item.end, heads,
                       kv_head * HEADS_PER_KV + t / steps * GROUP, thread);
        commit();
    };
#pragma unroll
    for (int t = 0; t < STAGES - 1; t++) fetch(t);

    u32 key[KSTEPS][4], value[KSTEPS][4];
    float dk[CHUNKS][4] = {}, dv[CHUNKS][4] = {};
    const int key0 = item.first + warp * 16;
    for (int t = 0; t < all; t++) {
        wait<STAGES - 2>();
        __syncthreads();                                       // step t has landed, and step t - 1 is used up
        fetch(t + STAGES - 1);
        if (t == 0)
#pragma unroll
            for (int s = 0; s < KSTEPS; s++) {
                load_left(key[s], own_k, warp * 16, s, lane);
                load_left(value[s], own_v, warp * 16, s, lane);
            }
        const int p0 = item.first + t % steps * POSITIONS;
        if (p0 + POSITIONS - 1 < key0 || p0 > key0 + 15 + WINDOW - 1) continue;
        const Stage& stage = stages[t % STAGES];
#pragma unroll
        for (int r = 0; r < WAVE; r += 16) {
            float x[2][4] = {}, dp[2][4] = {};
#pragma unroll
            for (int s = 0; s < KSTEPS; s++) {
                u32 a[4], g[4];
                load_rows_as_columns(a, stage.q, r, s, lane);
                load_rows_as_columns(g, stage.grad, r, s, lane);
                multiply(x[0], key[s], a[0], a[1]);
                multiply(x[1], key[s], a[2], a[3]);
                multiply(dp[0], value[s], g[0], g[1]);
                multiply(dp[1], value[s], g[2], g[3]);
            }
            u32 p[4], ds[4];
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const int column = r + n * 8 + 2 * (lane & 3);
                const float2 l = *(const float2*)(stage.lse + column), d = *(const float2*)(stage.delta + column);
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int distance = p0 + (column + (e & 1)) / GROUP - (key0 + (lane >> 2) + (e >> 1) * 8);
                    const float row_lse = (e & 1 ? l.y : l.x) * LOG2E, row_delta = e & 1 ? d.y : d.x;
                    float probability = exp2_approx(fmaf(x[n][e], scale_log2, -row_lse));
                    if ((u32)distance >= (u32)WINDOW) probability = 0.f;
                    x[n][e] = probability;
                    dp[n][e] = probability * (dp[n][e] - row_delta);
                }
                p[2 * n] = pack(x[n][0], x[n][1]);
                p[2 * n + 1] = pack(x[n][2], x[n][3]);
                ds[2 * n] = pack(dp[n][0], dp[n][1]);
                ds[2 * n + 1] = pack(dp[n][2], dp[n][3]);
            }
#pragma unroll
            for (int n = 0; n < KSTEPS; n++) {
                u32 a[4], g[4];
                load_rows_as_inner(g, stage.grad, r, n, lane);
                load_rows_as_inner(a, stage.q, r, n, lane);
                multiply(dv[2 * n], p, g[0], g[1]);
                multiply(dv[2 * n + 1], p, g[2], g[3]);
                multiply(dk[2 * n], ds, a[0], a[1]);
                multiply(dk[2 * n + 1], ds, a[2], a[3]);
            }
        }
    }
    stage(own_k, warp * 16, dk, scale, scale, lane);
    stage(own_v, warp * 16, dv, 1.f, 1.f, lane);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < CHUNKS / 2; i++) {
        const int index = i * 32 + lane, row = warp * 16 + index / CHUNKS, c = index % CHUNKS, p = item.first + row;
        if (p < item.end) {
            const long long target = ((long long)p * kv_heads + kv_head) * D + c * 8;
            *(uint4*)(grad_k + target) = *(const uint4*)(own_k + swizzled(row, c));
            *(uint4*)(grad_v + target) = *(const uint4*)(own_v + swizzled(row, c));
        }
    }
}
