// O and LSE of sliding-window attention with sinks. Grid: items * heads / GROUP blocks of 128 threads.
#include "march.cuh"

#ifndef STEP
#define STEP 3              // key blocks per softmax step
#endif
#ifndef RESIDENT
#define RESIDENT 2          // thread blocks per multiprocessor to aim at
#endif

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
window_forward(const bf16* __restrict__ q, const bf16* __restrict__ k, const bf16* __restrict__ v,
               const float* __restrict__ sinks, bf16* __restrict__ o, float* __restrict__ lse,
               const Item* __restrict__ items, int heads, float scale_log2, int chunk) {
    extern __shared__ __align__(128) unsigned char memory[];
    bf16* ring_k = (bf16*)memory;
    bf16* ring_v = ring_k + RING * 16 * D;
    bf16* rows = ring_v + RING * 16 * D;                       // two tiles of Q, then of O
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    const int groups = heads / GROUP, number = blockIdx.x / groups, group = blockIdx.x % groups;
    const Item item = items[number];
    const int head0 = group * GROUP, kv_head = group / GROUPS, kv_heads = heads / HEADS_PER_KV;
    const int end = min(item.first + chunk, item.end);
    const float sink = sinks[head0 + (lane >> 2) % GROUP] * LOG2E;

    int base = (item.first - item.start) / 16;                 // the tile's first own key block
    load_keys(ring_k, ring_v, k, v, item, max(0, base - HALO), base + NEW, kv_heads, kv_head, thread);
    load_rows(rows, q, item.first, item.end, heads, head0, thread);
    commit();
    int buffer = 0;
    for (int p0 = item.first; p0 < end; p0 += TILE, base += NEW, buffer ^= 1) {
        if (p0 + TILE < end) {
            load_keys(ring_k, ring_v, k, v, item, base + NEW, base + 2 * NEW, kv_heads, kv_head, thread);
            load_rows(rows + (buffer ^ 1) * ROWS * D, q, p0 + TILE, item.end, heads, head0, thread);
        }
        commit();
        wait<1>();
        __syncthreads();
        bf16* tile = rows + buffer * ROWS * D;
        u32 query[2][KSTEPS][4];
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int s = 0; s < KSTEPS; s++) load_left(query[m][s], tile, warp * 32 + m * 16, s, lane);
        float out[2][CHUNKS][4] = {}, highest[2][2], total[2][2] = {};
#pragma unroll
        for (int m = 0; m < 2; m++) highest[m][0] = highest[m][1] = fmaxf(sink, -1e30f);

#pragma unroll
        for (int first = 0; first < BLOCKS; first += STEP) {
            if (base + first + STEP - 1 - HALO < 0) continue;  // before the sequence's start
            float x[2][STEP][2][4];
#pragma unroll
            for (int j = 0; j < STEP; j++) {
                const int b = first + j;
                if (b >= BLOCKS) continue;
                const int block = base + b - HALO;
#pragma unroll
                for (int m = 0; m < 2; m++)
#pragma unroll
                    for (int e = 0; e < 4; e++) x[m][j][0][e] = x[m][j][1][e] = 0.f;
                const int slot = (u32)block % RING * 16;
                if (block >= 0 && concerns(b, warp)) {
#pragma unroll
                    for (int s = 0; s < KSTEPS; s++) {
                        u32 key[4];
                        load_rows_as_columns(key, ring_k, slot, s, lane);
#pragma unroll
                        for (int m = 0; m < 2; m++) {
                            multiply(x[m][j][0], query[m][s], key[0], key[1]);
                            multiply(x[m][j][1], query[m][s], key[2], key[3]);
                        }
                    }
                    if (needs_mask(b)) {
#pragma unroll
                        for (int m = 0; m < 2; m++)
#pragma unroll
                            for (int n = 0; n < 2; n++)
#pragma unroll
                                for (int e = 0; e < 4; e++) {
                                    int row = warp * 32 + m * 16 + (lane >> 2) + (e >> 1) * 8;
                                    int column = (b - HALO) * 16 + n * 8 + 2 * (lane & 3) + (e & 1);
                                    if (!visible(row, column)) x[m][j][n][e] = -infinity();
                                }
                    }
                } else {
#pragma unroll
                    for (int m = 0; m < 2; m++)
#pragma unroll
                        for (int e = 0; e < 4; e++) x[m][j][0][e] = x[m][j][1][e] = -infinity();
                }
            }
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float most = -infinity();
#pragma unroll
                    for (int j = 0; j < STEP; j++)
                        if (first + j < BLOCKS)
#pragma unroll
                            for (int n = 0; n < 2; n++) most = fmaxf(most, fmaxf(x[m][j][n][2 * h], x[m][j][n][2 * h + 1]));
                    const float now = fmaxf(highest[m][h], quad_max(most) * scale_log2);
                    const float decay = exp2_approx(highest[m][h] - now);
                    highest[m][h] = now;
                    float sum = total[m][h] * decay;
#pragma unroll
                    for (int j = 0; j < STEP; j++)
                        if (first + j < BLOCKS)
#pragma unroll
                            for (int n = 0; n < 2; n++)
#pragma unroll
                                for (int e = 2 * h; e < 2 * h + 2; e++) {
                                    x[m][j][n][e] = exp2_approx(fmaf(x[m][j][n][e], scale_log2, -now));
                                    sum += x[m][j][n][e];
                                }
                    total[m][h] = sum;
                    if (first > 0)
#pragma unroll
                        for (int n = 0; n < CHUNKS; n++) {
                            out[m][n][2 * h] *= decay;
                            out[m][n][2 * h + 1] *= decay;
                        }
                }
#pragma unroll
            for (int j = 0; j < STEP; j++) {
                const int b = first + j;
                if (b >= BLOCKS) continue;
                const int block = base + b - HALO;
                if (block < 0 || !concerns(b, warp)) continue;
                const int slot = (u32)block % RING * 16;
                u32 p[2][4];
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    p[m][0] = pack(x[m][j][0][0], x[m][j][0][1]);
                    p[m][1] = pack(x[m][j][0][2], x[m][j][0][3]);
                    p[m][2] = pack(x[m][j][1][0], x[m][j][1][1]);
                    p[m][3] = pack(x[m][j][1][2], x[m][j][1][3]);
                }
#pragma unroll
                for (int n = 0; n < KSTEPS; n++) {
                    u32 value[4];
                    load_rows_as_inner(value, ring_v, slot, n, lane);
#pragma unroll
                    for (int m = 0; m < 2; m++) {
                        multiply(out[m][2 * n], p[m], value[0], value[1]);
                        multiply(out[m][2 * n + 1], p[m], value[2], value[3]);
                    }
                }
            }
        }
#pragma unroll
        for (int m = 0; m < 2; m++) {
            float inverse[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float sum = quad_sum(total[m][h]) + exp2_approx(sink - highest[m][h]);
                inverse[h] = 1.f / sum;
                const int row = warp * 32 + m * 16 + h * 8 + (lane >> 2), p = p0 + tile_position(row);
                if ((lane & 3) == 0 && p < item.end)
                    lse[(long long)p * heads + head0 + row % GROUP] = (highest[m][h] + log2_approx(sum)) * LN2;
            }
            __syncwarp();
            stage(tile, warp * 32 + m * 16, out[m], inverse[0], inverse[1], lane);
        }
        __syncwarp();
        store_rows(o, tile, p0, item.end, heads, head0, warp, lane);
        __syncthreads();
    }
}
